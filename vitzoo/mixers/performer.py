"""Performer: softmax attention through positive orthogonal random features (FAVOR+), or through ReLU features.

    out_i = phi(q_i) . (sum_j phi(k_j) v_j^T) / phi(q_i) . sum_j phi(k_j)
    softmax:  phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),  x' = sqrt(scale) x
    relu:     phi(x) = (relu(W x') + eps) / sqrt(m)

Linear in the number of tokens: O(N m dim) for m features. Prefix tokens are ordinary tokens. In the limit of many
softmax features it is softmax attention. The authors do not scale x for relu features, and their TensorFlow code adds
eps after the division by sqrt(m), so that its eps is sqrt(m) times as much here.

The authors' code adds an eps to every softmax feature,

    phi(q_i) = (exp(W q_i' - |q_i'|^2 / 2 - max W q_i') + eps) / sqrt(m)
    phi(k_j) = (exp(W k_j' - |k_j'|^2 / 2 - max W k') + eps) / sqrt(m)

with the maximum over the features for a query, and over the features and tokens of a sample and head for the keys. The
more features are below eps, the closer the output is to the mean of the values. Rethinking Attention with Performers,
https://arxiv.org/abs/2009.14794
"""

from typing import Any

import torch
from torch.nn import functional as F

from vitzoo.kernels import use_kernel

from ._numerics import LOG2_E, wide_dtype
from ._positive_features import feature_attention, query_features
from ._random import RandomFeatureMixer
from .base import no_autocast, register_mixer

__all__ = ['Performer', 'orthogonal_features', 'performer_attention', 'performer_naive']

# eps by kernel, if it is not given
_EPS = {'softmax': 0.0, 'relu': 1e-3}
# a feature of a query below this, relative to its largest, contributes nothing; the published eps
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    features: torch.Tensor,
    scale: float,
    kernel: str = 'softmax',
    eps: float = 0.0,
) -> torch.Tensor:
    """The N x N attention matrix of the feature maps, row-normalized; arguments as `performer_attention`."""

    def phi(x: torch.Tensor, over: int | tuple[int, int]) -> torch.Tensor:
        x = scale**0.5 * x
        projected = x @ features.T
        if kernel == 'relu':
            return (projected.relu() + eps) / features.shape[0] ** 0.5
        # without eps the maximum cancels
        largest = projected.amax(dim=over, keepdim=True) if eps else 0
        exp = (projected - x.square().sum(dim=-1, keepdim=True) / 2 - largest).exp()
        return (exp + eps) / features.shape[0] ** 0.5

    attn = phi(q, -1) @ phi(k, (-2, -1)).transpose(-2, -1)
    return attn / attn.sum(dim=-1, keepdim=True) @ v


def performer_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    features: torch.Tensor,
    scale: float,
    kernel: str = 'softmax',
    eps: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) and features (m, d) -> (B, heads, N, d), in float32 or wider; eps must be positive for
    the kernel 'relu'.
    """
    # in float16 the kernel multiplies in float32, which was not timed
    if kernel == 'softmax' and not eps and use_kernel(q, is_faster=q.dtype == torch.bfloat16):
        from vitzoo.kernels import favor as kernels

        if kernels.fits(q, k, v, features):
            return kernels.favor_attention_triton(q, k, v, features, scale)
    with no_autocast(q):
        dtype = wide_dtype(q)
        features = features.to(dtype)
        if kernel == 'softmax' and not eps:
            return feature_attention(q, k, v, _SoftmaxFeatures(features, scale))
        # without 1 / sqrt(m), which cancels in the ratio
        weight = scale**0.5 * features.T
        if kernel == 'relu':
            q_features, k_features = (F.relu(x.to(dtype) @ weight) + eps for x in (q, k))  # (B, heads, N, m)
        else:
            q_features, k_features = _softmax_features_with_eps(q.to(dtype), k.to(dtype), weight, scale, eps)
        context = k_features.mT @ v.to(dtype)  # (B, heads, m, d)
        normalizer = q_features @ k_features.sum(dim=2).unsqueeze(-1)  # (B, heads, N, 1)
        return (q_features @ context / normalizer).to(v.dtype)


def _softmax_features_with_eps(
    q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor, scale: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The published features of queries and keys, (B, heads, N, m)."""
    q_log, k_log = q @ weight, k @ weight
    q_log = q_log - q_log.amax(dim=-1, keepdim=True)
    k_log = k_log - k_log.amax(dim=(-2, -1), keepdim=True)
    q_half, k_half = (scale / 2 * x.square().sum(dim=-1, keepdim=True) for x in (q, k))
    return (q_log - q_half).exp() + eps, (k_log - k_half).exp() + eps


class _SoftmaxFeatures:
    """exp(W x' - |x'|^2 / 2) without 1 / sqrt(m), which cancels, as does exp(-|x'|^2 / 2) of a query."""

    def __init__(self, features: torch.Tensor, scale: float) -> None:
        self.weight = scale**0.5 * features
        self.scale = scale
        self.num_features = features.shape[0]
        self.to_base_2 = LOG2_E * self.weight.T

    def log_keys(self, k: torch.Tensor) -> torch.Tensor:
        return (k @ self.to_base_2).sub_(k.square().sum(dim=-1, keepdim=True), alpha=LOG2_E * self.scale / 2)

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

    `eps` is added to every feature: by default 1e-3 for 'relu', and 0 for 'softmax', as in the paper. The authors' code
    has 1e-6 or 1e-4. That of the published ViL models has 1e-4 and takes the maximum of the keys over all heads and
    samples of a batch, which is not reproduced here: the output for an image would depend on the others. The features
    depend on `seed` and the layer, and are redrawn every `redraw_every` optimizer steps unless it is 0. A training loop
    other than `vitzoo train` calls `vitzoo.set_step` for this.
    """

    features: torch.Tensor
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
        eps: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, num_features=num_features, **kwargs)
        if kernel not in ('softmax', 'relu'):
            raise ValueError(f"kernel of performer is 'softmax' or 'relu', not {kernel!r}.")
        eps = _EPS[kernel] if eps is None else eps
        if eps < 0 or (kernel == 'relu' and not eps):
            least = 'above 0' if kernel == 'relu' else 'at least 0'
            raise ValueError(f'eps of performer with the kernel {kernel!r} must be {least}, not {eps}.')
        self.kernel = kernel
        self.eps = eps
        self.approximates_softmax = kernel == 'softmax'

    def draw_features(self, generator: torch.Generator) -> torch.Tensor:
        return orthogonal_features(self.num_features, self.head_dim, generator)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.features, self.scale, self.kernel, self.eps)

    def health(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """Adds `features_at_floor`, the share of a query's features below eps (1e-4 of its largest if eps is 0).

        Without eps, a feature of a query is weighted by its maximum over the keys. Near 1, a single feature dominates
        the query, or with eps the output is the mean of the values.
        """
        signs = super().health(q, k, v, grid_size)
        with no_autocast(q):
            dtype = wide_dtype(q)
            q, k, phi = q.to(dtype), k.to(dtype), _SoftmaxFeatures(self.features.to(dtype), self.scale)
            if self.eps:
                q_features, _ = _softmax_features_with_eps(q, k, phi.weight.T, self.scale, self.eps)
                at_floor = q_features < 2 * self.eps
            else:
                shift = phi.log_keys(k).amax(dim=2, keepdim=True)
                at_floor = query_features(q, shift, phi) < _FLOOR
        return {**signs, 'features_at_floor': at_floor.to(dtype).flatten(1).mean(dim=1)}
