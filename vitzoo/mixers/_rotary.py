"""Rotary position embedding: neighbouring pairs of channels rotated by an angle that depends on the position."""

import torch

from ._numerics import no_autocast, wide_dtype

__all__ = ['rotate_pairs']


def rotate_pairs(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate the channels (2c, 2c + 1) of x (B, heads, N, d) by angle (N, d / 2) or (heads, N, d / 2).

    Computed in float32 or wider. RoFormer, https://arxiv.org/abs/2104.09864
    """
    with no_autocast(x):
        dtype = wide_dtype(x)
        cos, sin = angle.to(dtype).cos(), angle.to(dtype).sin()
        even, odd = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)
