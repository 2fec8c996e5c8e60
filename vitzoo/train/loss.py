"""The losses that timm does not have: so far one, that makes up for classes of unequal size."""

import torch
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn
from torch.nn import functional as F


def count_labels(targets: list, num_classes: int) -> Tensor:
    """How many images have each label; `targets` has a label, or a list of them, for each image."""
    labels = [label for target in targets for label in (target if isinstance(target, list) else [target])]
    return torch.bincount(torch.tensor(labels, dtype=torch.int64), minlength=num_classes)


class BalancedLoss(nn.Module):
    """Cross-entropy in which an image weighs the more, the fewer images its class has.

    An image of class c weighs N / (C N_c), where C classes have N images and c has N_c of them: 1 on average, and as
    much in all for each class, as if they were drawn equally often. A mixed image weighs as its parts do, by their
    share.

    Args:
        class_counts: (C,) the training images of each class.
        kind: 'ce' for softmax, 'bce' for binary cross-entropy.
        smoothing: Label smoothing; targets of shape (B, C) have it already.
        bce_target_thresh: Make mixed targets 0 or 1 at this value ('bce').
    """

    def __init__(self, class_counts: Tensor, kind: str, smoothing: float, bce_target_thresh: float | None = None):
        super().__init__()
        counts = class_counts.double()
        weight = counts.sum() / (counts.count_nonzero() * counts.clamp(min=1))
        self.register_buffer('weight', weight.float())
        self.smoothing = smoothing
        self.bce = BinaryCrossEntropy(smoothing, bce_target_thresh, reduction='none') if kind == 'bce' else None

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The mean over the images; logits (B, C), target (B,) or, mixed, (B, C)."""
        is_mixed = target.ndim == 2
        if self.bce is not None:
            loss = self.bce(logits, target).mean(dim=1)
        else:
            loss = F.cross_entropy(logits, target, reduction='none', label_smoothing=0 if is_mixed else self.smoothing)
        if not is_mixed:
            return (self.weight[target] * loss).mean()
        # without the smoothing, which would give every image a share in the rarest class
        share = (target - self.smoothing / logits.shape[1]) / (1 - self.smoothing)
        return (share @ self.weight * loss).mean()
