"""The training loop: set up a run, train and evaluate it epoch by epoch, and export the model."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    broadcast,
    gather_object,
)
from rich.console import Console
from timm.utils import distribute_bn
from torch import nn

from vitzoo.data import (
    DataOptions,
    Images,
    Normalize,
    eval_transform,
    open_dataset,
    resolve_data_config,
    train_transform,
)
from vitzoo.data.held_out import HELD_OUT, write_held_out
from vitzoo.data.loader import seed_everything
from vitzoo.data.options import DATA_OPTIONS, UNDIVIDED
from vitzoo.data.transforms import expand_pipeline
from vitzoo.errors import UserError
from vitzoo.load import find_model, read_about
from vitzoo.metrics import evaluate
from vitzoo.train.build import (
    build_ema,
    build_loss,
    build_mixup,
    build_model,
    build_optimizer,
    build_scheduler,
    build_task,
    build_train_loader,
    build_val_loader,
    compile_model,
    convert_format,
    freeze,
    has_initial_weights,
    plan_batches,
    synchronize_batch_norm,
)
from vitzoo.train.full_model import FullModel
from vitzoo.train.lock import FolderLock
from vitzoo.train.progress import Display, describe_run, learning_rate, parse_trackers, report_epoch, start_trackers
from vitzoo.train.recipe import Recipe, save_recipe
from vitzoo.train.recipe_cli import load_recipe
from vitzoo.train.resume import choose_folder, contains_checkpoint, find_run, resume_run, save_run
from vitzoo.train.run import Run
from vitzoo.train.run_folder import claim_folder, export_model, remove_old_run, set_aside, write_on_main
from vitzoo.train.step import train_step

_LOWER_IS_BETTER = ('eval_loss', 'output_error')


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


def train_in_folder(run: Run, checkpoints: list[Path], stop: 'StopSignal') -> dict | None:
    """Train in a locked folder, from the newest intact checkpoint if there are any; result and errors as in `train`."""
    if checkpoints:
        # before anything is written, so that a run that cannot resume leaves the folder as it was
        with raise_together(run.accelerator):
            resume_run(run, checkpoints)
    is_elsewhere = bool(checkpoints) and not contains_checkpoint(run.folder, checkpoints[0])
    open_folder(run, is_new=not checkpoints or is_elsewhere)
    if is_elsewhere:
        # so that --resume auto finds where this run began
        save_run(run)
    with stop, Display(run) as display:
        while len(run.history) < run.plan.epochs:
            if not train_one_epoch(run, display, stop):
                run.console.print(f'stopped {stop.reason} after step {run.step}; continue with --resume {run.folder}')
                return None
    return finish(run)


class StopSignal:
    """Records whether this process received SIGTERM, or torchrun, which started it, was killed."""

    def __init__(self) -> None:
        self.received = False
        self.launcher = os.getppid() if 'TORCHELASTIC_RUN_ID' in os.environ else None

    @property
    def is_orphan(self) -> bool:
        """True if torchrun has ended without ending this process."""
        return self.launcher not in (None, os.getppid())

    @property
    def reason(self) -> str:
        """The end of the sentence 'stopped …'."""
        return 'because its launcher was killed' if self.is_orphan else 'by SIGTERM'

    def _handle(self, *signal_and_frame: object) -> None:
        self.received = True

    def __enter__(self) -> 'StopSignal':
        # Python only allows signal handlers in the main thread
        self.is_installed = threading.current_thread() is threading.main_thread()
        if self.is_installed:
            self.previous = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.is_installed:
            signal.signal(signal.SIGTERM, self.previous)


def create_accelerator(recipe: Recipe) -> Accelerator:
    """Create the Accelerator, which joins the processes started by `accelerate launch`.

    Raises:
        UserError: The precision or the kind of distributed training is not supported.
    """
    trackers = parse_trackers(recipe.log_with)
    try:
        accelerator = Accelerator(
            # explicit, because without an accelerator torchrun's processes would not join each other
            cpu=not torch.accelerator.is_available(),
            mixed_precision=_mixed_precision(recipe),
            # by default a number in the environment, by which Accelerate would divide the loss
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            log_with=trackers or None,
            # some trackers need a folder now; `start_trackers` sets that of the run
            project_config=ProjectConfiguration(project_dir='runs'),
        )
    except ValueError as error:
        raise UserError(f'amp: {error}') from error
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise UserError(f'{kind.value} is not supported; launch with --multi_gpu, or with --use_fsdp --fsdp_version 2')
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError('FSDP version 1 is not supported; launch with --use_fsdp --fsdp_version 2')
    if accelerator.mixed_precision == 'fp16' and accelerator.device.type == 'cpu':
        # Accelerate would compute in float32
        raise UserError('amp_dtype float16 needs a GPU; on a CPU, use --amp-dtype bfloat16 or no --amp')
    return accelerator


def _mixed_precision(recipe: Recipe) -> str | None:
    """Accelerate's name of the precision; None leaves it to `accelerate launch`."""
    if recipe.amp is None:
        return None
    if not recipe.amp:
        return 'no'
    return 'bf16' if recipe.amp_dtype == 'bfloat16' else 'fp16'


