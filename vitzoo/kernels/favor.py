"""FAVOR+ without its features in memory: two softmaxes, one over the tokens and one over the features.

    s_fj = W_f . k'_j - |k'_j|^2 / 2,  lse_f = log sum_j exp(s_fj),  mean_f = sum_j exp(s_fj - lse_f) v_j
    t_if = W_f . q'_i + lse_f,         out_i = sum_f exp(t_if - log sum_g exp(t_ig)) mean_f

That is sum_f phi_f(q_i) context_f / sum_f phi_f(q_i) total_f with context_f = total_f mean_f: each feature attends the
tokens, then each token attends the features. Both halves are attention as in FlashAttention, with a running maximum,
so float16 does not overflow. There are too few features to fill a GPU, so the tokens are split into parts, whose sums
are combined in a fixed order.

W is the sum of two numbers in the input's precision, which makes the exponents as precise as with W in float32.

Bytes of a forward pass, for N tokens, C channels and two bytes per number: 8 N C (q, k, v, out), and k and v once more
from the cache for each block of 64 features. The PyTorch form, in float32, writes and reads the m features of each
head and token about 6 times each, 48 N C m / d. Backward recomputes the features, twice for the queries and once for
the keys. All sums have a fixed order, so results are deterministic.

`torch.nn.attention.flex_attention` can express it as two calls, the first of which returns its lse; with m features as
queries, the first call has only B * heads * m / 128 blocks for all processors of a GPU.
"""

import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import register_flop_formula

from ._common import RCP_LN2, contiguous_rows, dot, dot_precision, empty_output, load_rows, store_rows

__all__ = ['backward_op', 'favor_attention_triton', 'fits', 'forward_op']

# programs that fill any GPU; the tokens are split over as many
_NUM_PROGRAMS = 512
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor) -> bool:
    """Return True if the kernel supports these inputs: one dtype and head dimension, and fixed features."""
    return q.dtype == k.dtype == v.dtype and k.shape == v.shape and q.shape[-1] <= 128 and not features.requires_grad


def favor_attention_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor, scale: float
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) and features (m, d) -> (B, heads, N, d)."""
    return forward_op(q, k, v, features.float(), scale)[0]


@triton.jit
def _project(x, w_ptr, f, M, D, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """x W^T, (rows of x, features f), and the first part of W."""
    w = load_rows(w_ptr, f, f < M, D, D, BLOCK_D)
    out = dot(x, tl.trans(w), tl.zeros((x.shape[0], f.shape[0]), tl.float32), PRECISION)
    if PARTS == 2:
        out = dot(x, tl.trans(load_rows(w_ptr + M * D, f, f < M, D, D, BLOCK_D)), out, PRECISION)
    return out, w


@triton.jit
def _project_transposed(x, w_ptr, f, M, D, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """W x^T, (features f, rows of x), for kernels whose rows are features: no transpose in registers."""
    out = tl.zeros((f.shape[0], x.shape[0]), tl.float32)
    out = dot(load_rows(w_ptr, f, f < M, D, D, BLOCK_D), tl.trans(x), out, PRECISION)
    if PARTS == 2:
        out = dot(load_rows(w_ptr + M * D, f, f < M, D, D, BLOCK_D), tl.trans(x), out, PRECISION)
    return out


@triton.jit
def _half_norm(k, half_scale):
    """|k'|^2 / 2, to base 2."""
    k = k.to(tl.float32)
    return half_scale * tl.sum(k * k, axis=1)


