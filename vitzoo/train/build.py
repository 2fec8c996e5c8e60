"""Builds the parts of a run from its recipe: model, batches, loaders, optimizer, schedule, loss and task."""

import math
from typing import Any

import timm
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from timm.data import Mixup
from timm.layers import convert_sync_batchnorm
from timm.loss import compute_class_weights, create_classification_loss
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask, TrainingTask
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vitzoo.about import is_trained_folder, read_label_names
from vitzoo.classes import head_names, label_names, num_classes_in
from vitzoo.data import Images, eval_loader, train_loader
from vitzoo.data.loader import TrainBatches
from vitzoo.errors import UserError, did_you_mean
from vitzoo.load import create_model, find_model, fit_data_config, load_weights, swap_in
from vitzoo.models._official import read_checkpoint, unwrap
from vitzoo.train.distill import distillation_task
from vitzoo.train.loss import BalancedLoss, count_labels
from vitzoo.train.recipe import Recipe
from vitzoo.train.run import Plan


def plan_batches(recipe: Recipe, num_images: int, world_size: int) -> Plan:
    """Split the global batch over processes and accumulation steps; it is at most as large as the dataset.

    Raises:
        UserError: The batch size is not divisible, or there are fewer images than micro-batches.
    """
    accum_steps, num_micro_batches = recipe.grad_accum_steps, world_size * recipe.grad_accum_steps
    if recipe.batch_size % num_micro_batches:
        raise UserError(
            f'batch_size {recipe.batch_size} is not a multiple of {num_micro_batches}, the product of {world_size}'
            f' processes and {accum_steps} grad_accum_steps; change one of them'
        )
    batch_size = min(recipe.batch_size, num_images // num_micro_batches * num_micro_batches)
    if not batch_size:
        raise UserError(
            f'{num_images} training images are too few for {world_size} processes x {accum_steps} grad_accum_steps'
        )
    ratio = batch_size / recipe.lr_base_size
    scaled_lr = recipe.lr_base * (ratio if recipe.lr_base_scale == 'linear' else ratio**0.5)
    return Plan(
        batch_size=batch_size,
        world_size=world_size,
        accum_steps=accum_steps,
        steps_per_epoch=num_images // batch_size,
        epochs=recipe.epochs + recipe.cooldown_epochs,
        lr=scaled_lr if recipe.lr is None else recipe.lr,
    )


def build_train_loader(recipe: Recipe, plan: Plan, train_set: Images, rank: int) -> DataLoader:
    """A loader of this process's micro-batches."""
    batches = TrainBatches(
        len(train_set),
        plan.batch_size,
        plan.accum_steps,
        rank,
        plan.world_size,
        recipe.seed,
        recipe.aug_repeats,
        train_set.targets if recipe.balance == 'sampler' else None,
    )
    return train_loader(train_set, batches, recipe.workers)


def build_val_loader(recipe: Recipe, plan: Plan, val_set: Images, rank: int) -> DataLoader:
    """A loader of this process's validation batches."""
    batch_size = recipe.validation_batch_size or min(recipe.batch_size, 256)
    return eval_loader(val_set, batch_size, recipe.workers, rank=rank, world=plan.world_size)


def has_initial_weights(recipe: Recipe) -> bool:
    """Return True if training begins with the weights of the model's name or folder."""
    name = find_model(recipe.model)
    return recipe.pretrained or is_trained_folder(name) or name.startswith('local-dir:')


def build_model(
    recipe: Recipe, num_classes: int, class_names: list[str] | None = None, is_resumed: bool = False
) -> nn.Module:
    """The recipe's model, with its initial weights.

    Args:
        class_names: Those of the data, for a note if the model was trained on others.
        is_resumed: Leave out the initial checkpoint, which may be gone, because the run continues from another.

    Raises:
        UserError: The model, its weights, an argument or the image size does not exist.
    """
    name = find_model(recipe.model)
    is_folder = is_trained_folder(name)
    if recipe.pretrained and not is_folder and ':' not in name and not timm.is_model_pretrained(name):
        raise UserError(f'there are no published weights of {name}; leave out pretrained')
    is_pretrained = has_initial_weights(recipe)
    model = create_model(
        name,
        img_size=recipe.img_size,
        model_kwargs=recipe.model_kwargs,
        pretrained=is_pretrained,
        num_classes=num_classes,
        in_chans=recipe.in_chans,
        drop_rate=recipe.drop,
        drop_path_rate=recipe.drop_path,
    )
    found = getattr(model, 'num_classes', None)
    if found != num_classes:
        has = 'is no classifier' if found is None else f'has {found} classes'
        raise UserError(
            f'{name} with model_kwargs {recipe.model_kwargs} {has}, but training needs {num_classes}; correct them'
        )
    if not is_pretrained or recipe.initial_checkpoint:
        # it is that of the published weights, which the model does not have
        model.pretrained_cfg.pop('license', None)
    pretrained_classes = model.pretrained_cfg.get('num_classes')
    source, known = name, []
    if is_pretrained and pretrained_classes != num_classes:
        _note_new_head(name, pretrained_classes, num_classes)
    elif is_pretrained:
        known = label_names(model)
    if recipe.initial_checkpoint and not is_resumed:
        _start_from(model, recipe.initial_checkpoint)
        source, known = recipe.initial_checkpoint, read_label_names(recipe.initial_checkpoint, num_classes)
    if class_names and known not in ([], class_names):
        old, new = (', '.join(names[:3]) + ', …' * (len(names) > 3) for names in (known, class_names))
        PartialState().print(f'note   {source} has a head for the classes {old}; it is kept for the classes {new}')
    if recipe.mixer is not None:
        # after the checkpoint, which mixers inherit as well
        swapped = swap_in(name, model, recipe.mixer, recipe.mixer_kwargs)
        PartialState().print(f'note   the attention of {name} is replaced: {swapped}')
    elif recipe.mixer_kwargs:
        raise UserError(f'mixer_kwargs {recipe.mixer_kwargs} need a mixer; add --mixer NAME, or use --model-kwargs')
    if recipe.grad_checkpointing:
        try:
            model.set_grad_checkpointing()
        except AssertionError as error:
            raise UserError(f'{name} cannot recompute activations: {error}; leave out --grad-checkpointing') from error
    # check the image size before the first step does
    fit_data_config(name, model, recipe.img_size)
    return model


def _start_from(model: nn.Module, path: str) -> None:
    """Load a checkpoint; where its head is for another number of classes, or it has none, all but the head."""
    num_classes, weights = model.num_classes, unwrap(read_checkpoint(path))
    checkpoint_classes = num_classes_in(model, weights)
    if checkpoint_classes == num_classes or (checkpoint_classes is None and not _lacks_only_the_head(model, weights)):
        load_weights(model, path)
        return
    model.reset_classifier(checkpoint_classes or 0)
    load_weights(model, path)
    model.reset_classifier(num_classes)
    _note_new_head(path, checkpoint_classes, num_classes)


def _note_new_head(source: str, old: int | None, new: int) -> None:
    has = f'a head for {old} classes' if old else 'no head'
    PartialState().print(f'note   {source} has {has}; using a new head for {new} classes')


def _lacks_only_the_head(model: nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    missing = model.state_dict().keys() - weights.keys()
    return bool(missing) and all(name.rpartition('.')[0] in head_names(model) for name in missing)


def synchronize_batch_norm(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Convert BatchNorm so that it normalizes over the images of all processes; parameters and their names stay.

    Raises:
        UserError: PyTorch has no synchronized BatchNorm for this device.
    """
    if accelerator.num_processes == 1:
        return model
    if accelerator.device.type == 'cpu':
        raise UserError('sync_bn needs GPUs, because PyTorch has no synchronized BatchNorm on CPUs; leave it out')
    return convert_sync_batchnorm(model)


def freeze(model: nn.Module, names: str | None) -> list[nn.Module]:
    """Freeze parameters, and return the frozen modules, which belong in eval mode.

    A module is frozen if it has parameters and all of them are. Its submodules go into eval mode with it; dropout and
    stochastic depth of a module that is trained at least in part stay active. With 'backbone', modules without
    parameters outside the head are frozen too.

    Args:
        names: Names of modules or parameters, separated by commas, or 'backbone' for all but the classifier.

    Raises:
        UserError: A name does not exist, or nothing is left to train.
    """
    if not names:
        return []
    frozen = _backbone_parameters(model) if names == 'backbone' else _named_parameters(model, names.split(','))
    for parameter in frozen:
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"freeze '{names}' leaves nothing to train")
    modules = [module for module in model.modules() if _is_frozen(module)]
    if names == 'backbone':
        # dropout before the blocks, but not timm's head_drop
        children = [child for name, child in model.named_children() if not name.startswith('head')]
        modules += [child for child in children if next(child.parameters(), None) is None]
    return modules


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _backbone_parameters(model: nn.Module) -> list[nn.Parameter]:
    classifier = model.get_classifier()
    # DeiT's distilled models have two heads
    heads = classifier if isinstance(classifier, tuple | list) else [classifier]
    head_ids = {id(parameter) for head in heads for parameter in head.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in head_ids]


def _named_parameters(model: nn.Module, names: list[str]) -> list[nn.Parameter]:
    parameters = []
    for prefix in map(str.strip, names):
        found = [p for name, p in model.named_parameters() if name == prefix or name.startswith(f'{prefix}.')]
        if not found:
            hint = did_you_mean(prefix, [name for name, _ in model.named_modules() if name])
            raise UserError(f"freeze: the model has no parameters in '{prefix}'{hint}")
        parameters += found
    return parameters


def convert_format(model: nn.Module, recipe: Recipe, accelerator: Accelerator) -> nn.Module:
    """Convert the model, and what it is called with, to the recipe's dtype and memory format; its outputs are float32.

    Raises:
        UserError: The recipe has a dtype for the model and mixed precision, or FSDP cannot shard the format.
    """
    if recipe.channels_last and accelerator.distributed_type == DistributedType.FSDP:
        raise UserError('channels_last does not work with FSDP, which shards contiguous weights only; leave it out')
    if recipe.model_dtype != 'float32':
        if accelerator.mixed_precision != 'no':
            raise UserError(f'model_dtype {recipe.model_dtype} leaves nothing to amp; leave out one of them')
        model = model.to(getattr(torch, recipe.model_dtype))
        model.register_forward_pre_hook(_cast_input)
        model.register_forward_hook(_cast_output)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
        model.register_forward_pre_hook(_to_channels_last)
    return model


def _cast_input(model: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    # the averaged weights stay in float32
    return inputs[0].to(next(model.parameters()).dtype)


def _cast_output(
    model: nn.Module, inputs: tuple, logits: torch.Tensor | tuple[torch.Tensor, ...]
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    # distilled models return the logits of both heads in training
    return tuple(part.float() for part in logits) if isinstance(logits, tuple) else logits.float()


def _to_channels_last(model: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return inputs[0].contiguous(memory_format=torch.channels_last)


def compile_model(model: nn.Module, backend: str | None, mode: str | None = None) -> None:
    """Compile the model's forward pass in place, which keeps its parameter names.

    Raises:
        UserError: torch.compile has no such backend, or the backend has no modes.
    """
    if mode is not None and backend != 'inductor':
        raise UserError(f'torchcompile_mode {mode} needs --torchcompile inductor')
    if backend is None:
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise UserError(f"torch.compile has no backend '{backend}', only {', '.join(backends)}")
    model.compile(backend=backend, mode=mode)


def build_ema(recipe: Recipe, model: nn.Module) -> ModelEmaV3 | None:
    """An exponential moving average of the model's weights, if the recipe has one."""
    if not recipe.model_ema:
        return None
    return ModelEmaV3(
        model,
        recipe.model_ema_decay,
        use_warmup=recipe.model_ema_warmup,
        # small updates would be rounded to nothing in bfloat16
        dtype=torch.float32,
        # buffers are copied: averages of BatchNorm counters or random projections are meaningless
        exclude_buffers=True,
    )


def build_optimizer(recipe: Recipe, model: nn.Module, lr: float) -> Optimizer:
    """The recipe's timm optimizer, without weight decay on biases and norms.

    Raises:
        UserError: timm has no such optimizer, or it cannot be used.
    """
    names = [str(name) for name in list_optimizers()]
    if recipe.opt.lower() not in names:
        raise UserError(f"unknown optimizer '{recipe.opt}'{did_you_mean(recipe.opt, names)}")
    if recipe.opt.lower() == 'adahessian':
        raise UserError('opt adahessian needs second derivatives, which training does not compute; choose another opt')
    if recipe.opt.lower() == 'kron' and not torch.backends.opt_einsum.is_available():
        # timm only warns, and torch.einsum needs gigabytes for a small model
        raise UserError('opt kron needs its package: pip install opt_einsum')
    overrides: dict[str, Any] = {}
    if recipe.opt_eps is not None:
        overrides['eps'] = recipe.opt_eps
    if recipe.opt_betas is not None:
        overrides['betas'] = tuple(recipe.opt_betas)
    try:
        return create_optimizer_v2(
            model,
            opt=recipe.opt,
            lr=lr,
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            layer_decay=recipe.layer_decay,
            **overrides,
        )
    except (AssertionError, ImportError, ValueError) as error:
        # timm's way to ask for CUDA or a package, or an optimizer's to refuse a setting
        raise UserError(f'opt {recipe.opt} cannot be used here: {error}; choose another opt') from error


def build_scheduler(recipe: Recipe, optimizer: Optimizer, steps_per_epoch: int) -> Scheduler:
    """The recipe's timm learning-rate schedule, stepped per optimizer step.

    Raises:
        UserError: The settings of the schedule contradict each other.
    """
    if recipe.sched == 'step' and recipe.decay_epochs == 0:
        raise UserError('sched step needs decay_epochs above 0; set it, or leave it out')
    if recipe.sched == 'rsqrt' and not recipe.warmup_epochs:
        raise UserError('sched rsqrt decays by the length of the warm-up: set warmup_epochs, or choose another sched')
    decay_epochs = recipe.decay_epochs
    if recipe.sched in ('wsd', 'rsqrt') and decay_epochs is not None:
        decay_epochs = _decay_phase(recipe, decay_epochs)
    try:
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched=recipe.sched,
            num_epochs=recipe.epochs,
            # timm takes fractions too
            warmup_epochs=recipe.warmup_epochs,  # type: ignore[arg-type]
            warmup_lr=recipe.warmup_lr,
            min_lr=recipe.min_lr,
            decay_epochs=decay_epochs,
            decay_milestones=recipe.decay_milestones,
            decay_rate=recipe.decay_rate,
            cooldown_epochs=recipe.cooldown_epochs,
            step_on_epochs=False,
            updates_per_epoch=steps_per_epoch,
        )
    except ValueError as error:
        raise UserError(f'sched {recipe.sched}: {error}') from error
    return scheduler


def _decay_phase(recipe: Recipe, epochs: float) -> float:
    """The argument `decay_epochs` of timm for a decay phase of this length."""
    longest = recipe.epochs - recipe.warmup_epochs
    if not 0 < epochs <= longest:
        raise UserError(
            f'sched {recipe.sched} decays in the {longest:g} epochs after the warm-up, but decay_epochs is {epochs:g};'
            f' change one of them'
        )
    # timm takes a number below 1 for a fraction of these epochs, and 1 for an epoch
    return epochs if epochs >= 1 else min(epochs / longest, math.nextafter(1, 0))


def build_mixup(recipe: Recipe, num_classes: int, img_size: tuple[int, int]) -> Mixup | None:
    """Mixup and CutMix of batches, None if both are disabled.

    Raises:
        UserError: There is no box of whole pixels in the range of `cutmix_minmax`.
    """
    if not recipe.mixup and not recipe.cutmix and recipe.cutmix_minmax is None:
        return None
    if recipe.cutmix_minmax is not None:
        low, high = recipe.cutmix_minmax
        # the sides are drawn below the upper end
        if any(int(side * low) >= int(side * high) for side in img_size):
            raise UserError(f'cutmix_minmax {low} {high} has no whole number of pixels for images of {img_size}')
    return Mixup(
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        cutmix_minmax=recipe.cutmix_minmax,
        prob=recipe.mixup_prob,
        switch_prob=recipe.mixup_switch_prob,
        mode=recipe.mixup_mode,
        label_smoothing=recipe.smoothing,
        num_classes=num_classes,
        multi_label=recipe.multi_label,
    )


def build_loss(recipe: Recipe, mixup: Mixup | None, train_set: Images, num_classes: int) -> nn.Module:
    """The timm loss for hard, soft or multi-label targets, or its class-balanced form."""
    kind = 'bce' if recipe.bce_loss or recipe.multi_label else 'ce'
    threshold = recipe.bce_target_thresh if kind == 'bce' else None
    options: dict[str, Any] = dict(smoothing=recipe.smoothing, bce_target_thresh=threshold)
    if recipe.balance == 'loss':
        counts = count_labels(train_set.targets, num_classes)
        if not recipe.multi_label:
            return BalancedLoss(counts, kind, **options)
        # positives against negatives of each class; the clamp keeps a label that all images have from weighing nothing
        counts = counts.clamp(max=len(train_set) - 1)
        _, options['pos_weight'] = compute_class_weights(counts, len(train_set), 'neg_pos')
    return create_classification_loss(kind, multi_label=recipe.multi_label, soft_targets=mixup is not None, **options)


def build_task(
    recipe: Recipe,
    model: nn.Module,
    loss: nn.Module,
    class_names: list[str],
    data_config: dict,
    accelerator: Accelerator,
) -> TrainingTask:
    """The timm task that maps images and targets to the loss, with a teacher if the recipe has one.

    Raises:
        UserError: The teacher does not suit the data or the model.
    """
    if recipe.kd_model_name is not None:
        task = distillation_task(recipe, model, loss, class_names, data_config, accelerator)
    else:
        task = ClassificationTask(model, loss, device=accelerator.device, verbose=False)
    return task.to(accelerator.device)
