"""The training loop: train and evaluate a run epoch by epoch, and export its model."""

import time
from pathlib import Path
from typing import Any

import timm
from accelerate.utils import gather_object

from vitzoo.data.held_out import HELD_OUT, write_held_out
from vitzoo.data.transforms import expand_pipeline
from vitzoo.errors import UserError, count_of
from vitzoo.train.evaluation import evaluate_epoch, evaluate_shared, export, export_best
from vitzoo.train.opening import create_accelerator, find_held_out_list, set_up
from vitzoo.train.processes import raise_together, share_statistics
from vitzoo.train.progress import Display, describe_run, learning_rate, report_epoch, start_trackers
from vitzoo.train.recipe import save_recipe
from vitzoo.train.recipe_cli import load_recipe
from vitzoo.train.resume import choose_folder, contains_checkpoint, resume_run, save_run
from vitzoo.train.run import Run
from vitzoo.train.run_folder import (
    claim_folder,
    describe_origin,
    remove_old_run,
    remove_partial_files,
    set_aside,
    write_on_main,
)
from vitzoo.train.step import train_step
from vitzoo.train.stopping import StopSignal


def train(argv: list[str] | None = None) -> dict | None:
    """Train a model, and return the scores of the exported weights, or None if stopped by SIGTERM.

    Raises:
        UserError: The command line, the recipe, the data or the model is invalid, the loss is not finite, or the disk
            is full.
    """
    stop, recipe = StopSignal(), load_recipe(argv)
    folder, checkpoints = choose_folder(recipe)
    accelerator, is_named = create_accelerator(recipe), bool(recipe.output or recipe.resume)
    with claim_folder(accelerator, folder, is_named) as lock:
        if is_named:
            # another run may have ended in it just before it was locked
            with raise_together(accelerator):
                _, checkpoints = choose_folder(recipe)
        run = set_up(recipe, accelerator, lock, is_resumed=bool(checkpoints))
        scores = train_in_folder(run, checkpoints, stop)
    accelerator.end_training()
    return scores


def train_in_folder(run: Run, checkpoints: list[Path], stop: StopSignal) -> dict | None:
    """Train in a locked folder, from the newest intact checkpoint if there are any; result and errors as in `train`."""
    if checkpoints:
        # before anything is written, so that a run that cannot resume leaves the folder as it was
        with raise_together(run.accelerator):
            resume_run(run, checkpoints)
    is_elsewhere = bool(checkpoints) and not contains_checkpoint(run.folder, checkpoints[0])
    open_folder(run, is_new=not checkpoints or is_elsewhere)
    if is_elsewhere or run.later_checkpoints:
        # so that --resume auto finds where this run, or this branch of it, began
        save_run(run)
    with stop, Display(run) as display:
        while len(run.history) < run.plan.epochs:
            if not train_one_epoch(run, display, stop):
                run.console.print(f'stopped {stop.reason} after step {run.step}; continue with --resume {run.folder}')
                return None
    return finish(run)


def open_folder(run: Run, is_new: bool) -> None:
    """Print the summary of the run, and write the effective recipe to its folder.

    Raises:
        UserError: The folder cannot be written, or is not shared by all machines.
    """
    lines = describe_run(run)
    for line in lines:
        run.console.print(line)
    if is_new and run.recipe.resume not in (None, 'auto'):
        lines.append(describe_origin(run.recipe.resume))
    if run.recipe.aug == 'albumentations':
        run.recipe.albumentations = expand_pipeline(run.recipe.albumentations)

    def write() -> None:
        if is_new:
            remove_old_run(run.folder)
        else:
            remove_partial_files(run.folder)
        if run.later_checkpoints and not is_new:
            aside = set_aside(run.folder, run.later_checkpoints, len(run.history))
            run.console.print(f'note   later checkpoints and their models are now in {aside}')
        path = run.folder / 'recipe.yaml'
        # the recipe of a finished run is the one that computed it
        if is_new or run.step < run.plan.steps or not path.is_file():
            save_recipe(run.recipe, path, lines)
        val = run.val_set.reader if run.val_set.is_held_out else None
        write_held_out(run.folder / HELD_OUT, val, run.train_set.reader, find_held_out_list(run.recipe))

    # another process may still be looking for checkpoints in the folder
    run.accelerator.wait_for_everyone()
    write_on_main(
        run.accelerator, run.lock, write, lambda error: f"cannot write to the output folder '{run.folder}': {error}"
    )
    if not all(gather_object([(run.folder / 'recipe.yaml').is_file()])):
        raise UserError(f"the output folder '{run.folder}' is not shared by all machines; choose another --output")
    start_trackers(run)


