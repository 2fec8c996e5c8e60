"""One optimizer step: gradients of a global batch, accumulated over micro-batches, and the update.

The loss and the stop and save flags are all-reduced asynchronously during the backward pass, so the device never waits
for them. All processes see the same flags at the same step, and a loss that is not finite ends the run before any
weight changes.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from timm.data import Mixup
from timm.data.mixup import mixup_target
from timm.models import model_parameters
from timm.utils import dispatch_clip_grad
from torch import Tensor, distributed

from vitzoo.data.loader import STEP_STREAM, seed_everything
from vitzoo.errors import DivergenceError, RankError, UserError
from vitzoo.metrics.finite import find_non_finite
from vitzoo.mixers import set_step
from vitzoo.train.run import Run


class StepStatus(NamedTuple):
    """The mean loss of a step, and whether any process was asked to stop or to save."""

    loss: float
    stop: bool
    save: bool


def train_step(run: Run, micro_batches: Iterator, stop: bool = False, save: bool = False) -> StepStatus:
    """Train on one global batch; `stop` and `save` are the flags of this process.

    Raises:
        UserError: An image cannot be read.
        DivergenceError: The loss is not finite.
    """
    accelerator, accum_steps = run.accelerator, run.plan.accum_steps
    run.scheduler.step_update(run.step)
    set_step(run.raw_model, run.step)
    total = torch.zeros((), device=accelerator.device)
    for micro_step in range(accum_steps):
        images, target = (tensor.to(accelerator.device, non_blocking=True) for tensor in next_batch(micro_batches))
        images = run.normalize(images)
        seed_step(run, micro_step)
        if run.mixup is not None:
            target = mix(run.mixup, images, target)
        is_last = micro_step == accum_steps - 1
        # gradients are all-reduced once per step
        with nullcontext() if is_last else accelerator.no_sync(run.model):
            loss = _compute_loss(run, images, target) / accum_steps
            total += loss.detach()
            if is_last:
                reduce = StatusReduce(accelerator, total, stop, save)
            accelerator.backward(loss)
    status = reduce.wait()
    if not math.isfinite(status.loss):
        raise DivergenceError(explain_divergence(run, images, status.loss))
    clip_gradients(run)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    run.losses.append(status.loss)
    if run.ema is not None:
        run.ema.update(run.full_model.gather(), step=run.step)
    return status


def _compute_loss(run: Run, images: Tensor, target: Tensor) -> Tensor:
    try:
        return run.task(images, target)['loss']
    except ValueError as error:
        if 'Expected more than 1 value per channel' not in str(error):
            raise
        raise UserError(
            f'BatchNorm cannot train on {len(images)} image with features of one pixel; increase batch_size, or reduce'
            f' grad_accum_steps or the number of processes'
        ) from error


def next_batch(micro_batches: Iterator) -> list[Tensor]:
    """The next images and targets."""
    try:
        return next(micro_batches)
    except UserError as error:
        raise RankError(str(error)) from error


def seed_step(run: Run, micro_step: int) -> None:
    """Seed mixup, dropout and stochastic depth of one micro-batch."""
    position = micro_step * run.plan.world_size + run.accelerator.process_index
    seed_everything(run.recipe.seed, STEP_STREAM, run.step, position)


def mix(mixup: Mixup, images: Tensor, target: Tensor) -> Tensor:
    """Mix images in place and return soft targets; the last image of an odd batch has no partner and stays unmixed."""
    even = len(images) // 2 * 2
    soft = [mixup(images[:even], target[:even])[1]] if even else []
    if even < len(images):
        smoothing, multi_label = mixup.label_smoothing, mixup.multi_label
        soft.append(mixup_target(target[even:], mixup.num_classes, smoothing=smoothing, multi_label=multi_label))
    return torch.cat(soft)


def clip_gradients(run: Run) -> None:
    """Clip the gradients, if the recipe has a threshold."""
    threshold, mode = run.recipe.clip_grad, run.recipe.clip_mode
    if not threshold:
        return
    run.accelerator.unscale_gradients(run.optimizer)
    # AGC excludes the head, as in its paper and in timm
    dispatch_clip_grad(model_parameters(run.raw_model, exclude_head=mode == 'agc'), threshold, mode)


class StatusReduce:
    """Asynchronous all-reduce of (loss, stop, save), on CUDA in a side stream."""

    def __init__(self, accelerator: Accelerator, loss: Tensor, stop: bool, save: bool) -> None:
        self.world_size, self.device = accelerator.num_processes, accelerator.device
        # a copy of a tensor from the CPU would wait for the forward pass
        flags = (loss.new_full((), float(flag), dtype=torch.float32) for flag in (stop, save))
        values = torch.stack([loss.float(), *flags])
        self.work = None
        if self.device.type != 'cuda':
            self.values = values
            self.work = distributed.all_reduce(values, async_op=True) if self.world_size > 1 else None
            return
        # reading from the main stream would wait for the backward pass
        self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if self.world_size > 1:
                distributed.all_reduce(values)
            self.values = values.to('cpu', non_blocking=True)
        values.record_stream(self.stream)

    def wait(self) -> StepStatus:
        """Wait for the result."""
        if self.work is not None:
            self.work.wait()
        elif self.device.type == 'cuda':
            self.stream.synchronize()
        loss, stop, save = self.values.tolist()
        return StepStatus(loss / self.world_size, stop > 0, save > 0)


def explain_divergence(run: Run, images: Tensor, loss: float) -> str:
    """Describe at which step and in which layer values stopped being finite, and what to try."""
    model = run.full_model.gather()
    seed_step(run, run.plan.accum_steps - 1)
    with run.accelerator.autocast():
        sources = gather_object([find_non_finite(model, images)])
    source = next(filter(None, sources), 'all layer outputs are finite, only the loss is not')
    remedies = run.remedies.format(f'{run.plan.lr / 2:.2g}')
    return (
        f'the loss is {loss} at step {run.step + 1}: {source}. No weight was changed by this step; try {remedies} or,'
        f' with mixed precision, --amp-dtype bfloat16'
    )
