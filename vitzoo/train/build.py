"""What the keys of a recipe stand for: a model, the sizes of its batches, an optimizer, a schedule, a loss."""

from dataclasses import dataclass

import timm
import torch
from accelerate import PartialState
from timm.data import Mixup
from timm.loss import compute_class_weights, create_classification_loss
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from vitzoo.data import Images
from vitzoo.errors import UserError, did_you_mean
from vitzoo.load import create_model, find_model, fit_data_config, is_trained_folder, load_weights
from vitzoo.models._official import read_checkpoint, unwrap
from vitzoo.train.loss import BalancedLoss, count_labels
from vitzoo.train.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """How each global batch is dealt out, and how many there are."""

    batch_size: int
    world: int
    accum: int
    steps_per_epoch: int
    epochs: int
    lr: float

    @property
    def micro_batch_size(self) -> int:
        """Images that a process has in memory at a time."""
        return self.batch_size // (self.world * self.accum)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.epochs * self.steps_per_epoch

    def __str__(self) -> str:
        processes = f' = {self.world} processes x {self.accum} accumulated x {self.micro_batch_size} images'
        dealt = processes if self.world * self.accum > 1 else ''
        return f'batch {self.batch_size}{dealt}, lr {self.lr:.3g}, {self.epochs} epochs x {self.steps_per_epoch} steps'


def plan_batches(recipe: Recipe, num_images: int, world: int) -> Plan:
    """Deal a recipe's global batch out to `world` processes; a batch larger than the dataset becomes as large as it."""
    accum, chunks = recipe.grad_accum_steps, world * recipe.grad_accum_steps
    if recipe.batch_size % chunks:
        raise UserError(
            f'batch_size {recipe.batch_size} is not a multiple of {chunks}, that is of {world} processes x'
            f' {accum} grad_accum_steps, so it cannot be dealt out evenly'
        )
    batch_size = min(recipe.batch_size, num_images // chunks * chunks)
    if not batch_size:
        raise UserError(f'{num_images} training images are too few for {world} processes x {accum} grad_accum_steps')
    ratio = batch_size / recipe.lr_base_size
    scaled_lr = recipe.lr_base * (ratio if recipe.lr_base_scale == 'linear' else ratio**0.5)
    return Plan(
        batch_size=batch_size,
        world=world,
        accum=accum,
        steps_per_epoch=num_images // batch_size,
        epochs=recipe.epochs + recipe.cooldown_epochs,
        lr=scaled_lr if recipe.lr is None else recipe.lr,
    )


def build_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """The recipe's model, with the weights that it names.

    Raises:
        UserError: There is no such model, size, argument or weights.
    """
    name = find_model(recipe.model)
    is_folder = is_trained_folder(name)
    if recipe.pretrained and not is_folder and ':' not in name and not timm.is_model_pretrained(name):
        raise UserError(f'there are no published weights of {name}; leave out pretrained')
    is_pretrained = recipe.pretrained or is_folder or name.startswith('local-dir:')
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
    pretrained_classes = model.pretrained_cfg.get('num_classes')
    if is_pretrained and pretrained_classes != num_classes:
        _say_new_head(name, pretrained_classes, num_classes)
    if recipe.initial_checkpoint:
        _start_from(model, recipe.initial_checkpoint)
    if recipe.grad_checkpointing:
        model.set_grad_checkpointing()
    # a size that the model cannot take is better said now than at the first step
    fit_data_config(name, model, recipe.img_size)
    return model


def _start_from(model: nn.Module, path: str) -> None:
    """Load a checkpoint; where its head is for another number of classes, all but the head."""
    num_classes = model.num_classes
    checkpoint_classes = _num_classes_in(model, path)
    if checkpoint_classes not in (None, num_classes):
        model.reset_classifier(checkpoint_classes)
        load_weights(model, path)
        model.reset_classifier(num_classes)
        _say_new_head(path, checkpoint_classes, num_classes)
    else:
        load_weights(model, path)


def _say_new_head(source: str, old: int, new: int) -> None:
    PartialState().print(f'note   {source} is for {old} classes: it gets a new head for {new}')


def _num_classes_in(model: nn.Module, path: str) -> int | None:
    """The number of classes of a checkpoint's head; None if it has no head of the model's name."""
    head = unwrap(read_checkpoint(path)).get(f'{model.pretrained_cfg.get("classifier")}.weight')
    return None if head is None else len(head)


def freeze(model: nn.Module, names: str | None) -> list[nn.Module]:
    """Fix the parameters of some modules, and return the modules that have no other, which belong in eval mode.

    Args:
        names: 'backbone' for everything but the classifier, or names of modules and parameters, separated by commas.

    Raises:
        UserError: There is no such module, or nothing is left to train.
    """
    if not names:
        return []
    fixed = _backbone(model) if names == 'backbone' else _parameters_of(model, names.split(','))
    for parameter in fixed:
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"freeze '{names}' leaves nothing to train")
    return [module for module in model.modules() if not any(p.requires_grad for p in module.parameters())]


