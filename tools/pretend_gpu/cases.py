"""The modules that the check runs: mixers on grids of several sizes, and small models of every backbone."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from helpers import SETTINGS, SMALLEST, build_model
from torch import nn

from vitzoo import create_mixer

# P prefix tokens; the backbones have 0 or 1
BATCH, DIM, HEADS, P = 3, 48, 6, 2
# (H, W): prime sides, no padding, a single token, and many tokens, for which mixers recompute in the backward pass
GRIDS = ((9, 13), (14, 14), (1, 1), (64, 61))
# of images, of which no backbone makes a square grid
IMAGE = (96, 160)
# dtypes of autocast, and whether the Triton kernels are selected, as by timm's experimental switch
MODES = ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False), (torch.float32, False))


class Case(NamedTuple):
    """A module, built on the CPU, the shape of its input, further arguments, and the modes in which it runs."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    others: tuple = ()
    modes: tuple = MODES[:1]


def mixer_cases(mixers: list[str], quick: bool) -> Iterator[Case]:
    """Every mixer on every grid, and on the first one with the settings of the tests."""
    for mixer in mixers:
        on_grids = [(grid, {}) for grid in (GRIDS[:1] if quick else GRIDS)]
        with_settings = [] if quick else [(GRIDS[0], kwargs) for kwargs in SETTINGS.get(mixer, []) if kwargs]
        for (H, W), kwargs in on_grids + with_settings:
            build = partial(create_mixer, mixer, DIM, HEADS, grid_size=(H, W), num_prefix_tokens=P, **kwargs)
            name = f'{mixer} {H}x{W} {kwargs or ""}'.strip()
            yield Case(name, build, (BATCH, P + H * W, DIM), ((H, W),), MODES[:2] if quick else MODES)


def model_cases(mixers: list[str], quick: bool) -> Iterator[Case]:
    """A small model of every backbone with every mixer, with and without gradient checkpointing; if quick, of one."""
    for i, mixer in enumerate(mixers):
        backbones = [*SMALLEST.items()]
        for backbone, size in [backbones[i % len(backbones)]] if quick else backbones:
            name = f'{backbone}_{mixer.removeprefix(backbone + "_")}_{size}'
            for checkpointing in [False] if quick else [False, True]:
                build = partial(build_for_training, name, checkpointing)
                yield Case(f'{name}{" checkpointing" * checkpointing}', build, (BATCH, 3, *IMAGE))


def build_for_training(name: str, checkpointing: bool) -> nn.Module:
    """A small model with stochastic depth."""
    model = build_model(name, IMAGE, drop_path_rate=0.1)
    model.set_grad_checkpointing(checkpointing)
    return model
