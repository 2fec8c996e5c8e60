"""Starts training processes as a launcher would, but by forking a process that has imported everything already."""

import json
import multiprocessing
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# for processes that hang: a busy machine may take minutes for what takes seconds
TIMEOUT = 900
# of the command for FSDP in docs/training.md
FSDP_VARIABLES = dict(
    FSDP_VERSION='2',
    FSDP_AUTO_WRAP_POLICY='TRANSFORMER_BASED_WRAP',
    FSDP_RESHARD_AFTER_FORWARD='true',
    FSDP_OFFLOAD_PARAMS='false',
    FSDP_MIN_NUM_PARAMS='100000000',
    FSDP_USE_ORIG_PARAMS='true',
    FSDP_SYNC_MODULE_STATES='true',
    FSDP_CPU_RAM_EFFICIENT_LOADING='true',
    FSDP_ACTIVATION_CHECKPOINTING='false',
)


class Outcome(NamedTuple):
    """Exit codes of processes (for a signal, minus its number), and what they printed."""

    codes: list[int | None]
    out: str
    err: str


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Limit the size of files in this process, which makes writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def start_processes(world_size: int, target: Callable, *args, machines: int = 1) -> Outcome:
    """Run `target(*args)` in several processes; if one fails, the others are killed.

    Args:
        target: A function that can be pickled, so one of a module.
        machines: Number of machines that the processes appear to be on.
    """
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['vitzoo.train.loop', 'albumentations', 'torchvision', 'matplotlib.figure'])
    port = free_port()
    folder = Path(tempfile.mkdtemp())
    processes = []
    for rank in range(world_size):
        variables, output = _launcher_variables(rank, world_size, machines, port), str(folder / str(rank))
        arguments = (variables, output, multiprocessing.get_start_method(), target, args)
        processes.append(context.Process(target=_run_process, args=arguments))
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            # the others may be about to exit with the same error
            for process in processes:
                process.join(2)
            break
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    out, err = (''.join(path.read_text() for path in sorted(folder.glob(f'*.{kind}'))) for kind in ('out', 'err'))
    shutil.rmtree(folder)
    return Outcome([process.exitcode for process in processes], out, err)


def assert_ended(outcome: Outcome) -> None:
    """Assert that all processes ended with exit code 0."""
    assert not any(outcome.codes), outcome.err[-5000:]


def run_in_turn(command: Callable[[list[str]], object], runs: dict[int, list[str]], file: str) -> None:
    """Call a command once for each port, and write what it returns to a JSON file.

    Processes of a run find each other at its port: at that of a run before it they would find what is left of it.
    """
    from accelerate.state import AcceleratorState

    results = []
    for port, arguments in runs.items():
        os.environ['MASTER_PORT'] = str(port)
        results.append(command(arguments))
        AcceleratorState._reset_state(reset_partial_state=True)
    if os.environ.get('RANK', '0') == '0':
        Path(file).write_text(json.dumps(results))


def train_and_log(argv: list[str], log: str, event: Callable | None = None, at: int = -1) -> None:
    """Train, log every step to `<log>.<rank>`, and call `event(run)` after step `at`."""
    from vitzoo.data.loader import SeededImages
    from vitzoo.train import loop as train_module
    from vitzoo.train import main

    rank = int(os.environ.get('RANK', 0))
    seen, train_step, get_image = [], train_module.train_step, SeededImages.__getitem__

    def get_and_log(self, key):
        seen.append(key[0])
        return get_image(self, key)

    def step_and_log(run, *args, **kwargs):
        seen.clear()
        status = train_step(run, *args, **kwargs)
        entry = dict(step=run.step, rank=rank, images=list(seen), loss=status.loss)
        entry['lr'] = [group['lr'] for group in run.optimizer.param_groups]
        with open(f'{log}.{rank}', 'a') as file:
            file.write(json.dumps(entry) + '\n')
        if run.step == at:
            event(run)
        return status

    SeededImages.__getitem__ = get_and_log
    train_module.train_step = step_and_log
    main(argv)


def read_log(log: Path, world_size: int) -> dict[int, list[dict]]:
    """The log of each step, one entry per process; steps that were repeated must have the same entry."""
    entries = {}
    for rank in range(world_size):
        for line in Path(f'{log}.{rank}').read_text().splitlines():
            entry = json.loads(line)
            assert entries.setdefault((entry['step'], rank), entry) == entry
    return {step: [entries[step, rank] for rank in range(world_size)] for step in sorted({step for step, _ in entries})}


def free_port() -> int:
    """A port that no process listens on."""
    return next(iter(at_free_ports([None])))


def at_free_ports(runs: Iterable[Any]) -> dict[int, Any]:
    """Runs by ports that no process listens on, and of which no two are the same."""
    with ExitStack() as stack:
        found = {}
        for run in runs:
            listener = stack.enter_context(socket.socket())
            listener.bind(('127.0.0.1', 0))
            found[listener.getsockname()[1]] = run
        return found


def _launcher_variables(rank: int, world_size: int, machines: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun would set."""
    if world_size == 1:
        return {}
    per_machine = world_size // machines
    numbers = dict(RANK=rank, LOCAL_RANK=rank % per_machine, GROUP_RANK=rank // per_machine)
    numbers |= dict(WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=per_machine, MASTER_PORT=port)
    return dict({name: str(number) for name, number in numbers.items()}, MASTER_ADDR='127.0.0.1')


def _run_process(variables: dict[str, str], output: str, start_method: str, target: Callable, args: tuple) -> None:
    import torch

    import vitzoo.figures

    for number, kind in {1: 'out', 2: 'err'}.items():
        os.dup2(os.open(f'{output}.{kind}', os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    # that of a launched process, in which a loader's workers import nothing again
    multiprocessing.set_start_method(start_method, force=True)
    os.environ.update(variables)
    # plotting takes longer than training
    vitzoo.figures.draw_history = lambda folder, history: (folder / 'curves.png').touch()
    target(*args)


def shard_accelerators() -> None:
    """Let training shard models as `accelerate launch --use_fsdp` would, which it does on accelerators only."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    from vitzoo.train import opening

    os.environ.update(FSDP_VARIABLES)

    def create_sharded(**options) -> Accelerator:
        accelerator = Accelerator(**options)
        plugin = FullyShardedDataParallelPlugin()
        accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        return accelerator

    opening.Accelerator = create_sharded
