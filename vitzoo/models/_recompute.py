"""Gradient checkpointing: activations are recomputed in the backward pass, statistics of BatchNorm are not."""

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


def update_statistics_once(model: nn.Module) -> None:
    """Let BatchNorm update its running statistics once, also in timm's blocks, which do not use `recompute_block`."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(_keep_statistics)
            # recomputation ends by an exception as soon as it has all activations
            module.register_forward_hook(_release_statistics, always_call=True)


def _keep_statistics(norm: Any, inputs: tuple) -> None:
    # only a recomputation calls a module during the backward pass
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        # kept by the module, so that a copy of the model has its own
        norm.__dict__['kept_statistics'] = kept = _KeepStatistics([norm])
        kept.__enter__()


def _release_statistics(norm: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    if not torch.compiler.is_compiling():
        kept = norm.__dict__.pop('kept_statistics', None)
        if kept is not None:
            kept.__exit__()


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
