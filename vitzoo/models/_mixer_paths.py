"""Where the mixers of a student are, and the blocks that they belong to."""

import re

from torch import nn

from vitzoo.mixers.base import named_mixers

from ._swap_models import SwappedModel

__all__ = ['block_of', 'index_of', 'swapped_paths']


def swapped_paths(student: nn.Module) -> list[str]:
    """Paths of the mixers of a student, those that `swap_mixer` put into it, such as `blocks.0.attn`, in order."""
    if not isinstance(student, SwappedModel):
        return [path for path, _ in named_mixers(student)]
    # a teacher may have mixers, too, in blocks that its student keeps
    reports = getattr(student, 'inheritance', None)
    return [path for path in student.mixers() if reports is None or index_of(student, path) in reports]


def block_of(path: str) -> str:
    """Path of the block of an attention layer: `stages.0.blocks.1` of `stages.0.blocks.1.attn`."""
    return re.findall(r'^.*?blocks(?:\.\d+)+', path)[0]


def index_of(student: nn.Module, path: str) -> int:
    """Index of the block of an attention layer, counted through the stages of a swapped model."""
    return list(student.token_blocks()).index(block_of(path))
