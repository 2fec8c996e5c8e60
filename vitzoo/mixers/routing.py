"""Routing attention: tokens attend within clusters found by online k-means.

    Q_c, K_c = the w queries and the w keys most similar to centroid c     (cosine; every cluster has w of each)
    out_i    = sum_j n_ij exp(scale * q_i . k_j) v_j / sum_j n_ij exp(scale * q_i . k_j)
    n_ij     = number of clusters with i in Q_c and j in K_c,  n_ii at least 1

Queries and keys are not shared, as in the paper's encoders. A token in several clusters has one softmax over the keys
of all of them, in which a key counts once per cluster that contains both; a token in no cluster attends only itself and
the prefix tokens. Prefix tokens are global and not routed: n = 1 for all pairs with them. In training a centroid is an
exponential moving average of the mean of the queries and keys nearest to it, normalized to the unit sphere; there is no
auxiliary loss. Algorithm 1 differs in two points: it layer-normalizes queries and keys before the attention, and moves
a centroid by the means of queries and of keys in equal parts. The authors' code has one softmax in each cluster, whose
outputs are averaged over the clusters of a token, 0 for a token in none, a loss for the centroids, and no scale. Grid
tokens have no order and there is no causal mask. With one cluster, or clusters of all tokens and no prefix tokens, it
is softmax attention. Cost: O(N (c + w + P) dim) with w = N / c by default, so N^1.5 if c grows with sqrt(N). Efficient
Content-Based Sparse Attention with Routing Transformers, section 4 and algorithm 1, https://arxiv.org/abs/2003.05997
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.nn import functional as F
from torch.types import Device

from ._clustered import cluster_attention
from ._numerics import LOG2_E, is_transformed, wide_dtype
from ._qkv import split_prefix
from ._random import draw_generator
from .base import QKVMixer, no_autocast, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Routing', 'cluster_members', 'routing_attention', 'routing_naive']


def cluster_members(x: torch.Tensor, centroids: torch.Tensor, cluster_size: int) -> torch.Tensor:
    """The `cluster_size` tokens of (B, heads, N, d) most similar to each centroid (heads, c, d): (B, heads, c, w)."""
    return _similarity(x, centroids).topk(cluster_size, dim=-1, sorted=False).indices


def _similarity(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Cosines between centroids and tokens, (B, heads, c, N), float32 or wider."""
    x = x.to(wide_dtype(x))
    with torch.no_grad(), no_autocast(x):
        # fewer numbers are divided than by normalizing the tokens
        return (F.normalize(centroids.to(x.dtype), dim=-1) @ x.mT).div_(_norm(x).mT)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12)


