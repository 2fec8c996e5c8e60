"""Gated linear attention: a state that decays by a factor which depends on the token, along the raster and back.

    out_i = W_o (silu(W_r x_i) * LN(y_i)),  y_i = scale * sum_j (q_i * D_ij) . k_j v_j,
    D_ij = product of a_t over the tokens t from j to i, without j,  a_t = sigmoid(W_2 W_1 x_t + b)^(1 / 16)

for each head, with a factor per channel of the keys, and * per channel. In text only tokens j <= i are summed; an image
has no order, so the sum is over both directions along the raster of the grid, each with a factor a of its own, and the
token itself counts once. Prefix tokens have no place in the raster: every token reads them and they read every token
without decay. Linear in the number of tokens: O(N dim head_dim), in chunks of 32 tokens. The authors' package fla has
keys of half the width (expand_k=0.5), a root mean square norm in place of LN, and no biases but that of a. Gated Linear
Attention Transformers with Hardware-Efficient Training, section 4, https://arxiv.org/abs/2312.06635; both directions:
ViG, https://arxiv.org/abs/2405.18425, whose mean of two passes counts the token itself twice
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._gated_scan import TEMPERATURE, gated_scan
from ._numerics import UNIT_SILU
from ._qkv import split_heads
from ._rope import Rope
from ._wide_layers import WideLayerNorm
from .base import QKVMixer, no_autocast, register_mixer

__all__ = ['GatedLinear', 'gated_linear_attention', 'gated_linear_naive']

_EPS = 1e-5


def gated_linear_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    decay_back: torch.Tensor,
    gate: torch.Tensor,
    norm: nn.LayerNorm,
    scale: float,
) -> torch.Tensor:
    """The recurrence of the state, token by token; arguments as `gated_linear_attention`."""
    P = q.shape[2] - decay.shape[2]
    pairs = k.unsqueeze(4) * v.unsqueeze(3)  # (B, heads, N, d, d)
    prefix, grid = pairs[:, :, :P].sum(dim=2), pairs[:, :, P:]
    states = []
    for logits, order in ((decay, range(grid.shape[2])), (decay_back, reversed(range(grid.shape[2])))):
        factor = (1 + (-logits).exp()) ** (-1 / TEMPERATURE)
        state = torch.zeros_like(prefix)
        of_token = [state] * grid.shape[2]
        for t in order:
            state = factor[:, :, t].unsqueeze(3) * state + grid[:, :, t]
            of_token[t] = state
        states.append(torch.stack(of_token, dim=2))
    own = torch.cat([grid.sum(dim=2, keepdim=True).expand(-1, -1, P, -1, -1), states[0] + states[1] - grid], dim=2)
    y = scale * (q.unsqueeze(3) @ (own + prefix.unsqueeze(2))).squeeze(3)
    variance, mean = torch.var_mean(y, dim=-1, keepdim=True, correction=0)
    return ((y - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias) * gate / (1 + (-gate).exp())


def gated_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    decay_back: torch.Tensor,
    gate: torch.Tensor,
    norm: nn.LayerNorm,
    scale: float,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d) -> (B, heads, P + H*W, d), in float32 or wider.

    `decay` and `decay_back` (B, heads, H*W, d) are the logits of a in both directions, `gate` those of the output, like
    v; `norm` is the layer norm of a head.
    """
    P, out_dtype = q.shape[2] - decay.shape[2], v.dtype
    with no_autocast(q):
        grid = q[:, :, P:], k[:, :, P:], v[:, :, P:]
        y = gated_scan(*grid, decay, decay_back, scale)
        dtype = y.dtype
        if P:
            q, k, v = scale * q.to(dtype), k.to(dtype), v.to(dtype)
            from_prefix = q[:, :, :P] @ (k[:, :, P:].mT @ v[:, :, P:])
            y = torch.cat([from_prefix, y], dim=2) + q @ (k[:, :, :P].mT @ v[:, :, :P])
        # (B, N, heads, d), the order in memory
        y, gate = y.transpose(1, 2), gate.transpose(1, 2).to(dtype)
        y = norm(y) * F.silu(gate)
        return y.transpose(1, 2).to(out_dtype)


@register_mixer('gated_linear')
class GatedLinear(QKVMixer):
    """Gated linear attention in both directions of the raster, with decay factors from `rank` numbers per token."""

    gate_bias = UNIT_SILU
    op = staticmethod(gated_linear_attention)
    op_naive = staticmethod(gated_linear_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rank: int = 16,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rank < 1:
            raise ValueError(f'rank of gated_linear must be at least 1, not {rank}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        # both directions, and the output gate
        self.decay = nn.Sequential(nn.Linear(dim, rank, bias=False, **dd), nn.Linear(rank, 2 * dim, **dd))
        self.gate = nn.Linear(dim, dim, **dd)
        self.norm = WideLayerNorm(self.head_dim, eps=_EPS, **dd)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None) -> torch.Tensor:
        q, k, v = self.to_qkv(x, grid_size, rope)
        decays = self.decay(x[:, self.num_prefix_tokens :]).chunk(2, dim=-1)
        decay, decay_back = (split_heads(part, self.num_heads) for part in decays)
        gate = split_heads(self.gate(x), self.num_heads)
        out = self.op(q, k, v, decay, decay_back, gate, self.norm, self.scale)
        return self.project(out)
