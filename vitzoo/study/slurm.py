"""Workers of a study as Slurm jobs, which submitit submits."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitzoo.errors import UserError
from vitzoo.study.plan import read_study
from vitzoo.study.status import check_failures
from vitzoo.study.worker import Worker
from vitzoo.train.stopping import StopSignal

# names of submitit for short ones; any other name is an option of sbatch
_NAMES = {'gpus': 'gpus_per_node', 'cpus': 'cpus_per_task', 'minutes': 'timeout_min', 'memory': 'mem_gb'}
# without a limit of its own, submitit's is five minutes, and a job that reaches its limit is queued again three times
_DEFAULTS = {'jobs': 1, 'minutes': None, 'timeouts': 1000}


class WorkerJob:
    """A job that computes cells of a study until none is left, and fails if a cell has failed.

    Args:
        path: The study's file.
        launch: The command that starts the processes of a cell.
        cells: Wildcards of the cells to compute.
    """

    def __init__(self, path: str, launch: list[str], cells: Sequence[str] = ('*',)) -> None:
        self.path, self.launch, self.cells = path, launch, cells

    def __call__(self) -> None:
        with StopSignal() as stop:
            study = read_study(self.path)
            # the file may have changed while the job was queued
            for cell in study.cells:
                cell.record.check()
            study = study.choose(self.cells)
            Worker(study, launch=self.launch, should_stop=lambda: stop.received).run()
            check_failures(study)

    def checkpoint(self) -> Any:
        """Queue the job again, which submitit asks for before a time limit and on preemption.

        Its training ends with a checkpoint, because it loses its worker.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit_workers(
    path: str, launch: list[str], settings: dict[str, Any], folder: Path, cells: Sequence[str] = ('*',)
) -> list[Any]:
    """Submit the jobs of `settings`, which write their logs to a folder, and return them.

    Args:
        settings: Those of `slurm_settings`. `cluster: local` runs the jobs as processes of this machine.

    Raises:
        UserError: submitit is not installed, a setting is unknown, or there is no Slurm.
    """
    try:
        import submitit
    except ImportError as error:
        raise UserError('--slurm needs the package submitit; install it with pip install submitit') from error
    settings = dict(settings)
    cluster, jobs, timeouts = settings.pop('cluster', 'slurm'), settings.pop('jobs'), settings.pop('timeouts')
    common = {name: settings.pop(short) for short, name in _NAMES.items() if short in settings}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=timeouts)
        executor.update_parameters(name='vitzoo', **common, **{f'slurm_{key}': settings[key] for key in settings})
        with executor.batch():
            return [executor.submit(WorkerJob(path, launch, cells)) for _ in range(jobs)]
    except (NameError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise UserError(f'--slurm cannot submit the jobs: {error}') from error


def slurm_settings(text: str) -> dict[str, Any]:
    """Parse 'partition=gpu,gpus=1,jobs=4'."""
    settings: dict[str, Any] = {}
    for item in text.split(','):
        key, equals, value = item.strip().partition('=')
        if not key or not equals or not value:
            raise argparse.ArgumentTypeError(f"'{item}' is not KEY=VALUE, such as partition=gpu")
        settings[key] = int(value) if value.isdecimal() else value
    for key, default in _DEFAULTS.items():
        value = settings.setdefault(key, default)
        if not isinstance(value, int) or value < 1:
            raise argparse.ArgumentTypeError(f'{key} must be a number of 1 or more, not {value}, such as {key}=60')
    return settings
