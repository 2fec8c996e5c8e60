"""Circulant attention: one set of weights over the cyclic shifts of the grid for each channel, by Fourier transforms.

    out[p] = silu(W x_p + b) * sum_s a[s] v[p + s],  a[s] = softmax_s(sum_p q[p] k[p + s] / sqrt(H W))

for every channel, with p + s taken modulo H and W. The number of heads has no effect on the grid. O(N dim log(N)).
Prefix tokens have no place on the grid: grid tokens do not depend on them, and they attend all tokens by softmax
attention with `num_heads` heads. The official code runs on square grids only and has no bias in the projections (here
`qkv_bias=False`). The 3 x 3 depthwise convolution that the authors' blocks add to the tokens before the norm belongs to
the block and is not here. Vision Transformers are Circulant Attention Learners, section 4,
https://arxiv.org/abs/2512.21542
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ._numerics import UNIT_SILU, is_empty, wide_dtype
from .base import QKVMixer, no_autocast, register_mixer
from .fourier import fft_flops
from .softmax import softmax_attention, softmax_naive

__all__ = ['Circulant', 'circulant_attention', 'circulant_naive']


def circulant_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, grid_size: tuple[int, int], scale: float
) -> torch.Tensor:
    """Every shift of keys and values written out; arguments as `circulant_attention`."""
    (H, W), P = grid_size, q.shape[2] - grid_size[0] * grid_size[1]
    token = torch.arange(H * W, device=q.device)
    y, x = token // W, token % W
    # the token at each place (columns) shifted by each offset (rows)
    shifted = (y[:, None] + y) % H * W + (x[:, None] + x) % W
    grid_q, grid_k, grid_v = q[:, :, P:], k[:, :, P:][:, :, shifted], v[:, :, P:][:, :, shifted]
    weights = ((grid_q.unsqueeze(2) * grid_k).sum(dim=3) / (H * W) ** 0.5).softmax(dim=2)  # (B, heads, H*W, d)
    grid = (weights.unsqueeze(3) * grid_v).sum(dim=2)
    mixed = torch.cat([softmax_naive(q[:, :, :P], k, v, scale), grid], dim=2)
    return mixed * gate / (1 + (-gate).exp())


def circulant_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, grid_size: tuple[int, int], scale: float
) -> torch.Tensor:
    """q, k, v and the gate before its silu (B, heads, P + H*W, d) -> (B, heads, P + H*W, d).

    `scale` is that of prefix queries. Computed in float32 or wider.
    """
    num_grid = grid_size[0] * grid_size[1]
    P = q.shape[2] - num_grid
    if is_empty(q):
        # a transform refuses it
        return v * gate
    with no_autocast(q):
        dtype = wide_dtype(q)
        spectra = [torch.fft.rfft2(_to_image(x[:, :, P:].to(dtype), grid_size)) for x in (q, k, v)]
        scores = torch.fft.irfft2(_correlate(spectra[0], spectra[1]), s=grid_size) / num_grid**0.5
        weights = scores.flatten(3).softmax(dim=-1).unflatten(3, grid_size)
        grid = torch.fft.irfft2(_correlate(torch.fft.rfft2(weights), spectra[2]), s=grid_size).flatten(3).mT
        if P:
            prefix = softmax_attention(q[:, :, :P].to(dtype), k.to(dtype), v.to(dtype), scale)
            grid = torch.cat([prefix, grid], dim=2)
        return (grid * F.silu(gate.to(dtype))).to(v.dtype)


def _to_image(x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """(B, heads, H*W, d) -> (B, heads, d, H, W)."""
    return x.mT.unflatten(3, grid_size)


def _correlate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The spectrum of sum_p a[p] b[p + s] from those of a and b."""
    return a.conj() * b


def _inverse_fft_flops(
    shape: tuple[int, ...], dims: list[int], *args: Any, out_shape: tuple[int, ...], **kwargs: Any
) -> int:
    return fft_flops(out_shape, dims)


if torch.ops.aten._fft_c2r not in flop_registry:
    register_flop_formula(torch.ops.aten._fft_c2r)(_inverse_fft_flops)


@register_mixer('circulant')
class Circulant(QKVMixer):
    """Circulant attention of every channel, times a gate of the token."""

    has_rope = False
    gate_bias = UNIT_SILU
    op = staticmethod(circulant_attention)
    op_naive = staticmethod(circulant_naive)

    def __init__(
        self, dim: int, num_heads: int, *, device: Device = None, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.gate = nn.Linear(dim, dim, device=device, dtype=dtype)

    # has_rope is False: there is no rope to take
    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:  # type: ignore[override]
        q, k, v = self.to_qkv(x, grid_size)
        gate = self.gate(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return self.project(self.op(q, k, v, gate, grid_size, self.scale))