def train_one_epoch(run: Run, display: Display, stop: StopSignal) -> bool:
    """Train the rest of the current epoch, save, evaluate if due, and log it; False if the run has to stop."""
    plan, recipe, epoch = run.plan, run.recipe, len(run.history)
    first_step, last_step = run.step, plan.end_of(epoch)
    if run.mixup is not None:
        run.mixup.mixup_enabled = not 0 < recipe.mixup_off_epoch <= epoch
    batches: Any = run.train_loader.batch_sampler
    batches.start_at(epoch, first_step - epoch * plan.steps_per_epoch)
    micro_batches = iter(run.train_loader)
    run.task.train()
    for module in run.frozen:
        module.eval()
    start, saved_at = time.perf_counter(), time.monotonic()
    while run.step < last_step:
        is_overdue = 0 < recipe.checkpoint_minutes <= (time.monotonic() - saved_at) / 60
        must_stop = stop.received or stop.is_orphan or run.lock.is_lost
        status = train_step(run, micro_batches, stop=must_stop, save=is_overdue)
        run.speed = (run.step - first_step) * plan.batch_size / (time.perf_counter() - start)
        display.show_step(run.speed)
        is_scheduled = recipe.checkpoint_every > 0 and run.step % recipe.checkpoint_every == 0
        if run.step == last_step:
            share_statistics(run)
        if status.stop or status.save or is_scheduled or run.step == last_step:
            # before the evaluation, which is repeated if the run resumes here
            save_run(run)
            saved_at = time.monotonic()
        if status.stop:
            return False
    row = dict(epoch=epoch + 1, step=run.step, lr=learning_rate(run), train_loss=sum(run.losses) / len(run.losses))
    # with four digits, because a large model may train on less than one image in a second
    run.history.append(dict(row, images_per_second=float(f'{run.speed:.4g}')))
    run.losses = []
    is_due = is_evaluated(epoch, recipe.val_interval, plan.epochs)
    if first_step == last_step and run.saved_schedule is not None:
        # the run resumes at the end of the epoch
        is_due = is_due or is_evaluated(epoch, *run.saved_schedule)
    if is_due:
        end_epoch(run, display)
    else:
        report_epoch(run)
    return True


def is_evaluated(epoch: int, val_interval: int, epochs: int) -> bool:
    """Return True if an epoch, the first being 0, ends with an evaluation."""
    return (epoch + 1) % val_interval == 0 or epoch + 1 == epochs


def end_epoch(run: Run, display: Display) -> None:
    """Evaluate the model, log the epoch, and export the model if it is the best."""
    run.history[-1] |= evaluate_epoch(run, display)
    report_epoch(run)
    export_best(run)


def finish(run: Run) -> dict:
    """Export the model of the last epoch, and evaluate the exported files."""
    weights, row = export(run, run.folder), run.history[-1]
    # in float32 and from the files, so that `vitzoo validate` prints the same numbers
    exported = timm.create_model(f'local-dir:{run.folder}', pretrained=True).to(run.accelerator.device)
    scores = evaluate_shared(run, exported)
    mean_precision = f', mAP {scores["map"]:.2f} %' if 'map' in scores else ''
    run.console.print(
        f'{run.folder} has the {weights} weights after epoch {row["epoch"]}: top-1 {scores["top1"]:.2f} %,'
        f' top-5 {scores["top5"]:.2f} %{mean_precision}, loss {scores["loss"]:.4f} on {count_of(scores["n"], "image")}'
    )
    return dict(scores, weights=weights, folder=str(run.folder))
