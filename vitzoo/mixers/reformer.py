"""Reformer: attention within buckets of a locality-sensitive hash, with shared queries and keys.

    k_i = sqrt(d) q_i / |q_i|,   bucket_r(i) = argmax [x_i R_r ; -x_i R_r]  with x = q and random R_r (d, b/2)
    P_r(i) = {j : bucket_r(j) = bucket_r(i), j sorted into the chunk of i or the one before}
    out_i = sum_r exp(z_r(i) - logsumexp_r z_r(i)) sum_{j in P_r(i)} exp(s_ij - z_r(i)) v_j,  z_r(i) = logsumexp_j s_ij
    s_ij = scale * q_i . k_j - log #{r : j in P_r(i)},  s_ii = scale * q_i . k_i - 1e5

In each of the `num_hashes` rounds the tokens are sorted by bucket and split into chunks of m = 2 * bucket_size. With
the logarithm a key that is attended in several rounds counts once, and because of the penalty a token attends itself
only if it has no other key. Keys have the length that the authors' code (trax) gives them. It has no mask of other
buckets and counts a key in each round, where this follows the paper; it draws the hashes for each head and image, which
share them here. Grid tokens are hashed in raster order; nothing is causal, and the look-back is one chunk as in the
paper. Prefix tokens are global and not hashed: they form one more round with all tokens in one bucket. There is no
projection for keys. With one bucket it is softmax attention over the other tokens with keys shared with the queries.
Linear in the number of tokens: O(N (num_hashes (2m + b/2) + P) dim), and a sort; b = N / bucket_size buckets, at most
64. Reformer, section 2 and appendix A, https://arxiv.org/abs/2001.04451
"""

import math
from functools import partial, reduce
from typing import Any

import torch
from torch.nn import functional as F
from torch.types import Device

from ._chunked import chunk_attention, merge, softmax_with_lse
from ._numerics import LOG2_E, is_empty, is_traced, mask_bias, wide_dtype
from ._random import draw_generator
from ._recompute import recompute_heads
from .base import QKVMixer, no_autocast, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Reformer', 'lsh_buckets', 'reformer_attention', 'reformer_naive']

_MAX_BUCKETS = 64
_SELF_PENALTY = 1e5
# masks a pair: subtracted at least twice, by the difference of its codes
_MASK_PENALTY = 1e9


