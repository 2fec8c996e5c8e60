"""A small study, and a stand-in for the processes that compute its steps."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import yaml

STUDY = dict(
    data_dir='sample',
    seeds=[0, 1, 2],
    models=['deit_softmax_nano', 'deit_ls_nano'],
    baseline='deit_softmax_nano',
    ways=dict(
        scratch=dict(train=dict(epochs=3, lr=1e-3)),
        teacher=dict(train=dict(epochs=3), models='vit_tiny_patch16_224'),
        converted=dict(
            transfer=dict(steps=2), teacher='vit_tiny_patch16_224', teacher_way='teacher', mixers=['ls', 'performer']
        ),
    ),
    evaluations=dict(clean={}, corrupt=dict(corrupt=True)),
)


def write_study(folder: Path, **changes) -> str:
    """Write the file of the study, whose folder is in `folder`."""
    path = folder / 'study.yaml'
    path.write_text(yaml.safe_dump(dict(STUDY, output=str(folder / 'out')) | changes, sort_keys=False))
    return str(path)


def value_after(command: list[str], flag: str) -> str:
    """The value of an option in a command line."""
    return command[command.index(flag) + 1]


def write_results(command: list[str]) -> None:
    """Write the files that a step writes, with an accuracy that depends on the name of the cell."""
    if 'vitzoo.validate' in command:
        folder = command[command.index('vitzoo.validate') + 1]
        top1 = zlib.crc32('/'.join(Path(folder).parts[-3:]).encode()) % 10000 / 100
        record = dict(model=folder, top1=top1, top5=99.0, loss=1.0, n=500, params=2_000_000, gmacs=0.5)
        record |= dict(
            gflops=1.0, img_size=128, images_per_second=100.0, peak_memory_mb=300.0, oversmoothing=[0.1, 0.2]
        )
        if '--corrupt' in command:
            record |= dict(corrupt_top1=top1 / 2, corrupt_relative=50.0)
        Path(value_after(command, '--results-file')).write_text(json.dumps([record]))
        return
    folder = Path(value_after(command, '--output'))
    for name in ('config.json', 'model.safetensors'):
        (folder / name).write_text('{}')


class Executor:
    """Computes steps without processes, and remembers them.

    Args:
        interfere: Called with each command before its results are written; the exit code if it returns a number.
    """

    def __init__(self, interfere: Callable[[list[str]], int | None] = lambda command: None):
        self.interfere, self.commands = interfere, []

    def __call__(self, command: list[str], log: Path, claim, should_stop) -> int:
        code = self.interfere(command)
        if code is not None:
            log.write_text('vitzoo: error: the disk is full\n')
            return code
        write_results(command)
        self.commands.append(command)
        return 0
