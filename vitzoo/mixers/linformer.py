"""Linformer: softmax attention over r learned sums of the keys and of the values.

    out_i = softmax(scale * q_i . (E^T K)) (F^T V),  E, F of shape (N, r)

Linear in the number of tokens: O(N r dim). E and F have a row for each token, so a layer is bound to its grid; on a new
one the rows of the grid are resampled in two dimensions and divided by the growth of the number of tokens, which keeps
the scale of the sums. Prefix tokens are ordinary tokens, whose rows do not change. With r = N and E = F = I it is
softmax attention. Linformer, equation 7 and section 4, https://arxiv.org/abs/2006.04768

The sums are linear, and so are the projections to keys and values, so by default the tokens are summed first and only
their r sums are projected: (E^T X) W instead of E^T (X W), which saves most of two of the four linear layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.types import Device

from ._grid import resample_rows
from ._qkv import LinearQKV, split_heads
from ._rope import Rope
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Linformer', 'linformer_attention', 'linformer_naive']


def linformer_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    proj_k: torch.Tensor | None,
    proj_v: torch.Tensor | None,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """The sums over tokens written out; arguments as `linformer_attention`."""
    if proj_k is not None and proj_v is not None:
        k = (proj_k.unsqueeze(-1) * k.unsqueeze(3)).sum(dim=2)  # (B, heads, r, d)
        v = (proj_v.unsqueeze(-1) * v.unsqueeze(3)).sum(dim=2)
    return softmax_naive(q, k, v, scale, None, dropout_p)


def linformer_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    proj_k: torch.Tensor | None,
    proj_v: torch.Tensor | None,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) and projections (heads or 1, N, r) -> (B, heads, N, d).

    Without projections, k and v (B, heads, r, d) are the sums.
    """
    if proj_k is not None and proj_v is not None:
        k, v = proj_k.mT @ k, proj_v.mT @ v
    return softmax_attention(q, k, v, scale, None, dropout_p)


@register_mixer('linformer')
class Linformer(QKVMixer):
    """Linformer attention with `rank` r.

    `share_kv` shares one projection between keys and values, `share_heads` between heads. `sum_first` sums tokens
    before it projects them, unless the sums are not fewer, or differ between heads, or keys are rotated, normalized or
    convolved; without it, the order is the paper's, whose published costs are higher.
    """

    attn_weights = True
    grid_bound = True
    op = staticmethod(linformer_attention)
    op_naive = staticmethod(linformer_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rank: int = 64,
        share_kv: bool = False,
        share_heads: bool = True,
        sum_first: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rank < 1:
            raise ValueError(f'rank of linformer must be at least 1, not {rank}.')
        self.rank, self.share_heads, self.sum_first = rank, share_heads, sum_first
        num_tokens = self.num_prefix_tokens + self.grid_size[0] * self.grid_size[1]
        shape = (1 if share_heads else num_heads, num_tokens, rank)
        self.proj_k = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.proj_v = None if share_kv else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        for name in self.projections():
            nn.init.uniform_(getattr(self, name), -(rank**-0.5), rank**-0.5)

    def projections(self) -> list[str]:
        """Names of the projections."""
        return ['proj_k'] if self.proj_v is None else ['proj_k', 'proj_v']

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None) -> torch.Tensor:
        if rope is not None or not self._can_sum_first(x.shape[1]):
            return super().forward(x, grid_size, rope)
        self.check_grid(grid_size)
        q, k, v = self._sum_and_project(x)
        return self.project(self.op(q, k, v, None, None, self.scale, self.dropout_p))

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        self.check_grid(grid_size)
        proj_v = self.proj_k if self.proj_v is None else self.proj_v
        return self.op(q, k, v, self.proj_k, proj_v, self.scale, self.dropout_p)

    def _can_sum_first(self, num_tokens: int) -> bool:
        """Return True if keys and values of fewer sums are those sums of keys and values."""
        qkv = self.qkv
        # a hook, such as one of pruning, sees the layer only if it runs, and another layer may not be linear
        is_plain = type(qkv) is LinearQKV and not (qkv._forward_hooks or qkv._forward_pre_hooks)
        is_linear = is_plain and isinstance(self.k_norm, nn.Identity)
        return self.sum_first and self.share_heads and is_linear and num_tokens > self.rank

    def _sum_and_project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens (B, N, dim) -> queries (B, heads, N, d), and sums of keys and of values (B, heads, r, d)."""
        q_weight, k_weight, v_weight = self.qkv.weight.chunk(3)
        q_bias, k_bias, v_bias = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
        projs = torch.cat([getattr(self, name)[0] for name in self.projections()], dim=1)  # (N, r or 2r)
        sums = (projs.mT @ x).split(self.rank, dim=1)
        totals = projs.sum(dim=0).split(self.rank)
        k, v = F.linear(sums[0], k_weight), F.linear(sums[-1], v_weight)  # (B, r, dim)
        if k_bias is not None:
            # a sum of tokens has the bias as often as the sum of its weights
            k, v = k + totals[0][:, None] * k_bias, v + totals[-1][:, None] * v_bias
        q = split_heads(F.linear(x, q_weight, q_bias), self.num_heads)
        # the totals are in float32 under autocast
        return q, split_heads(k.to(q.dtype), self.num_heads), split_heads(v.to(q.dtype), self.num_heads)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        old_size, P = self.grid_size, self.num_prefix_tokens
        super().set_input_size(grid_size)
        growth = self.grid_size[0] * self.grid_size[1] / (old_size[0] * old_size[1])
        for name in self.projections():
            rows = resample_rows(getattr(self, name), self.grid_size, old_size, P)
            rows.data[:, P:] /= growth
            setattr(self, name, rows)
