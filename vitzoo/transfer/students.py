"""Students: copies of a teacher whose attention is replaced by mixers that start from its weights."""

from collections.abc import Iterable
from copy import deepcopy

import torch
from torch import nn

from vitzoo.errors import UserError
from vitzoo.mixers import mixer_class
from vitzoo.models.swap import swap_mixer
from vitzoo.transfer.attention import mixer_paths
from vitzoo.transfer.matching import new_parameters


def make_student(name: str, teacher: nn.Module, mixer: str, mixer_kwargs: dict, seed: int) -> nn.Module:
    """A copy of a teacher with another mixer, which inherits the weights of the attention.

    Args:
        name: Name of the teacher in errors.
        mixer_kwargs: Arguments of the mixer; they override its `start_arguments`.
        seed: Of the parameters that are not inherited.

    Raises:
        UserError: There is no such mixer, or the teacher or the arguments do not suit it.
    """
    torch.manual_seed(seed)
    try:
        student = swap_mixer(deepcopy(teacher), mixer, **{**mixer_class(mixer).start_arguments, **mixer_kwargs})
    except (TypeError, ValueError) as error:
        raise UserError(f'cannot replace the attention of {name} by {mixer}: {error}') from error
    if getattr(student, 'rope', None) is not None and not (mixer_class(mixer).has_rope or student.has_pos_embed()):
        raise UserError(
            f'{mixer} does not compare queries with keys, so {name} would lose its rotary positions and have no'
            f' others; choose a mixer that does, such as ls or linear'
        )
    _start_added_terms(student)
    return student.eval()


@torch.no_grad()
def _start_added_terms(student: nn.Module) -> None:
    """Let new biases of positions and local terms start at 0, and new gates open."""
    paths = mixer_paths(student)
    new = {id(parameter) for parameter in new_parameters(student, paths)}
    for path in paths:
        mixer = student.get_submodule(path)
        names = mixer.added_terms if mixer.gate_bias is None else (*mixer.added_terms, 'gate.')
        for name, parameter in mixer.named_parameters():
            if id(parameter) in new and name.startswith(names):
                parameter.fill_(mixer.gate_bias if name == 'gate.bias' else 0)


def randomize(student: nn.Module, seed: int) -> nn.Module:
    """Initialize all parameters of a student again, as a control of what it inherited.

    Parameters that have no initialization of their own keep their mean and standard deviation.
    """
    torch.manual_seed(seed)
    done: set[int] = set()
    for module in student.modules():
        if hasattr(module, 'reset_parameters'):
            module.reset_parameters()
            done.update(id(parameter) for parameter in module.parameters(recurse=False))
    with torch.no_grad():
        for parameter in student.parameters():
            if id(parameter) not in done:
                std, mean = torch.std_mean(parameter, correction=0)
                parameter.normal_(float(mean), float(std))
    return student


@torch.no_grad()
def check_student(name: str, student: nn.Module, input_size: tuple[int, int, int]) -> None:
    """Run a student on one image.

    Raises:
        UserError: It fails, or its grid has a single row or column.
    """
    grid = min(min(grid_size) for grid_size in _grid_sizes(student))
    if grid < 2:
        raise UserError(
            f'the tokens of {name} at {input_size[1]} x {input_size[2]} pixels form a single row or column; use a'
            f' larger --img-size'
        )
    try:
        student(torch.zeros(1, *input_size, device=next(student.parameters()).device))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(
            f'{name} with another mixer cannot take {input_size[1]} x {input_size[2]} pixels; choose another --img-size'
            f' ({error})'
        ) from error


def _grid_sizes(student: nn.Module) -> Iterable[tuple[int, int]]:
    return [student.get_submodule(path).grid_size for path in mixer_paths(student)]
