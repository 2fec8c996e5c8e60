"""Hedgehog: linear attention whose features are softmaxes of learned maps of queries and keys, of both signs.

    out_i = phi(q_i) . (sum_j phi(k_j) v_j^T) / phi(q_i) . sum_j phi(k_j)
    phi(x) = [softmax(W^T x), softmax(-W^T x)], not below 1e-12

Linear in the number of tokens: O(N f dim) for f features of each sign. Queries and keys have a W of their own in each
head, which starts as the identity. There is no scale of the scores. The sums do not depend on the order of tokens, so
the formula applies to a grid unchanged, and prefix tokens are ordinary tokens. Four options of the official code are
left out: a bias, one number per head, which cancels in the softmax; a skip connection, which adds the identity to W;
exponentials in place of the softmaxes; and features of one sign only. The Hedgehog & the Porcupine,
https://arxiv.org/abs/2402.04347
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._kernel_mixer import KernelMixer
from ._numerics import at_least, wide_dtype
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer

__all__ = ['Hedgehog', 'hedgehog_attention', 'hedgehog_naive']

_FLOOR = 1e-12


def hedgehog_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_map: torch.Tensor, k_map: torch.Tensor
) -> torch.Tensor:
    """The N x N attention matrix of the features, row-normalized; arguments as `hedgehog_attention`."""

    def phi(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        u = torch.einsum('bhnd,hdf->bhnf', x, weight)
        positive, negative = u.exp(), (-u).exp()
        shares = [e / e.sum(dim=-1, keepdim=True) for e in (positive, negative)]
        return torch.cat(shares, dim=-1).clamp(min=_FLOOR)

    attn = phi(q, q_map) @ phi(k, k_map).mT
    return attn / attn.sum(dim=-1, keepdim=True) @ v


def hedgehog_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_map: torch.Tensor, k_map: torch.Tensor
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) and maps W (heads, d, f) -> (B, heads, N, d), in float32 or wider."""
    # softmaxes and features, both of either sign, of queries and keys
    num_elements = 8 * q.shape[2] * q_map.shape[-1]
    return recompute_heads(_attend, (q, k, v, q_map.unsqueeze(0), k_map.unsqueeze(0)), num_elements)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_map: torch.Tensor, k_map: torch.Tensor
) -> torch.Tensor:
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k = _features(q.to(dtype), q_map.to(dtype)), _features(k.to(dtype), k_map.to(dtype))
        # the normalizer is one more channel
        values = F.pad(v.to(dtype), (0, 1), value=1.0)  # (B, heads, N, d + 1)
        sums = q @ (k.mT @ values)
        # the gradient of a quotient needs two more tensors
        return (sums[..., :-1] * sums[..., -1:].reciprocal()).to(v.dtype)


def _features(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """phi of the formula, (B, heads, N, 2f)."""
    u = x @ weight
    # limited before they are joined, so that the backward pass needs the shares once
    return torch.cat([at_least(each.softmax(dim=-1), _FLOOR) for each in (u, -u)], dim=-1)


@register_mixer('hedgehog')
class Hedgehog(KernelMixer):
    """Hedgehog attention with `num_features` features of each sign, as many as a head has channels by default."""

    token_weights = True
    op = staticmethod(hedgehog_attention)
    op_naive = staticmethod(hedgehog_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_features: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        num_features = self.head_dim if num_features is None else num_features
        if num_features < 1:
            raise ValueError(f'num_features of hedgehog must be at least 1, not {num_features}.')
        identity = torch.eye(self.head_dim, num_features, device=device, dtype=dtype)
        self.q_map = nn.Parameter(identity.repeat(num_heads, 1, 1))
        self.k_map = nn.Parameter(identity.repeat(num_heads, 1, 1))

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.q_map, self.k_map)