@triton.jit
def _feature_kernel(
    k_ptr, v_ptr, w_ptr, acc_ptr, l_ptr, m_ptr, k_b, k_h, k_n, v_b, v_h, v_n, heads, N, M, D,
    part_size, half_scale, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of features attends a part of the tokens: sums of exp(s) v and of exp(s), and the maximum of s."""
    bh, f = tl.program_id(0), tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    b, head = (bh // heads).to(tl.int64), bh % heads
    k_ptr, v_ptr = k_ptr + b * k_b + head * k_h, v_ptr + b * v_b + head * v_h
    acc = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_F,), tl.float32)
    m_i = tl.full((BLOCK_F,), float('-inf'), tl.float32)
    for start in range(0, part_size, BLOCK_N):
        token = tl.program_id(2) * part_size + start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, token, token < N, k_n, D, BLOCK_D)
        v = load_rows(v_ptr, token, token < N, v_n, D, BLOCK_D)
        s = _project_transposed(k, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        s = tl.where((token < N)[None, :], s - _half_norm(k, half_scale)[None, :], float('-inf'))
        # finite from the first block on, because every part begins with a token
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None], PRECISION)
        m_i = m_new
    row = (bh * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * M
    store_rows(acc_ptr + row * D, acc, f, f < M, D, D, BLOCK_D)
    tl.store(l_ptr + row + f, l_i, mask=f < M)
    tl.store(m_ptr + row + f, m_i, mask=f < M)


@triton.jit
def _token_kernel(
    q_ptr, w_ptr, mean_ptr, lse_ptr, out_ptr, out_lse_ptr, q_b, q_h, q_n, heads, N, M, D,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of tokens attends all features."""
    blocks = tl.cdiv(N, BLOCK_N)
    bh, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b, head = (bh // heads).to(tl.int64), bh % heads
    q = load_rows(q_ptr + b * q_b + head * q_h, token, token < N, q_n, D, BLOCK_D)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_N,), tl.float32)
    m_i = tl.full((BLOCK_N,), float('-inf'), tl.float32)
    for start in range(0, M, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        mean = load_rows(mean_ptr + bh.to(tl.int64) * M * D, f, f < M, D, D, BLOCK_D)
        t, _w = _project(q, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        t += tl.load(lse_ptr + bh * M + f, mask=f < M, other=float('-inf'))[None, :]
        m_new = tl.maximum(m_i, tl.max(t, axis=1))
        p = tl.exp2(t - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = dot(p.to(mean.dtype), mean, acc * alpha[:, None], PRECISION)
        m_i = m_new
    store_rows(out_ptr + (b * N * heads + head) * D, acc / l_i[:, None], token, token < N, heads * D, D, BLOCK_D)
    tl.store(out_lse_ptr + bh.to(tl.int64) * N + token, m_i + tl.log2(l_i), mask=token < N)


@triton.jit
def _dq_kernel(
    q_ptr, w_ptr, mean_ptr, lse_ptr, do_ptr, out_ptr, out_lse_ptr, delta_ptr, dq_ptr, q_b, q_h, q_n,
    heads, N, M, D, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a block of tokens, and delta = do . out."""
    blocks = tl.cdiv(N, BLOCK_N)
    bh, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b, head = (bh // heads).to(tl.int64), bh % heads
    q = load_rows(q_ptr + b * q_b + head * q_h, token, token < N, q_n, D, BLOCK_D)
    base = (b * N * heads + head) * D
    do = load_rows(do_ptr + base, token, token < N, heads * D, D, BLOCK_D)
    out = load_rows(out_ptr + base, token, token < N, heads * D, D, BLOCK_D)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1)
    tl.store(delta_ptr + bh.to(tl.int64) * N + token, delta, mask=token < N)
    out_lse = tl.load(out_lse_ptr + bh.to(tl.int64) * N + token, mask=token < N, other=float('inf'))
    dq = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, M, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        mean = load_rows(mean_ptr + bh.to(tl.int64) * M * D, f, f < M, D, D, BLOCK_D)
        t, w = _project(q, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        t += tl.load(lse_ptr + bh * M + f, mask=f < M, other=float('-inf'))[None, :]
        dp = dot(do, tl.trans(mean), tl.zeros((BLOCK_N, BLOCK_F), tl.float32), PRECISION)
        dt = tl.exp2(t - out_lse[:, None]) * (dp - delta[:, None])
        dq = dot(dt.to(w.dtype), w, dq, PRECISION)
    store_rows(dq_ptr + base, dq * _LN_2, token, token < N, heads * D, D, BLOCK_D)


@triton.jit
def _dfeature_kernel(
    q_ptr, w_ptr, mean_ptr, lse_ptr, do_ptr, out_lse_ptr, delta_ptr, dmean_ptr, dlse_ptr, q_b, q_h, q_n,
    heads, N, M, D, part_size, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of mean and lse of a block of features, from a part of the tokens."""
    bh, f = tl.program_id(0), tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    b, head = (bh // heads).to(tl.int64), bh % heads
    mean = load_rows(mean_ptr + bh.to(tl.int64) * M * D, f, f < M, D, D, BLOCK_D)
    lse = tl.load(lse_ptr + bh * M + f, mask=f < M, other=float('-inf'))
    dmean = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    dlse = tl.zeros((BLOCK_F,), tl.float32)
    for start in range(0, part_size, BLOCK_N):
        token = tl.program_id(2) * part_size + start + tl.arange(0, BLOCK_N)
        q = load_rows(q_ptr + b * q_b + head * q_h, token, token < N, q_n, D, BLOCK_D)
        do = load_rows(do_ptr + (b * N * heads + head) * D, token, token < N, heads * D, D, BLOCK_D)
        offset = bh.to(tl.int64) * N + token
        out_lse = tl.load(out_lse_ptr + offset, mask=token < N, other=float('inf'))
        delta = tl.load(delta_ptr + offset, mask=token < N, other=0.0)
        t = _project_transposed(q, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        p = tl.exp2(t + lse[:, None] - out_lse[None, :])
        dmean = dot(p.to(do.dtype), do, dmean, PRECISION)
        dp = dot(mean, tl.trans(do), tl.zeros((BLOCK_F, BLOCK_N), tl.float32), PRECISION)
        dlse += tl.sum(p * (dp - delta[None, :]), axis=1)
    row = (bh * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * M
    store_rows(dmean_ptr + row * D, dmean, f, f < M, D, D, BLOCK_D)
    tl.store(dlse_ptr + row + f, dlse, mask=f < M)


@triton.jit
def _dkv_kernel(
    k_ptr, v_ptr, w_ptr, lse_ptr, dmean_ptr, delta_ptr, dk_ptr, dv_ptr, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, N, M, D, half_scale, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of tokens, from dmean and delta = dmean . mean - dlse of the features."""
    blocks = tl.cdiv(N, BLOCK_N)
    bh, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b, head = (bh // heads).to(tl.int64), bh % heads
    k = load_rows(k_ptr + b * k_b + head * k_h, token, token < N, k_n, D, BLOCK_D)
    v = load_rows(v_ptr + b * v_b + head * v_h, token, token < N, v_n, D, BLOCK_D)
    # infinite after the last token, so that exp2 does not overflow
    half_norm = tl.where(token < N, _half_norm(k, half_scale), float('inf'))
    dk, dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32), tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dhalf_norm = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, M, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        s, w = _project(k, w_ptr, f, M, D, BLOCK_D, PARTS, PRECISION)
        lse = tl.load(lse_ptr + bh * M + f, mask=f < M, other=float('inf'))
        delta = tl.load(delta_ptr + bh * M + f, mask=f < M, other=0.0)
        # a sum over all tokens, so float32 if the input is float16
        dmean = load_rows(dmean_ptr + bh.to(tl.int64) * M * D, f, f < M, D, D, BLOCK_D)
        p = tl.exp2(s - half_norm[:, None] - lse[None, :])
        dv = dot(p.to(dmean.dtype), dmean, dv, PRECISION)
        dp = dot(v.to(dmean.dtype), tl.trans(dmean), tl.zeros((BLOCK_N, BLOCK_F), tl.float32), PRECISION)
        ds = p * (dp - delta[None, :])
        dk = dot(ds.to(dmean.dtype), w.to(dmean.dtype), dk, PRECISION)
        dhalf_norm += tl.sum(ds, axis=1)
    dk = _LN_2 * (dk - 2 * half_scale * dhalf_norm[:, None] * k.to(tl.float32))
    base = (b * N * heads + head) * D
    store_rows(dk_ptr + base, dk, token, token < N, heads * D, D, BLOCK_D)
    store_rows(dv_ptr + base, dv, token, token < N, heads * D, D, BLOCK_D)


def _block_sizes(q: torch.Tensor, backward: bool = False) -> dict:
    """Compile-time sizes of the kernels of a pass, chosen so that registers suffice."""
    is_float32, block_d = q.dtype == torch.float32, max(16, triton.next_power_of_2(q.shape[-1]))
    is_wide = block_d > 64
    # the backward pass multiplies in float32 if the input is float16
    is_small = is_float32 or (backward and is_wide and q.dtype == torch.float16)
    return dict(
        BLOCK_N=32 if is_small else 64,
        BLOCK_F=32 if is_float32 or (backward and is_wide) else 64,
        BLOCK_D=block_d,
        # of W
        PARTS=1 if is_float32 else 2,
        PRECISION=dot_precision(q),
        num_warps=8 if block_d > (32 if backward else 64) else 4,
        # a third stage exceeds the shared memory of the smaller GPUs, 99 KB
        **({'num_stages': 2} if is_wide else {}),
    )


def _split_weight(q: torch.Tensor, features: torch.Tensor, scale: float) -> torch.Tensor:
    """W for exponents to base 2 as a sum of one or two parts in the dtype of q, (parts, m, d)."""
    weight = RCP_LN2.value * scale**0.5 * features
    if q.dtype == torch.float32:
        return weight.unsqueeze(0)
    first = weight.to(q.dtype)
    return torch.stack([first, (weight - first.float()).to(q.dtype)])


def _split_tokens(x: torch.Tensor, M: int, blocks: dict) -> tuple[int, int]:
    """The number of tokens per part, and the number of parts."""
    (B, heads, N, _), block = x.shape, blocks['BLOCK_N']
    parts = min(triton.cdiv(N, block), triton.cdiv(_NUM_PROGRAMS, B * heads * triton.cdiv(M, blocks['BLOCK_F'])))
    part_size = triton.cdiv(triton.cdiv(N, parts), block) * block
    return part_size, triton.cdiv(N, part_size)


def _attend_tokens(
    k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, half_scale: float, blocks: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """mean (B * heads, m, d) in the dtype of v, and lse (B * heads, m) to base 2."""
    (B, heads, N, D), M = k.shape, weight.shape[1]
    part_size, parts = _split_tokens(k, M, blocks)
    acc = k.new_empty(B * heads, parts, M, D, dtype=torch.float32)
    l_i, m_i = acc.new_empty(2, B * heads, parts, M)
    _feature_kernel[B * heads, triton.cdiv(M, blocks['BLOCK_F']), parts](
        k, v, weight, acc, l_i, m_i, *k.stride()[:3], *v.stride()[:3], heads, N, M, D,
        part_size, half_scale, **blocks,
    )  # fmt: skip
    m = m_i.amax(dim=1)
    alpha = (m_i - m.unsqueeze(1)).exp2()
    total = (alpha * l_i).sum(dim=1)
    mean = (alpha.unsqueeze(-1) * acc).sum(dim=1) / total.unsqueeze(-1)
    return mean.to(v.dtype), m + total.log2()


@torch.library.custom_op('vitzoo::favor_attention', mutates_args=())
def forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, its lse (B * heads, N), and mean (B * heads, m, d) and lse (B * heads, m) of the features."""
    (B, heads, N, D), M = q.shape, len(features)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    blocks, weight = _block_sizes(q), _split_weight(q, features, scale)
    out, out_lse = empty_output(q), q.new_empty(B * heads, N, dtype=torch.float32)
    with torch.cuda.device_of(q):
        mean, lse = _attend_tokens(k, v, weight, RCP_LN2.value * scale / 2, blocks)
        _token_kernel[(B * heads * triton.cdiv(N, blocks['BLOCK_N']),)](
            q, weight, mean, lse, out, out_lse, *q.stride()[:3], heads, N, M, D, **blocks
        )
    return out, out_lse, mean, lse


@torch.library.custom_op('vitzoo::favor_attention_backward', mutates_args=())
def backward_op(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor,
    out: torch.Tensor, out_lse: torch.Tensor, mean: torch.Tensor, lse: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    (B, heads, N, D), M = q.shape, len(features)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    do, out = (x.transpose(1, 2).contiguous() for x in (do, out))
    blocks, weight = _block_sizes(q, backward=True), _split_weight(q, features, scale)
    dq, dk, dv, delta = empty_output(q), empty_output(k), empty_output(v), torch.empty_like(out_lse)
    part_size, parts = _split_tokens(q, M, blocks)
    dmean, dlse = lse.new_empty(B * heads, parts, M, D), lse.new_empty(B * heads, parts, M)
    strides = q.stride()[:3]
    with torch.cuda.device_of(q):
        _dq_kernel[(B * heads * triton.cdiv(N, blocks['BLOCK_N']),)](
            q, weight, mean, lse, do, out, out_lse, delta, dq, *strides, heads, N, M, D, **blocks
        )
        _dfeature_kernel[B * heads, triton.cdiv(M, blocks['BLOCK_F']), parts](
            q, weight, mean, lse, do, out_lse, delta, dmean, dlse, *strides, heads, N, M, D, part_size,
            # with 4 warps, Triton 3.6 spills at 32 channels
            **{**blocks, 'num_warps': 8},
        )  # fmt: skip
        dmean = dmean.sum(dim=1)
        feature_delta = (dmean * mean).sum(dim=-1) - dlse.sum(dim=1)
        dmean = dmean.to(torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32)
        N, half_scale = k.shape[2], RCP_LN2.value * scale / 2
        _dkv_kernel[(B * heads * triton.cdiv(N, blocks['BLOCK_N']),)](
            k, v, weight, lse, dmean, feature_delta, dk, dv, *k.stride()[:3], *v.stride()[:3],
            heads, N, M, D, half_scale, **blocks,
        )  # fmt: skip
    return dq, dk, dv


@forward_op.register_fake
def _(q, k, v, features, scale):
    (B, heads, N, D), M = q.shape, features.shape[0]
    lse = q.new_empty(B * heads, N, dtype=torch.float32)
    return empty_output(q), lse, v.new_empty(B * heads, M, D), lse.new_empty(B * heads, M)


@backward_op.register_fake
def _(do, q, k, v, features, out, out_lse, mean, lse, scale):
    return empty_output(q), empty_output(k), empty_output(v)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, do, *_):
    return *backward_op(do, *ctx.saved_tensors, ctx.scale), None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.vitzoo.favor_attention)
def _forward_flops(q, k, v, features, scale, *args, **kwargs) -> int:
    """Features and context of the keys; features, output and normalizer of the queries."""
    B, heads, N, D = q
    return 2 * B * heads * features[0] * (2 * k[2] * D + 2 * N * D + N)


@register_flop_formula(torch.ops.vitzoo.favor_attention_backward)
def _backward_flops(do, q, k, v, features, out, out_lse, mean, lse, scale, *args, **kwargs) -> int:
    """Two products for each product of the forward pass; recomputed features do not count."""
    return 2 * _forward_flops(q, k, v, features, scale)
