"""Distillation of the whole network, from Python; `vitzoo transfer` does it with the trainer instead."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitzoo.errors import DivergenceError
from vitzoo.mixers import no_autocast
from vitzoo.train.distill import NetworkLoss
from vitzoo.transfer.attention import mixer_paths
from vitzoo.transfer.descent import StepBatches, descend
from vitzoo.transfer.matching import new_parameters
from vitzoo.transfer.outputs import output_error

if TYPE_CHECKING:
    from accelerate import Accelerator


# learning rate of inherited parameters for an error of the outputs of 1, and its limit; the trials begin with it. The
# first steps of Adam are as long as the learning rate, however small the error is: at a rate for distant students they
# take a close one further away than the rest of the training brings it back (docs/transfer.md)
_LR_PER_ERROR, _MAX_LR = 1e-4, 3e-5
# from one trial to the next
_LR_FACTOR = 3
# a trial has this part of the steps, or this number if it is larger
_TRIAL_PART, _TRIAL_STEPS = 0.05, 10
# a stage of this many trials makes up for the harm of a large rate, whose trial must lower the error by this share of
# what the best one does
_LONG, _ENOUGH = 10, 0.5
# learning rate of the mixers' own parameters, over that of inherited ones
_NEW_OVER_INHERITED = 10


def distil(
    teacher: nn.Module,
    student: nn.Module,
    loader: Iterable | StepBatches,
    held_out: Iterable,
    *,
    steps: int = 1000,
    lr: float | str = 'auto',
    new_lr: float | str = 'auto',
    block_weight: float = 0.1,
    temperature: float = 1.0,
    eval_every: int = 50,
    accelerator: 'Accelerator | None' = None,
    state_file: Path | None = None,
    progress: Callable[[dict], None] | None = None,
    multi_label: bool = False,
) -> list[dict]:
    """Train a student on its own inputs to give the teacher's outputs, in place, without labels.

    All parameters that require a gradient are trained. The loss is `vitzoo.train.distill.NetworkLoss`: final tokens,
    logits if there is a head, and the outputs of the attention layers. As in `match_blocks`, the student is left in the
    best state on the held-out images, the start included. ViT-AdaLA, stage 2, https://arxiv.org/abs/2603.16063

    Args:
        teacher: The model before `vitzoo.swap_mixer`, in evaluation mode.
        student: The model after it, usually after `match_blocks`.
        loader: Batches (B, C, H, W) of training images, or tuples that begin with them.
        held_out: Other images, in the same form; read at each evaluation.
        lr: Learning rate of inherited parameters; 'scaled' for 1e-4 times the error of the outputs, at most 3e-5;
            'auto' for this or a larger one that trials of a twentieth of the steps, on copies, find.
        new_lr: Learning rate of the mixers' own parameters; 'auto' for ten times `lr`.
        block_weight: Weight of the attention outputs in the loss.
        temperature: Of the logits.
        eval_every: Steps between evaluations.
        accelerator: The `Accelerator` whose processes share the batches and the held-out images.
        state_file: Where the state is kept, so that the same call continues after an interruption.
        progress: Called with each row of the result.
        multi_label: The models predict several labels per image.

    Returns:
        For each evaluation its `step`, `output_error` and whether it is the `best` so far.

    Raises:
        ValueError: The student has no mixers, a loader no images, or a rate is a string that is not known.
        DivergenceError: The learning rate is too high: the error is not finite. The student is in its best state.
    """

    def train(student: nn.Module, steps: int, eval_every: int, rates: dict[str, float], **options: Any) -> list[dict]:
        def backward(images: Tensor) -> None:
            with NetworkLoss(student, teacher, block_weight, temperature, multi_label) as loss:
                student(images)
                with torch.no_grad():
                    teacher(images)
                error = loss()
                with no_autocast(error):
                    error.backward()

        groups, evaluate = parameter_groups(student, **rates), lambda: dict(output_error=error(student))
        settings = dict(steps=steps, eval_every=eval_every, accelerator=accelerator, **options)
        return descend(student, groups, loader, backward, evaluate, **settings)

    def error(student: nn.Module) -> float:
        with nullcontext() if accelerator is None else accelerator.autocast():
            return output_error(teacher, student, held_out, accelerator, multi_label)

    def trial(lr: float, new_lr: float) -> float:
        count = trial_steps(steps)
        try:
            return train(deepcopy(student), count, count, dict(lr=lr, new_lr=new_lr))[-1]['output_error']
        except DivergenceError:
            return math.inf

    was_training = student.training
    rates = choose_rates(lr, new_lr, steps, lambda: error(student), trial)
    student.train(was_training)
    return train(student, steps, eval_every, rates, state_file=state_file, progress=progress)


def choose_rates(
    lr: float | str, new_lr: float | str, steps: int, error: Callable[[], float], trial: Callable[..., float]
) -> dict[str, float]:
    """The arguments `lr` and `new_lr` of `distil` as numbers.

    The trials triple the rate as long as each lowers the error more than those before, and in a stage of ten trials or
    more as long as each lowers it at least half as much as the best. A large rate harms the student at first, so that
    the trial of a smaller one may end better, although the stage does not (docs/transfer.md).

    Args:
        steps: Those of the stage.
        error: Measures that of the student's outputs.
        trial: Measures it after a short training of a copy with `lr` and `new_lr`.

    Raises:
        ValueError: One is a string that it does not know.
    """
    for name, rate, known in (('lr', lr, ('auto', 'scaled')), ('new_lr', new_lr, ('auto',))):
        if isinstance(rate, str) and rate not in known:
            raise ValueError(f'{name} is a number or {" or ".join(map(repr, known))}, not {rate!r}.')

    def both(lr: float) -> dict[str, float]:
        return dict(lr=lr, new_lr=_NEW_OVER_INHERITED * lr if isinstance(new_lr, str) else new_lr)

    if not isinstance(lr, str):
        return both(lr)
    start = error()
    # in this order nan gives a number
    found = both(min(_MAX_LR, _LR_PER_ERROR * start))
    if lr == 'scaled':
        return found
    enough = _ENOUGH if steps >= _LONG * trial_steps(steps) else 1
    best = max(0.0, start - trial(**found))
    while True:
        larger = both(_LR_FACTOR * found['lr'])
        gain = start - trial(**larger)
        if not gain > enough * best:
            return found
        found, best = larger, max(best, gain)


def trial_steps(steps: int) -> int:
    """The number of steps of a trial, for a training of `steps`."""
    return min(steps, max(_TRIAL_STEPS, round(_TRIAL_PART * steps)))


def parameter_groups(student: nn.Module, lr: float, new_lr: float) -> list[dict]:
    """The parameters that require a gradient, inherited and new, with their learning rates.

    Raises:
        ValueError: The student has no mixers.
    """
    new = [parameter for parameter in new_parameters(student, mixer_paths(student)) if parameter.requires_grad]
    is_new = {id(parameter) for parameter in new}
    inherited = [p for p in student.parameters() if p.requires_grad and id(p) not in is_new]
    groups = [dict(params=inherited, lr=lr), dict(params=new, lr=new_lr)]
    return [group for group in groups if group['params']]
