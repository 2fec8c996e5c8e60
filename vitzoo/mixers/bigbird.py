"""BigBird: block-sparse attention over a window, global tokens and random blocks.

    out_i = sum_{j in window(i) + global + random(i)} softmax_j(scale * q_i . k_j) v_j

The grid is divided into b x b blocks. The tokens of a block attend the block and the 8 around it (the paper's window of
3 blocks, on a 2-D grid), the global tokens, and r random blocks that differ between blocks and heads. Global tokens are
the prefix tokens (the paper's extended construction, ETC) and the first g blocks in raster order (the internal one,
ITC); they attend everything. No token counts twice: random blocks are drawn from those that are neither near nor
global. In the package transformers, a block counts as often as it is drawn, and in evaluation all random blocks are
the first block, which is global. On a grid of at most two blocks per side it is softmax attention. Linear in the number
of tokens: O(N ((9 + g + r) b^2 + P) dim). Big Bird, section 2 and appendix D, https://arxiv.org/abs/2007.14062
"""

import math
from typing import Any

import torch
from torch.nn import functional as F
from torch.types import Device

from ._numerics import mask_bias, wide_dtype
from ._recompute import apply_to_heads
from ._window import fit_window, halo_mask, take_rows, tile, untile
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['BigBird', 'bigbird_attention', 'bigbird_naive', 'draw_blocks']

_PRIME = 2**31 - 1


def bigbird_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    random_blocks: torch.Tensor,
    grid_size: tuple[int, int],
    block_size: int,
    num_global_blocks: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax attention under a dense mask per head; arguments as `bigbird_attention`."""
    (H, W), b = grid_size, block_size
    P, columns = q.shape[2] - H * W, -(-W // b)
    bias = q.new_zeros(q.shape[1], P + H * W, P + H * W)
    for head, blocks in enumerate(random_blocks.tolist()):
        for i in range(H * W):
            for j in range(H * W):
                (yi, xi), (yj, xj) = ((token // W // b, token % W // b) for token in (i, j))
                block_i, block_j = yi * columns + xi, yj * columns + xj
                near = abs(yi - yj) <= 1 and abs(xi - xj) <= 1
                is_global = block_i < num_global_blocks or block_j < num_global_blocks
                if not near and not is_global and block_j not in blocks[block_i]:
                    bias[head, P + i, P + j] = float('-inf')
    return softmax_naive(q, k, v, scale, bias, dropout_p)


def bigbird_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    random_blocks: torch.Tensor,
    grid_size: tuple[int, int],
    block_size: int,
    num_global_blocks: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d).

    `random_blocks` (heads, T, r) are indices of r of the T blocks for each block and head, none of them near or global;
    -1 stands for no block.
    """
    N, P = q.shape[2], q.shape[2] - grid_size[0] * grid_size[1]
    blocks = _attended_blocks(random_blocks, grid_size, block_size, num_global_blocks)  # (heads, T, K)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return _attend_blocks(q, k, v, blocks[0], grid_size, block_size, scale, dropout_p)

    # for each attended block the gathered keys and values, and the scores in three forms
    num_elements = N * blocks.shape[2] * (2 * q.shape[3] + 3 * math.prod(fit_window(grid_size, block_size)))
    out = apply_to_heads(attend, (q, k, v, blocks.unsqueeze(0)), num_elements)

    rows = _global_rows(P, grid_size, block_size, num_global_blocks, q.device)
    if not len(rows):
        return out
    global_out = softmax_attention(q.index_select(2, rows), k, v, scale, None, dropout_p)
    # not index_copy, whose gradient the compiler of torch 2.11 refuses
    return F.pad(out, (0, 0, P, 0)).scatter(2, rows[:, None].expand_as(global_out), global_out.to(out.dtype))


