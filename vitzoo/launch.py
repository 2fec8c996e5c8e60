"""CPU processes for `accelerate launch --cpu --num_processes N`, which starts one and leaves the others to mpirun."""

import logging
import os
import sys
from pathlib import Path

from accelerate.commands.launch import launch_command_parser
from psutil import Process
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LAUNCHERS = ('launch', 'launch.py', 'accelerate-launch', 'accelerate.commands.launch')


def start_missing_processes() -> None:
    """Run the command in the number of processes that `accelerate launch --cpu` was given, and exit when they end.

    Does nothing if the command was not launched that way, or all processes are running. The exit code is that of the
    first process that failed.
    """
    # the launcher sets the rendezvous port if and only if there are several processes
    needs_several = os.environ.get('ACCELERATE_USE_CPU', '').lower() == 'true' and 'MASTER_PORT' in os.environ
    has_several = any(name in os.environ for name in ('LOCAL_RANK', 'WORLD_SIZE', 'PMI_SIZE', 'OMPI_COMM_WORLD_SIZE'))
    if not needs_several or has_several:
        return
    launcher = Process().parent()
    options = None if launcher is None else _torchrun_options(launcher.cmdline())
    if options is not None:
        _run_processes([*options, *sys.argv])


def _run_processes(arguments: list[str]) -> None:
    """Run torchrun without its report of a failure, because the processes print their errors themselves."""
    logging.disable(logging.ERROR)
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f'vitzoo: error: process {rank} was killed by {failure.signal_name()}', file=sys.stderr)
            raise SystemExit(128 - failure.exitcode) from None
        raise SystemExit(failure.exitcode) from None
    except SignalException as error:
        # the processes got the signal too
        raise SystemExit(128 + error.sigval.value) from None
    finally:
        logging.disable(logging.NOTSET)
    raise SystemExit


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
