"""Sparse Sinkhorn attention: blocks of tokens attend themselves and the block that a differentiable sort assigns them.

    S      = sinkhorn((scale * q~ k~^T + noise) / temperature),  q~ and k~ the means of the blocks
    K'_ip  = sum_j S_ij m_jp k_jp / M_ip,   V'_ip = sum_j S_ij m_jp v_jp / M_ip,   M_ip = sum_j S_ij m_jp
    out of block i = softmax(scale * q_i . [K_i ; K'_i] + [0 ; log M_i]) [V_i ; V'_i]

`sinkhorn` normalizes the columns and the rows of exp(x) alternately, in log space, and ends with the rows, where the
paper ends with the columns: rows sum to 1, columns only nearly, the less so the sharper the sort and the fewer the
iterations. Blocks are b x b tiles of the grid, p is a position in a tile and m_jp is 0 if position p of tile j is
outside the grid, else 1: a sorted token is the weighted mean of the tokens sorted into its position and counts with
their total weight (M = 1 without partial tiles); below 1e-3 it is masked. The paper's sorting network maps a block to
one logit per block and so depends on the length; here the projections q and k replace it, for each head. A block that
is assigned itself counts twice, as in the paper. With one block it is softmax attention in which the tokens of the grid
count twice. Gumbel noise is added in training only. Prefix tokens are global and not sorted. Cost: O(N (2 b^2 + N / b^2
+ P) dim), the second term for moving the sorted blocks, so N^1.5 if b^2 grows with sqrt(N). Sparse Sinkhorn Attention,
section 3, https://arxiv.org/abs/2002.11296
"""

from typing import Any

import torch
from torch.nn import functional as F

from ._numerics import mask_bias, wide_dtype
from ._qkv import split_prefix
from ._window import fit_window, halo_mask, tile, untile
from .base import QKVMixer, no_autocast, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Sinkhorn', 'block_sort', 'log_sinkhorn', 'sinkhorn_attention', 'sinkhorn_naive']

_MIN_MASS = 1e-3


def log_sinkhorn(logits: torch.Tensor, num_iterations: int) -> torch.Tensor:
    """Logarithm of nearly doubly stochastic matrices from logits (..., T, T); rows sum to one exactly."""
    for _ in range(num_iterations):
        logits = logits.log_softmax(dim=-2).log_softmax(dim=-1)
    return logits


def sinkhorn_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    noise: torch.Tensor | None,
    grid_size: tuple[int, int],
    block_size: int,
    num_iterations: int,
    temperature: float,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Block by block and position by position; arguments as `sinkhorn_attention`."""
    (H, W), b = grid_size, block_size
    P = q.shape[2] - H * W
    corners = [(y, x) for y in range(0, H, b) for x in range(0, W, b)]
    places = [(y, x) for y in range(b) for x in range(b)]
    # index of the token at each position of each block, without positions outside the grid
    blocks = [{(y, x): P + (y0 + y) * W + x0 + x for y, x in places if y0 + y < H and x0 + x < W} for y0, x0 in corners]
    means_q, means_k = (
        torch.stack([x[:, :, list(block.values())].mean(dim=2) for block in blocks], dim=2) for x in (q, k)
    )
    sort = (scale * means_q @ means_k.mT + (0 if noise is None else noise)) / temperature
    sort = (sort - sort.amax(dim=(-2, -1), keepdim=True)).exp()
    for _ in range(num_iterations):
        sort = sort / sort.sum(dim=-2, keepdim=True)
        sort = sort / sort.sum(dim=-1, keepdim=True)

    out = torch.zeros_like(q)
    out[:, :, :P] = softmax_naive(q[:, :, :P], k, v, scale, None, dropout_p)
    for i, block in enumerate(blocks):
        own = list(range(P)) + list(block.values())
        keys, values, bias = [k[:, :, own]], [v[:, :, own]], [q.new_zeros(*q.shape[:2], len(own))]
        for place in places:
            sources = [(j, other[place]) for j, other in enumerate(blocks) if place in other]
            if not sources:
                continue
            weights = torch.stack([sort[:, :, i, j] for j, _ in sources], dim=-1)
            mass = weights.sum(dim=-1, keepdim=True)
            weights, tokens = (weights / mass).unsqueeze(2), [token for _, token in sources]
            keys.append(weights @ k[:, :, tokens])
            values.append(weights @ v[:, :, tokens])
            bias.append(mass.log().masked_fill(mass <= _MIN_MASS, float('-inf')))
        keys, values, bias = torch.cat(keys, dim=2), torch.cat(values, dim=2), torch.cat(bias, dim=2).unsqueeze(2)
        rows = list(block.values())
        out[:, :, rows] = softmax_naive(q[:, :, rows], keys, values, scale, bias, dropout_p)
    return out


def sinkhorn_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    noise: torch.Tensor | None,
    grid_size: tuple[int, int],
    block_size: int,
    num_iterations: int,
    temperature: float,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d).

    `noise` (B, heads, T, T) is added to the logits of the T blocks.
    """
    P = q.shape[2] - grid_size[0] * grid_size[1]
    window = fit_window(grid_size, block_size)
    inside = halo_mask(grid_size, window, (0, 0), q.device)  # (T, b*b)
    has_partial_tiles = any(size % side for size, side in zip(grid_size, window))
    (q_prefix, q_grid), (k_prefix, k_grid), (v_prefix, v_grid) = (split_prefix(x, P) for x in (q, k, v))
    # a copy now, or one for each product below
    q_tiles, k_tiles, v_tiles = (
        tile(x, grid_size, window).contiguous() for x in (q_grid, k_grid, v_grid)
    )  # (B, heads, T, b*b, d)
    if has_partial_tiles:
        # tiles of a padded grid are a copy
        for tiles in (k_tiles, v_tiles):
            tiles.masked_fill_(~inside.unsqueeze(-1), 0)
    sort = block_sort(q_tiles, k_tiles, inside, noise, num_iterations, temperature, scale)  # (B, heads, T, T)
    # without partial tiles M is 1
    mass = _mass(sort, inside) if has_partial_tiles else None
    keys, values = (
        torch.cat(
            [prefix.unsqueeze(2).expand(-1, -1, len(inside), -1, -1), tiles, _sorted_tiles(sort, tiles, mass)], dim=3
        )
        for prefix, tiles in ((k_prefix, k_tiles), (v_prefix, v_tiles))
    )
    if mass is None:
        q_flat, k_flat, v_flat = (x.flatten(1, 2) for x in (q_tiles, keys, values))
        out = softmax_attention(q_flat, k_flat, v_flat, scale, None, dropout_p).unflatten(1, (-1, len(inside)))
    else:
        # in place, because the scores are the largest tensor
        scores = ((scale * q_tiles) @ keys.mT).to(mass.dtype).add_(_log_weights(inside, mass, P).unsqueeze(3))
        out = F.dropout(scores.softmax(dim=-1).to(v.dtype), dropout_p) @ values
    out = untile(out, grid_size, window)
    if P == 0:
        return out
    return torch.cat([softmax_attention(q_prefix, k, v, scale, None, dropout_p), out], dim=2)


