"""Softmax attention of each token over itself, shared keys and the keys of its clusters.

    out_i = sum_j p_ij v_j,  p_ij = n_ij 2^(q_i . k_j - lse_i),  lse_i = log2 of sum_j n_ij 2^(q_i . k_j)

n_ij is the number of clusters whose queries have i and whose keys have j, at least 1 for i = j, and 1 for shared keys.
A few heads at a time, and of these a few clusters, are processed, so that their tokens and scores stay in a CPU cache.
The forward pass saves its inputs, the output, lse and weights of up to 8 MB in a head; beyond, the backward pass
computes the scores again.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._numerics import CACHED, is_traced, no_autocast, wide_dtype
from ._recompute import differentiable_gradients

__all__ = ['cluster_attention']

# scores that are computed at a time
_NUM_SCORES = 2 * CACHED
# weights of a head that are stored: 8 MB in float32, those of 4,096 tokens in eight clusters
_STORED_HEAD = 2**21


def cluster_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    in_q: Tensor,
    in_k: Tensor,
    dropout_p: float = 0.0,
) -> Tensor:
    """Tokens q, k, v (B, heads, N, d), shared keys and values (B, heads, S, d) -> (B, heads, N, d).

    `in_q` and `in_k` (B, heads, c, w) are the indices of the members of c clusters. Scores are to base 2, in float32 or
    wider.
    """
    args = [x.flatten(0, 1) for x in (q, k, v, k_shared, v_shared, in_q, in_k)]
    with no_autocast(q):
        out = _plain(*args, dropout_p=dropout_p) if dropout_p or is_traced() else _ClusterAttention.apply(*args)
    return out.view(v.shape)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    in_q: Tensor,
    in_k: Tensor,
    *,
    dropout_p: float = 0.0,
) -> Tensor:
    """`cluster_attention` of M heads, q (M, N, d), as a composition of differentiable functions."""
    dtype, (rows_q, rows_k) = wide_dtype(q), _rows(in_q, in_k, q)
    scores = (_take(q, rows_q) @ _take(k, rows_k).mT).to(dtype)
    always = (q * k).sum(dim=-1, keepdim=True).masked_fill(_finds_itself(in_q, in_k, q), float('-inf'))
    # onnxruntime cannot run products of no keys
    has_shared = k_shared.shape[1] > 0
    if has_shared:
        always = torch.cat([always, q @ k_shared.mT], dim=-1)
    always = always.to(dtype)

    # subtract the largest score of each token over all clusters; it is finite because a token attends itself
    rows = rows_q.flatten()
    largest = always.detach().amax(dim=-1).flatten()
    largest = largest.scatter_reduce(0, rows, scores.detach().amax(dim=-1).flatten(), 'amax')
    # in place, because the scores of all clusters are by far the largest tensor
    weights = scores.sub_(largest[rows].view(*rows_q.shape, 1)).exp2_()
    always = (always - largest.view(*q.shape[:-1], 1)).exp2()
    normalizer = always.sum(dim=-1).flatten().scatter_add(0, rows, weights.sum(dim=-1).flatten())

    weights, always = F.dropout(weights, dropout_p).to(v.dtype), F.dropout(always, dropout_p).to(v.dtype)
    out = always[..., :1] * v
    if has_shared:
        out = out + always[..., 1:] @ v_shared
    out = out.to(dtype)
    routed = (weights @ _take(v, rows_k)).to(dtype).flatten(0, 1)
    out = out.flatten(0, 1).scatter_add(0, rows.unsqueeze(1).expand_as(routed), routed)
    return (out / normalizer.unsqueeze(1)).to(v.dtype).view(v.shape)


def _rows(in_q: Tensor, in_k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (clusters, w) of members (M, c, w) among the tokens of all heads of q (M, N, d)."""
    first = q.shape[1] * torch.arange(q.shape[0], device=q.device).view(-1, 1, 1)
    return (in_q + first).flatten(0, 1), (in_k + first).flatten(0, 1)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Tokens (M, N, d) of the members of clusters (G, w), (G, w, d).

    PyTorch reads and adds rows of a matrix several times as fast as elements of a wider tensor.
    """
    return x.flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, x.shape[-1])


def _add(x: Tensor, rows: Tensor, of_members: Tensor) -> None:
    """Add what the members of clusters (G, w) got, (G, w, d), to the tokens (M, N, d)."""
    x.view(-1, x.shape[-1]).index_add_(0, rows.flatten(), of_members.flatten(0, 1))


def _finds_itself(in_q: Tensor, in_k: Tensor, q: Tensor) -> Tensor:
    """True for tokens q (M, N, d) that are a query and a key of the same cluster, (M, N, 1)."""
    none = torch.zeros(*in_q.shape[:2], q.shape[1], dtype=torch.bool, device=q.device)
    return (none.scatter(2, in_q, True) & none.scatter(2, in_k, True)).any(dim=1).unsqueeze(2)


def _blocks(q: Tensor) -> list[slice]:
    """Slices of heads."""
    # a GPU is fastest with all heads and clusters at once
    size = max(1, CACHED // (q.shape[1] * q.shape[2])) if q.device.type == 'cpu' else len(q)
    return [slice(start, start + size) for start in range(0, len(q), size)]


def _groups(*of_clusters: Tensor) -> Iterator[list[Tensor]]:
    """Parts of tensors (clusters, w, ...)."""
    G, w = of_clusters[0].shape[:2]
    size = max(1, _NUM_SCORES // w**2) if of_clusters[0].device.type == 'cpu' else G
    for start in range(0, G, size):
        yield [x[start : start + size] for x in of_clusters]


class _ClusterAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Tensor) -> Tensor:
        q, _, v, _, _, in_q, in_k = args
        out, lse = torch.empty_like(v), q.new_empty(*q.shape[:2], 1, dtype=wide_dtype(q))
        stored = any(ctx.needs_input_grad) and in_q.shape[1] * in_q.shape[2] * in_k.shape[2] <= _STORED_HEAD
        kept: list[Tensor] = []
        for block in _blocks(q):
            kept += _attend(*(x[block] for x in (*args, out, lse)), stored=stored)
        ctx.save_for_backward(*args, out, lse, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, k_shared, v_shared, in_q, in_k, out, lse, *kept = ctx.saved_tensors
        inputs, weights = (q, k, v, k_shared, v_shared), iter(kept)
        args = *inputs, in_q, in_k
        if torch.is_grad_enabled():
            return (*differentiable_gradients(_plain, args, ctx.needs_input_grad, do),)
        grads = [torch.empty_like(x) for x in inputs]
        with no_autocast(do):
            for block in _blocks(do):
                found = _grad_attend(*(x[block] for x in (*args, out, lse, do)), weights=weights)
                for grad, grad_of_block in zip(grads, found):
                    grad[block] = grad_of_block
        return *grads, None, None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    in_q: Tensor,
    in_k: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    stored: bool,
) -> list[Tensor]:
    """Write `out` and `lse` of a few heads, and return the weights within each group of clusters if they are stored."""
    dtype, (rows_q, rows_k) = lse.dtype, _rows(in_q, in_k, q)
    routed, m_c, l_c = (q.new_empty(*rows_q.shape, n, dtype=dtype) for n in (v.shape[-1], 1, 1))
    kept = []
    for *rows, routed_of_group, m, l in _groups(rows_q, rows_k, routed, m_c, l_c):
        scores = (_take(q, rows[0]) @ _take(k, rows[1]).mT).to(dtype)
        m.copy_(scores.amax(dim=-1, keepdim=True))
        p = scores.sub_(m).exp2_()
        l.copy_(p.sum(dim=-1, keepdim=True))
        routed_of_group.copy_(p.to(v.dtype) @ _take(v, rows[1]))
        if stored:
            kept.append(p)
    own = (q * k).sum(dim=-1, keepdim=True).masked_fill(_finds_itself(in_q, in_k, q), float('-inf'))
    always = torch.cat([own, q @ k_shared.mT], dim=-1).to(dtype)
    # one softmax over all clusters of a token
    m_i = always.amax(dim=-1, keepdim=True)
    m_i.view(-1).scatter_reduce_(0, rows_q.flatten(), m_c.flatten(), 'amax')
    weights, always = m_c.sub_(_take(m_i, rows_q)).exp2_(), always.sub_(m_i).exp2_()
    l_i = always.sum(dim=-1, keepdim=True)
    _add(l_i, rows_q, l_c.mul_(weights))
    y = always[..., :1] * v + (always[..., 1:].to(v.dtype) @ v_shared).to(dtype)
    _add(y, rows_q, routed.mul_(weights))
    torch.div(y, l_i, out=y)
    out.copy_(y)
    if stored:
        for p, factor in zip(kept, _groups(weights.div_(_take(l_i, rows_q)))):
            p.mul_(*factor)
    torch.add(m_i, l_i.log2_(), out=lse)
    return kept


def _grad_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor,
    v_shared: Tensor,
    in_q: Tensor,
    in_k: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    *,
    weights: Iterator[Tensor],
) -> tuple[Tensor, ...]:
    """Gradients of the inputs of a few heads; the next weights, if any were stored, are those of their clusters."""
    dtype, do, (rows_q, rows_k) = lse.dtype, do.contiguous(), _rows(in_q, in_k, q)
    delta = (do * out).sum(dim=-1, keepdim=True, dtype=dtype)
    # of a token with itself
    p = (q * k).sum(dim=-1, keepdim=True).to(dtype).sub_(lse).exp2_().masked_fill(_finds_itself(in_q, in_k, q), 0)
    ds = (do * v).sum(dim=-1, keepdim=True).to(dtype).sub_(delta).mul_(p)
    dq, dk, dv = ds * k, ds * q, p * do
    # with shared keys
    p = (q @ k_shared.mT).to(dtype).sub_(lse).exp2_()
    ds = (do @ v_shared.mT).to(dtype).sub_(delta).mul_(p).to(q.dtype)
    dk_shared, dv_shared = ds.mT @ q, p.to(v.dtype).mT @ do
    dq += ds @ k_shared
    for rows in _groups(rows_q, rows_k):
        (q_c, do_c), (k_c, v_c) = ([_take(x, r) for x in xs] for xs, r in zip(((q, do), (k, v)), rows))
        p = next(weights, None)
        if p is None:
            p = (q_c @ k_c.mT).to(dtype).sub_(_take(lse, rows[0])).exp2_()
        ds = (do_c @ v_c.mT).to(dtype).sub_(_take(delta, rows[0])).mul_(p).to(q.dtype)
        _add(dv, rows[1], (p.to(v.dtype).mT @ do_c).to(dtype))
        _add(dq, rows[0], (ds @ k_c).to(dtype))
        _add(dk, rows[1], (ds.mT @ q_c).to(dtype))
    # of 2^x
    return *(x.mul_(math.log(2)) for x in (dq, dk)), dv, dk_shared.mul_(math.log(2)), dv_shared
