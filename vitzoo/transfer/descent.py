"""Training that cannot make a student worse: the best state by the error on held-out images, the start included."""

import math
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import distribute_bn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vitzoo._files import replace_file
from vitzoo._modes import restored_modes
from vitzoo.data.loader import STEP_STREAM, seed_everything, stop_workers
from vitzoo.errors import DivergenceError, UserError
from vitzoo.mixers import set_step
from vitzoo.transfer.attention import images_of

if TYPE_CHECKING:
    from accelerate import Accelerator

# fraction of the steps in which the learning rate rises
_WARMUP = 0.05


class StepBatches:
    """Batches of a vitzoo train loader as a function of the step, so that a resumed stage sees the same images.

    They are normalized on the device: images of bytes are a quarter of the copy.
    """

    def __init__(self, loader: DataLoader, normalize: Callable[[Tensor], Tensor] = lambda images: images) -> None:
        self.loader, self.normalize = loader, normalize

    def from_step(self, step: int, device: torch.device) -> Iterator[Tensor]:
        """Batches on a device from a step onwards, epoch after epoch."""
        batches: Any = self.loader.batch_sampler
        while True:
            epoch, first = divmod(step, batches.steps_per_epoch)
            batches.start_at(epoch, first)
            for batch in self.loader:
                yield self.normalize(images_of(batch).to(device, non_blocking=True))
                step += 1


class WarmupCosine(Scheduler):
    """A schedule by step: learning rates rise linearly from their first step on, and follow a cosine to zero."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.steps, self.warmup = steps, max(1, round(_WARMUP * steps))
        super().__init__(optimizer, 'lr', t_in_epochs=False)

    def _get_lr(self, t: int) -> list[float]:
        factor = (t + 1) / self.warmup
        if t >= self.warmup:
            factor = 0.5 * (1 + math.cos(math.pi * (t - self.warmup) / max(1, self.steps - self.warmup)))
        return [rate * factor for rate in self.base_values]


def descend(
    student: nn.Module,
    groups: list[dict],
    loader: Iterable | StepBatches,
    backward: Callable[[Tensor], None],
    evaluate: Callable[[], dict],
    *,
    steps: int,
    eval_every: int,
    seed: int = 0,
    accelerator: 'Accelerator | None' = None,
    state_file: Path | None = None,
    progress: Callable[[dict], None] | None = None,
) -> list[dict]:
    """Train parameter groups with AdamW, and leave the student in the state with the smallest error.

    Args:
        groups: Parameter groups with their learning rates; all other parameters stay as they are.
        loader: Batches of images, or tuples that begin with them; iterated again when it ends.
        backward: Adds the gradients of a batch.
        evaluate: Returns measurements, the one that decides under 'output_error'.
        eval_every: Steps between evaluations; there is one before the first step and one after the last.
        seed: Of dropout, stochastic depth and other random numbers of the forward pass.
        accelerator: Averages the gradients of its processes, and has the precision; None for a single process.
        state_file: Written after each evaluation; if it exists, training continues from it.
        progress: Called with each row of measurements.

    Returns:
        The measurements, with their `step` and whether they are the `best` so far; only those of the start if there are
        no parameters.

    Raises:
        DivergenceError: The error is no longer finite; the student is in its best state.
        ValueError: The loader has no images.
        UserError: The state cannot be written, such as on a full disk.
    """
    with _training_only(student, groups), _restored_generators(next(student.parameters()).device):
        descent = _Descent(student, groups, evaluate, steps, seed, accelerator, state_file, progress)
        batches = _batches(loader, descent.step, descent.device)
        try:
            while descent.step < steps and groups:
                descent.train_step(backward, next(batches))
                if descent.step % eval_every == 0 or descent.step == steps:
                    descent.measure()
        finally:
            # they would hold batches through the stages that follow
            if isinstance(loader, StepBatches):
                stop_workers(loader.loader)
        descent.restore(descent.best)
    return descent.history


class _Descent:
    """The state of `descend`, and its pieces."""

    def __init__(
        self,
        student: nn.Module,
        groups: list[dict],
        evaluate: Callable[[], dict],
        steps: int,
        seed: int,
        accelerator: 'Accelerator | None',
        state_file: Path | None,
        progress: Callable[[dict], None] | None,
    ) -> None:
        self.student, self.evaluate, self.seed, self.accelerator = student, evaluate, seed, accelerator
        self.state_file, self.progress = state_file, progress
        self.device = next(student.parameters()).device
        self.trainable = [parameter for group in groups for parameter in group['params']]
        self.optimizer: Any = None
        self.schedule: Any = None
        if groups:
            self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
            self.schedule = WarmupCosine(self.optimizer, steps)
        self.step = 0
        self.history: list[dict] = []
        if not self._load():
            self.measure()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The accelerator's autocast, with weights that are cast again also within an autocast context of the caller.

        That keeps what it has cast: weights of another step, and with torch 2.6 also those without gradients.
        """
        torch.clear_autocast_cache()
        with nullcontext() if self.accelerator is None else self.accelerator.autocast():
            yield
        torch.clear_autocast_cache()

    def train_step(self, backward: Callable[[Tensor], None], images: Tensor) -> None:
        self.student.train()
        set_step(self.student, self.step)
        # dropout and stochastic depth, also of a resumed stage
        rank = 0 if self.accelerator is None else self.accelerator.process_index
        seed_everything(self.seed, STEP_STREAM, self.step, rank)
        self.schedule.step_update(self.step)
        with self.autocast():
            backward(images)
        _average_gradients(self.trainable, self.accelerator)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def measure(self) -> None:
        """Evaluate the student, and save its state, also as the best if it is."""
        self.student.eval()
        if self.accelerator is not None and self.accelerator.num_processes > 1:
            # each process has statistics of BatchNorm of its own images
            distribute_bn(self.student, self.accelerator.num_processes, reduce=True)
        with self.autocast():
            row = dict(step=self.step, **self.evaluate())
        if self.history:
            self._check_finite(row['output_error'])
        row['best'] = not self.history or row['output_error'] < min(old['output_error'] for old in self.history)
        self.history.append(row)
        if self.progress is not None:
            self.progress(row)
        if row['best']:
            self.best = self._snapshot()
        if self.step:
            self._save()

    @torch.no_grad()
    def restore(self, snapshot: dict) -> None:
        """Put the student into an earlier state."""
        for parameter, value in zip(self.trainable, snapshot['parameters'], strict=True):
            parameter.copy_(value)
        for name, buffer in self.student.named_buffers():
            buffer.copy_(snapshot['buffers'][name])

    def _snapshot(self) -> dict:
        # buffers too: random features may be redrawn
        buffers = {name: buffer.detach().clone() for name, buffer in self.student.named_buffers()}
        return dict(parameters=[parameter.detach().clone() for parameter in self.trainable], buffers=buffers)

    def _check_finite(self, error: float) -> None:
        if math.isfinite(error):
            return
        self.restore(self.best)
        rates = ' and '.join(f'{rate:g}' for rate in self.schedule.base_values)
        raise DivergenceError(
            f'the error of the outputs is {error} after step {self.step} at learning rates of {rates}; halve them'
        )

    def _load(self) -> bool:
        if self.state_file is None or not self.state_file.is_file():
            return False
        state = torch.load(self.state_file, map_location=self.device, weights_only=True)
        self.step, self.history, self.best = state['step'], state['history'], state['best']
        self.restore(state['now'])
        self.optimizer.load_state_dict(state['optimizer'])
        return True

    def _save(self) -> None:
        if self.state_file is not None and (self.accelerator is None or self.accelerator.is_main_process):
            state = dict(step=self.step, history=self.history, best=self.best, now=self._snapshot())
            _save_state(self.state_file, dict(state, optimizer=self.optimizer.state_dict()))


