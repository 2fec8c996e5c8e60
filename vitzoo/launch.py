"""CPU processes for `accelerate launch --cpu --num_processes N`, which starts one and leaves the others to mpirun."""

import os
import sys
from pathlib import Path

from accelerate.commands.launch import launch_command_parser
from psutil import Process

LAUNCHERS = ('launch', 'launch.py', 'accelerate-launch', 'accelerate.commands.launch')


def start_missing_processes() -> None:
    """Re-execute the command under torchrun, with the number of processes that `accelerate launch --cpu` was given.

    Does nothing if the command was not launched that way, or all processes are running.
    """
    # the launcher sets the rendezvous port if and only if there are several processes
    needs_several = os.environ.get('ACCELERATE_USE_CPU', '').lower() == 'true' and 'MASTER_PORT' in os.environ
    has_several = any(name in os.environ for name in ('LOCAL_RANK', 'WORLD_SIZE', 'PMI_SIZE', 'OMPI_COMM_WORLD_SIZE'))
    if not needs_several or has_several:
        return
    options = _torchrun_options(Process().parent().cmdline())
    if options is not None:
        os.execv(sys.executable, [sys.executable, '-m', 'torch.distributed.run', *options, *sys.argv])


def _torchrun_options(command_line: list[str]) -> list[str] | None:
    """Options of torchrun equivalent to the launcher's; None if it was not given a number of processes."""
    names = [Path(word).name for word in command_line]
    launcher = next((names.index(name) for name in LAUNCHERS if name in names), None)
    if launcher is None:
        return None
    args, _ = launch_command_parser().parse_known_args(command_line[launcher + 1 :])
    if args.num_processes is None:
        return None
    machines = args.num_machines or 1
    if machines == 1:
        return ['--standalone', '--nproc_per_node', str(args.num_processes)]
    return [
        *('--nnodes', str(machines), '--nproc_per_node', str(args.num_processes // machines)),
        *('--node_rank', str(args.machine_rank or 0)),
        *('--master_addr', os.environ['MASTER_ADDR'], '--master_port', os.environ['MASTER_PORT']),
    ]
