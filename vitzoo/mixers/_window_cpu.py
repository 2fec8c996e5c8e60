"""Window attention on a CPU, one row of tiles of a few samples and heads at a time, whose scores fit in the cache.

Computes `window_attention` without materializing the tiles and halos of the whole grid: the forward pass saves its
inputs and the weights, or of long sequences the log-sum-exp of each query, and the backward pass recomputes the rest.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ._numerics import CACHED, LOG2_E, needs_gradient, no_autocast, pad, wide_dtype
from ._recompute import differentiable_gradients, is_stored

__all__ = ['window_attention_cpu']

# scores that are computed at a time
_NUM_SCORES = 3 * CACHED


def window_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    grid_size: tuple[int, int],
    window_size: tuple[int, int],
    halo: tuple[int, int],
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Grid tokens q, k, v (B, heads, H*W, d), shared keys and values (B, heads, S, d) -> (B, heads, H*W, d).

    Tiles of `window_size` = (h, w) attend themselves, a halo of `halo` tokens and the shared keys; `bias` is (heads or
    1, h*w, (h + 2 halo_h) * (w + 2 halo_w) + S), the shared keys last.
    """
    bias = None if bias is None else bias.expand(q.shape[1], -1, -1)
    tile_rows = _TileRows(q, grid_size, window_size, halo)
    num_weights = q.shape[1] * tile_rows.num_queries * (math.prod(tile_rows.key_size) + k_shared.shape[2])
    tensors = q, k, v, k_shared, v_shared, bias
    return _WindowAttention.apply(*tensors, tile_rows, scale, needs_gradient(*tensors) and is_stored(num_weights))


