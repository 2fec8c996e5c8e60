"""Reformer: attention within buckets of a locality-sensitive hash, with shared queries and keys.

    k_i = q_i / |q_i|,   bucket_r(i) = argmax [x_i R_r ; -x_i R_r]  with x = q and random R_r (d, b/2)
    P_r(i) = {j : bucket_r(j) = bucket_r(i), j sorted into the chunk of i or the one before}
    out_i = sum_r exp(z_r(i) - logsumexp_r z_r(i)) sum_{j in P_r(i)} exp(s_ij - z_r(i)) v_j,  z_r(i) = logsumexp_j s_ij
    s_ij = scale * q_i . k_j - log #{r : j in P_r(i)},  s_ii = scale * q_i . k_i - 1e5

In each of the `num_hashes` rounds the tokens are sorted by bucket and cut into chunks of m = 2 * bucket_size. The
logarithm makes a key that several rounds find count once, and the penalty lets a token attend itself only if there is
nothing else. Grid tokens are hashed in raster order; nothing is causal, and the look-back stays one chunk as in the
paper. Prefix tokens are global and not hashed: one more round that all tokens find. There is no projection for keys.
With one bucket it is softmax attention over the other tokens with keys shared with the queries. Linear in the number of
tokens: O(N (num_hashes (2m + b/2) + P) dim), and a sort; b = N / bucket_size buckets, but not more than 64. Reformer,
section 2 and appendix A, https://arxiv.org/abs/2001.04451
"""

import torch
from torch.nn import functional as F

from ._draw import draw_generator
from .base import QKVMixer, no_autocast, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Reformer', 'lsh_buckets', 'reformer_attention', 'reformer_naive']

MAX_BUCKETS = 64
SELF_PENALTY = 1e5


