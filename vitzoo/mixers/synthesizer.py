"""Synthesizer: softmax attention whose scores are not products of queries and keys.

    out_i = sum_j softmax_j(scores_ij) v_j, per head

* dense: scores_ij = w_j . relu(W x_i) + b_j, a vector w_j for each token j; parameters O(N dim)
* random: scores are parameters, O(heads N^2)
* factorized_dense: scores_ij = row_i[y_j] column_i[x_j], with row_i and column_i synthesised as the dense scores are,
  for each of the H rows and W columns; O((H + W) dim)
* factorized_random: scores = A B^T with A, B of shape (N, rank); O(heads N rank)

Quadratic in the number of tokens: O(N^2 dim). The paper factorizes the N positions of a text into a x b = N and tiles
the two vectors; on a grid that factorization is H x W. The authors' code shares w_j between heads. Prefix tokens are
ordinary tokens with their own parameters; as keys of factorized_dense they have no row and column and are synthesised
densely. All variants are bound to the grid: on a new one, parameters of tokens are resampled in two dimensions, and
parameters of rows and columns in one. Synthesizer, section 3, https://arxiv.org/abs/2005.00743
"""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._grid import resample_rows
from ._numerics import wide_dtype
from ._qkv import split_heads, split_qkv
from .base import TokenMixer, register_mixer

__all__ = ['Synthesizer', 'synthesizer', 'synthesizer_naive']


