"""The training loop: set up, train epoch by epoch, save, resume, evaluate and export."""

import signal
import threading
import time
from pathlib import Path

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration, broadcast, gather_object
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from vitzoo.data import (
    Images,
    Normalize,
    eval_loader,
    eval_transform,
    open_dataset,
    resolve_data_config,
    train_loader,
    train_transform,
)
from vitzoo.data.held_out import HELD_OUT, write_held_out
from vitzoo.data.loader import TrainBatches, seed_everything
from vitzoo.data.transforms import expand_pipeline
from vitzoo.errors import UserError
from vitzoo.metrics import evaluate
from vitzoo.train.build import (
    Plan,
    build_ema,
    build_loss,
    build_mixup,
    build_model,
    build_optimizer,
    build_scheduler,
    compile_model,
    freeze,
    plan_batches,
)
from vitzoo.train.checkpoint import DamagedCheckpoint, load_checkpoint, on_main, save_checkpoint
from vitzoo.train.distill import build_task
from vitzoo.train.full_model import PlainModel
from vitzoo.train.progress import Display, check_trackers, describe, learning_rate, report_epoch, start_trackers
from vitzoo.train.recipe import Recipe, load_recipe, save_recipe
from vitzoo.train.run import Run
from vitzoo.train.run_folder import choose_folder, export_model, prepare_folder
from vitzoo.train.step import train_step


def train(argv: list[str] | None = None) -> dict | None:
    """Train as the command line says, and return the scores of the model that was written; None if told to stop.

    Raises:
        UserError: The command line, the recipe, the data or the model is not what it should be, the loss is not
            finite, or the disk is full.
    """
    recipe = load_recipe(argv)
    folder, checkpoints = choose_folder(recipe)
    accelerator = start_processes(recipe, folder)
    run = set_up(recipe, accelerator, folder)
    open_folder(run, is_new=not checkpoints)
    if checkpoints:
        resume(run, checkpoints)
    with StopSignal() as stop, Display(run) as display:
        while len(run.history) < run.plan.epochs:
            if not train_one_epoch(run, display, stop):
                accelerator.end_training()
                return None
    scores = finish(run)
    accelerator.end_training()
    return scores


class StopSignal:
    """Remembers whether this process was sent SIGTERM."""

    def __init__(self):
        self.came = False

    def _remember(self, *signal_and_frame) -> None:
        self.came = True

    def __enter__(self) -> 'StopSignal':
        # Python hears signals in its first thread only
        self.listens = threading.current_thread() is threading.main_thread()
        if self.listens:
            self.previous = signal.signal(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, *exc_info) -> None:
        if self.listens:
            signal.signal(signal.SIGTERM, self.previous)


def start_processes(recipe: Recipe, folder: Path) -> Accelerator:
    """Join the processes that `accelerate launch` started, in the recipe's precision or the launcher's."""
    precision = {None: None, False: 'no', True: 'bf16' if recipe.amp_dtype == 'bfloat16' else 'fp16'}[recipe.amp]
    try:
        accelerator = Accelerator(
            # said explicitly, because processes under torchrun would else not see each other on a CPU
            cpu=not torch.accelerator.is_available(),
            mixed_precision=precision,
            log_with=check_trackers(recipe.log_with) or None,
            project_config=ProjectConfiguration(project_dir=str(folder)),
        )
    except ValueError as error:
        raise UserError(f'amp: {error}') from error
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise UserError(f'{kind.value} is not supported; launch with --multi_gpu, or with --use_fsdp --fsdp_version 2')
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError('version 1 of FSDP is not supported; launch with --use_fsdp --fsdp_version 2')
    return accelerator


def set_up(recipe: Recipe, accelerator: Accelerator, folder: Path) -> Run:
    """Everything before the first step."""
    train_set, val_set = open_data(recipe)
    plan = plan_batches(recipe, len(train_set), accelerator.num_processes)
    num_classes = recipe.num_classes or len(train_set.class_names)

    # every process begins with the same weights
    seed_everything(recipe.seed)
    bare = build_model(recipe, num_classes).to(accelerator.device)
    frozen = freeze(bare, recipe.freeze)
    data_config = resolve_data_config(bare, recipe.img_size, recipe.crop_pct)
    train_set.transform = train_transform(recipe, data_config)
    val_set.transform = eval_transform(data_config)

    # made of the bare model, so that names and order of the parameters are its own
    ema = build_ema(recipe, bare)
    optimizer = build_optimizer(recipe, bare, plan.lr)
    scheduler = build_scheduler(recipe, optimizer, plan.steps_per_epoch)
    mixup = build_mixup(recipe, num_classes)
    loss = build_loss(recipe, mixup, train_set, num_classes)
    compile_model(bare, recipe.torchcompile)
    plain = PlainModel(accelerator, bare)
    model, optimizer = accelerator.prepare(bare, optimizer)
    task = build_task(recipe, model, loss, train_set.class_names, accelerator.device)
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
        plain=plain,
        ema=ema,
        optimizer=optimizer,
        scheduler=scheduler,
        task=task,
        mixup=mixup,
        frozen=frozen,
        normalize=Normalize(data_config).to(accelerator.device),
        train_loader=build_train_loader(recipe, plan, train_set, accelerator.process_index),
        val_loader=build_val_loader(recipe, plan, val_set, accelerator.process_index),
        console=Console(quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True),
    )


