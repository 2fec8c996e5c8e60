"""Diagnostics of mixers that approximate softmax attention: their relative error against exact attention."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from ._numerics import no_autocast, wide_dtype

__all__ = ['SoftmaxHealth']


class SoftmaxHealth:
    """Mixin of `QKVMixer`: compares `mix` with the attention that it approximates, if `approximates_softmax`."""

    scale: float
    approximates_softmax: bool
    mix: Callable[..., torch.Tensor]

    def softmax_target(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The exact attention that `mix` approximates; by default softmax attention over all tokens."""
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)

    def health(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """Measures of the quality of the approximation, one number per sample (B,); subclasses add their own.

        `softmax_error` is |mix - target| / |target| over all heads and tokens; the target is computed in float32 or
        wider. Raises ValueError if the mixer does not approximate softmax attention.
        """
        if not self.approximates_softmax:
            raise ValueError(f'{type(self).__name__} with these settings does not approximate softmax attention.')
        out = self.mix(q, k, v, grid_size)
        with no_autocast(q):
            dtype = wide_dtype(q)
            target = self.softmax_target(q.to(dtype), k.to(dtype), v.to(dtype)).flatten(1)
            error = torch.linalg.vector_norm(out.to(dtype).flatten(1) - target, dim=1)
            return {'softmax_error': error / torch.linalg.vector_norm(target, dim=1)}