def _attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    grid_size: tuple[int, int],
    block_size: int,
    scale: float,
    dropout_p: float,
) -> torch.Tensor:
    """Grid tokens over the prefix and the blocks (heads, T, K) that theirs attends -> (B, heads, H*W, d)."""
    P, window = q.shape[2] - grid_size[0] * grid_size[1], fit_window(grid_size, block_size)
    inside = halo_mask(grid_size, window, (0, 0), q.device)  # (T, b*b)
    mask = inside[blocks.clamp(min=0)] & (blocks >= 0).unsqueeze(-1)
    mask = mask.flatten(2).unsqueeze(2)  # (heads, T, 1, K * b*b)

    q_tiles = tile(scale * q[:, :, P:], grid_size, window)  # (B, heads, T, b*b, d)
    scores = q_tiles @ _gather(tile(k[:, :, P:], grid_size, window), blocks).mT
    scores_prefix = q_tiles @ k[:, :, None, :P].mT
    # in place, because the scores are the largest tensor
    scores = torch.cat([scores_prefix, scores.add_(mask_bias(mask, scores))], dim=-1)
    attn = scores.softmax(dim=-1, dtype=wide_dtype(scores)).to(v.dtype)
    prefix, attn = F.dropout(attn, dropout_p).split([P, scores.shape[-1] - P], dim=-1)
    out = attn @ _gather(tile(v[:, :, P:], grid_size, window), blocks) + prefix @ v[:, :, None, :P]
    return untile(out, grid_size, window)


def _attended_blocks(
    random_blocks: torch.Tensor, grid_size: tuple[int, int], block_size: int, num_global_blocks: int
) -> torch.Tensor:
    """Indices of the blocks that each block attends (near, then global, then random), (heads, T, K); -1 is none."""
    heads, T, _ = random_blocks.shape
    near = _near_blocks(grid_size, block_size, random_blocks.device)
    near = near.masked_fill(near < num_global_blocks, -1)
    block = torch.arange(T, device=random_blocks.device)
    shared = block[:num_global_blocks].expand(T, -1)
    return torch.cat([torch.cat([near, shared], dim=1).expand(heads, -1, -1), random_blocks], dim=2)


