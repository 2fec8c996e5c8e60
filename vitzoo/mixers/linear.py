"""Linear attention: a positive feature map in place of the exponential of softmax.

    out_i = phi(q_i) . (sum_j phi(k_j) v_j^T) / phi(q_i) . sum_j phi(k_j),  phi(x) = elu(x) + 1

Linear in the number of tokens: O(N dim head_dim). The sums do not depend on the order of tokens, so the formula applies
to a grid unchanged, and prefix tokens are ordinary tokens. There is no scale of the scores, as in the paper.
Transformers are RNNs, section 3.2, https://arxiv.org/abs/2006.16236
"""

import torch
from torch.nn import functional as F

from ._kernel_mixer import KernelMixer
from ._numerics import LOG2_E
from ._positive_features import feature_attention
from .base import no_autocast, register_mixer

__all__ = ['Linear', 'linear_attention', 'linear_naive']


def linear_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The N x N attention matrix of the feature maps, row-normalized; arguments as `linear_attention`."""
    attn = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    return attn / attn.sum(dim=-1, keepdim=True) @ v


def linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider."""
    with no_autocast(q):
        return feature_attention(q, k, v, _EluFeatures(q.shape[-1]))


class _EluFeatures:
    """elu(x) + 1 = exp(min(x, 0)) (1 + max(x, 0)); with shifted exponents its sums need no epsilon."""

    weight: torch.Tensor | None = None

    def __init__(self, num_features: int) -> None:
        self.num_features = num_features

    def log_keys(self, k: torch.Tensor) -> torch.Tensor:
        return k.clamp(max=0).mul_(LOG2_E)

    def log_queries(self, q: torch.Tensor) -> torch.Tensor:
        return q.clamp(max=0).mul_(LOG2_E)

    def exp(self, log: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        exp = log.exp2_()
        return torch.addcmul(exp, exp, x.relu())

    def grad_keys(
        self, grad: torch.Tensor, features: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # d phi / dx = exp(min(x, 0)) on both sides of 0
        grad = grad.mul_(features).div_(k.relu().add_(1))
        return grad, grad

    grad_queries = grad_keys

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@register_mixer('linear')
class Linear(KernelMixer):
    """Linear attention with the feature map elu(x) + 1."""

    token_weights = True
    op = staticmethod(linear_attention)
    op_naive = staticmethod(linear_naive)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v)