def _backbone(model: nn.Module) -> list[nn.Parameter]:
    head = model.get_classifier()
    heads = head if isinstance(head, tuple | list) else [head]
    kept = {id(parameter) for module in heads for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in kept]


def _parameters_of(model: nn.Module, names: list[str]) -> list[nn.Parameter]:
    fixed, modules = [], dict(model.named_modules())
    for name in map(str.strip, names):
        found = [p for own, p in model.named_parameters() if own == name or own.startswith(f'{name}.')]
        if not found:
            raise UserError(f"freeze: the model has no parameters in '{name}'{did_you_mean(name, modules)}")
        fixed += found
    return fixed


def compile_model(model: nn.Module, backend: str | None) -> None:
    """Let torch.compile run the model from now on; its parameters keep their names."""
    if backend is None:
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise UserError(f"torch.compile has no backend '{backend}', but {', '.join(backends)}")
    model.compile(backend=backend)


def build_ema(recipe: Recipe, model: nn.Module) -> ModelEmaV3 | None:
    """A moving average of the model's weights, if the recipe wants one."""
    if not recipe.model_ema:
        return None
    # buffers are copied: an average of BatchNorm counters or of random projections means nothing
    return ModelEmaV3(model, recipe.model_ema_decay, use_warmup=recipe.model_ema_warmup, exclude_buffers=True)


def build_optimizer(recipe: Recipe, model: nn.Module, lr: float) -> Optimizer:
    """The recipe's optimizer from timm, with no weight decay on biases and norms."""
    if recipe.opt.lower() not in list_optimizers():
        raise UserError(f"unknown optimizer '{recipe.opt}'{did_you_mean(recipe.opt, list_optimizers())}")
    own = dict(eps=recipe.opt_eps, betas=recipe.opt_betas and tuple(recipe.opt_betas))
    return create_optimizer_v2(
        model,
        opt=recipe.opt,
        lr=lr,
        weight_decay=recipe.weight_decay,
        momentum=recipe.momentum,
        layer_decay=recipe.layer_decay,
        **{name: value for name, value in own.items() if value is not None},
    )


def build_scheduler(recipe: Recipe, optimizer: Optimizer, steps_per_epoch: int) -> Scheduler:
    """The recipe's schedule from timm, a function of the number of optimizer steps done."""
    try:
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched=recipe.sched,
            num_epochs=recipe.epochs,
            warmup_epochs=recipe.warmup_epochs,
            warmup_lr=recipe.warmup_lr,
            min_lr=recipe.min_lr,
            decay_epochs=recipe.decay_epochs,
            decay_milestones=recipe.decay_milestones,
            decay_rate=recipe.decay_rate,
            cooldown_epochs=recipe.cooldown_epochs,
            step_on_epochs=False,
            updates_per_epoch=steps_per_epoch,
        )
    except ValueError as error:
        raise UserError(f'sched {recipe.sched}: {error}') from error
    return scheduler


def build_mixup(recipe: Recipe, num_classes: int) -> Mixup | None:
    """Mixup and cutmix on batches, or None where both are off."""
    if not recipe.mixup and not recipe.cutmix:
        return None
    return Mixup(
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        prob=recipe.mixup_prob,
        switch_prob=recipe.mixup_switch_prob,
        mode=recipe.mixup_mode,
        label_smoothing=recipe.smoothing,
        num_classes=num_classes,
        multi_label=recipe.multi_label,
    )


def build_loss(recipe: Recipe, mixup: Mixup | None, train_set: Images, num_classes: int) -> nn.Module:
    """The loss from timm for the kind of targets there are, balanced over the classes if the recipe says so."""
    kind = 'bce' if recipe.bce_loss or recipe.multi_label else 'ce'
    options = dict(smoothing=recipe.smoothing, bce_target_thresh=recipe.bce_target_thresh if kind == 'bce' else None)
    if recipe.balance == 'loss':
        counts = count_labels(train_set.targets, num_classes)
        if not recipe.multi_label:
            return BalancedLoss(counts, kind, **options)
        # an image has labels of many classes, so each class balances those that have it against those that lack it;
        # a label that all images have would else weigh nothing
        counts = counts.clamp(max=len(train_set) - 1)
        _, options['pos_weight'] = compute_class_weights(counts, len(train_set), 'neg_pos')
    return create_classification_loss(kind, multi_label=recipe.multi_label, soft_targets=mixup is not None, **options)
