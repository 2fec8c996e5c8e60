"""Attention in windows of a grid: one softmax over a window, the halo around it, and keys that all queries share.

    out_i = sum_{j in near(i) + shared} p_ij v_j,  p_ij = exp(scale * q_i . k_j + bias_ij - lse_i)

A program processes the queries of one window and loops over its keys, which it reads from the grid: neither tiles nor
scores are written to memory, and padding is only a mask. lse is the log-sum-exp of the scores.

The first window may begin above and to the left of the grid: Swin's shifted windows are those of the grid itself, and
need not be rolled. That offset is an argument that Triton does not specialize, so that shifted and other layers share
their kernels.

Backward recomputes p from lse. dq is computed window by window, like the output. dk and dv are computed by tiles of
keys that begin at the end of a halo, so that with a halo of half a window 2 x 2 windows attend a tile, not 3 x 3: the
windows that attend a tile are a rectangle of queries, and the pass is forward with queries and keys exchanged. The
gradients of what all windows share (shared keys and values, biases) are summed in as many parts as fill a GPU, and the
parts are summed by PyTorch. There are no atomics, so results are deterministic.

Bytes moved for each head and token, with windows of 7 x 7, a halo of 3, 9 shared keys and d = 64 in bfloat16, if
neighbouring windows read their common keys from the cache; for PyTorch, the inputs and outputs of its ops:

    forward: q, k, v, out and lse, 516                                           PyTorch: 10 800
    backward: three passes over q, do and more, 1 820; with dbias 2 340          PyTorch: 16 700, 17 300
    saved for backward in addition to the inputs: out and lse, 132               PyTorch: 2 080

Matrix products are in the inputs' dtype and accumulate in float32; everything else is in float32.

`torch.nn.attention.flex_attention` can express all of it, at a higher cost. Shared keys must be concatenated to k and
v, a copy. The bias is a `score_mod` that reads it by index; its gradient is a scatter with atomics, so not
deterministic, and not available on a CPU. A `mask_mod` expresses windows on any grid, but only whole blocks of keys are
skipped: in raster order 128 tokens are some rows of the image, and a block of queries needs every row that its windows
touch, in full width. To skip more, q, k, v and out must be permuted to window order, by copies, each padded from w*w to
a multiple of the block.
"""

from math import prod

# torch 2.6 infers a schema from no other sequence type
from typing import Sequence  # noqa: UP035

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ._common import RCP_LN2, contiguous_rows, dot, empty_output, load_rows, store_rows

__all__ = ['backward_op', 'fits', 'forward_op', 'window_attention_triton']

# programs that fill a large GPU; a sum is split over as many
_NUM_PROGRAMS = 1024
# samples are the third dimension of a launch, for which this is CUDA's limit
_MOST_SAMPLES = 65_535
# Triton would compile the kernels again for offsets of 1 and of multiples of 16, such as 0
_NOT_SPECIALIZED = ('offset_h', 'offset_w')
# below all scores, and finite, so that differences are not nan
_LOWEST = tl.constexpr(-3.4e38)


