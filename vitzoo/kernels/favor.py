"""FAVOR+ without its features in memory: two softmaxes, one over the tokens and one over the features.

    s_fj = W_f . k'_j - |k'_j|^2 / 2,  lse_f = log sum_j exp(s_fj),  mean_f = sum_j exp(s_fj - lse_f) v_j
    t_if = W_f . q'_i + lse_f,         out_i = sum_f exp(t_if - log sum_g exp(t_ig)) mean_f

That is sum_f phi_f(q_i) context_f / sum_f phi_f(q_i) total_f with the context written as total_f mean_f: each feature
attends the tokens, then each token attends the features. So both halves are attention as FlashAttention computes it,
with a running maximum, and no number leaves the range of float16. As few features as there are would not fill a GPU, so
the tokens are cut into parts, whose sums are put together in one order.

W is the sum of two numbers of the input's precision, which makes the exponents as good as with W in float32.

Bytes of a forward pass, for N tokens, C channels and two bytes a number: 8 N C (q, k, v, out), and what the blocks of
64 features read of k and v again from the cache. The PyTorch form, in float32, writes and reads the m features of each
head and token some 6 times each, 48 N C m / d. Backward makes the features again, twice for the queries and once for
the keys. Nothing is summed in an order that changes, so every run gives the same bits. Nobody has timed it on a GPU
yet.

`torch.nn.attention.flex_attention` can express it too, as two calls, the first of which returns its lse; with m
features as queries that one has B * heads * m / 128 blocks to share among the processors of a GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import register_flop_formula

from ._common import dot, precision

__all__ = ['favor_attention', 'fits']

# so many programs are enough for any GPU, where tokens are cut into parts
PROGRAMS = 512
LOG2_E = math.log2(math.e)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor) -> bool:
    """Whether the kernel takes them: one type, one width of heads, and features that are not learned."""
    return q.dtype == k.dtype == v.dtype and k.shape == v.shape and q.shape[-1] <= 128 and not features.requires_grad


def favor_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor, scale: float
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) and features (m, d) -> (B, heads, N, d)."""
    return forward_op(q, k, v, features.float(), scale)[0]


