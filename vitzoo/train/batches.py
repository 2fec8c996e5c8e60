"""Divides a run into batches, and builds their loaders and the mixing of their images."""

from timm.data import Mixup
from torch.utils.data import DataLoader

from vitzoo.data import Images, eval_loader, train_loader
from vitzoo.data.loader import TrainBatches
from vitzoo.errors import UserError
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
            f'{num_images} training images are too few for {world_size} processes x {accum_steps} grad_accum_steps; add'
            f' images, or reduce one of them'
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
