"""Random values that mixers keep: each draw depends only on (seed, layer, index)."""

from typing import Any

import numpy as np
import torch
from torch.types import Device

from ._kernel_mixer import KernelMixer
from ._rope import Rope

__all__ = ['RandomFeatureMixer', 'draw_generator']


def draw_generator(seed: int, layer: int, index: int = 0) -> torch.Generator:
    """A CPU generator for the draw `index` of a layer, independent of torch's global generator.

    Two builds of a model, all processes of a run and a resumed run draw the same values. Raises ValueError for a
    negative number.
    """
    if min(seed, layer, index) < 0:
        raise ValueError(f'seed, layer and index of a draw must be at least 0, not {seed}, {layer} and {index}.')
    # torch generators are seeded with 32 bits, into which numpy hashes the three numbers
    (state,) = np.random.SeedSequence((seed, layer, index)).generate_state(1)
    return torch.Generator(device='cpu').manual_seed(int(state))


class RandomFeatureMixer(KernelMixer):
    """A mixer with `num_features` random features, a buffer that is saved with the weights.

    Subclasses define how features are drawn and, by `buffer_name`, the name of the buffer. The features depend on
    `seed` and the layer and, with `redraw_every`, on the training step: `set_step` draws new ones every `redraw_every`
    optimizer steps. They depend on nothing else, so all processes, the forward passes of gradient checkpointing and
    accumulation, and a resumed run agree without any further state. Until `set_step` is called, features that were
    loaded with the weights stay.
    """

    buffer_name = 'features'
    # estimates are unbiased with any constant in the keys, and were less exact with centered keys on a trained model
    start_arguments = {'dwc': 'v'}

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_features: int,
        seed: int = 0,
        redraw_every: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if num_features < 1:
            raise ValueError(f'num_features must be at least 1, not {num_features}.')
        if redraw_every < 0:
            raise ValueError(f'redraw_every must be a number of optimizer steps, or 0 for never, not {redraw_every}.')
        self.num_features = num_features
        self.seed = seed
        self.redraw_every = redraw_every
        # of the last draw in `set_step`
        self.drawn: tuple[int, torch.Tensor] | None = None
        features = self.draw_features(draw_generator(seed, self.layer))
        self.register_buffer(self.buffer_name, features.to(self.proj.weight))

    def draw_features(self, generator: torch.Generator) -> torch.Tensor:
        """Draw random features from a generator, in float32."""
        raise NotImplementedError

    def to_qkv(
        self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.redraw_every:
            self.warn_without_step(f'redraw_every={self.redraw_every}')
        return super().to_qkv(x, grid_size, rope)

    def set_step(self, step: int) -> None:
        super().set_step(step)
        if not self.redraw_every:
            return
        index = step // self.redraw_every
        if self.drawn is None or self.drawn[0] != index:
            self.drawn = index, self.draw_features(draw_generator(self.seed, self.layer, index))
        # in every step, because weights of another step may have been loaded since the draw; and in place, so that a
        # compiled model and its captured graphs see the new features
        self.get_buffer(self.buffer_name).copy_(self.drawn[1])
