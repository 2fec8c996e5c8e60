"""Linear attention with ReLU features, reweighted by the cosine of the distance between tokens (cosFormer).

    out_i = sum_j s_ij v_j / max(sum_j s_ij, 1e-6),  s_ij = relu(q_i) . relu(k_j) cos(pi/2 (i - j) / M)

Linear in the number of tokens: O(N dim head_dim), as cos(a - b) = cos a cos b + sin a sin b. The paper is on text;
positions i and j are here those in the raster of the M grid tokens, so that a distance of one row counts W times as
much as one of a column. Prefix tokens have no position: the cosine is 1 for every pair with one. There is no scale of
the scores. A query without a positive channel gives 0. Rethinking Softmax in Attention,
https://arxiv.org/abs/2202.08791
"""

import math
from functools import partial

import torch
from torch.nn import functional as F

from ._kernel_mixer import KernelMixer
from ._numerics import wide_dtype
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer

__all__ = ['CosFormer', 'cosformer_attention', 'cosformer_naive']

_EPS = 1e-6


def cosformer_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """The N x N attention matrix with the cosine of each distance; arguments as `cosformer_attention`."""
    N, M = q.shape[2], grid_size[0] * grid_size[1]
    position = torch.arange(M, device=q.device)
    cosine = torch.ones(N, N, dtype=q.dtype, device=q.device)
    cosine[N - M :, N - M :] = (math.pi / 2 * (position[:, None] - position).to(q.dtype) / M).cos()
    attn = cosine * (q.relu() @ k.relu().mT)
    return attn @ v / attn.sum(dim=-1, keepdim=True).clamp(min=_EPS)


def cosformer_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider; the last H*W tokens are the grid."""
    # features without and with their angles, values and sums
    num_elements = 8 * q.shape[2] * q.shape[3]
    return recompute_heads(partial(_attend, grid_size=grid_size), (q, k, v), num_elements)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k = q.to(dtype).relu(), k.to(dtype).relu()
        # the normalizer is one more channel
        values = F.pad(v.to(dtype), (0, 1), value=1.0)  # (B, heads, N, d + 1)
        M = grid_size[0] * grid_size[1]
        P = q.shape[2] - M
        angles = (math.pi / 2 / M * torch.arange(M, device=q.device, dtype=dtype)).unsqueeze(-1)
        q_grid, k_grid = (torch.cat([x * angles.cos(), x * angles.sin()], dim=-1) for x in (q[:, :, P:], k[:, :, P:]))
        sums = q_grid @ (k_grid.mT @ values[:, :, P:])
        if P:
            prefix = k[:, :, :P].mT @ values[:, :, :P]
            everything = prefix + k[:, :, P:].mT @ values[:, :, P:]
            sums = torch.cat([q[:, :, :P] @ everything, sums + q[:, :, P:] @ prefix], dim=2)
        return (sums[..., :-1] / sums[..., -1:].clamp(min=_EPS)).to(v.dtype)


@register_mixer('cosformer')
class CosFormer(KernelMixer):
    """cosFormer attention, with positions in raster order."""

    op = staticmethod(cosformer_attention)
    op_naive = staticmethod(cosformer_naive)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, grid_size)
