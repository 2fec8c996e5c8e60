"""Functions of heads that are computed again in the backward pass, where keeping their results takes much memory.

`recompute_heads` is for mixers of linear cost, whose results grow with the length of the sequence: it keeps nothing but
the arguments. `apply_to_heads` is for results that are large at any length; it recomputes dropout, too, and its
function may use tensors other than its arguments.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._numerics import is_compiled, is_empty, no_autocast

__all__ = [
    'apply_to_heads', 'differentiable_gradients', 'heads_at_once', 'is_stored', 'recompute_heads', 'slice_heads',
]  # fmt: skip

# intermediate results of up to 64 MB in float32 are stored
_STORED = 2**24
# the same of one sample, 16 MB: those of 1,024 tokens of width 384 in most mixers
_STORED_SAMPLE = 2**22
# intermediate results of the heads that are computed at once
_GROUP = 2**20


def is_stored(num_elements: int) -> bool:
    """Return True if that many elements of intermediate results of one sample are kept for the backward pass."""
    return num_elements <= _STORED_SAMPLE


def recompute_heads(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], num_elements: int, dropout_p: float = 0.0
) -> Tensor:
    """Apply a function of tensors (B or 1, heads or 1, ...) to a few heads at a time -> (B, heads, ...).

    Beyond 16 MB of intermediate results in a sample, the backward pass computes the function again. The size of the
    batch does not count, so that short sequences are always stored.

    Args:
        function: Treats samples and heads separately.
        tensors: All tensors that it depends on; the first is (B, heads, ...).
        num_elements: Elements of the intermediate results of one head of one sample.
        dropout_p: Dropout of the function; all results are stored if it is not 0.
    """
    if is_stored(tensors[0].shape[1] * num_elements) or dropout_p or is_compiled() or is_empty(tensors[0]):
        return function(*tensors)
    return _RecomputedHeads.apply(function, heads_at_once(tensors[0], _GROUP, num_elements), *tensors)


class _RecomputedHeads(torch.autograd.Function):
    @staticmethod
    def forward(function: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
        B, heads = tensors[0].shape[:2]
        first, *others = slice_heads(B, heads, size)
        part = function(*(_cut(x, first) for x in tensors))
        # (B, N, heads, d) in memory, so that merging the heads is free
        out = part.new_empty(B, part.shape[2], heads, *part.shape[3:]).transpose(1, 2)
        out[first] = part
        for group in others:
            out[group] = function(*(_cut(x, group) for x in tensors))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.function, ctx.size, *tensors = inputs
        ctx.save_for_backward(*tensors)
        device = tensors[0].device.type
        # the backward pass may run within another autocast than the forward pass, or without; meta tensors have none
        ctx.autocast = nullcontext
        if torch.amp.is_autocast_available(device):
            dtype, is_enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
            ctx.autocast = partial(torch.autocast, device, dtype, is_enabled)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():

            def function(*inputs: Tensor) -> Tensor:
                with ctx.autocast():
                    return ctx.function(*inputs)

            return None, None, *differentiable_gradients(function, tensors, needed, grad)
        B, heads = tensors[0].shape[:2]
        is_shared = [x.shape[:2] != (B, heads) for x in tensors]
        grads = [
            (torch.zeros_like if shared else torch.empty_like)(x) if need else None
            for x, shared, need in zip(tensors, is_shared, needed)
        ]

        # a function, so that no result of a group is kept while the next is computed
        def backward_of_group(group: tuple[slice, slice]) -> None:
            with torch.enable_grad(), ctx.autocast():
                inputs = [_cut(x, group).detach().requires_grad_(need) for x, need in zip(tensors, needed)]
                out = ctx.function(*inputs)
            for total, part, shared in zip(grads, _gradients(out, inputs, needed, grad[group]), is_shared):
                if total is not None:
                    target = _cut(total, group)
                    target.add_(part) if shared else target.copy_(part)

        for group in slice_heads(B, heads, ctx.size):
            backward_of_group(group)
        return None, None, *grads


def slice_heads(B: int, heads: int, size: int) -> list[tuple[slice, slice]]:
    """Slices of samples and heads, `size` heads in all."""
    num_samples, num_heads = max(1, size // heads), min(size, heads)
    samples = [slice(start, start + num_samples) for start in range(0, B, num_samples)]
    return [(part, slice(start, start + num_heads)) for part in samples for start in range(0, heads, num_heads)]


def _cut(x: Tensor, group: tuple[slice, slice]) -> Tensor:
    """The samples and heads of a group; a dimension of 1 belongs to all of them."""
    return x[tuple(slice(None) if n == 1 else part for n, part in zip(x.shape, group))]


def _gradients(
    out: Tensor | tuple[Tensor, ...],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grad: Tensor | tuple[Tensor, ...],
    **kwargs: Any,
) -> list:
    """The gradient of each input, None where it is not needed."""
    wanted = [x for x, need in zip(inputs, needed) if need and x is not None]
    found = iter(torch.autograd.grad(out, wanted, grad, **kwargs))
    return [next(found) if need else None for need in needed]


def differentiable_gradients(
    function: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    grad: Tensor | tuple[Tensor, ...],
    closed_over: tuple[Tensor | None, ...] = (),
) -> list[Tensor | None]:
    """The gradient of each tensor, None where it is not needed, for a backward pass that is differentiated itself.

    Such a pass must not be written in place, nor decorated with torch's `once_differentiable`: that raises an error in
    `backward`, but `torch.autograd.grad` silently returns a second derivative without this function's part.

    Args:
        function: The function whose backward pass it is, as a composition of differentiable functions.
        grad: The gradient of its output, or of each output.
        closed_over: Further tensors that it depends on without having them as arguments, after the others in `needed`.
    """
    # views, because one tensor may be several arguments
    inputs = [None if x is None else x.view_as(x) for x in tensors]
    # backward may be called within autocast
    with no_autocast(grad if isinstance(grad, Tensor) else grad[0]):
        out = function(*inputs)
        return _gradients(out, (*inputs, *closed_over), needed, grad, create_graph=True, allow_unused=True)


def apply_to_heads(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], num_elements: int) -> Tensor:
    """Apply a function of tensors (B or 1, heads, ...) to a few samples and heads at a time -> (B, heads, ...).

    Beyond 64 MB of intermediate results, the backward pass computes the function again.

    Args:
        function: Treats samples and heads separately.
        num_elements: Elements of the intermediate results of one head of one sample.
    """
    B, heads = tensors[0].shape[:2]
    # asked first, because a comparison of the batch size would limit that of an exported model
    if is_compiled() or B * heads * num_elements <= _STORED:
        return function(*tensors)
    size = heads_at_once(tensors[0], _STORED, num_elements)
    outs = []
    # splitting, unlike slicing, has a backward pass that is linear in the number of parts
    for samples in zip(*(x.expand(B, *x.shape[1:]).split(max(1, size // heads)) for x in tensors)):
        parts = zip(*(x.split(min(size, heads), dim=1) for x in samples))
        outs.append(_join([_recomputed(function, part) for part in parts], dim=1))
    return _join(outs, dim=0)


def heads_at_once(x: Tensor, limit: int, num_elements: int) -> int:
    """The number of heads of x (B, heads, ...) whose intermediate results have at most `limit` elements, at least 1."""
    # a GPU is fastest with all heads at once
    return max(1, limit // num_elements) if x.device.type == 'cpu' else x.shape[0] * x.shape[1]


def _recomputed(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False)


def _join(parts: list[Tensor], dim: int) -> Tensor:
    # torch.cat would copy a single part
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
