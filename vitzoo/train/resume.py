"""Saving and resuming: the run that `--resume` names, its newest intact checkpoint, and what must not have changed."""

from pathlib import Path

from vitzoo.errors import UserError
from vitzoo.train.checkpoint import DamagedCheckpoint, find_checkpoints, load_checkpoint, save_checkpoint
from vitzoo.train.recipe import Recipe
from vitzoo.train.run import Run
from vitzoo.train.run_folder import new_folder


def choose_folder(recipe: Recipe) -> tuple[Path, list[Path]]:
    """The folder of the run, and the checkpoints it may resume from, newest first.

    Every process chooses for itself, so nothing is created here.

    Raises:
        UserError: There is nothing to resume, or the folder contains another run.
    """
    if recipe.resume is None:
        return new_folder(recipe), []
    folder, checkpoints = find_run(recipe.resume, recipe.output)
    return Path(recipe.output or folder), checkpoints


def find_run(resume: str, output: str | None) -> tuple[Path, list[Path]]:
    """The folder and the checkpoints, newest first, of the run that `--resume` names.

    Args:
        resume: A run folder, a checkpoint, or 'auto' for the run in `output`, which may not have begun.

    Raises:
        UserError: 'auto' without `output`, or there is no checkpoint.
    """
    if resume == 'auto':
        if output is None:
            raise UserError('--resume auto needs the folder of the run: add --output FOLDER, or use --resume FOLDER')
        return Path(output), find_checkpoints(Path(output))
    checkpoints = find_checkpoints(Path(resume))
    if not checkpoints:
        raise UserError(f"there is no checkpoint in '{resume}' to resume from")
    # <run>/checkpoints/<checkpoint>
    return checkpoints[0].resolve().parent.parent, checkpoints


def save_run(run: Run) -> None:
    """Write a checkpoint of the current step."""
    state = dict(fixed=resume_invariants(run), step=run.step, losses=run.losses, history=run.history)
    ema = None if run.ema is None else run.ema.module
    folder, keep = run.folder / 'checkpoints', run.recipe.checkpoint_hist
    save_checkpoint(run.accelerator, folder, state, run.full_model, ema, run.optimizer, keep)


def resume_run(run: Run, checkpoints: list[Path]) -> None:
    """Continue from the newest intact checkpoint.

    Args:
        checkpoints: Newest first.

    Raises:
        UserError: All checkpoints are damaged, the weights do not fit, or data order settings have changed.
    """
    checkpoint, state = _load_intact(run, checkpoints)
    for name, value in resume_invariants(run).items():
        if value != state['fixed'][name]:
            raise UserError(f'cannot resume from {checkpoint}: its {name} is {state["fixed"][name]}, not {value}')
    run.step, run.losses, run.history = state['step'], state['losses'], state['history']
    run.console.print(f'resumed from {checkpoint} at step {run.step} of {run.plan.steps}')


def resume_invariants(run: Run) -> dict:
    """Settings that determine the data order; they must match when resuming."""
    return dict(
        batch_size=run.plan.batch_size,
        seed=run.recipe.seed,
        aug_repeats=run.recipe.aug_repeats,
        balance=run.recipe.balance,
        num_images=len(run.train_set),
        class_names=run.train_set.class_names,
    )


def _load_intact(run: Run, checkpoints: list[Path]) -> tuple[Path, dict]:
    ema = None if run.ema is None else run.ema.module
    for checkpoint in checkpoints:
        try:
            return checkpoint, load_checkpoint(run.accelerator, checkpoint, run.full_model, ema, run.optimizer)
        except DamagedCheckpoint as error:
            run.console.print(f'note   {error}')
    raise UserError(
        f"cannot resume: all checkpoints of '{run.folder}' are damaged; start again with --overwrite, not --resume"
    )