def fits(q: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return True if the kernel supports these inputs: one dtype and head dimension, of at most 256 bytes."""
    is_uniform = all(x.dtype == q.dtype and x.shape[-1] == q.shape[-1] for x in others)
    # not asked while compiling, where the answer would limit a batch of any size
    is_launchable = torch.compiler.is_compiling() or q.shape[0] <= _MOST_SAMPLES
    return is_uniform and is_launchable and q.shape[-1] * q.element_size() <= 256


def window_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: tuple[int, int],
    halo: tuple[int, int],
    offset: tuple[int, int],
    scale: float,
    bias: torch.Tensor | None = None,
    bias_shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grid tokens q, k, v (B, heads, H*W, d), shared keys and values (B, heads, S, d) -> (B, heads, H*W, d).

    Windows are of `window_size` = (h, w) tokens and attend `halo` = (y, x) tokens more on each side. The first begins
    `offset` tokens above and to the left of the grid, less than a window. `bias` is (heads or 1, h*w, (h + 2y) *
    (w + 2x)), `bias_shared` (heads, S).
    """
    if bias is not None:
        bias = bias.expand(q.shape[1], -1, -1)
    return forward_op(q, k, v, k_shared, v_shared, bias, bias_shared, grid_size, window_size, halo, offset, scale)[0]


@triton.jit
def _locate(i, y0, x0, H, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Raster indices of the tokens i of a ROWS x COLUMNS rectangle at (y0, x0), and a mask of those on the grid."""
    y, x = y0 + i // COLUMNS, x0 + i % COLUMNS
    return y * W + x, (i < ROWS * COLUMNS) & (y >= 0) & (y < H) & (x >= 0) & (x < W)


@triton.jit
def _window_origin(window, W, offset_h, offset_w, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr):
    """The first row and column of a window."""
    columns = tl.cdiv(W + offset_w, WINDOW_W)
    return window // columns * WINDOW_H - offset_h, window % columns * WINDOW_W - offset_w


@triton.jit
def _scores(a, b, bias_ptr, index, has_bias, mask, scale):
    """scale * a b^T + bias to base 2, and minus infinity where `mask` is false."""
    s = dot(a, tl.trans(b)) * (scale * RCP_LN2)
    if bias_ptr is not None:
        s += tl.load(bias_ptr + index, mask=has_bias, other=0.0).to(tl.float32) * RCP_LN2
    return tl.where(mask, s, float('-inf'))


@triton.jit
def _softmax_step(s, v, acc, m_i, l_i):
    """Online softmax: add a block of keys to the weighted sum of values, relative to the running maximum."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    p, alpha = tl.exp2(s - m_new[:, None]), tl.exp2(m_i - m_new)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, k_shared_ptr, v_shared_ptr, bias_ptr, bias_shared_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_n, kv_b, kv_h, kv_n, H, W, offset_h, offset_w, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, HALO_H: tl.constexpr, HALO_W: tl.constexpr,
    KEYS_H: tl.constexpr, KEYS_W: tl.constexpr, BIAS_N: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The output and lse of a block of the queries of a window."""
    QUERIES: tl.constexpr = WINDOW_H * WINDOW_W
    BLOCKS: tl.constexpr = (QUERIES + BLOCK_M - 1) // BLOCK_M
    head, heads, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    y0, x0 = _window_origin(tl.program_id(0) // BLOCKS, W, offset_h, offset_w, WINDOW_H, WINDOW_W)
    bh = b * heads + head
    k_ptr += b * kv_b + head * kv_h
    v_ptr += b * kv_b + head * kv_h

    i = tl.program_id(0) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    token, on_grid = _locate(i, y0, x0, H, W, WINDOW_H, WINDOW_W)
    q = load_rows(q_ptr + b * q_b + head * q_h, token, on_grid, q_n, D, BLOCK_D)
    acc = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    m_i = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    l_i = tl.full((BLOCK_M,), 0.0, tl.float32)
    for start in range(0, S, BLOCK_S):
        j = start + tl.arange(0, BLOCK_S)
        k = load_rows(k_shared_ptr + bh * S * D, j, j < S, D, D, BLOCK_D)
        v = load_rows(v_shared_ptr + bh * S * D, j, j < S, D, D, BLOCK_D)
        mask = (j < S)[None, :]
        s = _scores(q, k, bias_shared_ptr, (head * S + j)[None, :], mask, mask, scale)
        acc, m_i, l_i = _softmax_step(s, v, acc, m_i, l_i)
    for start in range(0, KEYS_H * KEYS_W, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        token_k, on_grid_k = _locate(j, y0 - HALO_H, x0 - HALO_W, H, W, KEYS_H, KEYS_W)
        k = load_rows(k_ptr, token_k, on_grid_k, kv_n, D, BLOCK_D)
        v = load_rows(v_ptr, token_k, on_grid_k, kv_n, D, BLOCK_D)
        index = (head * QUERIES + i)[:, None] * BIAS_N + j[None, :]
        has_bias = (i < QUERIES)[:, None] & (j < BIAS_N)[None, :]
        s = _scores(q, k, bias_ptr, index, has_bias, on_grid_k[None, :], scale)
        acc, m_i, l_i = _softmax_step(s, v, acc, m_i, l_i)
    out_ptr += (b * H * W * heads + head) * D
    store_rows(out_ptr, acc / l_i[:, None], token, on_grid, heads * D, D, BLOCK_D)
    tl.store(lse_ptr + bh * H * W + token, m_i + tl.log2(l_i), mask=on_grid)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, k_shared_ptr, v_shared_ptr, bias_ptr, bias_shared_ptr, out_ptr, lse_ptr, do_ptr,
    dq_ptr, delta_ptr, q_b, q_h, q_n, kv_b, kv_h, kv_n, do_b, do_h, do_n, H, W, offset_h, offset_w, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, HALO_H: tl.constexpr, HALO_W: tl.constexpr,
    KEYS_H: tl.constexpr, KEYS_W: tl.constexpr, BIAS_N: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq of a block of the queries of a window, and delta = do . out for the other kernels."""
    QUERIES: tl.constexpr = WINDOW_H * WINDOW_W
    BLOCKS: tl.constexpr = (QUERIES + BLOCK_M - 1) // BLOCK_M
    head, heads, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    y0, x0 = _window_origin(tl.program_id(0) // BLOCKS, W, offset_h, offset_w, WINDOW_H, WINDOW_W)
    bh = b * heads + head
    base = (b * H * W * heads + head) * D
    k_ptr += b * kv_b + head * kv_h
    v_ptr += b * kv_b + head * kv_h

    i = tl.program_id(0) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    token, on_grid = _locate(i, y0, x0, H, W, WINDOW_H, WINDOW_W)
    q = load_rows(q_ptr + b * q_b + head * q_h, token, on_grid, q_n, D, BLOCK_D)
    do = load_rows(do_ptr + b * do_b + head * do_h, token, on_grid, do_n, D, BLOCK_D)
    out = load_rows(out_ptr + base, token, on_grid, heads * D, D, BLOCK_D)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + bh * H * W + token, delta, mask=on_grid)
    lse = tl.load(lse_ptr + bh * H * W + token, mask=on_grid, other=float('inf'))
    dq = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    for start in range(0, S, BLOCK_S):
        j = start + tl.arange(0, BLOCK_S)
        k = load_rows(k_shared_ptr + bh * S * D, j, j < S, D, D, BLOCK_D)
        v = load_rows(v_shared_ptr + bh * S * D, j, j < S, D, D, BLOCK_D)
        mask = (j < S)[None, :]
        s = _scores(q, k, bias_shared_ptr, (head * S + j)[None, :], mask, mask, scale)
        ds = tl.exp2(s - lse[:, None]) * (dot(do, tl.trans(v)) - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq)
    for start in range(0, KEYS_H * KEYS_W, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        token_k, on_grid_k = _locate(j, y0 - HALO_H, x0 - HALO_W, H, W, KEYS_H, KEYS_W)
        k = load_rows(k_ptr, token_k, on_grid_k, kv_n, D, BLOCK_D)
        v = load_rows(v_ptr, token_k, on_grid_k, kv_n, D, BLOCK_D)
        index = (head * QUERIES + i)[:, None] * BIAS_N + j[None, :]
        has_bias = (i < QUERIES)[:, None] & (j < BIAS_N)[None, :]
        s = _scores(q, k, bias_ptr, index, has_bias, on_grid_k[None, :], scale)
        ds = tl.exp2(s - lse[:, None]) * (dot(do, tl.trans(v)) - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq)
    store_rows(dq_ptr + base, dq * scale, token, on_grid, heads * D, D, BLOCK_D)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, lse_ptr, do_ptr, dk_ptr, dv_ptr, delta_ptr,
    q_b, q_h, q_n, kv_b, kv_h, kv_n, do_b, do_h, do_n, H, W, offset_h, offset_w, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, HALO_H: tl.constexpr, HALO_W: tl.constexpr,
    KEYS_H: tl.constexpr, KEYS_W: tl.constexpr, BIAS_N: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of a tile of keys, from the rectangle of all windows that attend the tile."""
    # tiles begin at the end of a window's halo
    BACK_H: tl.constexpr = (HALO_H + WINDOW_H - 1) // WINDOW_H
    BACK_W: tl.constexpr = (HALO_W + WINDOW_W - 1) // WINDOW_W
    ROWS: tl.constexpr = (1 + (2 * HALO_H + WINDOW_H - 1) // WINDOW_H) * WINDOW_H
    COLUMNS: tl.constexpr = (1 + (2 * HALO_W + WINDOW_W - 1) // WINDOW_W) * WINDOW_W
    BLOCKS: tl.constexpr = (WINDOW_H * WINDOW_W + BLOCK_N - 1) // BLOCK_N
    head, heads, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    tile = tl.program_id(0) // BLOCKS
    tiles_w = (W + offset_w + BACK_W * WINDOW_W - HALO_W + WINDOW_W - 1) // WINDOW_W
    y0 = (tile // tiles_w - BACK_H) * WINDOW_H - offset_h
    x0 = (tile % tiles_w - BACK_W) * WINDOW_W - offset_w
    bh = b * heads + head
    base = (b * H * W * heads + head) * D
    q_ptr += b * q_b + head * q_h
    do_ptr += b * do_b + head * do_h

    j = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    token, on_grid = _locate(j, y0 + HALO_H, x0 + HALO_W, H, W, WINDOW_H, WINDOW_W)
    # relative to the halo of the first window
    y_k, x_k = j // WINDOW_W + 2 * HALO_H, j % WINDOW_W + 2 * HALO_W
    k = load_rows(k_ptr + b * kv_b + head * kv_h, token, on_grid, kv_n, D, BLOCK_D)
    v = load_rows(v_ptr + b * kv_b + head * kv_h, token, on_grid, kv_n, D, BLOCK_D)
    dk = tl.full((BLOCK_N, BLOCK_D), 0.0, tl.float32)
    dv = tl.full((BLOCK_N, BLOCK_D), 0.0, tl.float32)
    for start in range(0, ROWS * COLUMNS, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        token_q, on_grid_q = _locate(i, y0, x0, H, W, ROWS, COLUMNS)
        q = load_rows(q_ptr, token_q, on_grid_q, q_n, D, BLOCK_D)
        do = load_rows(do_ptr, token_q, on_grid_q, do_n, D, BLOCK_D)
        lse = tl.load(lse_ptr + bh * H * W + token_q, mask=on_grid_q, other=float('inf'))
        delta = tl.load(delta_ptr + bh * H * W + token_q, mask=on_grid_q, other=0.0)
        y, x = i // COLUMNS, i % COLUMNS
        top, left = y // WINDOW_H * WINDOW_H, x // WINDOW_W * WINDOW_W
        mask = (y_k[:, None] >= top[None, :]) & (y_k[:, None] < top[None, :] + KEYS_H)
        mask = mask & (x_k[:, None] >= left[None, :]) & (x_k[:, None] < left[None, :] + KEYS_W)
        index = ((head * WINDOW_H + y - top) * WINDOW_W + x - left) * BIAS_N - top * KEYS_W - left
        index = index[None, :] + (y_k * KEYS_W + x_k)[:, None]
        s = _scores(k, q, bias_ptr, index, mask, mask, scale)
        p = tl.exp2(s - lse[None, :])
        dv = dot(p.to(do.dtype), do, dv)
        ds = p * (dot(v, tl.trans(do)) - delta[None, :])
        dk = dot(ds.to(q.dtype), q, dk)
    store_rows(dk_ptr + base, dk * scale, token, on_grid, heads * D, D, BLOCK_D)
    store_rows(dv_ptr + base, dv, token, on_grid, heads * D, D, BLOCK_D)


@triton.jit
def _dshared_kernel(
    q_ptr, k_shared_ptr, v_shared_ptr, bias_shared_ptr, lse_ptr, do_ptr, delta_ptr, dk_ptr, dv_ptr, dbias_ptr,
    q_b, q_h, q_n, do_b, do_h, do_n, N, steps, scale,
    S: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of the shared keys, values and bias, from a part of the queries."""
    head, heads, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    BLOCKS: tl.constexpr = (S + BLOCK_S - 1) // BLOCK_S
    part = tl.program_id(0) // BLOCKS
    j = tl.program_id(0) % BLOCKS * BLOCK_S + tl.arange(0, BLOCK_S)
    bh = b * heads + head
    q_ptr += b * q_b + head * q_h
    do_ptr += b * do_b + head * do_h
    k = load_rows(k_shared_ptr + bh * S * D, j, j < S, D, D, BLOCK_D)
    v = load_rows(v_shared_ptr + bh * S * D, j, j < S, D, D, BLOCK_D)
    mask = (j < S)[:, None]
    dk = tl.full((BLOCK_S, BLOCK_D), 0.0, tl.float32)
    dv = tl.full((BLOCK_S, BLOCK_D), 0.0, tl.float32)
    dbias = tl.full((BLOCK_S,), 0.0, tl.float32)
    for step in range(0, steps):
        token = (part * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        is_token = token < N
        q = load_rows(q_ptr, token, is_token, q_n, D, BLOCK_D)
        do = load_rows(do_ptr, token, is_token, do_n, D, BLOCK_D)
        lse = tl.load(lse_ptr + bh * N + token, mask=is_token, other=float('inf'))
        delta = tl.load(delta_ptr + bh * N + token, mask=is_token, other=0.0)
        s = _scores(k, q, bias_shared_ptr, (head * S + j)[:, None], mask, mask, scale)
        p = tl.exp2(s - lse[None, :])
        dv = dot(p.to(do.dtype), do, dv)
        ds = p * (dot(v, tl.trans(do)) - delta[None, :])
        dk = dot(ds.to(q.dtype), q, dk)
        dbias += tl.sum(ds, 1)
    row = bh + part.to(tl.int64) * tl.num_programs(2) * heads
    store_rows(dk_ptr + row * S * D, dk * scale, j, j < S, D, D, BLOCK_D)
    store_rows(dv_ptr + row * S * D, dv, j, j < S, D, D, BLOCK_D)
    tl.store(dbias_ptr + row * S + j, dbias, mask=j < S)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _dbias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, lse_ptr, do_ptr, delta_ptr, dbias_ptr,
    q_b, q_h, q_n, kv_b, kv_h, kv_n, do_b, do_h, do_n, B, H, W, offset_h, offset_w, steps, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, HALO_H: tl.constexpr, HALO_W: tl.constexpr,
    KEYS_H: tl.constexpr, KEYS_W: tl.constexpr, BIAS_N: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of the bias, from a part of all windows."""
    QUERIES: tl.constexpr = WINDOW_H * WINDOW_W
    KEYS: tl.constexpr = KEYS_H * KEYS_W
    BLOCKS: tl.constexpr = (KEYS + BLOCK_N - 1) // BLOCK_N
    head, heads, part = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    windows = tl.cdiv(H + offset_h, WINDOW_H) * tl.cdiv(W + offset_w, WINDOW_W)
    i = tl.program_id(0) // BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    index = (head * QUERIES + i)[:, None] * BIAS_N + j[None, :]
    has_bias = (i < QUERIES)[:, None] & (j < BIAS_N)[None, :]
    dbias = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for step in range(0, steps):
        window = part * steps + step
        b, window = (window // windows).to(tl.int64), window % windows
        y0, x0 = _window_origin(window, W, offset_h, offset_w, WINDOW_H, WINDOW_W)
        # after the last sample no token is on the grid
        height = tl.where(b < B, H, 0)
        token, on_grid = _locate(i, y0, x0, height, W, WINDOW_H, WINDOW_W)
        q = load_rows(q_ptr + b * q_b + head * q_h, token, on_grid, q_n, D, BLOCK_D)
        do = load_rows(do_ptr + b * do_b + head * do_h, token, on_grid, do_n, D, BLOCK_D)
        row = (b * heads + head) * H * W
        lse = tl.load(lse_ptr + row + token, mask=on_grid, other=float('inf'))
        delta = tl.load(delta_ptr + row + token, mask=on_grid, other=0.0)
        token_k, on_grid_k = _locate(j, y0 - HALO_H, x0 - HALO_W, height, W, KEYS_H, KEYS_W)
        k = load_rows(k_ptr + b * kv_b + head * kv_h, token_k, on_grid_k, kv_n, D, BLOCK_D)
        v = load_rows(v_ptr + b * kv_b + head * kv_h, token_k, on_grid_k, kv_n, D, BLOCK_D)
        s = _scores(q, k, bias_ptr, index, has_bias, on_grid_k[None, :], scale)
        dbias += tl.exp2(s - lse[:, None]) * (dot(do, tl.trans(v)) - delta[:, None])
    dbias_ptr += (part.to(tl.int64) * heads + head) * QUERIES * KEYS
    tl.store(dbias_ptr + i[:, None] * KEYS + j[None, :], dbias, mask=(i < QUERIES)[:, None] & (j < KEYS)[None, :])


@torch.library.custom_op('vitzoo::window_attention', mutates_args=())
def forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor,
    bias: torch.Tensor | None, bias_shared: torch.Tensor | None,
    grid_size: Sequence[int], window_size: Sequence[int], halo: Sequence[int], offset: Sequence[int], scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output and lse (B, heads, H*W), to base 2."""
    (B, heads, N, D), S = q.shape, k_shared.shape[2]
    q, k, v, k_shared, v_shared, bias, bias_shared = _arrange(q, k, v, k_shared, v_shared, bias, bias_shared)
    out, lse = empty_output(q), q.new_empty(B, heads, N, dtype=torch.float32)
    queries = prod(window_size)
    blocks = _block_sizes(q, BLOCK_M=queries, BLOCK_N=_num_keys(window_size, halo), BLOCK_S=S)
    grid = _num_windows(grid_size, window_size, offset) * triton.cdiv(queries, blocks['BLOCK_M']), heads, B
    with torch.cuda.device_of(q):
        _forward_kernel[grid](
            q, k, v, k_shared, v_shared, bias, bias_shared, out, lse, *q.stride()[:3], *k.stride()[:3],
            *grid_size, *offset, scale, **_window_sizes(window_size, halo), S=S, D=D, **blocks,
        )  # fmt: skip
    return out, lse


@torch.library.custom_op('vitzoo::window_attention_backward', mutates_args=())
def backward_op(
    do: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor,
    bias: torch.Tensor | None, bias_shared: torch.Tensor | None,
    grid_size: Sequence[int], window_size: Sequence[int], halo: Sequence[int], offset: Sequence[int],
    scale: float, needs_dbias: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """The gradients of q, k, v, k_shared, v_shared, bias and bias_shared; those of absent biases are empty."""
    (B, heads, _, D), S, queries = q.shape, k_shared.shape[2], prod(window_size)
    q, k, v, k_shared, v_shared, bias, bias_shared = _arrange(q, k, v, k_shared, v_shared, bias, bias_shared)
    out, do = out.transpose(1, 2).contiguous(), contiguous_rows(do)
    dq, dk, dv = (empty_output(q) for _ in range(3))
    delta = torch.empty_like(lse)
    strides = *q.stride()[:3], *k.stride()[:3], *do.stride()[:3]
    sizes = dict(**_window_sizes(window_size, halo), D=D)
    with torch.cuda.device_of(q):
        blocks = _block_sizes(q, BLOCK_M=queries, BLOCK_N=_num_keys(window_size, halo), BLOCK_S=S)
        grid = _num_windows(grid_size, window_size, offset) * triton.cdiv(queries, blocks['BLOCK_M']), heads, B
        _dq_kernel[grid](
            q, k, v, k_shared, v_shared, bias, bias_shared, out, lse, do, dq, delta, *strides,
            *grid_size, *offset, scale, **sizes, S=S, **blocks,
        )  # fmt: skip
        # tiles of keys begin at the end of a window's halo
        tiles = _num_windows(grid_size, window_size, [o + -h % w for o, w, h in zip(offset, window_size, halo)])
        blocks = _block_sizes(q, BLOCK_M=32, BLOCK_N=queries)
        grid = tiles * triton.cdiv(queries, blocks['BLOCK_N']), heads, B
        _dkv_kernel[grid](
            q, k, v, bias, lse, do, dk, dv, delta, *strides, *grid_size, *offset, scale, **sizes, **blocks
        )  # fmt: skip
        dbias = q.new_empty(0)
        if needs_dbias and bias is not None:
            dbias = _bias_gradient(q, k, v, bias, lse, do, delta, grid_size, window_size, halo, offset, scale)
        dk_shared, dv_shared, dbias_shared = _shared_gradients(
            q, k_shared, v_shared, bias_shared, lse, do, delta, scale
        )
    return dq, dk, dv, dk_shared, dv_shared, dbias, dbias_shared


def _bias_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor,
    lse: torch.Tensor, do: torch.Tensor, delta: torch.Tensor,
    grid_size: Sequence[int], window_size: Sequence[int], halo: Sequence[int], offset: Sequence[int], scale: float,
) -> torch.Tensor:  # fmt: skip
    B, heads, _, D = q.shape
    queries, keys = prod(window_size), _num_keys(window_size, halo)
    blocks = _block_sizes(q, BLOCK_M=queries, BLOCK_N=32)
    bias_blocks = triton.cdiv(queries, blocks['BLOCK_M']) * triton.cdiv(keys, blocks['BLOCK_N'])
    parts, steps = _split(B * _num_windows(grid_size, window_size, offset), bias_blocks * heads)
    sums = bias.new_empty(parts, heads, queries, keys, dtype=torch.float32)
    _dbias_kernel[bias_blocks, heads, parts](
        q, k, v, bias, lse, do, delta, sums, *q.stride()[:3], *k.stride()[:3], *do.stride()[:3],
        B, *grid_size, *offset, steps, scale, **_window_sizes(window_size, halo), D=D, **blocks,
    )  # fmt: skip
    return sums.sum(dim=0).to(bias.dtype)


def _shared_gradients(
    q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, bias_shared: torch.Tensor | None,
    lse: torch.Tensor, do: torch.Tensor, delta: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    (B, heads, N, D), S = q.shape, k_shared.shape[2]
    blocks = _block_sizes(q, BLOCK_M=N, BLOCK_S=S)
    key_blocks = triton.cdiv(S, blocks['BLOCK_S'])
    parts, steps = _split(triton.cdiv(N, blocks['BLOCK_M']), max(1, key_blocks) * heads * B)
    dk, dv = (lse.new_empty(parts, B, heads, S, D) for _ in range(2))
    dbias = lse.new_empty(parts, B, heads, S)
    if S > 0:
        _dshared_kernel[parts * key_blocks, heads, B](
            q, k_shared, v_shared, bias_shared, lse, do, delta, dk, dv, dbias, *q.stride()[:3], *do.stride()[:3],
            N, steps, scale, S, D, **blocks,
        )  # fmt: skip
    dbias = q.new_empty(0) if bias_shared is None else dbias.sum(dim=(0, 1)).to(bias_shared.dtype)
    return dk.sum(dim=0).to(q.dtype), dv.sum(dim=0).to(q.dtype), dbias


def _arrange(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor,
    bias: torch.Tensor | None, bias_shared: torch.Tensor | None,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None
]:  # fmt: skip
    """The inputs in the layout of the kernels: contiguous rows of q, k and v, equal strides of k and v, the rest
    contiguous."""
    k, v = contiguous_rows(k), contiguous_rows(v)
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    if bias is not None:
        # rows that begin at multiples of 16 allow vectorized loads
        bias = F.pad(bias, (0, -bias.shape[-1] % 16)).contiguous()
    bias_shared = None if bias_shared is None else bias_shared.contiguous()
    return contiguous_rows(q), k, v, k_shared.contiguous(), v_shared.contiguous(), bias, bias_shared


def _block_sizes(q: torch.Tensor, **sizes: int) -> dict[str, int]:
    """Block sizes that are powers of 2, at least the 16 of a tensor core and at most what registers allow."""
    block_d = max(16, triton.next_power_of_2(q.shape[-1]))
    largest = 64 if q.element_size() == 2 and block_d <= 64 else 32
    blocks = {name: min(largest, max(16, triton.next_power_of_2(size))) for name, size in sizes.items()}
    # the loops are too short to benefit from a third stage in shared memory
    return {**blocks, 'BLOCK_D': block_d, 'num_warps': 8 if block_d * q.element_size() >= 256 else 4, 'num_stages': 2}


def _window_sizes(window_size: Sequence[int], halo: Sequence[int]) -> dict[str, int]:
    """Compile-time sizes of a window, of its keys, and of a row of the padded bias."""
    sizes = dict(WINDOW_H=window_size[0], WINDOW_W=window_size[1], HALO_H=halo[0], HALO_W=halo[1])
    keys_h, keys_w = (w + 2 * h for w, h in zip(window_size, halo))
    return dict(**sizes, KEYS_H=keys_h, KEYS_W=keys_w, BIAS_N=triton.cdiv(keys_h * keys_w, 16) * 16)


def _split(num_terms: int, num_programs: int) -> tuple[int, int]:
    """The number of parts of a sum, each computed by `num_programs` programs, and the number of terms per part."""
    steps = triton.cdiv(num_terms, min(num_terms, triton.cdiv(_NUM_PROGRAMS, num_programs)))
    return triton.cdiv(num_terms, steps), steps


def _num_windows(grid_size: Sequence[int], window_size: Sequence[int], offset: Sequence[int] = (0, 0)) -> int:
    """The number of windows that cover the grid if the first begins `offset` tokens before it."""
    return prod(triton.cdiv(size + o, w) for size, w, o in zip(grid_size, window_size, offset))


def _num_keys(window_size: Sequence[int], halo: Sequence[int]) -> int:
    return prod(w + 2 * h for w, h in zip(window_size, halo))


@forward_op.register_fake
def _(q, *inputs):
    return empty_output(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@backward_op.register_fake
def _(do, out, lse, q, k, v, k_shared, v_shared, bias, bias_shared, *sizes):
    dq, dk, dv = (empty_output(q) for _ in range(3))
    dbias = q.new_empty(0) if bias is None or not sizes[-1] else bias.new_empty(bias.shape)
    dbias_shared = q.new_empty(0) if bias_shared is None else bias_shared.new_empty(bias_shared.shape)
    return dq, dk, dv, q.new_empty(k_shared.shape), q.new_empty(v_shared.shape), dbias, dbias_shared


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.sizes = inputs[7:]


def _backward(ctx, do, _):
    needs_dbias, needs_dbias_shared = ctx.needs_input_grad[5:7]
    *grads, dbias, dbias_shared = backward_op(do, *ctx.saved_tensors, *ctx.sizes, needs_dbias)
    dbias, dbias_shared = dbias if needs_dbias else None, dbias_shared if needs_dbias_shared else None
    return *grads, dbias, dbias_shared, None, None, None, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.vitzoo.window_attention)
def _forward_flops(
    q, k, v, k_shared, v_shared, bias, bias_shared, grid_size, window_size, halo, *args, **kwargs
) -> int:
    """Two products for each query and key of each window, padding included, as in the PyTorch form.

    An offset adds none: PyTorch rolls the grid instead, so that the windows at both ends are one.
    """
    (B, heads, _, D), keys = q, _num_keys(window_size, halo) + k_shared[2]
    return 4 * B * heads * _num_windows(grid_size, window_size) * prod(window_size) * keys * D


@register_flop_formula(torch.ops.vitzoo.window_attention_backward)
def _backward_flops(do, out, lse, *args, **kwargs) -> int:
    """Five products for the two of the forward pass, as torch counts fused attention: the scores again, and four."""
    return _forward_flops(*args) // 2 * 5
