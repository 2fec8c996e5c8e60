"""Window attention on a CPU, one row of tiles of a few samples or heads at a time, whose scores fit in its cache.

What window_attention defines, without ever holding the tiles, halos and scores of the whole grid: the forward pass
keeps queries, keys, values, outputs and the logarithm of each softmax's sum, and the backward pass makes the rest
again.
"""

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._positive_features import LOG2_E

__all__ = ['strip_attention']

# so many numbers lie in the cache of a processor's core
CACHED = 2**20


def strip_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    grid_size: tuple[int, int],
    window: tuple[int, int],
    reach: tuple[int, int],
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Grid tokens q, k, v (B, heads, H*W, d), shared keys and values (B, heads, S, d) -> (B, heads, H*W, d).

    Tiles of size `window` attend themselves, the halo that is `reach` wide, and the shared keys; `bias` is (heads or 1,
    h*w, (h + 2 reach_h) * (w + 2 reach_w) + S), for the shared keys last.
    """
    bias = None if bias is None else bias.expand(q.shape[1], -1, -1)
    return _StripAttention.apply(q, k, v, k_shared, v_shared, bias, _Strips(q, grid_size, window, reach), scale)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, start + max(1, step)) for start in range(0, length, max(1, step))]


class _Strips:
    """The rows of tiles of a grid: what each holds of a map of tokens, and back."""

    def __init__(self, q: Tensor, grid_size: tuple[int, int], window: tuple[int, int], reach: tuple[int, int]) -> None:
        self.grid_size, self.window, self.reach = grid_size, window, reach
        self.side = tuple(size + 2 * halo for size, halo in zip(window, reach))
        self.rows, self.tiles = (-(-size // tile) for size, tile in zip(grid_size, window))
        size = self.tiles * math.prod(window) * math.prod(self.side)
        samples, heads = _slices(len(q), CACHED // (size * q.shape[1])), _slices(q.shape[1], CACHED // size)
        self.parts = list(product(samples, heads))

    def __iter__(self) -> Iterator[tuple[tuple[slice, slice], int]]:
        """A few samples and heads, and a row of tiles."""
        return product(self.parts, range(self.rows))

    def maps(self, *tokens: Tensor) -> list[Tensor]:
        """Tokens (B, heads, H*W, d) on their grid, (B, heads, H, W, d), views."""
        return [x.unflatten(2, self.grid_size) for x in tokens]

    def queries(self, x: Tensor, row: int) -> Tensor:
        """The tiles of a row, (b, heads, tiles, h*w, d), zeros beyond the grid."""
        strip = self._strip(x, row, self.window, (0, 0)).unflatten(3, (-1, self.window[1]))
        return strip.transpose(2, 3).flatten(3, 4)

    def put_queries(self, x: Tensor, row: int, tiles: Tensor) -> None:
        """Write what `queries` reads."""
        strip = tiles.unflatten(3, self.window).transpose(2, 3).flatten(3, 4)
        inside, of_strip = self._overlap(row, self.window, (0, 0))
        x[:, :, inside] = strip[:, :, of_strip, : self.grid_size[1]]

    def keys(self, x: Tensor, shared: Tensor, row: int) -> Tensor:
        """The tiles of a row, their halos and what is shared, (b, heads, tiles, M + S, d), zeros beyond the grid."""
        strip = self._strip(x, row, self.side, self.reach)
        tiles = strip.new_empty(*x.shape[:2], self.tiles, math.prod(self.side) + shared.shape[2], x.shape[-1])
        inside, outside = self._split(tiles, dim=3)
        # (b, heads, tall, tiles, d, wide)
        inside.unflatten(3, self.side).copy_(strip.unfold(3, self.side[1], self.window[1]).permute(0, 1, 3, 2, 5, 4))
        outside.copy_(shared.unsqueeze(2))
        return tiles

    def add_keys(self, x: Tensor, shared: Tensor, row: int, tiles: Tensor) -> None:
        """Add up what `keys` reads, where it came from."""
        inside, outside = self._split(tiles, dim=3)
        shared += outside.sum(dim=2)
        inside = inside.unflatten(3, self.side).transpose(2, 3)  # (b, heads, tall, tiles, wide, d)
        (tall, wide), step = self.side, self.window[1]
        strip = x.new_zeros(*x.shape[:2], tall, (self.tiles - 1) * step + wide, x.shape[-1])
        # a tile at most at a time, so that no two add to one place
        for start in range(0, wide, step):
            part = inside[..., start : start + step, :]
            places = strip[:, :, :, start : start + (self.tiles - 1) * step + part.shape[4]]
            places.unfold(3, part.shape[4], step).add_(part.transpose(4, 5))
        rows, of_strip = self._overlap(row, self.side, self.reach)
        x[:, :, rows] += strip[:, :, of_strip, self.reach[1] :][:, :, :, : self.grid_size[1]]

    def hide(self, scores: Tensor, row: int) -> Tensor:
        """Give the keys beyond the grid no weight, in scores (b, heads, tiles, s, M + S)."""
        inside, _ = self._split(scores, dim=4)
        inside = inside.unflatten(4, self.side)
        _, rows = self._overlap(row, self.side, self.reach)
        inside[..., : rows.start, :] = float('-inf')
        inside[..., rows.stop :, :] = float('-inf')
        (_, wide), (_, step), (_, halo), (_, W) = self.side, self.window, self.reach, self.grid_size
        for tile in range(self.tiles):
            # of a halo wider than a tile more than the outermost tile sees the edge
            left, right = halo - tile * step, W + halo - tile * step
            if left > 0:
                inside[:, :, tile, ..., :left] = float('-inf')
            if right < wide:
                inside[:, :, tile, ..., right:] = float('-inf')
        return scores

    def _split(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        M = math.prod(self.side)
        return x.narrow(dim, 0, M), x.narrow(dim, M, x.shape[dim] - M)

    def _overlap(self, row: int, side: tuple[int, int], halo: tuple[int, int]) -> tuple[slice, slice]:
        """The rows of the grid that a strip of that height holds, and where it holds them."""
        top = row * self.window[0] - halo[0]
        inside = slice(max(top, 0), min(top + side[0], self.grid_size[0]))
        return inside, slice(inside.start - top, inside.stop - top)

    def _strip(self, x: Tensor, row: int, side: tuple[int, int], halo: tuple[int, int]) -> Tensor:
        """A row of tiles with its halo, (b, heads, tall, columns, d)."""
        inside, of_strip = self._overlap(row, side, halo)
        columns = (self.tiles - 1) * self.window[1] + side[1]
        strip = x.new_zeros(*x.shape[:2], side[0], columns, x.shape[-1])
        strip[:, :, of_strip, halo[1] : halo[1] + self.grid_size[1]] = x[:, :, inside]
        return strip


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, strips: _Strips, part: tuple[slice, slice], row: int, scale: float
) -> Tensor:
    """Scores to base 2 of a row of tiles, (b, heads, tiles, s, M + S), in float32 or wider."""
    scores = (LOG2_E * scale * q) @ k.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores.add_(bias[part[1]].unsqueeze(1), alpha=LOG2_E)
    return strips.hide(scores, row)


class _StripAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, k_shared, v_shared, bias, strips, scale):
        B, heads, N, d = v.shape
        # with the heads of a token side by side, as they are merged next
        out = v.new_empty(B, N, heads, d).transpose(1, 2)
        q_map, k_map, v_map, out_map = strips.maps(q, k, v, out)
        sums = []
        for part, row in strips:
            keys = strips.keys(k_map[part], k_shared[part], row)
            scores = _scores(strips.queries(q_map[part], row), keys, bias, strips, part, row, scale)
            largest = scores.amax(dim=-1, keepdim=True)
            weights = scores.sub_(largest).exp2_()
            total = weights.sum(dim=-1, keepdim=True)
            sums.append(largest.add_(total.log2()))
            values = strips.keys(v_map[part], v_shared[part], row)
            strips.put_queries(out_map[part], row, (weights.to(v.dtype) @ values).div_(total))
        ctx.strips, ctx.scale = strips, scale
        ctx.save_for_backward(q, k, v, k_shared, v_shared, bias, out, *sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, k_shared, v_shared, bias, out, *sums = ctx.saved_tensors
        strips, scale = ctx.strips, ctx.scale
        grad_q = torch.empty_like(q)
        grad_k, grad_v, grad_k_shared, grad_v_shared = (torch.zeros_like(x) for x in (k, v, k_shared, v_shared))
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[5] else None
        q_map, k_map, v_map, out_map, grad_map = strips.maps(q, k, v, out, grad)
        grad_q_map, grad_k_map, grad_v_map = strips.maps(grad_q, grad_k, grad_v)
        for (part, row), total in zip(strips, sums):
            queries, of_out = strips.queries(q_map[part], row), strips.queries(grad_map[part], row)
            keys = strips.keys(k_map[part], k_shared[part], row)
            weights = _scores(queries, keys, bias, strips, part, row, scale).sub_(total).exp2_()
            of_values = weights.to(v.dtype).mT @ of_out
            strips.add_keys(grad_v_map[part], grad_v_shared[part], row, of_values)
            values = strips.keys(v_map[part], v_shared[part], row)
            mean = (of_out * strips.queries(out_map[part], row)).sum(dim=-1, keepdim=True)
            of_scores = (of_out @ values.mT).to(weights.dtype).sub_(mean).mul_(weights)
            if grad_bias is not None:
                grad_bias[part[1]] += of_scores.sum(dim=(0, 2))
            of_scores = of_scores.mul_(scale).to(q.dtype)
            strips.put_queries(grad_q_map[part], row, of_scores @ keys)
            strips.add_keys(grad_k_map[part], grad_k_shared[part], row, of_scores.mT @ queries)
        return grad_q, grad_k, grad_v, grad_k_shared, grad_v_shared, grad_bias, None, None
