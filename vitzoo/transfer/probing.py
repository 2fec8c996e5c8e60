"""The cost of replacing the attention of each block, measured in seconds and without training."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitzoo._modes import restored_modes
from vitzoo.mixers._op_calls import recorded_calls
from vitzoo.models._final_tokens import channels_last
from vitzoo.models._mixer_paths import block_of, index_of
from vitzoo.models.swap import swap_mixer, without_warnings
from vitzoo.train.kl import kl_divergence
from vitzoo.transfer.attention import Call, attention_output, blocks_of_teacher, images_of, mixer_paths, visit_attention
from vitzoo.transfer.outputs import cosine_of_tokens, has_head


@dataclass(frozen=True)
class BlockCost:
    """Measurements of one block, averaged over images.

    Attributes:
        path: The attention layer.
        error: |mixer - attention| / |attention| of the outputs, on the teacher's inputs.
        shift_ratio: |mean of the keys| / mean |key|, averaged over heads; 0.5 is usual in pretrained models. Softmax
            attention ignores this shift and kernel mixers do not; `center_keys` removes it. nan for attention without
            keys. Linearizing Vision Transformer with Test-Time Training, https://arxiv.org/abs/2605.02772
        cosine: Mean cosine similarity of the final tokens with the teacher's, if only this block is replaced.
        divergence: KL divergence of the logits from the teacher's in nats, if only this block is replaced, summed over
            the labels of a multi-label model; None for a model without a head.
    """

    path: str
    error: float
    shift_ratio: float
    cosine: float
    divergence: float | None


@torch.no_grad()
def probe(teacher: nn.Module, student: nn.Module, loader: Iterable, *, multi_label: bool = False) -> list[BlockCost]:
    """Measure how much each mixer of a student differs from the attention that it replaces.

    Args:
        teacher: The model before `vitzoo.swap_mixer`, in evaluation mode.
        student: The model after it.
        loader: Batches (B, C, H, W), or tuples that begin with them; all are used.
        multi_label: The models predict several labels per image.

    Raises:
        ValueError: The student has no mixers, or the loader no images.
    """
    paths = mixer_paths(student)
    device = next(student.parameters()).device
    reference = with_softmax(teacher, student)
    sums = {path: torch.zeros(4, dtype=torch.float64) for path in paths}
    num_images = 0

    def compare(path: str, call: Call, output: Tensor) -> None:
        found = attention_output(student, path, call)
        error = (found - output).flatten(1).norm(dim=1) / output.flatten(1).norm(dim=1)
        sums[path][0] += error.sum().cpu()
        sums[path][1] += _shift_ratios(reference, path, call).sum().cpu()

    with restored_modes(student):
        student.eval()
        for batch in loader:
            images = images_of(batch).to(device)
            with visit_attention(teacher, paths, compare):
                features = teacher.forward_features(images)
            for path in paths:
                others = [other for other in paths if block_of(other) != block_of(path)]
                with blocks_of_teacher(student, teacher, others) as hybrid:
                    sums[path][2:] += _compare_outputs(teacher, hybrid, features, images, multi_label)
            num_images += len(images)
    if not num_images:
        raise ValueError('The loader has no images.')
    costs = []
    for path in paths:
        error, shift, cosine, change = (sums[path] / num_images).tolist()
        costs.append(BlockCost(path, error, shift, cosine, change if has_head(teacher) else None))
    return costs


def _compare_outputs(
    teacher: nn.Module, student: nn.Module, features: Tensor, images: Tensor, multi_label: bool
) -> Tensor:
    """Sums over images of the cosine similarity and of the divergence of the logits, (2,)."""
    found = student.forward_features(images)
    cosine = cosine_of_tokens(*(channels_last(teacher, x) for x in (found, features))).sum()
    change = cosine.new_zeros(())
    if has_head(teacher):
        expected, logits = (model.forward_head(x).float() for model, x in ((teacher, features), (student, found)))
        change = len(images) * kl_divergence(logits, expected, multi_label)
    return torch.stack([cosine, change]).cpu().double()


def with_softmax(teacher: nn.Module, student: nn.Module) -> nn.Module:
    """The teacher with our softmax attention, which has the same access to the keys for every family of models."""
    blocks = sorted({index_of(student, path) for path in mixer_paths(student)})
    with without_warnings():
        return swap_mixer(deepcopy(teacher), 'softmax', blocks).eval()


def _shift_ratios(reference: nn.Module, path: str, call: Call) -> Tensor:
    """|mean key| / mean |key| of each image, averaged over heads: (B,)."""
    mixer: Any = reference.get_submodule(path)
    with recorded_calls(mixer) as calls:
        attention_output(reference, path, call)
    ((_, k, *_),) = calls
    k = k.float()
    return (k.mean(dim=2).norm(dim=-1) / k.norm(dim=-1).mean(dim=2)).mean(dim=1)
