"""Performer: softmax attention through positive orthogonal random features (FAVOR+), or through ReLU features.

    out_i = phi(q_i) . (sum_j phi(k_j) v_j^T) / phi(q_i) . sum_j phi(k_j)
    softmax:  phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),  x' = sqrt(scale) x
    relu:     phi(x) = (relu(W x') + 1e-3) / sqrt(m)

Linear in the number of tokens: O(N m dim) for m features. Prefix tokens are ordinary tokens. In the limit of many
softmax features it is softmax attention. Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794
"""

import torch
from torch.nn import functional as F

from vitzoo.kernels import use_kernel

from ._numerics import LOG2_E
from ._positive_features import feature_attention, query_features
from ._random import RandomFeatureMixer
from .base import no_autocast, register_mixer

__all__ = ['Performer', 'orthogonal_features', 'performer_attention', 'performer_naive']

_RELU_EPS = 1e-3
# the published code adds this to every softmax feature: below it a feature contributes nothing
_FLOOR = 1e-4


def orthogonal_features(num_features: int, dim: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Random directions, orthogonal in blocks of `dim`, with the norms of Gaussian vectors: (num_features, dim)
    float32."""
    blocks = []
    for start in range(0, num_features, dim):
        gaussian = torch.randn(dim, dim, generator=generator, device='cpu', dtype=torch.float32)
        Q, R = torch.linalg.qr(gaussian)
        # the signs chosen by qr bias the estimate; with R's signs removed the directions are uniform
        blocks.append((Q * R.diagonal().sign()).T[: num_features - start])
    norms = torch.randn(num_features, dim, generator=generator, device='cpu', dtype=torch.float32).norm(dim=1)
    return norms[:, None] * torch.cat(blocks)


def performer_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor, scale: float, kernel: str = 'softmax'
) -> torch.Tensor:
    """The N x N attention matrix of the feature maps, row-normalised; arguments as `performer_attention`."""

    def phi(x):
        x = scale**0.5 * x
        projected = x @ features.T
        if kernel == 'relu':
            return (projected.relu() + _RELU_EPS) / features.shape[0] ** 0.5
        return (projected - x.square().sum(dim=-1, keepdim=True) / 2).exp() / features.shape[0] ** 0.5

    attn = phi(q) @ phi(k).transpose(-2, -1)
    return attn / attn.sum(dim=-1, keepdim=True) @ v


def performer_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor, scale: float, kernel: str = 'softmax'
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) and features (m, d) -> (B, heads, N, d), in float32 or wider."""
    if kernel == 'softmax' and use_kernel(q):
        from vitzoo.kernels import favor as kernels

        if kernels.fits(q, k, v, features):
            return kernels.favor_attention_triton(q, k, v, features, scale)
    with no_autocast(q):
        dtype = torch.promote_types(q.dtype, torch.float32)
        features = features.to(dtype)
        if kernel == 'softmax':
            return feature_attention(q, k, v, _SoftmaxFeatures(features, scale))
        return _relu_attention(q.to(dtype), k.to(dtype), v.to(dtype), features, scale).to(v.dtype)


def _relu_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor, scale: float
) -> torch.Tensor:
    # without 1 / sqrt(m), which cancels in the ratio
    q, k = (F.relu(scale**0.5 * x @ features.T) + _RELU_EPS for x in (q, k))  # (B, heads, N, m)
    context = k.mT @ v  # (B, heads, m, d)
    normalizer = q @ k.sum(dim=2).unsqueeze(-1)  # (B, heads, N, 1)
    return q @ context / normalizer


class _SoftmaxFeatures:
    """exp(W x' - |x'|^2 / 2) without 1 / sqrt(m), which cancels, as does exp(-|x'|^2 / 2) of a query."""

    def __init__(self, features: torch.Tensor, scale: float) -> None:
        self.weight = scale**0.5 * features
        self.scale = scale
        self.num_features = features.shape[0]
        self.to_base_2 = LOG2_E * self.weight.T

    def log_keys(self, k: torch.Tensor) -> torch.Tensor:
        return torch.sub(k @ self.to_base_2, k.square().sum(dim=-1, keepdim=True), alpha=LOG2_E * self.scale / 2)

    def log_queries(self, q: torch.Tensor) -> torch.Tensor:
        return q @ self.to_base_2

    def exp(self, log: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return log.exp2_()

    def grad_keys(
        self, grad: torch.Tensor, features: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad = grad.mul_(features)
        return torch.addcmul(grad @ self.weight, grad.sum(dim=-1, keepdim=True), k, value=-self.scale), grad

    def grad_queries(
        self, grad: torch.Tensor, features: torch.Tensor, q: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad = grad.mul_(features)
        return grad @ self.weight, grad

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (grad.mT @ x).sum(dim=(0, 1))


@register_mixer('performer')
class Performer(RandomFeatureMixer):
    """FAVOR+ attention with `num_features` random features per layer and `kernel` 'softmax' or 'relu'.

    The features depend on `seed` and the layer, and are redrawn every `redraw_every` optimizer steps unless it is 0. A
    training loop other than `vitzoo train` calls `vitzoo.set_step` for this.
    """

    token_weights = True
    op = staticmethod(performer_attention)
    op_naive = staticmethod(performer_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_features: int = 256,
        kernel: str = 'softmax',
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, num_features=num_features, **kwargs)
        if kernel not in ('softmax', 'relu'):
            raise ValueError(f"kernel of performer is 'softmax' or 'relu', not {kernel!r}.")
        self.kernel = kernel
        self.approximates_softmax = kernel == 'softmax'

    def draw_features(self, generator: torch.Generator) -> torch.Tensor:
        return orthogonal_features(self.num_features, self.head_dim, generator)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.features, self.scale, self.kernel)

    def health(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """Adds `features_at_floor`, the share of a query's features that are below 1e-4 times its largest.

        A feature of a query is weighted by its maximum over the keys. Near 1, a single feature dominates the query.
        """
        signs = super().health(q, k, v, grid_size)
        with no_autocast(q):
            dtype = torch.promote_types(q.dtype, torch.float32)
            phi = _SoftmaxFeatures(self.features.to(dtype), self.scale)
            shift = phi.log_keys(k.to(dtype)).amax(dim=2, keepdim=True)
            at_floor = query_features(q.to(dtype), shift, phi) < _FLOOR
        return {**signs, 'features_at_floor': at_floor.to(dtype).flatten(1).mean(dim=1)}