def lsh_buckets(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Tokens (B, heads, N, d) and rotations (rounds, d, b/2) -> their buckets in 0 ... b - 1, (B, heads, rounds, N)."""
    if rotations.shape[-1] == 0:
        return x.new_zeros(*x.shape[:2], len(rotations), x.shape[2], dtype=torch.long)
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.no_grad(), no_autocast(x):
        rotated = x.to(dtype).unsqueeze(2) @ rotations.to(dtype)
        return torch.cat([rotated, -rotated], dim=-1).argmax(dim=-1)


def reformer_naive(
    q: torch.Tensor,
    v: torch.Tensor,
    rotations: torch.Tensor,
    grid_size: tuple[int, int],
    chunk_size: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax over the union of the rounds' keys, each once; arguments as `reformer_attention`."""
    B, heads, N, _ = q.shape
    P = N - grid_size[0] * grid_size[1]
    bias = q.new_full((B, heads, N, N), float('-inf'))
    bias[:, :, :P] = bias[:, :, :, :P] = 0
    buckets = lsh_buckets(q[:, :, P:], rotations)
    for b in range(B):
        for head in range(heads):
            for round_buckets in buckets[b, head].tolist():
                order = sorted(range(N - P), key=round_buckets.__getitem__)
                chunk = {token: place // chunk_size for place, token in enumerate(order)}
                for i in order:
                    for j in order:
                        if round_buckets[i] == round_buckets[j] and chunk[i] - chunk[j] in (0, 1):
                            bias[b, head, P + i, P + j] = 0
    bias = bias - SELF_PENALTY * torch.eye(N, dtype=q.dtype, device=q.device)
    return softmax_naive(q, q / q.norm(dim=-1, keepdim=True), v, scale, bias, dropout_p)


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
    P, dtype = q.shape[2] - grid_size[0] * grid_size[1], torch.promote_types(q.dtype, torch.float32)
    k = F.normalize(q.to(dtype), dim=-1).to(q.dtype)
    q = scale * q
    out, z = _hashed_rounds(q[:, :, P:], k[:, :, P:], v[:, :, P:], rotations, chunk_size, dropout_p)
    if P:
        scores = (q[:, :, P:] @ k[:, :, :P].mT).to(dtype)
        out_prefix = F.dropout(scores.softmax(dim=-1).to(v.dtype), dropout_p) @ v[:, :, :P]
        out = torch.cat([out, out_prefix.unsqueeze(2)], dim=2)
        z = torch.cat([z, scores.logsumexp(dim=-1).unsqueeze(2)], dim=2)
    out = (z.softmax(dim=2).unsqueeze(-1) * out).sum(dim=2).to(v.dtype)
    if P == 0:
        return out
    # a prefix token always finds something else, so its own key needs no finite penalty
    itself = torch.eye(P, q.shape[2], dtype=torch.bool, device=q.device)
    bias = torch.zeros_like(itself, dtype=q.dtype).masked_fill(itself, float('-inf')).unsqueeze(0)
    return torch.cat([softmax_attention(q[:, :, :P], k, v, 1.0, bias, dropout_p), out], dim=2)


def _hashed_rounds(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotations: torch.Tensor, chunk_size: int, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each round finds for each grid token (B, heads, rounds, N, d) and its log-sum-exp (B, heads, rounds, N)."""
    N, m = q.shape[2], min(chunk_size, q.shape[2])
    buckets = lsh_buckets(q, rotations)
    order = buckets.argsort(dim=-1, stable=True)
    place = order.argsort(dim=-1)
    counts = _rounds_in_common(buckets, place // m, order, m)  # (B, heads, rounds, T, m, 2m)
    own = counts.diagonal(dim1=2, dim2=3).movedim(-1, 2)
    counts = counts.sum(dim=3)

    token = _chunks(order.unsqueeze(-1) + 1, m)
    itself = token == _look_back(token).mT
    q, k, v = (_chunks(_take(x.unsqueeze(2), order), m) for x in (q, k, v))  # (B, heads, rounds, T, m, d)
    scores = q @ _look_back(k).mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores - torch.where(itself, SELF_PENALTY, counts.clamp(min=1).to(scores.dtype).log())
    scores = scores.masked_fill(~own, float('-inf'))
    attn = F.dropout(scores.softmax(dim=-1).to(v.dtype), dropout_p)
    out, z = attn @ _look_back(v), scores.logsumexp(dim=-1, keepdim=True)
    out, z = (_take(x.flatten(3, 4)[:, :, :, :N], place) for x in (out, z))
    return out, z.squeeze(-1)


def _rounds_in_common(buckets: torch.Tensor, chunks: torch.Tensor, order: torch.Tensor, m: int) -> torch.Tensor:
    """Whether round r' finds the key for the query, for the pairs of each round r, (B, heads, r, r', T, m, 2m)."""
    rounds = buckets.shape[2]
    order = order.unsqueeze(3).expand(-1, -1, -1, rounds, -1)
    # numbered from 1, so that the zeros in the padding are a bucket that no token is in
    bucket, chunk = (
        F.pad(x.unsqueeze(2).expand_as(order).gather(-1, order) + 1, (0, -x.shape[-1] % m)).unflatten(-1, (-1, m, 1))
        for x in (buckets, chunks)
    )
    step = chunk - _look_back(chunk).mT
    return (bucket == _look_back(bucket).mT) & (step >= 0) & (step <= 1)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Tokens (B, heads, 1 or rounds, N, d) in the order of each round's index (B, heads, rounds, N)."""
    x = x.expand(-1, -1, index.shape[2], -1, -1)
    return x.gather(3, index.unsqueeze(-1).expand(-1, -1, -1, -1, x.shape[-1]))


def _chunks(x: torch.Tensor, m: int) -> torch.Tensor:
    """(B, heads, rounds, N, d) -> (B, heads, rounds, T, m, d), zeros beyond the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[3] % m)).unflatten(3, (-1, m))


def _look_back(x: torch.Tensor) -> torch.Tensor:
    """Chunks (..., T, m, d) -> the chunk before, zeros for the first, and the chunk itself, (..., T, 2m, d)."""
    before = F.pad(x, (0, 0, 0, 0, 1, 0))[..., :-1, :, :]
    return torch.cat([before, x], dim=-2)


@register_mixer('reformer')
class Reformer(QKVMixer):
    """LSH attention of `num_hashes` rounds with buckets of `bucket_size` tokens on average.

    In training each forward pass draws new rotations, as in the paper; in evaluation they are a buffer that follows
    from `seed` and the layer and is saved with the weights. A grid of `bucket_size` tokens or fewer is one bucket.
    """

    attn_weights = True
    approximates_softmax = True
    token_weights = True
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
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, k_dim=0, device=device, dtype=dtype, **kwargs)
        if num_hashes < 1 or bucket_size < 1:
            raise ValueError(
                f'reformer needs num_hashes and bucket_size of at least 1, not {num_hashes} and {bucket_size}.'
            )
        self.bucket_size = bucket_size
        shape, generator = (num_hashes, self.head_dim, MAX_BUCKETS // 2), draw_generator(seed, self.layer)
        rotations = torch.randn(shape, generator=generator, device='cpu', dtype=torch.float32)
        self.register_buffer('rotations', rotations.to(device=device, dtype=dtype))

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        rotations = torch.randn_like(self.rotations) if self.training else self.rotations
        rotations = rotations[..., : self.num_buckets(grid_size) // 2]
        return self.op(q, v, rotations, grid_size, 2 * self.bucket_size, self.scale, self.dropout_p)

    def softmax_target(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Softmax attention over all other tokens, with the keys that are shared with the queries."""
        bias = -SELF_PENALTY * torch.eye(q.shape[2], dtype=q.dtype, device=q.device).unsqueeze(0)
        return softmax_attention(q, F.normalize(q, dim=-1), v, self.scale, bias)

    def num_buckets(self, grid_size: tuple[int, int]) -> int:
        """How many buckets a grid gets: 0, which is no hashing and one bucket, or an even number."""
        N = grid_size[0] * grid_size[1]
        if self.bucket_size >= N:
            return 0
        return min(2 * -(-N // (2 * self.bucket_size)), MAX_BUCKETS)
