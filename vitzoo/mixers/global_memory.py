"""Global-memory attention: a memory of global tokens attends all tokens, and grid tokens attend nothing but the memory.

    memory_g = softmax_j(scale * q_g . k_j) v_j over all tokens j
    out_i    = softmax_g(scale * q_i . k_g) u_g over the memory g,  u_g = v_g, or memory_g if g belongs to the layer

This is ViL's attention without its windows. There the memory is the class tokens of a stage, up to 256, which pass
through its layers: grid tokens read in one layer what the memory collected in the layer before. Prefix tokens work in
the same way, and with `num_global=0` this is the published model (of ViL-Small: `num_prefix_tokens=(256, 256, 64, 16)`,
averaged with the other tokens by `pool_include_prefix=True`). As backbones have one prefix token or none, a layer adds
`num_global` memory tokens: learned, projected as any token, and not passed on to the next layer, so grid tokens read
what they collected in the same layer. Linear in the number of tokens: O(N G dim) for G global tokens. Multi-Scale
Vision Longformer and its official code (`only_glo`), https://arxiv.org/abs/2103.15358
"""

from typing import Any

import torch
from torch import nn
from torch.types import Device

from ._rope import Rope
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['GlobalMemory', 'global_memory_attention', 'global_memory_naive']


def global_memory_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_own: int,
    num_global: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax attention of all tokens under a dense N x N mask; arguments as `global_memory_attention`."""
    N = q.shape[2]
    is_global = torch.arange(N, device=q.device) < num_global
    mask = torch.where(is_global[:, None] | is_global, 0.0, -torch.inf).to(q.dtype)
    memory = softmax_naive(q, k, v, scale, mask, dropout_p)[:, :, :num_global]
    values = torch.cat([memory[:, :, :num_own], v[:, :, num_own:]], dim=2)
    grid = softmax_naive(q[:, :, num_global:], k, values, scale, mask[num_global:], dropout_p)
    return torch.cat([memory[:, :, num_own:], grid], dim=2)


def global_memory_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_own: int,
    num_global: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, num_own + P + H*W, d) -> (B, heads, P + H*W, d).

    The layer's own memory tokens come first; `num_global` is num_own + P.
    """
    memory = softmax_attention(q[:, :, :num_global], k, v, scale, None, dropout_p)
    values = torch.cat([memory[:, :, :num_own], v[:, :, num_own:num_global]], dim=2)
    grid = softmax_attention(q[:, :, num_global:], k[:, :, :num_global], values, scale, None, dropout_p)
    return torch.cat([memory[:, :, num_own:], grid], dim=2)


@register_mixer('global')
class GlobalMemory(QKVMixer):
    """Attention through the prefix tokens and `num_global` memory tokens of the layer.

    Raises ValueError if there are neither.
    """

    attn_weights = True
    op = staticmethod(global_memory_attention)
    op_naive = staticmethod(global_memory_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_prefix_tokens: int = 0,
        num_global: int = 64,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        total = num_prefix_tokens + num_global
        if num_global < 0 or not total:
            raise ValueError(
                f'global needs a memory: num_global of at least {int(not num_prefix_tokens)} '
                f'with {num_prefix_tokens} prefix tokens, not {num_global}.'
            )
        # memory tokens bypass a convolutional projection, as prefix tokens do
        super().__init__(dim, num_heads, num_prefix_tokens=total, device=device, dtype=dtype, **kwargs)
        self.num_prefix_tokens = num_prefix_tokens
        self.num_global = num_global
        self.memory = nn.Parameter(torch.empty(1, num_global, dim, device=device, dtype=dtype)) if num_global else None
        if self.memory is not None:
            nn.init.trunc_normal_(self.memory, std=0.02)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None) -> torch.Tensor:
        if self.memory is not None:
            x = torch.cat([self.memory.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)
        q, k, v = self.to_qkv(x, grid_size, rope)
        num_all = self.num_global + self.num_prefix_tokens
        x = self.op(q, k, v, self.num_global, num_all, self.scale, self.dropout_p)
        return self.project(x)

    def no_weight_decay(self) -> set[str]:
        return set() if self.memory is None else {'memory'}
