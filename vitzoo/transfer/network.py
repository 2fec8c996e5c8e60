"""The network stage: the trainer of `vitzoo train` with a student as its model and its teacher's outputs as targets.

Checkpoints, averaged weights, sharding, trackers and stop signals are those of the trainer. Its epochs are the
intervals between two evaluations on held-out images, and its best model may be that of the start.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from vitzoo.data import Normalize, train_loader
from vitzoo.data.loader import stop_workers
from vitzoo.errors import DivergenceError
from vitzoo.train.checkpoint import find_checkpoints
from vitzoo.train.distill import Teacher, TransferTask
from vitzoo.train.full_model import FullModel
from vitzoo.train.lock import FolderLock
from vitzoo.train.loop import train_one_epoch
from vitzoo.train.model import build_ema
from vitzoo.train.network_loss import NetworkLoss
from vitzoo.train.processes import raise_together
from vitzoo.train.progress import Display, start_trackers
from vitzoo.train.resume import resume_run
from vitzoo.train.run import Run
from vitzoo.train.stopping import StopSignal
from vitzoo.transfer.data import IntervalBatches
from vitzoo.transfer.descent import WarmupCosine
from vitzoo.transfer.opening import Transfer
from vitzoo.transfer.rates import parameter_groups
from vitzoo.transfer.stopping import Stopped

# columns of metrics.csv in the result
_COLUMNS = ('step', 'lr', 'train_loss', 'output_error', 'ema_output_error')


def train_network(
    transfer: Transfer,
    student: nn.Module,
    lock: FolderLock,
    *,
    steps: int,
    lr: float = 0.0,
    new_lr: float = 0.0,
    start_error: float | None = None,
    evals: int | None = None,
    progress: Callable[[], None],
    log_with: str | None = None,
) -> list[dict]:
    """Train a copy of a student in a run folder, from its newest checkpoint if there is one.

    Args:
        lock: Of the run folder. `load_best` loads the best state from there.
        lr: Learning rate of inherited parameters, needed if there are steps.
        new_lr: Learning rate of the mixers' own parameters.
        start_error: Error of the student's outputs, measured if it is not given.
        evals: Number of evaluations; by default that of the options.
        progress: Called after each evaluation.
        log_with: Trackers.

    Returns:
        For the start and each evaluation its `step`, `output_error`, that of averaged weights, if there are any, and
        whether it is the `best` so far.

    Raises:
        UserError: The folder cannot be written.
        DivergenceError: The loss or the error is no longer finite.
        Stopped: The process received SIGTERM. The current step is saved.
    """
    accelerator = transfer.accelerator
    if start_error is None:
        start_error = transfer.output_error(student)
    start = dict(output_error=start_error)
    history = []
    if steps:
        run = _open_run(transfer, student, lock, steps, evals or transfer.options.evals, lr, new_lr)
        run.start_row, run.recipe.log_with = start, log_with
        try:
            _train(run, progress)
        finally:
            accelerator.free_memory()
        history = [{name: row[name] for name in _COLUMNS if name in row} for row in run.history]
    return _mark_best([dict(step=0, **start), *history])


def load_best(student: nn.Module, folder: Path, rows: list[dict]) -> None:
    """Load the best state of `train_network` into the student, unless that is its start."""
    if any(row['best'] for row in rows[1:]):
        student.load_state_dict(load_file(folder / 'best' / 'model.safetensors'))


def _mark_best(rows: list[dict]) -> list[dict]:
    smallest = math.inf
    for row in rows:
        error = min(row['output_error'], row.get('ema_output_error', math.inf))
        row['best'] = row is rows[0] or error < smallest
        smallest = min(error, smallest)
    return rows


def _train(run: Run, progress: Callable[[], None]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    checkpoints = find_checkpoints(run.folder)
    if checkpoints:
        with raise_together(run.accelerator):
            resume_run(run, checkpoints)
    if run.recipe.log_with:
        start_trackers(run)
    try:
        with StopSignal() as stop, Display(run) as display:
            while len(run.history) < run.plan.epochs:
                if not train_one_epoch(run, display, stop):
                    break
                progress()
            # the signal may have come after the last step
            if len(run.history) < run.plan.epochs or stop.received or stop.is_orphan:
                raise Stopped(f'{stop.reason} after step {run.step} of {run.plan.steps}')
    finally:
        stop_workers(run.train_loader)
        for tracker in run.accelerator.trackers:
            tracker.finish()
        run.accelerator.trackers.clear()


def _open_run(
    transfer: Transfer, student: nn.Module, lock: FolderLock, steps: int, evals: int, lr: float, new_lr: float
) -> Run:
    """Build everything that the trainer uses."""
    options, accelerator, name = transfer.options, transfer.accelerator, transfer.name
    interval = max(1, steps // evals)
    plan = replace(transfer.plan, steps_per_epoch=interval, epochs=math.ceil(steps / interval), max_steps=steps, lr=lr)
    # not a metric of recipes, because other trainings do not measure it
    recipe = replace(options.recipe, lr=lr, model=name, kd_model_name=name, eval_metric='output_error')
    raw_model = deepcopy(student)
    _freeze_unused(transfer, raw_model)
    ema = build_ema(recipe, raw_model)
    optimizer = torch.optim.AdamW(parameter_groups(raw_model, lr, new_lr), weight_decay=recipe.weight_decay)
    scheduler = WarmupCosine(optimizer, steps)
    full_model = FullModel(accelerator, raw_model)
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    batches = IntervalBatches(transfer.batches(plan.accum_steps), interval, steps)

    def measure(model: nn.Module) -> dict[str, float]:
        error = transfer.output_error(model)
        if not math.isfinite(error):
            raise DivergenceError(
                f'the error of the outputs is {error} after step {run.step} at learning rates of {lr:g} and'
                f' {new_lr:g}; halve them'
            )
        return dict(output_error=error)

    # a subset of images has what the trainer reads of a dataset
    train_set: Any = transfer.images
    val_set: Any = transfer.held_out_images
    val_loader: Any = transfer.held_out
    run = Run(
        recipe=recipe,
        plan=plan,
        accelerator=accelerator,
        lock=lock,
        data_config=transfer.data_config,
        train_set=train_set,
        val_set=val_set,
        raw_model=raw_model,
        model=model,
        full_model=full_model,
        ema=ema,
        optimizer=optimizer,
        scheduler=scheduler,
        task=_distillation(transfer, model),
        mixup=None,
        frozen=[],
        normalize=Normalize(transfer.data_config).to(accelerator.device),
        train_loader=train_loader(transfer.images, batches, options.workers),
        val_loader=val_loader,
        console=transfer.console,
        measure_model=measure,
        remedies='half the --network-lr ({}), --clip-grad 1',
    )
    return run


def _distillation(transfer: Transfer, model: nn.Module) -> TransferTask:
    device = transfer.accelerator.device
    distillation = TransferTask(
        student_model=model,
        teacher_model=Teacher(transfer.teacher, transfer.accelerator),
        criterion=nn.CrossEntropyLoss(),
        distill_loss_weight=1.0,
        task_loss_weight=float(transfer.options.labels),
        block_weight=transfer.options.block_weight,
        multi_label=transfer.data.multi_label,
        device=device,
        verbose=False,
    )
    # both see the same images
    teacher = distillation.teacher
    distillation.student_mean, distillation.student_std = teacher.mean_kd, teacher.std_kd
    return distillation.to(device)


def _freeze_unused(transfer: Transfer, student: nn.Module) -> None:
    """Freeze parameters that the loss does not depend on, for whose gradients DDP would wait."""
    images, teacher = transfer.held_out[0][:1].to(transfer.accelerator.device), transfer.teacher
    block_weight, multi_label = transfer.options.block_weight, transfer.data.multi_label
    with NetworkLoss(student, teacher, block_weight, multi_label=multi_label) as loss:
        student(images)
        with torch.no_grad():
            teacher(images)
        loss().backward()
    for parameter in student.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter.grad is not None)
    student.zero_grad()
