"""Windows on a 2-D grid: queries in tiles, keys in the tile and a halo around it, and the attention between them.

Grids of any size are padded to whole tiles at the bottom and right; padded keys are masked exactly, so what lies in the
padding never matters. Shared by longformer, long-short and AFT-local.
"""

import math
from collections.abc import Callable

import torch
from timm.layers import is_exporting
from torch.nn import functional as F

from vitzoo.kernels import use_kernel

from ._window_cpu import strip_attention

__all__ = [
    'attend_tiles',
    'halo_mask',
    'tile',
    'tile_with_halo',
    'untile',
    'window_attention',
    'window_attention_naive',
]


def tile(x: torch.Tensor, grid_size: tuple[int, int], window_size: tuple[int, int]) -> torch.Tensor:
    """Tokens (B, heads, H*W, d) -> tiles (B, heads, T, h*w, d) of `window_size` = (h, w), zeros beyond the grid."""
    x = _pad(x.unflatten(2, grid_size), grid_size, window_size, (0, 0))  # (B, heads, rows, columns, d)
    x = x.unflatten(3, (-1, window_size[1])).unflatten(2, (-1, window_size[0]))
    return x.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def tile_with_halo(
    x: torch.Tensor, grid_size: tuple[int, int], window_size: tuple[int, int], halo: tuple[int, int]
) -> torch.Tensor:
    """Tokens (B, heads, H*W, d) -> tiles and their halos (B, heads, T, sides, d), zeros beyond the grid.

    `sides` is (h + 2 halo_h) * (w + 2 halo_w).
    """
    x = _pad(x.unflatten(2, grid_size), grid_size, window_size, halo)
    for dim, window, reach in zip((2, 3), window_size, halo):
        x = x.unfold(dim, window + 2 * reach, window)
    return x.permute(0, 1, 2, 3, 5, 6, 4).flatten(4, 5).flatten(2, 3)  # from (B, heads, tiles, tiles, d, side, side)


