"""Processes on a CPU: `accelerate launch --cpu --num_processes N` starts one, and leaves the others to mpirun."""

import os
import sys
from pathlib import Path

from accelerate.commands.launch import launch_command_parser
from psutil import Process

LAUNCHERS = ('launch', 'launch.py', 'accelerate-launch', 'accelerate.commands.launch')


def start_missing_processes() -> None:
    """Begin again under torchrun, in the number of processes that `accelerate launch --cpu` was asked for.

    Does nothing where there was no such launch, or where it did start them.
    """
    # the launcher sets the port where processes would meet if, and only if, it was asked for several
    asked_for_several = os.environ.get('ACCELERATE_USE_CPU', '').lower() == 'true' and 'MASTER_PORT' in os.environ
    are_several = any(name in os.environ for name in ('LOCAL_RANK', 'WORLD_SIZE', 'PMI_SIZE', 'OMPI_COMM_WORLD_SIZE'))
    if not asked_for_several or are_several:
        return
    num_processes = _num_processes(Process().parent().cmdline())
    if num_processes is not None:
        torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(num_processes)]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])


def _num_processes(command_line: list[str]) -> int | None:
    """What --num_processes says in the command line of the launcher, None where it says nothing."""
    names = [Path(word).name for word in command_line]
    launcher = next((names.index(name) for name in LAUNCHERS if name in names), None)
    if launcher is None:
        return None
    options, _ = launch_command_parser().parse_known_args(command_line[launcher + 1 :])
    return options.num_processes
