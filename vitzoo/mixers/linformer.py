"""Linformer: softmax attention over r learned sums of the keys and of the values.

    out_i = softmax(scale * q_i . (E^T K)) (F^T V),  E, F of shape (N, r)

Linear in the number of tokens: O(N r dim). E and F have a row for each token, so a layer is bound to its grid; on a new
one the grid's rows are resampled in two dimensions and divided by how many times more there are, so that sums keep
their size, and the rows of prefix tokens, which are ordinary tokens, stay. With r = N and identities for E and F it is
softmax attention. Linformer, equation 7 and section 4, https://arxiv.org/abs/2006.04768
"""

import torch
from torch import nn
from torch.nn import functional as F

from ._qkv import LinearQKV, split_heads
from ._resample import resample_rows
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Linformer', 'linformer_attention', 'linformer_naive']


def linformer_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, proj_k: torch.Tensor, proj_v: torch.Tensor, scale: float,
    dropout_p: float = 0.0, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Every sum over the tokens written out; arguments as `linformer_attention`."""
    if weight is not None:
        k = split_heads(F.linear(k, weight, bias).chunk(2, dim=-1)[0], q.shape[1])
        v = split_heads(F.linear(v, weight, bias).chunk(2, dim=-1)[1], q.shape[1])
    k_sums = (proj_k.unsqueeze(-1) * k.unsqueeze(3)).sum(dim=2)  # (B, heads, r, d)
    v_sums = (proj_v.unsqueeze(-1) * v.unsqueeze(3)).sum(dim=2)
    return softmax_naive(q, k_sums, v_sums, scale, None, dropout_p)


def linformer_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, proj_k: torch.Tensor, proj_v: torch.Tensor, scale: float,
    dropout_p: float = 0.0, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """q, k, v (B, heads, N, d) and projections (heads or 1, N, r) -> (B, heads, N, d).

    With `weight` (2C, C) and `bias`, k and v are the tokens (B, N, C), both the same, from which these project keys and
    values for all heads; then r sums of tokens are projected instead of N tokens.
    """
    if weight is None:
        return softmax_attention(q, proj_k.mT @ k, proj_v.mT @ v, scale, None, dropout_p)
    biases = (None, None) if bias is None else bias.chunk(2)
    k, v = (
        split_heads(_project_sums(proj[0].mT, x, half, half_bias), q.shape[1])
        for proj, x, half, half_bias in zip((proj_k, proj_v), (k, v), weight.chunk(2), biases)
    )
    return softmax_attention(q, k, v, scale, None, dropout_p)


def _project_sums(proj: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """proj (x weight^T + bias) of tokens (B, N, C), from the right: (B, r, C)."""
    out = F.linear(proj @ x, weight)
    return out if bias is None else out + proj.sum(dim=1, keepdim=True) * bias


@register_mixer('linformer')
class Linformer(QKVMixer):
    """Linformer attention with `rank` r; keys and values share one projection with `share_kv`, heads with
    `share_heads`."""

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
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rank < 1:
            raise ValueError(f'rank of linformer must be at least 1, not {rank}.')
        num_tokens = self.num_prefix_tokens + self.grid_size[0] * self.grid_size[1]
        shape = (1 if share_heads else num_heads, num_tokens, rank)
        self.proj_k = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.proj_v = None if share_kv else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        for name in self.projections():
            nn.init.uniform_(getattr(self, name), -(rank**-0.5), rank**-0.5)

    def projections(self) -> list[str]:
        """The names of the projections that there are."""
        return ['proj_k'] if self.proj_v is None else ['proj_k', 'proj_v']

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        if not self.sums_first(x):
            return super().forward(x, grid_size)
        self.check_grid(grid_size)
        weight, bias = self.qkv.weight, self.qkv.bias
        q = split_heads(F.linear(x, weight[: self.dim], None if bias is None else bias[: self.dim]), self.num_heads)
        weight, bias = weight[self.dim :], None if bias is None else bias[self.dim :]
        x = self.op(q, x, x, self.proj_k, self.projection_v(), self.scale, self.dropout_p, weight, bias)
        return self.project(x)

    def sums_first(self, x: torch.Tensor) -> bool:
        """Whether tokens can be summed up before they are projected to keys and values, and whether that is less work.

        Costs, which are counted on the meta device, are those of the paper's order.
        """
        is_plain = type(self.qkv) is LinearQKV and isinstance(self.k_norm, nn.Identity)
        return is_plain and self.proj_k.shape[0] == 1 and self.proj_k.shape[-1] < x.shape[1] and not x.is_meta

    def projection_v(self) -> nn.Parameter:
        """The projection of the values, which may be that of the keys."""
        return self.proj_k if self.proj_v is None else self.proj_v

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        self.check_grid(grid_size)
        return self.op(q, k, v, self.proj_k, self.projection_v(), self.scale, self.dropout_p)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        old_size, P = self.grid_size, self.num_prefix_tokens
        super().set_input_size(grid_size)
        growth = self.grid_size[0] * self.grid_size[1] / (old_size[0] * old_size[1])
        for name in self.projections():
            rows = resample_rows(getattr(self, name), self.grid_size, old_size, P)
            rows.data[:, P:] /= growth
            setattr(self, name, rows)
