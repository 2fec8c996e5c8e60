"""Console output, metrics.csv, curves.png and trackers of a training run."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType, ProjectConfiguration
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn, TimeRemainingColumn
from timm.optim import get_optimizer_info

from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import UserError, count_of, did_you_mean
from vitzoo.machine import note_slow_bfloat16
from vitzoo.metrics.speed import format_speed, peak_process_megabytes
from vitzoo.mixers.base import named_mixers
from vitzoo.train.recipe import FIELDS, NOT_SAVED, Recipe
from vitzoo.train.run import Run
from vitzoo.train.run_folder import write_metrics, write_on_main

# seconds between lines if the output is not a terminal
LOG_SECONDS = 30
# keys of which several have no effect together
_CROPS = ('train_crop_mode', 'scale', 'ratio', 'hflip', 'vflip')
_TIMM_AUGMENTATION = ('color_jitter', 'color_jitter_prob', 'grayscale_prob', 'gaussian_blur_prob', 'aa')
_ERASING = ('remode', 'recount')
_MIXING = ('mixup_prob', 'mixup_switch_prob', 'mixup_mode', 'mixup_off_epoch')
_DISTILLATION = tuple(name for name, spec in FIELDS.items() if spec.metadata['group'] == 'distillation')
# the schedules, all of timm, that take a key
_OF_SCHEDULES = {
    'decay_epochs': ('step', 'wsd', 'rsqrt'),
    'decay_milestones': ('multistep',),
    'decay_rate': ('step', 'multistep', 'poly'),
    'min_lr': ('cosine', 'tanh', 'poly', 'wsd', 'rsqrt'),
}
# on a grid with a shorter side, attention has little to mix
MIN_GRID_SIDE = 4


def describe_run(run: Run) -> list[str]:
    """A summary of the run, printed before it starts and stored in recipe.yaml."""
    recipe, plan, (_, height, width) = run.recipe, run.plan, run.data_config['input_size']
    params = sum(parameter.numel() for parameter in run.raw_model.parameters()) / 1e6
    full_precision = 'bf16' if recipe.model_dtype == 'bfloat16' else 'fp32'
    precision = run.accelerator.mixed_precision.replace('no', full_precision)
    processes = f'{plan.world_size} process' + ('es' if plan.world_size > 1 else '')
    return [
        f'model  {recipe.model}, {params:.2f} M parameters, images {height} x {width}',
        f'data   {recipe.data_dir}: {len(run.train_set)} training and {len(run.val_set)} validation images'
        f' of {count_of(len(run.train_set.class_names), "class")}',
        f'steps  {plan}',
        f'on     {processes} on {run.accelerator.device.type} in {precision}, seed {recipe.seed}, output {run.folder}',
        *(f'note   {note}' for note in _notes(run)),
    ]


def _notes(run: Run) -> list[str]:
    """Effects of the recipe that a user may not expect."""
    recipe, plan = run.recipe, run.plan
    is_half = run.accelerator.mixed_precision == 'bf16' or recipe.model_dtype == 'bfloat16'
    notes = note_slow_bfloat16(run.accelerator.device, 'bfloat16') if is_half else []
    grid = smallest_grid(run)
    if run.val_set.is_held_out:
        before, share = run.val_set.held_out_before, f'{100 * recipe.val_fraction:g} % of each class'
        held_out = f'{share} is held out'
        if before is not None:
            held_out = f'the images in {before} are held out, and {share} without any'
        notes.append(f'no validation split: {held_out} (seed {recipe.seed}, listed in {HELD_OUT})')
    # the same, if they are parts of data without splits
    notes += dict.fromkeys(images.describe_left_out() for images in (run.train_set, run.val_set) if images.left_out)
    if plan.batch_size < recipe.batch_size:
        notes.append(f'batch_size {recipe.batch_size} is reduced to {plan.batch_size}: there are no more images')
    if recipe.balance != 'sampler':
        notes += _note_skipped(len(run.train_set), plan.steps_per_epoch * plan.batch_size, recipe.aug_repeats)
    if plan.micro_batch_size == 1 and _mixes(recipe):
        notes.append(
            'mixup and cutmix have no effect, because each part of a batch is one image; increase batch_size, or reduce'
            ' grad_accum_steps or the number of processes'
        )
    if recipe.warmup_epochs >= recipe.epochs:
        notes.append(f'lr is never reached: warmup_epochs {recipe.warmup_epochs:g} of {recipe.epochs} epochs')
    notes += [f'{name} has no effect {why}' for name, why in unused_keys(recipe).items()]
    if recipe.sync_bn and run.accelerator.num_processes == 1:
        notes.append('sync_bn has no effect with one process')
    if run.frozen:
        trained = sum(parameter.numel() for parameter in run.raw_model.parameters() if parameter.requires_grad) / 1e6
        notes.append(f'frozen except for {trained:.2f} M parameters')
    if grid and min(grid) < MIN_GRID_SIDE:
        notes.append(
            f'tokens are mixed on a grid as small as {grid[0]} x {grid[1]}, which leaves attention little to do; try a'
            f' larger img_size, or a smaller patch_size in model_kwargs'
        )
    return notes


def _note_skipped(num_images: int, length: int, repeats: int) -> list[str]:
    """A note on the images that are not in an epoch of this length."""
    skipped = num_images - math.ceil(length / repeats)
    if not skipped:
        return []
    why = 'the last, incomplete batch is dropped' if repeats == 1 else f'each of the others is used {repeats} times'
    return [f'{why}: every epoch skips {skipped} images, chosen at random']


def _mixes(recipe: Recipe) -> bool:
    return bool(recipe.mixup or recipe.cutmix or recipe.cutmix_minmax)


def unused_keys(recipe: Recipe) -> dict[str, str]:
    """The keys of a recipe that are set but have no effect, each with the reason."""
    settings, defaults = asdict(recipe), asdict(Recipe())
    has_both = recipe.mixup and (recipe.cutmix or recipe.cutmix_minmax)
    # in the order of precedence
    unused = {
        'with no_aug': (recipe.no_aug, _CROPS + _TIMM_AUGMENTATION + _ERASING + ('aug', 'albumentations', 'reprob')),
        'with aug: albumentations': (recipe.aug == 'albumentations', _TIMM_AUGMENTATION),
        'without aug: albumentations': (recipe.aug == 'timm', ('albumentations',)),
        'with aa': (recipe.aa and '3a' not in recipe.aa, ('color_jitter', 'color_jitter_prob')),
        'without reprob': (not recipe.reprob, _ERASING),
        'without mixup or cutmix': (not _mixes(recipe), _MIXING),
        'without both mixup and cutmix': (not has_both, ('mixup_switch_prob',)),
        'with cutmix_minmax': (recipe.cutmix_minmax, ('cutmix',)),
        'without bce_loss': (not recipe.bce_loss and not recipe.multi_label, ('bce_target_thresh',)),
        'without kd_model_name': (not recipe.kd_model_name, _DISTILLATION),
        'with kd_distill_type: hard': (recipe.kd_distill_type == 'hard', ('kd_temperature',)),
        'with kd_token_distill_type: hard': (_has_hard_token(recipe), ('kd_temperature',)),
        'without kd_distill_type: token': (recipe.kd_distill_type != 'token', ('kd_token_distill_type',)),
        'without kd_distill_type: transfer': (recipe.kd_distill_type != 'transfer', ('kd_block_weight',)),
        f'with opt: {recipe.opt}': (True, _not_of_optimizer(recipe.opt)),
        'with lr': (recipe.lr is not None, ('lr_base', 'lr_base_size', 'lr_base_scale')),
        'without warmup_epochs': (not recipe.warmup_epochs, ('warmup_lr',)),
        f'with sched: {recipe.sched}': (
            True,
            tuple(name for name, schedules in _OF_SCHEDULES.items() if recipe.sched not in schedules),
        ),
        'without clip_grad': (not recipe.clip_grad, ('clip_mode',)),
        'without amp': (not recipe.amp, ('amp_dtype',)),
        'without model_ema': (not recipe.model_ema, ('model_ema_decay', 'model_ema_warmup')),
    }
    found: dict[str, str] = {}
    for why, (is_unused, names) in unused.items():
        changed = [name for name in names if is_unused and settings[name] != defaults[name]]
        found = dict.fromkeys(changed, why) | found
    return found


def _has_hard_token(recipe: Recipe) -> bool:
    return recipe.kd_distill_type == 'token' and recipe.kd_token_distill_type == 'hard'


def _not_of_optimizer(opt: str) -> tuple[str, ...]:
    """The keys that timm does not pass on to an optimizer."""
    info = get_optimizer_info(opt.lower())
    taken = {'opt_eps': info.has_eps, 'opt_betas': info.has_betas, 'momentum': info.has_momentum}
    return tuple(name for name, is_taken in taken.items() if not is_taken)


def smallest_grid(run: Run) -> tuple[int, int] | None:
    """The smallest token grid of vitzoo's mixers or timm's patch embedding, None if the model has neither."""
    grids = [mixer.grid_size for _, mixer in named_mixers(run.raw_model)]
    patches = getattr(getattr(run.raw_model, 'patch_embed', None), 'grid_size', None)
    return min(grids or ([patches] if patches else []), key=min, default=None)


class Display:
    """Progress bars of training and evaluation; without a terminal, an occasional line."""

    def __init__(self, run: Run) -> None:
        self.run, self.logged_at = run, 0.0
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

    def __exit__(self, *exc_info: object) -> None:
        self.bars.stop()

    def show_step(self, images_per_second: float) -> None:
        """Advance the bar, and log loss, learning rate, speed and memory at intervals."""
        run = self.run
        self.bars.update(self.training, completed=run.step)
        is_due = time.monotonic() - self.logged_at > LOG_SECONDS
        if not is_due and (run.step % run.recipe.log_interval or not run.console.is_terminal):
            return
        note = f'loss {run.losses[-1]:.3f}  lr {learning_rate(run):.2e}  {format_speed(images_per_second)} images/s'
        note += f'  {peak_process_megabytes(run.accelerator.device) / 1e3:.1f} GB'
        self.bars.update(self.training, description=run.plan.describe_position(run.step), note=note)
        if is_due and not run.console.is_terminal:
            run.console.print(f'step {run.step}/{run.plan.steps}  {note}')
            self.logged_at = time.monotonic()

    @contextmanager
    def evaluation(self) -> Iterator[Callable[[int], None]]:
        """A bar for one pass over the validation images; call the result with the number of images in a batch."""
        world_size, total = self.run.plan.world_size, len(self.run.val_set)
        task = self.bars.add_task('validation', total=total, note='')
        yield lambda images: self.bars.advance(task, images * world_size)
        self.bars.remove_task(task)


def learning_rate(run: Run) -> float:
    """The learning rate of the last layers, the largest of all parameter groups."""
    return max(group['lr'] for group in run.optimizer.param_groups)


def report_epoch(run: Run) -> None:
    """Print the metrics of the last epoch, and write them to metrics.csv, curves.png and the trackers."""
    row = run.history[-1]
    scores = {
        'validation loss': ('eval_loss', '.4f'),
        'top-1': ('top1', '5.2f'),
        'ema': ('ema_top1', '5.2f'),
        'mAP': ('map', '5.2f'),
        'error of the outputs': ('output_error', '.5f'),
        'of the averaged weights': ('ema_output_error', '.5f'),
    }
    words = [
        f'{label} {row[name]:{form}}' + ' %' * (form == '5.2f') for label, (name, form) in scores.items() if name in row
    ]
    speed = f'{format_speed(row["images_per_second"])} images/s'
    line = f'{run.plan.describe_position(row["step"])}  loss {row["train_loss"]:.4f}  lr {row["lr"]:.2e}'
    run.console.print('  '.join([line, speed, *words]))

    # lazy: importing matplotlib takes a second
    from vitzoo.figures import draw_history

    def write() -> None:
        write_metrics(run.folder, run.history)
        draw_history(run.folder, run.history)

    write_on_main(
        run.accelerator,
        run.lock,
        write,
        lambda error: f'cannot write to {run.folder}: {error}; free some space and --resume',
    )
    # some trackers reserve the name 'step'
    run.accelerator.log({name: value for name, value in row.items() if name != 'step'}, step=row['step'])


def parse_trackers(names: str | None) -> list[str]:
    """Split a list of trackers such as 'tensorboard,wandb'.

    Raises:
        UserError: A tracker is unknown or not installed; Accelerate would silently ignore it.
    """
    known, available = [kind.value for kind in LoggerType], [str(kind) for kind in get_available_trackers()]
    trackers = [name.strip() for name in (names or '').split(',') if name.strip()]
    for name in trackers:
        if name not in known:
            hint = did_you_mean(name, known) or f': {", ".join(known)}'
            raise UserError(f"unknown tracker '{name}' in log_with{hint}")
        if name not in available:
            raise UserError(f"log_with '{name}' needs its package: pip install {name}")
    return trackers


def start_trackers(run: Run) -> None:
    """Start the trackers on the main process, with the recipe as their config.

    Raises:
        UserError: On every process, if a tracker cannot be started.
    """
    settings = {name: value for name, value in asdict(run.recipe).items() if name not in NOT_SAVED}
    # trackers accept only scalars and strings
    simple = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in settings.items()}
    run.accelerator.project_configuration = ProjectConfiguration(project_dir=str(run.folder))

    def start() -> None:
        try:
            run.accelerator.init_trackers('vitzoo', config=simple)
        except Exception as error:
            # each tracker has exceptions of its own, for a server that does not answer or a user who is not logged in
            raise RuntimeError(error) from error

    write_on_main(
        run.accelerator,
        run.lock,
        start,
        lambda error: f'cannot start log_with {run.recipe.log_with} ({error}); set it up, or leave out --log-with',
    )