def _of_nearest(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Sum and count of the unit tokens that are nearest to each centroid, (B, heads, c, d + 1), float32 or wider."""
    x = x.to(wide_dtype(x))
    # argmax is several times as slow
    nearest = _similarity(x, centroids).max(dim=2).indices  # (B, heads, N)
    member = F.one_hot(nearest, centroids.shape[1]).to(x.dtype)
    return torch.cat([(member / _norm(x)).mT @ x, member.sum(dim=2).unsqueeze(-1)], dim=-1)


def routing_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    centroids: torch.Tensor,
    grid_size: tuple[int, int],
    cluster_size: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax attention with log n_ij as a bias; arguments as `routing_attention`."""
    B, heads, N, _ = q.shape
    P = N - grid_size[0] * grid_size[1]
    n = q.new_zeros(B, heads, N, N)

    def members(x: torch.Tensor) -> list:
        unit_x, unit_centroids = (y / y.norm(dim=-1, keepdim=True) for y in (x[:, :, P:], centroids.to(x.dtype)))
        return (unit_centroids @ unit_x.mT).argsort(dim=-1, descending=True)[..., :cluster_size].tolist()

    queries, keys = members(q), members(k)
    for b in range(B):
        for head in range(heads):
            for members_q, members_k in zip(queries[b][head], keys[b][head], strict=True):
                for i in members_q:
                    for j in members_k:
                        n[b, head, P + i, P + j] += 1
    n.diagonal(dim1=-2, dim2=-1).clamp_(min=1)
    n[:, :, :P] = n[:, :, :, :P] = 1
    return softmax_naive(q, k, v, scale, n.log(), dropout_p)


def routing_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    centroids: torch.Tensor,
    grid_size: tuple[int, int],
    cluster_size: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global, centroids (heads, c, d) -> (B, heads, P + H*W, d)."""
    P = q.shape[2] - grid_size[0] * grid_size[1]
    (q_prefix, q_grid), (k_prefix, k_grid), (v_prefix, v_grid) = (split_prefix(x, P) for x in (q, k, v))
    q_grid = LOG2_E * scale * q_grid
    in_q, in_k = (cluster_members(x, centroids, cluster_size) for x in (q_grid, k_grid))  # (B, heads, c, w)
    out = cluster_attention(q_grid, k_grid, v_grid, k_prefix, v_prefix, in_q, in_k, dropout_p)
    if P == 0:
        return out
    return torch.cat([softmax_attention(q_prefix, k, v, scale, None, dropout_p), out], dim=2)


@register_mixer('routing')
class Routing(QKVMixer):
    """Routing attention with `num_clusters` clusters per head of `cluster_size` tokens, by default an even share.

    The centroids are a buffer that is initialised from `seed` and the layer and saved with the weights. They are
    updated once per backward pass with momentum `decay`, in the same way on all processes, and stay in float32 if the
    weights are in half precision, which would round such steps to nothing. With gradient checkpointing, call `backward`
    after each forward pass: those of several images would be recomputed with the centroids of the last.
    """

    centroids: torch.Tensor
    attn_weights = True
    approximates_softmax = True
    token_weights = True
    op = staticmethod(routing_attention)
    op_naive = staticmethod(routing_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_clusters: int = 8,
        cluster_size: int | None = None,
        decay: float = 0.999,
        seed: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if num_clusters < 1 or (cluster_size is not None and cluster_size < 1):
            raise ValueError(
                f'routing needs num_clusters of at least 1 and cluster_size of at least 1 or None, '
                f'not {num_clusters} and {cluster_size}.'
            )
        if not 0 <= decay <= 1:
            raise ValueError(f'decay of routing must be between 0 and 1, not {decay}.')
        self.cluster_size = cluster_size
        self.decay = decay
        shape, generator = (num_heads, num_clusters, self.head_dim), draw_generator(seed, self.layer)
        centroids = torch.randn(shape, generator=generator, device='cpu', dtype=torch.float32)
        centroids = F.normalize(centroids, dim=-1)
        self.register_buffer('centroids', centroids.to(self.proj.weight.device, wide_dtype(self.proj.weight)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> 'Routing':
        """Convert the mixer, as `to`, `half` and the like do, and keep the centroids in float32 or wider."""
        centroids = self.centroids
        super()._apply(fn, recurse)
        if self.centroids.dtype != wide_dtype(self.centroids):
            self.centroids = centroids.to(self.centroids.device, wide_dtype(self.centroids))
        return self

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        N = grid_size[0] * grid_size[1]
        cluster_size = min(self.cluster_size or -(-N // self.centroids.shape[1]), N)
        out = self.op(q, k, v, self.centroids, grid_size, cluster_size, self.scale, self.dropout_p)
        # a transform of torch.func has no side effects
        if self.training and out.requires_grad and not is_transformed():
            statistics = self.statistics(q[:, :, -N:], k[:, :, -N:])
            # update in the backward pass: gradient checkpointing repeats the forward pass, which must see the same
            # centroids and must not update them twice
            out.register_hook(lambda grad: self.update_centroids(statistics))
        return out

    @torch.no_grad()
    def statistics(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Sum and count of the unit queries and keys nearest to each centroid, (heads, c, d + 1), float32 or wider."""
        with no_autocast(q):
            both = [_of_nearest(x, self.centroids) for x in (q, k)]
            return torch.stack(both).sum(dim=(0, 1))

    @torch.no_grad()
    def update_centroids(self, statistics: torch.Tensor) -> None:
        """Move each centroid towards the mean of its nearest tokens, if any, over the batches of all processes.

        A head with a token that is not finite, on any process, keeps its centroids.
        """
        if distributed.is_available() and distributed.is_initialized():
            statistics = statistics.clone()
            distributed.all_reduce(statistics)
        sums, counts = statistics[..., :-1], statistics[..., -1:]
        moved = self.decay * self.centroids + (1 - self.decay) * sums / counts.clamp(min=1)
        # summed over the processes, so that all of them agree; counts are always finite
        finite = sums.isfinite().flatten(1).all(dim=1)[:, None, None]
        self.centroids.copy_(torch.where((counts > 0) & finite, F.normalize(moved, dim=-1), self.centroids))
