"""Attention in windows of a grid: one softmax over a window, the halo around it and keys that all queries share.

    out_i = sum_{j in near(i) + shared} p_ij v_j,  p_ij = exp(scale * q_i . k_j + bias_ij - lse_i)

A program holds the queries of one window and walks over its keys, which it finds in the grid where they lie: neither
tiles nor scores are ever written, and there is no padding but a mask. lse is the logarithm of the softmax's sum.

Backward computes p from lse anew. dq goes window by window, as forward does. dk and dv go by tiles of keys that are
moved by the halo, so that a halo of half a window is seen by 2 x 2 windows and not by 3 x 3: the windows that see a
tile are a rectangle of queries, and the pass is forward with the roles exchanged. What all windows share (the shared
keys and values, the biases) is summed up in as many parts as keep a GPU busy, and the parts by PyTorch. Nothing is
added by atomics: the same inputs give the same bits.

Bytes moved for each head and token, with windows of 7 x 7, a halo of 3, 9 shared keys and d = 64 in bfloat16, where
neighbouring windows find the keys they share in the cache; those of PyTorch are the inputs and outputs of its ops:

    forward: q, k, v, out and lse, 516                                           PyTorch: 10 800
    backward: three passes over q, dout and more, 1 820; with dbias 2 340        PyTorch: 16 700, 17 300
    kept for backward besides the inputs: out and lse, 132                       PyTorch: 2 080

Matrix products are in the inputs' dtype with sums in float32, everything else in float32. No one has timed this on a
GPU yet, so it stays behind timm's experimental switch.

`torch.nn.attention.flex_attention` expresses all of it but not at this cost. Shared keys must be put in front of k and
v, by a copy. The bias is a `score_mod` that reads it by place; its gradient is a scatter with atomics, so not the same
bits each time, and none is to be had on a CPU. A `mask_mod` knows windows on any grid, but blocks of keys are skipped
whole: in raster order 128 tokens are some rows of the image, and a block of queries needs every row its windows reach,
full width. To skip more, q, k, v and out must be put in the order of windows, by copies, each padded from w*w to a
multiple of the block.
"""

from math import prod

# torch 2.6 knows the schema of no other sequence
from typing import Sequence  # noqa: UP035

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ._common import dot

__all__ = ['window_attention']

