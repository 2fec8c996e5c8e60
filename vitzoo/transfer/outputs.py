"""The outputs of a student and of its teacher, final tokens and logits, compared on the same images."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo._modes import restored_modes
from vitzoo.models._final_tokens import channels_last, normalize_tokens
from vitzoo.train.kl import kl_divergence, same_classes
from vitzoo.transfer.attention import images_of

if TYPE_CHECKING:
    from accelerate import Accelerator


class Outputs(NamedTuple):
    """Tokens after the last block and its norm (B, …, C), and logits (B, num_classes) if the model has a head."""

    tokens: Tensor
    logits: Tensor | None

    @classmethod
    def of(cls, model: nn.Module, images: Tensor) -> 'Outputs':
        """The outputs of a model for images (B, C, H, W)."""
        features = model.forward_features(images)
        return cls(channels_last(model, features), model.forward_head(features) if has_head(model) else None)


def compare(found: Outputs, expected: Outputs, multi_label: bool = False) -> Tensor:
    """Mean squared error of the tokens, each normalized to unit variance, plus with a head the `kl_divergence` in nats.

    It is the loss of the network stage without the attention outputs. Tokens alone would not do for a classifier: its
    logits may get much better while tokens that the head does not read get worse.
    """
    error = F.mse_loss(normalize_tokens(found.tokens), normalize_tokens(expected.tokens))
    if found.logits is None or expected.logits is None:
        return error
    # in float32, equal logits would have a divergence of about 1e-7
    dtype = widest_dtype(found.logits.device)
    return error + kl_divergence(found.logits.to(dtype), expected.logits.to(dtype), multi_label)


@torch.no_grad()
def output_error(
    teacher: nn.Module,
    student: nn.Module,
    loader: Iterable,
    accelerator: 'Accelerator | None' = None,
    multi_label: bool = False,
) -> float:
    """Mean of `compare` over the images of a loader.

    Raises:
        ValueError: The loader has no images.
    """

    def measure(images: Tensor) -> Tensor:
        return compare(Outputs.of(student, images), Outputs.of(teacher, images), multi_label)

    return _mean(measure, loader, student, accelerator)


@torch.no_grad()
def output_gap(
    teacher: nn.Module,
    student: nn.Module,
    loader: Iterable,
    accelerator: 'Accelerator | None' = None,
    multi_label: bool = False,
) -> float:
    """The gap of `keep_softmax` if it has no other, in percentage points."""

    def measure(images: Tensor) -> Tensor:
        if has_head(teacher):
            wrong = ~same_classes(student(images), teacher(images), multi_label)
            return wrong.to(widest_dtype(wrong.device)).mean()
        found, expected = (Outputs.of(model, images).tokens for model in (student, teacher))
        return 1 - cosine_of_tokens(normalize_tokens(found), normalize_tokens(expected)).mean()

    return 100 * _mean(measure, loader, student, accelerator)


def cosine_of_tokens(found: Tensor, expected: Tensor) -> Tensor:
    """Mean cosine similarity of an image's final tokens, (B,); tokens are (B, N, C) or (B, H, W, C)."""
    return F.cosine_similarity(found.float(), expected.float(), dim=-1).flatten(1).mean(dim=1)


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == 'mps' else torch.float64


def has_head(model: nn.Module) -> bool:
    """True for a classifier, False for a model of features."""
    return getattr(model, 'num_classes', 0) > 0


def _mean(
    measure: Callable[[Tensor], Tensor],
    loader: Iterable,
    model: nn.Module,
    accelerator: 'Accelerator | None' = None,
) -> float:
    """Mean over the images of a loader of a measurement of each batch."""
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=widest_dtype(device), device=device)
    with restored_modes(model):
        model.eval()
        for batch in loader:
            images = images_of(batch).to(device)
            sums += len(images) * torch.stack([measure(images).to(sums.dtype), sums.new_ones(())])
    total, num_images = (sums if accelerator is None else accelerator.reduce(sums, reduction='sum')).tolist()
    if not num_images:
        raise ValueError('The loader has no images.')
    return total / num_images
