"""Flow attention: linear attention in which values compete for, and outputs are gated by, conserved flow.

    out_i = sigmoid(I^_i) * (phi(q_i) / I_i) . sum_j phi(k_j) (N softmax_j(O^_j) v_j)^T,  phi = sigmoid
    I_i  = phi(q_i) . sum_j phi(k_j)            O_j  = phi(k_j) . sum_i phi(q_i)
    I^_i = phi(q_i) . sum_j phi(k_j) / O_j      O^_j = phi(k_j) . sum_i phi(q_i) / I_i

I_i is the flow into output i and O_j the flow out of value j; those with a hat are the same once the opposite side is
normalized to 1. Linear in the number of tokens: O(N dim head_dim). There is no scale of the scores. The sums do not
depend on the order of tokens, so the formula applies to a grid unchanged, and prefix tokens are ordinary tokens. As in
the official code, O^ is clamped to [-1, 1], which limits about half of the values, as its mean is 1, and 1e-6 is added
to each factor of a flow and to the flow; `clamp=False` leaves out the clamp, which the paper does not have. Flowformer,
https://arxiv.org/abs/2202.06258
"""

from functools import partial
from typing import Any

import torch

from ._kernel_mixer import KernelMixer
from ._numerics import dot_tokens, sum_products, wide_dtype
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer

__all__ = ['Flowformer', 'flow_attention', 'flow_naive']

_EPS = 1e-6


def flow_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, clamp: bool = True) -> torch.Tensor:
    """The N x N attention matrix of the flows; arguments as `flow_attention`."""
    q, k = 1 / (1 + (-q).exp()), 1 / (1 + (-k).exp())
    incoming = ((q + _EPS) * (k.sum(dim=2, keepdim=True) + _EPS)).sum(dim=-1, keepdim=True) + _EPS
    outgoing = ((k + _EPS) * (q.sum(dim=2, keepdim=True) + _EPS)).sum(dim=-1, keepdim=True) + _EPS
    sinks = ((q + _EPS) * ((k / outgoing).sum(dim=2, keepdim=True) + _EPS)).sum(dim=-1, keepdim=True) + _EPS
    sources = ((k + _EPS) * ((q / incoming).sum(dim=2, keepdim=True) + _EPS)).sum(dim=-1, keepdim=True) + _EPS
    share = (sources.clamp(-1, 1) if clamp else sources).exp()
    competition = share / share.sum(dim=2, keepdim=True) * k.shape[2]  # (B, heads, M, 1)
    allocation = 1 / (1 + (-sinks * q.shape[2] / k.shape[2]).exp())
    attn = allocation * (q / incoming @ k.mT) * competition.mT
    return attn @ v


def flow_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, clamp: bool = True) -> torch.Tensor:
    """q (B, heads, N, d), k and v (B, heads, M, d) -> (B, heads, N, d), in float32 or wider."""
    # features, weighted values and the output before it is weighted
    num_elements = 2 * (q.shape[2] + k.shape[2]) * q.shape[3]
    return recompute_heads(partial(_attend, clamp=clamp), (q, k, v), num_elements)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, clamp: bool) -> torch.Tensor:
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k = q.to(dtype).sigmoid(), k.to(dtype).sigmoid()
        incoming, outgoing = _flow(q, k.sum(dim=2)), _flow(k, q.sum(dim=2))
        sinks = _flow(q, (k * outgoing.reciprocal()).sum(dim=2))
        sources = _flow(k, (q * incoming.reciprocal()).sum(dim=2))
        sources = sources.clamp(-1, 1) if clamp else sources
        N, M = q.shape[2], k.shape[2]
        context = sum_products(k, v.to(dtype) * (M * sources.softmax(dim=2)))  # (B, heads, d, d)
        return (q @ context * ((sinks * (N / M)).sigmoid() / incoming)).to(v.dtype)


def _flow(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The flow of each token (B, heads, N, 1), for x (B, heads, N, d) and sums (B, heads, d) over the other side."""
    total = (total + _EPS).unsqueeze(2)
    return dot_tokens(x, total) + (_EPS * total.sum(dim=-1, keepdim=True) + _EPS)


@register_mixer('flowformer')
class Flowformer(KernelMixer):
    """Flow attention with sigmoid features; `clamp` limits O^ to [-1, 1]."""

    op = staticmethod(flow_attention)
    op_naive = staticmethod(flow_naive)

    def __init__(self, dim: int, num_heads: int, *, clamp: bool = True, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.clamp = clamp

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.clamp)
