"""Sums over tokens that decay along the raster and back, by factors of each token and channel of the keys.

    y_i = scale * sum_j (q_i * D_ij) . k_j v_j,  D_ij = product of a_t over the tokens t from j to i, without j,
    a_t = sigmoid(logit_t)^(1 / 16)

with an a for j <= i and another for j >= i; the token itself counts once. Scores are computed in blocks of 16 tokens,
then between the two of a pair of blocks, up to chunks of 64, and a state passes from chunk to chunk. A few heads at a
time are processed in place, so that they stay in a CPU cache. The backward pass computes all but its arguments again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ._numerics import CACHED, no_autocast

__all__ = ['TEMPERATURE', 'gated_scan']

# the power that brings the factors near 1
TEMPERATURE = 16
# tokens whose scores are computed at once
_BLOCK = 16
# pairs of blocks are merged this many times, into chunks of 64 tokens
_MERGES = 2
# smaller logarithms of a count as this one, so that the product of half a block is above 0 in float32
_LEAST = -10.0


def gated_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, decay_back: Tensor, scale: float) -> Tensor:
    """q, k, v and the logits of both directions (B, heads, N, d) -> (B, heads, N, d), in float32 or wider."""
    with no_autocast(q):
        # the compiler does its own fusion
        if torch.compiler.is_compiling() or q.shape[2] < _BLOCK:
            return _plain(q, k, v, decay, decay_back, scale)
        return _GatedScan.apply(q, k, v, decay, decay_back, scale)


def _plain(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, decay_back: Tensor, scale: float) -> Tensor:
    """`gated_scan` as a composition of differentiable functions, of which autograd keeps every result."""
    q, k, v, decay, decay_back = (x.to(_wide(q)) for x in (q, k, v, decay, decay_back))
    q = scale * q
    forward = _scan(q, k, v, F.logsigmoid(decay) / TEMPERATURE)
    q_back, k_back, v_back = (x.flip(2) for x in (q, k, v))
    backward = _scan(q_back, k_back, v_back, F.logsigmoid(decay_back).flip(2) / TEMPERATURE).flip(2)
    itself = (q * k).sum(dim=-1, keepdim=True) * v
    return forward + backward - itself


def _scan(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor) -> Tensor:
    """sum_{j <= i} (q_i * product of a over j < t <= i) . k_j v_j, chunk by chunk with a carried state."""
    N = q.shape[2]
    size = min(_BLOCK, N)
    num_merges = _MERGES if size < N else 0
    padding = (0, 0, 0, -N % (size << num_merges))
    q, k, v, log_a = (F.pad(x, padding).unflatten(2, (-1, size)) for x in (q, k, v, log_a))
    # from the start of the block to a token, and from there to its end
    before = log_a.clamp(min=_LEAST).cumsum(dim=3)  # (B, heads, blocks, size, d)
    total = before[:, :, :, -1:]
    # the middle cancels, and keeps both exponentials in range
    middle = before[:, :, :, size // 2, None].detach()
    q, k = q * (before - middle).exp(), k * (middle - before).exp()
    scores = q @ k.mT
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    out = scores.masked_fill(later, 0) @ v
    # queries decayed from the start of their block, keys to the end of theirs: no factor is above 1
    q, k, kept = q * middle.exp(), k * (total - middle).exp(), total.exp()
    for _ in range(num_merges):
        (q1, q2), (k1, k2), (out1, out2), (kept1, kept2), (v1, _) = (
            x.unflatten(2, (-1, 2)).unbind(3) for x in (q, k, out, kept, v)
        )
        # the second block of a pair reads the first
        out = torch.cat([out1, out2 + q2 @ k1.mT @ v1], dim=3)
        q, k, kept = torch.cat([q1, q2 * kept1], dim=3), torch.cat([k1 * kept2, k2], dim=3), kept1 * kept2
        v = v.unflatten(2, (-1, 2)).flatten(3, 4)
    written, kept = k.mT @ v, kept.mT  # (B, heads, chunks, d, d), (B, heads, chunks, d, 1)
    states = [torch.zeros_like(written[:, :, 0])]
    for kept_of_chunk, written_of_chunk in zip(kept.unbind(2)[:-1], written.unbind(2)[:-1]):
        states.append(kept_of_chunk * states[-1] + written_of_chunk)
    return (out + q @ torch.stack(states, dim=2)).flatten(2, 3)[:, :, :N]


class _GatedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, decay_back: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, decay, decay_back)
        # (B, N, heads, d) in memory, so that merging the heads is free
        out = torch.empty_like(q.transpose(1, 2), dtype=_wide(q), memory_format=torch.contiguous_format).transpose(1, 2)
        for part in _parts(q):
            q_part, k_part, v_part, *logits = (_to_blocks(x[part]) for x in (q, k, v, decay, decay_back))
            q_part *= scale
            y = torch.zeros_like(v_part)
            for logit, reverse in zip(logits, (False, True)):
                _read(q_part, k_part, v_part, _Decays.of(logit, reverse), y, q.shape[2], reverse)
            _from_blocks(y, out[part])
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, decay_back = inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            # for second derivatives
            wanted = [x for x, is_needed in zip(inputs, ctx.needs_input_grad) if is_needed]
            of_wanted = iter(
                torch.autograd.grad(_plain(q, k, v, decay, decay_back, ctx.scale), wanted, dy, create_graph=True)
            )
            return *(next(of_wanted) if is_needed else None for is_needed in ctx.needs_input_grad[:5]), None
        grads = [torch.empty_like(x) for x in inputs]
        with no_autocast(dy):
            for part in _parts(q):
                q_part, k_part, v_part, *logits, dy_part = (_to_blocks(x[part]) for x in (*inputs, dy))
                q_part *= ctx.scale
                dq, dk, dv = (torch.zeros_like(x) for x in (q_part, k_part, v_part))
                dscores = torch.bmm(dy_part, v_part.mT)
                for logit, grad, reverse in zip(logits, grads[3:], (False, True)):
                    decays = _Decays.of(logit, reverse)
                    one = _grad_read(q_part, k_part, v_part, decays, dy_part, dscores, dv, q.shape[2], reverse)
                    dq += one[0]
                    dk += one[1]
                    _from_blocks(_grad_logits(one[2], logit), grad[part])
                for x, grad in zip((dq.mul_(ctx.scale), dk, dv), grads):
                    _from_blocks(x, grad[part])
        return *grads, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _num_merges(N: int) -> int:
    return _MERGES if N > _BLOCK else 0


def _num_chunks(N: int) -> int:
    return -(-N // (_BLOCK << _num_merges(N)))


def _parts(q: Tensor) -> list[tuple[slice, slice]]:
    """Slices of samples and of heads."""
    B, heads, N, d = q.shape
    # a GPU is fastest with all heads at once
    size = max(1, 2 * CACHED // (N * d)) if q.device.type == 'cpu' else B * heads
    samples, heads_at_once = max(1, size // heads), min(size, heads)
    return [
        (slice(i, i + samples), slice(j, j + heads_at_once))
        for i in range(0, B, samples)
        for j in range(0, heads, heads_at_once)
    ]


def _to_blocks(x: Tensor) -> Tensor:
    """(B, heads, N, d) -> the blocks of all chunks, the last one padded with zeros, (blocks, 16, d)."""
    B, heads, N, d = x.shape
    blocks = x.new_empty(B, heads, _num_chunks(N) * (_BLOCK << _num_merges(N)), d, dtype=_wide(x))
    blocks[:, :, :N] = x
    if blocks.shape[2] > N:
        blocks[:, :, N:] = 0
    return blocks.view(-1, _BLOCK, d)


def _from_blocks(blocks: Tensor, out: Tensor) -> None:
    """The inverse of `_to_blocks`, into `out`."""
    B, heads, N, d = out.shape
    out.copy_(blocks.view(B, heads, -1, d)[:, :, :N])


class _Decays(NamedTuple):
    """Products of a in a block: middle to token and token to middle, start to middle, middle to end, start to end."""

    to_token: Tensor
    from_token: Tensor
    to_middle: Tensor
    from_middle: Tensor
    whole: Tensor

    @classmethod
    def of(cls, logit: Tensor, reverse: bool) -> '_Decays':
        """From the logits (blocks, 16, d); `reverse` exchanges start and end."""
        log = F.logsigmoid(logit).clamp_(min=TEMPERATURE * _LEAST)
        _cumsum_(log, reverse)
        half = _BLOCK // 2
        middle = log[:, half - 1 if reverse else half, None] / TEMPERATURE
        total = log[:, 0 if reverse else -1, None] / TEMPERATURE
        # the middle cancels, and keeps both products in range
        to_token = log.div_(TEMPERATURE).sub_(middle).exp_()
        return cls(to_token, to_token.reciprocal(), middle.exp(), (total - middle).exp_(), total.exp())


def _cumsum_(x: Tensor, reverse: bool) -> None:
    """Sums over the first or, with `reverse`, the last tokens of (blocks, size, d), in place."""
    _, size, d = x.shape
    step = 1
    while step < size:
        # the second half of a piece lacks the sum of the first
        first, second = x.view(-1, 2, step, d).unbind(1)
        if reverse:
            first += second[:, :1]
        else:
            second += first[:, -1:]
        step *= 2


def _pairs(x: Tensor, reverse: bool) -> tuple[Tensor, ...]:
    """The blocks of each pair, in the order of the scan."""
    pairs = x.view(-1, 2, *x.shape[1:]).unbind(1)
    return pairs[::-1] if reverse else pairs


def _join(x: Tensor) -> Tensor:
    """The blocks of each pair as one block."""
    return x.view(-1, 2 * x.shape[1], x.shape[2])


def _mask_(scores: Tensor, reverse: bool) -> Tensor:
    """Keep the scores of tokens before or, with `reverse`, of tokens after and the token itself, in place."""
    return scores.triu_() if reverse else scores.tril_(-1)


def _states(k: Tensor, v: Tensor, kept: Tensor, num_chunks: int, reverse: bool) -> Tensor:
    """The state before each chunk of S <- kept * S + k^T v, (chunks, d, d)."""
    states = k.new_empty(len(k) + 1, k.shape[2], v.shape[2])
    # each chunk is written to the place of the next
    states, written = (states[1:], states[:-1]) if reverse else (states[:-1], states[1:])
    torch.bmm(k.mT, v, out=written)
    by_chunk = states.view(-1, num_chunks, *states.shape[1:]).unbind(1)
    kept_by_chunk = kept.view(-1, num_chunks, kept.shape[2], 1).unbind(1)
    if reverse:
        by_chunk, kept_by_chunk = by_chunk[::-1], kept_by_chunk[::-1]
    by_chunk[0].zero_()
    for before, kept_of_chunk, state in zip(by_chunk, kept_by_chunk, by_chunk[1:]):
        state.addcmul_(kept_of_chunk, before)
    return states


def _read(q: Tensor, k: Tensor, v: Tensor, decays: _Decays, out: Tensor, N: int, reverse: bool) -> None:
    """Add the sums over the tokens before to `out`; with `reverse` those over the tokens after and the token itself.

    Overwrites `decays`.
    """
    q, k, kept = decays.to_token.mul_(q), decays.from_token.mul_(k), decays.whole
    torch.baddbmm(out, _mask_(torch.bmm(q, k.mT), reverse), v, out=out)
    # queries decayed from the start of their block, keys to the end of theirs: no factor is above 1
    q *= decays.to_middle
    k *= decays.from_middle
    for _ in range(_num_merges(N)):
        (_, q2), (k1, _), (v1, _), (_, out2), (kept1, kept2) = (_pairs(x, reverse) for x in (q, k, v, out, kept))
        # the second block of a pair reads the first
        out2 += torch.bmm(torch.bmm(q2, k1.mT), v1)
        q2 *= kept1
        k1 *= kept2
        kept = kept1 * kept2
        q, k, v, out = (_join(x) for x in (q, k, v, out))
    torch.baddbmm(out, q, _states(k, v, kept, _num_chunks(N), reverse), out=out)


def _grad_read(
    q: Tensor, k: Tensor, v: Tensor, decays: _Decays, dy: Tensor, dscores: Tensor, dv: Tensor, N: int, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, of the keys and of the sums of log a; adds that of the values to `dv`.

    `dscores` are those of all pairs of tokens in a block.
    """
    scaled_q, scaled_k, kept = q * decays.to_token, k * decays.from_token, decays.whole
    scores, dscores = (_mask_(x, reverse) for x in (torch.bmm(scaled_q, scaled_k.mT), dscores.clone()))
    torch.baddbmm(dv, scores.mT, dy, out=dv)
    dq_block, dk_block = torch.bmm(dscores, scaled_k), torch.bmm(dscores.mT, scaled_q)
    scaled_q *= decays.to_middle
    scaled_k *= decays.from_middle
    of_pairs = []
    for _ in range(_num_merges(N)):
        (_, q2), (k1, _), (v1, _), (_, dy2), (dv1, _), (kept1, kept2) = (
            _pairs(x, reverse) for x in (scaled_q, scaled_k, v, dy, dv, kept)
        )
        scores, dscores = torch.bmm(q2, k1.mT), torch.bmm(dy2, v1.mT)
        dv1 += torch.bmm(scores.mT, dy2)
        of_pairs.append((torch.bmm(dscores, k1), torch.bmm(dscores.mT, q2), kept1, kept2))
        q2 *= kept1
        k1 *= kept2
        kept = kept1 * kept2
        scaled_q, scaled_k, v, dy, dv = (_join(x) for x in (scaled_q, scaled_k, v, dy, dv))
    states = _states(scaled_k, v, kept, _num_chunks(N), reverse)
    dstates = _states(scaled_q, dy, kept, _num_chunks(N), not reverse)
    dq, dk = torch.bmm(dy, states.mT), torch.bmm(v, dstates.mT)
    torch.baddbmm(dv, scaled_k, dstates, out=dv)
    for dq2_pair, dk1_pair, kept1, kept2 in reversed(of_pairs):
        dq, dk = (x.view(-1, x.shape[1] // 2, x.shape[2]) for x in (dq, dk))
        (_, dq2), (dk1, _) = _pairs(dq, reverse), _pairs(dk, reverse)
        torch.addcmul(dq2_pair, dq2, kept1, out=dq2)
        torch.addcmul(dk1_pair, dk1, kept2, out=dk1)
    dq = torch.addcmul(dq_block, dq, decays.to_middle, out=dq).mul_(decays.to_token)
    dk = torch.addcmul(dk_block, dk, decays.from_middle, out=dk).mul_(decays.from_token)
    # a sum of log a is added to the exponent of a query and subtracted from that of a key
    dsums = (q * dq).addcmul_(k, dk, value=-1).view(len(states), -1, q.shape[2])
    _cumsum_(dsums, not reverse)
    dsums += _across_chunks(states, dstates, _num_chunks(N), reverse)
    return dq, dk, dsums.view_as(q)


def _across_chunks(states: Tensor, dstates: Tensor, num_chunks: int, reverse: bool) -> Tensor:
    """The gradient of a factor on the state after each chunk, (chunks, 1, d)."""
    states, dstates = (x.view(-1, num_chunks, *x.shape[1:]) for x in (states, dstates))
    # the state before a chunk is the one after its neighbour
    if reverse:
        grads = F.pad((states[:, :-1] * dstates[:, 1:]).sum(dim=-1), (0, 0, 1, 0))
    else:
        grads = F.pad((states[:, 1:] * dstates[:, :-1]).sum(dim=-1), (0, 0, 0, 1))
    return grads.flatten(0, 1).unsqueeze(1)


def _grad_logits(grad: Tensor, logit: Tensor) -> Tensor:
    """From the gradient of log a; overwrites both arguments."""
    is_least = logit < TEMPERATURE * _LEAST
    return grad.mul_(logit.neg_().sigmoid_()).div_(TEMPERATURE).masked_fill_(is_least, 0)