def _save_state(path: Path, state: dict) -> None:
    try:
        with replace_file(path) as partial:
            torch.save(state, partial)
    except (OSError, RuntimeError) as error:
        # torch's errors do not mention a full disk
        free = shutil.disk_usage(path.parent).free / 1e6
        raise UserError(f"cannot write '{path}' ({error}; {free:.0f} MB free); free some space and continue") from error


@contextmanager
def _training_only(student: nn.Module, groups: list[dict]) -> Iterator[None]:
    """Let only parameter groups require a gradient, and restore this and the mode of the student at the end."""
    flags = {parameter: parameter.requires_grad for parameter in student.parameters()}
    trainable = {id(parameter) for group in groups for parameter in group['params']}
    for parameter in flags:
        parameter.requires_grad_(id(parameter) in trainable)
    try:
        with restored_modes(student):
            yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


@contextmanager
def _restored_generators(device: torch.device) -> Iterator[None]:
    """Give Python, NumPy and torch the states of their generators back, which every step seeds."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == 'cuda' else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _batches(loader: Iterable | StepBatches, step: int, device: torch.device) -> Iterator[Tensor]:
    if isinstance(loader, StepBatches):
        return loader.from_step(step, device)
    return (images.to(device, non_blocking=True) for images in islice(_repeat(loader), step, None))


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
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # one all-reduce for all of them
    flat = accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), reduction='mean')
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(mean.view_as(gradient))
