"""Projections from tokens to queries, keys and values: ViT's linear layer and CvT's convolutions.

Both return q, k, v of shape (B, heads, N, head_dim). `k_dim` is the width of the keys over all heads, `dim` by default
(AFT-conv has one number per head). With `shared_qk` (Reformer) the queries also serve as keys: the keys have no
parameters and no channels.
"""

from typing import Any

import torch
from timm.layers import ConvNormAct
from torch import nn
from torch.types import Device

__all__ = ['ConvQKV', 'LinearQKV', 'norm_heads', 'split_heads', 'split_prefix', 'split_qkv']


def split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, N, heads * d) -> (B, heads, N, d)."""
    B, N, C = x.shape
    return x.reshape(B, N, num_heads, C // num_heads).transpose(1, 2)


def norm_heads(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Apply a norm of channels to (B, heads, N, d)."""
    if isinstance(norm, nn.Identity):
        return x
    B, heads, N, d = x.shape
    # rows of one matrix, because compiled code fails in the backward pass of a norm of transposed tokens
    return norm(x.transpose(1, 2).reshape(B * N * heads, d)).view(B, N, heads, d).transpose(1, 2)


def split_prefix(x: torch.Tensor, num_prefix_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefix and grid tokens of (B, heads, P + H*W, d).

    Their gradients are concatenated once, those of two slices are each padded with zeros and then added.
    """
    if num_prefix_tokens == 0:
        return x[:, :, :0].detach(), x
    prefix, grid = x.split([num_prefix_tokens, x.shape[2] - num_prefix_tokens], dim=2)
    return prefix, grid


def split_qkv(
    parent: dict[str, torch.Tensor], dim: int, **layers: slice
) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
    """Layers of some of the queries, keys and values from the fused layer `qkv` of an attention of width `dim`.

    `layers` has the part of each layer in units of `dim`. Empty if the parent has no such layer.
    """
    weight = parent.get('qkv.weight')
    if weight is None or weight.shape != (3 * dim, dim):
        return {}
    return {
        f'{layer}.{kind}': (parent[f'qkv.{kind}'][dim * part.start : dim * part.stop], (f'qkv.{kind}',))
        for layer, part in layers.items()
        for kind in ('weight', 'bias')
        if f'qkv.{kind}' in parent
    }


class LinearQKV(nn.Linear):
    """One linear layer for queries, keys and values, with the layout of timm's `Attention.qkv`."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        k_dim: int | None = None,
        shared_qk: bool = False,
        num_prefix_tokens: int = 0,
        qkv_bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (dim, _key_width(dim, k_dim, shared_qk), dim)
        super().__init__(dim, sum(sizes), bias=qkv_bias, device=device, dtype=dtype)
        self.sizes = sizes

    def fit_from(self, name: str, parent: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int] | None:
        """Queries and values of a layer with more or fewer keys, and how many values are inherited.

        The keys stay as they are. None if the parent has another dim.
        """
        old, dim = parent[name], self.in_features
        if parent['weight'].shape[1] != dim:
            return None
        new = getattr(self, name).detach().clone()
        new[:dim], new[-dim:] = old[:dim], old[-dim:]
        return new, 2 * old[:dim].numel()


class ConvQKV(nn.Module):
    """CvT's projection: for each of q, k, v a depthwise convolution with batch norm, then a linear layer.

    Prefix tokens bypass the convolutions. `stride_kv` subsamples keys and values. CvT, section 3.2,
    https://arxiv.org/abs/2103.15808
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        k_dim: int | None = None,
        shared_qk: bool = False,
        num_prefix_tokens: int = 0,
        qkv_bias: bool = True,
        kernel_size: int = 3,
        stride_kv: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.num_prefix_tokens = num_prefix_tokens
        self.stride_kv = stride_kv
        k_dim = _key_width(dim, k_dim, shared_qk)
        conv: dict[str, Any] = dict(
            in_channels=dim, out_channels=dim, kernel_size=kernel_size, groups=dim, apply_act=False, **dd
        )
        self.conv_q = ConvNormAct(**conv)
        self.conv_k = None if shared_qk else ConvNormAct(**conv, stride=stride_kv)
        self.conv_v = ConvNormAct(**conv, stride=stride_kv)
        self.proj_q = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.proj_k = None if shared_qk else nn.Linear(dim, k_dim, bias=qkv_bias, **dd)
        self.proj_v = nn.Linear(dim, dim, bias=qkv_bias, **dd)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        prefix, grid = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        image = grid.unflatten(1, grid_size).permute(0, 3, 1, 2)  # (B, dim, H, W)
        q = _project(self.proj_q, prefix, self.conv_q(image))
        k = q[..., :0]
        if self.proj_k is not None and self.conv_k is not None:
            k = _project(self.proj_k, prefix, self.conv_k(image))
        v = _project(self.proj_v, prefix, self.conv_v(image))
        return split_heads(q, self.num_heads), split_heads(k, self.num_heads), split_heads(v, self.num_heads)


def _key_width(dim: int, k_dim: int | None, shared_qk: bool) -> int:
    if shared_qk:
        return 0
    return dim if k_dim is None else k_dim


def _project(proj: nn.Linear, prefix: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Prefix tokens (B, P, C) and a feature map (B, C, H, W) -> projected tokens (B, P + H*W, C')."""
    tokens = proj(image.flatten(2).transpose(1, 2))
    # project prefix and map separately: in one projection the map's gradient would be a slice with the batch stride of
    # all tokens, which torch's CPU batch norm mishandles at batch size 1
    return torch.cat([proj(prefix), tokens], dim=1) if prefix.shape[1] else tokens