@triton.jit
def _rows(ptr, row, count, stride, D, BLOCK_D: tl.constexpr):
    """Rows of a matrix, zeros beyond its last."""
    channel = tl.arange(0, BLOCK_D)
    mask = (row < count)[:, None] & (channel < D)[None, :]
    return tl.load(ptr + row[:, None].to(tl.int64) * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(ptr, x, row, count, stride, D, BLOCK_D: tl.constexpr):
    channel = tl.arange(0, BLOCK_D)
    mask = (row < count)[:, None] & (channel < D)[None, :]
    tl.store(ptr + row[:, None].to(tl.int64) * stride + channel[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _project(x, w_ptr, f, M, D, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """x W^T, (rows of x, features f), and the first part of W."""
    w = _rows(w_ptr, f, M, D, D, BLOCK_D)
    out = dot(x, tl.trans(w), tl.zeros((x.shape[0], f.shape[0]), tl.float32), PRECISION)
    if PARTS == 2:
        out = dot(x, tl.trans(_rows(w_ptr + M * D, f, M, D, D, BLOCK_D)), out, PRECISION)
    return out, w


@triton.jit
def _project_transposed(x, w_ptr, f, M, D, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """W x^T, (features f, rows of x): what a kernel needs whose rows are features, without turning it in registers."""
    out = tl.zeros((f.shape[0], x.shape[0]), tl.float32)
    out = dot(_rows(w_ptr, f, M, D, D, BLOCK_D), tl.trans(x), out, PRECISION)
    if PARTS == 2:
        out = dot(_rows(w_ptr + M * D, f, M, D, D, BLOCK_D), tl.trans(x), out, PRECISION)
    return out


@triton.jit
def _half_norm(k, half_scale):
    """|k'|^2 / 2, to the base 2."""
    k = k.to(tl.float32)
    return half_scale * tl.sum(k * k, axis=1)


@triton.jit
def _sum_keys(
    k_ptr, v_ptr, w_ptr, context_ptr, total_ptr, largest_ptr, k_b, k_h, k_n, v_b, v_h, v_n, heads, N, M, D,
    part, half_scale, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a block of features makes of a part of the tokens: sums of exp(s) v and of exp(s), and the largest s."""
    bh, f = tl.program_id(0), tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    b, head = (bh // heads).to(tl.int64), bh % heads
    k_ptr, v_ptr = k_ptr + b * k_b + head * k_h, v_ptr + b * v_b + head * v_h
    context = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_F,), tl.float32)
    largest = tl.full((BLOCK_F,), float('-inf'), tl.float32)
    for start in range(0, part, BLOCK_N):
        token = tl.program_id(2) * part + start + tl.arange(0, BLOCK_N)
        k, v = _rows(k_ptr, token, N, k_n, D, BLOCK_D), _rows(v_ptr, token, N, v_n, D, BLOCK_D)
        log = _project_transposed(k, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        log = tl.where((token < N)[None, :], log - _half_norm(k, half_scale)[None, :], float('-inf'))
        new = tl.maximum(largest, tl.max(log, axis=1))
        # the first block of a part has a token, so that `new` is a number from there on
        phi = tl.exp2(log - new[:, None])
        decay = tl.exp2(largest - new)
        total = total * decay + tl.sum(phi, axis=1)
        context = dot(phi.to(v.dtype), v, context * decay[:, None], PRECISION)
        largest = new
    row = (bh * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * M
    _store_rows(context_ptr + row * D, context, f, M, D, D, BLOCK_D)
    tl.store(total_ptr + row + f, total, mask=f < M)
    tl.store(largest_ptr + row + f, largest, mask=f < M)


@triton.jit
def _attend(
    q_ptr, w_ptr, mean_ptr, lse_ptr, out_ptr, out_lse_ptr, q_b, q_h, q_n, heads, N, M, D,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a block of tokens makes of all features."""
    blocks = tl.cdiv(N, BLOCK_N)
    bh, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b, head = (bh // heads).to(tl.int64), bh % heads
    q = _rows(q_ptr + b * q_b + head * q_h, token, N, q_n, D, BLOCK_D)
    out = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    largest = tl.full((BLOCK_N,), float('-inf'), tl.float32)
    for start in range(0, M, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        mean = _rows(mean_ptr + bh.to(tl.int64) * M * D, f, M, D, D, BLOCK_D)
        log, _w = _project(q, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        log += tl.load(lse_ptr + bh * M + f, mask=f < M, other=float('-inf'))[None, :]
        new = tl.maximum(largest, tl.max(log, axis=1))
        p = tl.exp2(log - new[:, None])
        decay = tl.exp2(largest - new)
        total = total * decay + tl.sum(p, axis=1)
        out = dot(p.to(mean.dtype), mean, out * decay[:, None], PRECISION)
        largest = new
    _store_rows(out_ptr + (b * N * heads + head) * D, out / total[:, None], token, N, heads * D, D, BLOCK_D)
    tl.store(out_lse_ptr + bh.to(tl.int64) * N + token, largest + tl.log2(total), mask=token < N)


@triton.jit
def _grad_queries(
    q_ptr, w_ptr, mean_ptr, lse_ptr, grad_ptr, out_ptr, out_lse_ptr, delta_ptr, grad_q_ptr, q_b, q_h, q_n,
    heads, N, M, D, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries, and delta, the product of the output with its gradient."""
    blocks = tl.cdiv(N, BLOCK_N)
    bh, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b, head = (bh // heads).to(tl.int64), bh % heads
    q = _rows(q_ptr + b * q_b + head * q_h, token, N, q_n, D, BLOCK_D)
    at = (b * N * heads + head) * D
    grad, out = (
        _rows(grad_ptr + at, token, N, heads * D, D, BLOCK_D),
        _rows(out_ptr + at, token, N, heads * D, D, BLOCK_D),
    )
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
    tl.store(delta_ptr + bh.to(tl.int64) * N + token, delta, mask=token < N)
    out_lse = tl.load(out_lse_ptr + bh.to(tl.int64) * N + token, mask=token < N, other=float('inf'))
    grad_q = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, M, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        mean = _rows(mean_ptr + bh.to(tl.int64) * M * D, f, M, D, D, BLOCK_D)
        log, w = _project(q, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        log += tl.load(lse_ptr + bh * M + f, mask=f < M, other=float('-inf'))[None, :]
        grad_p = dot(grad, tl.trans(mean), tl.zeros((BLOCK_N, BLOCK_F), tl.float32), PRECISION)
        grad_log = tl.exp2(log - out_lse[:, None]) * (grad_p - delta[:, None])
        grad_q = dot(grad_log.to(w.dtype), w, grad_q, PRECISION)
    _store_rows(grad_q_ptr + at, grad_q * LN_2, token, N, heads * D, D, BLOCK_D)


@triton.jit
def _grad_features(
    q_ptr, w_ptr, mean_ptr, lse_ptr, grad_ptr, out_lse_ptr, delta_ptr, grad_mean_ptr, grad_lse_ptr, q_b, q_h, q_n,
    heads, N, M, D, part, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a part of the tokens adds to the gradients of mean and lse of a block of features."""
    bh, f = tl.program_id(0), tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    b, head = (bh // heads).to(tl.int64), bh % heads
    mean = _rows(mean_ptr + bh.to(tl.int64) * M * D, f, M, D, D, BLOCK_D)
    lse = tl.load(lse_ptr + bh * M + f, mask=f < M, other=float('-inf'))
    grad_mean = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    grad_lse = tl.zeros((BLOCK_F,), tl.float32)
    for start in range(0, part, BLOCK_N):
        token = tl.program_id(2) * part + start + tl.arange(0, BLOCK_N)
        q = _rows(q_ptr + b * q_b + head * q_h, token, N, q_n, D, BLOCK_D)
        grad = _rows(grad_ptr + (b * N * heads + head) * D, token, N, heads * D, D, BLOCK_D)
        at = bh.to(tl.int64) * N + token
        out_lse = tl.load(out_lse_ptr + at, mask=token < N, other=float('inf'))
        delta = tl.load(delta_ptr + at, mask=token < N, other=0.0)
        log = _project_transposed(q, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        p = tl.exp2(log + lse[:, None] - out_lse[None, :])
        grad_mean = dot(p.to(grad.dtype), grad, grad_mean, PRECISION)
        grad_p = dot(mean, tl.trans(grad), tl.zeros((BLOCK_F, BLOCK_N), tl.float32), PRECISION)
        grad_lse += tl.sum(p * (grad_p - delta[None, :]), axis=1)
    row = (bh * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * M
    _store_rows(grad_mean_ptr + row * D, grad_mean, f, M, D, D, BLOCK_D)
    tl.store(grad_lse_ptr + row + f, grad_lse, mask=f < M)


@triton.jit
def _grad_keys(
    k_ptr, v_ptr, w_ptr, lse_ptr, grad_mean_ptr, offset_ptr, grad_k_ptr, grad_v_ptr, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, N, M, D, half_scale, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values, from those of mean and lse (in `offset`, less mean . its gradient)."""
    blocks = tl.cdiv(N, BLOCK_N)
    bh, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b, head = (bh // heads).to(tl.int64), bh % heads
    k = _rows(k_ptr + b * k_b + head * k_h, token, N, k_n, D, BLOCK_D)
    v = _rows(v_ptr + b * v_b + head * v_h, token, N, v_n, D, BLOCK_D)
    # nothing overflows beyond the last token
    half_norm = tl.where(token < N, _half_norm(k, half_scale), float('inf'))
    grad_k, grad_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32), tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_half_norm = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, M, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        log, w = _project(k, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        lse = tl.load(lse_ptr + bh * M + f, mask=f < M, other=float('inf'))
        offset = tl.load(offset_ptr + bh * M + f, mask=f < M, other=0.0)
        # of a sum over all tokens, so float32 where the input is float16
        grad_mean = _rows(grad_mean_ptr + bh.to(tl.int64) * M * D, f, M, D, D, BLOCK_D)
        p = tl.exp2(log - half_norm[:, None] - lse[None, :])
        grad_v = dot(p.to(grad_mean.dtype), grad_mean, grad_v, PRECISION)
        zeros = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
        grad_p = dot(v.to(grad_mean.dtype), tl.trans(grad_mean), zeros, PRECISION)
        grad_log = p * (grad_p + offset[None, :])
        grad_k = dot(grad_log.to(grad_mean.dtype), w.to(grad_mean.dtype), grad_k, PRECISION)
        grad_half_norm += tl.sum(grad_log, axis=1)
    grad_k = LN_2 * (grad_k - 2 * half_scale * grad_half_norm[:, None] * k.to(tl.float32))
    at = (b * N * heads + head) * D
    _store_rows(grad_k_ptr + at, grad_k, token, N, heads * D, D, BLOCK_D)
    _store_rows(grad_v_ptr + at, grad_v, token, N, heads * D, D, BLOCK_D)


def _blocks(q: torch.Tensor, backward: bool = False) -> dict:
    """Compile-time sizes of the kernels of a pass, such that what they hold fits in registers."""
    is_float32, block_d = q.dtype == torch.float32, max(16, triton.next_power_of_2(q.shape[-1]))
    return dict(
        BLOCK_N=32 if is_float32 else 64,
        BLOCK_F=32 if is_float32 or (backward and block_d > 64) else 64,
        BLOCK_D=block_d,
        # of W
        PARTS=1 if is_float32 else 2,
        PRECISION=precision(q),
        num_warps=8 if block_d > (32 if backward else 64) else 4,
    )


def _weight(q: torch.Tensor, features: torch.Tensor, scale: float) -> torch.Tensor:
    """W for exponents to the base 2, as a sum of as many numbers of the type of q as make float32: (parts, m, d)."""
    weight = LOG2_E * scale**0.5 * features
    if q.dtype == torch.float32:
        return weight.unsqueeze(0)
    first = weight.to(q.dtype)
    return torch.stack([first, (weight - first.float()).to(q.dtype)])


def _cut(x: torch.Tensor, M: int, blocks: dict) -> tuple[int, int]:
    """The length of the parts of the tokens, and how many there are."""
    (B, heads, N, _), block = x.shape, blocks['BLOCK_N']
    parts = min(triton.cdiv(N, block), triton.cdiv(PROGRAMS, B * heads * triton.cdiv(M, blocks['BLOCK_F'])))
    length = triton.cdiv(triton.cdiv(N, parts), block) * block
    return length, triton.cdiv(N, length)


def _empty(x: torch.Tensor) -> torch.Tensor:
    """Room for a tensor of the shape of x, with the heads of a token side by side, as they are merged next."""
    B, heads, N, D = x.shape
    return x.new_empty(B, N, heads, D).transpose(1, 2)


def _one_piece(x: torch.Tensor) -> torch.Tensor:
    """x, if its rows lie in one piece, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend_tokens(
    k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, half_scale: float, blocks: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """mean (B * heads, m, d) in the type of v, and lse (B * heads, m) to the base 2."""
    (B, heads, N, D), M = k.shape, weight.shape[1]
    length, parts = _cut(k, M, blocks)
    context = k.new_empty(B * heads, parts, M, D, dtype=torch.float32)
    total, largest = context.new_empty(2, B * heads, parts, M)
    _sum_keys[B * heads, triton.cdiv(M, blocks['BLOCK_F']), parts](
        k, v, weight, context, total, largest, *k.stride()[:3], *v.stride()[:3], heads, N, M, D,
        length, half_scale, **blocks,
    )  # fmt: skip
    shift = largest.amax(dim=1)
    decay = (largest - shift.unsqueeze(1)).exp2()
    total = (decay * total).sum(dim=1)
    mean = (decay.unsqueeze(-1) * context).sum(dim=1) / total.unsqueeze(-1)
    return mean.to(v.dtype), shift + total.log2()


@torch.library.custom_op('vitzoo::favor_attention', mutates_args=())
def forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, its lse (B * heads, N), and mean (B * heads, m, d) and lse (B * heads, m) of the features."""
    (B, heads, N, D), M = q.shape, len(features)
    q, k, v = _one_piece(q), _one_piece(k), _one_piece(v)
    blocks, weight = _blocks(q), _weight(q, features, scale)
    out, out_lse = _empty(q), q.new_empty(B * heads, N, dtype=torch.float32)
    with torch.cuda.device_of(q):
        mean, lse = _attend_tokens(k, v, weight, LOG2_E * scale / 2, blocks)
        _attend[(B * heads * triton.cdiv(N, blocks['BLOCK_N']),)](
            q, weight, mean, lse, out, out_lse, *q.stride()[:3], heads, N, M, D, **blocks
        )
    return out, out_lse, mean, lse


@torch.library.custom_op('vitzoo::favor_attention_backward', mutates_args=())
def backward_op(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor,
    out: torch.Tensor, out_lse: torch.Tensor, mean: torch.Tensor, lse: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    (B, heads, N, D), M = q.shape, len(features)
    q, k, v = _one_piece(q), _one_piece(k), _one_piece(v)
    grad, out = (x.transpose(1, 2).contiguous() for x in (grad, out))
    blocks, weight = _blocks(q, backward=True), _weight(q, features, scale)
    grad_q, grad_k, grad_v, delta = _empty(q), _empty(k), _empty(v), torch.empty_like(out_lse)
    length, parts = _cut(q, M, blocks)
    grad_mean, grad_lse = lse.new_empty(B * heads, parts, M, D), lse.new_empty(B * heads, parts, M)
    strides = q.stride()[:3]
    with torch.cuda.device_of(q):
        _grad_queries[(B * heads * triton.cdiv(N, blocks['BLOCK_N']),)](
            q, weight, mean, lse, grad, out, out_lse, delta, grad_q, *strides, heads, N, M, D, **blocks
        )
        _grad_features[B * heads, triton.cdiv(M, blocks['BLOCK_F']), parts](
            q, weight, mean, lse, grad, out_lse, delta, grad_mean, grad_lse, *strides, heads, N, M, D, length, **blocks
        )
        grad_mean = grad_mean.sum(dim=1)
        offset = grad_lse.sum(dim=1) - (grad_mean * mean).sum(dim=-1)
        grad_mean = grad_mean.to(torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32)
        N, half_scale = k.shape[2], LOG2_E * scale / 2
        _grad_keys[(B * heads * triton.cdiv(N, blocks['BLOCK_N']),)](
            k, v, weight, lse, grad_mean, offset, grad_k, grad_v, *k.stride()[:3], *v.stride()[:3],
            heads, N, M, D, half_scale, **blocks,
        )  # fmt: skip
    return grad_q, grad_k, grad_v


@forward_op.register_fake
def _(q, k, v, features, scale):
    (B, heads, N, D), M = q.shape, features.shape[0]
    lse = q.new_empty(B * heads, N, dtype=torch.float32)
    return _empty(q), lse, v.new_empty(B * heads, M, D), lse.new_empty(B * heads, M)


@backward_op.register_fake
def _(grad, q, k, v, features, out, out_lse, mean, lse, scale):
    return _empty(q), _empty(k), _empty(v)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad, *_):
    return *backward_op(grad, *ctx.saved_tensors, ctx.scale), None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.vitzoo.favor_attention)
def _flops(q, k, v, features, scale, *args, out_shape=None, **kwargs) -> int:
    """Features and context of the keys, features, output and normaliser of the queries."""
    B, heads, N, D = q
    return 2 * B * heads * features[0] * (2 * k[2] * D + 2 * N * D + N)


@register_flop_formula(torch.ops.vitzoo.favor_attention_backward)
def _backward_flops(grad, q, k, v, features, out, out_lse, mean, lse, scale, *args, out_shape=None, **kwargs) -> int:
    """Two products for each of the forward pass; features that are made again do not count."""
    return 2 * _flops(q, k, v, features, scale)
