"""Starts training processes as a launcher would, but by forking one that has imported everything, in milliseconds."""

import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 120


class Outcome(NamedTuple):
    """How processes ended (minus the number of the signal that ended one), and what they printed."""

    codes: list[int | None]
    out: str
    err: str


def start_processes(world: int, target: Callable, *args) -> Outcome:
    """Run `target(*args)`, a function of a module, in `world` processes; one that fails takes the others with it."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['vitzoo.train.loop', 'albumentations', 'torchvision', 'matplotlib.figure'])
    port = free_port()
    folder = Path(tempfile.mkdtemp())
    arguments = (world, port, str(folder), target, args)
    processes = [context.Process(target=_member, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            # give the others the time to say the same by themselves
            for process in processes:
                process.join(2)
            break
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    printed = [''.join(path.read_text() for path in sorted(folder.glob(f'{kind}.*'))) for kind in ('out', 'err')]
    shutil.rmtree(folder)
    return Outcome([process.exitcode for process in processes], *printed)


def train_and_log(argv: list[str], log: str, event: Callable | None = None, at: int = -1) -> None:
    """Train, writing down every step into `<log>.<rank>`, and let `event(run)` happen once `at` steps are done."""
    from vitzoo.data.loader import SeededImages
    from vitzoo.train import loop as train_module
    from vitzoo.train import main

    rank = int(os.environ.get('RANK', 0))
    seen, train_step, get_image = [], train_module.train_step, SeededImages.__getitem__

    def get_and_note(self, key):
        seen.append(key[0])
        return get_image(self, key)

    def step_and_note(run, *args, **kwargs):
        seen.clear()
        news = train_step(run, *args, **kwargs)
        note = dict(step=run.step, rank=rank, images=list(seen), loss=news.loss)
        note['lr'] = [group['lr'] for group in run.optimizer.param_groups]
        with open(f'{log}.{rank}', 'a') as file:
            file.write(json.dumps(note) + '\n')
        if run.step == at:
            event(run)
        return news

    SeededImages.__getitem__ = get_and_note
    train_module.train_step = step_and_note
    main(argv)


def read_log(log: Path, world: int) -> dict[int, list[dict]]:
    """What each process noted at each step; steps done twice must have been the same."""
    notes = {}
    for rank in range(world):
        for line in Path(f'{log}.{rank}').read_text().splitlines():
            note = json.loads(line)
            assert notes.setdefault((note['step'], rank), note) == note
    return {step: [notes[step, rank] for rank in range(world)] for step in sorted({step for step, _ in notes})}


def free_port() -> int:
    """A port nobody listens at."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def _member(rank: int, world: int, port: int, folder: str, target: Callable, args: tuple) -> None:
    """What one process does: print to files, join the others by torch's variables, and work on one thread."""
    import torch

    for number, kind in {1: 'out', 2: 'err'}.items():
        os.dup2(os.open(f'{folder}/{kind}.{rank}', os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)

    torch.set_num_threads(1)
    if world > 1:
        numbers = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_PORT=port)
        os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR='127.0.0.1')
    target(*args)
