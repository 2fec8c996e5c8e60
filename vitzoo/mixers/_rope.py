"""Rotary positions of a grid, which rotate pairs of channels of its queries and keys."""

from typing import NamedTuple

import torch
from timm.layers import apply_rot_embed_cat

from ._numerics import no_autocast, wide_dtype

__all__ = ['Rope', 'rotate_pairs']


class Rope(NamedTuple):
    """Sines and cosines of the angles of every grid token, as timm's rotary embeddings return them.

    After the rotation by R_i and R_j the score of two tokens, (R_i q_i) . (R_j k_j), depends on their offset only.
    RoFormer, https://arxiv.org/abs/2104.09864; on two axes: https://arxiv.org/abs/2403.13298

    Attributes:
        embed: Sines, then cosines, (H*W, 2 head_dim) or, for each head, (heads, H*W, 2 head_dim).
        half: Whether channel c is rotated with c + head_dim / 2 (DINOv3) instead of the next one.
    """

    embed: torch.Tensor
    half: bool = False

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys (B, heads, P + H*W, head_dim), of which the P prefix tokens stay as they are."""
        P = x.shape[2] - self.embed.shape[-2]
        grid = apply_rot_embed_cat(x[:, :, P:], self.embed, half=self.half)
        return torch.cat([x[:, :, :P], grid], dim=2)


def rotate_pairs(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate the channels (2c, 2c + 1) of x (B, heads, N, d) by angle (N, d / 2) or (heads, N, d / 2).

    Computed in float32 or wider. RoFormer, https://arxiv.org/abs/2104.09864
    """
    with no_autocast(x):
        dtype = wide_dtype(x)
        cos, sin = angle.to(dtype).cos(), angle.to(dtype).sin()
        even, odd = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)