LOG2_E = tl.constexpr(1.4426950408889634)
# below all scores, and finite: a difference of two is a number
LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def _find(place, y0, x0, H, W, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """Tokens of the grid at places, in raster order, of a rectangle that begins at (y0, x0), and if they exist."""
    y, x = y0 + place // COLUMNS, x0 + place % COLUMNS
    return y * W + x, (place < COUNT) & (y >= 0) & (y < H) & (x >= 0) & (x < W)


@triton.jit
def _rows(x, token, exists, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a matrix, zeros where there is none."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(x + token[:, None] * stride + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_rows(x, value, token, exists, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < D)[None, :]
    tl.store(x + token[:, None] * stride + d[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _scores(a, b, bias, place, has_bias, near, scale):
    """scale * a b^T + bias in powers of 2, and minus infinity where not `near`."""
    scores = dot(a, tl.trans(b)) * (scale * LOG2_E)
    if bias is not None:
        scores += tl.load(bias + place, mask=has_bias, other=0.0).to(tl.float32) * LOG2_E
    return tl.where(near, scores, float('-inf'))


@triton.jit
def _softmax_step(scores, v, out, top, total):
    """Take another block of keys into the weighted sum of values, relative to the highest score so far."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
    out = dot(weights.to(v.dtype), v, out * shrink[:, None])
    return out, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def _forward_kernel(
    q, k, v, k_shared, v_shared, bias, bias_shared, out, lse,
    q_b, q_h, q_n, kv_b, kv_h, kv_n, H, W, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, REACH_H: tl.constexpr, REACH_W: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of the queries of one window."""
    QUERIES: tl.constexpr = WINDOW_H * WINDOW_W
    COLUMNS: tl.constexpr = WINDOW_W + 2 * REACH_W
    KEYS: tl.constexpr = (WINDOW_H + 2 * REACH_H) * COLUMNS
    BIAS_N: tl.constexpr = (KEYS + 15) // 16 * 16
    BLOCKS: tl.constexpr = (QUERIES + BLOCK_M - 1) // BLOCK_M
    head, heads, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    tile = tl.program_id(0) // BLOCKS
    windows_w = (W + WINDOW_W - 1) // WINDOW_W
    y0, x0 = tile // windows_w * WINDOW_H, tile % windows_w * WINDOW_W
    row = b * heads + head
    k += b * kv_b + head * kv_h
    v += b * kv_b + head * kv_h

    i = tl.program_id(0) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    token, exists = _find(i, y0, x0, H, W, QUERIES, WINDOW_W)
    queries = _rows(q + b * q_b + head * q_h, token, exists, q_n, D, BLOCK_D)
    mixed = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    for start in range(0, S, BLOCK_S):
        j = start + tl.arange(0, BLOCK_S)
        keys = _rows(k_shared + row * S * D, j, j < S, D, D, BLOCK_D)
        values = _rows(v_shared + row * S * D, j, j < S, D, D, BLOCK_D)
        there = (j < S)[None, :]
        scores = _scores(queries, keys, bias_shared, (head * S + j)[None, :], there, there, scale)
        mixed, top, total = _softmax_step(scores, values, mixed, top, total)
    for start in range(0, KEYS, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        token_k, near = _find(j, y0 - REACH_H, x0 - REACH_W, H, W, KEYS, COLUMNS)
        keys = _rows(k, token_k, near, kv_n, D, BLOCK_D)
        values = _rows(v, token_k, near, kv_n, D, BLOCK_D)
        place = (head * QUERIES + i)[:, None] * BIAS_N + j[None, :]
        has_bias = (i < QUERIES)[:, None] & (j < BIAS_N)[None, :]
        scores = _scores(queries, keys, bias, place, has_bias, near[None, :], scale)
        mixed, top, total = _softmax_step(scores, values, mixed, top, total)
    out += (b * H * W * heads + head) * D
    _store_rows(out, mixed / total[:, None], token, exists, heads * D, D, BLOCK_D)
    tl.store(lse + row * H * W + token, top + tl.log2(total), mask=exists)


@triton.jit
def _query_kernel(
    q, k, v, k_shared, v_shared, bias, bias_shared, out, lse, dout, dq, delta,
    q_b, q_h, q_n, kv_b, kv_h, kv_n, do_b, do_h, do_n, H, W, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, REACH_H: tl.constexpr, REACH_W: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq of one block of the queries of one window, and delta = dout . out for the passes that follow."""
    QUERIES: tl.constexpr = WINDOW_H * WINDOW_W
    COLUMNS: tl.constexpr = WINDOW_W + 2 * REACH_W
    KEYS: tl.constexpr = (WINDOW_H + 2 * REACH_H) * COLUMNS
    BIAS_N: tl.constexpr = (KEYS + 15) // 16 * 16
    BLOCKS: tl.constexpr = (QUERIES + BLOCK_M - 1) // BLOCK_M
    head, heads, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    tile = tl.program_id(0) // BLOCKS
    windows_w = (W + WINDOW_W - 1) // WINDOW_W
    y0, x0 = tile // windows_w * WINDOW_H, tile % windows_w * WINDOW_W
    row = b * heads + head
    own = (b * H * W * heads + head) * D
    k += b * kv_b + head * kv_h
    v += b * kv_b + head * kv_h

    i = tl.program_id(0) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    token, exists = _find(i, y0, x0, H, W, QUERIES, WINDOW_W)
    queries = _rows(q + b * q_b + head * q_h, token, exists, q_n, D, BLOCK_D)
    slope = _rows(dout + b * do_b + head * do_h, token, exists, do_n, D, BLOCK_D)
    mixed = _rows(out + own, token, exists, heads * D, D, BLOCK_D)
    drift = tl.sum(slope.to(tl.float32) * mixed.to(tl.float32), 1)
    tl.store(delta + row * H * W + token, drift, mask=exists)
    log_total = tl.load(lse + row * H * W + token, mask=exists, other=float('inf'))
    grad = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    for start in range(0, S, BLOCK_S):
        j = start + tl.arange(0, BLOCK_S)
        keys = _rows(k_shared + row * S * D, j, j < S, D, D, BLOCK_D)
        values = _rows(v_shared + row * S * D, j, j < S, D, D, BLOCK_D)
        there = (j < S)[None, :]
        scores = _scores(queries, keys, bias_shared, (head * S + j)[None, :], there, there, scale)
        dscores = tl.exp2(scores - log_total[:, None]) * (dot(slope, tl.trans(values)) - drift[:, None])
        grad = dot(dscores.to(keys.dtype), keys, grad)
    for start in range(0, KEYS, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        token_k, near = _find(j, y0 - REACH_H, x0 - REACH_W, H, W, KEYS, COLUMNS)
        keys = _rows(k, token_k, near, kv_n, D, BLOCK_D)
        values = _rows(v, token_k, near, kv_n, D, BLOCK_D)
        place = (head * QUERIES + i)[:, None] * BIAS_N + j[None, :]
        has_bias = (i < QUERIES)[:, None] & (j < BIAS_N)[None, :]
        scores = _scores(queries, keys, bias, place, has_bias, near[None, :], scale)
        dscores = tl.exp2(scores - log_total[:, None]) * (dot(slope, tl.trans(values)) - drift[:, None])
        grad = dot(dscores.to(keys.dtype), keys, grad)
    _store_rows(dq + own, grad * scale, token, exists, heads * D, D, BLOCK_D)


@triton.jit
def _key_kernel(
    q, k, v, bias, lse, dout, dk, dv, delta,
    q_b, q_h, q_n, kv_b, kv_h, kv_n, do_b, do_h, do_n, H, W, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, REACH_H: tl.constexpr, REACH_W: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of one tile of keys, from the rectangle of all windows that see the tile."""
    # a tile begins where the reach of a window ends
    BACK_H: tl.constexpr = (REACH_H + WINDOW_H - 1) // WINDOW_H
    BACK_W: tl.constexpr = (REACH_W + WINDOW_W - 1) // WINDOW_W
    ROWS: tl.constexpr = (1 + (2 * REACH_H + WINDOW_H - 1) // WINDOW_H) * WINDOW_H
    COLUMNS: tl.constexpr = (1 + (2 * REACH_W + WINDOW_W - 1) // WINDOW_W) * WINDOW_W
    SIDE_H: tl.constexpr = WINDOW_H + 2 * REACH_H
    SIDE_W: tl.constexpr = WINDOW_W + 2 * REACH_W
    BIAS_N: tl.constexpr = (SIDE_H * SIDE_W + 15) // 16 * 16
    BLOCKS: tl.constexpr = (WINDOW_H * WINDOW_W + BLOCK_N - 1) // BLOCK_N
    head, heads, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    tile = tl.program_id(0) // BLOCKS
    tiles_w = (W + BACK_W * WINDOW_W - REACH_W + WINDOW_W - 1) // WINDOW_W
    y0, x0 = (tile // tiles_w - BACK_H) * WINDOW_H, (tile % tiles_w - BACK_W) * WINDOW_W
    row = b * heads + head
    own = (b * H * W * heads + head) * D
    kv = b * kv_b + head * kv_h
    q += b * q_b + head * q_h
    dout += b * do_b + head * do_h

    j = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    token, exists = _find(j, y0 + REACH_H, x0 + REACH_W, H, W, WINDOW_H * WINDOW_W, WINDOW_W)
    # counted from where the reach of the first window begins
    y_k, x_k = j // WINDOW_W + 2 * REACH_H, j % WINDOW_W + 2 * REACH_W
    keys = _rows(k + kv, token, exists, kv_n, D, BLOCK_D)
    values = _rows(v + kv, token, exists, kv_n, D, BLOCK_D)
    grad_k = tl.full((BLOCK_N, BLOCK_D), 0.0, tl.float32)
    grad_v = tl.full((BLOCK_N, BLOCK_D), 0.0, tl.float32)
    for start in range(0, ROWS * COLUMNS, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        token_q, inside = _find(i, y0, x0, H, W, ROWS * COLUMNS, COLUMNS)
        queries = _rows(q, token_q, inside, q_n, D, BLOCK_D)
        slope = _rows(dout, token_q, inside, do_n, D, BLOCK_D)
        log_total = tl.load(lse + row * H * W + token_q, mask=inside, other=float('inf'))
        drift = tl.load(delta + row * H * W + token_q, mask=inside, other=0.0)
        y, x = i // COLUMNS, i % COLUMNS
        top, left = y // WINDOW_H * WINDOW_H, x // WINDOW_W * WINDOW_W
        near = (y_k[:, None] >= top[None, :]) & (y_k[:, None] < top[None, :] + SIDE_H)
        near = near & (x_k[:, None] >= left[None, :]) & (x_k[:, None] < left[None, :] + SIDE_W)
        place = ((head * WINDOW_H + y - top) * WINDOW_W + x - left) * BIAS_N - top * SIDE_W - left
        place = place[None, :] + (y_k * SIDE_W + x_k)[:, None]
        scores = _scores(keys, queries, bias, place, near, near, scale)
        weights = tl.exp2(scores - log_total[None, :])
        grad_v = dot(weights.to(slope.dtype), slope, grad_v)
        dscores = weights * (dot(values, tl.trans(slope)) - drift[None, :])
        grad_k = dot(dscores.to(queries.dtype), queries, grad_k)
    _store_rows(dk + own, grad_k * scale, token, exists, heads * D, D, BLOCK_D)
    _store_rows(dv + own, grad_v, token, exists, heads * D, D, BLOCK_D)


@triton.jit
def _shared_kernel(
    q, k_shared, v_shared, bias_shared, lse, dout, delta, dk_shared, dv_shared, dbias_shared,
    q_b, q_h, q_n, do_b, do_h, do_n, N, steps, scale,
    S: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What one part of the queries adds to the gradients of one block of the shared keys."""
    head, heads, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    BLOCKS: tl.constexpr = (S + BLOCK_S - 1) // BLOCK_S
    part = tl.program_id(0) // BLOCKS
    j = tl.program_id(0) % BLOCKS * BLOCK_S + tl.arange(0, BLOCK_S)
    row = b * heads + head
    q += b * q_b + head * q_h
    dout += b * do_b + head * do_h
    keys = _rows(k_shared + row * S * D, j, j < S, D, D, BLOCK_D)
    values = _rows(v_shared + row * S * D, j, j < S, D, D, BLOCK_D)
    there = (j < S)[:, None]
    grad_k = tl.full((BLOCK_S, BLOCK_D), 0.0, tl.float32)
    grad_v = tl.full((BLOCK_S, BLOCK_D), 0.0, tl.float32)
    grad_bias = tl.full((BLOCK_S,), 0.0, tl.float32)
    for step in range(0, steps):
        token = (part * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = token < N
        queries = _rows(q, token, exists, q_n, D, BLOCK_D)
        slope = _rows(dout, token, exists, do_n, D, BLOCK_D)
        log_total = tl.load(lse + row * N + token, mask=exists, other=float('inf'))
        drift = tl.load(delta + row * N + token, mask=exists, other=0.0)
        scores = _scores(keys, queries, bias_shared, (head * S + j)[:, None], there, there, scale)
        weights = tl.exp2(scores - log_total[None, :])
        grad_v = dot(weights.to(slope.dtype), slope, grad_v)
        dscores = weights * (dot(values, tl.trans(slope)) - drift[None, :])
        grad_k = dot(dscores.to(queries.dtype), queries, grad_k)
        grad_bias += tl.sum(dscores, 1)
    row += part.to(tl.int64) * tl.num_programs(2) * heads
    _store_rows(dk_shared + row * S * D, grad_k * scale, j, j < S, D, D, BLOCK_D)
    _store_rows(dv_shared + row * S * D, grad_v, j, j < S, D, D, BLOCK_D)
    tl.store(dbias_shared + row * S + j, grad_bias, mask=j < S)


@triton.jit
def _bias_kernel(
    q, k, v, bias, lse, dout, delta, dbias,
    q_b, q_h, q_n, kv_b, kv_h, kv_n, do_b, do_h, do_n, B, H, W, steps, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, REACH_H: tl.constexpr, REACH_W: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What one part of all windows adds to the gradient of one block of the bias."""
    QUERIES: tl.constexpr = WINDOW_H * WINDOW_W
    COLUMNS: tl.constexpr = WINDOW_W + 2 * REACH_W
    KEYS: tl.constexpr = (WINDOW_H + 2 * REACH_H) * COLUMNS
    BIAS_N: tl.constexpr = (KEYS + 15) // 16 * 16
    BLOCKS: tl.constexpr = (KEYS + BLOCK_N - 1) // BLOCK_N
    head, heads, part = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    windows_w = (W + WINDOW_W - 1) // WINDOW_W
    windows = (H + WINDOW_H - 1) // WINDOW_H * windows_w
    i = tl.program_id(0) // BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    place = (head * QUERIES + i)[:, None] * BIAS_N + j[None, :]
    has_bias = (i < QUERIES)[:, None] & (j < BIAS_N)[None, :]
    grad = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for step in range(0, steps):
        tile = part * steps + step
        b, tile = (tile // windows).to(tl.int64), tile % windows
        y0, x0 = tile // windows_w * WINDOW_H, tile % windows_w * WINDOW_W
        # past the last window nothing exists
        height = tl.where(b < B, H, 0)
        token, exists = _find(i, y0, x0, height, W, QUERIES, WINDOW_W)
        queries = _rows(q + b * q_b + head * q_h, token, exists, q_n, D, BLOCK_D)
        slope = _rows(dout + b * do_b + head * do_h, token, exists, do_n, D, BLOCK_D)
        row = (b * heads + head) * H * W
        log_total = tl.load(lse + row + token, mask=exists, other=float('inf'))
        drift = tl.load(delta + row + token, mask=exists, other=0.0)
        token_k, near = _find(j, y0 - REACH_H, x0 - REACH_W, height, W, KEYS, COLUMNS)
        keys = _rows(k + b * kv_b + head * kv_h, token_k, near, kv_n, D, BLOCK_D)
        values = _rows(v + b * kv_b + head * kv_h, token_k, near, kv_n, D, BLOCK_D)
        scores = _scores(queries, keys, bias, place, has_bias, near[None, :], scale)
        grad += tl.exp2(scores - log_total[:, None]) * (dot(slope, tl.trans(values)) - drift[:, None])
    dbias += (part.to(tl.int64) * heads + head) * QUERIES * KEYS
    tl.store(dbias + i[:, None] * KEYS + j[None, :], grad, mask=(i < QUERIES)[:, None] & (j < KEYS)[None, :])


# programs that keep a large GPU busy
PROGRAMS = 1024


@torch.library.custom_op('vitzoo::window_attention', mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor,
    bias: torch.Tensor | None, bias_shared: torch.Tensor | None,
    grid_size: Sequence[int], window: Sequence[int], reach: Sequence[int], scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`window_attention` and the logarithm to base 2 of the sums of its softmax, (B, heads, H*W)."""
    (B, heads, _, D), S = q.shape, k_shared.shape[2]
    q, k, v, k_shared, v_shared, bias, bias_shared = _arrange(q, k, v, k_shared, v_shared, bias, bias_shared)
    out, lse = _empty_outputs(q)
    queries = window[0] * window[1]
    blocks = _blocks(q, BLOCK_M=queries, BLOCK_N=_num_keys(window, reach), BLOCK_S=S)
    grid = _num_windows(grid_size, window) * triton.cdiv(queries, blocks['BLOCK_M']), heads, B
    with torch.cuda.device_of(q):
        _forward_kernel[grid](
            q, k, v, k_shared, v_shared, bias, bias_shared, out, lse, *q.stride()[:3], *k.stride()[:3],
            *grid_size, scale, *window, *reach, S, D, **blocks,
        )  # fmt: skip
    return out, lse


@torch.library.custom_op('vitzoo::window_attention_backward', mutates_args=())
def _backward(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor,
    bias: torch.Tensor | None, bias_shared: torch.Tensor | None,
    grid_size: Sequence[int], window: Sequence[int], reach: Sequence[int], scale: float, needs_dbias: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """The gradients of q, k, v, k_shared, v_shared, bias and bias_shared, the last two empty where there is none."""
    (B, heads, _, D), S, queries = q.shape, k_shared.shape[2], window[0] * window[1]
    q, k, v, k_shared, v_shared, bias, bias_shared = _arrange(q, k, v, k_shared, v_shared, bias, bias_shared)
    out, dout = out.transpose(1, 2).contiguous(), _with_rows(dout)
    dq, dk, dv = (_empty_outputs(q)[0] for _ in range(3))
    delta = torch.empty_like(lse)
    strides = *q.stride()[:3], *k.stride()[:3], *dout.stride()[:3]
    with torch.cuda.device_of(q):
        blocks = _blocks(q, BLOCK_M=queries, BLOCK_N=_num_keys(window, reach), BLOCK_S=S)
        grid = _num_windows(grid_size, window) * triton.cdiv(queries, blocks['BLOCK_M']), heads, B
        _query_kernel[grid](
            q, k, v, k_shared, v_shared, bias, bias_shared, out, lse, dout, dq, delta, *strides,
            *grid_size, scale, *window, *reach, S, D, **blocks,
        )  # fmt: skip
        # tiles of keys begin where the reach of a window ends
        tiles = _num_windows([n + -far % w for n, far, w in zip(grid_size, reach, window)], window)
        blocks = _blocks(q, BLOCK_M=32, BLOCK_N=queries)
        grid = tiles * triton.cdiv(queries, blocks['BLOCK_N']), heads, B
        _key_kernel[grid](
            q, k, v, bias, lse, dout, dk, dv, delta, *strides, *grid_size, scale, *window, *reach, D, **blocks
        )
        dbias = q.new_empty(0)
        if needs_dbias:
            dbias = _bias_gradient(q, k, v, bias, lse, dout, delta, grid_size, window, reach, scale)
        dk_shared, dv_shared, dbias_shared = _shared_gradients(
            q, k_shared, v_shared, bias_shared, lse, dout, delta, scale
        )
    return dq, dk, dv, dk_shared, dv_shared, dbias, dbias_shared


def _bias_gradient(q, k, v, bias, lse, dout, delta, grid_size, window, reach, scale):
    B, heads, _, D = q.shape
    queries, keys = window[0] * window[1], _num_keys(window, reach)
    blocks = _blocks(q, BLOCK_M=queries, BLOCK_N=32)
    places = triton.cdiv(queries, blocks['BLOCK_M']) * triton.cdiv(keys, blocks['BLOCK_N'])
    parts, steps = _split(B * _num_windows(grid_size, window), places * heads)
    sums = bias.new_empty(parts, heads, queries, keys, dtype=torch.float32)
    _bias_kernel[places, heads, parts](
        q, k, v, bias, lse, dout, delta, sums, *q.stride()[:3], *k.stride()[:3], *dout.stride()[:3],
        B, *grid_size, steps, scale, *window, *reach, D, **blocks,
    )  # fmt: skip
    return sums.sum(dim=0).to(bias.dtype)


def _shared_gradients(q, k_shared, v_shared, bias_shared, lse, dout, delta, scale):
    (B, heads, N, D), S = q.shape, k_shared.shape[2]
    blocks = _blocks(q, BLOCK_M=N, BLOCK_S=S)
    places = triton.cdiv(S, blocks['BLOCK_S'])
    parts, steps = _split(triton.cdiv(N, blocks['BLOCK_M']), max(1, places) * heads * B)
    dk, dv = (lse.new_empty(parts, B, heads, S, D) for _ in range(2))
    dbias = lse.new_empty(parts, B, heads, S)
    if S > 0:
        _shared_kernel[parts * places, heads, B](
            q, k_shared, v_shared, bias_shared, lse, dout, delta, dk, dv, dbias, *q.stride()[:3], *dout.stride()[:3],
            N, steps, scale, S, D, **blocks,
        )  # fmt: skip
    dbias = q.new_empty(0) if bias_shared is None else dbias.sum(dim=(0, 1)).to(bias_shared.dtype)
    return dk.sum(dim=0).to(q.dtype), dv.sum(dim=0).to(q.dtype), dbias


def _arrange(q, k, v, k_shared, v_shared, bias, bias_shared):
    """The inputs as the kernels read them: q, k, v in rows that lie anywhere, k and v alike; the rest in one piece."""
    k, v = _with_rows(k), _with_rows(v)
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    if bias is not None:
        # rows that begin at multiples of 16 are read in wide words
        bias = F.pad(bias, (0, -bias.shape[-1] % 16)).contiguous()
    bias_shared = None if bias_shared is None else bias_shared.contiguous()
    return _with_rows(q), k, v, k_shared.contiguous(), v_shared.contiguous(), bias, bias_shared


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An output in memory as (B, N, heads, d), where merging the heads costs no copy, and one number per query."""
    B, heads, N, D = q.shape
    return q.new_empty(B, N, heads, D).transpose(1, 2), q.new_empty(B, heads, N, dtype=torch.float32)


def _blocks(q: torch.Tensor, **sizes: int) -> dict[str, int]:
    """Block sizes that are powers of 2, at least the 16 of a tensor core and no larger than registers allow."""
    D = max(16, triton.next_power_of_2(q.shape[-1]))
    most = 64 if q.element_size() == 2 and D <= 64 else 32
    blocks = {name: min(most, max(16, triton.next_power_of_2(size))) for name, size in sizes.items()}
    # loops of a few blocks do not repay a third stage in shared memory
    return {**blocks, 'BLOCK_D': D, 'num_warps': 8 if D * q.element_size() >= 256 else 4, 'num_stages': 2}


def _split(total: int, programs: int) -> tuple[int, int]:
    """Parts of a sum of `total` terms that `programs` programs take at a time, and the terms of each."""
    steps = triton.cdiv(total, min(total, triton.cdiv(PROGRAMS, programs)))
    return triton.cdiv(total, steps), steps


def _num_windows(grid_size: Sequence[int], window: Sequence[int]) -> int:
    return prod(-(-size // side) for size, side in zip(grid_size, window))


def _num_keys(window: Sequence[int], reach: Sequence[int]) -> int:
    return prod(side + 2 * far for side, far in zip(window, reach))


@_forward.register_fake
def _(q, *inputs):
    return _empty_outputs(q)


@_backward.register_fake
def _(dout, out, lse, q, k, v, k_shared, v_shared, bias, bias_shared, *sizes):
    dq, dk, dv = (_empty_outputs(q)[0] for _ in range(3))
    dbias = q.new_empty(0) if bias is None or not sizes[-1] else bias.new_empty(bias.shape)
    dbias_shared = q.new_empty(0) if bias_shared is None else bias_shared.new_empty(bias_shared.shape)
    return dq, dk, dv, q.new_empty(k_shared.shape), q.new_empty(v_shared.shape), dbias, dbias_shared


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.sizes = inputs[7:]


def _differentiate(ctx, dout, dlse):
    needs_dbias, needs_dbias_shared = ctx.needs_input_grad[5:7]
    *grads, dbias, dbias_shared = _backward(dout, *ctx.saved_tensors, *ctx.sizes, needs_dbias)
    dbias, dbias_shared = dbias if needs_dbias else None, dbias_shared if needs_dbias_shared else None
    return *grads, dbias, dbias_shared, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.vitzoo.window_attention)
def _forward_flops(q, k, v, k_shared, v_shared, bias, bias_shared, grid_size, window, reach, *args, **kwargs) -> int:
    """Two products for each query and key of each window, those in the padding included as in the PyTorch form."""
    (B, heads, _, D), keys = q, _num_keys(window, reach) + k_shared[2]
    return 4 * B * heads * _num_windows(grid_size, window) * window[0] * window[1] * keys * D


@register_flop_formula(torch.ops.vitzoo.window_attention_backward)
def _backward_flops(dout, out, lse, *args, **kwargs) -> int:
    """Five products where forward has two, as torch counts fused attention: the scores once more, and four."""
    return _forward_flops(*args) // 2 * 5


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    grid_size: tuple[int, int],
    window: tuple[int, int],
    reach: tuple[int, int],
    scale: float,
    bias: torch.Tensor | None = None,
    bias_shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grid tokens q, k, v (B, heads, H*W, d), shared keys and values (B, heads, S, d) -> (B, heads, H*W, d).

    All five are of one dtype and of d <= 128 (float32: 64). Windows are of h x w tokens, keys reach `reach` = (y, x)
    tokens beyond on each side; `bias` (heads or 1, h*w, (h + 2y) * (w + 2x)), `bias_shared` (heads, S).
    """
    if bias is not None:
        bias = bias.expand(q.shape[1], -1, -1)
    return _forward(q, k, v, k_shared, v_shared, bias, bias_shared, grid_size, window, reach, scale)[0]
