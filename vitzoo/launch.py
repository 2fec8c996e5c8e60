"""Processes on a CPU: `accelerate launch --cpu --num_processes N` starts one, and leaves the others to mpirun."""

import os
import sys
from pathlib import Path

from accelerate.commands.launch import launch_command_parser
from psutil import Process

LAUNCHERS = ('launch', 'launch.py', 'accelerate-launch', 'accelerate.commands.launch')


def start_missing_processes() -> None:
    """Begin again under torchrun, in this machine's share of the processes that `accelerate launch --cpu` shall start.

    Does nothing where there was no such launch, or where it did start them.
    """
    # the launcher sets the port where processes would meet if, and only if, it was asked for several
    asked_for_several = os.environ.get('ACCELERATE_USE_CPU', '').lower() == 'true' and 'MASTER_PORT' in os.environ
    are_several = any(name in os.environ for name in ('LOCAL_RANK', 'WORLD_SIZE', 'PMI_SIZE', 'OMPI_COMM_WORLD_SIZE'))
    if not asked_for_several or are_several:
        return
    options = _torchrun_options(Process().parent().cmdline())
    if options is not None:
        os.execv(sys.executable, [sys.executable, '-m', 'torch.distributed.run', *options, *sys.argv])


def _torchrun_options(command_line: list[str]) -> list[str] | None:
    """What torchrun has to be told, from the command line of the launcher; None where it says nothing."""
    names = [Path(word).name for word in command_line]
    launcher = next((names.index(name) for name in LAUNCHERS if name in names), None)
    if launcher is None:
        return None
    asked, _ = launch_command_parser().parse_known_args(command_line[launcher + 1 :])
    if asked.num_processes is None:
        return None
    machines = asked.num_machines or 1
    if machines == 1:
        return ['--standalone', '--nproc_per_node', str(asked.num_processes)]
    return [
        *('--nnodes', str(machines), '--nproc_per_node', str(asked.num_processes // machines)),
        *('--node_rank', str(asked.machine_rank or 0)),
        *('--master_addr', os.environ['MASTER_ADDR'], '--master_port', os.environ['MASTER_PORT']),
    ]
