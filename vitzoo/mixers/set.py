"""Induced set attention (ISAB of the Set Transformer): m learned points attend the tokens, and the tokens the points.

    H     = LN(I + softmax(scale * I k^T) v)
    H     = LN(H + relu(W H + b))
    out_i = softmax(scale * q_i . K(H)) V(H)

with inducing points I (m, dim), used as queries without a projection, and linear maps K, V of H. Linear in the number
of tokens: O(N m dim). Sets have no order, so the formula applies to a grid unchanged, and prefix tokens are ordinary
tokens. The paper's residual sum, norm and feed-forward layer after the second attention are those of the backbone's
block; the norms have no parameters. The scale is 1 / sqrt(head_dim), as in softmax attention; the authors' code has 1 /
sqrt(dim). Set Transformer, equations 6, 7, 9 and 10, https://arxiv.org/abs/1810.00825
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._qkv import split_heads
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['InducedSet', 'set_attention', 'set_naive']


def set_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inducing: torch.Tensor,
    fc: nn.Linear,
    kv: nn.Linear,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """The formula line by line; arguments as `set_attention`."""
    (B, heads, _, d), m = q.shape, inducing.shape[0]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(dim=-1, keepdim=True)) / (x.var(dim=-1, keepdim=True, correction=0) + 1e-5).sqrt()

    points = inducing.unflatten(1, (heads, d)).transpose(0, 1)
    h = softmax_naive(points, k, v, scale, None, dropout_p).transpose(1, 2).reshape(B, m, heads * d)
    h = norm(inducing + h)
    h = norm(h + (h @ fc.weight.T + fc.bias).clamp(min=0))
    k, v = ((h @ kv.weight.T + kv.bias).unflatten(2, (2, heads, d))).permute(2, 0, 3, 1, 4)
    return softmax_naive(q, k, v, scale, None, dropout_p)


def set_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inducing: torch.Tensor,
    fc: nn.Linear,
    kv: nn.Linear,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, N, d), inducing points (m, heads * d) and the layers W, and K with V -> (B, heads, N, d)."""
    heads, dim = q.shape[1], inducing.shape[1]
    points = split_heads(inducing.unsqueeze(0), heads).expand(q.shape[0], -1, -1, -1).to(k.dtype)
    h = softmax_attention(points, k, v, scale, None, dropout_p)
    h = F.layer_norm(inducing + h.transpose(1, 2).flatten(2), (dim,))
    h = F.layer_norm(h + F.relu(fc(h)), (dim,))
    k, v = (split_heads(x, heads) for x in kv(h).chunk(2, dim=-1))
    return softmax_attention(q, k, v, scale, None, dropout_p)


@register_mixer('set')
class InducedSet(QKVMixer):
    """Induced set attention through `num_inducing` learned points."""

    attn_weights = True
    has_rope = False
    op = staticmethod(set_attention)
    op_naive = staticmethod(set_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_inducing: int = 64,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if num_inducing < 1:
            raise ValueError(f'num_inducing must be at least 1, not {num_inducing}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.inducing = nn.Parameter(torch.empty(num_inducing, dim, **dd))
        self.fc = nn.Linear(dim, dim, **dd)
        self.kv = nn.Linear(dim, 2 * dim, **dd)
        nn.init.xavier_uniform_(self.inducing[None])

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.inducing, self.fc, self.kv, self.scale, self.dropout_p)

    def no_weight_decay(self) -> set[str]:
        return {'inducing'}
