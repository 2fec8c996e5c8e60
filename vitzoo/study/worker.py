"""A worker: claims one cell after the other, and computes its steps by the commands that a user would run."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from vitzoo._files import replace_file
from vitzoo.errors import UserError
from vitzoo.machine import describe_place
from vitzoo.options import to_words
from vitzoo.study.claim import Claim
from vitzoo.study.plan import Study, StudyCell
from vitzoo.study.status import CellState, describe_cells, find_state
from vitzoo.train.lock import LostLock
from vitzoo.validate.options import parse_args

LOG = 'study.log'
# options of the training or the transfer, a file for --config
OPTIONS_FILE = 'options.yaml'
# beginnings of lines in the log: of a command, and of its error
_PROMPT, _ERROR = '$ ', 'vitzoo: error: '
_POLL_SECONDS = 0.2
# exit codes of processes that were ended by SIGHUP, SIGINT or SIGTERM, also through a launcher
_STOPPED = (-1, -2, -15, 129, 130, 143)
# between looks for a cell while other workers have all that are left
_WAIT_SECONDS = 5.0


class Worker:
    """Computes the cells of a study that are neither finished nor failed.

    Args:
        launch: The command before `-m vitzoo.train …`.
        should_stop: Whether to end; asked often, also during a step.
        execute: Runs a command with its output appended to a file, and returns its exit code; see `run_process`.
    """

    def __init__(
        self,
        study: Study,
        launch: Sequence[str] = (sys.executable,),
        should_stop: Callable[[], bool] = lambda: False,
        execute: 'Callable[[list[str], Path, Claim, Callable[[], bool]], int] | None' = None,
    ) -> None:
        self.study, self.launch, self.should_stop = study, launch, should_stop
        self.execute = execute or run_process
        # cells that were stopped from outside are not tried twice
        self.skipped: set[str] = set()

    def run(self) -> None:
        """Compute cells until all are finished, failed, or wait for one that failed.

        Waits for the cells of other workers, and takes over those of workers that have died.

        Raises:
            UserError: A folder cannot be written, or this machine lacks the device of an evaluation.
        """
        while not self.should_stop():
            if self._compute_next():
                continue
            states = [find_state(cell) for cell in self.study.cells if cell.name not in self.skipped]
            # a free cell was given back by another worker a moment ago
            if not {CellState.RUNNING, CellState.FREE} & set(states):
                return
            self._sleep(_POLL_SECONDS if CellState.FREE in states else _WAIT_SECONDS)

    @property
    def is_direct(self) -> bool:
        """False if a launcher starts the processes, perhaps on another machine."""
        return [*self.launch] == [sys.executable]

    def _compute_next(self) -> bool:
        """Claim and compute the first free cell; False if there was none."""
        for cell in self.study.cells:
            if cell.name in self.skipped or find_state(cell) is not CellState.FREE:
                continue
            claim = Claim(cell.folder)
            try:
                is_claimed = claim.acquire()
            except OSError as error:
                raise UserError(f"cannot write to '{cell.folder}': {error.strerror}") from error
            if not is_claimed:
                continue
            try:
                # another worker may have finished it before it was claimed
                if find_state(cell, is_claimed=False) is CellState.FREE:
                    self._compute(cell, claim)
                    return True
            except LostLock:
                _log(f'{cell.name}: another worker has taken it over')
            finally:
                claim.release()
        return False

    def _compute(self, cell: StudyCell, claim: Claim) -> None:
        """Compute the missing steps of a cell, up to the first that fails."""
        if self.is_direct:
            _check_devices(cell)
        for step in cell.record.missing:
            _log(f'{cell.name}: {step} ({describe_cells(self.study)})')
            if step == cell.command:
                cell.record.start()
            words, expected = _command_line(cell, step)
            start = time.perf_counter()
            command = [*self.launch, '-m', f'vitzoo.{words[0]}', *words[1:]]
            try:
                code = self.execute(command, cell.folder / LOG, claim, self.should_stop)
            except KeyboardInterrupt:
                # Ctrl-C has ended the step, too
                with suppress(LostLock):
                    claim.lock.check()
                    cell.record.spend(step, time.perf_counter() - start)
                raise
            seconds = time.perf_counter() - start
            claim.lock.check()
            is_done = code == 0 and all(path.is_file() for path in expected)
            if not is_done:
                cell.record.spend(step, seconds)
            if not is_done and (code == 0 or code in _STOPPED or self.should_stop()):
                # a training that gets SIGTERM ends with exit code 0, and continues from its checkpoint
                self.skipped.add(cell.name)
                _log(f'{cell.name}: stopped; run the study again to continue')
                return
            if not is_done:
                message = _find_message(cell.folder / LOG)
                cell.record.fail(step, code, message)
                _log(f'{cell.name}: {step} failed with exit code {code}: {message}')
                return
            place = {}
            if step != cell.command:
                expected[0].replace(cell.record.results_file(step))
                place = _find_place(cell.evaluations[step], self.is_direct)
            cell.record.finish(step, seconds, shlex.join(['vitzoo', *words]), place)
            if self.should_stop():
                return
        _log(f'{cell.name}: finished after {cell.record.seconds:.0f} s')

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.should_stop():
            time.sleep(_POLL_SECONDS)


def run_process(command: list[str], log: Path, claim: Claim, should_stop: Callable[[], bool]) -> int:
    """Run a command with its output appended to a file, and return its exit code, for a signal minus its number.

    The process gets SIGTERM if `should_stop` returns True, or if another worker has taken over the claim.

    Raises:
        UserError: The command does not exist.
    """
    with log.open('ab') as file:
        file.write(f'{_PROMPT}{shlex.join(command)}\n'.encode())
        file.flush()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        except OSError as error:
            raise UserError(f"cannot start '{command[0]}': {error.strerror}; correct --launch") from error
        try:
            claim.watch(process.pid)
            is_told = False
            while process.poll() is None:
                if not is_told and (should_stop() or claim.lock.is_lost):
                    process.terminate()
                    is_told = True
                time.sleep(_POLL_SECONDS)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return process.returncode


def _check_devices(cell: StudyCell) -> None:
    """Check the devices of the missing evaluations of a cell, before a model is trained for them."""
    for step in cell.record.missing:
        try:
            parse_args(['model', *to_words(cell.evaluations.get(step, {}), ',')])
        except UserError as error:
            raise UserError(f'evaluations.{step}: {error}') from error


def _find_place(options: dict, is_direct: bool) -> dict:
    """Machine, precision, versions and load of an evaluation that has just ended; empty if they are not known.

    Args:
        is_direct: False if a launcher started it.
    """
    try:
        measured = parse_args(['model', *to_words(options, ',')])
    except UserError:
        # a launcher used a device of another machine
        return {}
    place = describe_place(measured.device, measured.amp_dtype)
    # a launcher chooses the number of threads, and may use another machine than this CPU
    is_known = is_direct or place['cores'] is None
    return place if is_known else {}


def _command_line(cell: StudyCell, step: str) -> tuple[list[str], list[Path]]:
    """The words after `vitzoo` that compute a step, and the files that it writes at its end."""
    folder = str(cell.folder)
    if step != cell.command:
        partial = cell.record.results_file(step).with_name(f'.{step}.json')
        partial.parent.mkdir(exist_ok=True)
        partial.unlink(missing_ok=True)
        options = to_words(cell.evaluations[step], ',')
        return ['validate', folder, *options, '--results-file', str(partial)], [partial]
    expected = [cell.folder / name for name in ('config.json', 'model.safetensors')]
    words = ['--config', str(_write_options(cell)), '--output', folder]
    if cell.teacher is None:
        return ['train', *words, '--resume', 'auto'], expected
    return ['transfer', str(cell.teacher.folder), *words, '--resume'], expected


def _write_options(cell: StudyCell) -> Path:
    """Write the options of a training or transfer to a file for --config."""
    path = cell.folder / OPTIONS_FILE
    with replace_file(path) as partial:
        partial.write_text(yaml.safe_dump(cell.options, sort_keys=False, allow_unicode=True), encoding='utf-8')
    return path


def _find_message(log: Path) -> str:
    """The error that the newest command in a log ended with, or its last line of output."""
    lines = log.read_text(encoding='utf-8', errors='replace').strip().splitlines() if log.is_file() else []
    start = max((number for number, line in enumerate(lines) if line.startswith(_PROMPT)), default=-1)
    lines = lines[start + 1 :]
    # a launcher adds a traceback of its own, and other processes say that they end because of the first
    errors = [line for line in lines if line.startswith(_ERROR)]
    return (errors or lines[-1:] or ['no output'])[0].removeprefix(_ERROR)


def _log(text: str) -> None:
    print(f'vitzoo: {text}', flush=True)