def lsh_buckets(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Tokens (B, heads, N, d) and rotations (rounds, d, b/2) -> their buckets in 0 ... b - 1, (B, heads, rounds, N)."""
    if rotations.shape[-1] == 0:
        return x.new_zeros(*x.shape[:2], len(rotations), x.shape[2], dtype=torch.long)
    dtype = wide_dtype(x)
    with torch.no_grad(), no_autocast(x):
        rotated = x.to(dtype) @ rotations.to(dtype).transpose(0, 1).flatten(1)
        rotated = rotated.unflatten(-1, (len(rotations), -1)).transpose(2, 3)
        # the largest entry of [xR ; -xR] is the largest absolute value of xR
        place = rotated.abs().argmax(dim=-1, keepdim=True)
        return (place + rotations.shape[-1] * (rotated.gather(-1, place) < 0)).squeeze(-1)


def reformer_naive(
    q: torch.Tensor,
    v: torch.Tensor,
    rotations: torch.Tensor,
    grid_size: tuple[int, int],
    chunk_size: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax over the union of the keys of all rounds; arguments as `reformer_attention`."""
    B, heads, N, _ = q.shape
    P = N - grid_size[0] * grid_size[1]
    bias = q.new_full((B, heads, N, N), float('-inf'))
    bias[:, :, :P] = bias[:, :, :, :P] = 0
    rotated = torch.einsum('bhnd,rdk->bhrnk', q[:, :, P:], rotations)
    # without rotations there is one bucket
    buckets = torch.cat([rotated, -rotated], dim=-1).argmax(dim=-1) if rotations.shape[-1] else rotated.sum(dim=-1)
    for b in range(B):
        for head in range(heads):
            for round_buckets in buckets[b, head].tolist():
                order = sorted(range(N - P), key=round_buckets.__getitem__)
                chunk = {token: place // chunk_size for place, token in enumerate(order)}
                for i in order:
                    for j in order:
                        if round_buckets[i] == round_buckets[j] and chunk[i] - chunk[j] in (0, 1):
                            bias[b, head, P + i, P + j] = 0
    bias = bias - _SELF_PENALTY * torch.eye(N, dtype=q.dtype, device=q.device)
    k = q.shape[-1] ** 0.5 * q / q.norm(dim=-1, keepdim=True)
    return softmax_naive(q, k, v, scale, bias, dropout_p)


def reformer_attention(
    q: torch.Tensor,
    v: torch.Tensor,
    rotations: torch.Tensor,
    grid_size: tuple[int, int],
    chunk_size: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, v (B, heads, P + H*W, d), the first P tokens global, rotations (rounds, d, b/2) -> (B, heads, P + H*W, d)."""
    P = q.shape[2] - grid_size[0] * grid_size[1]
    if is_empty(q):
        # there are no chunks
        return v
    # once for both passes
    tensors = q, v, lsh_buckets(q[:, :, P:], rotations)
    # the chunks of different samples and heads are neighbours, and a weight of 0 does not remove what is not finite
    broken = ~(_is_finite(q) & _is_finite(v))
    # on a GPU, reading it would wait for it
    if q.device.type != 'cpu' or is_traced() or broken.any():
        tensors = *tensors, broken
    attend = partial(_attend, num_prefix_tokens=P, chunk_size=chunk_size, scale=scale, dropout_p=dropout_p)
    # in each round queries, keys, values and outputs in sorted order, and the masks of pairs
    num_elements = len(rotations) * q.shape[2] * (4 * q.shape[3] + 2 * chunk_size)
    return recompute_heads(attend, tensors, num_elements, dropout_p)


def _attend(
    q: torch.Tensor,
    v: torch.Tensor,
    buckets: torch.Tensor,
    broken: torch.Tensor | None = None,
    *,
    num_prefix_tokens: int,
    chunk_size: int,
    scale: float,
    dropout_p: float,
) -> torch.Tensor:
    """The outputs, from the buckets of grid tokens (B, heads, rounds, H*W); NaN where `broken` (B, heads, 1, 1)."""
    P, dtype = num_prefix_tokens, wide_dtype(q)
    if broken is not None:
        q, v = q.masked_fill(broken, 0), v.masked_fill(broken, 0)
    k = _keys(q)
    out, z = _hashed_rounds(q[:, :, P:], k[:, :, P:], v[:, :, P:], buckets, chunk_size, scale, dropout_p)
    if P:
        # one round more, in which every token finds the prefix
        scores = LOG2_E * ((scale * q[:, :, P:]) @ k[:, :, :P].mT).to(dtype)
        prefix = softmax_with_lse(scores, v[:, :, :P], dropout_p)
        out, z = (torch.cat([found, x.unsqueeze(2)], dim=2) for found, x in zip((out, z), prefix))
    out = merge(out, z, dim=2).to(v.dtype)
    if P:
        # a prefix token always has another key, so its own needs no finite penalty
        itself = torch.eye(P, q.shape[2], dtype=torch.bool, device=q.device)
        bias = mask_bias(~itself, q).unsqueeze(0)
        out = torch.cat([softmax_attention(q[:, :, :P], k, v, scale, bias, dropout_p), out], dim=2)
    return out if broken is None else out.masked_fill(broken, math.nan)


def _keys(q: torch.Tensor) -> torch.Tensor:
    """Queries at the length sqrt(d)."""
    dtype = wide_dtype(q)
    return F.normalize(q.to(dtype), dim=-1).mul(q.shape[-1] ** 0.5).to(q.dtype)


def _is_finite(x: torch.Tensor) -> torch.Tensor:
    """True for heads of samples whose numbers are all finite, (B, heads, 1, 1)."""
    # the largest and smallest number show what is not finite; a norm takes 10 times as long on a CPU
    x = x.detach()
    largest, smallest = x.amax(dim=2, keepdim=True), x.amin(dim=2, keepdim=True)
    return (largest.isfinite() & smallest.isfinite()).all(dim=3, keepdim=True)


def _hashed_rounds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    buckets: torch.Tensor,
    chunk_size: int,
    scale: float,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of each round for each grid token (B, heads, rounds, N, d) and its z (B, heads, rounds, N, 1).

    The chunks of all samples, heads and rounds are concatenated after a chunk of padding, so that the chunk before
    another one is always its neighbour. Tokens of different rounds do not attend each other.
    """
    m = min(chunk_size, q.shape[2])
    with torch.no_grad():
        order, place, codes = _sort(buckets, m)
        bias = _pair_bias(codes.to(wide_dtype(q)), m)
        (B, heads, rounds, N), missing = order.shape, -order.shape[3] % m
        first = torch.arange(B * heads * rounds, device=q.device).view(B, heads, rounds, 1)
        # index of the token at each place, without and with rounds; padding has index 0, whose values are masked
        tokens = F.pad(F.pad(order + N * (first // rounds), (0, missing)).flatten(), (m, 0))
        outputs = F.pad(order + N * first, (0, missing)).flatten().unsqueeze(0)
        places = place + (N + missing) * first
    by_round = m + places.movedim(2, 0).flatten(1)
    q, k, v = (_take(x.flatten(0, 2), tokens, by_round).unflatten(0, (-1, m)) for x in (q, k, v))  # (G, m, d)
    found = chunk_attention(q, k, v, scale, bias, dropout_p)
    return tuple(_take(x.flatten(0, 1), places.flatten(), outputs).unflatten(0, order.shape) for x in found)


def _sort(buckets: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort tokens by bucket, (B, heads, rounds, N): the token at each place, and the place of each token.

    Also codes (rounds, G, m): two tokens in a chunk of round r attend each other in round r + i if their codes at i
    differ by 0 or 1.
    """
    N, rounds = buckets.shape[3], buckets.shape[2]
    token = torch.arange(N, device=buckets.device)
    # the token's index breaks ties, so that the order does not depend on the sorting algorithm
    order = (buckets * N + token).argsort(dim=-1)
    place = torch.empty_like(order).scatter_(-1, order, token.expand_as(order))
    step = N // m + 3
    code = buckets * step + place // m
    # chunks of neighbouring rounds, heads and samples have no codes in common
    parity = torch.arange(order[..., 0].numel(), device=order.device).view(*order.shape[:3], 1) % 2
    codes = [code.roll(-i, dims=2).gather(-1, order) + (_MAX_BUCKETS + 1) * step * parity for i in range(rounds)]
    # padding attends only padding
    codes = [F.pad(F.pad(code, (0, -N % m), value=-9).flatten(), (m, 0), value=-9) for code in codes]
    return order, place, torch.stack(codes).unflatten(1, (-1, m))


def _pair_bias(codes: torch.Tensor, m: int) -> torch.Tensor:
    """Bias of the base-2 scores of queries and keys, (G - 1, m, 2m), from codes (rounds, G, m).

    Comparisons are arithmetic, because PyTorch's are slow on a CPU.
    """

    def step(code: torch.Tensor) -> torch.Tensor:
        # 1 where the codes differ by 0 or 1, else 3 or more
        return (2 * code[1:, :, None] - 1).sub(2 * code.flatten().unfold(0, 2 * m, m)[:, None]).abs_()

    bias = (1 - step(codes[0])).mul_(_MASK_PENALTY)
    found = torch.zeros_like(bias)
    for code in codes[1:]:
        found += (2 - step(code)).clamp_(min=0)
    # log2 of a count of 1 or 2, all that two rounds can give, is the count minus 1
    bias -= found if len(codes) <= 2 else found.add_(1).log2_()
    bias.diagonal(offset=m, dim1=1, dim2=2).sub_(LOG2_E * _SELF_PENALTY)
    return bias


def _take(x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Rows of x (n, d) by their index; `inverse` (times, n) has the positions of each row in the result."""
    return x.index_select(0, index) if is_traced() else _Take.apply(x, index, inverse)


class _Take(torch.autograd.Function):
    """`index_select` with a backward pass that gathers, several times faster than PyTorch's scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return reduce(torch.add, (grad.index_select(0, rows) for rows in inverse)), None, None


@register_mixer('reformer')
class Reformer(QKVMixer):
    """LSH attention of `num_hashes` rounds with buckets of `bucket_size` tokens on average.

    In training each forward pass draws new rotations, as in the paper; in evaluation they are a buffer that depends on
    `seed` and the layer and is saved with the weights. A grid of at most `bucket_size` tokens is one bucket.
    """

    rotations: torch.Tensor
    attn_weights = True
    approximates_softmax = True
    op = staticmethod(reformer_attention)
    op_naive = staticmethod(reformer_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_hashes: int = 2,
        bucket_size: int = 16,
        seed: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, shared_qk=True, device=device, dtype=dtype, **kwargs)
        if num_hashes < 1 or bucket_size < 1:
            raise ValueError(
                f'reformer needs num_hashes and bucket_size of at least 1, not {num_hashes} and {bucket_size}.'
            )
        self.bucket_size = bucket_size
        shape, generator = (num_hashes, self.head_dim, _MAX_BUCKETS // 2), draw_generator(seed, self.layer)
        rotations = torch.randn(shape, generator=generator, device='cpu', dtype=torch.float32)
        self.register_buffer('rotations', rotations.to(self.proj.weight))

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        rotations = torch.randn_like(self.rotations) if self.training else self.rotations
        rotations = rotations[..., : self.num_buckets(grid_size) // 2]
        return self.op(q, v, rotations, grid_size, 2 * self.bucket_size, self.scale, self.dropout_p)

    def softmax_target(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Softmax attention over all other tokens, with keys shared with the queries."""
        bias = -_SELF_PENALTY * torch.eye(q.shape[2], dtype=q.dtype, device=q.device).unsqueeze(0)
        return softmax_attention(q, _keys(q), v, self.scale, bias)

    def num_buckets(self, grid_size: tuple[int, int]) -> int:
        """Number of buckets for a grid, an even number; 0 for a single bucket without hashing."""
        N = grid_size[0] * grid_size[1]
        if self.bucket_size >= N:
            return 0
        return min(2 * -(-N // (2 * self.bucket_size)), _MAX_BUCKETS)