def untile(x: torch.Tensor, grid_size: tuple[int, int], window_size: tuple[int, int]) -> torch.Tensor:
    """Tiles (B, heads, T, h*w, d) -> tokens (B, heads, H*W, d), the inverse of `tile`."""
    H, W = grid_size
    x = x.unflatten(2, (-(-H // window_size[0]), -1)).unflatten(4, window_size)
    x = x.transpose(3, 4).flatten(4, 5).flatten(2, 3)  # (B, heads, rows, columns, d)
    return x[:, :, :H, :W].flatten(2, 3)


def halo_mask(
    grid_size: tuple[int, int], window_size: tuple[int, int], halo: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """True where the key of `tile_with_halo` is a token of the grid, (T, sides)."""
    inside = []
    for size, window, reach in zip(grid_size, window_size, halo):
        start = torch.arange(0, size, window, device=device) - reach
        place = start[:, None] + torch.arange(window + 2 * reach, device=device)
        inside.append((place >= 0) & (place < size))
    rows, columns = inside
    mask = rows[:, None, :, None] & columns[None, :, None, :]  # (tiles, tiles, side, side)
    return mask.flatten(2).flatten(0, 1)


def _pad(
    x: torch.Tensor, grid_size: tuple[int, int], window_size: tuple[int, int], halo: tuple[int, int]
) -> torch.Tensor:
    """Zeros around (B, heads, H, W, d): a halo on each side, and what is missing to whole tiles."""
    (top, left), (down, right) = halo, (-size % window for size, window in zip(grid_size, window_size))
    return F.pad(x, (0, 0, left, left + right, top, top + down))


def window_attention_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    halo: int,
    scale: float,
    bias: torch.Tensor | None = None,
    bias_shared: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Tile by tile, every query attends the tokens of its window and the shared ones; arguments as
    `window_attention`."""
    (H, W), w, side = grid_size, window_size, window_size + 2 * halo
    out = torch.zeros_like(q)
    for y0 in range(0, H, w):
        for x0 in range(0, W, w):
            queries = [(y, x) for y in range(y0, min(y0 + w, H)) for x in range(x0, min(x0 + w, W))]
            rows = range(max(y0 - halo, 0), min(y0 + w + halo, H))
            columns = range(max(x0 - halo, 0), min(x0 + w + halo, W))
            keys = [(y, x) for y in rows for x in columns]
            i, j = ([y * W + x for y, x in tokens] for tokens in (queries, keys))
            scores = scale * q[:, :, i] @ k[:, :, j].transpose(-2, -1)
            scores_shared = scale * q[:, :, i] @ k_shared.transpose(-2, -1)
            if bias is not None:
                place_q = [(y - y0) * w + x - x0 for y, x in queries]
                place_k = [(y - y0 + halo) * side + x - x0 + halo for y, x in keys]
                scores = scores + bias[:, place_q][:, :, place_k]
            if bias_shared is not None:
                scores_shared = scores_shared + bias_shared.unsqueeze(1)
            attn = F.dropout(torch.cat([scores_shared, scores], dim=-1).softmax(dim=-1), dropout_p)
            out[:, :, i] = attn @ torch.cat([v_shared, v[:, :, j]], dim=2)
    return out


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    halo: int,
    scale: float,
    bias: torch.Tensor | None = None,
    bias_shared: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """One softmax over the keys of the window and S keys shared by all queries (landmarks, global tokens).

    Grid tokens q, k, v (B, heads, H*W, d), shared keys and values (B, heads, S, d), `bias` (heads, w*w, (w + 2 halo)^2)
    and `bias_shared` (heads, S) -> (B, heads, H*W, d).

    Without dropout, a kernel computes it where `use_kernel` allows, and strips of windows do on a CPU.
    """
    window, reach = _fit(grid_size, window_size, halo)
    if bias is not None:
        bias = _fit_bias(bias, window_size, halo, window, reach)
    if dropout_p == 0 and use_kernel(q) and _fits_kernel(q, k, v, k_shared, v_shared):
        from vitzoo.kernels import window as kernel

        return kernel.window_attention(q, k, v, k_shared, v_shared, grid_size, window, reach, scale, bias, bias_shared)
    if q.device.type == 'cpu' and not dropout_p and not torch.compiler.is_compiling() and not is_exporting():
        bias = _join_bias(bias, bias_shared, window, reach, k_shared.shape[2])
        return strip_attention(q, k, v, k_shared, v_shared, grid_size, window, reach, scale, bias)
    mask = halo_mask(grid_size, window, reach, q.device)
    q = tile(scale * q, grid_size, window)
    out = attend_tiles(
        q, k, v, k_shared, v_shared, mask, lambda x: tile_with_halo(x, grid_size, window, reach),
        bias, bias_shared, dropout_p,
    )  # fmt: skip
    return untile(out, grid_size, window)


def attend_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    mask: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor],
    bias: torch.Tensor | None = None,
    bias_shared: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Scaled queries in tiles (B, heads, T, s, d), tokens k and v (B, heads, H*W, d) -> (B, heads, T, s, d).

    `gather` makes of tokens those that each tile attends, (B, heads, T, M, d), where `mask` (T, M) is true; `bias`
    (heads, s, M).
    """
    T, S = q.shape[2], k_shared.shape[2]
    scores = q @ gather(k).transpose(-2, -1)  # (B, heads, T, s, M)
    scores_shared = (q.flatten(2, 3) @ k_shared.transpose(-2, -1)).unflatten(2, (T, -1))
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    if bias_shared is not None:
        scores_shared = scores_shared + bias_shared[:, None, None]
    scores = scores.masked_fill(~mask.unsqueeze(1), float('-inf'))
    scores = torch.cat([scores_shared, scores], dim=-1)
    attn = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    attn_shared, attn = F.dropout(attn, dropout_p).split([S, attn.shape[-1] - S], dim=-1)
    out = attn @ gather(v)
    return out + (attn_shared.flatten(2, 3) @ v_shared).unflatten(2, (T, -1))


def _fits_kernel(q: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether all are of one dtype and head dimension, and rows so narrow that registers hold a block of them."""
    alike = all(x.dtype == q.dtype and x.shape[-1] == q.shape[-1] for x in others)
    return alike and q.shape[-1] * q.element_size() <= 256


def _fit(grid_size: tuple[int, int], window_size: int, halo: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Window and halo per axis: where one window holds the whole axis, all around it is padding and is left out."""
    window = tuple(min(window_size, size) for size in grid_size)
    return window, tuple(halo if size > window_size else 0 for size in grid_size)


def _join_bias(
    bias: torch.Tensor | None,
    bias_shared: torch.Tensor | None,
    window: tuple[int, int],
    reach: tuple[int, int],
    num_shared: int,
) -> torch.Tensor | None:
    """One bias (heads, s, M + S) of the biases of the window (heads, s, M) and of the shared keys (heads, S)."""
    if bias is None and bias_shared is None:
        return None
    s, M = math.prod(window), math.prod(size + 2 * halo for size, halo in zip(window, reach))
    if bias is None:
        bias = bias_shared.new_zeros(len(bias_shared), s, M)
    if bias_shared is None:
        return F.pad(bias, (0, num_shared))
    return torch.cat([bias, bias_shared.unsqueeze(1).expand(-1, s, -1)], dim=2)


def _fit_bias(
    bias: torch.Tensor, window_size: int, halo: int, window: tuple[int, int], reach: tuple[int, int]
) -> torch.Tensor:
    """The part of the bias (heads, w*w, (w + 2 halo)^2) between the queries and keys that are left by `_fit`."""
    side = window_size + 2 * halo
    bias = bias.unflatten(2, (side, side)).unflatten(1, (window_size, window_size))
    for axis in (0, 1):
        bias = bias.narrow(1 + axis, 0, window[axis])
        bias = bias.narrow(3 + axis, halo - reach[axis], window[axis] + 2 * reach[axis])
    return bias.flatten(3).flatten(1, 2)
