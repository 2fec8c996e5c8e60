"""The attention layers of a teacher and the mixers that replace them in a student, at the same paths."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitzoo.models._attention_hook import Handle, hook_attention
from vitzoo.models._mixer_paths import block_of, swapped_paths

# positional and keyword arguments of a block
Call = tuple[tuple, dict]


def mixer_paths(student: nn.Module) -> list[str]:
    """Paths of the mixers of a student, as `swapped_paths` gives them.

    Raises:
        ValueError: There are none.
    """
    paths = swapped_paths(student)
    if not paths:
        raise ValueError(f'{type(student).__name__} has no token mixers; apply vitzoo.swap_mixer to it first.')
    return paths


@contextmanager
def visit_attention(
    teacher: nn.Module, paths: Iterable[str], visit: Callable[[str, Call, Tensor], None]
) -> Iterator[None]:
    """In each forward pass of the teacher, call `visit(path, call, output)` for every attention layer in order.

    `call` has the arguments of the layer's block, and `output` is (B, N, C). Nothing is kept between the calls, so the
    teacher's pass needs the memory of one block.
    """
    calls: dict[str, Call] = {}

    def keep_call(path: str, block: nn.Module, args: tuple, kwargs: dict) -> None:
        calls[path] = args, kwargs

    def call_visit(path: str, output: Tensor) -> None:
        visit(path, calls[path], output)

    hooks: list[Handle] = []
    for path in paths:
        block = teacher.get_submodule(block_of(path))
        hooks.append(block.register_forward_pre_hook(partial(keep_call, path), with_kwargs=True))
        hooks.append(hook_attention(teacher, path, partial(call_visit, path)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Reached(Exception):
    """Ends the forward pass of a block after its attention layer."""


def attention_output(model: nn.Module, path: str, call: Call) -> Tensor:
    """Output of an attention layer (B, N, C) for the arguments of its block, whose MLP is not computed."""
    outputs = []

    def stop(attn: nn.Module, args: tuple, output: Tensor) -> None:
        outputs.append(output)
        raise _Reached

    hook = model.get_submodule(path).register_forward_hook(stop)
    args, kwargs = call
    try:
        model.get_submodule(block_of(path))(*args, **kwargs)
    except _Reached:
        pass
    finally:
        hook.remove()
    (output,) = outputs
    return output


@contextmanager
def blocks_of_teacher(student: nn.Module, teacher: nn.Module, paths: Iterable[str]) -> Iterator[nn.Module]:
    """The student with the teacher's blocks at these paths, while the context is open."""
    own = {block_of(path): student.get_submodule(block_of(path)) for path in paths}
    lost_bias = lost_shared_bias(student, teacher) if own else None
    try:
        for name in own:
            student.set_submodule(name, teacher.get_submodule(name))
        if lost_bias:
            setattr(student, lost_bias, getattr(teacher, lost_bias))
        yield student
    finally:
        for name, block in own.items():
            student.set_submodule(name, block)
        if lost_bias:
            setattr(student, lost_bias, None)


def lost_shared_bias(student: nn.Module, teacher: nn.Module) -> str | None:
    """The name of the position bias of all of the teacher's blocks if a student with mixers in all of them lost it."""
    name = getattr(type(student), 'shared_bias', None)
    return name if name and getattr(student, name) is None and getattr(teacher, name) is not None else None


@contextmanager
def zero_attention(student: nn.Module) -> Iterator[nn.Module]:
    """The student with the output of its mixers set to zero, while the context is open.

    A mixer that is not better than this control contributes nothing. Component collapse,
    https://arxiv.org/abs/2510.05901
    """
    hooks = [
        student.get_submodule(path).register_forward_hook(lambda mixer, args, output: torch.zeros_like(output))
        for path in mixer_paths(student)
    ]
    try:
        yield student
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def only_part(student: nn.Module, part: str) -> Iterator[nn.Module]:
    """The student with one part of its mixers alone, while the context is open; `part` is one of `parts_of`."""
    mixers: list[Any] = [student.get_submodule(path) for path in mixer_paths(student)]
    mixers = [mixer for mixer in mixers if part in mixer.parts]
    try:
        for mixer in mixers:
            mixer.part = part
        yield student
    finally:
        for mixer in mixers:
            mixer.part = None


def parts_of(student: nn.Module) -> list[str]:
    """Names of the parts that mixers of the student can be limited to."""
    return list(dict.fromkeys(part for path in mixer_paths(student) for part in student.get_submodule(path).parts))


def images_of(batch: Tensor | tuple | list) -> Tensor:
    """The images of a batch, or of a tuple that begins with them."""
    return batch if isinstance(batch, Tensor) else batch[0]
