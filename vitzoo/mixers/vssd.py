"""VSSD: the state-space duality of Mamba-2 without its causal order, in which every token reads the same state.

    out_i = W_o (LN(y_i) * z_i),  y_i = C_i . (sum_j w_j B_j v_j^T) + D v_i,  w_j = softplus(dt_j + b) exp(A)

for each head, with B and C shared by all heads. v, B and C pass a 3 x 3 depthwise convolution and a silu; prefix tokens
bypass the convolution. The sum does not depend on the order of tokens, so prefix tokens are ordinary tokens of it.
There is no normalizer and no softmax, and z is a gate without an activation, as in the official code, whose input
projection has no bias (here `qkv_bias=False`) and whose output projection has none either. The 3 x 3 depthwise
convolutions that the authors' blocks add to the tokens before both norms belong to the block and are not here. Linear
in the number of tokens: O(N dim d_state). VSSD: Vision Mamba with Non-Causal State Space Duality, section 3.3,
https://arxiv.org/abs/2407.18559
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import GridConv
from ._numerics import wide_dtype
from ._qkv import split_heads
from ._recompute import recompute_heads
from ._wide_layers import WideLayerNorm
from .base import TokenMixer, no_autocast, register_mixer

__all__ = ['VSSD', 'state_space_duality', 'state_space_duality_naive']


def state_space_duality_naive(
    v: torch.Tensor,
    key: torch.Tensor,
    query: torch.Tensor,
    dt: torch.Tensor,
    log_a: torch.Tensor,
    skip: torch.Tensor,
    z: torch.Tensor,
    norm: nn.LayerNorm,
) -> torch.Tensor:
    """The N x N weights of all pairs; arguments as `state_space_duality`."""
    weights = (query @ key.mT).unsqueeze(1) * ((1 + dt.exp()).log() * log_a.exp()[:, None]).unsqueeze(2)
    y = (weights @ v + skip[:, None, None] * v).transpose(1, 2).flatten(2)
    variance, mean = torch.var_mean(y, dim=-1, keepdim=True, correction=0)
    return ((y - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias) * z


def state_space_duality(
    v: torch.Tensor,
    key: torch.Tensor,
    query: torch.Tensor,
    dt: torch.Tensor,
    log_a: torch.Tensor,
    skip: torch.Tensor,
    z: torch.Tensor,
    norm: nn.LayerNorm,
) -> torch.Tensor:
    """v (B, heads, N, d), B, C (B, N, d_state), dt + b (B, heads, N), A, D (heads,), z (B, N, heads * d) -> like z.

    Computed in float32 or wider, as the sum grows with the number of tokens.
    """
    with no_autocast(v):
        dtype = wide_dtype(v)
        key, query, dt, log_a, skip = (x.to(dtype) for x in (key, query, dt, log_a, skip))
        step = (F.softplus(dt) * log_a.exp()[:, None]).unsqueeze(3)
        tensors = v, key.unsqueeze(1), query.unsqueeze(1), step, skip[:, None, None].unsqueeze(0)
        # weighted values, and two terms of y
        y = recompute_heads(_apply_state, tensors, 3 * v.shape[2] * v.shape[3]).transpose(1, 2).flatten(2)
        return (norm(y) * z.to(dtype)).to(v.dtype)


def _apply_state(
    v: torch.Tensor, key: torch.Tensor, query: torch.Tensor, step: torch.Tensor, skip: torch.Tensor
) -> torch.Tensor:
    """y of the formula, for B and C (B, 1, N, d_state), dt A (B, heads, N, 1) and D (1, heads, 1, 1)."""
    with no_autocast(v):
        wide = v.to(step.dtype)
        state = key.mT @ (wide * step)  # (B, heads, d_state, d)
        return query @ state + skip * wide


@register_mixer('vssd')
class VSSD(TokenMixer):
    """Non-causal state-space duality with a state of `d_state` per channel and `expand` * dim channels.

    Raises ValueError if the channels cannot be divided by the heads.
    """

    op = staticmethod(state_space_duality)
    op_naive = staticmethod(state_space_duality_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        d_state: int = 64,
        expand: int = 2,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if d_state < 1 or expand < 1:
            raise ValueError(f'd_state and expand of vssd must be at least 1, not {d_state} and {expand}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        inner = expand * dim
        # z; v, B and C, which are convolved; dt
        self.sizes = (inner, inner + 2 * d_state, num_heads)
        self.d_state = d_state
        self.in_proj = nn.Linear(dim, sum(self.sizes), bias=qkv_bias, **dd)
        self.conv = GridConv(self.sizes[1], 3, **dd)
        self.log_a = nn.Parameter(torch.empty(num_heads, **dd))
        self.skip = nn.Parameter(torch.ones(num_heads, **dd))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, **dd))
        self.norm = WideLayerNorm(inner, **dd)
        self.proj = nn.Linear(inner, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_decay()

    def reset_decay(self) -> None:
        """Mamba-2's initialization: exp(A) between 1 and 16, and softplus(b) between 0.001 and 0.1."""
        with torch.no_grad():
            self.log_a.uniform_(1, 16).log_()
            step = self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
            # the inverse of softplus
            self.dt_bias.copy_(step + (-(-step).expm1()).log())

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        z, mixed, dt = self.in_proj(x).split(self.sizes, dim=-1)
        P = self.num_prefix_tokens
        convolved = self.conv(mixed.unsqueeze(1), grid_size).squeeze(1)
        mixed = F.silu(torch.cat([mixed[:, :P], convolved[:, P:].to(mixed.dtype)], dim=1))
        v, key, query = mixed.split([self.sizes[0], self.d_state, self.d_state], dim=-1)
        v, dt = split_heads(v, self.num_heads), (dt + self.dt_bias).mT
        return self.proj_drop(self.proj(self.op(v, key, query, dt, self.log_a, self.skip, z, self.norm)))

    def no_weight_decay(self) -> set[str]:
        return {'log_a', 'skip', 'dt_bias'}
