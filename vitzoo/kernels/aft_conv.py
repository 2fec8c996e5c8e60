"""AFT-conv without exp(k) v in memory: exponential, depthwise convolution, quotient and gate in one kernel.

    out_i = sigmoid(q_i) (W_i(e v) + c S_i(e v)) / (W_i(e) + c S_i(e))
    e_j = exp(k_j - max k),  S_i(x) = sum of x_j far from the tile of i,  c = exp(-shift)
    W_i(x) = sum of exp(w_ij - shift) x_j over the tokens near the tile of i,  shift = max(w, 0) - 40

with w_ij = 0 where the convolution kernel around i does not cover j. W is a matrix product: the rows are the tokens of
an 8 x 8 tile, the columns those that the kernel around any of them covers. Most weights between them are not c, and
they are the same for all tiles and samples of a head. S is the same for all tokens of a tile, and is the sum of prefix
tokens, of rows above and below, and of both ends of the rows between, which are a separate pass over k and v. No sum
is the difference of others, so a large key with a small weight does not cancel the rest, and bfloat16 is precise
enough.

Bytes of a forward pass, for N tokens, C channels and two bytes per number: 10 N C (v once for the sums, then q, v and
out; a tile and its halo are 5 tiles, mostly from the cache). The PyTorch form moves about 60 N C, in float32. Backward
has three passes: dq, and the gradients of numerator and denominator with their sums; dk and dv, the transposed
convolution; and the gradient of the convolution kernel. All sums have a fixed order, so results are deterministic.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import register_flop_formula

from ._common import RCP_LN2, contiguous_rows, dot, dot_precision, empty_output, load_rows, store_rows

__all__ = ['aft_conv_triton', 'backward_op', 'fits', 'forward_op']

# side of a tile of queries
_TILE = 8
# sums of a row that one program has in registers
_ROW_TILES = 64
# tokens that one program sums
_CHUNK = 256
# programs that fill any GPU; a sum is split over as many
_NUM_PROGRAMS = 512
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
_TINY: tl.constexpr = tl.constexpr(1e-36)
# the largest exponent of a weight, so that weights far below it do not underflow
_HEADROOM: tl.constexpr = tl.constexpr(40.0)


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return True if the kernel supports these inputs: one key per head, one dtype, head dimensions up to 128.

    Its products pad heads of fewer than 16 channels, such as the single ones of the paper's models, to 16.
    """
    return k.shape[-1] == 1 and q.dtype == k.dtype == v.dtype and v.shape[-1] <= 128


def aft_conv_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: torch.Tensor, grid_size: tuple[int, int]
) -> torch.Tensor:
    """q, v (B, heads, P + H*W, d), k (B, heads, P + H*W, 1), kernel (heads, size, size) -> (B, heads, P + H*W, d)."""
    return forward_op(q, k, v, kernel.float(), *grid_size)[0]