def open_data(recipe: Recipe) -> tuple[Images, Images]:
    """The training and the validation images, with the same classes."""
    options = dict(multi_label=recipe.multi_label, val_fraction=recipe.val_fraction, seed=recipe.seed)
    train_set = open_dataset(recipe.data_dir, 'train', **options)
    val_set = open_dataset(recipe.data_dir, 'val', class_to_idx=train_set.class_to_idx, **options)
    if train_set.root == val_set.root and not val_set.is_held_out:
        raise UserError(
            f"'{recipe.data_dir}' has no validation images; put the class folders into '{recipe.data_dir}/train', and"
            f" part of the images of each class into '{recipe.data_dir}/val/<class>', or use --val-fraction 0.2"
        )
    check_classes(recipe, train_set)
    return train_set, val_set


def check_classes(recipe: Recipe, train_set: Images) -> None:
    """Raise UserError unless the recipe suits the number of classes, and of labels that an image has."""
    classes, wanted = len(train_set.class_names), recipe.num_classes
    if classes < 2 and not recipe.multi_label:
        raise UserError(f'{train_set.root} has one class, {train_set.class_names[0]}, and telling apart takes two')
    # a target of several labels is as wide as there are classes in the data
    if wanted and (wanted < classes or (recipe.multi_label and wanted > classes)):
        raise UserError(f'num_classes is {wanted}, but {train_set.root} has {classes} classes')
    if recipe.multi_label and recipe.balance == 'sampler':
        raise UserError('balance: sampler draws by class, and with multi_label an image has several: use balance: loss')
    if recipe.multi_label and recipe.kd_model_name:
        raise UserError(
            'kd_model_name: a teacher tells which one class it sees, and with multi_label there are several'
        )


def build_train_loader(recipe: Recipe, plan: Plan, train_set: Images, rank: int) -> DataLoader:
    """This process's share of every training batch."""
    num_images, repeats = len(train_set), recipe.aug_repeats
    labels = train_set.targets if recipe.balance == 'sampler' else None
    batches = TrainBatches(num_images, plan.batch_size, plan.accum, rank, plan.world, recipe.seed, repeats, labels)
    return train_loader(train_set, batches, recipe.workers)


def build_val_loader(recipe: Recipe, plan: Plan, val_set: Images, rank: int) -> DataLoader:
    """This process's share of the validation images."""
    batch_size = recipe.validation_batch_size or min(recipe.batch_size, 256)
    return eval_loader(val_set, batch_size, recipe.workers, rank=rank, world=plan.world)


def open_folder(run: Run, is_new: bool) -> None:
    """Print what is going to happen, and store it with the effective recipe."""
    lines = describe(run)
    for line in lines:
        run.console.print(line)
    if run.recipe.aug == 'albumentations':
        run.recipe.albumentations = expand_pipeline(run.recipe.albumentations)

    def write() -> None:
        prepare_folder(run.folder, is_new)
        save_recipe(run.recipe, run.folder / 'recipe.yaml', lines)
        if run.val_set.is_held_out:
            write_held_out(run.folder / HELD_OUT, run.val_set.reader)

    # no process may still look at what is in the folder
    run.accelerator.wait_for_everyone()
    on_main(run.accelerator, write, lambda error: f"cannot write to the output folder '{run.folder}': {error}")
    if not all(gather_object([(run.folder / 'recipe.yaml').is_file()])):
        raise UserError(
            f"the output folder '{run.folder}' must be one that all machines share; choose another --output"
        )
    start_trackers(run)


def train_one_epoch(run: Run, display: Display, stop: StopSignal) -> bool:
    """Train on what is left of the epoch under way, save and evaluate; False where the run was told to stop."""
    plan, epoch = run.plan, len(run.history)
    first_step, last_step = run.step, (epoch + 1) * plan.steps_per_epoch
    run.train_loader.batch_sampler.start_at(epoch, first_step - epoch * plan.steps_per_epoch)
    micro_batches = iter(run.train_loader)
    run.task.train()
    for module in run.frozen:
        module.eval()
    start, saved_at, speed = time.perf_counter(), time.monotonic(), 0.0
    while run.step < last_step:
        is_overdue = 0 < run.recipe.checkpoint_minutes <= (time.monotonic() - saved_at) / 60
        news = train_step(run, micro_batches, stop=stop.came, save=is_overdue)
        speed = (run.step - first_step) * plan.batch_size / (time.perf_counter() - start)
        display.show_step(speed)
        every = run.recipe.checkpoint_every
        if news.stop or news.save or run.step == last_step or (every and run.step % every == 0):
            # before the evaluation, which a run that is resumed here makes up for
            save(run)
            saved_at = time.monotonic()
        if news.stop:
            run.console.print(f'stopped by SIGTERM after step {run.step}; continue with --resume {run.folder}')
            return False
    row = dict(epoch=epoch + 1, step=run.step, lr=learning_rate(run), train_loss=sum(run.losses) / len(run.losses))
    row |= dict(images_per_second=round(speed, 1), **evaluate_epoch(run, display))
    run.history.append(row)
    run.losses = []
    report_epoch(run)
    export_best(run)
    return True


