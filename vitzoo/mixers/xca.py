"""Cross-covariance attention: attention between channels, each described by its values at all tokens.

    out_c = sum_e softmax_e(tau * q^_c . k^_e) v_e

for the channels c, e of a head, where q^ and k^ are a channel's values at all tokens, scaled to length 1, and tau is
learned per head. Linear in the number of tokens: O(N dim head_dim). The products do not depend on the order of tokens,
so the formula applies to a grid unchanged, and prefix tokens are ordinary tokens. XCiT's local patch interaction, a
separate convolution, is not part of it. The paper divides by tau; this multiplies by it, as the official code does.
XCiT, section 3.2, https://arxiv.org/abs/2106.09681
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._numerics import sum_products, wide_dtype
from ._recompute import recompute_heads
from .base import QKVMixer, no_autocast, register_mixer

__all__ = ['XCA', 'xca', 'xca_naive']

# the least length that a channel is divided by, as in F.normalize
_EPS = 1e-12


def xca_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, temperature: torch.Tensor, dropout_p: float = 0.0
) -> torch.Tensor:
    """Channel by channel; arguments as `xca`."""
    q, k = q / q.norm(dim=2, keepdim=True), k / k.norm(dim=2, keepdim=True)
    channels = []
    for c in range(q.shape[-1]):
        scores = temperature[:, 0] * (q[..., c : c + 1] * k).sum(dim=2)  # (B, heads, d)
        attn = F.dropout(scores.exp() / scores.exp().sum(dim=-1, keepdim=True), dropout_p)
        channels.append((attn.unsqueeze(2) * v).sum(dim=-1))
    return torch.stack(channels, dim=-1)


def xca(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, temperature: torch.Tensor, dropout_p: float = 0.0
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) and temperature (heads, 1, 1) -> (B, heads, N, d), in float32 or wider."""
    attend, tensors = partial(_attend, dropout_p=dropout_p), (q, k, v, temperature.unsqueeze(0))
    # unit queries and keys, and the output
    return recompute_heads(attend, tensors, 3 * q.shape[2] * q.shape[3], dropout_p)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, temperature: torch.Tensor, dropout_p: float
) -> torch.Tensor:
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k = _unit(q.to(dtype)), _unit(k.to(dtype))
        attn = (temperature.to(dtype) * sum_products(q, k)).softmax(dim=-1)  # (B, heads, d, d)
        attn = F.dropout(attn, dropout_p)
        return (v.to(dtype) @ attn.mT).to(v.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Scale each channel of tokens (B, heads, N, d) to length 1."""
    # F.normalize over this dimension takes several times as long on a CPU
    return x / x.square().sum(dim=2, keepdim=True).clamp(min=_EPS**2).sqrt()


@register_mixer('xca')
class XCA(QKVMixer):
    """Cross-covariance attention; `attn_drop` acts on the weights between channels."""

    attn_weights = True
    has_rope = False
    op = staticmethod(xca)
    op_naive = staticmethod(xca_naive)

    def __init__(
        self, dim: int, num_heads: int, *, device: Device = None, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1, device=device, dtype=dtype))

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.temperature, self.dropout_p)

    def no_weight_decay(self) -> set[str]:
        return {'temperature'}
