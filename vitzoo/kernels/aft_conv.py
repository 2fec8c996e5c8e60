"""AFT-conv without an image of exp(k) v in memory: exponent, depthwise convolution, quotient and gate in one kernel.

    out_i = sigmoid(q_i) (W_i(e v) + c (S(e v) - B_i(e v))) / (W_i(e) + c (S(e) - B_i(e)))
    e_j = exp(k_j - max k),  S(x) = sum_j x_j,  B_i(x) = sum of x_j in reach of i,  c = exp(-shift)
    W_i(x) = sum of exp(w_ij - shift) x_j in reach of i,  shift = max(w, 0)

W and B are matrix products: the tokens of an 8 x 8 tile are the rows, those in reach of any of them the columns, and
the weights between them, most of them not 0, are the same for all tiles and samples of a head. Split in this way no
weight is negative, and what S and B have in common cancels exactly, so bfloat16 serves.

Prefix tokens are in S and in reach of nothing. The sums over all tokens are a pass of their own, over k and v.

Bytes of a forward pass, for N tokens, C channels and two bytes a number: 10 N C (v once for the sums, then q, v and
out; a tile and its halo are 5 tiles, mostly from the cache). The PyTorch form moves some 60 N C, in float32. Backward
has three passes: grad_q, and what the gradients of the sums have in common; grad_k and grad_v, the convolution
transposed; and the gradient of the kernel. Nothing is summed in an order that changes, so every run gives the same
bits. Nobody has timed it on a GPU yet.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import register_flop_formula

from ._common import dot, precision

__all__ = ['aft_conv', 'fits']

TILE = 8
# tokens that one program sums up
CHUNK = 256
# so many are enough for any GPU, where a sum is split among programs
PROGRAMS = 512
TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
TINY: tl.constexpr = tl.constexpr(1e-30)


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel takes them: one key per head, all of one type, and heads as wide as a matrix product needs."""
    return k.shape[-1] == 1 and q.dtype == k.dtype == v.dtype and 16 <= v.shape[-1] <= 128


def aft_conv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: torch.Tensor, grid_size: tuple[int, int]
) -> torch.Tensor:
    """q, v (B, heads, P + H*W, d), k (B, heads, P + H*W, 1), kernel (heads, size, size) -> (B, heads, P + H*W, d)."""
    return forward_op(q, k, v, kernel.float(), *grid_size)[0]


