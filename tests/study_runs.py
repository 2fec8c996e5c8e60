"""Runs workers of a study whose steps are forked, and interrupts them once."""

import gc
import json
import multiprocessing
import os
import pkgutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from processes import Outcome, start_processes
from tiny import install_datasets

# functions of the steps during which a study is interrupted, and files of the worker that are being replaced
MOMENTS = {
    'training': 'vitzoo.train.loop.train_step',
    'matching': 'vitzoo.transfer.descent._Descent.measure',
    'evaluation': 'vitzoo.validate.evaluation._score',
    'lock': 'vitzoo.train.lock.json.dump',
    'cell.json': '.cell.json',
    'process.json': '.process.json',
    'results': '.clean.json',
}
# the processes that get signals, in this order
ENDS = {
    'sigterm': [('worker', signal.SIGTERM)],
    'sigint': [('worker', signal.SIGINT)],
    # of a terminal, whose processes all get it
    'ctrl-c': [('worker', signal.SIGINT), ('step', signal.SIGINT)],
    'sigkill': [('worker', signal.SIGKILL)],
    'sigkill of both': [('worker', signal.SIGKILL), ('step', signal.SIGKILL)],
    'sigterm of the step': [('step', signal.SIGTERM)],
    'sigkill of the step': [('step', signal.SIGKILL)],
}
# of a lock that cannot be read
STALE_SECONDS = 2


class Interruption:
    """Signals at a call of the function of a moment, counted over all processes of a study.

    Args:
        folder: Of the file that counts, which is as long as there were calls.
        call: From 1.
    """

    def __init__(self, folder: Path, moment: str, call: int, end: str) -> None:
        self.file, self.moment, self.call, self.end = folder / 'calls', moment, call, end

    @property
    def has_happened(self) -> bool:
        """True if the moment has come."""
        return self.file.is_file() and self.file.stat().st_size >= self.call

    def install(self) -> None:
        """Wait for the moment in this process, which is a worker, and in its steps."""
        self.worker, place = os.getpid(), MOMENTS[self.moment]
        if place.startswith('.'):
            replace = Path.replace
            Path.replace = lambda path, target: (path.name == place and self.count(), replace(path, target))[1]
        elif self.moment == 'lock':
            from vitzoo.train import lock

            # the file exists already, and is empty
            lock.json = SimpleNamespace(dump=self._counting(json.dump), loads=json.loads)
        else:
            owner, _, name = place.rpartition('.')
            setattr(pkgutil.resolve_name(owner), name, self._counting(pkgutil.resolve_name(place)))

    def count(self) -> None:
        """Count a call, and send the signals if it is the one to interrupt."""
        with self.file.open('ab') as file:
            file.write(b'.')
            file.flush()
            number = file.tell()
        if number != self.call:
            return
        for receiver, signal_number in ENDS[self.end]:
            os.kill(self.worker if receiver == 'worker' else os.getpid(), signal_number)
        # the worker must act before the step ends
        time.sleep(0.3)

    def _counting(self, function):
        def count_and_call(*args, **kwargs):
            self.count()
            return function(*args, **kwargs)

        return count_and_call


class ForkedStep:
    """Stands for the `subprocess.Popen` of a step, and forks the worker, which has imported everything already."""

    def __init__(self, command: list[str], stdin: int, stdout, stderr: int) -> None:
        start = command.index('-m') + 1
        arguments = (command[start], command[start + 1 :], stdout.fileno())
        self.process = multiprocessing.get_context('fork').Process(target=run_step, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, for a signal minus its number."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """The exit code, None while the process runs."""
        return self.returncode

    def wait(self) -> None:
        """Wait for the end of the process."""
        self.process.join()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.terminate()


def run_step(module: str, words: list[str], log: int) -> None:
    """`python -m vitzoo.train …` in a forked process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    for number in (1, 2):
        os.dup2(log, number)
    pkgutil.resolve_name(module).main(words)


def work(folder: str, arguments: list[str], interruption: Interruption | None) -> None:
    """`vitzoo study run` in a process of its own."""
    from vitzoo.metrics import speed
    from vitzoo.study import command as study_command
    from vitzoo.study import main, worker
    from vitzoo.train import lock
    from vitzoo.transfer import measurements
    from vitzoo.validate import evaluation, robustness

    os.chdir(folder)
    install_datasets()
    # a step collects garbage, and would look through all objects of the imported modules each time
    gc.freeze()
    for module in (measurements, evaluation):
        module.measure_throughput = lambda *args: evaluation.Speed(1.0)
    speed.peak_process_megabytes = lambda device: 1.0
    robustness.CONDITIONS = robustness.CONDITIONS[:10]
    lock.STALE_SECONDS, worker._POLL_SECONDS, worker._WAIT_SECONDS = STALE_SECONDS, 0.02, 0.1
    worker.subprocess = SimpleNamespace(Popen=ForkedStep, DEVNULL=None, STDOUT=None)
    study_command.submit_workers = submit_and_wait
    if interruption is not None:
        interruption.install()
    main(arguments)


def submit_and_wait(*args) -> list:
    """Submit jobs of submitit's cluster `debug`, which computes them in this process."""
    from vitzoo.study.slurm import submit_workers

    jobs = submit_workers(*args)
    for job in jobs:
        # its method result() would start a debugger
        if error := job.exception():
            raise error
    return jobs


def run_workers(folder: Path, arguments: list[str], number: int, interruption: Interruption | None) -> list[Outcome]:
    """Start workers at once, and wait until all have ended."""
    with ThreadPoolExecutor(number) as pool:
        calls = [pool.submit(start_processes, 1, work, str(folder), arguments, interruption) for _ in range(number)]
        return [call.result() for call in calls]
