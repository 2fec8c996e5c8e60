"""Sums over tokens that decay along the raster and back, by factors of each token and channel of the keys.

    y_i = scale * sum_j (q_i * D_ij) . k_j v_j,  D_ij = product of a_t over the tokens t from j to i, without j,
    a_t = sigmoid(logit_t)^(1 / 16)

with an a for j <= i and another for j >= i; the token itself counts once. Tokens are processed in chunks of 32: scores
within a chunk, and a state that passes from chunk to chunk. A few heads at a time are processed in place, so that they
stay in a CPU cache. D is a product of two factors, from j to the middle of a chunk and from there to i. If they are out
of range, as with a mean logit of -30 in half a chunk, chunks of 16 are tried; at last, scores are computed in blocks of
16 tokens with a lower bound of a, then between blocks. Whether they are is read from the device, which a CUDA graph
cannot do, so in a captured graph and in the compiled form there are blocks only.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ._numerics import CACHED, is_traced, no_autocast, wide_dtype
from ._recompute import differentiable_gradients, heads_at_once, slice_heads

__all__ = ['TEMPERATURE', 'gated_scan']

# the power that brings the factors near 1
TEMPERATURE = 16
# tokens between which scores are computed, in the order in which they are tried
_CHUNKS = (32, 16)
# with logits of any size, scores are computed in blocks of this many tokens
_BLOCK = 16
# and pairs of blocks are merged this many times
_MERGES = 2
# smaller logarithms of a count as this one, so that the product of half a block is above 0 in float32
_LEAST = -10.0


def gated_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, decay_back: Tensor, scale: float) -> Tensor:
    """q, k, v and the logits of both directions (B, heads, N, d) -> (B, heads, N, d), in float32 or wider."""
    with no_autocast(q):
        # the compiler does its own fusion
        if is_traced() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return _plain(q, k, v, decay, decay_back, scale)
        return _GatedScan.apply(q, k, v, decay, decay_back, scale)


def _plain(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, decay_back: Tensor, scale: float) -> Tensor:
    """`gated_scan` as a composition of differentiable functions, of which autograd keeps every result."""
    q, k, v, decay, decay_back = (x.to(wide_dtype(q)) for x in (q, k, v, decay, decay_back))
    q = scale * q
    # the result of logsigmoid is contiguous, which the compiler only expects of a contiguous argument
    log_a, log_a_back = (F.logsigmoid(x.contiguous()) / TEMPERATURE for x in (decay, decay_back))
    forward = _scan(q, k, v, log_a)
    backward = _scan(*(x.flip(2) for x in (q, k, v, log_a_back))).flip(2)
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
        # (B, N, heads, d) in memory, so that merging the heads is free
        out = q.new_empty(q.transpose(1, 2).shape, dtype=wide_dtype(q)).transpose(1, 2)
        kept: list[Tensor | None] = []
        for part in _parts(q):
            both = _decays_in_range(decay[part], decay_back[part])
            if any(ctx.needs_input_grad):
                kept += [*both[0], *both[1]] if both else [None] * 4
            if not both:
                out[part] = _plain(q[part], k[part], v[part], decay[part], decay_back[part], scale)
                continue
            q_part, k_part, v_part = (_to_chunks(x[part], both[0].chunk) for x in (q, k, v))
            y, scores = torch.zeros_like(v_part), []
            for decays, reverse in zip(both, (False, True)):
                scores.append(_read(q_part, k_part, v_part, decays, y, reverse))
            # both directions at once
            torch.baddbmm(y, scores[0].add_(scores[1]), v_part, out=y)
            torch.mul(_to_tokens(y, out[part]), scale, out=out[part])
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, decay, decay_back, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, decay_back, *kept = ctx.saved_tensors
        inputs = q, k, v, decay, decay_back
        if torch.is_grad_enabled():
            plain = partial(_plain, scale=ctx.scale)
            return *differentiable_gradients(plain, inputs, ctx.needs_input_grad, dy), None
        grads = [torch.empty_like(x) for x in inputs]
        with no_autocast(dy):
            for i, part in enumerate(_parts(q)):
                parts, grad_parts = ([x[part] for x in xs] for xs in (inputs, grads))
                decays = kept[4 * i : 4 * i + 4]
                if decays[0] is None:
                    _grad_plain(parts, dy[part], ctx.scale, grad_parts)
                else:
                    _grad_part(parts, (_Decays(*decays[:2]), _Decays(*decays[2:])), dy[part], ctx.scale, grad_parts)
        return *grads, None


def _grad_plain(inputs: list[Tensor], dy: Tensor, scale: float, grads: list[Tensor]) -> None:
    """Write the gradients of `_plain`."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        q, k, v, decay, decay_back = inputs
        y = _plain(q, k, v, decay, decay_back, scale)
    for x, grad in zip(torch.autograd.grad(y, inputs, dy), grads):
        grad.copy_(x)


