"""What mixers draw at random and keep: each draw follows from (seed, layer, index) and from nothing else."""

import numpy as np
import torch

__all__ = ['draw_generator']


def draw_generator(seed: int, layer: int, index: int = 0) -> torch.Generator:
    """A CPU generator of its own for the draw `index` of a layer.

    Two builds of a model, all processes of a run and a resumed one draw the same, whatever else was drawn from torch's
    own generator. Raises ValueError for a negative number.
    """
    if min(seed, layer, index) < 0:
        raise ValueError(f'seed, layer and index of a draw are at least 0, not {seed}, {layer} and {index}.')
    # torch's generators start from 32 bits, into which numpy mixes the three
    (state,) = np.random.SeedSequence((seed, layer, index)).generate_state(1)
    return torch.Generator(device='cpu').manual_seed(int(state))
