"""The arguments with which a mixer calls its op."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .base import TokenMixer

__all__ = ['recorded_calls']


@contextmanager
def recorded_calls(mixer: TokenMixer) -> Iterator[list[tuple]]:
    """A list that gets the arguments of each call of the mixer's op while the context is open."""
    calls: list[tuple] = []

    def record(*args: object) -> torch.Tensor:
        calls.append(args)
        return type(mixer).op(*args)

    mixer.op = record
    try:
        yield calls
    finally:
        del mixer.op
