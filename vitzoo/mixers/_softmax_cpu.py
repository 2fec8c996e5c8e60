"""Softmax attention in bfloat16 on a CPU without gradients, some samples, heads and queries at a time.

PyTorch's fused kernel takes about twice as long. Scores are rounded before the softmax, large ones by more. So the
mean key is subtracted from all keys: this shifts all scores of a query equally, which does not change the softmax.
"""

from collections.abc import Iterator

import torch

from ._numerics import CACHED, is_traced, needs_gradient, wide_dtype

__all__ = ['is_faster_than_fused', 'scaled_scores', 'softmax_attention_cpu']

_HALF = (torch.float16, torch.bfloat16)
# scores that are computed at a time
_NUM_SCORES = 4 * CACHED


def is_faster_than_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """True where `softmax_attention_cpu` can compute attention without dropout and is faster than PyTorch's kernel.

    Products in float16 may take ten times as long on a CPU.
    """
    if q.device.type != 'cpu' or q.dtype != torch.bfloat16 or is_traced():
        return False
    return not needs_gradient(q, k, v, bias)


def softmax_attention_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Queries (B, heads, N, d), keys and values (B, heads, M, d) -> (B, heads, N, d).

    The bias is (1 or B, 1 or heads, 1 or N, M).
    """
    B, heads, N, M = *q.shape[:3], k.shape[2]
    # (B, N, heads, d) in memory, so that merging the heads is free
    out = v.new_empty(B, N, heads, v.shape[-1]).transpose(1, 2)
    k = _center_keys(k, scale)
    bias = None if bias is None else bias.expand(B, heads, N, M)
    dtype = wide_dtype(q)
    for block in _blocks(B, heads, N, M):
        scores = q[block] @ k[block[:2]].mT
        if bias is not None:
            scores = scores.to(dtype) + bias[block]
        attn = scores.softmax(dim=-1, dtype=dtype)
        out[block] = attn.to(v.dtype) @ v[block[:2]]
    return out


def scaled_scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Scores (B, heads, N, M) of the queries, in half precision minus a constant for each query."""
    if k.dtype in _HALF:
        return q @ _center_keys(k, scale).mT
    # the copy of the shorter sequence is smaller
    return (scale * q) @ k.mT if q.shape[2] <= k.shape[2] else q @ (scale * k).mT


def _center_keys(k: torch.Tensor, scale: float) -> torch.Tensor:
    """Keys (B, heads, M, d) less their mean, times `scale`, rounded once."""
    wide = k.to(wide_dtype(k))
    # gradients of scores sum to zero over the keys, so the mean has none
    return ((wide - wide.detach().mean(dim=2, keepdim=True)) * scale).to(k.dtype)


def _blocks(B: int, heads: int, N: int, M: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of the samples, heads and queries: whole samples if they are small enough, else whole heads."""
    step_n = max(1, _NUM_SCORES // max(1, M))
    step_h = max(1, step_n // max(1, N))
    step_b = max(1, step_h // max(1, heads))
    for b in range(0, B, step_b):
        for h in range(0, heads, step_h):
            for n in range(0, N, step_n):
                yield slice(b, b + step_b), slice(h, h + step_h), slice(n, n + step_n)
