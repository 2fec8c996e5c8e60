"""`vitzoo train`: trains an image classifier, in one process or, under `accelerate launch`, in many.

Examples:
    vitzoo train --config configs/quickstart.yaml
    vitzoo train --config configs/finetune.yaml --data-dir photos --model deit_tiny_patch16_224 --pretrained
    accelerate launch --num_processes 8 train.py --config configs/imagenet/vil.yaml --data-dir imagenet
    vitzoo train --resume runs/cvt_ls_13

A run is a function of its recipe. All random numbers follow from the seed and the step, so images are drawn, augmented
and mixed in the same way for any number of worker processes, and after any interruption.
"""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn, TimeRemainingColumn
from timm.data import Mixup
from timm.data.mixup import mixup_target
from timm.models import model_parameters
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vitzoo.build import (
    Plan,
    build_ema,
    build_loss,
    build_mixup,
    build_model,
    build_optimizer,
    build_scheduler,
    plan_batches,
)
from vitzoo.checkpoint import load_checkpoint, save_checkpoint
from vitzoo.data import (
    Images,
    eval_loader,
    eval_transform,
    open_dataset,
    resolve_data_config,
    train_loader,
    train_transform,
)
from vitzoo.data.loader import STEP_STREAM, TrainBatches, seed_everything
from vitzoo.data.transforms import expand_pipeline
from vitzoo.errors import UserError, run_command
from vitzoo.launch import start_missing_processes
from vitzoo.metrics import evaluate
from vitzoo.output import choose_folder, export_model, prepare_folder, write_metrics
from vitzoo.recipe import Recipe, load_recipe, save_recipe

# the first bar there is
TRAINING = TaskID(0)
QUIET_SECONDS = 30


@dataclass
class Run:
    """All that a step, an evaluation or a checkpoint touches."""

    recipe: Recipe
    plan: Plan
    accelerator: Accelerator
    folder: Path
    data_config: dict
    train_set: Images
    val_set: Images
    # `model` is `bare` as Accelerate prepared it, with gradients averaged over the processes
    bare: nn.Module
    model: nn.Module
    ema: ModelEmaV3 | None
    optimizer: Optimizer
    scheduler: Scheduler
    loss: nn.Module
    mixup: Mixup | None
    train_loader: DataLoader
    val_loader: DataLoader
    console: Console
    # optimizer steps done, the losses of those in this epoch, and a row for each epoch before it
    step: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[dict] = field(default_factory=list)
    spoke_at: float = 0.0


