"""Sparse Transformer attention: every token attends its neighbourhood and a sparse set of tokens of the whole grid.

    out_i = sum_{j in near(i) + far(i)} softmax_j(scale * q_i . k_j) v_j

    strided:  near(i) = {|i - j| < l},         far(i) = {j : j = i mod l}
    fixed:    near(i) = {j // l = i // l},     far(i) = {j : j mod l >= l - c}   (the last c tokens of each block)

i and j are indices of grid tokens in raster order, and l is `stride`. Without a stride the pattern follows the grid: l
is its width W and near(i) the row of i, so that strided attends the row and the column, fixed the row and the last c
columns. Nothing is causal: the paper's sets of earlier tokens are extended to later ones. Of the paper's ways to
combine the two sets this is the merged one: one softmax over both in every head, in which a token in both counts once.
Prefix tokens are global. With a stride of N it is softmax attention, so a grid of one row needs a stride. Cost: strided
O(N (2l + N/l) dim), fixed O(N (l + c N/l) dim), so N^1.5 if l grows with sqrt(N), as W does. Generating Long Sequences
with Sparse Transformers, sections 4.2 and 4.3, https://arxiv.org/abs/1904.10509
"""

from typing import Any

import torch
from torch.nn import functional as F

from ._numerics import mask_bias, wide_dtype
from ._qkv import split_prefix
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Sparse', 'sparse_attention', 'sparse_naive']


def sparse_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    pattern: str,
    stride: int | None,
    num_summaries: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax attention under a dense N x N mask; arguments as `sparse_attention`."""
    N, l = grid_size[0] * grid_size[1], stride or grid_size[1]
    P = q.shape[2] - N
    band = pattern == 'strided' and stride is not None
    bias = q.new_zeros(P + N, P + N)
    for i in range(N):
        for j in range(N):
            near = abs(i - j) < l if band else i // l == j // l
            far = i % l == j % l if pattern == 'strided' else j % l >= l - num_summaries
            if not near and not far:
                bias[P + i, P + j] = float('-inf')
    return softmax_naive(q, k, v, scale, bias, dropout_p)


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    pattern: str,
    stride: int | None,
    num_summaries: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d)."""
    N = grid_size[0] * grid_size[1]
    P, l = q.shape[2] - N, min(stride or grid_size[1], N)
    (q_prefix, q_grid), (k_prefix, k_grid), (v_prefix, v_grid) = (split_prefix(x, P) for x in (q, k, v))
    q_blocks, k_blocks, v_blocks = (_blocks(x, l) for x in (scale * q_grid, k_grid, v_grid))  # (B, heads, T, l, d)
    # the neighbourhood is the token's block, or a band that extends into the blocks before and after it
    num_neighbors = int(pattern == 'strided' and stride is not None)
    score_far, far_values = (_column_scores, _column_values) if pattern == 'strided' else (_last_scores, _last_values)
    c = min(num_summaries, l)
    near_mask, far_mask = _masks(N, l, num_neighbors, pattern, c, q.device)
    near_scores = q_blocks @ _with_neighbors(k_blocks, num_neighbors).mT
    far_scores = score_far(q_blocks, k_blocks, c)
    # in place, because the scores are the largest tensors
    scores = [
        q_blocks @ k_prefix.unsqueeze(2).mT,
        near_scores.add_(mask_bias(near_mask, near_scores)),
        far_scores.add_(mask_bias(far_mask, far_scores)),
    ]
    sizes = [part.shape[-1] for part in scores]
    scores = torch.cat(scores, dim=-1)
    attn = scores.softmax(dim=-1, dtype=wide_dtype(scores)).to(v.dtype)
    prefix, near, far = F.dropout(attn, dropout_p).split(sizes, dim=-1)
    out = (
        prefix @ v_prefix.unsqueeze(2) + near @ _with_neighbors(v_blocks, num_neighbors) + far_values(far, v_blocks, c)
    )
    out = out.flatten(2, 3)[:, :, :N]
    if P == 0:
        return out
    return torch.cat([softmax_attention(q_prefix, k, v, scale, None, dropout_p), out], dim=2)


