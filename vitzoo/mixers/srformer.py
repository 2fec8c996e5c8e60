"""Spatial-reduction attention: softmax attention whose keys and values come from a coarser grid.

    out_i = softmax(scale * q_i . K(SR(x))) V(SR(x)),  SR(x) = Norm(W_S (R x R tokens of x, concatenated))

Quadratic in the number of tokens, R^2 times cheaper than softmax: O(N^2 dim / R^2). As in the official code, rows and
columns behind the last whole patch are in no key (they are queries still); a grid smaller than a patch, which that code
refuses, is filled up with zeros. Prefix tokens bypass reduction and norm, as in ViL. With R = 1 there is no reduction
and this is softmax attention. Queries come from the tokens and keys from the reduced map, so CvT's convolutional
projection does not apply: the reduction is one. Pyramid Vision Transformer, section 3.3,
https://arxiv.org/abs/2102.12122
"""

import torch
from torch import nn
from torch.nn import functional as F

from ._qkv import split_heads
from .base import TokenMixer, no_autocast, register_mixer
from .softmax import softmax_attention

__all__ = ['SRFormer', 'spatial_reduction', 'spatial_reduction_naive']


def spatial_reduction_naive(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grid_size: tuple[int, int]
) -> torch.Tensor:
    """Patch by patch; arguments as `spatial_reduction`."""
    (H, W), R = grid_size, weight.shape[-1]
    P = x.shape[1] - H * W
    image = x[:, P:].unflatten(1, grid_size)
    reduced = []
    for top in range(0, max(H - R, 0) + 1, R):
        for left in range(0, max(W - R, 0) + 1, R):
            patch = image[:, top : top + R, left : left + R]  # (B, <= R, <= R, C)
            kernel = weight[:, :, : patch.shape[1], : patch.shape[2]]
            reduced.append(torch.einsum('bhwc,dchw->bd', patch, kernel))
    reduced = torch.stack(reduced, dim=1)
    return torch.cat([x[:, :P], reduced if bias is None else reduced + bias], dim=1)


def spatial_reduction(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grid_size: tuple[int, int]
) -> torch.Tensor:
    """Tokens (B, P + H*W, C), weight (C, C, R, R) -> tokens of the coarse grid (B, P + h*w, C).

    h and w are H // R and W // R, but at least 1.
    """
    (H, W), R = grid_size, weight.shape[-1]
    prefix, grid = x.split([x.shape[1] - H * W, H * W], dim=1)
    image = F.pad(grid.mT.unflatten(2, grid_size), (0, max(R - W, 0), 0, max(R - H, 0)))
    reduced = F.conv2d(image, weight, bias, stride=R).flatten(2).mT
    return torch.cat([prefix.to(reduced.dtype), reduced], dim=1)


class TokenNorm(nn.Module):
    """ViL's InstanceNorm: every channel has mean 0 and variance 1 over the tokens; no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, C) -> (B, N, C)."""
        with no_autocast(x):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            return F.layer_norm(wide.mT, (x.shape[1],)).mT.to(x.dtype)


@register_mixer('srformer')
class SRFormer(TokenMixer):
    """Spatial-reduction attention with ratio `sr_ratio` and `norm` 'layer' (PVT) or 'instance' (ViL) behind it.

    ViL's reduction has no bias, PVT's has. Parameter names are those of timm's PVT.
    """

    attn_weights = True
    op = staticmethod(spatial_reduction)
    op_naive = staticmethod(spatial_reduction_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        sr_ratio: int = 2,
        norm: str = 'layer',
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, attn_drop=attn_drop, **kwargs)
        if norm not in ('layer', 'instance'):
            raise ValueError(f"norm of srformer is 'layer' or 'instance', not {norm!r}.")
        if sr_ratio < 1:
            raise ValueError(f'sr_ratio must be at least 1, not {sr_ratio}.')
        dd = {'device': device, 'dtype': dtype}
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias, **dd)
        self.sr = self.norm = None
        if sr_ratio > 1:
            self.sr = nn.Conv2d(dim, dim, sr_ratio, stride=sr_ratio, bias=norm == 'layer', **dd)
            self.norm = nn.LayerNorm(dim, **dd) if norm == 'layer' else TokenNorm()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        q = split_heads(self.q(x), self.num_heads)
        k, v = (split_heads(part, self.num_heads) for part in self.kv(self.reduce(x, grid_size)).chunk(2, dim=-1))
        dropout_p = self.attn_drop.p if self.training else 0.0
        x = softmax_attention(q, k, v, self.scale, None, dropout_p)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))

    def reduce(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """The tokens that become keys and values, (B, P + h*w, C)."""
        if self.sr is None:
            return x
        P = self.num_prefix_tokens
        reduced = self.op(x, self.sr.weight, self.sr.bias, grid_size)
        grid = self.norm(reduced[:, P:])
        return torch.cat([reduced[:, :P].to(grid.dtype), grid], dim=1)