def _grad_part(
    inputs: list[Tensor], both: tuple['_Decays', '_Decays'], dy: Tensor, scale: float, grads: list[Tensor]
) -> None:
    """Write the gradients of the scan in chunks."""
    *_, logit, logit_back = inputs
    q, k, v, dy, logit, logit_back = (_to_chunks(x, both[0].chunk) for x in (*inputs[:3], dy, logit, logit_back))
    dy *= scale
    dv, dscores = torch.zeros_like(v), torch.bmm(dy, v.mT)
    scores, dq_and_dk = [], []
    for decays, logits, grad, reverse in zip(both, (logit, logit_back), grads[3:], (False, True)):
        own, dq, dk, dlog = _grad_read(q, k, v, decays, dy, dscores, dv, reverse)
        scores.append(own)
        dq_and_dk.append((dq, dk))
        slope = logits.neg_().sigmoid_()
        torch.mul(_to_tokens(dlog, grad), _to_tokens(slope, grad), out=grad)
    for grad, pair in zip(grads, zip(*dq_and_dk)):
        torch.add(*(_to_tokens(x, grad) for x in pair), out=grad)
    # both directions at once
    torch.baddbmm(dv, scores[0].add_(scores[1]).mT, dy, out=dv)
    grads[2].copy_(_to_tokens(dv, grads[2]))


def _parts(q: Tensor) -> list[tuple[slice, slice]]:
    """Slices of samples and of heads."""
    B, heads, N, d = q.shape
    return slice_heads(B, heads, heads_at_once(q, 2 * CACHED, N * d))


