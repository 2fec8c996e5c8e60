"""A learned position of each grid token that is added to its key."""

from typing import Any

import torch
from torch import nn
from torch.types import Device

from ._grid import resample_rows
from ._kernel_mixer import KernelMixer

__all__ = ['KeyPositionMixer']


class KeyPositionMixer(KernelMixer):
    """A mixer that takes `pos_embed`: a learned position of each grid token, added to its key, which starts at 0.

    It is made for one grid, and `set_input_size` resamples it. Prefix tokens have none.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        pos_embed: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.pos_embed = None
        if pos_embed:
            self.grid_bound = True
            shape = (num_heads, self.grid_size[0] * self.grid_size[1], self.head_dim)
            self.pos_embed = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    def add_positions(self, k: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """Keys (B, heads, P + H*W, d), those of grid tokens with their positions."""
        if self.pos_embed is None:
            return k
        self.check_grid(grid_size)
        P = k.shape[2] - self.pos_embed.shape[1]
        return torch.cat([k[:, :, :P], k[:, :, P:] + self.pos_embed.to(k.dtype)], dim=2)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        old_size = self.grid_size
        super().set_input_size(grid_size)
        if self.pos_embed is not None:
            self.pos_embed = resample_rows(self.pos_embed, self.grid_size, old_size, 0)

    def no_weight_decay(self) -> set[str]:
        names = set() if self.pos_embed is None else {'pos_embed'}
        return super().no_weight_decay() | names
