"""Options of the mixers of kernels and feature maps: a depthwise convolution, and keys without their mean."""

from typing import Any

import torch
from torch.types import Device

from ._grid_conv import GridConv
from ._rope import Rope
from .base import QKVMixer

__all__ = ['KernelMixer']


class KernelMixer(QKVMixer):
    """A mixer that weights tokens by a kernel of queries and keys, with two options for what kernels lack.

    `dwc` adds a 3 x 3 depthwise convolution on the grid: 'v' adds the convolved values to the mixed values, which
    restores the rank that kernels lack (FLatten, section 4.2, https://arxiv.org/abs/2308.00442), and 'qk' adds to
    queries and keys their own convolution (https://arxiv.org/abs/2605.02772). The kernels of the convolution start at
    0, so a new layer computes the same as without. Prefix tokens are not convolved; rotary positions come after it.

    `center_keys` subtracts from the keys their mean over all tokens, per sample and head. Softmax does not change if a
    constant is added to all keys; most kernels do, and the keys of trained softmax attention have a large mean
    (https://arxiv.org/abs/2605.02772). Raises ValueError for a mixer of which `ignores_mean_key` is true.
    """

    ignores_mean_key = False
    # softmax attention ignores a constant in the keys, on which most kernels depend
    start_arguments: dict[str, Any] = {'center_keys': True, 'dwc': 'v'}

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        dwc: str = 'none',
        center_keys: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if dwc not in ('none', 'v', 'qk'):
            raise ValueError(f"dwc of {type(self).__name__} is 'none', 'v' or 'qk', not {dwc!r}.")
        if center_keys and self.ignores_mean_key:
            raise ValueError(
                f'center_keys has no effect on {type(self).__name__}, whose weights do not change if a constant is '
                f'added to all keys; leave it at False.'
            )
        self.center_keys = center_keys
        if dwc == 'v':
            # the output is no longer a weighted mean of tokens
            self.token_weights = False
        self.dwc_q = self.dwc_k = self.dwc_v = None
        for name in {'none': '', 'v': 'v', 'qk': 'qk'}[dwc]:
            conv = GridConv(dim, 3, bias=False, zero_init=True, device=device, dtype=dtype)
            setattr(self, f'dwc_{name}', conv)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None) -> torch.Tensor:
        q, k, v = self.to_qkv(x, grid_size, rope)
        out = self.mix_input(x, q, k, v, grid_size)
        if self.dwc_v is not None:
            out = self.add_local(out, self.dwc_v(v, grid_size).to(out.dtype))
        return self.project(out)

    def to_qkv(
        self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().to_qkv(x, grid_size)
        if self.dwc_q is not None:
            q, k = q + self.dwc_q(q, grid_size), k + self.dwc_k(k, grid_size)
        if rope is not None:
            q, k = rope.rotate(q), rope.rotate(k)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self.center_keys:
            k = k - k.mean(dim=2, keepdim=True)
        return q, k, v

    def mix_input(
        self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> torch.Tensor:
        """`mix`, for mixers that also need the tokens x (B, N, dim), such as those with a gate."""
        return self.mix(q, k, v, grid_size)

    def add_local(self, out: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Add the convolved values (B, heads, N, d) to the mixed values."""
        return out + local
