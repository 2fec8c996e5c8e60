"""Hydra attention: linear attention with as many heads as channels, so that mixing is one element-wise product.

    out_i = phi(q_i) * sum_j phi(k_j) * v_j,  phi(x) = x / |x|

Linear in the number of tokens and in the width: O(N dim). The norm is that of a whole token, over all heads, so
`num_heads` and the scale of the scores have no effect. The sum does not depend on the order of tokens, so the formula
applies to a grid unchanged, and prefix tokens are ordinary tokens. Hydra Attention, section 3,
https://arxiv.org/abs/2209.07484
"""

import torch

from ._kernel_mixer import KernelMixer
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer

__all__ = ['Hydra', 'hydra_attention', 'hydra_naive']


def hydra_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An N x N attention matrix for each channel, applied to that channel; arguments as `hydra_attention`."""
    tokens_q, tokens_k = (x.transpose(1, 2).flatten(2) for x in (q, k))  # (B, N, dim)
    q = q / tokens_q.norm(dim=-1)[:, None, :, None]
    k = k / tokens_k.norm(dim=-1)[:, None, :, None]
    attn = q.unsqueeze(3) * k.unsqueeze(2)  # (B, heads, N, N, d)
    return (attn * v.unsqueeze(2)).sum(dim=3)


def hydra_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider."""
    with no_autocast(q):
        norms = _norm(q, v.dtype), _norm(k, v.dtype)
        # normalized queries and keys, their products, and as many gradients
        num_elements = 6 * v.shape[2] * v.shape[3]
        return recompute_heads(_mix_channels, (q, k, v, *norms), num_elements)


def _norm(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Lengths of tokens (B, heads, N, d) over all heads together, (B, 1, N, 1)."""
    x = x.to(torch.promote_types(dtype, torch.float32))
    return torch.linalg.vector_norm(x, dim=(1, 3), keepdim=True).clamp(min=1e-12)


def _mix_channels(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor
) -> torch.Tensor:
    with no_autocast(q):
        context = (k / k_norm * v.to(k_norm.dtype)).sum(dim=2, keepdim=True)  # (B, heads, 1, d)
        return (q / q_norm * context).to(v.dtype)


@register_mixer('hydra')
class Hydra(KernelMixer):
    """Hydra attention with the paper's cosine similarity."""

    has_rope = False
    op = staticmethod(hydra_attention)
    op_naive = staticmethod(hydra_naive)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v)
