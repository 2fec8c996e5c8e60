"""Attention with positive features, shared by the mixers whose kernel is a product of query and key features.

    out_i = phi(q_i) . (sum_j phi(k_j) v_j^T) / phi(q_i) . sum_j phi(k_j)

The exponents of phi are shifted: those of the keys by their maximum over the tokens, per sample, head and feature, and
those of the queries by the opposite and then by their own maximum. The shifts cancel in the quotient, features stay in
range, and no normalizer is below 1, at any scale of q and k.

Tokens are processed in blocks whose features fit in a CPU cache. Features are recomputed in the backward pass and never
stored, which saves memory and memory traffic.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ._numerics import CACHED, dot_tokens, is_empty, is_traced, no_autocast, wide_dtype
from ._recompute import differentiable_gradients

__all__ = ['FeatureMap', 'feature_attention', 'query_features']


class FeatureMap(Protocol):
    """A positive feature map phi(x) = 2^log(x) gain(x) of x (B, heads, N, d), with `num_features` features.

    `weight` is its learnable parameter, if any. Every method may overwrite its arguments except x.
    """

    num_features: int
    weight: Tensor | None

    def log_keys(self, k: Tensor) -> Tensor:
        """The exponents of keys, a new tensor."""

    def log_queries(self, q: Tensor) -> Tensor:
        """The exponents of queries up to a constant per query, a new tensor."""

    def exp(self, log: Tensor, x: Tensor) -> Tensor:
        """The features, from shifted exponents."""

    def grad_keys(self, grad: Tensor, features: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the keys and of their exponents, from that of their features."""

    def grad_queries(self, grad: Tensor, features: Tensor, q: Tensor, /) -> tuple[Tensor, Tensor]:
        """Gradients of the queries and of their exponents, from that of their features."""

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, from that of the exponents of keys or queries."""


def feature_attention(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap) -> Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider."""
    if is_traced() or is_empty(q):
        # the compiler does its own tiling and fusion; an empty batch has no tiles
        return _plain(q, k, v, phi)
    return _FeatureAttention.apply(q, k, v, phi.weight, phi)


def _plain(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap) -> Tensor:
    """`feature_attention` as a composition of differentiable functions."""
    dtype = wide_dtype(q)
    context, k_sum, shift = _sum_keys([(k.to(dtype), v.to(dtype))], phi)
    features = query_features(q.to(dtype), shift, phi)
    return (features @ context / (features @ k_sum)).to(v.dtype)


def _sum_keys(blocks: Iterable[Sequence[Tensor]], phi: FeatureMap) -> tuple[Tensor, Tensor, Tensor]:
    """sum_j phi(k_j) v_j^T (B, heads, m, d), sum_j phi(k_j) (B, heads, m, 1), their shift (B, heads, 1, m)."""
    before = None
    for k, v in blocks:
        log = phi.log_keys(k)
        shift = log.detach().amax(dim=2, keepdim=True)
        if before is not None:
            shift = torch.maximum(shift, before[2])
        features = phi.exp(log.sub_(shift), k).mT
        context, k_sum = features @ v, features.sum(dim=-1, keepdim=True)
        if before is not None:
            decay = (before[2] - shift).exp2().mT
            context, k_sum = context.addcmul_(before[0], decay), k_sum.addcmul_(before[1], decay)
        before = context, k_sum, shift
    return context, k_sum, shift


def _key_features(k: Tensor, shift: Tensor, phi: FeatureMap) -> Tensor:
    return phi.exp(phi.log_keys(k).sub_(shift), k)


def query_features(q: Tensor, shift: Tensor, phi: FeatureMap) -> Tensor:
    """Features of queries for keys whose exponents are shifted by `shift`; each query's largest is 1 or its gain."""
    log = phi.log_queries(q).add_(shift)
    return phi.exp(log.sub_(log.detach().amax(dim=-1, keepdim=True)), q)


