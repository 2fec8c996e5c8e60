"""Gradient checkpointing of a block: its activations are recomputed in the backward pass, its statistics are not."""

from contextlib import nullcontext
from typing import Any

import torch
from timm.models import checkpoint
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def recompute_block(block: nn.Module, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Call `block(x, *args)` and recompute its activations in the backward pass.

    BatchNorm updates its running statistics once, as without checkpointing.
    """
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    # torch.compile takes no such context and needs none: it does not repeat the update of a buffer
    if not norms or torch.compiler.is_compiling():
        return checkpoint(block, x, *args)
    contexts = nullcontext(), _KeepStatistics(norms)
    return checkpoint(block, x, *args, use_reentrant=False, context_fn=lambda: contexts)


class _KeepStatistics:
    """A context in which BatchNorm in training mode leaves its buffers as they are; can be entered again."""

    def __init__(self, norms: list[_BatchNorm]) -> None:
        self.norms = norms

    def __enter__(self) -> None:
        self.momenta = [norm.momentum for norm in self.norms]
        self.counts = [norm.num_batches_tracked for norm in self.norms]
        for norm, count in zip(self.norms, self.counts):
            norm.momentum = 0.0
            # a count that is thrown away; SyncBatchNorm does not accept None, and a BatchNorm without statistics has it
            norm.num_batches_tracked = count if count is None else torch.zeros_like(count)

    def __exit__(self, *exc_info: object) -> None:
        for norm, momentum, count in zip(self.norms, self.momenta, self.counts):
            norm.momentum, norm.num_batches_tracked = momentum, count