def _to_chunks(x: Tensor, chunk: int) -> Tensor:
    """(B, heads, N, d) -> a copy in chunks, the last one padded with zeros, (chunks, chunk, d)."""
    B, heads, N, d = x.shape
    chunks = x.new_empty(B, heads, -(-N // chunk) * chunk, d, dtype=wide_dtype(x))
    chunks[:, :, :N] = x
    if chunks.shape[2] > N:
        chunks[:, :, N:] = 0
    return chunks.view(-1, chunk, d)


def _to_tokens(chunks: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_to_chunks`, a view in the shape of `like`."""
    B, heads, N, d = like.shape
    return chunks.view(B, heads, -1, d)[:, :, :N]


class _Decays(NamedTuple):
    """Products of a from the middle of a chunk to its tokens, and to the middle of the next chunk.

    Of shapes (chunks, chunk, d) and (heads of all samples, chunks of a head, d); 0 after the last chunk of a head.
    """

    to_token: Tensor
    to_next: Tensor

    @classmethod
    def of(cls, logit: Tensor, chunk: int, reverse: bool) -> '_Decays':
        """From the logits (B, heads, N, d); `reverse` exchanges start and end."""
        B, heads, _, d = logit.shape
        log = _to_chunks(logit, chunk).sigmoid_().log_()
        sums = _sum_matrix(log, reverse)
        # from the middle, which is the first token of the second half
        sums = torch.bmm((sums - sums[chunk // 2 - reverse]).expand(len(log), -1, -1), log)
        first, last = (-1, 0) if reverse else (0, -1)
        to_end, to_middle = (
            x.view(B * heads, -1, d) for x in (sums[:, last], log[:, first] / TEMPERATURE - sums[:, first])
        )
        to_next = torch.zeros_like(to_end)
        if reverse:
            to_next[:, 1:] = (to_end[:, 1:] + to_middle[:, :-1]).exp_()
        else:
            to_next[:, :-1] = (to_end[:, :-1] + to_middle[:, 1:]).exp_()
        return cls(sums.exp_(), to_next)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.to_token.shape[1]

    def are_in_range(self) -> bool:
        """Return False for numbers whose products are too small or too large for their dtype, or not numbers."""
        # the meta device has no values
        if self.to_token.is_meta:
            return True
        ends, limit = self.to_token[:, :: self.chunk - 1], torch.finfo(self.to_token.dtype).max ** (1 / 3)
        return bool((ends.amin() > 1 / limit) & (ends.amax() < limit))


def _decays_in_range(logit: Tensor, logit_back: Tensor) -> tuple[_Decays, _Decays] | None:
    """Of the largest chunks in which products of both directions are in range; None if there are none."""
    for chunk in _CHUNKS:
        # padding costs as much as tokens
        if chunk > _CHUNKS[-1] and chunk >= 2 * logit.shape[2]:
            continue
        both = _Decays.of(logit, chunk, False), _Decays.of(logit_back, chunk, True)
        if both[0].are_in_range() and both[1].are_in_range():
            return both
    return None


def _sum_matrix(like: Tensor, reverse: bool) -> Tensor:
    """The matrix that sums log a, from log sigmoid, up to each token of a chunk, or with `reverse` from it on."""
    chunk = like.shape[1]
    factors = like.new_full((chunk, chunk), 1 / TEMPERATURE)
    return factors.triu_() if reverse else factors.tril_()


def _mask(like: Tensor, reverse: bool) -> Tensor:
    """1 for scores of tokens before or, with `reverse`, of tokens after and the token itself, 0 for others."""
    ones = like.new_ones(like.shape[1], like.shape[1])
    # products with it are faster than these functions of all scores
    return ones.triu_() if reverse else ones.tril_(-1)


def _sum_states(k: Tensor, v: Tensor, to_next: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """S <- k^T v + to_next * S after each chunk, (chunks, d, d), and the place of the state before each chunk."""
    d = k.shape[2]
    both = k.new_empty(len(k) + 1, d, d)
    # the state after a chunk has the place of the one before the next
    after, before = (both[:-1], both[1:]) if reverse else (both[1:], both[:-1])
    torch.bmm(k.mT, v, out=after)
    states, factors = after.view(*to_next.shape, d).unbind(1), to_next.unsqueeze(3).unbind(1)
    if reverse:
        states, factors = states[::-1], factors[::-1]
    for factor, state, next_state in zip(factors, states, states[1:]):
        next_state.addcmul_(factor, state)
    return after, before


def _pass_on_(after: Tensor, before: Tensor, to_next: Tensor, reverse: bool) -> Tensor:
    """From the results of `_sum_states`, which are overwritten, the state before each chunk."""
    after *= to_next.view(*after.shape[:2], 1)
    # not by a factor of 0, which does not remove what is not finite
    after.view(*to_next.shape, -1)[:, 0 if reverse else -1] = 0
    before[-1 if reverse else 0] = 0
    return before


def _read(q: Tensor, k: Tensor, v: Tensor, decays: _Decays, out: Tensor, reverse: bool) -> Tensor:
    """Add what a direction reads from other chunks to `out`, and return its scores within chunks."""
    q, k = q * decays.to_token, k / decays.to_token
    states = _pass_on_(*_sum_states(k, v, decays.to_next, reverse), decays.to_next, reverse)
    torch.baddbmm(out, q, states, out=out)
    return torch.bmm(q, k.mT).mul_(_mask(q, reverse))


def _grad_read(
    q: Tensor, k: Tensor, v: Tensor, decays: _Decays, dy: Tensor, dscores: Tensor, dv: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores within chunks, and gradients of the queries, of the keys and of log sigmoid.

    `dscores` are those of all scores. Adds the gradient of the values in other chunks to `dv`.
    """
    to_token, to_next = decays
    q, k = q * to_token, k / to_token
    mask, step = _mask(q, reverse), -1 if reverse else 1
    scores, dscores = torch.bmm(q, k.mT).mul_(mask), dscores * mask
    states = _pass_on_(*_sum_states(k, v, to_next, reverse), to_next, reverse)
    # the same sums in the other direction
    from_next = to_next.flatten(0, 1).roll(step, 0).view_as(to_next)
    dsums = _sum_states(q, dy, from_next, not reverse)
    # of the product of a that leads to a chunk, then of the one to the next
    across = (states * dsums[0]).sum(dim=2).div_(TEMPERATURE)
    # the first chunk of a head has none before it
    across.view(to_next.shape)[:, -1 if reverse else 0] = 0
    across = across.roll(-step, 0)
    dstates = _pass_on_(*dsums, from_next, not reverse)
    dq, dk = torch.bmm(dscores, k), torch.bmm(dscores.mT, q)
    torch.baddbmm(dq, dy, states.mT, out=dq)
    torch.baddbmm(dk, v, dstates.mT, out=dk)
    torch.baddbmm(dv, k, dstates, out=dv)
    # a sum of log a is added to the exponent of a query and subtracted from that of a key
    dsum = q.mul_(dq).addcmul_(k, dk, value=-1)
    dlog = torch.baddbmm(across.unsqueeze(1), _sum_matrix(q, not reverse).expand(len(q), -1, -1), dsum, out=k)
    return scores, dq.mul_(to_token), dk.div_(to_token), dlog