def block_sort(
    q_tiles: torch.Tensor,
    k_tiles: torch.Tensor,
    inside: torch.Tensor,
    noise: torch.Tensor | None,
    num_iterations: int,
    temperature: float,
    scale: float,
) -> torch.Tensor:
    """S of the formula, (B, heads, T, T), float32 or wider: row i weights the blocks sorted to block i."""
    dtype = wide_dtype(q_tiles)
    with no_autocast(q_tiles):
        share = inside.to(dtype).unsqueeze(1)  # (T, 1, b*b)
        share = share / share.sum(dim=-1, keepdim=True)
        means_q, means_k = ((share @ x.to(dtype)).squeeze(3) for x in (q_tiles, k_tiles))
        logits = scale * means_q @ means_k.mT
        if noise is not None:
            logits = logits + noise
        return log_sinkhorn(logits / temperature, num_iterations).exp()


def _mass(sort: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """M of the formula, (B, heads, T, b*b), in the dtype of `sort`: the gradient of 1 / M overflows in float16."""
    with no_autocast(sort):
        return sort @ inside.to(sort.dtype)


def _sorted_tiles(sort: torch.Tensor, tiles: torch.Tensor, mass: torch.Tensor | None) -> torch.Tensor:
    """K' or V' of the formula, (B, heads, T, b*b, d); zero where M is too small, M is 1 if `mass` is None."""
    # gradients divided by a small mass exceed the range of float16
    with no_autocast(tiles):
        moved = (sort @ tiles.to(sort.dtype).flatten(3)).unflatten(3, tiles.shape[3:])
        if mass is not None:
            absent = mass <= _MIN_MASS
            moved = moved * mass.masked_fill(absent, 1).reciprocal().masked_fill(absent, 0).unsqueeze(-1)
        return moved.to(tiles.dtype)


def _log_weights(inside: torch.Tensor, mass: torch.Tensor, num_prefix_tokens: int) -> torch.Tensor:
    """[0 ; 0 or minus infinity outside the grid ; log M] of the keys of a tile, (B, heads, T, P + 2 b*b)."""
    own = mask_bias(inside, mass).expand_as(mass)
    absent = mass <= _MIN_MASS
    moved = mass.masked_fill(absent, 1).log().masked_fill(absent, float('-inf'))
    return torch.cat([mass.new_zeros(*mass.shape[:3], num_prefix_tokens), own, moved], dim=-1)


@register_mixer('sinkhorn')
class Sinkhorn(QKVMixer):
    """Sinkhorn attention in `block_size` x `block_size` blocks, sorted by `num_iterations` steps at `temperature`.

    The Gumbel noise in training is drawn from torch's default generator of the device.
    """

    attn_weights = True
    token_weights = True
    op = staticmethod(sinkhorn_attention)
    op_naive = staticmethod(sinkhorn_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        block_size: int = 7,
        num_iterations: int = 8,
        temperature: float = 0.75,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if block_size < 1 or num_iterations < 1 or not temperature > 0:
            raise ValueError(
                f'sinkhorn needs block_size and num_iterations of at least 1 and a temperature above 0, '
                f'not {block_size}, {num_iterations} and {temperature}.'
            )
        self.block_size = block_size
        self.num_iterations = num_iterations
        self.temperature = temperature

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        noise = self.gumbel_noise(q, grid_size) if self.training else None
        return self.op(
            q, k, v, noise, grid_size, self.block_size,
            self.num_iterations, self.temperature, self.scale, self.dropout_p,
        )  # fmt: skip

    def gumbel_noise(self, q: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """Standard Gumbel noise for the logits of each sample and head, (B, heads, T, T), float32 or wider."""
        T = -(-grid_size[0] // self.block_size) * -(-grid_size[1] // self.block_size)
        dtype = wide_dtype(q)
        exponential = torch.empty(*q.shape[:2], T, T, device=q.device, dtype=dtype).exponential_()
        return -exponential.clamp(min=torch.finfo(dtype).tiny).log()