def _blocks(q: Tensor, num_features: int) -> list[tuple[slice, list[slice]]]:
    """Slices of samples, and for each the slices of its tokens."""
    B, heads, N = q.shape[:3]
    if q.device.type != 'cpu':
        # a GPU is fastest with all tokens at once
        return [(slice(0, B), [slice(0, N)])]
    samples = max(1, CACHED // (heads * N * num_features))
    tokens = min(N, max(1, CACHED // (heads * num_features)))
    # blocks of about the same size
    tokens = -(-N // -(-N // tokens))
    token_slices = [slice(start, start + tokens) for start in range(0, N, tokens)]
    return [(slice(start, start + samples), token_slices) for start in range(0, B, samples)]


def _read(x: Tensor, samples: slice, tokens: slice, dtype: torch.dtype) -> Tensor:
    """A block of x (B, heads, N, d), contiguous, so that its features are, and no product has to copy them."""
    return x[samples, :, tokens].to(dtype).contiguous()


class _FeatureAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, phi: FeatureMap) -> Tensor:
        (B, heads, N, _), dtype = q.shape, wide_dtype(q)
        # (B, N, heads, d) in memory, so that merging the heads is free
        out = v.new_empty(B, N, heads, v.shape[-1]).transpose(1, 2)
        den = v.new_empty(B, heads, N, 1, dtype=dtype)
        sums = []
        for samples, token_slices in _blocks(q, phi.num_features):
            kv_blocks = ((_read(k, samples, tokens, dtype), v[samples, :, tokens].to(dtype)) for tokens in token_slices)
            context, k_sum, shift = _sum_keys(kv_blocks, phi)
            for tokens in token_slices:
                features = query_features(_read(q, samples, tokens, dtype), shift, phi)
                block_den = dot_tokens(features, k_sum.mT)
                out[samples, :, tokens] = (features @ context).div_(block_den)
                den[samples, :, tokens] = block_den
            sums.append((context, k_sum, shift))
        ctx.phi = phi
        ctx.save_for_backward(q, k, v, den, *(torch.cat(parts) for parts in zip(*sums)))
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, den, contexts, k_sums, shifts = ctx.saved_tensors
        phi, dtype = ctx.phi, den.dtype
        if torch.is_grad_enabled():
            plain, needed = partial(_plain, phi=phi), ctx.needs_input_grad
            return *differentiable_gradients(plain, (q, k, v), needed, do, (phi.weight,)), None
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dweight = torch.zeros_like(phi.weight) if ctx.needs_input_grad[3] else None
        with no_autocast(do):
            for samples, token_slices in _blocks(q, phi.num_features):
                context, k_sum, shift = contexts[samples], k_sums[samples], shifts[samples]
                dcontext, dk_sum = torch.zeros_like(context), torch.zeros_like(k_sum)
                for tokens in token_slices:
                    q_block = _read(q, samples, tokens, dtype)
                    features = query_features(q_block, shift, phi)
                    dnum = _read(do, samples, tokens, dtype) / den[samples, :, tokens]
                    dcontext += features.mT @ dnum
                    dfeatures = dnum @ context.mT
                    # -do . out / den, without a stored out
                    dden = (features * dfeatures).sum(dim=-1, keepdim=True).div_(den[samples, :, tokens]).neg_()
                    dk_sum += (features * dden).sum(dim=2, keepdim=True).mT
                    dfeatures.addcmul_(dden, k_sum.mT)
                    dq[samples, :, tokens], dlog = phi.grad_queries(dfeatures, features, q_block)
                    if dweight is not None:
                        dweight += phi.grad_weight(dlog, q_block)
                for tokens in token_slices:
                    k_block = _read(k, samples, tokens, dtype)
                    features = _key_features(k_block, shift, phi)
                    dv[samples, :, tokens] = features @ dcontext
                    dfeatures = (v[samples, :, tokens].to(dtype) @ dcontext.mT).add_(dk_sum.mT)
                    dk[samples, :, tokens], dlog = phi.grad_keys(dfeatures, features, k_block)
                    if dweight is not None:
                        dweight += phi.grad_weight(dlog, k_block)
        return dq, dk, dv, dweight, None
