"""Tiny teachers for the tests of transfer, and batches of random images."""

from copy import deepcopy
from pathlib import Path

import timm
import torch
from timm.models import save_for_hf
from torch import nn

import vitzoo


def make_teacher(name: str = 'vit_tiny_patch16_224', **kwargs) -> nn.Module:
    """A ViT with no parameter left at a special value."""
    torch.manual_seed(0)
    small = dict(depth=3, img_size=48, patch_size=8, embed_dim=24, num_heads=2, num_classes=5)
    teacher = timm.create_model(name, **{**small, **kwargs}).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return teacher


def make_student(teacher: nn.Module, mixer: str, blocks: list[int] | None = None, **kwargs) -> nn.Module:
    """A copy of the teacher with another mixer."""
    torch.manual_seed(1)
    return vitzoo.swap_mixer(deepcopy(teacher), mixer, blocks, **kwargs).eval()


def divergence_of(logits: torch.Tensor, teacher_logits: torch.Tensor, multi_label: bool) -> torch.Tensor:
    """KL divergence from the teacher's probabilities of classes, or of having each label and of not having it."""
    if not multi_label:
        p, q = teacher_logits.softmax(dim=1), logits.softmax(dim=1)
        return (p * (p / q).log()).sum(dim=1).mean()
    p, q = teacher_logits.sigmoid(), logits.sigmoid()
    return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(dim=1).mean()


def batches(number: int = 2, batch_size: int = 4, size: int = 48, seed: int = 0) -> list[torch.Tensor]:
    """Random images."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch_size, 3, size, size, generator=generator) for _ in range(number)]


def save_teacher(folder: Path, num_classes: int = 3, **kwargs) -> str:
    """The folder of a trained ViT for images of 32 x 32 of the classes blue, green and red."""
    teacher = make_teacher(**{**dict(depth=2, img_size=32, num_classes=num_classes), **kwargs})
    about = dict(label_names=['blue', 'green', 'red'] if num_classes == 3 else None)
    save_for_hf(
        teacher,
        str(folder),
        model_config=about,
        safe_serialization=True,
        data_config=dict(input_size=(kwargs.get('in_chans', 3), 32, 32), crop_pct=1.0),
    )
    return str(folder)
