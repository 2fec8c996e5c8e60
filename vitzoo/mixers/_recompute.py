"""Functions of heads that are computed again in the backward pass, where keeping their results takes much memory."""

from collections.abc import Callable

import torch
from timm.layers import is_exporting
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ['apply_to_heads']

# intermediate results of up to 64 MB in float32 are stored
_STORED = 2**24


def apply_to_heads(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], num_elements: int) -> Tensor:
    """Apply a function of tensors (B or 1, heads, ...) to a few samples and heads at a time -> (B, heads, ...).

    Beyond 64 MB of intermediate results, the backward pass computes the function again.

    Args:
        function: Treats samples and heads separately.
        num_elements: Elements of the intermediate results of one head of one sample.
    """
    B, heads = tensors[0].shape[:2]
    if B * heads * num_elements <= _STORED or torch.compiler.is_compiling() or is_exporting():
        return function(*tensors)
    # a GPU is fastest with all heads at once
    size = max(1, _STORED // num_elements) if tensors[0].device.type == 'cpu' else B * heads
    outs = []
    # splitting, unlike slicing, has a backward pass that is linear in the number of parts
    for samples in zip(*(x.expand(B, *x.shape[1:]).split(max(1, size // heads)) for x in tensors)):
        parts = zip(*(x.split(min(size, heads), dim=1) for x in samples))
        outs.append(_join([_recomputed(function, part) for part in parts], dim=1))
    return _join(outs, dim=0)


def _recomputed(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False)


def _join(parts: list[Tensor], dim: int) -> Tensor:
    # torch.cat would copy a single part
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
