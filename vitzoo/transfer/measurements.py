"""Measurements of a student: the cost of its blocks, its controls, its speed and its oversmoothing."""

import sys
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from vitzoo.errors import UserError
from vitzoo.metrics.oversmoothing import token_statistics
from vitzoo.metrics.speed import measure_throughput
from vitzoo.train.lock import FolderLock
from vitzoo.transfer.attention import only_part, parts_of, zero_attention
from vitzoo.transfer.network import load_best, train_network
from vitzoo.transfer.opening import Transfer
from vitzoo.transfer.probing import probe
from vitzoo.transfer.record import STATES, TransferRecord
from vitzoo.transfer.students import randomize

# for the control from random weights, which has more to learn than a student
_RANDOM_LR = 1e-3
# of speed measurements
_CPU_BATCH_SIZE, _ACCELERATOR_BATCH_SIZE = 1, 16


def measure_blocks(transfer: Transfer, student: nn.Module) -> list[dict]:
    """The cost of each block, as in `probe`, on the first held-out images."""
    with transfer.accelerator.autocast():
        costs = probe(transfer.teacher, student, transfer.first_held_out, multi_label=transfer.data.multi_label)
        return [asdict(cost) for cost in costs]


def measure_controls(transfer: Transfer, student: nn.Module, record: TransferRecord) -> dict[str, dict]:
    """Scores of the student without attention, limited to its parts, and trained from random weights."""
    with zero_attention(student):
        found = dict(zero=transfer.score(student))
    for part in parts_of(student):
        with only_part(student, part):
            found[part] = transfer.score(student)
    options = transfer.options
    if options.random_control:
        transfer.console.print('control        all parameters from random weights')
        other, folder = randomize(deepcopy(student), options.seed), record.folder / STATES / 'random'
        steps, lr = options.steps + options.network_steps, _RANDOM_LR
        lock, progress = FolderLock(folder), record.write_time
        rows = train_network(transfer, other, lock, steps=steps, lr=lr, new_lr=lr, progress=progress)
        load_best(other, folder, rows)
        found['random'] = transfer.score(other)
    return found


def measure_speed(transfer: Transfer, student: nn.Module) -> dict[str, dict]:
    """Images per second of the teacher and the student, by the side of square images, measured by the main process.

    Sizes that a model cannot take are left out. `doubt` is the reason to doubt one of the two, if there is one.
    """
    found: dict[str, dict] = {}
    if not transfer.accelerator.is_main_process:
        return found
    batch_size = _CPU_BATCH_SIZE if transfer.accelerator.device.type == 'cpu' else _ACCELERATOR_BATCH_SIZE
    for name, model in _pair(transfer, student):
        for side in transfer.options.sizes:
            try:
                resized: Any = deepcopy(model)
                # others take images of any size, or fail
                if transfer.data_config['input_size'][1:] != (side, side) and hasattr(resized, 'set_input_size'):
                    resized.set_input_size(img_size=(side, side))
                images = torch.randn(batch_size, transfer.data_config['input_size'][0], side, side)
                with transfer.accelerator.autocast():
                    speed = measure_throughput(resized, images.to(transfer.accelerator.device))
            except (AssertionError, RuntimeError, ValueError) as error:
                print(f'vitzoo: no speed of {name} at {side} pixels: {error}', file=sys.stderr)
                continue
            found.setdefault(str(side), {})[name] = round(speed.images_per_second, 3)
            if speed.doubt:
                found[str(side)]['doubt'] = speed.doubt
    return found


def measure_oversmoothing(transfer: Transfer, student: nn.Module) -> dict[str, dict]:
    """Similarity of the tokens of teacher and student by block; a model whose tokens are unknown is left out."""
    found: dict[str, dict] = {}
    for name, model in _pair(transfer, student):
        try:
            with transfer.accelerator.autocast():
                statistics = token_statistics(model, transfer.first_held_out[:1])
        except UserError as error:
            transfer.console.print(f'note   no similarity of the tokens of the {name}: {error}')
            continue
        found[name] = dict(blocks=statistics['blocks'], mean=statistics['cosine']['mean'])
    return found


def _pair(transfer: Transfer, student: nn.Module) -> list[tuple[str, nn.Module]]:
    return [('teacher', transfer.teacher), ('student', student)]
