"""Magnitude-aware linear attention (MALA): scores that depend on the magnitude of the query, and sum to 1.

    out_i = (sum_j (beta_i s_ij - gamma_i / N) v_j + DWC(v)_i) * o_i
    s_ij = scale / N * phi(q_i) . phi(k_j),  phi(x) = elu(x) + 1
    gamma_i = sum_j s_ij,  beta_i = 1 + 1 / (gamma_i + 1e-6)

where o is a linear layer of the tokens. Linear in the number of tokens: O(N dim head_dim). As in the official code,
features are rotated by the row and the column of their token (RoPE) in s_ij, after gamma_i is computed without; the
first half of the channels of a head by the row and the second by the column, so that its width must be a multiple of 4.
Without rotation the weights of a token sum to 1. The factor scale / N is the code's too; `mean_scores=False` leaves out
N, as the paper does, and `scale=1` the scale. Without N the outputs grow with the number of tokens, and exceed float16
for large ones (of standard deviation 10). The convolution is on the grid, padded with zeros; prefix tokens are ordinary
tokens in the sums, without rotation and without convolution. The 3 x 3 depthwise convolution that the authors' blocks
add to the tokens before the norm belongs to the block and is not here. Rectifying Magnitude Neglect in Linear
Attention, https://arxiv.org/abs/2507.00698
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.types import Device

from ._grid_conv import GridConv, grid_conv_naive
from ._kernel_mixer import KernelMixer
from ._numerics import LOG2_E, dot_tokens, sum_products, wide_dtype
from ._qkv import split_heads
from ._recompute import recompute_heads
from ._rope import rotate_pairs
from .base import no_autocast, register_mixer

__all__ = ['MALA', 'mala_attention', 'mala_naive']

_EPS = 1e-6
_BASE = 10_000


def mala_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    scale: float,
    rope: bool,
) -> torch.Tensor:
    """The N x N attention matrix, and rotations as complex numbers; arguments as `mala_attention`."""
    (H, W), N, d = grid_size, *q.shape[2:]
    q, k = torch.where(q > 0, q + 1, q.exp()), torch.where(k > 0, k + 1, k.exp())
    gamma = (scale * q @ k.mT).sum(dim=-1, keepdim=True)
    if rope:
        frequencies = [_BASE ** -(i / max(d // 4 - 1, 1)) for i in range(d // 4)]
        places = [(y, x) for y in range(H) for x in range(W)]
        angles = [[y * f for f in frequencies] + [x * f for f in frequencies] for y, x in places]
        angles = torch.tensor([[0.0] * (d // 2)] * (N - H * W) + angles, dtype=q.dtype, device=q.device)
        rotation = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotation).flatten(-2) for x in (q, k)
        )
    out = ((1 + 1 / (gamma + _EPS)) * (scale * q @ k.mT) - gamma / N) @ v
    out = out if conv is None else out + grid_conv_naive(conv, v, grid_size)
    return out if gate is None else out * gate


def mala_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    scale: float,
    rope: bool,
) -> torch.Tensor:
    """q, k, v and gate (B, heads, N, d) -> (B, heads, N, d); the last H*W tokens are the grid.

    Features and sums are in float32 or wider.
    """
    # features before and after the rotation, and two forms of the output
    attend, num_elements = partial(_attend, grid_size=grid_size, scale=scale, rope=rope), 8 * q.shape[2] * q.shape[3]
    out = recompute_heads(attend, (q, k, v), num_elements)
    out = out if conv is None else out + conv(v, grid_size)
    return out.to(v.dtype) if gate is None else (out * gate).to(v.dtype)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int], scale: float, rope: bool
) -> torch.Tensor:
    """The weighted sums, in float32 or wider."""
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k, v_wide = _phi(q.to(dtype)), _phi(k.to(dtype)), v.to(dtype)
        gamma = dot_tokens(q, scale * k.sum(dim=2, keepdim=True))  # (B, heads, N, 1)
        mean = v_wide.mean(dim=2, keepdim=True)
        if rope:
            q, k = _rotate(q, grid_size), _rotate(k, grid_size)
        context = scale * sum_products(k, v_wide)  # (B, heads, d, d)
        return q @ context * (1 + 1 / (gamma + _EPS)) - gamma @ mean


def _phi(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1, which loses no digits where x is far below 0, and is several times faster than F.elu on a CPU."""
    positive = x.relu()
    # not clamp, whose gradient takes several times as long
    return (LOG2_E * (x - positive)).exp2() + positive


def _rotate(x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Rotate pairs of neighbouring channels of the grid tokens by angles that grow with their row or column."""
    (H, W), N, d = grid_size, *x.shape[2:]
    P = N - H * W
    frequencies = _BASE ** -torch.linspace(0, 1, d // 4, device=x.device, dtype=x.dtype)
    by_row, by_column = (torch.arange(n, device=x.device, dtype=x.dtype)[:, None] * frequencies for n in grid_size)
    angles = torch.cat([by_row[:, None].expand(-1, W, -1), by_column.expand(H, -1, -1)], dim=-1).flatten(0, 1)
    rotated = rotate_pairs(x[:, :, P:], angles)
    return torch.cat([x[:, :, :P], rotated], dim=2) if P else rotated


@register_mixer('mala')
class MALA(KernelMixer):
    """Magnitude-aware linear attention.

    `rope=False` leaves out the rotations, `gate=False` the factor o; `conv_size` is the side of the convolution, or 0
    for none. `mean_scores` divides the scores by the number of tokens. Raises ValueError if the width of a head does
    not fit the rotations.
    """

    has_own_rope = True
    start_arguments = {'center_keys': True, 'gate': False, 'rope': False}
    added_terms = ('conv.',)
    gate_bias = 1.0
    op = staticmethod(mala_attention)
    op_naive = staticmethod(mala_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rope: bool = True,
        gate: bool = True,
        mean_scores: bool = True,
        conv_size: int = 5,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rope and self.head_dim % 4:
            raise ValueError(
                f'The rotations of mala need heads whose width is a multiple of 4, and dim {dim} with {num_heads} '
                f'heads has {self.head_dim}; choose another num_heads or rope=False.'
            )
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.rope = rope
        self.mean_scores = mean_scores
        self.gate = nn.Linear(dim, dim, **dd) if gate else None
        self.conv = GridConv(dim, conv_size, **dd) if conv_size else None

    def mix_input(
        self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> torch.Tensor:
        gate = None if self.gate is None else split_heads(self.gate(x), self.num_heads)
        scale = self.scale / q.shape[2] if self.mean_scores else self.scale
        return self.op(q, k, v, gate, self.conv, grid_size, scale, self.rope)
