"""Windows on a 2-D grid: queries in tiles, keys in the tile and a halo around it, and attention between them.

Grids of any size are padded to whole tiles at the bottom and right. Padded keys are masked exactly, so the values in
the padding never matter. Shared by all mixers with windows or blocks.
"""

import math

import torch
from torch.nn import functional as F

from vitzoo.kernels import use_kernel

from ._numerics import is_compiled, mask_bias, pad, wide_dtype
from ._window_cpu import window_attention_cpu

__all__ = [
    'attend_tiles',
    'fit_halo',
    'fit_window',
    'halo_mask',
    'take_rows',
    'tile',
    'tile_with_halo',
    'untile',
    'window_attention',
    'window_attention_naive',
]


def fit_window(grid_size: tuple[int, int], window_size: int) -> tuple[int, int]:
    """The part of a square window that lies on the grid: tiles of a narrow grid would be padding beyond it."""
    H, W = grid_size
    return min(window_size, H), min(window_size, W)


def fit_halo(grid_size: tuple[int, int], window_size: int, halo: int) -> tuple[int, int]:
    """The halo or shift of windows per axis: 0 along an axis that one window covers, where it would be padding."""
    H, W = grid_size
    return halo if window_size < H else 0, halo if window_size < W else 0


def tile(
    x: torch.Tensor, grid_size: tuple[int, int], window_size: tuple[int, int], shift: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Tokens (B, heads, H*W, d) -> tiles (B, heads, T, h*w, d) of `window_size` = (h, w), zero-padded.

    The padded grid is rolled up and to the left by `shift`.
    """
    x = _pad(x.unflatten(2, grid_size), grid_size, window_size, (0, 0))  # (B, heads, rows, columns, d)
    if any(shift):
        x = x.roll((-shift[0], -shift[1]), dims=(2, 3))
    x = x.unflatten(3, (-1, window_size[1])).unflatten(2, (-1, window_size[0]))
    return x.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def tile_with_halo(
    x: torch.Tensor, grid_size: tuple[int, int], window_size: tuple[int, int], halo: tuple[int, int]
) -> torch.Tensor:
    """Tokens (B, heads, H*W, d) -> tiles with their halos (B, heads, T, M, d), zero-padded.

    M = (h + 2 halo_h) * (w + 2 halo_w).
    """
    x = _pad(x.unflatten(2, grid_size), grid_size, window_size, halo)
    for axis in (0, 1):
        x = x.unfold(2 + axis, window_size[axis] + 2 * halo[axis], window_size[axis])
    return x.permute(0, 1, 2, 3, 5, 6, 4).flatten(4, 5).flatten(2, 3)  # from (B, heads, rows, columns, d, h, w)


def untile(
    x: torch.Tensor, grid_size: tuple[int, int], window_size: tuple[int, int], shift: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Tiles (B, heads, T, h*w, d) -> tokens (B, heads, H*W, d), the inverse of `tile`."""
    H, W = grid_size
    x = x.unflatten(2, (-(-H // window_size[0]), -1)).unflatten(4, window_size)
    x = x.transpose(3, 4).flatten(4, 5).flatten(2, 3)  # (B, heads, rows, columns, d)
    if any(shift):
        x = x.roll(shift, dims=(2, 3))
    return x[:, :, :H, :W].flatten(2, 3)


def halo_mask(
    grid_size: tuple[int, int], window_size: tuple[int, int], halo: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """True for the keys of `tile_with_halo` that are tokens of the grid, (T, M)."""
    on_grid = []
    for axis in (0, 1):
        start = torch.arange(0, grid_size[axis], window_size[axis], device=device) - halo[axis]
        position = start[:, None] + torch.arange(window_size[axis] + 2 * halo[axis], device=device)
        on_grid.append((position >= 0) & (position < grid_size[axis]))
    rows, columns = on_grid
    mask = rows[:, None, :, None] & columns[None, :, None, :]  # (rows, columns, h + 2 halo_h, w + 2 halo_w)
    return mask.flatten(2).flatten(0, 1)


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of x (B, heads, N, ...) by an index (B or 1, heads or 1, n) -> (B, heads, n, ...)."""
    B, heads, N = x.shape[:3]
    first = N * torch.arange(B * heads, device=x.device).view(B, heads, 1)
    # the gradient of rows of a matrix is several times faster than that of an index in another dimension
    rows = x.reshape(B * heads * N, x.shape[3:].numel()).index_select(0, (first + index).flatten())
    return rows.view(B, heads, index.shape[2], *x.shape[3:])


def _pad(
    x: torch.Tensor, grid_size: tuple[int, int], window_size: tuple[int, int], halo: tuple[int, int]
) -> torch.Tensor:
    """Zero-pad (B, heads, H, W, d): a halo on each side, and up to whole tiles at the bottom and right."""
    (top, left), (bottom, right) = halo, (-size % window for size, window in zip(grid_size, window_size))
    return pad(x, (0, 0, left, left + right, top, top + bottom))


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
    """Attention tile by tile over the keys of the window, its halo and the shared keys; arguments as
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
                index_q = [(y - y0) * w + x - x0 for y, x in queries]
                index_k = [(y - y0 + halo) * side + x - x0 + halo for y, x in keys]
                scores = scores + bias[:, index_q][:, :, index_k]
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
    """One softmax over the keys of the window, its halo, and S keys shared by all queries (landmarks, global tokens).

    Grid tokens q, k, v (B, heads, H*W, d), shared keys and values (B, heads, S, d), `bias` (heads or 1, w*w,
    (w + 2 halo)^2) and `bias_shared` (heads, S) -> (B, heads, H*W, d).

    Without dropout it runs as a Triton kernel if `use_kernel` allows it, and row by row of tiles on a CPU.
    """
    window_size, halo, bias = _fit_to_grid(grid_size, window_size, halo, bias)
    if dropout_p == 0 and use_kernel(q):
        from vitzoo.kernels import window as kernels

        if kernels.fits(q, k, v, k_shared, v_shared):
            return kernels.window_attention_triton(
                q, k, v, k_shared, v_shared, grid_size, window_size, halo, (0, 0), scale, bias, bias_shared
            )
    if q.device.type == 'cpu' and dropout_p == 0 and not is_compiled():
        bias = _join_bias(bias, bias_shared, window_size, halo, k_shared.shape[2])
        return window_attention_cpu(q, k, v, k_shared, v_shared, grid_size, window_size, halo, scale, bias)
    mask = halo_mask(grid_size, window_size, halo, q.device)
    q = tile(scale * q, grid_size, window_size)
    k, v = (tile_with_halo(x, grid_size, window_size, halo) for x in (k, v))
    return untile(attend_tiles(q, k, v, k_shared, v_shared, mask, bias, bias_shared, dropout_p), grid_size, window_size)


def attend_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None = None,
    bias_shared: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Tiles of scaled queries (B, heads, T, s, d) and of keys and values (B, heads, T, M, d) -> (B, heads, T, s, d).

    A key is attended if `mask` (T, M) is true; `bias` is (heads or 1, s, M).
    """
    T, S = q.shape[2], k_shared.shape[2]
    scores = q @ k.transpose(-2, -1)  # (B, heads, T, s, M)
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    # in place, because the scores are the largest tensor
    scores.add_(mask_bias(mask, scores).unsqueeze(1))
    # onnxruntime cannot run products of no keys
    if S:
        scores_shared = (q.flatten(2, 3) @ k_shared.transpose(-2, -1)).unflatten(2, (T, -1))
        if bias_shared is not None:
            scores_shared = scores_shared + bias_shared[:, None, None]
        scores = torch.cat([scores_shared, scores], dim=-1)
    attn = scores.softmax(dim=-1, dtype=wide_dtype(scores)).to(v.dtype)
    attn = F.dropout(attn, dropout_p)
    out = attn[..., S:] @ v
    return out + (attn[..., :S].flatten(2, 3) @ v_shared).unflatten(2, (T, -1)) if S else out


def _fit_to_grid(
    grid_size: tuple[int, int], window_size: int, halo: int, bias: torch.Tensor | None
) -> tuple[tuple[int, int], tuple[int, int], torch.Tensor | None]:
    """Window size and halo per axis, and the bias cropped to them."""
    fitted_size, fitted_halo = fit_window(grid_size, window_size), fit_halo(grid_size, window_size, halo)
    if bias is None:
        return fitted_size, fitted_halo, None
    side = window_size + 2 * halo
    bias = bias.unflatten(2, (side, side)).unflatten(1, (window_size, window_size))
    for axis in (0, 1):
        bias = bias.narrow(1 + axis, 0, fitted_size[axis])
        bias = bias.narrow(3 + axis, halo - fitted_halo[axis], fitted_size[axis] + 2 * fitted_halo[axis])
    return fitted_size, fitted_halo, bias.flatten(3).flatten(1, 2)


def _join_bias(
    bias: torch.Tensor | None,
    bias_shared: torch.Tensor | None,
    window_size: tuple[int, int],
    halo: tuple[int, int],
    num_shared: int,
) -> torch.Tensor | None:
    """Concatenate the bias of the window (heads, s, M) and of the shared keys (heads, S) to (heads, s, M + S)."""
    if bias_shared is None:
        return None if bias is None else F.pad(bias, (0, num_shared))
    s, M = math.prod(window_size), math.prod(w + 2 * h for w, h in zip(window_size, halo))
    if bias is None:
        bias = bias_shared.new_zeros(1, s, M)
    return torch.cat([bias.expand(len(bias_shared), -1, -1), bias_shared.unsqueeze(1).expand(-1, s, -1)], dim=2)