@contextmanager
def raise_together(accelerator: Accelerator) -> Iterator[None]:
    """Raise a UserError of any process on all of them, at the end of the block.

    Otherwise a launcher could kill rank 0 because of the error of another, before rank 0 prints it.
    """
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    message = next(filter(None, gather_object([message])), None)
    if message:
        raise UserError(message)


def set_up(recipe: Recipe, accelerator: Accelerator, lock: FolderLock, is_resumed: bool = False) -> Run:
    """Open the data, and build everything that training uses; a resumed run gets its weights later."""
    with raise_together(accelerator):
        train_set, val_set = open_data(recipe)
        plan = plan_batches(recipe, len(train_set), accelerator.num_processes)
        num_classes = recipe.num_classes or len(train_set.class_names)

        # the same initial weights on all processes
        seed_everything(recipe.seed)
        raw_model = build_model(recipe, num_classes, train_set.class_names, is_resumed).to(accelerator.device)
        if recipe.sync_bn:
            raw_model = synchronize_batch_norm(raw_model, accelerator)
        raw_model = convert_format(raw_model, recipe, accelerator)
        frozen = freeze(raw_model, recipe.freeze)
        data_config = resolve_data_config(raw_model, recipe.img_size, recipe.crop_pct)
        train_set.transform = train_transform(recipe, data_config)
        val_set.transform = eval_transform(data_config)

        # before the model is wrapped, so that parameters keep their names and order
        ema = build_ema(recipe, raw_model)
        optimizer = build_optimizer(recipe, raw_model, plan.lr)
        scheduler = build_scheduler(recipe, optimizer, plan.steps_per_epoch)
        mixup = build_mixup(recipe, num_classes, data_config['input_size'][1:])
        loss = build_loss(recipe, mixup, train_set, num_classes)
        compile_model(raw_model, recipe.torchcompile, recipe.torchcompile_mode)
    full_model = FullModel(accelerator, raw_model)
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    with raise_together(accelerator):
        task = build_task(recipe, model, loss, train_set.class_names, data_config, accelerator)
    return Run(
        recipe=recipe,
        plan=plan,
        accelerator=accelerator,
        lock=lock,
        data_config=data_config,
        train_set=train_set,
        val_set=val_set,
        raw_model=raw_model,
        model=model,
        full_model=full_model,
        ema=ema,
        optimizer=optimizer,
        scheduler=scheduler,
        task=task,
        mixup=mixup,
        frozen=frozen,
        normalize=Normalize(data_config).to(accelerator.device),
        train_loader=build_train_loader(recipe, plan, train_set, accelerator.process_index),
        val_loader=build_val_loader(recipe, plan, val_set, accelerator.process_index),
        # paths may contain what rich takes for markup
        console=Console(quiet=not accelerator.is_main_process, highlight=False, markup=False, soft_wrap=True),
    )


def find_list(recipe: Recipe) -> Path | None:
    """The list of the images that this run held out, if it is resumed, or the run of its initial weights."""
    if recipe.resume is not None:
        own = find_run(recipe.resume, recipe.output)[0] / HELD_OUT
        if own.is_file():
            return own
    weights = 'published' if has_initial_weights(recipe) else 'random weights'
    return read_about(find_model(recipe.model), weights, recipe.initial_checkpoint).get('held_out')


