"""Neighbourhood attention: every token attends the k x k tokens around it, which border tokens shift inwards.

    out_i = sum_{j in prefix + near(i)} softmax_j(scale * q_i . k_j + bias_ij) v_j

Along each axis near(i) is the k positions from clamp(i - k // 2, 0, size - k), so every token has k^2 neighbours, those
in a corner too. With dilation D the axis is divided into D groups of every D-th token, and the neighbours of a token
are those of its own group; a group of fewer than k tokens is attended whole, which NATTEN refuses. The bias is learned
for each offset. Prefix tokens are global and have no bias: every token attends them and they attend every token. If k
covers the grid, and without bias and dilation, it is softmax attention. Linear in the number of tokens: O(N (k^2 + P)
dim), in tiles of k // 2 + 1 queries per side whose scores with all keys of the tile are computed, masked. Neighborhood
Attention Transformer, section 3.1, https://arxiv.org/abs/2204.07143; dilation: https://arxiv.org/abs/2209.15001
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._recompute import recompute_heads
from ._window import take_rows
from .base import QKVMixer, register_mixer
from .softmax import prepend_global_tokens, softmax_attention, softmax_naive

__all__ = ['Neighborhood', 'neighborhood_attention', 'neighborhood_naive']


def neighborhood_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    kernel_size: int,
    dilation: int,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax attention under a dense N x N mask; arguments as `neighborhood_attention`."""
    (H, W), N = grid_size, q.shape[2]
    P = N - H * W
    dense = q.new_full((q.shape[1], N, N), float('-inf'))
    dense[:, :P], dense[:, :, :P] = 0, 0
    rows, columns = ([_neighbors(i, size, kernel_size, dilation) for i in range(size)] for size in grid_size)
    for y, near_y in enumerate(rows):
        for x, near_x in enumerate(columns):
            for a in near_y:
                for b in near_x:
                    offset = (a - y) // dilation + kernel_size - 1, (b - x) // dilation + kernel_size - 1
                    dense[:, P + y * W + x, P + a * W + b] = 0 if bias is None else bias[:, offset[0], offset[1]]
    return softmax_naive(q, k, v, scale, dense, dropout_p)


