"""Softmax attention of chunks of tokens in a row, each to itself and the one before it.

    out = softmax(scale * q k^T + bias) v,  z = log2 of the sum of the exponentials

With z the outputs of several sets of keys become those of one softmax over all of them (`merge`). Chunks come in groups
whose scores fit in a processor's cache, and the backward pass makes the scores again, so that none are kept.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ._positive_features import LOG2_E

__all__ = ['chunk_attention', 'merge', 'softmax_with_z']

# so many numbers lie in the cache of a processor's core; a GPU is best given everything at once
CACHED = 2**18


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Chunks q, k and v (G, m, d), and a bias to base 2 (G - 1, m, 2m) -> out (G - 1, m, d) and z (G - 1, m, 1).

    The first chunk has none before it and gets no output. Scores and z are computed in float32 or wider. No gradient
    goes to the bias.
    """
    if not torch.compiler.is_compiling():
        return _ChunkAttention.apply(q, k, v, bias, scale, dropout_p)
    k, v = (torch.cat([x[:-1], x[1:]], dim=1) for x in (k, v))
    return softmax_with_z(_scores(q[1:], k, scale, bias), v, dropout_p)


def softmax_with_z(scores: Tensor, v: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """softmax(scores) v and z, for scores to base 2 in float32 or wider."""
    largest = scores.detach().amax(dim=-1, keepdim=True)
    weights = (scores - largest).exp2()
    total = weights.sum(dim=-1, keepdim=True)
    return F.dropout((weights / total).to(v.dtype), dropout_p) @ v, largest + total.log2()


def merge(outs: Tensor, z: Tensor, dim: int) -> Tensor:
    """Outputs of several sets of keys, with their z, side by side along `dim` -> those of one softmax over all keys."""
    return ((z / LOG2_E).softmax(dim=dim) * outs).sum(dim=dim)


def _scores(q: Tensor, k: Tensor, scale: float, bias: Tensor) -> Tensor:
    scores = (LOG2_E * scale * q) @ k.mT
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).add_(bias)


def _pairs(x: Tensor) -> Tensor:
    """Chunks (G, m, d) -> each but the first behind the one before it, a view (G - 1, 2m, d)."""
    m = x.shape[1]
    return x.flatten(0, 1).unfold(0, 2 * m, m).mT


def _groups(q: Tensor) -> list[slice]:
    size = max(1, CACHED // (2 * q.shape[1] ** 2)) if q.device.type == 'cpu' else len(q)
    return [slice(start, start + size) for start in range(0, len(q) - 1, size)]


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, scale, dropout_p):
        (G, m, _), dtype = q.shape, torch.promote_types(q.dtype, torch.float32)
        out, z = v.new_empty(G - 1, m, v.shape[-1]), q.new_empty(G - 1, m, 1, dtype=dtype)
        k_pairs, v_pairs, kept = _pairs(k), _pairs(v), []
        for group in _groups(q):
            scores = _scores(q[1:][group], k_pairs[group], scale, bias[group])
            largest = scores.amax(dim=-1, keepdim=True)
            weights = scores.sub_(largest).exp2_()
            total = weights.sum(dim=-1, keepdim=True)
            z[group] = largest.add_(total.log2())
            if dropout_p:
                kept.append(torch.rand_like(weights) >= dropout_p)
                weights *= kept[-1]
            out[group] = (weights.to(v.dtype) @ v_pairs[group]).div_(total * (1 - dropout_p))
        ctx.scale, ctx.dropout_p = scale, dropout_p
        ctx.save_for_backward(q, k, v, bias, out, z, *kept)
        return out, z

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_z):
        q, k, v, bias, out, z, *kept = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        for x in (grad_q, grad_k, grad_v):
            x[0] = 0
        k_pairs, v_pairs, m = _pairs(k), _pairs(v), q.shape[1]
        for i, group in enumerate(_groups(q)):
            own, before = (slice(group.start + j, min(group.stop, len(z)) + j) for j in (1, 0))
            weights = _scores(q[own], k_pairs[group], ctx.scale, bias[group]).sub_(z[group]).exp2_()
            of_weights = (grad[group] @ v_pairs[group].mT).to(weights.dtype)
            seen = weights
            if ctx.dropout_p:
                keep = kept[i] / (1 - ctx.dropout_p)
                of_weights, seen = of_weights.mul_(keep), weights * keep
            seen = seen.to(v.dtype)
            torch.bmm(seen[:, :, m:].mT, grad[group], out=grad_v[own])
            grad_v[before].baddbmm_(seen[:, :, :m].mT, grad[group])
            of_rows = LOG2_E * grad_z[group] - (grad[group] * out[group]).sum(dim=-1, keepdim=True)
            of_scores = of_weights.add_(of_rows).mul_(weights.mul_(ctx.scale)).to(q.dtype)
            torch.bmm(of_scores, k_pairs[group], out=grad_q[own])
            torch.bmm(of_scores[:, :, m:].mT, q[own], out=grad_k[own])
            grad_k[before].baddbmm_(of_scores[:, :, :m].mT, q[own])
        return grad_q, grad_k, grad_v, None, None, None
