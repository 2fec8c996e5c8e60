"""One optimizer step: the loss of a global batch in micro-batches, its gradients, and the update.

Before the backward pass is computed the processes tell each other their loss, and whether they were asked to stop or
to save. What they heard is read when the backward pass is under way, so a device does not wait for it, all processes
know it at the same step, and a loss that is not finite stops the run before it has touched a weight.
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
from torch import Tensor, distributed, nn

from vitzoo.data.loader import STEP_STREAM, seed_everything
from vitzoo.errors import RankError, UserError
from vitzoo.mixers import set_step
from vitzoo.train.run import Run


class News(NamedTuple):
    """What the processes know together after a step: their mean loss, and what any of them was asked for."""

    loss: float
    stop: bool
    save: bool


def train_step(run: Run, micro_batches: Iterator, stop: bool = False, save: bool = False) -> News:
    """One optimizer step over one global batch; `stop` and `save` are what this process was asked for.

    Raises:
        UserError: An image cannot be read, or the loss is not finite.
    """
    accelerator, accum = run.accelerator, run.plan.accum
    run.scheduler.step_update(run.step)
    set_step(run.bare, run.step)
    total = torch.zeros((), device=accelerator.device)
    for micro in range(accum):
        images, target = (tensor.to(accelerator.device, non_blocking=True) for tensor in next_batch(micro_batches))
        images = run.normalize(images)
        seed_step(run, micro)
        if run.mixup is not None:
            target = mix(run.mixup, images, target)
        is_last = micro == accum - 1
        # gradients travel between processes once per step
        with nullcontext() if is_last else accelerator.no_sync(run.model):
            loss = run.task(images, target)['loss'] / accum
            total += loss.detach()
            if is_last:
                letter = Letter(accelerator, total, stop, save)
            accelerator.backward(loss)
    news = letter.read()
    if not math.isfinite(news.loss):
        raise UserError(explain_divergence(run, images, news.loss))
    clip_gradients(run)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    run.losses.append(news.loss)
    if run.ema is not None:
        run.ema.update(run.plain.pull(), step=run.step)
    return news


def next_batch(micro_batches: Iterator) -> list[Tensor]:
    """The next images and labels."""
    try:
        return next(micro_batches)
    except UserError as error:
        raise RankError(str(error)) from error


def seed_step(run: Run, micro: int) -> None:
    """The random numbers of one micro-batch: those of mixing, dropout and stochastic depth."""
    place = micro * run.plan.world + run.accelerator.process_index
    seed_everything(run.recipe.seed, STEP_STREAM, run.step, place)


def mix(mixup: Mixup, images: Tensor, target: Tensor) -> Tensor:
    """Mix images in place and return their soft targets; the last of an odd number has no partner and stays."""
    even = len(images) // 2 * 2
    soft = [mixup(images[:even], target[:even])[1]] if even else []
    if even < len(images):
        smoothing, multi_label = mixup.label_smoothing, mixup.multi_label
        soft.append(mixup_target(target[even:], mixup.num_classes, smoothing=smoothing, multi_label=multi_label))
    return torch.cat(soft)


def clip_gradients(run: Run) -> None:
    """Limit the gradients as the recipe says."""
    limit, mode = run.recipe.clip_grad, run.recipe.clip_mode
    if limit:
        run.accelerator.unscale_gradients(run.optimizer)
        # adaptive clipping leaves the head alone, as in its paper and in timm
        dispatch_clip_grad(model_parameters(run.bare, exclude_head=mode == 'agc'), limit, mode)


class Letter:
    """A few numbers on their way between the processes and from the device, beside what the device computes."""

    def __init__(self, accelerator: Accelerator, loss: Tensor, stop: bool, save: bool):
        self.world, self.device = accelerator.num_processes, accelerator.device
        numbers = torch.stack([loss.float(), *torch.tensor([float(stop), float(save)]).to(loss.device)])
        self.work = None
        if self.device.type != 'cuda':
            self.numbers = numbers
            self.work = distributed.all_reduce(numbers, async_op=True) if self.world > 1 else None
            return
        # on a stream of its own, so that reading does not wait for the backward pass in the main one
        self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if self.world > 1:
                distributed.all_reduce(numbers)
            self.numbers = numbers.to('cpu', non_blocking=True)
        numbers.record_stream(self.stream)

    def read(self) -> News:
        """Wait for the numbers."""
        if self.work is not None:
            self.work.wait()
        elif self.device.type == 'cuda':
            self.stream.synchronize()
        loss, stop, save = self.numbers.tolist()
        return News(loss / self.world, stop > 0, save > 0)


def explain_divergence(run: Run, images: Tensor, loss: float) -> str:
    """Say at which step and in which layer numbers stopped being finite, and what to do about it."""
    model = run.plain.pull()
    seed_step(run, run.plan.accum - 1)
    with run.accelerator.autocast():
        culprits = gather_object([first_not_finite(model, images)])
    layer = next(
        (name for name in culprits if name), 'every layer gives finite numbers for it, so it is the loss alone'
    )
    return (
        f'the loss is {loss} at step {run.step + 1}: {layer}. Nothing was changed by this step; try half the lr'
        f' ({run.plan.lr / 2:.2g}), --clip-grad 1, a longer warm-up, or, with mixed precision, --amp-dtype bfloat16'
    )


@torch.no_grad()
def first_not_finite(model: nn.Module, images: Tensor) -> str:
    """The first thing that is not finite when a model sees these images, as a sentence; '' where all is finite."""
    if not images.isfinite().all():
        return 'the images themselves are not finite'
    broken = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if broken:
        return f'the weights {broken[0]} are not finite'
    found = []

    def look(name: str, output) -> None:
        if not found and isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
            found.append(f'the first layer that gives numbers that are not finite is {name}')

    hooks = [
        module.register_forward_hook(lambda module, inputs, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        # not __call__, which may be compiled, without hooks
        model.forward(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ''