@triton.jit
def _locate(tile, start, H, W, SIDE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Raster indices of BLOCK tokens of a SIDE x SIDE square centred on a tile, and a mask of those on the grid."""
    cell = start + tl.arange(0, BLOCK)
    columns = tl.cdiv(W, TILE)
    y = tile // columns * TILE + cell // SIDE - (SIDE - TILE) // 2
    x = tile % columns * TILE + cell % SIDE - (SIDE - TILE) // 2
    return y * W + x, (cell < SIDE * SIDE) & (y >= 0) & (y < H) & (x >= 0) & (x < W)


@triton.jit
def _load_ev(k_ptr, v_ptr, token, mask, k_max, k_n, v_n, D, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    """e v and e, both rounded to the dtype of the products, so that all sums of them agree."""
    k = tl.load(k_ptr + token.to(tl.int64) * k_n, mask=mask, other=float('-inf')).to(tl.float32)
    e = tl.exp2((k - k_max) * RCP_LN2).to(DTYPE).to(tl.float32)
    v = load_rows(v_ptr, token, mask, v_n, D, BLOCK_D).to(tl.float32)
    return (e[:, None] * v).to(DTYPE), e


@triton.jit
def _far_weight(shift_ptr, head):
    """c; never 0, which would give 0 / 0 for a token whose other weights are all 0."""
    return tl.maximum(tl.exp2(-tl.load(shift_ptr + head) * RCP_LN2), _TINY)


@triton.jit
def _weight_kernel(
    kernel_ptr, weight_ptr, shift_ptr,
    KERNEL_SIZE: tl.constexpr, FLIP: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """exp(w - shift) between the tokens of a tile and a block of the tokens around it, or c, and the shift."""
    head, block = tl.program_id(0), tl.program_id(1)
    tap = tl.arange(0, TAPS)
    w = tl.load(
        kernel_ptr + head * KERNEL_SIZE * KERNEL_SIZE + tap, mask=tap < KERNEL_SIZE * KERNEL_SIZE, other=float('-inf')
    )
    shift = tl.maximum(tl.max(w, axis=0), 0.0) - _HEADROOM
    tl.store(shift_ptr + head, shift, mask=block == 0)
    SIDE: tl.constexpr = TILE + KERNEL_SIZE - 1
    row, column = tl.arange(0, TILE * TILE)[:, None], (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    y, x = column // SIDE - row // TILE, column % SIDE - row % TILE
    is_near = (column < SIDE * SIDE) & (y >= 0) & (y < KERNEL_SIZE) & (x >= 0) & (x < KERNEL_SIZE)
    tap = y * KERNEL_SIZE + x
    if FLIP:
        tap = KERNEL_SIZE * KERNEL_SIZE - 1 - tap
    w = tl.load(kernel_ptr + head * KERNEL_SIZE * KERNEL_SIZE + tap, mask=is_near, other=0.0)
    weight = tl.where(column < SIDE * SIDE, tl.maximum(tl.exp2((w - shift) * RCP_LN2), _TINY), 0.0)
    weight_ptr += (head * TILE * TILE + row) * COLUMNS + column
    tl.store(weight_ptr, weight.to(weight_ptr.dtype.element_ty))


@triton.jit
def _row_kernel(
    y_ptr, x_ptr, k_max_ptr, sums_ptr, y_b, y_h, y_n, x_b, x_h, x_n, heads, W, P, D,
    IS_KEYS: tl.constexpr, KERNEL_SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of a row of the grid over what is left and right of each tile and its halo, and last over the whole row.

    Of e v and e if y is k and x is v, else of x and y.
    """
    bh, row, columns = tl.program_id(0), tl.program_id(1), tl.cdiv(W, TILE)
    b, head = (bh // heads).to(tl.int64), bh % heads
    y_ptr, x_ptr = y_ptr + b * y_b + head * y_h, x_ptr + b * x_b + head * x_h
    tile, channel = tl.program_id(2) * TILES + tl.arange(0, TILES), tl.arange(0, BLOCK_D)
    first = tl.where(tile < columns, tile * TILE - KERNEL_SIZE // 2, W)
    last = (tile + 1) * TILE + KERNEL_SIZE // 2
    num, den = tl.zeros((TILES, BLOCK_D), tl.float32), tl.zeros((TILES,), tl.float32)
    for start in range(0, W, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        token = P + row * W + place
        if IS_KEYS:
            x, y = _load_ev(y_ptr, x_ptr, token, place < W, tl.load(k_max_ptr + bh), y_n, x_n, D, BLOCK_D, DTYPE)
        else:
            x = load_rows(x_ptr, token, place < W, x_n, D, BLOCK_D)
            y = tl.load(y_ptr + token.to(tl.int64) * y_n, mask=place < W, other=0.0)
        is_outside = (place[None, :] < first[:, None]) | (place[None, :] >= last[:, None])
        weight = tl.where(is_outside, 1.0, 0.0)
        num = dot(weight.to(x.dtype), x, num, PRECISION)
        den += tl.sum(weight * y[None, :], axis=1)
    sums_ptr += ((bh * tl.num_programs(1) + row).to(tl.int64) * (columns + 1) + tile) * (D + 1)
    mask = (tile <= columns)[:, None] & (channel < D)[None, :]
    tl.store(sums_ptr[:, None] + channel[None, :], num, mask=mask)
    tl.store(sums_ptr + D, den, mask=tile <= columns)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, weight_ptr, shift_ptr, k_max_ptr, outside_ptr, out_ptr, den_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, heads, H, W, P, D,
    KERNEL_SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of a tile of the grid, and its denominator for the backward pass."""
    tiles, N = tl.cdiv(H, TILE) * tl.cdiv(W, TILE), P + H * W
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, head = (bh // heads).to(tl.int64), bh % heads
    q_ptr, k_ptr, v_ptr = q_ptr + b * q_b + head * q_h, k_ptr + b * k_b + head * k_h, v_ptr + b * v_b + head * v_h
    k_max = tl.load(k_max_ptr + bh)
    ROWS: tl.constexpr = TILE * TILE
    row, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    weight_ptr += (head * ROWS + row)[:, None] * COLUMNS + tl.arange(0, BLOCK_N)[None, :]
    num, den = tl.zeros((ROWS, BLOCK_D), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, COLUMNS, BLOCK_N):
        place, on_grid = _locate(tile, start, H, W, TILE + KERNEL_SIZE - 1, TILE, BLOCK_N)
        weight = tl.load(weight_ptr + start)
        ev, e = _load_ev(k_ptr, v_ptr, P + place, on_grid, k_max, k_n, v_n, D, BLOCK_D, weight.dtype)
        num = dot(weight, ev, num, PRECISION)
        den += tl.sum(weight.to(tl.float32) * e[None, :], axis=1)
    far = _far_weight(shift_ptr, head)
    outside_ptr += tl.program_id(0).to(tl.int64) * (D + 1)
    num += far * tl.load(outside_ptr + channel, mask=channel < D, other=0.0)[None, :]
    den += far * tl.load(outside_ptr + D)
    place, on_grid = _locate(tile, 0, H, W, TILE, TILE, ROWS)
    q = load_rows(q_ptr, P + place, on_grid, q_n, D, BLOCK_D).to(tl.float32)
    out = tl.sigmoid(q) * num / den[:, None]
    store_rows(out_ptr + (b * N * heads + head) * D, out, P + place, on_grid, heads * D, D, BLOCK_D)
    tl.store(den_ptr + bh.to(tl.int64) * N + P + place, den, mask=on_grid)


@triton.jit
def _dq_kernel(
    q_ptr, do_ptr, out_ptr, den_ptr, dq_ptr, dnum_ptr, dden_ptr,
    q_b, q_h, q_n, heads, N, D, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq, and the gradients of numerator and denominator, of a chunk of tokens."""
    bh, chunk = tl.program_id(0), tl.program_id(1)
    b, head = (bh // heads).to(tl.int64), bh % heads
    base = (b * N * heads + head) * D
    for start in range(0, CHUNK, BLOCK_N):
        token = chunk * CHUNK + start + tl.arange(0, BLOCK_N)
        is_token = token < N
        den = tl.load(den_ptr + bh.to(tl.int64) * N + token, mask=is_token, other=1.0)
        q = load_rows(q_ptr + b * q_b + head * q_h, token, is_token, q_n, D, BLOCK_D)
        gate = tl.sigmoid(q.to(tl.float32))
        do = load_rows(do_ptr + base, token, is_token, heads * D, D, BLOCK_D).to(tl.float32)
        do_out = do * load_rows(out_ptr + base, token, is_token, heads * D, D, BLOCK_D).to(tl.float32)
        store_rows(dq_ptr + base, do_out * (1 - gate), token, is_token, heads * D, D, BLOCK_D)
        dnum = (do * gate / den[:, None]).to(dnum_ptr.dtype.element_ty)
        store_rows(dnum_ptr + base, dnum, token, is_token, heads * D, D, BLOCK_D)
        dden = -tl.sum(do_out, axis=1) / den
        tl.store(dden_ptr + bh.to(tl.int64) * N + token, dden, mask=is_token)


@triton.jit
def _dkv_kernel(
    k_ptr, v_ptr, weight_ptr, shift_ptr, k_max_ptr, outside_ptr, dnum_ptr, dden_ptr, dk_ptr, dv_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n, heads, H, W, P, D,
    KERNEL_SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile: the transposed convolution, with the flipped weights."""
    tiles, N = tl.cdiv(H, TILE) * tl.cdiv(W, TILE), P + H * W
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, head = (bh // heads).to(tl.int64), bh % heads
    ROWS: tl.constexpr = TILE * TILE
    row, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    weight_ptr += (head * ROWS + row)[:, None] * COLUMNS + tl.arange(0, BLOCK_N)[None, :]
    base = b * N * heads + head
    # gradients of e v and e
    dev, de = tl.zeros((ROWS, BLOCK_D), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, COLUMNS, BLOCK_N):
        place, on_grid = _locate(tile, start, H, W, TILE + KERNEL_SIZE - 1, TILE, BLOCK_N)
        dnum = load_rows(dnum_ptr + base * D, P + place, on_grid, heads * D, D, BLOCK_D)
        dden = tl.load(dden_ptr + bh.to(tl.int64) * N + P + place, mask=on_grid, other=0.0)
        weight = tl.load(weight_ptr + start)
        dev = dot(weight, dnum, dev, PRECISION)
        de += tl.sum(weight.to(tl.float32) * dden[None, :], axis=1)
    far = _far_weight(shift_ptr, head)
    outside_ptr += tl.program_id(0).to(tl.int64) * (D + 1)
    dev += far * tl.load(outside_ptr + channel, mask=channel < D, other=0.0)[None, :]
    de += far * tl.load(outside_ptr + D)
    place, on_grid = _locate(tile, 0, H, W, TILE, TILE, ROWS)
    k_ptr += b * k_b + head * k_h + (P + place).to(tl.int64) * k_n
    k = tl.load(k_ptr, mask=on_grid, other=float('-inf')).to(tl.float32)
    e = tl.exp2((k - tl.load(k_max_ptr + bh)) * RCP_LN2)
    v = load_rows(v_ptr + b * v_b + head * v_h, P + place, on_grid, v_n, D, BLOCK_D).to(tl.float32)
    dk = e * (tl.sum(dev * v, axis=1) + de)
    tl.store(dk_ptr + base + (P + place) * heads, dk.to(dk_ptr.dtype.element_ty), mask=on_grid)
    store_rows(dv_ptr + base * D, e[:, None] * dev, P + place, on_grid, heads * D, D, BLOCK_D)


@triton.jit
def _dweight_kernel(
    k_ptr, v_ptr, k_max_ptr, dnum_ptr, dden_ptr, dweight_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n, B, heads, H, W, P, D,
    KERNEL_SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of columns of the weights, from a part of the tiles and samples."""
    head, start, part = tl.program_id(0), tl.program_id(1) * BLOCK_N, tl.program_id(2)
    tiles, N = tl.cdiv(H, TILE) * tl.cdiv(W, TILE), P + H * W
    ROWS: tl.constexpr = TILE * TILE
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for item in range(part, B * tiles, tl.num_programs(2)):
        tile, b = item % tiles, (item // tiles).to(tl.int64)
        bh = b * heads + head
        place, on_grid = _locate(tile, 0, H, W, TILE, TILE, ROWS)
        dden = tl.load(dden_ptr + bh * N + P + place, mask=on_grid, other=0.0)
        dnum = load_rows(dnum_ptr + (b * N * heads + head) * D, P + place, on_grid, heads * D, D, BLOCK_D)
        place, on_grid = _locate(tile, start, H, W, TILE + KERNEL_SIZE - 1, TILE, BLOCK_N)
        ev, e = _load_ev(
            k_ptr + b * k_b + head * k_h, v_ptr + b * v_b + head * v_h, P + place, on_grid,
            tl.load(k_max_ptr + bh), k_n, v_n, D, BLOCK_D, dnum.dtype,
        )  # fmt: skip
        acc = dot(dnum, tl.trans(ev), acc, PRECISION)
        acc += dden[:, None] * e[None, :]
    row, column = tl.arange(0, ROWS), start + tl.arange(0, BLOCK_N)
    dweight_ptr += ((part * tl.num_programs(0) + head).to(tl.int64) * ROWS + row)[:, None] * COLUMNS
    tl.store(dweight_ptr + column[None, :], acc)


@triton.jit
def _dtap_kernel(
    kernel_ptr, shift_ptr, dweight_ptr, dkernel_ptr, heads, parts,
    KERNEL_SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of taps of the convolution kernel, each of which is in every row of the weights once."""
    head, tap = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, TILE * TILE)[:, None]
    y, x = row // TILE + (tap // KERNEL_SIZE)[None, :], row % TILE + (tap % KERNEL_SIZE)[None, :]
    place = row * COLUMNS + y * (TILE + KERNEL_SIZE - 1) + x
    is_tap = tap < KERNEL_SIZE * KERNEL_SIZE
    acc = tl.zeros((TILE * TILE, BLOCK), tl.float32)
    for part in range(0, parts):
        part_ptr = dweight_ptr + (part * heads + head).to(tl.int64) * TILE * TILE * COLUMNS
        acc += tl.load(part_ptr + place, mask=is_tap[None, :], other=0.0)
    w = tl.load(kernel_ptr + head * KERNEL_SIZE * KERNEL_SIZE + tap, mask=is_tap, other=0.0)
    weight = tl.exp2((w - tl.load(shift_ptr + head)) * RCP_LN2)
    tl.store(dkernel_ptr + head * KERNEL_SIZE * KERNEL_SIZE + tap, weight * tl.sum(acc, axis=0), mask=is_tap)


@dataclass(frozen=True)
class _Sizes:
    """Sizes that the launches share: those of the problem, and of the blocks it is split into."""

    B: int
    heads: int
    N: int
    D: int
    H: int
    W: int
    kernel_size: int
    precision: str
    operand_dtype: torch.dtype

    @classmethod
    def of(cls, q: torch.Tensor, kernel: torch.Tensor, H: int, W: int) -> '_Sizes':
        # float16 lacks the range for the operands; tf32x3 splits their float32 in three for tensor cores
        operand_dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        B, heads, N, D = q.shape
        return cls(B, heads, N, D, H, W, kernel.shape[-1], dot_precision(q, half='tf32x3'), operand_dtype)

    @property
    def P(self) -> int:
        return self.N - self.H * self.W

    @property
    def tiles(self) -> int:
        return triton.cdiv(self.H, _TILE) * triton.cdiv(self.W, _TILE)

    @property
    def columns(self) -> int:
        return triton.cdiv((_TILE + self.kernel_size - 1) ** 2, 64) * 64

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.N, _CHUNK)

    @property
    def block_n(self) -> int:
        return 64 if self.operand_dtype == torch.bfloat16 else 16

    @property
    def block_d(self) -> int:
        return max(16, triton.next_power_of_2(self.D))

    def shape(self) -> tuple[int, ...]:
        """The arguments that locate a tile."""
        return self.heads, self.H, self.W, self.P, self.D

    def chunk_blocks(self) -> dict:
        """Compile-time sizes of the kernels over chunks of tokens, 16 numbers per thread."""
        return dict(CHUNK=_CHUNK, BLOCK_N=2048 // self.block_d, BLOCK_D=self.block_d, num_warps=4)

    def weight_blocks(self) -> dict:
        """Compile-time sizes of the table of weights."""
        return dict(KERNEL_SIZE=self.kernel_size, TILE=_TILE, COLUMNS=self.columns)

    def row_blocks(self) -> dict:
        """Compile-time sizes of the kernel over rows."""
        tiles = min(_ROW_TILES, max(16, triton.next_power_of_2(triton.cdiv(self.W, _TILE) + 1)))
        blocks = dict(BLOCK_N=16, BLOCK_D=self.block_d, DTYPE=_TRITON_DTYPES[self.operand_dtype])
        return dict(KERNEL_SIZE=self.kernel_size, TILE=_TILE, TILES=tiles, PRECISION=self.precision, **blocks)

    def tile_blocks(self) -> dict:
        """Compile-time sizes of the kernels over tiles."""
        num_warps = 4 if self.operand_dtype == torch.bfloat16 and self.block_d <= 32 else 8
        blocks = dict(BLOCK_N=self.block_n, BLOCK_D=self.block_d, PRECISION=self.precision, num_warps=num_warps)
        return dict(**self.weight_blocks(), **blocks)


def _make_weights(kernel: torch.Tensor, sizes: _Sizes, flip: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights between a tile and the tokens around it, (heads, 64, columns), and their shifts (heads)."""
    weight = kernel.new_empty(sizes.heads, _TILE**2, sizes.columns, dtype=sizes.operand_dtype)
    shift = kernel.new_empty(sizes.heads)
    blocks = dict(**sizes.weight_blocks(), TAPS=triton.next_power_of_2(sizes.kernel_size**2), BLOCK=64)
    _weight_kernel[sizes.heads, sizes.columns // 64](kernel, weight, shift, FLIP=flip, **blocks)
    return weight, shift


def _far_weights(shift: torch.Tensor) -> torch.Tensor:
    """c of each head, as in `_far_weight`."""
    return (-shift).exp().clamp(min=_TINY.value)


def _sum_outside(
    y: torch.Tensor, x: torch.Tensor, k_max: torch.Tensor, prefix: torch.Tensor, sizes: _Sizes, is_keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the tokens outside each tile and its halo (B, heads, tiles, D + 1), and over all (B, heads, 1, D + 1).

    `prefix` are the terms of the prefix tokens, (B, heads, P, D + 1).
    """
    H, columns, halo = sizes.H, triton.cdiv(sizes.W, _TILE), sizes.kernel_size // 2
    rows = k_max.new_empty(sizes.B, sizes.heads, H, columns + 1, sizes.D + 1)
    blocks = sizes.row_blocks()
    _row_kernel[sizes.B * sizes.heads, H, triton.cdiv(columns + 1, blocks['TILES'])](
        y, x, k_max, rows, *y.stride()[:3], *x.stride()[:3], sizes.heads, sizes.W, sizes.P, sizes.D,
        IS_KEYS=is_keys, **blocks,
    )  # fmt: skip
    ends, whole = rows.split([columns, 1], dim=3)
    row = torch.arange(H, device=x.device)
    first = row[::_TILE, None] - halo
    is_between = ((row >= first) & (row < first + _TILE + 2 * halo)).to(rows.dtype)  # (tiles along y, H)
    outside = is_between @ ends.flatten(3) + ((1 - is_between) @ whole.squeeze(3)).repeat(1, 1, 1, columns)
    prefix = prefix.sum(dim=2, keepdim=True)
    return outside.view(sizes.B, sizes.heads, -1, sizes.D + 1) + prefix, whole.sum(dim=2) + prefix


def _prefix_terms(k: torch.Tensor, v: torch.Tensor, k_max: torch.Tensor, sizes: _Sizes) -> torch.Tensor:
    """e v and e of the prefix tokens, (B, heads, P, D + 1)."""
    e = (k[:, :, : sizes.P].float() - k_max[..., None, None]).exp()
    return torch.cat([e * v[:, :, : sizes.P].float(), e], dim=-1)


@torch.library.custom_op('vitzoo::aft_conv', mutates_args=())
def forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: torch.Tensor, H: int, W: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, its denominator (B, heads, N) and the maximum of the keys (B, heads), both float32."""
    sizes = _Sizes.of(q, kernel, H, W)
    q, v = contiguous_rows(q), contiguous_rows(v)
    out = empty_output(q)
    den = q.new_empty(q.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
        k_max = k.amax(dim=(2, 3)).float()
        strides = *k.stride()[:3], *v.stride()[:3]
        outside, total = _sum_outside(k, v, k_max, _prefix_terms(k, v, k_max, sizes), sizes, is_keys=True)
        weight, shift = _make_weights(kernel.contiguous(), sizes, flip=False)
        _forward_kernel[(sizes.B * sizes.heads * sizes.tiles,)](
            q, k, v, weight, shift, k_max, outside, out, den,
            *q.stride()[:3], *strides, *sizes.shape(), **sizes.tile_blocks(),
        )  # fmt: skip
    P = sizes.P
    if P:
        num_sum, den_sum = total.split([sizes.D, 1], dim=-1)
        out[:, :, :P] = q[:, :, :P].float().sigmoid() * (num_sum / den_sum)
        den[:, :, :P] = _far_weights(shift)[:, None] * den_sum.squeeze(-1)
    return out, den, k_max


@torch.library.custom_op('vitzoo::aft_conv_backward', mutates_args=())
def backward_op(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: torch.Tensor,
    out: torch.Tensor, den: torch.Tensor, k_max: torch.Tensor, H: int, W: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k, v and the convolution kernel."""
    sizes = _Sizes.of(q, kernel, H, W)
    q, v, kernel = contiguous_rows(q), contiguous_rows(v), kernel.contiguous()
    do, out = (x.transpose(1, 2).contiguous() for x in (do, out))
    dq, dk, dv, dnum = empty_output(q), empty_output(k), empty_output(v), empty_output(v, sizes.operand_dtype)
    dden = torch.empty_like(den)
    strides = *k.stride()[:3], *v.stride()[:3]
    blocks = sizes.tile_blocks()
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
        _dq_kernel[sizes.B * sizes.heads, sizes.chunks](
            q, do, out, den, dq, dnum, dden,
            *q.stride()[:3], sizes.heads, sizes.N, sizes.D, **sizes.chunk_blocks(),
        )  # fmt: skip
        prefix = torch.cat([dnum[:, :, : sizes.P].float(), dden[:, :, : sizes.P, None]], dim=-1)
        outside, total = _sum_outside(dden, dnum, k_max, prefix, sizes, is_keys=False)
        weight, shift = _make_weights(kernel, sizes, flip=True)
        _dkv_kernel[(sizes.B * sizes.heads * sizes.tiles,)](
            k, v, weight, shift, k_max, outside, dnum, dden, dk, dv, *strides, *sizes.shape(), **blocks
        )
        blocks_n = sizes.columns // sizes.block_n
        parts = min(sizes.B * sizes.tiles, triton.cdiv(_NUM_PROGRAMS, sizes.heads * blocks_n))
        dweight = k_max.new_empty(parts, sizes.heads, _TILE**2, sizes.columns)
        # more stages exceed the registers, or the shared memory of the smaller GPUs, 99 KB
        stages = {'num_stages': 1} if sizes.operand_dtype == torch.float32 and sizes.block_d > 64 else {}
        _dweight_kernel[sizes.heads, blocks_n, parts](
            k, v, k_max, dnum, dden, dweight, *strides, sizes.B, *sizes.shape(), **blocks, **stages
        )
        dkernel = torch.empty_like(kernel)
        _dtap_kernel[sizes.heads, triton.cdiv(sizes.kernel_size**2, 16)](
            kernel, shift, dweight, dkernel, sizes.heads, parts, **sizes.weight_blocks(), BLOCK=16
        )
    P = sizes.P
    if P:
        e = (k[:, :, :P].float() - k_max[..., None, None]).exp() * _far_weights(shift)[:, None, None]
        dnum_sum, dden_sum = total.split([sizes.D, 1], dim=-1)
        dv[:, :, :P] = e * dnum_sum
        dk[:, :, :P] = e * ((dnum_sum * v[:, :, :P].float()).sum(dim=-1, keepdim=True) + dden_sum)
    return dq, dk, dv, dkernel


@forward_op.register_fake
def _(q, k, v, kernel, H, W):
    den = q.new_empty(q.shape[:3], dtype=torch.float32)
    return empty_output(q), den, den.new_empty(q.shape[:2])


@backward_op.register_fake
def _(do, q, k, v, kernel, out, den, k_max, H, W):
    dkernel = torch.empty_like(kernel, memory_format=torch.contiguous_format)
    return empty_output(q), empty_output(k), empty_output(v), dkernel


def _setup_context(ctx, inputs, output):
    *tensors, ctx.H, ctx.W = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, do, *_):
    return *backward_op(do, *ctx.saved_tensors, ctx.H, ctx.W), None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.vitzoo.aft_conv)
def _forward_flops(q, k, v, kernel, H, W, *args, **kwargs) -> int:
    """The convolution of numerator and denominator, and two products per token and channel: exp(k) v and the gate."""
    B, heads, N, D = q
    return 2 * B * heads * (H * W * kernel[-1] ** 2 * (D + 1) + 2 * N * D)


@register_flop_formula(torch.ops.vitzoo.aft_conv_backward)
def _backward_flops(do, q, k, v, kernel, out, den, k_max, H, W, *args, **kwargs) -> int:
    """Two products for each product of the forward pass."""
    return 2 * _forward_flops(q, k, v, kernel, H, W)