def _neighbors(i: int, size: int, kernel_size: int, dilation: int) -> list[int]:
    """The positions that position i of an axis attends."""
    group = range(i % dilation, size, dilation)
    start = max(0, min(i // dilation - kernel_size // 2, len(group) - kernel_size))
    return list(group[start : start + kernel_size])


def neighborhood_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    kernel_size: int,
    dilation: int,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d).

    `bias` (heads, 2k - 1, 2k - 1) has the offset of a key from its query, in steps of the dilation, counted from k - 1.
    """
    axes = [_tile_axis(size, kernel_size, dilation, q.device) for size in grid_size]
    attend = partial(
        _attend_tiles, axes=axes, grid_size=grid_size, kernel_size=kernel_size, scale=scale, dropout_p=dropout_p
    )
    tensors = (q, k, v) if bias is None else (q, k, v, bias.unsqueeze(0))
    # a quarter of the gathered queries and outputs, keys and values, because gathering them again is slow
    num_tokens = sum(axes[0][part].numel() * axes[1][part].numel() for part in (0, 1))
    grid = recompute_heads(attend, tensors, num_tokens * q.shape[3] // 2, dropout_p)
    return prepend_global_tokens(grid, q, k, v, scale, dropout_p)


def _attend_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    axes: Sequence[tuple[torch.Tensor, ...]],
    grid_size: tuple[int, int],
    kernel_size: int,
    scale: float,
    dropout_p: float,
) -> torch.Tensor:
    """The outputs of grid tokens, (B, heads, H*W, d), for two axes of `_tile_axis` and a bias (1, heads, ...)."""
    heads, P = q.shape[1], q.shape[2] - grid_size[0] * grid_size[1]
    queries, keys = (_tile_index(axes[0][part], axes[1][part], grid_size[1]) for part in (0, 1))
    grid_q = _gather_tiles(q[:, :, P:], queries)  # (B, heads, T, s, d)
    grid_k, grid_v = (_gather_tiles(x[:, :, P:], keys) for x in (k, v))  # (B, heads, T, m, d)
    T = grid_q.shape[2]
    if P:
        grid_k, grid_v = (
            torch.cat([x[:, :, None, :P].expand(-1, -1, T, -1, -1), grid], dim=3)
            for x, grid in ((k, grid_k), (v, grid_v))
        )
    bias = None if bias is None else bias[0]
    mask = F.pad(_tile_mask([axis[2] for axis in axes], bias, kernel_size, q.dtype), (P, 0))
    mask = mask.expand(heads, -1, -1, -1).flatten(0, 1)
    grid_q, grid_k, grid_v = (x.flatten(1, 2) for x in (grid_q, grid_k, grid_v))
    out = softmax_attention(grid_q, grid_k, grid_v, scale, mask, dropout_p)
    (tile_y, inside_y), (tile_x, inside_x) = (axis[3:] for axis in axes)
    (_, side_y), (tiles_x, side_x) = (axis[0].shape for axis in axes)
    place = (tile_y[:, None] * tiles_x + tile_x) * side_y * side_x + inside_y[:, None] * side_x + inside_x
    return take_rows(out.unflatten(1, (heads, T)).flatten(2, 3), place.view(1, 1, -1))


def _tile_axis(
    size: int, kernel_size: int, dilation: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tiles of one axis: positions of their queries (T, s) and keys (T, m), their offsets, and the place of each query.

    Offsets (T, s, m) are from query to key, counted from k - 1, or -1 if the key is not attended; the place is the
    index of the tile (size,) and that in the tile (size,). A tile has queries of one group only, and repeats the last
    one of its group if it is not full.
    """
    side = kernel_size // 2 + 1
    reach = min(side + kernel_size - 1, -(-size // dilation))
    queries, keys, offsets = [], [], []
    for group in range(min(dilation, size)):
        n = -(-(size - group) // dilation)
        start = torch.arange(0, n, side, device=device)
        own = (start[:, None] + torch.arange(side, device=device)).clamp(max=n - 1)  # (T, s)
        begin = (own - kernel_size // 2).clamp(max=n - kernel_size).clamp(min=0)
        near = begin[:, :1] + torch.arange(reach, device=device)  # (T, m)
        steps, i = near.unsqueeze(1), begin.unsqueeze(2)
        is_near = (steps >= i) & (steps < (i + kernel_size).clamp(max=n))
        queries.append(group + dilation * own)
        keys.append(group + dilation * near.clamp(max=n - 1))
        offsets.append(torch.where(is_near, steps - own.unsqueeze(2) + kernel_size - 1, -1))
    position = torch.arange(size, device=device)
    group, in_group = position % dilation, position // dilation
    # the first groups may have a token more than the others, and a tile for it
    num_tiles, num_less = (-(-n // side) for n in (-(-size // dilation), size // dilation))
    tile = group * num_tiles + in_group // side
    if num_less < num_tiles:
        tile = tile - (group - size % dilation).clamp(min=0)
    return torch.cat(queries), torch.cat(keys), torch.cat(offsets), tile, in_group % side


def _tile_index(rows: torch.Tensor, columns: torch.Tensor, W: int) -> torch.Tensor:
    """Tokens at the rows (T_y, s) and columns (T_x, s) of tiles, (T, s * s)."""
    return (rows[:, None, :, None] * W + columns[None, :, None, :]).flatten(2).flatten(0, 1)


def _gather_tiles(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Grid tokens (B, heads, H*W, d) -> tiles (B, heads, T, s * s, d)."""
    return take_rows(x, index.view(1, 1, -1)).unflatten(2, index.shape)


def _tile_mask(
    offsets: list[torch.Tensor], bias: torch.Tensor | None, kernel_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """The bias of attended pairs, 0 without it, and -inf for the others, (heads or 1, T, s * s, m * m)."""
    y, x = offsets[0][:, None, :, None, :, None], offsets[1][None, :, None, :, None, :]
    is_near = (y >= 0) & (x >= 0)
    index = y.clamp(min=0) * (2 * kernel_size - 1) + x.clamp(min=0)
    is_near, index = (pairs.flatten(4).flatten(2, 3).flatten(0, 1) for pairs in (is_near, index))
    if bias is None:
        values = torch.zeros(1, *index.shape, dtype=dtype, device=index.device)
    else:
        # faster in the backward pass than indexing, on a CPU several times
        values = bias.flatten(1).index_select(1, index.flatten()).unflatten(1, index.shape)
    return values.masked_fill(~is_near, float('-inf'))


@register_mixer('neighborhood')
class Neighborhood(QKVMixer):
    """Attention of the `kernel_size` x `kernel_size` tokens around each token, every `dilation`-th of them.

    `rel_bias` is 'table' (a learned bias per head for each 2-D offset) or 'none'.
    """

    attn_weights = True
    token_weights = True
    has_rel_bias = True
    added_terms = ('rpb',)
    op = staticmethod(neighborhood_attention)
    op_naive = staticmethod(neighborhood_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        kernel_size: int = 7,
        dilation: int = 1,
        rel_bias: str = 'table',
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if kernel_size < 1 or dilation < 1:
            raise ValueError(
                f'kernel_size and dilation of neighborhood must be at least 1, not {kernel_size} and {dilation}.'
            )
        if rel_bias not in ('none', 'table'):
            raise ValueError(f"rel_bias of neighborhood is 'none' or 'table', not {rel_bias!r}.")
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.rpb = None
        if rel_bias == 'table':
            side = 2 * kernel_size - 1
            self.rpb = nn.Parameter(torch.empty(num_heads, side, side, device=device, dtype=dtype))
            trunc_normal_(self.rpb, std=0.02)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, grid_size, self.kernel_size, self.dilation, self.scale, self.rpb, self.dropout_p)

    def no_weight_decay(self) -> set[str]:
        return set() if self.rpb is None else {'rpb'}
