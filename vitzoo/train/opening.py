"""Opens a run: its processes, its data, and everything that training uses."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, ProjectConfiguration
from rich.console import Console

from vitzoo.about import read_about
from vitzoo.data import (
    DataOptions,
    Images,
    Normalize,
    eval_transform,
    open_dataset,
    resolve_data_config,
    train_transform,
)
from vitzoo.data.held_out import HELD_OUT, Subset, find_held_out
from vitzoo.data.loader import seed_everything
from vitzoo.data.options import DATA_OPTIONS, UNDIVIDED
from vitzoo.errors import UserError, count_of
from vitzoo.load import find_model
from vitzoo.models._recompute import update_statistics_once
from vitzoo.train.batches import build_mixup, build_train_loader, build_val_loader, plan_batches
from vitzoo.train.freeze import freeze
from vitzoo.train.full_model import FullModel
from vitzoo.train.lock import FolderLock
from vitzoo.train.loss import build_loss, build_task
from vitzoo.train.model import (
    build_ema,
    build_model,
    check_cuda_graphs,
    compile_model,
    convert_format,
    has_initial_weights,
    image_size,
    synchronize_batch_norm,
)
from vitzoo.train.optim import build_optimizer, build_scheduler
from vitzoo.train.processes import raise_together
from vitzoo.train.progress import parse_trackers
from vitzoo.train.recipe import Recipe
from vitzoo.train.resume import find_run
from vitzoo.train.run import Run
from vitzoo.train.sharding import prepare_optimizer, prepare_plugin


def create_accelerator(recipe: Recipe) -> Accelerator:
    """Create the Accelerator, which joins the processes started by `accelerate launch`.

    Raises:
        UserError: The precision or the kind of distributed training is not supported, also for this recipe.
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
    if kind == DistributedType.FSDP:
        prepare_plugin(recipe, accelerator)
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
        if recipe.grad_checkpointing:
            # after synchronization, which replaces the modules
            update_statistics_once(raw_model)
        raw_model = convert_format(raw_model, recipe, accelerator)
        frozen = freeze(raw_model, recipe.freeze)
        data_config = resolve_data_config(raw_model, image_size(recipe), recipe.crop_pct)
        train_set.transform = train_transform(recipe, data_config)
        val_set.transform = eval_transform(data_config)

        # before the model is wrapped, so that parameters keep their names and order
        ema = build_ema(recipe, raw_model)
        optimizer = build_optimizer(recipe, raw_model, plan.lr)
        prepare_optimizer(accelerator, optimizer)
        scheduler = build_scheduler(recipe, optimizer, plan.steps_per_epoch)
        mixup = build_mixup(recipe, num_classes, data_config['input_size'][1:])
        loss = build_loss(recipe, mixup, train_set, num_classes)
        compile_model(raw_model, recipe.torchcompile, recipe.torchcompile_mode)
        check_cuda_graphs(recipe, accelerator.device)
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


def find_held_out_list(recipe: Recipe) -> Path | None:
    """The list of the images that this run held out, if it is resumed, or the run of its initial weights or teacher."""
    if recipe.resume is not None:
        folder, checkpoints = find_run(recipe.resume, recipe.output)
        # without a checkpoint the run begins again, perhaps with another seed or fraction
        if checkpoints and (folder / HELD_OUT).is_file():
            return folder / HELD_OUT
    weights = 'published' if has_initial_weights(recipe) else 'random weights'
    found = read_about(find_model(recipe.model), weights, recipe.initial_checkpoint).get('held_out')
    if found is None and recipe.kd_model_name is not None:
        # a student is not compared on images that its teacher was trained on
        found = read_about(find_model(recipe.kd_model_name)).get('held_out')
    return found


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
    train_set = open_dataset(recipe.data_dir, 'train', held_out_before=find_held_out_list(recipe), **options)
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
    _note_images_of_teacher(recipe, val_set)
    return train_set, val_set


def _share_images(train_set: Images, val_set: Images) -> bool:
    """True if an image is in both sets; sets with different roots are different splits."""
    if train_set.root != val_set.root:
        return False
    names = set(val_set.reader.filenames())
    return any(name in names for name in train_set.reader.filenames())


def _note_images_of_teacher(recipe: Recipe, val_set: Images) -> None:
    """Say so if the teacher held out other images of the same data, so that it knows some of the validation images."""
    if recipe.kd_model_name is None or not isinstance(val_set.reader, Subset):
        return
    held_out = read_about(find_model(recipe.kd_model_name)).get('held_out')
    found = None if held_out is None else find_held_out(held_out, val_set.reader.reader)
    if found is None:
        return
    known = len({*val_set.reader.indices} - {*found.indices})
    if known:
        PartialState().print(
            f'note   the teacher {recipe.kd_model_name} may have been trained on {count_of(known, "validation image")}'
            f' of {len(val_set)}, because it held out those in {held_out}; choose initial weights and a teacher that'
            ' held out the same images'
        )


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