@triton.jit
def _cells(tile, start, H, W, SIDE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Places in the raster of the cells of a square that overlaps a tile on all sides, and which are on the grid."""
    cell = start + tl.arange(0, BLOCK)
    columns = tl.cdiv(W, TILE)
    y = tile // columns * TILE + cell // SIDE - (SIDE - TILE) // 2
    x = tile % columns * TILE + cell % SIDE - (SIDE - TILE) // 2
    return y * W + x, (cell < SIDE * SIDE) & (y >= 0) & (y < H) & (x >= 0) & (x < W)


@triton.jit
def _load(ptr, token, stride, is_token, D, BLOCK_D: tl.constexpr):
    """Rows of a tensor, zeros for what is no token."""
    channel = tl.arange(0, BLOCK_D)
    mask = is_token[:, None] & (channel < D)[None, :]
    return tl.load(ptr + token[:, None].to(tl.int64) * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _sources(k_ptr, v_ptr, token, is_token, largest, stride_k, stride_v, D, BLOCK_D: tl.constexpr, TYPE: tl.constexpr):
    """e v and e, both rounded to the type of the products, the same wherever they are summed."""
    k = tl.load(k_ptr + token.to(tl.int64) * stride_k, mask=is_token, other=float('-inf')).to(tl.float32)
    e = tl.exp2((k - largest) * LOG2_E).to(TYPE).to(tl.float32)
    v = _load(v_ptr, token, stride_v, is_token, D, BLOCK_D).to(tl.float32)
    return (e[:, None] * v).to(TYPE), e


@triton.jit
def _weigh(
    kernel_ptr, table_ptr, shift_ptr,
    SIZE: tl.constexpr, FLIP: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """exp(w - shift) between the tokens of a tile and a block of those around it, and the shift."""
    head, block = tl.program_id(0), tl.program_id(1)
    tap = tl.arange(0, TAPS)
    w = tl.load(kernel_ptr + head * SIZE * SIZE + tap, mask=tap < SIZE * SIZE, other=float('-inf'))
    shift = tl.maximum(tl.max(w, axis=0), 0.0)
    tl.store(shift_ptr + head, shift, mask=block == 0)
    SIDE: tl.constexpr = TILE + SIZE - 1
    row, column = tl.arange(0, TILE * TILE)[:, None], (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    y, x = column // SIDE - row // TILE, column % SIDE - row % TILE
    in_reach = (column < SIDE * SIDE) & (y >= 0) & (y < SIZE) & (x >= 0) & (x < SIZE)
    place = y * SIZE + x
    if FLIP:
        place = SIZE * SIZE - 1 - place
    w = tl.load(kernel_ptr + head * SIZE * SIZE + place, mask=in_reach, other=0.0)
    # above 0 in reach, because that is how the other kernels know it
    weight = tl.where(in_reach, tl.maximum(tl.exp2((w - shift) * LOG2_E), TINY), 0.0)
    table_ptr += (head * TILE * TILE + row) * COLUMNS + column
    tl.store(table_ptr, weight.to(table_ptr.dtype.element_ty))


@triton.jit
def _far(shift_ptr, head):
    """c; not 0, which would make 0 / 0 of a token that sees nothing near."""
    return tl.maximum(tl.exp2(-tl.load(shift_ptr + head) * LOG2_E), TINY)


@triton.jit
def _sum(
    k_ptr, v_ptr, largest_ptr, sums_ptr, k_b, k_h, k_n, v_b, v_h, v_n, heads, N, D,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """S(e v) and S(e) of a chunk of tokens."""
    bh, chunk = tl.program_id(0), tl.program_id(1)
    b, head = (bh // heads).to(tl.int64), bh % heads
    k_ptr, v_ptr = k_ptr + b * k_b + head * k_h, v_ptr + b * v_b + head * v_h
    largest = tl.load(largest_ptr + bh)
    num = tl.zeros((BLOCK_D,), tl.float32)
    den = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, CHUNK, BLOCK_N):
        token = chunk * CHUNK + start + tl.arange(0, BLOCK_N)
        source, e = _sources(k_ptr, v_ptr, token, token < N, largest, k_n, v_n, D, BLOCK_D, TYPE)
        num += tl.sum(source.to(tl.float32), axis=0)
        den += e
    _store_sums(sums_ptr, (bh * tl.num_programs(1) + chunk).to(tl.int64), num, tl.sum(den, axis=0), D, BLOCK_D)


@triton.jit
def _store_sums(ptr, row, num, den, D, BLOCK_D: tl.constexpr):
    channel = tl.arange(0, BLOCK_D)
    tl.store(ptr + row * (D + 1) + channel, num, mask=channel < D)
    tl.store(ptr + row * (D + 1) + D, den)


@triton.jit
def _add_near(w, source, e, num, box, den, box_den, PRECISION: tl.constexpr):
    """W and B of a block of columns, of the source and of e."""
    w_wide = w.to(tl.float32)
    in_reach = tl.where(w_wide > 0, 1.0, 0.0)
    num = dot(w, source, num, PRECISION)
    box = dot(in_reach.to(w.dtype), source, box, PRECISION)
    den += tl.sum(w_wide * e[None, :], axis=1)
    box_den += tl.sum(in_reach * e[None, :], axis=1)
    return num, box, den, box_den


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, table_ptr, shift_ptr, largest_ptr, sums_ptr, out_ptr, normaliser_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, heads, H, W, P, D,
    SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the grid; the normaliser is kept for the backward pass."""
    tiles, N = tl.cdiv(H, TILE) * tl.cdiv(W, TILE), P + H * W
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, head = (bh // heads).to(tl.int64), bh % heads
    q_ptr, k_ptr, v_ptr = q_ptr + b * q_b + head * q_h, k_ptr + b * k_b + head * k_h, v_ptr + b * v_b + head * v_h
    largest = tl.load(largest_ptr + bh)
    ROWS: tl.constexpr = TILE * TILE
    row, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    table_ptr += (head * ROWS + row)[:, None] * COLUMNS + tl.arange(0, BLOCK_N)[None, :]
    num, box = tl.zeros((ROWS, BLOCK_D), tl.float32), tl.zeros((ROWS, BLOCK_D), tl.float32)
    den, box_den = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, COLUMNS, BLOCK_N):
        place, on_grid = _cells(tile, start, H, W, TILE + SIZE - 1, TILE, BLOCK_N)
        w = tl.load(table_ptr + start)
        source, e = _sources(k_ptr, v_ptr, P + place, on_grid, largest, k_n, v_n, D, BLOCK_D, w.dtype)
        num, box, den, box_den = _add_near(w, source, e, num, box, den, box_den, PRECISION)
    far = _far(shift_ptr, head)
    total = tl.load(sums_ptr + bh * (D + 1) + channel, mask=channel < D, other=0.0)
    num += far * (total[None, :] - box)
    # where all is in reach only rounding is left of the difference
    den += far * tl.maximum(tl.load(sums_ptr + bh * (D + 1) + D) - box_den, 0.0)
    place, on_grid = _cells(tile, 0, H, W, TILE, TILE, ROWS)
    q = _load(q_ptr, P + place, q_n, on_grid, D, BLOCK_D).to(tl.float32)
    out = tl.sigmoid(q) * num / den[:, None]
    out_ptr += ((b * N + P + place) * heads + head)[:, None] * D + channel[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=on_grid[:, None] & (channel < D)[None, :])
    tl.store(normaliser_ptr + bh.to(tl.int64) * N + P + place, den, mask=on_grid)


@triton.jit
def _grad_queries(
    q_ptr, grad_ptr, out_ptr, normaliser_ptr, grad_q_ptr, grad_num_ptr, grad_den_ptr, sums_ptr,
    q_b, q_h, q_n, heads, N, D, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, of numerator and denominator, and the sums of these two over a chunk of tokens."""
    bh, chunk = tl.program_id(0), tl.program_id(1)
    b, head = (bh // heads).to(tl.int64), bh % heads
    channel = tl.arange(0, BLOCK_D)
    num = tl.zeros((BLOCK_D,), tl.float32)
    den = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, CHUNK, BLOCK_N):
        token = chunk * CHUNK + start + tl.arange(0, BLOCK_N)
        is_token = token < N
        normaliser = tl.load(normaliser_ptr + bh.to(tl.int64) * N + token, mask=is_token, other=1.0)
        gate = tl.sigmoid(_load(q_ptr + b * q_b + head * q_h, token, q_n, is_token, D, BLOCK_D).to(tl.float32))
        place = ((b * N + token) * heads + head)[:, None] * D + channel[None, :]
        mask = is_token[:, None] & (channel < D)[None, :]
        grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
        product = grad * tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_q_ptr + place, (product * (1 - gate)).to(grad_q_ptr.dtype.element_ty), mask=mask)
        grad_num = (grad * gate / normaliser[:, None]).to(grad_num_ptr.dtype.element_ty)
        tl.store(grad_num_ptr + place, grad_num, mask=mask)
        grad_den = -tl.sum(product, axis=1) / normaliser
        tl.store(grad_den_ptr + bh.to(tl.int64) * N + token, grad_den, mask=is_token)
        num += tl.sum(grad_num.to(tl.float32), axis=0)
        den += grad_den
    _store_sums(sums_ptr, (bh * tl.num_programs(1) + chunk).to(tl.int64), num, tl.sum(den, axis=0), D, BLOCK_D)


@triton.jit
def _grad_sources(
    k_ptr, v_ptr, table_ptr, shift_ptr, largest_ptr, sums_ptr, grad_num_ptr, grad_den_ptr, grad_k_ptr, grad_v_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n, heads, H, W, P, D,
    SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of a tile: the convolution transposed, over the flipped table."""
    tiles, N = tl.cdiv(H, TILE) * tl.cdiv(W, TILE), P + H * W
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, head = (bh // heads).to(tl.int64), bh % heads
    ROWS: tl.constexpr = TILE * TILE
    row, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    table_ptr += (head * ROWS + row)[:, None] * COLUMNS + tl.arange(0, BLOCK_N)[None, :]
    grad_num_ptr += (b * N * heads + head) * D
    num, box = tl.zeros((ROWS, BLOCK_D), tl.float32), tl.zeros((ROWS, BLOCK_D), tl.float32)
    den, box_den = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, COLUMNS, BLOCK_N):
        place, on_grid = _cells(tile, start, H, W, TILE + SIZE - 1, TILE, BLOCK_N)
        grad_num = _load(grad_num_ptr, P + place, heads * D, on_grid, D, BLOCK_D)
        grad_den = tl.load(grad_den_ptr + bh.to(tl.int64) * N + P + place, mask=on_grid, other=0.0)
        num, box, den, box_den = _add_near(
            tl.load(table_ptr + start), grad_num, grad_den, num, box, den, box_den, PRECISION
        )
    far = _far(shift_ptr, head)
    total = tl.load(sums_ptr + bh * (D + 1) + channel, mask=channel < D, other=0.0)
    num += far * (total[None, :] - box)
    den += far * (tl.load(sums_ptr + bh * (D + 1) + D) - box_den)
    place, on_grid = _cells(tile, 0, H, W, TILE, TILE, ROWS)
    k_ptr += b * k_b + head * k_h + (P + place).to(tl.int64) * k_n
    k = tl.load(k_ptr, mask=on_grid, other=float('-inf')).to(tl.float32)
    e = tl.exp2((k - tl.load(largest_ptr + bh)) * LOG2_E)
    v = _load(v_ptr + b * v_b + head * v_h, P + place, v_n, on_grid, D, BLOCK_D).to(tl.float32)
    place = (b * N + P + place) * heads + head
    grad_k = e * (tl.sum(num * v, axis=1) + den)
    tl.store(grad_k_ptr + place, grad_k.to(grad_k_ptr.dtype.element_ty), mask=on_grid)
    grad_v_ptr += place[:, None] * D + channel[None, :]
    grad_v = (e[:, None] * num).to(grad_v_ptr.dtype.element_ty)
    tl.store(grad_v_ptr, grad_v, mask=on_grid[:, None] & (channel < D)[None, :])


@triton.jit
def _grad_table(
    k_ptr, v_ptr, largest_ptr, grad_num_ptr, grad_den_ptr, grad_table_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n, B, heads, H, W, P, D,
    SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of columns of the table, from some of the tiles and samples."""
    head, start, split = tl.program_id(0), tl.program_id(1) * BLOCK_N, tl.program_id(2)
    tiles, N = tl.cdiv(H, TILE) * tl.cdiv(W, TILE), P + H * W
    ROWS: tl.constexpr = TILE * TILE
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for item in range(split, B * tiles, tl.num_programs(2)):
        tile, b = item % tiles, (item // tiles).to(tl.int64)
        bh = b * heads + head
        place, on_grid = _cells(tile, 0, H, W, TILE, TILE, ROWS)
        grad_den = tl.load(grad_den_ptr + bh * N + P + place, mask=on_grid, other=0.0)
        grad_num_at = grad_num_ptr + (b * N * heads + head) * D
        grad_num = _load(grad_num_at, P + place, heads * D, on_grid, D, BLOCK_D)
        place, on_grid = _cells(tile, start, H, W, TILE + SIZE - 1, TILE, BLOCK_N)
        k_at, v_at, largest = k_ptr + b * k_b + head * k_h, v_ptr + b * v_b + head * v_h, tl.load(largest_ptr + bh)
        source, e = _sources(k_at, v_at, P + place, on_grid, largest, k_n, v_n, D, BLOCK_D, grad_num.dtype)
        acc = dot(grad_num, tl.trans(source), acc, PRECISION)
        acc += grad_den[:, None] * e[None, :]
    row, column = tl.arange(0, ROWS), start + tl.arange(0, BLOCK_N)
    grad_table_ptr += ((split * tl.num_programs(0) + head).to(tl.int64) * ROWS + row)[:, None] * COLUMNS
    tl.store(grad_table_ptr + column[None, :], acc)


@triton.jit
def _fold(
    kernel_ptr, shift_ptr, grad_table_ptr, grad_kernel_ptr, heads, splits,
    SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of taps of a kernel, each of which is in every row of the table once."""
    head, tap = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, TILE * TILE)[:, None]
    y, x = row // TILE + (tap // SIZE)[None, :], row % TILE + (tap % SIZE)[None, :]
    place = row * COLUMNS + y * (TILE + SIZE - 1) + x
    is_tap = tap < SIZE * SIZE
    acc = tl.zeros((TILE * TILE, BLOCK), tl.float32)
    for split in range(0, splits):
        part_ptr = grad_table_ptr + (split * heads + head).to(tl.int64) * TILE * TILE * COLUMNS
        acc += tl.load(part_ptr + place, mask=is_tap[None, :], other=0.0)
    w = tl.load(kernel_ptr + head * SIZE * SIZE + tap, mask=is_tap, other=0.0)
    weight = tl.exp2((w - tl.load(shift_ptr + head)) * LOG2_E)
    tl.store(grad_kernel_ptr + head * SIZE * SIZE + tap, weight * tl.sum(acc, axis=0), mask=is_tap)


@dataclass(frozen=True)
class Plan:
    """What the launches have in common: sizes of the problem, and of the blocks it is cut into."""

    B: int
    heads: int
    N: int
    D: int
    H: int
    W: int
    size: int
    precision: str
    operand: torch.dtype

    @classmethod
    def of(cls, q: torch.Tensor, kernel: torch.Tensor, H: int, W: int) -> 'Plan':
        # float16 lacks the range for weights and sources, and tensor cores take float32 as three of its size
        operand = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        return cls(*q.shape, H, W, kernel.shape[-1], precision(q, half='tf32x3'), operand)

    @property
    def P(self) -> int:
        return self.N - self.H * self.W

    @property
    def tiles(self) -> int:
        return triton.cdiv(self.H, TILE) * triton.cdiv(self.W, TILE)

    @property
    def columns(self) -> int:
        return triton.cdiv((TILE + self.size - 1) ** 2, 64) * 64

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.N, CHUNK)

    @property
    def block_n(self) -> int:
        return 64 if self.operand == torch.bfloat16 else 16

    def blocks(self) -> dict:
        """Compile-time sizes of the kernels that go along all tokens, 16 numbers to a thread."""
        block_d = max(16, triton.next_power_of_2(self.D))
        return dict(BLOCK_N=2048 // block_d, BLOCK_D=block_d, num_warps=4)

    def tile_blocks(self) -> dict:
        """Compile-time sizes of the kernels that go tile by tile."""
        block_d = max(16, triton.next_power_of_2(self.D))
        warps = 4 if self.operand == torch.bfloat16 and block_d <= 32 else 8
        blocks = dict(BLOCK_N=self.block_n, BLOCK_D=block_d, num_warps=warps)
        return dict(SIZE=self.size, TILE=TILE, COLUMNS=self.columns, PRECISION=self.precision, **blocks)

    def grid(self) -> tuple[int, ...]:
        """The numbers that say where a tile lies."""
        return self.heads, self.H, self.W, self.P, self.D


def _table(kernel: torch.Tensor, plan: Plan, flip: bool) -> tuple[torch.Tensor, torch.Tensor]:
    table = kernel.new_empty(plan.heads, TILE**2, plan.columns, dtype=plan.operand)
    shift = kernel.new_empty(plan.heads)
    sizes = dict(SIZE=plan.size, TILE=TILE, COLUMNS=plan.columns, TAPS=triton.next_power_of_2(plan.size**2))
    _weigh[plan.heads, plan.columns // 64](kernel, table, shift, FLIP=flip, BLOCK=64, **sizes)
    return table, shift


def _empty(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Room for a tensor of the shape of x, with the heads of a token side by side, as they are merged next."""
    B, heads, N, D = x.shape
    return x.new_empty(B, N, heads, D, dtype=dtype).transpose(1, 2)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x, if its rows lie in one piece, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op('vitzoo::aft_conv', mutates_args=())
def forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: torch.Tensor, H: int, W: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mixed values, their normaliser (B, heads, N) and the largest key (B, heads), both float32."""
    plan = Plan.of(q, kernel, H, W)
    q, v = _rows(q), _rows(v)
    out = _empty(q)
    normaliser = q.new_empty(q.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(q):
        largest = k.amax(dim=(2, 3)).float()
        sums = largest.new_empty(plan.B, plan.heads, plan.chunks, plan.D + 1)
        strides = *k.stride()[:3], *v.stride()[:3]
        types = dict(CHUNK=CHUNK, TYPE=TRITON_TYPES[plan.operand])
        _sum[plan.B * plan.heads, plan.chunks](
            k, v, largest, sums, *strides, plan.heads, plan.N, plan.D, **types, **plan.blocks()
        )
        sums = sums.sum(dim=2)
        table, shift = _table(kernel.contiguous(), plan, flip=False)
        _forward[(plan.B * plan.heads * plan.tiles,)](
            q, k, v, table, shift, largest, sums, out, normaliser,
            *q.stride()[:3], *strides, *plan.grid(), **plan.tile_blocks(),
        )  # fmt: skip
    if plan.P:
        num, den = sums.unsqueeze(2).split([plan.D, 1], dim=-1)
        out[:, :, : plan.P] = q[:, :, : plan.P].float().sigmoid() * (num / den)
        normaliser[:, :, : plan.P] = (-shift).exp().clamp(min=1e-30)[:, None] * den.squeeze(-1)
    return out, normaliser, largest


@torch.library.custom_op('vitzoo::aft_conv_backward', mutates_args=())
def backward_op(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: torch.Tensor,
    out: torch.Tensor, normaliser: torch.Tensor, largest: torch.Tensor, H: int, W: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k, v and the kernel."""
    plan = Plan.of(q, kernel, H, W)
    q, v, kernel = _rows(q), _rows(v), kernel.contiguous()
    grad, out = (x.transpose(1, 2).contiguous() for x in (grad, out))
    grad_q, grad_k, grad_v, grad_num = _empty(q), _empty(k), _empty(v), _empty(v, plan.operand)
    grad_den = torch.empty_like(normaliser)
    sums = largest.new_empty(plan.B, plan.heads, plan.chunks, plan.D + 1)
    strides = *k.stride()[:3], *v.stride()[:3]
    blocks = plan.tile_blocks()
    with torch.cuda.device_of(q):
        _grad_queries[plan.B * plan.heads, plan.chunks](
            q, grad, out, normaliser, grad_q, grad_num, grad_den, sums,
            *q.stride()[:3], plan.heads, plan.N, plan.D, CHUNK=CHUNK, **plan.blocks(),
        )  # fmt: skip
        sums = sums.sum(dim=2)
        table, shift = _table(kernel, plan, flip=True)
        _grad_sources[(plan.B * plan.heads * plan.tiles,)](
            k, v, table, shift, largest, sums, grad_num, grad_den, grad_k, grad_v, *strides, *plan.grid(), **blocks
        )
        splits = min(plan.B * plan.tiles, triton.cdiv(PROGRAMS, plan.heads * plan.columns // plan.block_n))
        grad_table = largest.new_empty(splits, plan.heads, TILE**2, plan.columns)
        _grad_table[plan.heads, plan.columns // plan.block_n, splits](
            k, v, largest, grad_num, grad_den, grad_table, *strides, plan.B, *plan.grid(), **blocks
        )
        grad_kernel = torch.empty_like(kernel)
        sizes = dict(SIZE=plan.size, TILE=TILE, COLUMNS=plan.columns, BLOCK=16)
        _fold[plan.heads, triton.cdiv(plan.size**2, 16)](
            kernel, shift, grad_table, grad_kernel, plan.heads, splits, **sizes
        )
    if plan.P:
        e = (k[:, :, : plan.P].float() - largest[..., None, None]).exp() * (-shift).exp().clamp(min=1e-30)[
            :, None, None
        ]
        num, den = sums.unsqueeze(2).split([plan.D, 1], dim=-1)
        grad_v[:, :, : plan.P] = e * num
        grad_k[:, :, : plan.P] = e * ((num * v[:, :, : plan.P].float()).sum(dim=-1, keepdim=True) + den)
    return grad_q, grad_k, grad_v, grad_kernel


@forward_op.register_fake
def _(q, k, v, kernel, H, W):
    normaliser = q.new_empty(q.shape[:3], dtype=torch.float32)
    return _empty(q), normaliser, normaliser.new_empty(q.shape[:2])


@backward_op.register_fake
def _(grad, q, k, v, kernel, out, normaliser, largest, H, W):
    return _empty(q), _empty(k), _empty(v), torch.empty_like(kernel, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.H, ctx.W = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad, *_):
    return *backward_op(grad, *ctx.saved_tensors, ctx.H, ctx.W), None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.vitzoo.aft_conv)
def _flops(q, k, v, kernel, H, W, *args, out_shape=None, **kwargs) -> int:
    """The convolution of numerator and denominator, and the two products of a token: exp(k) v and the gate."""
    B, heads, N, D = q
    return 2 * B * heads * (H * W * kernel[-1] ** 2 * (D + 1) + 2 * N * D)


@register_flop_formula(torch.ops.vitzoo.aft_conv_backward)
def _backward_flops(grad, q, k, v, kernel, out, normaliser, largest, H, W, *args, out_shape=None, **kwargs) -> int:
    """Two products for each of the forward pass."""
    return 2 * _flops(q, k, v, kernel, H, W)
