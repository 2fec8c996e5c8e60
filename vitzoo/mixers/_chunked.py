"""Softmax attention of consecutive chunks of tokens, each over itself and the chunk before it.

    out = softmax(scale * q k^T + bias) v,  lse = log2 of the sum of the exponentials

With their lse, `merge` combines the outputs of several sets of keys into those of one softmax over all of them. Chunks
are processed in groups whose scores fit in a CPU cache. Scores are recomputed in the backward pass, not stored.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._numerics import CACHED, LOG2_E, is_traced, no_autocast, wide_dtype
from ._recompute import differentiable_gradients

__all__ = ['chunk_attention', 'merge', 'softmax_with_lse']


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Chunks q, k and v (G, m, d), and a bias to base 2 (G - 1, m, 2m) -> out (G - 1, m, d) and lse (G - 1, m, 1).

    The first chunk has no chunk before it and gets no output. Scores and lse are computed in float32 or wider. The
    bias gets no gradient.
    """
    if not is_traced():
        return _ChunkAttention.apply(q, k, v, bias, scale, dropout_p)
    return _plain(q, k, v, scale, bias, dropout_p)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor,
    dropout_p: float = 0.0,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_attention` as a composition of differentiable functions; dropout keeps the weights `kept`, if any."""
    k, v = (torch.cat([x[:-1], x[1:]], dim=1) for x in (k, v))
    return softmax_with_lse(_scores(q[1:], k, scale, bias), v, dropout_p, kept)


def softmax_with_lse(scores: Tensor, v: Tensor, dropout_p: float, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(scores) v and lse, for scores to base 2 in float32 or wider; dropout keeps the weights `kept`, if any."""
    m_i = scores.detach().amax(dim=-1, keepdim=True)
    p = (scores - m_i).exp2()
    l_i = p.sum(dim=-1, keepdim=True)
    weights = (p / l_i).to(v.dtype)
    weights = F.dropout(weights, dropout_p) if kept is None else weights * kept / (1 - dropout_p)
    return weights @ v, m_i + l_i.log2()


def merge(outs: Tensor, lse: Tensor, dim: int) -> Tensor:
    """Combine the outputs of several sets of keys, stacked along `dim`, into those of one softmax over all keys."""
    return ((lse / LOG2_E).softmax(dim=dim) * outs).sum(dim=dim)


def _scores(q: Tensor, k: Tensor, scale: float, bias: Tensor) -> Tensor:
    scores = (LOG2_E * scale * q) @ k.mT
    return scores.to(wide_dtype(scores)).add_(bias)


def _pairs(x: Tensor) -> Tensor:
    """Chunks (G, m, d) -> each chunk but the first, after the chunk before it, as a view (G - 1, 2m, d)."""
    m = x.shape[1]
    return x.flatten(0, 1).unfold(0, 2 * m, m).mT


def _groups(q: Tensor) -> list[slice]:
    # a GPU is fastest with all chunks at once
    size = max(1, CACHED // (2 * q.shape[1] ** 2)) if q.device.type == 'cpu' else len(q)
    return [slice(start, start + size) for start in range(0, len(q) - 1, size)]


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, dropout_p: float
    ) -> tuple[Tensor, Tensor]:
        (G, m, _), dtype = q.shape, wide_dtype(q)
        out, lse = v.new_empty(G - 1, m, v.shape[-1]), q.new_empty(G - 1, m, 1, dtype=dtype)
        k_pairs, v_pairs, masks = _pairs(k), _pairs(v), []
        for group in _groups(q):
            scores = _scores(q[1:][group], k_pairs[group], scale, bias[group])
            m_i = scores.amax(dim=-1, keepdim=True)
            p = scores.sub_(m_i).exp2_()
            l_i = p.sum(dim=-1, keepdim=True)
            lse[group] = m_i.add_(l_i.log2())
            if dropout_p:
                masks.append(torch.rand_like(p) >= dropout_p)
                p *= masks[-1]
            out[group] = (p.to(v.dtype) @ v_pairs[group]).div_(l_i * (1 - dropout_p))
        ctx.scale, ctx.dropout_p = scale, dropout_p
        ctx.save_for_backward(q, k, v, bias, out, lse, *masks)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, lse, *masks = ctx.saved_tensors
        if torch.is_grad_enabled():
            kept = torch.cat(masks) if masks else None
            plain = partial(_plain, scale=ctx.scale, bias=bias, dropout_p=ctx.dropout_p, kept=kept)
            return *differentiable_gradients(plain, (q, k, v), ctx.needs_input_grad, (do, dlse)), None, None, None
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for x in (dq, dk, dv):
            x[0] = 0
        k_pairs, v_pairs, m = _pairs(k), _pairs(v), q.shape[1]
        with no_autocast(do):
            for i, group in enumerate(_groups(q)):
                own, before = (slice(group.start + j, min(group.stop, len(lse)) + j) for j in (1, 0))
                p = _scores(q[own], k_pairs[group], ctx.scale, bias[group]).sub_(lse[group]).exp2_()
                dp = (do[group] @ v_pairs[group].mT).to(p.dtype)
                dropped = p
                if ctx.dropout_p:
                    mask = masks[i] / (1 - ctx.dropout_p)
                    dp, dropped = dp.mul_(mask), p * mask
                dropped = dropped.to(v.dtype)
                torch.bmm(dropped[:, :, m:].mT, do[group], out=dv[own])
                dv[before].baddbmm_(dropped[:, :, :m].mT, do[group])
                delta = (do[group] * out[group]).sum(dim=-1, keepdim=True)
                ds = dp.add_(LOG2_E * dlse[group] - delta).mul_(p.mul_(ctx.scale)).to(q.dtype)
                torch.bmm(ds, k_pairs[group], out=dq[own])
                torch.bmm(ds[:, :, m:].mT, q[own], out=dk[own])
                dk[before].baddbmm_(ds[:, :, :m].mT, q[own])
        return dq, dk, dv, None, None, None
