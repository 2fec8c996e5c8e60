"""Rotary positions of a grid, which rotate its queries and keys."""

from typing import NamedTuple

import torch
from timm.layers import apply_rot_embed_cat

__all__ = ['Rope']


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
