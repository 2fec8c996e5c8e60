"""Numerical settings shared by the mixers: the base of exponentials, the size of a CPU cache, and autocast."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ['CACHED', 'LOG2_E', 'no_autocast']

# exponentials are to base 2, which PyTorch computes several times faster on a CPU
LOG2_E = math.log2(math.e)
# float32 elements that fit in one core's L2 cache
CACHED = 2**18


def no_autocast(x: torch.Tensor) -> AbstractContextManager:
    """Disable autocast on the device of `x`, so that operations keep the dtype of their inputs."""
    # the meta device has no autocast and raises
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
