"""FNet's Fourier transform: tokens are mixed by a discrete Fourier transform over positions and channels.

    out[u, w, c] = Re sum_{y, x, d} X[y, x, d] exp(-2 pi i (u y / H + w x / W + c d / C)) / sqrt(H W C)

There are no parameters. O(N dim log(N dim)). FNet transforms the sequence of tokens and the channels; here the sequence
is two dimensions, the rows and columns of the grid. Prefix tokens have no position: FNet's class token is the first of
the sequence, whose output is the zero frequency (the sum of all tokens), and here each prefix token's output is the
zero frequency of itself and the grid; grid tokens do not depend on prefix tokens. FNet normalizes after the residual
sum and leaves out the factor 1 / sqrt(H W C), which makes the transform unitary and so keeps the scale of the tokens
before the sum. FNet, section 3.2, https://arxiv.org/abs/2105.03824
"""

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ._numerics import is_empty, wide_dtype
from .base import ParameterFreeMixer, no_autocast, register_mixer

__all__ = ['Fourier', 'fft_flops', 'fourier', 'fourier_naive']


def fourier_naive(x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """The sums, one dimension at a time, with real and imaginary parts written out; arguments as `fourier`."""
    num_grid, C = grid_size[0] * grid_size[1], x.shape[-1]
    P = x.shape[1] - num_grid
    real = x[:, P:].unflatten(1, grid_size)
    imag = torch.zeros_like(real)
    for dim, size in ((1, grid_size[0]), (2, grid_size[1]), (3, C)):
        real, imag = _transform(real, imag, dim, size)
    zero, _ = _transform(x[:, :P] + x[:, P:].sum(dim=1, keepdim=True), torch.zeros_like(x[:, :P]), 2, C)
    return torch.cat([zero / math.sqrt((1 + num_grid) * C), real.flatten(1, 2) / math.sqrt(num_grid * C)], dim=1)


def _transform(real: torch.Tensor, imag: torch.Tensor, dim: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Discrete Fourier transform along one dimension by its matrix of cosines and sines."""
    index = torch.arange(size, device=real.device, dtype=real.dtype)
    angle = -2 * math.pi * index[:, None] * index / size
    real, imag = real.movedim(dim, -1), imag.movedim(dim, -1)
    out = real @ angle.cos() - imag @ angle.sin(), real @ angle.sin() + imag @ angle.cos()
    return out[0].movedim(-1, dim), out[1].movedim(-1, dim)


def fourier(x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Tokens (B, P + H*W, C) -> the same shape, in float32 or wider."""
    num_grid = grid_size[0] * grid_size[1]
    if is_empty(x):
        # a transform refuses it
        return x
    with no_autocast(x):
        wide = x.to(wide_dtype(x))
        prefix, grid = wide.split([x.shape[1] - num_grid, num_grid], dim=1)
        image = torch.fft.fftn(grid.unflatten(1, grid_size), dim=(1, 2, 3), norm='ortho').real
        image = image.flatten(1, 2).to(x.dtype)
        if prefix.shape[1] == 0:
            return image
        zero = (prefix + grid.sum(dim=1, keepdim=True)) / math.sqrt(1 + num_grid)
        zero = torch.fft.fft(zero, norm='ortho').real
        return torch.cat([zero.to(x.dtype), image], dim=1)


def fft_flops(shape: tuple[int, ...], dims: list[int], *args: Any, **kwargs: Any) -> int:
    """5 n log2(n) for a transform of n complex numbers: the textbook count of radix 2."""
    n = math.prod(shape[dim] for dim in dims)
    return int(5 * math.prod(shape) * math.log2(n))


# torch's FLOP counter has no formula for FFTs and would count none
for _op in (torch.ops.aten._fft_c2c, torch.ops.aten._fft_r2c):
    if _op not in flop_registry:
        register_flop_formula(_op)(fft_flops)


@register_mixer('fourier')
class Fourier(ParameterFreeMixer):
    """The real part of the Fourier transform of grid and channels; it has no projections and no heads."""

    op = staticmethod(fourier)
    op_naive = staticmethod(fourier_naive)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.proj_drop(self.op(x, grid_size))