def open_data(recipe: Recipe) -> tuple[Images, Images]:
    """The training and validation sets, with the same classes.

    Raises:
        UserError: The dataset cannot be read, has no validation images, or does not suit the recipe.
    """
    options: dict[str, Any] = dict(
        multi_label=recipe.multi_label,
        val_fraction=recipe.val_fraction,
        seed=recipe.seed,
        options=DataOptions(**{name: getattr(recipe, name) for name in DATA_OPTIONS}),
    )
    train_set = open_dataset(recipe.data_dir, 'train', held_out_before=find_list(recipe), **options)
    # a list of other images, for which all files were read, is not tried again
    known = train_set.held_out_before
    if known is not None and not len(train_set):
        raise UserError(f"all images of '{recipe.data_dir}' are in {known}, those held out for validation; add others")
    val_set = open_dataset(
        recipe.data_dir, 'val', class_to_idx=train_set.class_to_idx, held_out_before=known, **options
    )
    shares_images = _share_images(train_set, val_set)
    if shares_images and val_set.options.val_split not in (None, UNDIVIDED):
        raise UserError(
            f"the split '{recipe.val_split}' of '{recipe.data_dir}' has training images; correct --val-split"
        )
    if shares_images:
        raise UserError(
            f"'{recipe.data_dir}' has no validation images; move the class folders to '{recipe.data_dir}/train' and"
            f" some images of each class to '{recipe.data_dir}/val/<class>', or use --val-fraction 0.2"
        )
    _check_targets(recipe, train_set)
    return train_set, val_set


def _share_images(train_set: Images, val_set: Images) -> bool:
    """True if an image is in both sets; sets with different roots are different splits."""
    if train_set.root != val_set.root:
        return False
    names = set(val_set.reader.filenames())
    return any(name in names for name in train_set.reader.filenames())


def _check_targets(recipe: Recipe, train_set: Images) -> None:
    num_classes = len(train_set.class_names)
    if num_classes < 2 and not recipe.multi_label:
        raise UserError(
            f'{train_set.root} has only one class, {train_set.class_names[0]}; classification needs at least two'
        )
    is_too_small = recipe.num_classes is not None and recipe.num_classes < num_classes
    # multi-hot targets have the classes of the dataset, so the head cannot have more
    is_too_large = recipe.num_classes is not None and recipe.num_classes > num_classes and recipe.multi_label
    if is_too_small or is_too_large:
        raise UserError(f'num_classes is {recipe.num_classes}, but {train_set.root} has {num_classes} classes')
    if recipe.multi_label and recipe.balance == 'sampler':
        raise UserError('balance: sampler needs one class per image; with multi_label, use balance: loss')
    if recipe.multi_label and recipe.kd_model_name:
        raise UserError('kd_model_name does not work with multi_label, because teachers predict one class per image')
    if recipe.eval_metric == 'map' and not recipe.multi_label:
        raise UserError('eval_metric map is measured with multi_label only; use top1, top5 or loss')


def open_folder(run: Run, is_new: bool) -> None:
    """Print the summary of the run, and write the effective recipe to its folder.

    Raises:
        UserError: The folder cannot be written, or is not shared by all machines.
    """
    lines = describe_run(run)
    for line in lines:
        run.console.print(line)
    if run.recipe.aug == 'albumentations':
        run.recipe.albumentations = expand_pipeline(run.recipe.albumentations)

    def write() -> None:
        if is_new:
            remove_old_run(run.folder)
        if run.later and not is_new:
            aside = set_aside(run.folder, run.later, len(run.history))
            run.console.print(f'note   later checkpoints and their models are now in {aside}')
        save_recipe(run.recipe, run.folder / 'recipe.yaml', lines)
        if run.val_set.is_held_out:
            write_held_out(run.folder / HELD_OUT, run.val_set.reader)

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
    run.history.append(dict(row, images_per_second=round(run.speed, 1)))
    run.losses = []
    is_due = is_evaluated(epoch, recipe.val_interval, plan.epochs)
    if first_step == last_step and run.before is not None:
        # the run resumes at the end of the epoch
        is_due = is_due or is_evaluated(epoch, *run.before)
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


def share_statistics(run: Run) -> None:
    """Give BatchNorm the same running statistics on all processes, as timm does after every epoch."""
    how, world_size = run.recipe.dist_bn, run.accelerator.num_processes
    # synchronized statistics are the same already
    if world_size == 1 or how == 'none' or run.recipe.sync_bn:
        return
    for model in [run.raw_model] + ([] if run.ema is None else [run.ema.module]):
        distribute_bn(model, world_size, reduce=how == 'reduce')


def evaluate_epoch(run: Run, display: Display) -> dict:
    """Evaluate the model and its EMA; returns the second half of a row of metrics.csv."""
    row = _evaluate_with_bar(run, display, run.full_model.gather(), prefix='')
    if run.ema is not None:
        row |= _evaluate_with_bar(run, display, run.ema.module, prefix='ema_')
    return row


