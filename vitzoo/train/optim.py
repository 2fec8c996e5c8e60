"""Builds a run's optimizer and learning-rate schedule, both timm's, from its recipe."""

import math
from itertools import pairwise
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from vitzoo.errors import UserError, did_you_mean
from vitzoo.train.recipe import Recipe


def build_optimizer(recipe: Recipe, model: nn.Module, lr: float) -> Optimizer:
    """The recipe's timm optimizer, without weight decay on biases and norms.

    Raises:
        UserError: timm has no such optimizer, it cannot be used, or it takes another number of betas.
    """
    names = [str(name) for name in list_optimizers()]
    if recipe.opt.lower() not in names:
        raise UserError(f"unknown optimizer '{recipe.opt}'{did_you_mean(recipe.opt, names)}")
    if recipe.opt.lower() == 'adahessian':
        raise UserError('opt adahessian needs second derivatives, which training does not compute; choose another opt')
    if recipe.opt.lower() == 'kron' and not torch.backends.opt_einsum.is_available():
        # timm only warns, and torch.einsum needs gigabytes for a small model
        raise UserError('opt kron needs its package: pip install opt_einsum')
    info, given = get_optimizer_info(recipe.opt.lower()), len(recipe.opt_betas or ())
    if given and info.has_betas and given != info.num_betas:
        # some optimizers would find out in their first step, and others drop the rest
        raise UserError(f'opt {recipe.opt} takes {info.num_betas} opt_betas, not {given}; correct them')
    overrides: dict[str, Any] = {}
    if recipe.opt_eps is not None:
        overrides['eps'] = recipe.opt_eps
    if recipe.opt_betas is not None:
        overrides['betas'] = tuple(recipe.opt_betas)
    try:
        optimizer = create_optimizer_v2(
            model,
            opt=recipe.opt,
            lr=lr,
            # without weight decay, timm makes one group instead of two, which cannot resume with it
            weight_decay=recipe.weight_decay or 1.0,
            momentum=recipe.momentum,
            layer_decay=recipe.layer_decay,
            **overrides,
        )
    except (AssertionError, ImportError, ValueError) as error:
        # timm's way to ask for CUDA or a package, or an optimizer's to refuse a setting
        raise UserError(f'opt {recipe.opt} cannot be used here: {error}; choose another opt') from error
    if not recipe.weight_decay:
        for group in optimizer.param_groups:
            group['weight_decay'] = 0.0
    return optimizer


def build_scheduler(recipe: Recipe, optimizer: Optimizer, steps_per_epoch: int) -> Scheduler:
    """The recipe's timm learning-rate schedule, stepped per optimizer step.

    Raises:
        UserError: The settings of the schedule contradict each other.
    """
    if recipe.sched == 'step' and recipe.decay_epochs == 0:
        raise UserError('sched step needs decay_epochs above 0; set it, or leave it out')
    milestones = recipe.decay_milestones
    if recipe.sched == 'multistep' and any(a >= b for a, b in pairwise(milestones)):
        # timm counts those passed by bisection
        raise UserError(f'decay_milestones must increase, not {milestones}; sort them, each once')
    if recipe.sched == 'rsqrt' and not recipe.warmup_epochs:
        raise UserError('sched rsqrt decays by the length of the warm-up: set warmup_epochs, or choose another sched')
    decay_epochs = recipe.decay_epochs
    if recipe.sched in ('wsd', 'rsqrt') and decay_epochs is not None:
        decay_epochs = _decay_phase(recipe, decay_epochs)
    try:
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched=recipe.sched,
            num_epochs=recipe.epochs,
            # timm takes fractions too
            warmup_epochs=recipe.warmup_epochs,  # type: ignore[arg-type]
            warmup_lr=recipe.warmup_lr,
            min_lr=recipe.min_lr,
            decay_epochs=decay_epochs,
            decay_milestones=milestones,
            decay_rate=recipe.decay_rate,
            cooldown_epochs=recipe.cooldown_epochs,
            step_on_epochs=False,
            updates_per_epoch=steps_per_epoch,
        )
    except ValueError as error:
        raise UserError(f'sched {recipe.sched}: {error}') from error
    return scheduler


def _decay_phase(recipe: Recipe, epochs: float) -> float:
    """The argument `decay_epochs` of timm for a decay phase of this length."""
    longest = recipe.epochs - recipe.warmup_epochs
    if not 0 < epochs <= longest:
        raise UserError(
            f'sched {recipe.sched} decays in the {longest:g} epochs after the warm-up, but decay_epochs is {epochs:g};'
            f' change one of them'
        )
    # timm takes a number below 1 for a fraction of these epochs, and 1 for an epoch
    return epochs if epochs >= 1 else min(epochs / longest, math.nextafter(1, 0))
