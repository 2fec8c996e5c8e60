"""Attention of positive features, shared by the mixers whose kernel is a product of features of query and key.

    out_i = phi(q_i) . (sum_j phi(k_j) v_j^T) / phi(q_i) . sum_j phi(k_j)

The exponents of phi are shifted, those of the keys by their largest over the tokens for each sample, head and feature,
and those of the queries by as much the other way and then by their own largest. The shifts cancel in the quotient, no
feature leaves the range of numbers and no normaliser is below 1, at any scale of q and k.

Tokens come in pieces whose features fit in a processor's cache, and the backward pass makes the features again, so that
nothing as wide as the features is ever kept: less memory, and less traffic, than their number suggests.
"""

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ['LOG2_E', 'FeatureMap', 'feature_attention', 'query_features']

# so many numbers lie in the cache of a processor's core; a GPU is best given everything at once
CACHED = 2**18
# exponentials are to base 2, because PyTorch computes those several times faster on a CPU
LOG2_E = math.log2(math.e)


class FeatureMap(Protocol):
    """A positive feature map phi(x) = 2^log(x) gain(x) of x (B, heads, N, d), with `num_features` features.

    `weight` is what may be learned of it. Every method may overwrite its arguments but x.
    """

    num_features: int
    weight: Tensor | None

    def log_keys(self, k: Tensor) -> Tensor:
        """The exponents of keys, a new tensor."""

    def log_queries(self, q: Tensor) -> Tensor:
        """The exponents of queries, up to a number for each, a new tensor."""

    def exp(self, log: Tensor, x: Tensor) -> Tensor:
        """The features, from shifted exponents."""

    def grad_keys(self, grad: Tensor, features: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of keys, from that of their features, and that of their exponents."""

    def grad_queries(self, grad: Tensor, features: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of queries, from that of their features, and that of their exponents."""

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, from that of the exponents of keys or queries."""


def feature_attention(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap) -> Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider."""
    if not torch.compiler.is_compiling():
        return _FeatureAttention.apply(q, k, v, phi.weight, phi)
    # a compiler makes pieces and fuses them as it sees fit
    dtype = torch.promote_types(q.dtype, torch.float32)
    context, total, shift = _sum_keys([(k.to(dtype), v.to(dtype))], phi)
    features = query_features(q.to(dtype), shift, phi)
    return (features @ context / (features @ total)).to(v.dtype)


def _sum_keys(pieces: list[tuple[Tensor, Tensor]], phi: FeatureMap) -> tuple[Tensor, Tensor, Tensor]:
    """sum_j phi(k_j) v_j^T (B, heads, m, d), sum_j phi(k_j) (B, heads, m, 1), their shift (B, heads, 1, m)."""
    context = total = shift = None
    for k, v in pieces:
        log = phi.log_keys(k)
        largest = log.detach().amax(dim=2, keepdim=True)
        if shift is not None:
            largest = torch.maximum(largest, shift)
        features = phi.exp(log.sub_(largest), k).mT
        added, added_total = features @ v, features.sum(dim=-1, keepdim=True)
        if shift is None:
            context, total = added, added_total
        else:
            decay = (shift - largest).exp2().mT
            context, total = added.addcmul_(context, decay), added_total.addcmul_(total, decay)
        shift = largest
    return context, total, shift


def _key_features(k: Tensor, shift: Tensor, phi: FeatureMap) -> Tensor:
    return phi.exp(phi.log_keys(k).sub_(shift), k)


def query_features(q: Tensor, shift: Tensor, phi: FeatureMap) -> Tensor:
    """Features of queries, the largest of each 1 or its gain, for keys whose exponents are shifted by `shift`."""
    log = phi.log_queries(q).add_(shift)
    return phi.exp(log.sub_(log.detach().amax(dim=-1, keepdim=True)), q)


def _pieces(q: Tensor, num_features: int) -> list[tuple[slice, list[slice]]]:
    """Slices of samples, and for each the slices of its tokens."""
    B, heads, N = q.shape[:3]
    if q.device.type != 'cpu':
        return [(slice(0, B), [slice(0, N)])]
    samples = max(1, CACHED // (heads * N * num_features))
    tokens = min(N, max(1, CACHED // (heads * num_features)))
    # pieces of one size, as far as that goes
    tokens = -(-N // -(-N // tokens))
    cuts = [slice(start, start + tokens) for start in range(0, N, tokens)]
    return [(slice(start, start + samples), cuts) for start in range(0, B, samples)]


class _FeatureAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, phi: FeatureMap) -> Tensor:
        (B, heads, N, _), dtype = q.shape, torch.promote_types(q.dtype, torch.float32)
        # with the heads of a token side by side, as they are merged next
        out = v.new_empty(B, N, heads, v.shape[-1]).transpose(1, 2)
        normaliser = v.new_empty(B, heads, N, 1, dtype=dtype)
        sums = []
        for samples, cuts in _pieces(q, phi.num_features):
            pieces = [(k[samples, :, cut].to(dtype), v[samples, :, cut].to(dtype)) for cut in cuts]
            context, total, shift = _sum_keys(pieces, phi)
            for cut in cuts:
                features = query_features(q[samples, :, cut].to(dtype), shift, phi)
                divisor = features @ total
                out[samples, :, cut] = (features @ context).div_(divisor)
                normaliser[samples, :, cut] = divisor
            sums.append((context, total, shift))
        ctx.phi = phi
        ctx.save_for_backward(q, k, v, out, normaliser, *(torch.cat(parts) for parts in zip(*sums)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, normaliser, contexts, totals, shifts = ctx.saved_tensors
        phi, dtype = ctx.phi, normaliser.dtype
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_weight = torch.zeros_like(phi.weight) if ctx.needs_input_grad[3] else None
        for samples, cuts in _pieces(q, phi.num_features):
            context, total, shift = contexts[samples], totals[samples], shifts[samples]
            grad_context, grad_total = torch.zeros_like(context), torch.zeros_like(total)
            for cut in cuts:
                piece = q[samples, :, cut].to(dtype)
                features = query_features(piece, shift, phi)
                of_sums = grad[samples, :, cut] / normaliser[samples, :, cut]
                of_divisor = -(of_sums * out[samples, :, cut]).sum(dim=-1, keepdim=True)
                grad_context += features.mT @ of_sums
                grad_total += features.mT @ of_divisor
                of_features = (of_sums @ context.mT).addcmul_(of_divisor, total.mT)
                grad_q[samples, :, cut], of_log = phi.grad_queries(of_features, features, piece)
                if grad_weight is not None:
                    grad_weight += phi.grad_weight(of_log, piece)
            for cut in cuts:
                piece = k[samples, :, cut].to(dtype)
                features = _key_features(piece, shift, phi)
                grad_v[samples, :, cut] = features @ grad_context
                of_features = (v[samples, :, cut].to(dtype) @ grad_context.mT).add_(grad_total.mT)
                grad_k[samples, :, cut], of_log = phi.grad_keys(of_features, features, piece)
                if grad_weight is not None:
                    grad_weight += phi.grad_weight(of_log, piece)
        return grad_q, grad_k, grad_v, grad_weight, None
