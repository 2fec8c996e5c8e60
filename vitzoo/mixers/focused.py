"""Focused linear attention (FLatten): features that sharpen directions, and a depthwise convolution of the values.

    out_i = phi(q_i) . (sum_j phi(k_j) v_j^T) / (phi(q_i) . sum_j phi(k_j) + 1e-6 N) + DWC(v)_i
    phi(x) = |x'| x'^p / |x'^p|,  x' = (relu(x) + 1e-6) / softplus(c)

with a learned c per channel and norms over the channels of all heads. Linear in the number of tokens: O(N dim
head_dim). The convolution is on the grid, padded with zeros, with kernels that all heads share; prefix tokens are
ordinary tokens in the sums and have no convolution. The official classes add a learned position to the keys, which
`pos_embed` enables; the formula of the paper has none, and no c. The class for PVT can reduce keys and values by a
strided convolution, which no published configuration that we read does, and which is left out. The scores have no
scale. FLatten Transformer, sections 4.1 and 4.2, https://arxiv.org/abs/2308.00442
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import GridConv, grid_conv_naive
from ._key_positions import KeyPositionMixer
from ._numerics import dot_tokens, sum_products, wide_dtype
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer

__all__ = ['Focused', 'focused_attention', 'focused_naive']

_EPS = 1e-6


def focused_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    divisor: torch.Tensor,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    power: float,
) -> torch.Tensor:
    """The N x N attention matrix of the features, row-normalized; arguments as `focused_attention`."""

    def phi(x: torch.Tensor) -> torch.Tensor:
        x = (x.relu() + _EPS) / (1 + divisor.exp()).log()
        tokens = x.transpose(1, 2).flatten(2)  # (B, N, dim)
        focused = tokens**power
        focused = focused * tokens.norm(dim=-1, keepdim=True) / focused.norm(dim=-1, keepdim=True)
        return focused.unflatten(2, (x.shape[1], -1)).transpose(1, 2)

    attn = phi(q) @ phi(k).mT
    out = attn / (attn.sum(dim=-1, keepdim=True) + _EPS * k.shape[2]) @ v
    return out if conv is None else out + grid_conv_naive(conv, v, grid_size)


def focused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    divisor: torch.Tensor,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    power: float,
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) and c of the formula, `divisor` (heads, 1, d) -> (B, heads, N, d).

    Features and sums are in float32 or wider; the last H*W tokens are the grid.
    """
    heads, N, d = q.shape[1:]
    # norms are over all heads, which are therefore one
    tensors = (q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), divisor.expand(1, 1, -1, -1, -1))
    # five forms of queries and of keys
    out = recompute_heads(partial(_attend, power=power), tensors, 10 * heads * N * d).squeeze(1)
    return out.to(v.dtype) if conv is None else (out + conv(v, grid_size)).to(v.dtype)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, divisor: torch.Tensor, power: float) -> torch.Tensor:
    """The weighted sums (B, 1, heads, N, d), in float32 or wider, for arguments with the same dimension of 1."""
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k, v, width = q.squeeze(1), k.squeeze(1), v.squeeze(1), F.softplus(divisor[0, 0].to(dtype))
        (q, q_scale), (k, k_scale) = (_focus(x.to(dtype), width, power) for x in (q, k))
        k = k * k_scale
        context = sum_products(k, v.to(dtype))  # (B, heads, d, d)
        # the scale of a query only changes the weight of the constant
        return (q @ context / (dot_tokens(q, k.sum(dim=2, keepdim=True)) + _EPS * k.shape[2] / q_scale)).unsqueeze(1)


def _focus(x: torch.Tensor, width: torch.Tensor, power: float) -> tuple[torch.Tensor, torch.Tensor]:
    """phi of tokens (B, heads, N, d) as two factors, of which the second is a number per token (B, 1, N, 1)."""
    x = torch.addcmul(_EPS / width, x.relu(), 1 / width)
    norm = _norm(x)
    # phi does not depend on the factor under the power, and the powers of values up to 1 do not overflow
    focused = (x / norm.detach()) ** power
    return focused, norm / _norm(focused)


def _norm(x: torch.Tensor) -> torch.Tensor:
    """The norm of each token of (B, heads, N, d) over all heads, (B, 1, N, 1)."""
    return x.square().sum(dim=(1, 3), keepdim=True).sqrt()


@register_mixer('focused')
class Focused(KeyPositionMixer):
    """Focused linear attention with the exponent `power`.

    `conv_size` is the side of the convolution, or 0 for none. `pos_embed` adds a learned position to the keys, which
    binds the layer to its grid.
    """

    start_arguments = {'center_keys': True}
    added_terms = ('conv.',)
    op = staticmethod(focused_attention)
    op_naive = staticmethod(focused_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        power: float = 3.0,
        conv_size: int = 5,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if power <= 0:
            raise ValueError(f'power of focused must be positive, not {power}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.power = power
        self.divisor = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim, **dd))
        self.conv = GridConv(self.head_dim, conv_size, **dd) if conv_size else None

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        k = self.add_positions(k, grid_size)
        return self.op(q, k, v, self.divisor, self.conv, grid_size, self.power)

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {'divisor'}
