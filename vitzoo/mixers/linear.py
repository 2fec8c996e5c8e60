"""Linear attention: a positive feature map in the place of softmax's exponential.

    out_i = phi(q_i) . (sum_j phi(k_j) v_j^T) / phi(q_i) . sum_j phi(k_j),  phi(x) = elu(x) + 1

Linear in the number of tokens: O(N dim head_dim). The sums have no order, so a grid needs no translation, and prefix
tokens are ordinary tokens. The scale of the scores plays no part: the paper has none. Transformers are RNNs,
section 3.2, https://arxiv.org/abs/2006.16236
"""

import torch
from torch.nn import functional as F

from .base import QKVMixer, no_autocast, register_mixer

__all__ = ['Linear', 'linear_attention', 'linear_naive']


def linear_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The N x N attention matrix of the feature maps, row-normalised; arguments as `linear_attention`."""
    attn = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    return attn / attn.sum(dim=-1, keepdim=True) @ v


def linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider.

    Key features are divided by their largest value over the tokens, per sample, head and channel, and query features
    multiplied by it before each row is divided by its own largest. The factors cancel, no feature exceeds 1 and no
    normaliser is below 1, so that elu(x) + 1 = exp(x) of very negative x needs no epsilon.
    """
    with no_autocast(q):
        dtype = torch.promote_types(q.dtype, torch.float32)
        k_log, v_wide = _log_features(k.to(dtype)), v.to(dtype)
        k_max = k_log.detach().amax(dim=2, keepdim=True)
        q_log = _log_features(q.to(dtype)) + k_max
        q_features = (q_log - q_log.detach().amax(dim=-1, keepdim=True)).exp()
        k_features = (k_log - k_max).exp()
        context = k_features.mT @ v_wide  # (B, heads, d, d)
        normaliser = q_features @ k_features.sum(dim=2).unsqueeze(-1)  # (B, heads, N, 1)
        return (q_features @ context / normaliser).to(v.dtype)


def _log_features(x: torch.Tensor) -> torch.Tensor:
    """log(elu(x) + 1), which is x below 0 and log(1 + x) above."""
    return torch.where(x < 0, x, x.clamp(min=0).log1p())


@register_mixer('linear')
class Linear(QKVMixer):
    """Linear attention with the feature map elu(x) + 1."""

    token_weights = True
    op = staticmethod(linear_attention)
    op_naive = staticmethod(linear_naive)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v)