def synthesizer_naive(x: torch.Tensor, v: torch.Tensor, scores: '_Scores', dropout_p: float = 0.0) -> torch.Tensor:
    """The scores of each variant key by key, then softmax attention; arguments as `synthesizer`."""

    def synthesize(layer: nn.Linear, keys: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        hidden = (x @ layer.weight.T + layer.bias).clamp(min=0).unflatten(2, (v.shape[1], -1))
        columns = [(hidden * keys[:, j]).sum(dim=-1) + bias[:, j, 0] for j in range(keys.shape[1])]  # (B, N, heads)
        return torch.stack(columns, dim=-1).transpose(1, 2)

    if isinstance(scores, _RandomScores):
        s = scores.table
    elif isinstance(scores, _FactorizedRandomScores):
        s = torch.einsum('hir,hjr->hij', scores.queries, scores.keys)
    elif isinstance(scores, _DenseScores):
        s = synthesize(scores.hidden, scores.keys, scores.bias)
    else:
        row = synthesize(scores.hidden, scores.row, scores.row_bias)
        column = synthesize(scores.hidden, scores.column, scores.column_bias)
        products = [row[..., i] * column[..., j] for i in range(row.shape[-1]) for j in range(column.shape[-1])]
        s = torch.stack(products, dim=-1)
        if scores.prefix is not None and scores.prefix_bias is not None:
            s = torch.cat([synthesize(scores.hidden, scores.prefix, scores.prefix_bias), s], dim=-1)
    s = (s - s.amax(dim=-1, keepdim=True)).exp()
    return F.dropout(s / s.sum(dim=-1, keepdim=True), dropout_p) @ v


def synthesizer(x: torch.Tensor, v: torch.Tensor, scores: '_Scores', dropout_p: float = 0.0) -> torch.Tensor:
    """Tokens x (B, N, dim), values v (B, heads, N, d) and the module of a variant's scores -> (B, heads, N, d)."""
    s = scores(x)
    attn = s.softmax(dim=-1, dtype=wide_dtype(s)).to(v.dtype)
    return F.dropout(attn, dropout_p) @ v


class _DenseScores(nn.Module):
    """Scores from each token alone, (B, heads, N, N)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int],
        num_prefix_tokens: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_tokens = num_prefix_tokens + grid_size[0] * grid_size[1]
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.num_prefix_tokens = num_prefix_tokens
        self.hidden = nn.Linear(dim, dim, **dd)
        self.keys = nn.Parameter(torch.empty(num_heads, num_tokens, dim // num_heads, **dd))
        self.bias = nn.Parameter(torch.zeros(num_heads, num_tokens, 1, **dd))
        trunc_normal_(self.keys, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = split_heads(F.relu(self.hidden(x)), self.num_heads)
        return hidden @ self.keys.mT + self.bias.mT

    def resample(self, new_size: tuple[int, int], old_size: tuple[int, int]) -> None:
        """Resample the keys to a new grid."""
        for name in ('keys', 'bias'):
            setattr(self, name, resample_rows(getattr(self, name), new_size, old_size, self.num_prefix_tokens))


class _FactorizedDenseScores(nn.Module):
    """Products of a row's and a column's score, both from each token alone, (B, heads, N, N)."""

    row: nn.Parameter
    row_bias: nn.Parameter
    column: nn.Parameter
    column_bias: nn.Parameter
    prefix: nn.Parameter | None
    prefix_bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int],
        num_prefix_tokens: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.hidden = nn.Linear(dim, dim, **dd)
        self.prefix = self.prefix_bias = None
        for name, size in (('prefix', num_prefix_tokens), ('row', grid_size[0]), ('column', grid_size[1])):
            if size:
                keys = nn.Parameter(torch.empty(num_heads, size, dim // num_heads, **dd))
                setattr(self, name, trunc_normal_(keys, std=0.02))
                setattr(self, f'{name}_bias', nn.Parameter(torch.zeros(num_heads, size, 1, **dd)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = split_heads(F.relu(self.hidden(x)), self.num_heads)
        row = hidden @ self.row.mT + self.row_bias.mT  # (B, heads, N, H)
        column = hidden @ self.column.mT + self.column_bias.mT
        grid = (row.unsqueeze(-1) * column.unsqueeze(-2)).flatten(3)
        if self.prefix is None or self.prefix_bias is None:
            return grid
        return torch.cat([hidden @ self.prefix.mT + self.prefix_bias.mT, grid], dim=-1)

    def resample(self, new_size: tuple[int, int], old_size: tuple[int, int]) -> None:
        """Resample rows and columns to a new grid."""
        for axis, size in zip(('row', 'column'), new_size, strict=True):
            for name in (axis, f'{axis}_bias'):
                old = getattr(self, name)
                new = F.interpolate(old.data.float().mT, size=size, mode='linear').mT.to(old.dtype)
                setattr(self, name, nn.Parameter(new.contiguous(), requires_grad=old.requires_grad))


class _RandomScores(nn.Module):
    """Scores that are parameters, (heads, N, N)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int],
        num_prefix_tokens: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_tokens = num_prefix_tokens + grid_size[0] * grid_size[1]
        self.num_prefix_tokens = num_prefix_tokens
        self.table = nn.Parameter(torch.empty(num_heads, num_tokens, num_tokens, device=device, dtype=dtype))
        trunc_normal_(self.table, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table

    def resample(self, new_size: tuple[int, int], old_size: tuple[int, int]) -> None:
        """Resample queries, then keys, to a new grid."""
        for _ in range(2):
            table = resample_rows(self.table, new_size, old_size, self.num_prefix_tokens)
            self.table = nn.Parameter(table.data.mT.contiguous(), requires_grad=table.requires_grad)


class _FactorizedRandomScores(nn.Module):
    """Scores that are parameters of low rank, (heads, N, N)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int],
        num_prefix_tokens: int,
        rank: int = 8,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_tokens = num_prefix_tokens + grid_size[0] * grid_size[1]
        self.num_prefix_tokens = num_prefix_tokens
        self.queries = nn.Parameter(torch.empty(num_heads, num_tokens, rank, device=device, dtype=dtype))
        self.keys = nn.Parameter(torch.empty(num_heads, num_tokens, rank, device=device, dtype=dtype))
        trunc_normal_(self.queries, std=0.02)
        trunc_normal_(self.keys, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.queries @ self.keys.mT

    def resample(self, new_size: tuple[int, int], old_size: tuple[int, int]) -> None:
        """Resample both factors to a new grid."""
        for name in ('queries', 'keys'):
            setattr(self, name, resample_rows(getattr(self, name), new_size, old_size, self.num_prefix_tokens))


_Scores = _DenseScores | _FactorizedDenseScores | _RandomScores | _FactorizedRandomScores
_SCORES = {
    'dense': _DenseScores,
    'random': _RandomScores,
    'factorized_dense': _FactorizedDenseScores,
    'factorized_random': _FactorizedRandomScores,
}


@register_mixer('synthesizer')
class Synthesizer(TokenMixer):
    """Synthesised attention with `variant` 'dense', 'random', 'factorized_dense' or 'factorized_random'.

    `rank` is that of 'factorized_random', 8 as in the paper by default; other variants raise ValueError for it. In the
    random variants `attn_drop` drops the same scores for all images of a batch.
    """

    attn_weights = True
    grid_bound = True
    op = staticmethod(synthesizer)
    op_naive = staticmethod(synthesizer_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        variant: str = 'dense',
        rank: int | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, attn_drop=attn_drop, **kwargs)
        # configs saved by earlier versions have the British spelling
        variant = variant.replace('factorised_', 'factorized_')
        if variant not in _SCORES:
            raise ValueError(f'variant of synthesizer is one of {", ".join(_SCORES)}, not {variant!r}.')
        if rank is not None and (variant != 'factorized_random' or rank < 1):
            raise ValueError(f"rank of synthesizer is at least 1, with variant 'factorized_random'; got {rank}.")
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        own = {} if rank is None else {'rank': rank}
        self.scores = _SCORES[variant](dim, num_heads, self.grid_size, self.num_prefix_tokens, **own, **dd)
        self.v = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        self.check_grid(grid_size)
        v = split_heads(self.v(x), self.num_heads)
        x = self.op(x, v, self.scores, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))

    def inherit_from(self, parent: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
        """The layer of values; there are no queries and keys."""
        return split_qkv(parent, self.dim, v=slice(2, 3))

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        old_size = self.grid_size
        super().set_input_size(grid_size)
        self.scores.resample(self.grid_size, old_size)

    def no_weight_decay(self) -> set[str]:
        return {f'scores.{name}' for name, _ in self.scores.named_parameters(recurse=False)}