def evaluate_epoch(run: Run, display: Display) -> dict:
    """Evaluate the model, and its average where there is one; the second half of a row in metrics.csv."""
    row = {}
    for prefix, model in {'': run.plain.pull(), 'ema_': run.ema and run.ema.module}.items():
        if model is None:
            continue
        with run.accelerator.autocast(), display.evaluation() as advance:
            scores = evaluate_shared(run, model, advance)
        row |= {f'{prefix}eval_loss': scores['loss'], f'{prefix}top1': scores['top1'], f'{prefix}top5': scores['top5']}
        row |= {f'{prefix}map': scores['map']} if 'map' in scores else {}
    return row


def evaluate_shared(run: Run, model: nn.Module, advance=None) -> dict:
    """Evaluate one model in all processes together."""
    if run.accelerator.num_processes > 1:
        # each process has its own BatchNorm statistics; those of the first are the ones that are saved
        for buffer in model.buffers():
            buffer.copy_(broadcast(buffer))
    return evaluate(model, run.val_loader, run.accelerator, progress=advance)


def save(run: Run) -> None:
    """Write a checkpoint."""
    state = dict(fixed=fixed_facts(run), step=run.step, losses=run.losses, history=run.history)
    ema = None if run.ema is None else run.ema.module
    folder, keep = run.folder / 'checkpoints', run.recipe.checkpoint_hist
    save_checkpoint(run.accelerator, folder, state, run.plain, ema, run.optimizer, keep)


def resume(run: Run, checkpoints: list[Path]) -> None:
    """Continue from the newest checkpoint that is whole.

    Raises:
        UserError: There is none, or it was made with other data, batches or another model.
    """
    ema = None if run.ema is None else run.ema.module
    for number, checkpoint in enumerate(checkpoints):
        try:
            state = load_checkpoint(run.accelerator, checkpoint, run.plain, ema, run.optimizer)
            break
        except DamagedCheckpoint as error:
            if number == len(checkpoints) - 1:
                raise UserError(f'cannot resume: {error}, and there is no other checkpoint before it') from error
            run.console.print(f'note   {error}; taking the one before it')
    for name, value in fixed_facts(run).items():
        if value != state['fixed'][name]:
            raise UserError(f'cannot resume from {checkpoint}: its {name} is {state["fixed"][name]}, not {value}')
    run.step, run.losses, run.history = state['step'], state['losses'], state['history']
    run.console.print(f'resumed from {checkpoint} at step {run.step} of {run.plan.steps}')


def fixed_facts(run: Run) -> dict:
    """What decides the order of the images, and so must not change within a run."""
    recipe = run.recipe
    facts = dict(batch_size=run.plan.batch_size, seed=recipe.seed, aug_repeats=recipe.aug_repeats)
    facts |= dict(balance=recipe.balance)
    return facts | dict(num_images=len(run.train_set), class_names=run.train_set.class_names)


def export_best(run: Run) -> None:
    """Write the model into best/ where no epoch before had as high a top-1."""
    tops = [max(row['top1'], row.get('ema_top1', 0.0)) for row in run.history]
    if tops[-1] > max(tops[:-1], default=-1.0):
        export(run, run.folder / 'best')


def export(run: Run, folder: Path) -> str:
    """Write the raw weights or their average, whichever scored better in the last epoch, and say which."""
    row = run.history[-1]
    weights = 'ema' if run.ema is not None and row['ema_top1'] >= row['top1'] else 'raw'
    model = run.ema.module if weights == 'ema' else run.plain.pull()
    about = dict(weights=weights, epochs=row['epoch'], seed=run.recipe.seed, data_dir=run.recipe.data_dir)
    about |= dict(multi_label=True) if run.recipe.multi_label else {}

    def write() -> None:
        export_model(folder, model, run.train_set.class_names, run.data_config, about)

    on_main(
        run.accelerator, write, lambda error: f'cannot write the model to {folder}: {error}; make room and --resume'
    )
    return weights


def finish(run: Run) -> dict:
    """Write the model of the last epoch, and evaluate it as written."""
    weights, row = export(run, run.folder), run.history[-1]
    # in float32 from the files, so that `vitzoo validate` gives this very number
    written = timm.create_model(f'local-dir:{run.folder}', pretrained=True).to(run.accelerator.device)
    scores = evaluate_shared(run, written)
    mean_precision = f', mAP {scores["map"]:.2f} %' if 'map' in scores else ''
    run.console.print(
        f'{run.folder} has the {weights} weights after epoch {row["epoch"]}: top-1 {scores["top1"]:.2f} %,'
        f' top-5 {scores["top5"]:.2f} %{mean_precision}, loss {scores["loss"]:.4f} on {scores["n"]} images'
    )
    return dict(scores, weights=weights, folder=str(run.folder))
