"""Scores of the robustness sets: accuracy with several allowed classes, corruption errors.

A corruption error is the mean error over five severities, and mCE is its mean over fifteen corruptions. The authors of
ImageNet-C first divide each by AlexNet's, so that hard corruptions do not dominate (https://arxiv.org/abs/1903.12261);
many papers do not. Both are computed, under different names.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vitzoo.errors import UserError

# AlexNet's mean error over the five severities, as in AugMix's code (https://github.com/google-research/augmix)
ALEXNET_ERRORS = dict(
    gaussian_noise=0.886428,
    shot_noise=0.894468,
    impulse_noise=0.922640,
    defocus_blur=0.819880,
    glass_blur=0.826268,
    motion_blur=0.785948,
    zoom_blur=0.798360,
    snow=0.866816,
    frost=0.826572,
    fog=0.819324,
    brightness=0.564592,
    contrast=0.853204,
    elastic_transform=0.646056,
    pixelate=0.717840,
    jpeg_compression=0.606500,
)


def score_allowed(logits: Tensor, allowed: Tensor, classes: Tensor | None = None) -> Tensor:
    """Score images with several allowed classes each.

    Args:
        logits: (B, num_classes).
        allowed: (B, L), the correct classes of each image, padded with -1.
        classes: The classes to choose among, as indices of `logits`; by default all.

    Returns:
        Booleans (B, 2): a correct class is the top class, or is among the top 5.
    """
    if classes is None:
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
    else:
        classes = classes.to(logits.device)
        top = classes[logits[:, classes].topk(min(5, len(classes)), dim=1).indices]
    hits = (top[:, :, None] == allowed[:, None, :]).any(dim=2)  # (B, 5)
    return torch.stack([hits[:, 0], hits.any(dim=1)], dim=1)


def summarize_allowed(hits: Tensor, allowed: Tensor) -> dict:
    """Reduce hits (N, 2) to top1 and top5 in percent over the n images that have an allowed class."""
    hits = hits[(allowed >= 0).any(dim=1)]
    n, correct = len(hits), hits.sum(dim=0).tolist()
    top1, top5 = (100 * count / n for count in correct) if n else (None, None)
    return dict(top1=top1, top5=top5, n=n)


def corruption_errors(top1: Mapping[str, Sequence[float]]) -> dict:
    """Compute the corruption errors of ImageNet-C, in percent, from the accuracy at each severity of each corruption.

    Returns:
        top1, the mean accuracy; mce_unnormalized, the mean error; mce, the mean of the errors divided by AlexNet's.

    Raises:
        UserError: One of the fifteen corruptions is missing, or one of its five severities.
    """
    missing = [name for name in ALEXNET_ERRORS if len(top1.get(name, ())) != 5]
    if missing:
        raise UserError(f'mCE is over 15 corruptions at 5 severities each; incomplete: {", ".join(missing)}')
    errors = {name: 100 - sum(top1[name]) / 5 for name in ALEXNET_ERRORS}
    mean_error = sum(errors.values()) / len(errors)
    mce = sum(errors[name] / error for name, error in ALEXNET_ERRORS.items()) / len(errors)
    return dict(top1=100 - mean_error, mce_unnormalized=mean_error, mce=mce)