def main(argv: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    start_missing_processes()
    run_command(train, argv)


def train(argv: list[str] | None = None) -> dict:
    """Train as the command line says, and return the scores of the model that was written.

    Raises:
        UserError: The command line, the recipe, the data or the model is not what it should be, or the loss is not
            finite.
    """
    recipe = load_recipe(argv)
    accelerator = start_processes(recipe)
    folder, checkpoint = choose_folder(recipe)
    run = set_up(recipe, accelerator, folder)
    open_folder(run, is_new=checkpoint is None)
    if checkpoint is not None:
        resume(run, checkpoint)
    with progress_bars(run) as bars:
        for epoch in range(run.step // run.plan.steps_per_epoch, run.plan.epochs):
            row = train_one_epoch(run, epoch, bars)
            row |= evaluate_epoch(run, bars)
            run.history.append(row)
            run.losses = []
            report_epoch(run)
            save(run)
    scores = finish(run)
    accelerator.end_training()
    return scores


def start_processes(recipe: Recipe) -> Accelerator:
    """Join the processes that `accelerate launch` started, in the recipe's precision or the launcher's."""
    precision = {None: None, False: 'no', True: 'bf16' if recipe.amp_dtype == 'bfloat16' else 'fp16'}[recipe.amp]
    try:
        # said explicitly, because processes under torchrun would else not see each other on a CPU
        accelerator = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=precision)
    except ValueError as error:
        raise UserError(f'amp: {error}') from error
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise UserError(f'{accelerator.distributed_type.value} is not supported; launch with --multi_gpu')
    return accelerator


def set_up(recipe: Recipe, accelerator: Accelerator, folder: Path) -> Run:
    """Everything before the first step."""
    train_set, val_set = open_data(recipe)
    plan = plan_batches(recipe, len(train_set), accelerator.num_processes)
    num_classes = recipe.num_classes or len(train_set.class_names)

    # every process begins with the same weights
    seed_everything(recipe.seed)
    bare = build_model(recipe, num_classes).to(accelerator.device)
    data_config = resolve_data_config(bare, recipe.img_size, recipe.crop_pct)
    train_set.transform = train_transform(recipe, data_config)
    val_set.transform = eval_transform(data_config)

    # made of the bare model, so that names and order of the parameters are its own
    ema = build_ema(recipe, bare)
    optimizer = build_optimizer(recipe, bare, plan.lr)
    scheduler = build_scheduler(recipe, optimizer, plan.steps_per_epoch)
    mixup = build_mixup(recipe, num_classes)
    model, optimizer = accelerator.prepare(bare, optimizer)
    return Run(
        recipe=recipe,
        plan=plan,
        accelerator=accelerator,
        folder=folder,
        data_config=data_config,
        train_set=train_set,
        val_set=val_set,
        bare=bare,
        model=model,
        ema=ema,
        optimizer=optimizer,
        scheduler=scheduler,
        loss=build_loss(recipe, mixup).to(accelerator.device),
        mixup=mixup,
        train_loader=build_train_loader(recipe, plan, train_set, accelerator.process_index),
        val_loader=build_val_loader(recipe, plan, val_set, accelerator.process_index),
        console=Console(quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True),
    )


def open_data(recipe: Recipe) -> tuple[Images, Images]:
    """The training and the validation images, with the same classes."""
    train_set = open_dataset(recipe.data_dir, 'train')
    val_set = open_dataset(recipe.data_dir, 'val', class_to_idx=train_set.class_to_idx)
    classes = len(train_set.class_names)
    if train_set.root == val_set.root:
        raise UserError(
            f"'{recipe.data_dir}' has no validation images; put the class folders into '{recipe.data_dir}/train', and"
            f" part of the images of each class into '{recipe.data_dir}/val/<class>'"
        )
    if classes < 2:
        raise UserError(f'{train_set.root} has one class, {train_set.class_names[0]}, and telling apart takes two')
    if recipe.num_classes and recipe.num_classes < classes:
        raise UserError(f'num_classes is {recipe.num_classes}, but {train_set.root} has {classes} classes')
    return train_set, val_set


def build_train_loader(recipe: Recipe, plan: Plan, train_set: Images, rank: int) -> DataLoader:
    """This process's share of every training batch."""
    num_images, repeats = len(train_set), recipe.aug_repeats
    batches = TrainBatches(num_images, plan.batch_size, plan.accum, rank, plan.world, recipe.seed, repeats)
    return train_loader(train_set, batches, recipe.workers)


def build_val_loader(recipe: Recipe, plan: Plan, val_set: Images, rank: int) -> DataLoader:
    """This process's share of the validation images."""
    batch_size = recipe.validation_batch_size or min(recipe.batch_size, 256)
    return eval_loader(val_set, batch_size, recipe.workers, rank=rank, world=plan.world)


def train_one_epoch(run: Run, epoch: int, bars: Progress) -> dict:
    """Train on what is left of an epoch, and return the first half of its row in metrics.csv."""
    recipe, plan = run.recipe, run.plan
    first_step, last_step = run.step, (epoch + 1) * plan.steps_per_epoch
    run.train_loader.batch_sampler.start_at(epoch, first_step % plan.steps_per_epoch)
    micro_batches = iter(run.train_loader)
    run.model.train()
    start, pending = time.perf_counter(), []
    while run.step < last_step:
        pending.append(train_step(run, micro_batches))
        is_due = recipe.checkpoint_every and run.step % recipe.checkpoint_every == 0 and run.step < last_step
        if is_due or run.step == last_step or run.step % recipe.log_interval == 0:
            collect_losses(run, pending)
            speed = (run.step - first_step) * plan.batch_size / (time.perf_counter() - start)
            show_step(run, bars, epoch, speed)
        bars.update(TRAINING, completed=run.step)
        if is_due:
            save(run)
    return dict(
        epoch=epoch + 1,
        step=run.step,
        lr=max(group['lr'] for group in run.optimizer.param_groups),
        train_loss=sum(run.losses) / len(run.losses),
        images_per_second=round(speed, 1),
    )


def train_step(run: Run, micro_batches: Iterator) -> Tensor:
    """One optimizer step over one global batch; returns this process's mean loss, still on the device."""
    accelerator, accum = run.accelerator, run.plan.accum
    run.scheduler.step_update(run.step)
    total = torch.zeros((), device=accelerator.device)
    for micro in range(accum):
        images, target = (tensor.to(accelerator.device, non_blocking=True) for tensor in next_batch(micro_batches))
        seed_everything(run.recipe.seed, STEP_STREAM, run.step, micro * run.plan.world + accelerator.process_index)
        if run.mixup is not None:
            target = mix(run.mixup, images, target)
        # gradients travel between processes once per step
        with nullcontext() if micro == accum - 1 else accelerator.no_sync(run.model):
            loss = run.loss(run.model(images), target) / accum
            accelerator.backward(loss)
        total += loss.detach()
    clip_gradients(run)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    if run.ema is not None:
        run.ema.update(run.bare, step=run.step)
    return total


def next_batch(micro_batches: Iterator) -> list[Tensor]:
    """The next images and labels; an image that cannot be read is reported from whichever process meets it."""
    try:
        return next(micro_batches)
    except UserError as error:
        # run_command leaves speaking to the main process, which knows nothing of this
        if os.environ.get('RANK', '0') != '0':
            print(f'vitzoo: error: {error}', file=sys.stderr)
        raise


def mix(mixup: Mixup, images: Tensor, target: Tensor) -> Tensor:
    """Mix images in place and return their soft targets; the last of an odd number has no partner and stays."""
    even = len(images) // 2 * 2
    soft = [mixup(images[:even], target[:even])[1]] if even else []
    if even < len(images):
        soft.append(mixup_target(target[even:], mixup.num_classes, smoothing=mixup.label_smoothing))
    return torch.cat(soft)


def clip_gradients(run: Run) -> None:
    """Limit the gradients as the recipe says."""
    limit, mode = run.recipe.clip_grad, run.recipe.clip_mode
    if limit:
        run.accelerator.unscale_gradients(run.optimizer)
        # adaptive clipping leaves the head alone, as in its paper and in timm
        dispatch_clip_grad(model_parameters(run.bare, exclude_head=mode == 'agc'), limit, mode)


def collect_losses(run: Run, pending: list[Tensor]) -> None:
    """Fetch the losses of the last steps, which waits for the device.

    Raises:
        UserError: One of them is not finite.
    """
    values = run.accelerator.reduce(torch.stack(pending), 'mean').tolist()
    for step, value in enumerate(values, start=run.step - len(values) + 1):
        if not math.isfinite(value):
            raise UserError(
                f'the loss is {value} at step {step}; try half the lr ({run.plan.lr / 2:.2g}), --clip-grad 1, a longer'
                f' warm-up, or, with mixed precision, --amp-dtype bfloat16'
            )
    run.losses += values
    pending.clear()


def evaluate_epoch(run: Run, bars: Progress) -> dict:
    """Evaluate the model, and its average where there is one; the second half of a row in metrics.csv."""
    row = {}
    for prefix, model in {'': run.bare, 'ema_': run.ema and run.ema.module}.items():
        if model is None:
            continue
        with run.accelerator.autocast():
            scores = evaluate_shared(run, model, bars)
        row |= {f'{prefix}eval_loss': scores['loss'], f'{prefix}top1': scores['top1'], f'{prefix}top5': scores['top5']}
    return row


def evaluate_shared(run: Run, model: nn.Module, bars: Progress | None = None) -> dict:
    """Evaluate one model in all processes together."""
    if run.accelerator.num_processes > 1:
        # each process has its own BatchNorm statistics; those of the first are the ones that are saved
        for buffer in model.buffers():
            buffer.copy_(broadcast(buffer))
    if bars is None:
        return evaluate(model, run.val_loader, run.accelerator)
    task = bars.add_task('validation', total=len(run.val_set), note='')
    world = run.accelerator.num_processes
    scores = evaluate(model, run.val_loader, run.accelerator, progress=lambda n: bars.advance(task, n * world))
    bars.remove_task(task)
    return scores


def save(run: Run) -> None:
    """Write a checkpoint."""
    state = dict(fixed=fixed_facts(run), step=run.step, losses=run.losses, history=run.history)
    ema = None if run.ema is None else run.ema.module
    folder, keep = run.folder / 'checkpoints', run.recipe.checkpoint_hist
    save_checkpoint(run.accelerator, folder, state, run.bare, ema, run.optimizer, keep)


def resume(run: Run, checkpoint: Path) -> None:
    """Continue from a checkpoint.

    Raises:
        UserError: It cannot be read, or was made with other data or batches.
    """
    ema = None if run.ema is None else run.ema.module
    state = load_checkpoint(run.accelerator, checkpoint, run.bare, ema, run.optimizer)
    for name, value in fixed_facts(run).items():
        if value != state['fixed'][name]:
            raise UserError(f'cannot resume from {checkpoint}: its {name} is {state["fixed"][name]}, not {value}')
    run.step, run.losses, run.history = state['step'], state['losses'], state['history']
    run.console.print(f'resumed from {checkpoint} at step {run.step} of {run.plan.steps}')


def fixed_facts(run: Run) -> dict:
    """What decides the order of the images, and so must not change within a run."""
    recipe = run.recipe
    facts = dict(batch_size=run.plan.batch_size, seed=recipe.seed, aug_repeats=recipe.aug_repeats)
    return facts | dict(num_images=len(run.train_set), class_names=run.train_set.class_names)


def open_folder(run: Run, is_new: bool) -> None:
    """Print what is going to happen, and store it with the effective recipe."""
    lines = describe(run)
    for line in lines:
        run.console.print(line)
    # no process may still look at what is in the folder
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        prepare_folder(run.folder, is_new)
        if run.recipe.aug == 'albumentations':
            run.recipe.albumentations = expand_pipeline(run.recipe.albumentations)
        save_recipe(run.recipe, run.folder / 'recipe.yaml', lines)


def describe(run: Run) -> list[str]:
    """What is going to happen, in a few lines."""
    recipe, plan, (_, height, width) = run.recipe, run.plan, run.data_config['input_size']
    params = sum(parameter.numel() for parameter in run.bare.parameters()) / 1e6
    left_out = len(run.train_set) % plan.batch_size
    precision = run.accelerator.mixed_precision.replace('no', 'fp32')
    lines = [
        f'model  {recipe.model}, {params:.2f} M parameters, images {height} x {width}',
        f'data   {recipe.data_dir}: {len(run.train_set)} training and {len(run.val_set)} validation images'
        f' of {len(run.train_set.class_names)} classes',
        f'steps  {plan}',
        f'on     {run.accelerator.device.type} in {precision}, seed {recipe.seed}, output {run.folder}',
    ]
    if plan.batch_size < recipe.batch_size:
        lines.append(f'note   batch_size {recipe.batch_size} is more than there are images: {plan.batch_size} it is')
    if left_out:
        lines.append(f'note   a batch is always full: each epoch leaves out {left_out} images, different ones')
    if recipe.warmup_epochs >= recipe.epochs:
        lines.append(f'note   lr is never reached: warmup_epochs {recipe.warmup_epochs:g} of {recipe.epochs} epochs')
    return lines


def progress_bars(run: Run) -> Progress:
    """A bar for the whole run, to which evaluations add theirs; nothing where the output is not a terminal."""
    columns = ['{task.description}', BarColumn(), MofNCompleteColumn(), '{task.fields[note]}']
    bars = Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=run.console,
        disable=not run.console.is_terminal,
    )
    bars.add_task('training', total=run.plan.steps, completed=run.step, note='')
    return bars


