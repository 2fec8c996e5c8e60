"""What a training run tells: lines and bars on the terminal, metrics.csv, curves.png, and Accelerate's trackers."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn, TimeRemainingColumn

from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import UserError, did_you_mean
from vitzoo.metrics.speed import peak_process_megabytes
from vitzoo.mixers import TokenMixer
from vitzoo.train.checkpoint import on_main
from vitzoo.train.recipe import NOT_SAVED
from vitzoo.train.run import Run
from vitzoo.train.run_folder import write_metrics

# where the output is not a terminal, a line as often as this
QUIET_SECONDS = 30
# with fewer tokens a side there is little for attention to mix
SMALL_GRID = 4


def describe(run: Run) -> list[str]:
    """What is going to happen, in a few lines."""
    recipe, plan, (_, height, width) = run.recipe, run.plan, run.data_config['input_size']
    params = sum(parameter.numel() for parameter in run.bare.parameters()) / 1e6
    precision = run.accelerator.mixed_precision.replace('no', 'fp32')
    processes = f'{plan.world} process' + ('es' if plan.world > 1 else '')
    return [
        f'model  {recipe.model}, {params:.2f} M parameters, images {height} x {width}',
        f'data   {recipe.data_dir}: {len(run.train_set)} training and {len(run.val_set)} validation images'
        f' of {len(run.train_set.class_names)} classes',
        f'steps  {plan}',
        f'on     {processes} on {run.accelerator.device.type} in {precision}, seed {recipe.seed}, output {run.folder}',
        *(f'note   {note}' for note in remarks(run)),
    ]


def remarks(run: Run) -> list[str]:
    """What may be other than the user thinks."""
    recipe, plan, notes = run.recipe, run.plan, []
    left_out, grid = len(run.train_set) % plan.batch_size, smallest_grid(run)
    if run.val_set.is_held_out:
        share = f'{100 * recipe.val_fraction:g} % of the images of each class are held out'
        notes.append(f'no validation folder: {share} (seed {recipe.seed}, listed in {HELD_OUT})')
    if plan.batch_size < recipe.batch_size:
        notes.append(f'batch_size {recipe.batch_size} is more than there are images: {plan.batch_size} it is')
    if left_out and recipe.balance != 'sampler':
        notes.append(f'a batch is always full: each epoch leaves out {left_out} images, different ones')
    if recipe.warmup_epochs >= recipe.epochs:
        notes.append(f'lr is never reached: warmup_epochs {recipe.warmup_epochs:g} of {recipe.epochs} epochs')
    if run.frozen:
        trained = sum(parameter.numel() for parameter in run.bare.parameters() if parameter.requires_grad) / 1e6
        notes.append(f'frozen but for {trained:.2f} M parameters')
    if grid and min(grid) < SMALL_GRID:
        notes.append(
            f'tokens are mixed on a grid as small as {grid[0]} x {grid[1]}; a larger img_size'
            f' (or a smaller patch_size in model_kwargs) gives attention more to work on'
        )
    return notes


def smallest_grid(run: Run) -> tuple[int, int] | None:
    """The smallest grid of tokens in the model, where it is made of vitzoo's mixers or timm's patches."""
    grids = [module.grid_size for module in run.bare.modules() if isinstance(module, TokenMixer)]
    patches = getattr(getattr(run.bare, 'patch_embed', None), 'grid_size', None)
    return min(grids or ([patches] if patches else []), key=min, default=None)


class Display:
    """A bar for the whole run, to which evaluations add theirs; where there is no terminal, a line now and then."""

    def __init__(self, run: Run):
        self.run, self.spoke_at = run, 0.0
        self.bars = Progress(
            '{task.description}',
            BarColumn(),
            MofNCompleteColumn(),
            '{task.fields[note]}',
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=run.console,
            disable=not run.console.is_terminal,
        )
        self.training: TaskID = self.bars.add_task('training', total=run.plan.steps, completed=run.step, note='')

    def __enter__(self) -> 'Display':
        self.bars.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.bars.stop()

    def show_step(self, images_per_second: float) -> None:
        """Move the bar; now and then say how things are."""
        run = self.run
        self.bars.update(self.training, completed=run.step)
        is_time = time.monotonic() - self.spoke_at > QUIET_SECONDS
        if not is_time and (run.step % run.recipe.log_interval or not run.console.is_terminal):
            return
        note = f'loss {run.losses[-1]:.3f}  lr {learning_rate(run):.2e}  {images_per_second:.0f} images/s'
        note += f'  {peak_process_megabytes(run.accelerator.device) / 1e3:.1f} GB'
        epoch = -(-run.step // run.plan.steps_per_epoch)
        self.bars.update(self.training, description=f'epoch {epoch}/{run.plan.epochs}', note=note)
        if is_time and not run.console.is_terminal:
            run.console.print(f'step {run.step}/{run.plan.steps}  {note}')
            self.spoke_at = time.monotonic()

    @contextmanager
    def evaluation(self) -> Iterator[Callable[[int], None]]:
        """A bar for one pass over the validation images, moved by calling it with the images of a batch."""
        world, total = self.run.plan.world, len(self.run.val_set)
        task = self.bars.add_task('validation', total=total, note='')
        yield lambda images: self.bars.advance(task, images * world)
        self.bars.remove_task(task)


def learning_rate(run: Run) -> float:
    """The largest of the parameter groups' learning rates, that of the last layers."""
    return max(group['lr'] for group in run.optimizer.param_groups)


def report_epoch(run: Run) -> None:
    """Print the scores of the last epoch, and add them to metrics.csv, its picture and the trackers."""
    row = run.history[-1]
    ema = f'  ema {row["ema_top1"]:5.2f} %' if run.ema is not None else ''
    mean_precision = f'  mAP {row["map"]:5.2f} %' if 'map' in row else ''
    run.console.print(
        f'epoch {row["epoch"]:3}/{run.plan.epochs}  loss {row["train_loss"]:.4f}  lr {row["lr"]:.2e}'
        f'  {row["images_per_second"]:.0f} images/s  validation loss {row["eval_loss"]:.4f}'
        f'  top-1 {row["top1"]:5.2f} %{ema}{mean_precision}'
    )

    # matplotlib takes a second to import
    from vitzoo.figures import draw_curves

    def write() -> None:
        write_metrics(run.folder, run.history)
        draw_curves(run.folder, run.history)

    on_main(run.accelerator, write, lambda error: f'cannot write to {run.folder}: {error}; make room and --resume')
    run.accelerator.log({name: value for name, value in row.items() if name != 'epoch'}, step=row['step'])


def check_trackers(names: str | None) -> list[str]:
    """The trackers in a list such as 'tensorboard,wandb', which Accelerate would leave out silently if not installed.

    Raises:
        UserError: There is no such tracker, or its package is missing.
    """
    known, available = [kind.value for kind in LoggerType], [str(kind) for kind in get_available_trackers()]
    wanted = [name.strip() for name in (names or '').split(',') if name.strip()]
    for name in wanted:
        if name not in known:
            raise UserError(
                f"unknown tracker '{name}' in log_with{did_you_mean(name, known) or ': ' + ', '.join(known)}"
            )
        if name not in available:
            raise UserError(f"log_with '{name}' needs its package: pip install {name}")
    return wanted


def start_trackers(run: Run) -> None:
    """Hand the recipe to the trackers, as numbers and words."""
    settings = {name: value for name, value in asdict(run.recipe).items() if name not in NOT_SAVED}
    simple = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in settings.items()}
    run.accelerator.init_trackers('vitzoo', config=simple)
