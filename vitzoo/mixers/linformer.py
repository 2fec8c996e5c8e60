"""Linformer: softmax attention over r learned sums of the keys and of the values.

    out_i = softmax(scale * q_i . (E^T K)) (F^T V),  E, F of shape (N, r)

Linear in the number of tokens: O(N r dim). E and F have a row for each token, so a layer is bound to its grid; on a new
one the rows of the grid are resampled in two dimensions and divided by the growth of the number of tokens, which keeps
the scale of the sums. Prefix tokens are ordinary tokens, whose rows do not change. With r = N and E = F = I it is
softmax attention. Linformer, equation 7 and section 4, https://arxiv.org/abs/2006.04768
"""

from typing import Any

import torch
from torch import nn
from torch.types import Device

from ._grid import resample_rows
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Linformer', 'linformer_attention', 'linformer_naive']


def linformer_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    proj_k: torch.Tensor, proj_v: torch.Tensor, scale: float, dropout_p: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """The sums over tokens written out; arguments as `linformer_attention`."""
    k_sums = (proj_k.unsqueeze(-1) * k.unsqueeze(3)).sum(dim=2)  # (B, heads, r, d)
    v_sums = (proj_v.unsqueeze(-1) * v.unsqueeze(3)).sum(dim=2)
    return softmax_naive(q, k_sums, v_sums, scale, None, dropout_p)


def linformer_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    proj_k: torch.Tensor, proj_v: torch.Tensor, scale: float, dropout_p: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """q, k, v (B, heads, N, d) and projections (heads or 1, N, r) -> (B, heads, N, d)."""
    return softmax_attention(q, proj_k.mT @ k, proj_v.mT @ v, scale, None, dropout_p)


@register_mixer('linformer')
class Linformer(QKVMixer):
    """Linformer attention with `rank` r.

    `share_kv` shares one projection between keys and values, `share_heads` between heads.
    """

    attn_weights = True
    grid_bound = True
    op = staticmethod(linformer_attention)
    op_naive = staticmethod(linformer_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rank: int = 64,
        share_kv: bool = False,
        share_heads: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rank < 1:
            raise ValueError(f'rank of linformer must be at least 1, not {rank}.')
        num_tokens = self.num_prefix_tokens + self.grid_size[0] * self.grid_size[1]
        shape = (1 if share_heads else num_heads, num_tokens, rank)
        self.proj_k = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.proj_v = None if share_kv else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        for name in self.projections():
            nn.init.uniform_(getattr(self, name), -(rank**-0.5), rank**-0.5)

    def projections(self) -> list[str]:
        """Names of the projections."""
        return ['proj_k'] if self.proj_v is None else ['proj_k', 'proj_v']

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        self.check_grid(grid_size)
        proj_v = self.proj_k if self.proj_v is None else self.proj_v
        return self.op(q, k, v, self.proj_k, proj_v, self.scale, self.dropout_p)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        old_size, P = self.grid_size, self.num_prefix_tokens
        super().set_input_size(grid_size)
        growth = self.grid_size[0] * self.grid_size[1] / (old_size[0] * old_size[1])
        for name in self.projections():
            rows = resample_rows(getattr(self, name), self.grid_size, old_size, P)
            rows.data[:, P:] /= growth
            setattr(self, name, rows)