def _near_blocks(grid_size: tuple[int, int], block_size: int, device: torch.device) -> torch.Tensor:
    """Indices of each block and the 8 around it, (T, 9), or the 2 in a single row or column; -1 is beyond the grid."""
    rows, columns = (-(-size // block_size) for size in grid_size)
    block = torch.arange(rows * columns, device=device)
    offset_y, offset_x = (torch.arange(-int(n > 1), 1 + int(n > 1), device=device) for n in (rows, columns))
    y = (block // columns)[:, None, None] + offset_y[:, None]
    x = (block % columns)[:, None, None] + offset_x
    exists = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
    return (y * columns + x).masked_fill(~exists, -1).flatten(1)


def _gather(tiles: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Tiles (B, heads, T, s, d) -> those that each block attends, concatenated, (B, heads, T, K * s, d)."""
    rows = take_rows(tiles, blocks.clamp(min=0).flatten(1).unsqueeze(0))  # (B, heads, T * K, s, d)
    return rows.unflatten(2, blocks.shape[1:]).flatten(3, 4)


def _global_rows(
    P: int, grid_size: tuple[int, int], block_size: int, num_global_blocks: int, device: torch.device
) -> torch.Tensor:
    """Indices of the global tokens: the prefix and the tokens of the first blocks."""
    (H, W), b = grid_size, block_size
    num_rows, num_blocks = divmod(num_global_blocks, -(-W // b))
    # whole rows of blocks, and some blocks of the row below
    top, bottom = (min(H, row * b) for row in (num_rows, num_rows + 1))
    num_whole, width = P + top * W, num_blocks * b
    row = torch.arange(num_whole + (bottom - top) * width, device=device)
    if not width:
        return row
    # beyond the blocks of a row of tokens, the rest of it is left out
    return row.add((row - num_whole).clamp_(min=0).div_(width, rounding_mode='floor'), alpha=W - width)


def draw_blocks(
    seeds: torch.Tensor, grid_size: tuple[int, int], block_size: int, num_global_blocks: int, num_random_blocks: int
) -> torch.Tensor:
    """Random blocks of each block, neither near nor global, from a seed per head (heads,): (heads, T, r), padded with
    -1 if there are fewer.

    A pure function of integers, so the result is the same on every device, in every process and after resuming. Linear
    in the number of blocks: the j-th block is drawn by its rank among those that are neither excluded nor drawn yet.
    """
    near = _near_blocks(grid_size, block_size, seeds.device)
    T, absent = len(near), torch.iinfo(near.dtype).max
    excluded = (near - num_global_blocks).masked_fill(near < num_global_blocks, absent).sort(dim=-1).values
    available = T - num_global_blocks - (excluded < absent).sum(dim=-1)  # (T,)
    block = torch.arange(T, device=seeds.device)
    ranks = seeds.new_empty(*seeds.shape, T, 0)
    for j in range(min(num_random_blocks, T)):
        rank = _hash(seeds[:, None] + block * 73_856_093 + j * 19_349_663) % (available - j).clamp(min=1)
        rank = _skip(rank.unsqueeze(-1), ranks.sort(dim=-1).values)
        ranks = torch.cat([ranks, rank], dim=-1)
    drawn = num_global_blocks + _skip(ranks, excluded)
    return drawn.masked_fill(torch.arange(ranks.shape[-1], device=seeds.device) >= available[:, None], -1)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """Integers to random ones below 2^31, the same for the same input."""
    x = x % _PRIME
    # a multiplicative generator with its high bits mixed into the low ones; no product exceeds 63 bits
    for multiplier in (48_271, 69_621, 16_807):
        x = x * multiplier % _PRIME
        x = x ^ (x >> 15)
    return x


def _skip(ranks: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """Ranks (..., r) among the integers that are not in `excluded` (..., K), ascending -> those integers."""
    before = excluded - torch.arange(excluded.shape[-1], device=excluded.device)
    return ranks + (ranks.unsqueeze(-1) >= before.unsqueeze(-2)).sum(dim=-1)


@register_mixer('bigbird')
class BigBird(QKVMixer):
    """BigBird attention with `num_random_blocks` random and `num_global_blocks` global blocks of `block_size` x
    `block_size` tokens.

    The random blocks depend only on the grid and on one seed per head, a buffer that is saved with the weights, and do
    not change during training. The seeds depend on `seed`, the layer and the head.
    """

    attn_weights = True
    approximates_softmax = True
    token_weights = True
    seeds: torch.Tensor
    op = staticmethod(bigbird_attention)
    op_naive = staticmethod(bigbird_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        block_size: int = 4,
        num_global_blocks: int = 1,
        num_random_blocks: int = 3,
        seed: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if block_size < 1 or min(num_global_blocks, num_random_blocks) < 0:
            raise ValueError(
                f'bigbird needs block_size >= 1 and no negative numbers of blocks, not block_size={block_size}, '
                f'num_global_blocks={num_global_blocks} and num_random_blocks={num_random_blocks}.'
            )
        self.block_size = block_size
        self.num_global_blocks = num_global_blocks
        self.num_random_blocks = num_random_blocks
        # no torch.Generator, whose numbers may change between versions of torch; draw_blocks mixes the bits
        seeds = (seed + 1) * 7_368_787 + self.layer * 32_452_843 + torch.arange(num_heads, device='cpu') * 15_485_863
        self.register_buffer('seeds', (seeds % _PRIME).to(self.proj.weight.device))

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        blocks = draw_blocks(self.seeds, grid_size, self.block_size, self.num_global_blocks, self.num_random_blocks)
        return self.op(q, k, v, blocks, grid_size, self.block_size, self.num_global_blocks, self.scale, self.dropout_p)
