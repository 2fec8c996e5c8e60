"""Builds the loss of a run from its recipe, and the task that computes it for a batch."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, compute_class_weights, create_classification_loss
from timm.task import ClassificationTask, TrainingTask
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.data import Images
from vitzoo.errors import UserError
from vitzoo.train.distill import distillation_task
from vitzoo.train.recipe import Recipe


def build_loss(recipe: Recipe, mixup: Mixup | None, train_set: Images, num_classes: int) -> nn.Module:
    """The timm loss for hard, soft or multi-label targets, or its class-balanced form.

    Raises:
        UserError: With `bce_target_thresh`, all smoothed targets would be on the same side.
    """
    kind = 'bce' if recipe.bce_loss or recipe.multi_label else 'ce'
    threshold = recipe.bce_target_thresh if kind == 'bce' else None
    if threshold is not None:
        _check_threshold(threshold, recipe.smoothing, 2 if recipe.multi_label else num_classes)
    options: dict[str, Any] = dict(smoothing=recipe.smoothing, bce_target_thresh=threshold)
    if recipe.balance == 'loss':
        counts = count_labels(train_set.targets, num_classes)
        if not recipe.multi_label:
            return BalancedLoss(counts, kind, **options)
        # positives against negatives of each class; the clamp keeps a label that all images have from weighing nothing
        counts = counts.clamp(max=len(train_set) - 1)
        _, pos_weight = compute_class_weights(counts, len(train_set), 'neg_pos')
        if threshold is None:
            return BalancedLabelLoss(pos_weight, recipe.smoothing, is_smoothed=mixup is not None)
        options['pos_weight'] = pos_weight
    return create_classification_loss(kind, multi_label=recipe.multi_label, soft_targets=mixup is not None, **options)


def _check_threshold(threshold: float, smoothing: float, num_outcomes: int) -> None:
    """Check that a threshold separates what an image is from what it is not, whose targets add up to 1."""
    off = smoothing / num_outcomes
    on = 1 - smoothing + off
    # at an end, rounding would decide
    is_high = threshold > on or math.isclose(threshold, on)
    # without smoothing, 0 makes a label of every part of a mixed image
    is_low = bool(smoothing) and (threshold < off or math.isclose(threshold, off))
    if is_high or is_low:
        raise UserError(
            f'bce_target_thresh {threshold:g} makes all targets {int(is_low)}, because smoothing {smoothing:g}'
            f' leaves them from {off:.4g} to {on:.4g}; choose a number between these'
        )


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


def count_labels(targets: list, num_classes: int) -> Tensor:
    """Number of images per class, shape (C,); `targets` has one label or a list of labels per image."""
    labels = [label for target in targets for label in (target if isinstance(target, list) else [target])]
    return torch.bincount(torch.tensor(labels, dtype=torch.int64), minlength=num_classes)


class BalancedLoss(nn.Module):
    """Cross-entropy with images weighted inversely to the size of their class.

    An image of class c has weight N / (C N_c), where N_c of N images are of class c and C classes have images. The mean
    weight is 1, and all classes have the same total weight, as if they were sampled equally often. A mixed image has
    the weights of its parts, averaged by their share.

    Args:
        class_counts: (C,) training images per class.
        kind: 'ce' for softmax, 'bce' for binary cross-entropy.
        smoothing: Label smoothing; soft targets of shape (B, C) are already smoothed.
        bce_target_thresh: Threshold for binarizing mixed targets ('bce').
    """

    weight: Tensor

    def __init__(
        self, class_counts: Tensor, kind: str, smoothing: float, bce_target_thresh: float | None = None
    ) -> None:
        super().__init__()
        counts = class_counts.double()
        weight = counts.sum() / (counts.count_nonzero() * counts.clamp(min=1))
        self.register_buffer('weight', weight.float())
        self.smoothing = smoothing
        self.bce = BinaryCrossEntropy(smoothing, bce_target_thresh, reduction='none') if kind == 'bce' else None

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over the images; logits (B, C), target (B,) or, if mixed, (B, C)."""
        is_mixed = target.ndim == 2
        if self.bce is not None:
            loss = self.bce(logits, target).mean(dim=1)
        else:
            loss = F.cross_entropy(logits, target, reduction='none', label_smoothing=0 if is_mixed else self.smoothing)
        if not is_mixed:
            return (self.weight[target] * loss).mean()
        # undo the smoothing, which would give every image a share in the rarest class
        share = (target - self.smoothing / logits.shape[1]) / (1 - self.smoothing)
        return (share @ self.weight * loss).mean()


class BalancedLabelLoss(nn.Module):
    """Binary cross-entropy of several labels per image, with the positives of each weighted against its negatives.

    The weight is not applied to the share of positives that smoothing gives to negatives; otherwise the best prediction
    for a negative of a rare label would be that it is positive. The loss of a mixed image is that of its parts,
    averaged by their share.

    Args:
        pos_weight: (C,) weight of the positives of each label.
        smoothing: Label smoothing, towards a half.
        is_smoothed: Targets are smoothed already, as those of mixed images are.
    """

    pos_weight: Tensor

    def __init__(self, pos_weight: Tensor, smoothing: float, is_smoothed: bool = False) -> None:
        super().__init__()
        self.register_buffer('pos_weight', pos_weight)
        self.smoothing, self.is_smoothed = smoothing, is_smoothed

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over images and labels; logits and target (B, C)."""
        if self.is_smoothed:
            target = (target - self.smoothing / 2) / (1 - self.smoothing)
        positive = target * self.pos_weight
        weight = positive + 1 - target
        smoothed = positive / weight * (1 - self.smoothing) + self.smoothing / 2
        return F.binary_cross_entropy_with_logits(logits, smoothed, weight)
