"""Training that cannot make a student worse: the best state by the error on held-out images, the start included."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vitzoo.data.loader import STEP_STREAM, seed_everything
from vitzoo.errors import UserError
from vitzoo.mixers import set_step
from vitzoo.transfer.attention import images_of

if TYPE_CHECKING:
    from accelerate import Accelerator

# fraction of the steps in which the learning rate rises
_WARMUP = 0.05


class StepBatches:
    """Batches of a vitzoo train loader as a function of the step, so that a resumed stage sees the same images."""

    def __init__(self, loader: DataLoader, normalize: Callable[[Tensor], Tensor] = lambda images: images) -> None:
        self.loader, self.normalize = loader, normalize

    def from_step(self, step: int) -> Iterator[Tensor]:
        """Batches from a step onwards, epoch after epoch."""
        batches = self.loader.batch_sampler
        while True:
            epoch, first = divmod(step, batches.steps_per_epoch)
            batches.start_at(epoch, first)
            for batch in self.loader:
                yield self.normalize(images_of(batch))
                step += 1


def descend(
    student: nn.Module,
    groups: list[dict],
    loader: Iterable,
    backward: Callable[[Tensor], None],
    evaluate: Callable[[], dict],
    *,
    steps: int,
    eval_every: int,
    accelerator: 'Accelerator | None' = None,
    state_file: Path | None = None,
    progress: Callable[[dict], None] | None = None,
) -> list[dict]:
    """Train parameter groups with AdamW, and leave the student in the state with the smallest error.

    Args:
        groups: Parameter groups with their learning rates; all other parameters stay as they are.
        loader: Batches of images, or tuples that begin with them; iterated again when it ends.
        backward: Adds the gradients of a batch.
        evaluate: Returns measurements, the one that decides under 'feature_error'.
        eval_every: Steps between evaluations; there is one before the first step and one after the last.
        accelerator: Averages the gradients of its processes; None for a single process.
        state_file: Written after each evaluation; if it exists, training continues from it.
        progress: Called with each row of measurements.

    Returns:
        The measurements, with their `step` and whether they are the `best` so far; only those of the start if there are
        no parameters.

    Raises:
        UserError: The error is no longer finite; the student is in its best state.
        ValueError: The loader has no images.
    """
    device = next(student.parameters()).device
    trainable = [parameter for group in groups for parameter in group['params']]
    if not trainable:
        row = dict(step=0, **evaluate(), best=True)
        _report(progress, row)
        return [row]
    flags = {parameter: parameter.requires_grad for parameter in student.parameters()}
    for parameter in flags:
        parameter.requires_grad_(False)
    for parameter in trainable:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    rates = [group['lr'] for group in groups]
    state = _load_state(state_file, device)
    if state is None:
        row = dict(step=0, **evaluate(), best=True)
        state = dict(step=0, history=[row], best=_snapshot(student, trainable))
        _report(progress, row)
    else:
        _restore(student, trainable, state['now'])
        optimizer.load_state_dict(state['optimizer'])
    batches = _batches(loader, state['step'])
    was_training = student.training
    try:
        for step in range(state['step'], steps):
            student.train()
            set_step(student, step)
            # dropout and stochastic depth, also of a resumed stage
            seed_everything(STEP_STREAM, step, 0 if accelerator is None else accelerator.process_index)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group['lr'] = rate * rate_factor(step, steps)
            backward(next(batches).to(device, non_blocking=True))
            _average_gradients(trainable, accelerator)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % eval_every and step + 1 < steps:
                continue
            student.eval()
            row = dict(step=step + 1, **evaluate())
            if not math.isfinite(row['feature_error']):
                _restore(student, trainable, state['best'])
                tried = ' and '.join(f'{rate:g}' for rate in rates)
                raise UserError(
                    f'the error of the final tokens is {row["feature_error"]} after step {step + 1} at learning rates'
                    f' of {tried}; halve them'
                )
            row['best'] = row['feature_error'] < min(old['feature_error'] for old in state['history'])
            state['history'].append(row)
            _report(progress, row)
            if row['best']:
                state['best'] = _snapshot(student, trainable)
            state['step'] = step + 1
            now = dict(now=_snapshot(student, trainable), optimizer=optimizer.state_dict())
            _save_state(state_file, state | now, accelerator)
        _restore(student, trainable, state['best'])
    finally:
        student.train(was_training)
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
    return state['history']


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _batches(loader: Iterable, step: int) -> Iterator[Tensor]:
    if isinstance(loader, StepBatches):
        return loader.from_step(step)
    return islice(_repeat(loader), step, None)


def _repeat(loader: Iterable) -> Iterator[Tensor]:
    while True:
        count = 0
        for batch in loader:
            yield images_of(batch)
            count += 1
        if not count:
            raise ValueError('The loader has no images.')


def _average_gradients(parameters: list[nn.Parameter], accelerator: 'Accelerator | None') -> None:
    if accelerator is None or accelerator.num_processes == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = accelerator.reduce(parameter.grad, reduction='mean')


def _snapshot(student: nn.Module, trainable: list[nn.Parameter]) -> dict:
    # buffers too: random features may be redrawn
    buffers = {name: buffer.detach().clone() for name, buffer in student.named_buffers()}
    return dict(parameters=[parameter.detach().clone() for parameter in trainable], buffers=buffers)


@torch.no_grad()
def _restore(student: nn.Module, trainable: list[nn.Parameter], snapshot: dict) -> None:
    for parameter, value in zip(trainable, snapshot['parameters'], strict=True):
        parameter.copy_(value)
    for name, buffer in student.named_buffers():
        buffer.copy_(snapshot['buffers'][name])


def _load_state(path: Path | None, device: torch.device) -> dict | None:
    if path is None or not path.is_file():
        return None
    return torch.load(path, map_location=device, weights_only=True)


def _save_state(path: Path | None, state: dict, accelerator: 'Accelerator | None') -> None:
    if path is None or not (accelerator is None or accelerator.is_main_process):
        return
    partial = path.with_name(f'.{path.name}')
    torch.save(state, partial)
    partial.replace(path)


def _report(progress: Callable[[dict], None] | None, row: dict) -> None:
    if progress is not None:
        progress(row)
