"""SOFT: attention by a Gaussian kernel of queries that are also the keys, without softmax, from landmarks.

    out = conv(v) + K_QL (K_LL + I / 100)^-1 K_LQ v,  K_ab = exp(-|a - b|^2 / 2),  Q = q / head_dim^(1/4)

The landmarks L come from a convolution of Q in each head with stride r, a layer norm and a GELU. The inverse is that of
20 Newton steps W <- 2 W - W A W per head, from 1.8 A / |K_LL|^2 with the largest sum of a row as |K_LL|. Its gradient
is that of these steps; the authors take that of an exact inverse. conv has one kernel per head, by default 3 x 3, in
the authors' stages 9 x 9, 5 x 5 and 3 x 3. The authors take r = 8, 4 and 2 in the stages of their models, which gives
49 landmarks at 224 x 224 pixels. Grids that r does not divide are padded with zeros. Prefix tokens are ordinary tokens
of the kernel and part of no landmark. With m landmarks, O(N m dim + m^3 heads): m grows with N unless r grows with the
side of the grid. The authors' later version, normalized, divides by the largest sum of the whole batch, so that an
image depends on the others; it is not provided. SOFT: Softmax-free Transformer with Linear Complexity, section 3,
https://arxiv.org/abs/2110.11945
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import GridConv, grid_conv_naive
from ._numerics import pad, wide_dtype
from ._wide_layers import WideConv2d, WideLayerNorm
from .base import QKVMixer, no_autocast, register_mixer

__all__ = ['SOFT', 'gaussian_attention', 'gaussian_naive']

_JITTER = 0.01
_NEWTON_STEPS = 20


def gaussian_naive(
    q: torch.Tensor,
    v: torch.Tensor,
    landmarks: nn.Conv2d,
    norm: nn.LayerNorm,
    conv: GridConv,
    grid_size: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """The kernels from differences of vectors, and landmarks patch by patch; arguments as `gaussian_attention`."""
    P, r = q.shape[2] - grid_size[0] * grid_size[1], landmarks.stride[0]
    q = q * scale**0.5
    image = q[:, :, P:].unflatten(2, grid_size)
    patches = []
    for top in range(0, grid_size[0], r):
        for left in range(0, grid_size[1], r):
            patch = image[:, :, top : top + r, left : left + r]
            weight = landmarks.weight[:, :, : patch.shape[2], : patch.shape[3]]
            patches.append(torch.einsum('bhyxc,dcyx->bhd', patch, weight))
    points = F.gelu(F.layer_norm(torch.stack(patches, dim=2), norm.normalized_shape, norm.weight, norm.bias, norm.eps))

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (-(a.unsqueeze(3) - b.unsqueeze(2)).square().sum(dim=-1) / 2).exp()

    own = kernel(points, points)
    shifted = own + _JITTER * torch.eye(own.shape[-1], dtype=q.dtype, device=q.device)
    inverse = 1.8 / own.sum(dim=-1).amax(dim=-1)[:, :, None, None] ** 2 * shifted
    for _ in range(_NEWTON_STEPS):
        inverse = 2 * inverse - inverse @ shifted @ inverse
    across = kernel(q, points)
    return across @ inverse @ across.mT @ v + _convolve(v, conv, grid_size, grid_conv_naive)


def gaussian_attention(
    q: torch.Tensor,
    v: torch.Tensor,
    landmarks: nn.Conv2d,
    norm: nn.LayerNorm,
    conv: GridConv,
    grid_size: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """q, v (B, heads, P + H*W, d) -> (B, heads, P + H*W, d), in float32 or wider.

    `landmarks` is the convolution with stride r from queries to landmarks, and `norm` follows it.
    """
    P = q.shape[2] - grid_size[0] * grid_size[1]
    with no_autocast(q):
        dtype = wide_dtype(q)
        wide = v.to(dtype)
        q = q.to(dtype) * scale**0.5
        points = _landmarks(q[:, :, P:], landmarks, norm, grid_size)
        own = _gaussian_kernel(points, points)
        norms = own.sum(dim=-1).amax(dim=-1)[:, :, None, None]
        shifted = own + _JITTER * torch.eye(own.shape[-1], dtype=dtype, device=q.device)
        inverse = shifted * (1.8 / norms.square())
        for _ in range(_NEWTON_STEPS):
            inverse = 2 * inverse - inverse @ (shifted @ inverse)
        across = _gaussian_kernel(q, points)
        out = across @ (inverse @ (across.mT @ wide))
    return out.to(v.dtype) + _convolve(v, conv, grid_size, GridConv.__call__).to(v.dtype)


def _landmarks(q: torch.Tensor, landmarks: nn.Conv2d, norm: nn.LayerNorm, grid_size: tuple[int, int]) -> torch.Tensor:
    """Queries (B, heads, H*W, d) -> landmarks (B, heads, m, d)."""
    heads, r = q.shape[1], landmarks.stride[0]
    image = q.mT.unflatten(3, grid_size).flatten(0, 1)  # (B * heads, d, H, W)
    image = pad(image, (0, -grid_size[1] % r, 0, -grid_size[0] % r))
    return F.gelu(norm(landmarks(image).flatten(2).mT)).unflatten(0, (-1, heads))


def _gaussian_kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """exp(-|a - b|^2 / 2) of all pairs of a (B, heads, N, d) and b (B, heads, M, d)."""
    half_a, half_b = (x.square().sum(dim=-1, keepdim=True) / 2 for x in (a, b))
    # rounding may give a distance below 0
    return (a @ b.mT - half_a - half_b.mT).clamp(max=0).exp()


def _convolve(
    v: torch.Tensor, conv: GridConv, grid_size: tuple[int, int], convolve: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Convolve v (B, heads, N, d) with one kernel per head: to the convolution, channels are heads."""
    return convolve(conv, v.transpose(1, 3), grid_size).transpose(1, 3)


@register_mixer('soft')
class SOFT(QKVMixer):
    """Softmax-free attention with landmarks of `ratio` x `ratio` tokens; `conv_size` is the side of the convolution."""

    op = staticmethod(gaussian_attention)
    op_naive = staticmethod(gaussian_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        ratio: int = 4,
        conv_size: int = 3,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, shared_qk=True, device=device, dtype=dtype, **kwargs)
        if ratio < 1:
            raise ValueError(f'ratio of soft must be at least 1, not {ratio}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.landmarks = WideConv2d(self.head_dim, self.head_dim, ratio, stride=ratio, bias=False, **dd)
        self.norm = WideLayerNorm(self.head_dim, **dd)
        self.conv = GridConv(num_heads, conv_size, bias=False, **dd)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, v, self.landmarks, self.norm, self.conv, grid_size, self.scale)