def _evaluate_with_bar(run: Run, display: Display, model: nn.Module, prefix: str) -> dict:
    if run.measure is not None:
        share_buffers(run, model)
        with run.accelerator.autocast():
            return {prefix + name: value for name, value in run.measure(model).items()}
    with run.accelerator.autocast(), display.evaluation() as advance:
        scores = evaluate_shared(run, model, advance)
        if not math.isfinite(scores['loss']):
            # the logits are finite: `evaluate` has checked them
            raise UserError(
                f'the validation loss is {scores["loss"]} after step {run.step}, although all logits are finite; resume'
                f' an earlier checkpoint with a smaller lr'
            )
    columns = {f'{prefix}eval_loss': scores['loss'], f'{prefix}top1': scores['top1'], f'{prefix}top5': scores['top5']}
    if 'map' in scores:
        columns[f'{prefix}map'] = scores['map']
    return columns


def evaluate_shared(run: Run, model: nn.Module, advance: Callable[[int], None] | None = None) -> dict:
    """Evaluate a model on all processes, each on its share of the validation set."""
    share_buffers(run, model)
    return evaluate(model, run.val_loader, run.accelerator, progress=advance)


def share_buffers(run: Run, model: nn.Module) -> None:
    """Give all processes the buffers of rank 0, which are saved; they may differ."""
    if run.accelerator.num_processes > 1:
        for buffer in model.buffers():
            buffer.copy_(broadcast(buffer))


def export_best(run: Run) -> None:
    """Export the model to best/ if it is better than in every epoch before in this branch."""
    rows = [row for row in run.history[run.best_from :] if _metric_column(run.recipe) in row]
    if run.start is not None:
        rows.insert(0, run.start)
    *earlier, last = (max(rate(row, run.recipe), rate(row, run.recipe, 'ema_')) for row in rows)
    if not earlier or last > max(earlier):
        export(run, run.folder / 'best')


def rate(row: dict, recipe: Recipe, prefix: str = '') -> float:
    """The recipe's metric in a row of metrics.csv, negated if lower is better; -inf if it is not a number."""
    column = _metric_column(recipe)
    value = row.get(prefix + column, math.nan)
    if math.isnan(value):
        return -math.inf
    return -value if column in _LOWER_IS_BETTER else value


def _metric_column(recipe: Recipe) -> str:
    metric = recipe.eval_metric or ('map' if recipe.multi_label else 'top1')
    return 'eval_loss' if metric == 'loss' else metric


def export(run: Run, folder: Path) -> str:
    """Export the raw weights or their EMA, whichever is better by the recipe's metric; returns 'raw' or 'ema'."""
    row = run.history[-1]
    if run.ema is not None and rate(row, run.recipe, 'ema_') >= rate(row, run.recipe):
        weights, model = 'ema', run.ema.module
    else:
        weights, model = 'raw', run.full_model.gather()
    info: dict[str, Any] = dict(
        weights=weights, epochs=row['epoch'], seed=run.recipe.seed, data_dir=run.recipe.data_dir
    )
    if run.recipe.multi_label:
        info['multi_label'] = True
    # `vitzoo validate` opens the data with the same options
    info |= run.train_set.options.given()

    def write() -> None:
        export_model(folder, model, run.train_set.class_names, run.data_config, info)

    write_on_main(
        run.accelerator,
        run.lock,
        write,
        lambda error: f'cannot write the model to {folder}: {error}; free some space and --resume',
    )
    return weights


def finish(run: Run) -> dict:
    """Export the model of the last epoch, and evaluate the exported files."""
    weights, row = export(run, run.folder), run.history[-1]
    # in float32 and from the files, so that `vitzoo validate` prints the same numbers
    exported = timm.create_model(f'local-dir:{run.folder}', pretrained=True).to(run.accelerator.device)
    scores = evaluate_shared(run, exported)
    mean_precision = f', mAP {scores["map"]:.2f} %' if 'map' in scores else ''
    run.console.print(
        f'{run.folder} has the {weights} weights after epoch {row["epoch"]}: top-1 {scores["top1"]:.2f} %,'
        f' top-5 {scores["top5"]:.2f} %{mean_precision}, loss {scores["loss"]:.4f} on {scores["n"]} images'
    )
    return dict(scores, weights=weights, folder=str(run.folder))
