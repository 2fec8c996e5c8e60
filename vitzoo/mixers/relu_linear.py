"""ReLU linear attention of EfficientViT, with its multi-scale aggregation as an option.

    out_i = relu(q_i) . (sum_j relu(k_j) v_j^T) / (relu(q_i) . sum_j relu(k_j) + 1e-15)

Linear in the number of tokens: O(N dim head_dim). There is no scale of the scores. The sums do not depend on the order
of tokens, so the formula applies to a grid unchanged, and prefix tokens are ordinary tokens. A query without a positive
channel gives 0. With `scales` there are further heads for each scale s, whose queries, keys and values come from those
of the first heads by an s x s depthwise convolution on the grid, which prefix tokens bypass, and then by a linear map
inside each head. The official code normalizes the output by batch norm, which is left out, as it makes an image depend
on its batch; in evaluation it is part of the output projection. EfficientViT, https://arxiv.org/abs/2205.14756
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.types import Device

from ._grid_conv import GridConv
from ._kernel_mixer import KernelMixer
from ._numerics import at_least, dot_tokens, sum_products, wide_dtype
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer

__all__ = ['ReluLinear', 'relu_linear_attention', 'relu_linear_naive']

_EPS = 1e-15


def relu_linear_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The N x N attention matrix of the features, row-normalized; arguments as `relu_linear_attention`."""
    attn = q.relu() @ k.relu().mT
    return attn / (attn.sum(dim=-1, keepdim=True) + _EPS) @ v


def relu_linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider."""
    # features, and the output before it is divided
    return recompute_heads(_attend, (q, k, v), 3 * q.shape[2] * q.shape[3])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k = q.to(dtype).relu(), k.to(dtype).relu()
        context = sum_products(k, v.to(dtype))  # (B, heads, d, d)
        # the exporter to ONNX leaves out the addition of so small a number, and a token without features has a sum of 0
        total = at_least(dot_tokens(q, k.sum(dim=2, keepdim=True)) + _EPS, _EPS)
        return (q @ context / total).to(v.dtype)


class _Scale(nn.Module):
    """Queries, keys and values of one scale, from those of the first heads."""

    def __init__(
        self, dim: int, num_heads: int, kernel_size: int, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        d = dim // num_heads
        self.conv = GridConv(3 * dim, kernel_size, bias=False, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.empty(3 * num_heads, d, d, device=device, dtype=dtype))
        nn.init.uniform_(self.weight, -(d**-0.5), d**-0.5)

    def forward(self, qkv: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """(B, 3 heads, N, d) -> (B, 3 heads, N, d)."""
        P = qkv.shape[2] - grid_size[0] * grid_size[1]
        convolved = self.conv(qkv, grid_size)
        if P:
            convolved = torch.cat([qkv[:, :, :P].to(convolved.dtype), convolved[:, :, P:]], dim=2)
        return convolved @ self.weight.mT


@register_mixer('relu_linear')
class ReluLinear(KernelMixer):
    """ReLU linear attention with further heads for each scale in `scales`, odd sizes of convolutions, such as (5,).

    Their output has a projection of its own, `proj_scales`, whose result is added to that of `proj`.
    """

    op = staticmethod(relu_linear_attention)
    op_naive = staticmethod(relu_linear_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        scales: Sequence[int] = (),
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.scales = nn.ModuleList(_Scale(dim, num_heads, size, **dd) for size in scales)
        self.proj_scales = nn.Linear(len(scales) * dim, dim, bias=False, **dd) if scales else None

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        if not self.scales:
            return self.op(q, k, v)
        qkv = torch.cat([q, k, v], dim=1)
        all_scales = [qkv, *(scale(qkv, grid_size).to(qkv.dtype) for scale in self.scales)]
        q, k, v = (torch.cat(parts, dim=1) for parts in zip(*(x.chunk(3, dim=1) for x in all_scales)))
        return self.op(q, k, v)

    def add_local(self, out: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        own, others = out.tensor_split([self.num_heads], dim=1)
        return torch.cat([own + local, others], dim=1)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """(B, heads, N, d) of all scales -> (B, N, dim)."""
        if self.proj_scales is None:
            return super().project(x)
        own, others = (part.transpose(1, 2).flatten(2) for part in x.tensor_split([self.num_heads], dim=1))
        return self.proj_drop(self.proj(self.scale_norm(own)) + self.proj_scales(others))
