"""Spatial-reduction attention: softmax attention whose keys and values come from a coarser grid.

    out_i = softmax(scale * q_i . K(SR(x))) V(SR(x)),  SR(x) = Norm(W_S (R x R tokens of x, concatenated))

Quadratic in the number of tokens, R^2 times cheaper than softmax: O(N^2 dim / R^2). As in the official code, rows and
columns after the last whole patch are part of no key, only queries; a grid smaller than a patch, which that code does
not accept, is padded with zeros. Prefix tokens bypass reduction and norm, as in ViL. With R = 1 there is no reduction,
unless `reduce_at_1`, and this is softmax attention. Queries come from the tokens and keys from the reduced map, so
CvT's convolutional projection does not apply: the reduction is itself a convolution. Pyramid Vision Transformer,
section 3.3, https://arxiv.org/abs/2102.12122
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._numerics import pad, wide_dtype
from ._qkv import norm_heads, split_heads, split_qkv
from .base import TokenMixer, no_autocast, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['SRFormer', 'spatial_reduction', 'spatial_reduction_attention', 'spatial_reduction_naive']


def spatial_reduction_naive(
    x: torch.Tensor,
    q: torch.Tensor,
    sr: nn.Conv2d | None,
    norm: nn.Module | None,
    kv: nn.Linear,
    grid_size: tuple[int, int],
    scale: float,
    dropout_p: float = 0.0,
    k_norm: nn.Module | None = None,
) -> torch.Tensor:
    """The reduction patch by patch, then softmax attention; arguments as `spatial_reduction_attention`."""
    (H, W), heads = grid_size, q.shape[1]
    if sr is not None:
        P, R = x.shape[1] - H * W, sr.stride[0]
        image = x[:, P:].unflatten(1, grid_size)
        reduced = []
        for top in range(0, max(H - R, 0) + 1, R):
            for left in range(0, max(W - R, 0) + 1, R):
                patch = image[:, top : top + R, left : left + R]  # (B, <= R, <= R, C)
                kernel = sr.weight[:, :, : patch.shape[1], : patch.shape[2]]
                reduced.append(torch.einsum('bhwc,dchw->bd', patch, kernel))
        reduced = torch.stack(reduced, dim=1)
        reduced = reduced if sr.bias is None else reduced + sr.bias
        over = 2 if isinstance(norm, nn.LayerNorm) else 1
        variance, mean = torch.var_mean(reduced, dim=over, keepdim=True, correction=0)
        reduced = (reduced - mean) / (variance + 1e-5).sqrt()
        if isinstance(norm, nn.LayerNorm):
            reduced = reduced * norm.weight + norm.bias
        x = torch.cat([x[:, :P], reduced], dim=1)
    keys_values = x @ kv.weight.T if kv.bias is None else x @ kv.weight.T + kv.bias
    k, v = keys_values.unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    return softmax_naive(q, k if k_norm is None else k_norm(k), v, scale, None, dropout_p)


def spatial_reduction_attention(
    x: torch.Tensor,
    q: torch.Tensor,
    sr: nn.Conv2d | None,
    norm: nn.Module | None,
    kv: nn.Linear,
    grid_size: tuple[int, int],
    scale: float,
    dropout_p: float = 0.0,
    k_norm: nn.Module | None = None,
) -> torch.Tensor:
    """x (B, P + H*W, dim) and q (B, heads, P + H*W, d) -> (B, heads, P + H*W, d).

    W_S is `sr`, and `kv` gives keys and values side by side; without `sr` and `norm` they come from x itself.
    `k_norm` normalizes the keys.
    """
    if sr is not None and norm is not None:
        x = spatial_reduction(x, sr, norm, grid_size)
    k, v = (split_heads(part, q.shape[1]) for part in kv(x).chunk(2, dim=-1))
    if k_norm is not None:
        k = norm_heads(k_norm, k).to(v.dtype)
    return softmax_attention(q, k, v, scale, None, dropout_p)


def spatial_reduction(x: torch.Tensor, sr: nn.Conv2d, norm: nn.Module, grid_size: tuple[int, int]) -> torch.Tensor:
    """SR(x): tokens (B, P + H*W, C) -> prefix tokens and the coarse grid, (B, P + h*w, C).

    h and w are H // R and W // R, but at least 1.
    """
    (H, W), R = grid_size, sr.stride[0]
    prefix, grid = x.split([x.shape[1] - H * W, H * W], dim=1)
    image = pad(grid.mT.unflatten(2, grid_size), (0, max(R - W, 0), 0, max(R - H, 0)))
    reduced = norm(sr(image).flatten(2).mT)
    return torch.cat([prefix.to(reduced.dtype), reduced], dim=1)


class _TokenNorm(nn.Module):
    """ViL's InstanceNorm: mean 0 and variance 1 in every channel over the tokens, without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, C) -> (B, N, C)."""
        with no_autocast(x):
            wide = x.to(wide_dtype(x))
            return F.layer_norm(wide.mT, (x.shape[1],)).mT.to(x.dtype)


@register_mixer('srformer')
class SRFormer(TokenMixer):
    """Spatial-reduction attention with ratio `sr_ratio`, followed by `norm` 'layer' (PVT) or 'instance' (ViL).

    PVT's reduction has a bias, ViL's does not. With `reduce_at_1` the 1 x 1 convolution and the norm also act at
    `sr_ratio=1`, as in ViL's code; PVT leaves them out. Parameter names are those of timm's PVT.
    """

    attn_weights = True
    has_qk_norm = True
    has_reduction = True
    op = staticmethod(spatial_reduction_attention)
    op_naive = staticmethod(spatial_reduction_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        sr_ratio: int = 2,
        norm: str = 'layer',
        reduce_at_1: bool = False,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        qk_norm: bool = False,
        norm_layer: Callable[..., nn.Module] = nn.LayerNorm,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, attn_drop=attn_drop, **kwargs)
        if norm not in ('layer', 'instance'):
            raise ValueError(f"norm of srformer is 'layer' or 'instance', not {norm!r}.")
        if sr_ratio < 1:
            raise ValueError(f'sr_ratio must be at least 1, not {sr_ratio}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias, **dd)
        self.q_norm = norm_layer(dim // num_heads, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(dim // num_heads, **dd) if qk_norm else nn.Identity()
        self.sr = self.norm = None
        if sr_ratio > 1 or reduce_at_1:
            self.sr = nn.Conv2d(dim, dim, sr_ratio, stride=sr_ratio, bias=norm == 'layer', **dd)
            self.norm = nn.LayerNorm(dim, **dd) if norm == 'layer' else _TokenNorm()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def inherit_from(self, parent: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
        """The layers of queries, and of keys and values."""
        return split_qkv(parent, self.dim, q=slice(0, 1), kv=slice(1, 3))

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        q = self.q(x)
        # under autocast a norm returns float32
        q = norm_heads(self.q_norm, split_heads(q, self.num_heads)).to(q.dtype)
        dropout_p = self.attn_drop.p if self.training else 0.0
        x = self.op(x, q, self.sr, self.norm, self.kv, grid_size, self.scale, dropout_p, self.k_norm)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))
