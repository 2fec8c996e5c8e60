"""Distillation of the whole network, from Python."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitzoo._modes import restored_modes
from vitzoo.errors import DivergenceError
from vitzoo.mixers import no_autocast
from vitzoo.train.network_loss import NetworkLoss
from vitzoo.transfer.descent import StepBatches, descend
from vitzoo.transfer.outputs import output_error
from vitzoo.transfer.rates import choose_rates, parameter_groups, trial_steps

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    seed: int = 0,
    accelerator: 'Accelerator | None' = None,
    state_file: Path | None = None,
    progress: Callable[[dict], None] | None = None,
    multi_label: bool = False,
) -> list[dict]:
    """Train a student on its own inputs to give the teacher's outputs, in place, without labels.

    All parameters that require a gradient are trained. The loss is `vitzoo.train.network_loss.NetworkLoss`: final
    tokens, logits if there is a head, and the outputs of the attention layers. As in `match_blocks`, the student is
    left in the best state on the held-out images, the start included. ViT-AdaLA, stage 2,
    https://arxiv.org/abs/2603.16063

    `vitzoo transfer` runs the same stage by the trainer, with a run folder, checkpoints and FSDP.

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
        seed: Of dropout, stochastic depth and other random numbers of the forward pass.
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
        settings = dict(steps=steps, eval_every=eval_every, seed=seed, accelerator=accelerator, **options)
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

    with restored_modes(student):
        rates = choose_rates(lr, new_lr, steps, lambda: error(student), trial)
    return train(student, steps, eval_every, rates, state_file=state_file, progress=progress)
