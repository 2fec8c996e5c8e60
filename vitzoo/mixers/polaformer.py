"""Polarity-aware linear attention (PolaFormer): products of same and of opposite signs, and learned exponents.

    out_i = ([a_i . (sum_j b_j v'_j^T) / z_i, a_i . (sum_j b~_j v"_j^T) / z~_i] + DWC(v)_i) * g_i
    a = [q+^p, q-^p],  b = [k+^p, k-^p],  b~ = [k-^p, k+^p],  z_i = a_i . sum_j b_j + 1e-6 N,  z~ likewise
    x+ = relu(x / softplus(c)),  x- = relu(-x / softplus(c)),  p = 1 + alpha sigmoid(w)

where v' and v" are the two halves of the channels of a head, so that its width must be even, g is a linear layer of the
tokens, and c and w are learned per channel. Linear in the number of tokens: O(N dim head_dim). The convolution is on
the grid, padded with zeros, with kernels that all heads share; prefix tokens are ordinary tokens in the sums and have
no convolution. The official classes add a learned position to the keys, which `pos_embed` enables. The class for PVT
can reduce keys and values by a strided convolution, which the configurations of its models do not use, and which is
left out. There is no scale of the scores. PolaFormer: Polarity-aware Linear Attention, https://arxiv.org/abs/2501.15061
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import GridConv, grid_conv_naive
from ._key_positions import KeyPositionMixer
from ._numerics import at_least, wide_dtype
from ._qkv import split_heads
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer

__all__ = ['PolaFormer', 'pola_attention', 'pola_naive']

_EPS = 1e-6
# of a magnitude, whose logarithm is taken
_TINY = 1e-30


def pola_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    divisor: torch.Tensor,
    power: torch.Tensor,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    alpha: float,
) -> torch.Tensor:
    """The N x N attention matrices of same and of opposite signs; arguments as `pola_attention`."""
    p, width = 1 + alpha / (1 + (-power).exp()), (1 + divisor.exp()).log()
    (q_plus, q_minus), (k_plus, k_minus) = ((_relu_power(x / width, p), _relu_power(-x / width, p)) for x in (q, k))
    same = q_plus @ k_plus.mT + q_minus @ k_minus.mT
    opposite = q_plus @ k_minus.mT + q_minus @ k_plus.mT
    halves = [
        attn / (attn.sum(dim=-1, keepdim=True) + _EPS * k.shape[2]) @ values
        for attn, values in zip((same, opposite), v.chunk(2, dim=-1))
    ]
    out = torch.cat(halves, dim=-1)
    out = out if conv is None else out + grid_conv_naive(conv, v, grid_size)
    return out if gate is None else out * gate


def _relu_power(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """relu(x)^p; the second derivative of pow is not finite at 0."""
    return torch.where(x > 0, x, 1) ** p * (x > 0)


def pola_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    divisor: torch.Tensor,
    power: torch.Tensor,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    alpha: float,
) -> torch.Tensor:
    """q, k, v and gate (B, heads, N, d), c and w of the formula (heads, 1, d) -> (B, heads, N, d).

    Features and sums are in float32 or wider; the last H*W tokens are the grid.
    """
    with no_autocast(q):
        dtype = wide_dtype(q)
        p, log_divisor = 1 + alpha * power.to(dtype).sigmoid(), F.softplus(divisor.to(dtype)).log2()
    # the powers, in three forms, of queries and keys; sums
    num_elements = 10 * q.shape[2] * q.shape[3]
    out = recompute_heads(_attend, (q, k, v, p.unsqueeze(0), log_divisor.unsqueeze(0)), num_elements)
    out = out if conv is None else out + conv(v, grid_size)
    return out.to(v.dtype) if gate is None else (out * gate).to(v.dtype)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: torch.Tensor, log_divisor: torch.Tensor
) -> torch.Tensor:
    """The weighted sums, in the dtype of p."""
    with no_autocast(q):
        dtype = p.dtype
        q, k = (_signed_powers(x.to(dtype), log_divisor, p) for x in (q, k))
        context, total = k.mT @ v.to(dtype), k.sum(dim=2).unsqueeze(-1)  # (B, heads, 2d, d), (B, heads, 2d, 1)
        d = v.shape[-1]
        # products of opposite signs: exchange the positive and the negative features of the keys
        same, opposite = context[..., : d // 2], _exchange(context[..., d // 2 :])
        sums = q @ torch.cat([same, opposite], dim=-1)  # (B, heads, N, d)
        normalizers = q @ torch.cat([total, _exchange(total)], dim=-1) + _EPS * k.shape[2]  # (B, heads, N, 2)
        return (sums.unflatten(-1, (2, -1)) / normalizers.unsqueeze(-1)).flatten(-2)


def _exchange(x: torch.Tensor) -> torch.Tensor:
    # not roll, which torch.jit.trace of PyTorch 2.6 refuses
    return torch.cat(x.chunk(2, dim=2)[::-1], dim=2)


def _signed_powers(x: torch.Tensor, log_divisor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Powers of the positive values of x / 2^log_divisor, then of the magnitudes of the negative ones.

    (B, heads, N, d) -> (B, heads, N, 2d).
    """
    # not pow, whose gradient for the exponent is slow
    powers = (p * at_least(x.abs(), _TINY).log2().sub_(log_divisor)).exp2_() * x.detach().sign()
    # in place, because a new tensor takes longer than the operation
    return torch.cat([powers, -powers], dim=-1).relu_()


@register_mixer('polaformer')
class PolaFormer(KeyPositionMixer):
    """Polarity-aware linear attention with exponents between 1 and 1 + `alpha`.

    `conv_size` is the side of the convolution, or 0 for none, and `gate=False` leaves out g. `pos_embed` adds a learned
    position to the keys, which binds the layer to its grid. Raises ValueError if the width of a head is odd.
    """

    # centered keys were less exact on a trained model
    start_arguments = {'center_keys': False, 'gate': False}
    added_terms = ('conv.',)
    gate_bias = 1.0
    op = staticmethod(pola_attention)
    op_naive = staticmethod(pola_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        alpha: float = 4.0,
        conv_size: int = 5,
        gate: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if self.head_dim % 2:
            raise ValueError(
                f'polaformer splits the channels of a head into halves, and dim {dim} with {num_heads} heads has '
                f'{self.head_dim} in each; choose another num_heads.'
            )
        if alpha < 0:
            raise ValueError(f'alpha of polaformer must be at least 0, not {alpha}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.alpha = alpha
        self.divisor = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim, **dd))
        self.power = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim, **dd))
        self.conv = GridConv(self.head_dim, conv_size, **dd) if conv_size else None
        self.gate = nn.Linear(dim, dim, **dd) if gate else None

    def mix_input(
        self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> torch.Tensor:
        gate = None if self.gate is None else split_heads(self.gate(x), self.num_heads)
        k = self.add_positions(k, grid_size)
        return self.op(q, k, v, gate, self.divisor, self.power, self.conv, grid_size, self.alpha)

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {'divisor', 'power'}