class _TileRows:
    """The rows of tiles of a grid: reads the tiles of a row from a token map, and writes them back.

    Token maps are (B, heads, H, W, d). The tiles of queries hold up to s = h*w tokens, those of keys up to M = (h + 2
    halo_h) * (w + 2 halo_w) tokens and the S shared ones: rows beyond the grid are left out, columns are padded.
    """

    def __init__(
        self, q: Tensor, grid_size: tuple[int, int], window_size: tuple[int, int], halo: tuple[int, int]
    ) -> None:
        self.grid_size, self.window_size, self.halo = grid_size, window_size, halo
        self.key_size = window_size[0] + 2 * halo[0], window_size[1] + 2 * halo[1]
        self.num_rows, self.num_columns = (-(-size // w) for size, w in zip(grid_size, window_size))
        # those of whole tiles
        self.num_queries = self.num_rows * self.num_columns * math.prod(window_size)
        num_scores = self.num_columns * math.prod(window_size) * math.prod(self.key_size)
        samples = _slices(len(q), _NUM_SCORES // (num_scores * q.shape[1]))
        self.blocks = list(product(samples, _slices(q.shape[1], _NUM_SCORES // num_scores)))

    def __iter__(self) -> Iterator[tuple[tuple[slice, slice], int]]:
        """Pairs of a block of samples and heads and the index of a row of tiles."""
        return product(self.blocks, range(self.num_rows))

    def to_maps(self, *tokens: Tensor) -> list[Tensor]:
        """Views (B, heads, H, W, d) of tokens (B, heads, H*W, d)."""
        return [x.unflatten(2, self.grid_size) for x in tokens]

    def read_queries(self, x: Tensor, row: int) -> Tensor:
        """The tiles of a row, (b, heads, tiles, s, d)."""
        rows, _ = self._rows(row, self.window_size, (0, 0))
        padded = self._pad_columns(x[:, :, rows], self.window_size[1], 0).unflatten(3, (-1, self.window_size[1]))
        return padded.transpose(2, 3).flatten(3, 4)

    def write_queries(self, x: Tensor, row: int, tiles: Tensor) -> None:
        """The inverse of `read_queries`."""
        rows, _ = self._rows(row, self.window_size, (0, 0))
        padded = tiles.unflatten(3, (-1, self.window_size[1])).transpose(2, 3).flatten(3, 4)
        x[:, :, rows] = padded[:, :, :, : self.grid_size[1]]

    def read_keys(self, x: Tensor, shared: Tensor, row: int) -> Tensor:
        """The tiles of a row with their halos and the shared tokens, (b, heads, tiles, M + S, d)."""
        rows, _ = self._rows(row, self.key_size, self.halo)
        padded = self._pad_columns(x[:, :, rows], self.key_size[1], self.halo[1])
        M = padded.shape[2] * self.key_size[1]
        tiles = padded.new_empty(*x.shape[:2], self.num_columns, M + shared.shape[2], x.shape[-1])
        windows = padded.unfold(3, self.key_size[1], self.window_size[1])  # (b, heads, key h, tiles, d, key w)
        tiles[:, :, :, :M].unflatten(3, (-1, self.key_size[1])).copy_(windows.permute(0, 1, 3, 2, 5, 4))
        tiles[:, :, :, M:] = shared.unsqueeze(2)
        return tiles

    def add_to_keys(self, x: Tensor, shared: Tensor, row: int, tiles: Tensor) -> None:
        """Add tiles (b, heads, tiles, M + S, d) to the tokens that `read_keys` reads, its gradient."""
        tiles, shared_tiles = tiles.split([tiles.shape[3] - shared.shape[2], shared.shape[2]], dim=3)
        shared += shared_tiles.sum(dim=2)
        key_w, step = self.key_size[1], self.window_size[1]
        tiles = tiles.unflatten(3, (-1, key_w)).transpose(2, 3)  # (b, heads, key h, tiles, key w, d)
        padded = x.new_zeros(*tiles.shape[:3], (self.num_columns - 1) * step + key_w, x.shape[-1])
        # at most one window width at a time, so that no two tiles add to the same token
        for start in range(0, key_w, step):
            part = tiles[..., start : start + step, :]
            target = padded[:, :, :, start : start + (self.num_columns - 1) * step + part.shape[4]]
            target.unfold(3, part.shape[4], step).add_(part.transpose(4, 5))
        rows, _ = self._rows(row, self.key_size, self.halo)
        x[:, :, rows] += padded[:, :, :, self.halo[1] :][:, :, :, : self.grid_size[1]]

    def mask_padding_(self, scores: Tensor, row: int) -> Tensor:
        """Set the scores (b, heads, tiles, s, M + S) of padded keys to minus infinity, in place."""
        rows, _ = self._rows(row, self.key_size, self.halo)
        height = rows.stop - rows.start
        in_window = scores[..., : height * self.key_size[1]].unflatten(4, (height, self.key_size[1]))
        for column in range(self.num_columns):
            # with a halo wider than a tile, more than the outermost tiles have padding
            left = self.halo[1] - column * self.window_size[1]
            right = left + self.grid_size[1]
            if left > 0:
                in_window[:, :, column, ..., :left] = float('-inf')
            if right < self.key_size[1]:
                in_window[:, :, column, ..., right:] = float('-inf')
        return scores

    def read_bias(self, bias: Tensor, row: int) -> Tensor:
        """The bias of the queries and keys of a row of tiles, (heads, s, M + S)."""
        window, shared = self._split_bias(bias, row)
        return torch.cat([window.flatten(3).flatten(1, 2), shared.flatten(1, 2)], dim=2)

    def add_to_bias(self, bias: Tensor, row: int, row_bias: Tensor) -> None:
        """Add (heads, s, M + S) to the part of the bias that `read_bias` reads, its gradient."""
        window, shared = self._split_bias(bias, row)
        num_keys = window.shape[3] * window.shape[4]
        window += row_bias[..., :num_keys].reshape(window.shape)
        shared += row_bias[..., num_keys:].reshape(shared.shape)

    def _split_bias(self, bias: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """Views of the bias of a row of tiles, (heads, h, w, key h, key w) and (heads, h, w, S)."""
        _, rows = self._rows(row, self.window_size, (0, 0))
        _, key_rows = self._rows(row, self.key_size, self.halo)
        M = math.prod(self.key_size)
        window, shared = bias.unflatten(1, self.window_size)[:, rows].split([M, bias.shape[2] - M], dim=3)
        return window.unflatten(3, self.key_size)[:, :, :, key_rows], shared

    def _rows(self, row: int, tile_size: tuple[int, int], halo: tuple[int, int]) -> tuple[slice, slice]:
        """The grid rows that a row of tiles overlaps, as indices into the grid and into the row of tiles."""
        top = row * self.window_size[0] - halo[0]
        rows = slice(max(top, 0), min(top + tile_size[0], self.grid_size[0]))
        return rows, slice(rows.start - top, rows.stop - top)

    def _pad_columns(self, x: Tensor, tile_width: int, halo: int) -> Tensor:
        """Zero-pad (b, heads, rows, W, d) to the width of all tiles."""
        right = (self.num_columns - 1) * self.window_size[1] + tile_width - self.grid_size[1] - halo
        return pad(x, (0, 0, halo, right))


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, start + max(1, step)) for start in range(0, length, max(1, step))]


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, tile_rows: _TileRows, block: tuple[slice, slice], row: int, scale: float
) -> Tensor:
    """Scores to base 2 of a row of tiles, (b, heads, tiles, s, M + S), in float32 or wider."""
    scores = (LOG2_E * scale * q) @ k.mT
    scores = scores.to(wide_dtype(scores))
    if bias is not None:
        scores.add_(tile_rows.read_bias(bias[block[1]], row).unsqueeze(1), alpha=LOG2_E)
    return tile_rows.mask_padding_(scores, row)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    bias: Tensor | None,
    tile_rows: _TileRows,
    scale: float,
) -> Tensor:
    """`window_attention_cpu` as a composition of differentiable functions, of all samples and heads at once."""
    out, block = torch.zeros_like(q), (slice(None), slice(None))
    q_map, k_map, v_map, out_map = tile_rows.to_maps(q, k, v, out)
    for row in range(tile_rows.num_rows):
        q_tiles = tile_rows.read_queries(q_map, row)
        scores = _scores(q_tiles, tile_rows.read_keys(k_map, k_shared, row), bias, tile_rows, block, row, scale)
        weights = (scores / LOG2_E).softmax(dim=-1).to(v.dtype)
        tile_rows.write_queries(out_map, row, weights @ tile_rows.read_keys(v_map, v_shared, row))
    return out


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        bias: Tensor | None,
        tile_rows: _TileRows,
        scale: float,
        stored: bool,
    ) -> Tensor:
        B, heads, N, d = v.shape
        # (B, N, heads, d) in memory, so that merging the heads is free
        out = v.new_empty(B, N, heads, d).transpose(1, 2)
        q_map, k_map, v_map, out_map = tile_rows.to_maps(q, k, v, out)
        kept = []
        for block, row in tile_rows:
            k_tiles = tile_rows.read_keys(k_map[block], k_shared[block], row)
            q_tiles = tile_rows.read_queries(q_map[block], row)
            scores = _scores(q_tiles, k_tiles, bias, tile_rows, block, row, scale)
            m_i = scores.amax(dim=-1, keepdim=True)
            p = scores.sub_(m_i).exp2_()
            l_i = p.sum(dim=-1, keepdim=True)
            v_tiles = tile_rows.read_keys(v_map[block], v_shared[block], row)
            tile_rows.write_queries(out_map[block], row, (p.to(v.dtype) @ v_tiles).div_(l_i))
            kept.append(p.div_(l_i) if stored else m_i.add_(l_i.log2()))
        ctx.tile_rows, ctx.scale, ctx.stored = tile_rows, scale, stored
        ctx.save_for_backward(q, k, v, k_shared, v_shared, bias, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, k_shared, v_shared, bias, *kept = ctx.saved_tensors
        tile_rows, scale = ctx.tile_rows, ctx.scale
        if torch.is_grad_enabled():
            plain, tensors = partial(_plain, tile_rows=tile_rows, scale=scale), (q, k, v, k_shared, v_shared, bias)
            return *differentiable_gradients(plain, tensors, ctx.needs_input_grad, do), None, None, None
        dq = torch.empty_like(q)
        dk, dv, dk_shared, dv_shared = (torch.zeros_like(x) for x in (k, v, k_shared, v_shared))
        dbias = torch.zeros_like(bias) if ctx.needs_input_grad[5] else None
        q_map, k_map, v_map, do_map = tile_rows.to_maps(q, k, v, do)
        dq_map, dk_map, dv_map = tile_rows.to_maps(dq, dk, dv)

        # a function, so that no tensor of a row of tiles is kept while the next is computed
        def backward_of_row(block: tuple[slice, slice], row: int, p_or_lse: Tensor) -> None:
            q_tiles = tile_rows.read_queries(q_map[block], row)
            do_tiles = tile_rows.read_queries(do_map[block], row)
            k_tiles = tile_rows.read_keys(k_map[block], k_shared[block], row)
            p = p_or_lse
            if not ctx.stored:
                p = _scores(q_tiles, k_tiles, bias, tile_rows, block, row, scale).sub_(p_or_lse).exp2_()
            tile_rows.add_to_keys(dv_map[block], dv_shared[block], row, p.to(v.dtype).mT @ do_tiles)
            dp = (do_tiles @ tile_rows.read_keys(v_map[block], v_shared[block], row).mT).to(p.dtype)
            # in place, because scores are the largest tensors
            ds = dp.mul_(p)
            ds.addcmul_(p, ds.sum(dim=-1, keepdim=True), value=-1)
            if dbias is not None:
                tile_rows.add_to_bias(dbias[block[1]], row, ds.sum(dim=(0, 2)))
            ds = ds.mul_(scale).to(q.dtype)
            tile_rows.write_queries(dq_map[block], row, ds @ k_tiles)
            tile_rows.add_to_keys(dk_map[block], dk_shared[block], row, ds.mT @ q_tiles)

        with no_autocast(do):
            for (block, row), p_or_lse in zip(tile_rows, kept):
                backward_of_row(block, row, p_or_lse)
        return dq, dk, dv, dk_shared, dv_shared, dbias, None, None, None
