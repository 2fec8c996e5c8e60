"""Saving and resuming: the run that `--resume` names, its newest intact checkpoint, and what must not have changed."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitzoo.errors import UserError, format_flag
from vitzoo.train.checkpoint import (
    DamagedCheckpoint,
    check_weights,
    find_checkpoints,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from vitzoo.train.recipe import FIXED_KEYS, NOT_SAVED, Recipe
from vitzoo.train.run import Run
from vitzoo.train.run_folder import best_epoch, check_free, check_restart, check_sources, new_folder


def choose_folder(recipe: Recipe) -> tuple[Path, list[Path]]:
    """The folder of the run, and the checkpoints it may resume from, newest first.

    Every process chooses for itself, so nothing is created here.

    Raises:
        UserError: There is nothing to resume, or the folder contains another run.
    """
    checkpoints: list[Path] = []
    if recipe.resume is None:
        folder = new_folder(recipe)
    else:
        source, checkpoints = find_run(recipe.resume, recipe.output)
        folder = Path(recipe.output or source)
        if not checkpoints:
            check_restart(folder, recipe.overwrite)
        elif contains_checkpoint(folder, checkpoints[0]):
            return folder, checkpoints
        else:
            check_free(folder, recipe.overwrite)
    names = ('model', 'initial_checkpoint', 'kd_model_name')
    check_sources({name: getattr(recipe, name) for name in names}, folder)
    return folder, checkpoints


def contains_checkpoint(folder: Path, checkpoint: Path) -> bool:
    """Return True if a checkpoint is one of the run in a folder."""
    return checkpoint.resolve().parent == (folder / 'checkpoints').resolve()


def find_run(resume: str, output: str | None) -> tuple[Path, list[Path]]:
    """The folder and the checkpoints, newest first, of the run that `--resume` names.

    Args:
        resume: A run folder, a checkpoint, or 'auto' for the run in `output`, which may not have begun.

    Raises:
        UserError: 'auto' or a checkpoint outside a run folder without `output`, or there is no checkpoint.
    """
    if resume == 'auto':
        if output is None:
            raise UserError('--resume auto needs the folder of the run: add --output FOLDER, or use --resume FOLDER')
        return Path(output), find_checkpoints(Path(output))
    checkpoints = find_checkpoints(Path(resume))
    if not checkpoints:
        raise UserError(f"there is no checkpoint in '{resume}' to resume from")
    parent = checkpoints[0].resolve().parent
    if parent.name == 'checkpoints':
        return parent.parent, checkpoints
    if output is None:
        raise UserError(f"'{resume}' is not in the folder checkpoints/ of a run; add --output FOLDER")
    return parent, checkpoints


def save_run(run: Run) -> None:
    """Write a checkpoint of the current step."""
    recipe = {name: value for name, value in asdict(run.recipe).items() if name not in NOT_SAVED}
    state = dict(recipe=recipe, data=data_facts(run), step=run.step, losses=run.losses, history=run.history)
    state |= dict(best_from=run.best_from, speed=run.speed)
    ema = None if run.ema is None else run.ema.module
    keep = run.recipe.checkpoint_hist
    save_checkpoint(run.accelerator, run.lock, state, run.full_model, ema, run.optimizer, keep)


def resume_run(run: Run, checkpoints: list[Path]) -> None:
    """Continue from the newest intact checkpoint.

    Args:
        checkpoints: Newest first.

    Raises:
        UserError: All checkpoints are damaged, or the newest intact one is of another model, other data, a recipe
            that differs in a fixed key, or a step after the end of this run.
    """
    checkpoint, state = _find_intact(run, checkpoints)
    check_resumable(run, checkpoint, state)
    ema = None if run.ema is None else run.ema.module
    load_checkpoint(run.accelerator, checkpoint, run.full_model, ema, run.optimizer)
    run.step, run.losses, run.history, run.speed = (state[name] for name in ('step', 'losses', 'history', 'speed'))
    before = saved_recipe(state['recipe'])
    run.saved_schedule = before['val_interval'], before['epochs'] + before['cooldown_epochs']
    run.later_checkpoints = [
        path for path in list_checkpoints(run.folder / 'checkpoints') if path.name > f'step-{run.step:08d}'
    ]
    # the checkpoint of the end of an epoch is written before its evaluation, which may have made best/; the model of a
    # later epoch is of another branch, which is set aside now or was not completely before a kill
    is_end = not run.later_checkpoints and run.step == run.plan.end_of(len(run.history))
    has_best = 0 < best_epoch(run.folder) <= len(run.history) + is_end
    is_branch = not contains_checkpoint(run.folder, checkpoint) or not has_best
    run.best_from = len(run.history) if is_branch else state['best_from']
    run.console.print(f'resumed from {checkpoint} at step {run.step} of {run.plan.steps}')


def check_resumable(run: Run, checkpoint: Path, state: dict) -> None:
    """Check that this run may continue from the state of a checkpoint.

    Raises:
        UserError: A fixed key of the recipe has changed, the data are others, or the run is already longer.
    """
    if 'recipe' not in state:
        raise UserError(
            f'cannot resume from {checkpoint}: it was written by an older version of vitzoo; start again with'
            f' --overwrite, not --resume'
        )
    changed = changed_keys(run.recipe, state['recipe'])
    if changed:
        name, (before, now) = next(iter(changed.items()))
        raise UserError(
            f'cannot resume from {checkpoint}: its {name} is {before}, not {now}; leave out {format_flag(name)}'
            f' or --config to keep it, or start another run with another --output'
        )
    for name, value in data_facts(run).items():
        # checkpoints of earlier versions lack the last
        before = state['data'].get(name, value)
        if value != before:
            counts = f'{before}, not {value}' if isinstance(value, int) else 'different'
            raise UserError(f'cannot resume from {checkpoint}: its {name.replace("_", " ")} are {counts}')
    if state['step'] > run.plan.steps:
        raise UserError(
            f'cannot resume from {checkpoint}: it is at step {state["step"]}, but {run.recipe.epochs} epochs end at'
            f' step {run.plan.steps}; increase --epochs or resume from an earlier checkpoint'
        )


def changed_keys(recipe: Recipe, saved: dict[str, Any]) -> dict[str, tuple]:
    """The fixed keys whose values differ, each with its value in the saved recipe and in this one."""
    before, now = saved_recipe(saved), asdict(recipe)
    return {name: (before[name], now[name]) for name in FIXED_KEYS if before[name] != now[name]}


def saved_recipe(saved: dict[str, Any]) -> dict[str, Any]:
    """A saved recipe with all keys; those that it lacks were introduced later, and had the effect of their default."""
    return {**asdict(Recipe()), **saved}


def data_facts(run: Run) -> dict:
    """Numbers and names that the order of the images and the classifier depend on; they must match when resuming."""
    return dict(
        images_per_step=run.plan.batch_size,
        training_images=len(run.train_set),
        classes=run.train_set.class_names,
        # the content, because the file may have changed
        labels_of_the_class_map=run.train_set.options.class_map or {},
    )


def _find_intact(run: Run, checkpoints: list[Path]) -> tuple[Path, dict]:
    """The first checkpoint without damage whose weights are finite, and its state."""
    for checkpoint in checkpoints:
        try:
            state = read_state(checkpoint)
            check_weights(checkpoint)
            return checkpoint, state
        except DamagedCheckpoint as error:
            run.console.print(f'note   {error}')
    raise UserError(
        f"cannot resume: all checkpoints in '{checkpoints[0].parent}' are damaged; start again with --overwrite,"
        f' not --resume'
    )