def _blocks(x: torch.Tensor, l: int) -> torch.Tensor:
    """Tokens (B, heads, N, d) -> consecutive blocks (B, heads, T, l, d), zero-padded at the end."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % l)).unflatten(2, (-1, l))


def _with_neighbors(blocks: torch.Tensor, n: int) -> torch.Tensor:
    """(B, heads, T, l, d) -> each block with `n` blocks before and after it, (B, heads, T, (1 + 2n) * l, d)."""
    blocks = F.pad(blocks, (0, 0, 0, 0, n, n)).unfold(2, 1 + 2 * n, 1)  # (B, heads, T, l, d, 1 + 2n)
    return blocks.permute(0, 1, 2, 5, 3, 4).flatten(3, 4)


def _column_scores(q_blocks: torch.Tensor, k_blocks: torch.Tensor, c: int) -> torch.Tensor:
    """Scores with the tokens at the same position in all blocks, (B, heads, T, l, T)."""
    return (q_blocks.transpose(2, 3) @ k_blocks.transpose(2, 3).mT).transpose(2, 3)


def _column_values(attn: torch.Tensor, v_blocks: torch.Tensor, c: int) -> torch.Tensor:
    return (attn.transpose(2, 3) @ v_blocks.transpose(2, 3)).transpose(2, 3)


def _last_scores(q_blocks: torch.Tensor, k_blocks: torch.Tensor, c: int) -> torch.Tensor:
    """Scores with the last c tokens of all blocks, (B, heads, T, l, T * c)."""
    last = k_blocks[:, :, :, -c:].flatten(2, 3)
    return (q_blocks.flatten(2, 3) @ last.mT).unflatten(2, q_blocks.shape[2:4])


def _last_values(attn: torch.Tensor, v_blocks: torch.Tensor, c: int) -> torch.Tensor:
    last = v_blocks[:, :, :, -c:].flatten(2, 3)
    return (attn.flatten(2, 3) @ last).unflatten(2, v_blocks.shape[2:4])


def _masks(
    N: int, l: int, num_neighbors: int, pattern: str, c: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks, (T, l, keys) each, of the near keys and of the far keys that are not near already."""
    index = torch.arange(-(-N // l) * l, device=device).unflatten(0, (-1, l))  # (T, l)
    block, query = index[:, :1, None] // l, index.unsqueeze(2)
    near = (block - num_neighbors) * l + torch.arange((1 + 2 * num_neighbors) * l, device=device)
    far = index.T if pattern == 'strided' else index[:, -c:].reshape(1, -1)
    # far keys in the token's block are near already; in the next blocks the same position is outside the band
    return (near >= 0) & (near < N) & ((near - query).abs() < l), (far < N) & (far // l != block)


@register_mixer('sparse')
class Sparse(QKVMixer):
    """Sparse Transformer attention with `pattern` 'strided' or 'fixed'.

    `stride` is the paper's l in raster order; None uses the rows and columns of the grid. `num_summaries` is the
    paper's c, the number of tokens of each block (columns of the grid) that all tokens attend in 'fixed'.
    """

    attn_weights = True
    approximates_softmax = True
    token_weights = True
    op = staticmethod(sparse_attention)
    op_naive = staticmethod(sparse_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        pattern: str = 'strided',
        stride: int | None = None,
        num_summaries: int = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if pattern not in ('strided', 'fixed'):
            raise ValueError(f"pattern of sparse is 'strided' or 'fixed', not {pattern!r}.")
        if (stride is not None and stride < 1) or num_summaries < 1:
            raise ValueError(
                f'sparse needs a stride of at least 1 or None and num_summaries >= 1, not {stride} and {num_summaries}.'
            )
        self.pattern = pattern
        self.stride = stride
        self.num_summaries = num_summaries

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, grid_size, self.pattern, self.stride, self.num_summaries, self.scale, self.dropout_p)
