"""The training and evaluation modes of a model's modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Give every module its mode back at the end; some of a model in training mode may be frozen in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
