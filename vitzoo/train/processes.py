"""Errors, buffers and BatchNorm statistics that all processes of a run must share."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from timm.utils import distribute_bn
from torch import nn

from vitzoo.errors import UserError
from vitzoo.train.run import Run


@contextmanager
def raise_together(accelerator: Accelerator) -> Iterator[None]:
    """Raise a UserError of any process on all of them, at the end of the block.

    Otherwise a launcher could kill rank 0 because of the error of another, before rank 0 prints it.
    """
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    message = next(filter(None, gather_object([message])), None)
    if message:
        raise UserError(message)


def share_statistics(run: Run) -> None:
    """Give BatchNorm the same running statistics on all processes, as timm does after every epoch.

    Not that of averaged weights, which averages the statistics of the first process in every step: those of the others
    would be lost when a run resumes within an epoch.
    """
    how, world_size = run.recipe.dist_bn, run.accelerator.num_processes
    # synchronized statistics are the same already
    if world_size == 1 or how == 'none' or run.recipe.sync_bn:
        return
    distribute_bn(run.raw_model, world_size, reduce=how == 'reduce')


def share_buffers(run: Run, model: nn.Module) -> None:
    """Give all processes the buffers of rank 0, which are saved; they may differ."""
    if run.accelerator.num_processes > 1:
        for buffer in model.buffers():
            buffer.copy_(broadcast(buffer))