def show_step(run: Run, bars: Progress, epoch: int, speed: float) -> None:
    """Show the loss at the bar, or now and then in a line where there is none."""
    lr = max(group['lr'] for group in run.optimizer.param_groups)
    note = f'loss {run.losses[-1]:.3f}  lr {lr:.2e}  {speed:.0f} images/s'
    bars.update(TRAINING, description=f'epoch {epoch + 1}/{run.plan.epochs}', note=note)
    if not run.console.is_terminal and time.monotonic() - run.spoke_at > QUIET_SECONDS:
        run.console.print(f'step {run.step}/{run.plan.steps}  {note}')
        run.spoke_at = time.monotonic()


def report_epoch(run: Run) -> None:
    """Print the epoch's scores and add them to metrics.csv."""
    row = run.history[-1]
    ema = f'  ema {row["ema_top1"]:5.2f} %' if run.ema is not None else ''
    run.console.print(
        f'epoch {row["epoch"]:3}/{run.plan.epochs}  loss {row["train_loss"]:.4f}  lr {row["lr"]:.2e}'
        f'  {row["images_per_second"]:.0f} images/s  validation loss {row["eval_loss"]:.4f}'
        f'  top-1 {row["top1"]:5.2f} %{ema}'
    )
    run.spoke_at = time.monotonic()
    if run.accelerator.is_main_process:
        write_metrics(run.folder, run.history)


def finish(run: Run) -> dict:
    """Write the model, the raw weights or their average, whichever scored better, and evaluate the files as written."""
    row = run.history[-1]
    weights = 'ema' if run.ema is not None and row['ema_top1'] >= row['top1'] else 'raw'
    model = run.ema.module if weights == 'ema' else run.bare
    if run.accelerator.is_main_process:
        about = dict(weights=weights, epochs=row['epoch'], seed=run.recipe.seed, data_dir=run.recipe.data_dir)
        export_model(run.folder, model, run.train_set.class_names, run.data_config, about)
    run.accelerator.wait_for_everyone()
    # in float32 from the files, so that `vitzoo validate` gives this very number
    written = timm.create_model(f'local-dir:{run.folder}', pretrained=True).to(run.accelerator.device)
    scores = evaluate_shared(run, written)
    run.console.print(
        f'{run.folder} has the {weights} weights after epoch {row["epoch"]}: top-1 {scores["top1"]:.2f} %,'
        f' top-5 {scores["top5"]:.2f} %, loss {scores["loss"]:.4f} on {scores["n"]} images'
    )
    return dict(scores, weights=weights, folder=str(run.folder))


if __name__ == '__main__':
    main()
