"""User errors, which a command reports as one sentence with exit code 2 and no traceback."""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from errno import EACCES, EDQUOT, ENAMETOOLONG, ENOSPC, EPERM, EROFS
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

# time for rank 0 to meet the error that another rank has found
WAIT_SECONDS = 30
# of gloo, whose other errors are bugs
_LOST_CONNECTION = ('Connection closed by peer', 'Connection reset by peer')
_NOT_PERMITTED = "no permission to read or write '{}'; change its permissions, or name another place"
# sentences for errors of the file system that a user can correct
_FILE_PROBLEMS = {
    EACCES: _NOT_PERMITTED,
    EPERM: _NOT_PERMITTED,
    EROFS: "'{}' is on a read-only disk; name another place",
    ENAMETOOLONG: "'{}' is too long for the name of a file; shorten it",
}
_FULL = {ENOSPC: 'the disk is full', EDQUOT: 'the quota of the disk is used up'}


class UserError(ValueError):
    """A user error; the message states what was wrong, with which value, and what to do."""

    def __str__(self) -> str:
        # a DataLoader worker re-raises with its traceback in the message, followed by the original sentence
        message = super().__str__()
        if message.startswith('Caught UserError in DataLoader worker'):
            message = message.rpartition('UserError: ')[2]
        return ' '.join(message.split('\n')).strip()


class RankError(UserError):
    """A user error on one rank only, which prints it itself."""


class NoClassesError(UserError):
    """Data whose images are not in class folders."""


class DivergenceError(UserError):
    """A loss or an error that is not finite any more."""


class CommandParser(argparse.ArgumentParser):
    """A parser of a command line whose errors are user errors: one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise a UserError, which `run_command` prints in one process only."""
        _, _, unknown = message.partition('unrecognized arguments: ')
        hint = did_you_mean(unknown.split(' ')[0], self._option_string_actions)
        raise UserError(f'{message}{hint or f"; `{self.prog} --help` describes the arguments"}')


def run_command(main: Callable[[list[str] | None], object], argv: list[str] | None = None) -> None:
    """Run a command's main function and exit with the code that a shell expects.

    A `UserError` is printed as one line on stderr with exit code 2, in a distributed run by rank 0 only, and a
    `RankError` by the rank that raises it. Before the processes have joined, the other ranks wait for rank 0 to print
    its error, because launchers kill all processes when the first one fails. A full disk is such an error, too, and so
    are a path that is not permitted or too long, and the end of another process, which prints the cause. Ctrl-C exits
    with 130, and a closed output pipe, as with `head`, with 141. Every other exception keeps its traceback. A warning
    of vitzoo is printed as one line too, and characters that the terminal lacks are printed as escapes.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors='backslashreplace')
    try:
        with _short_warnings(), _explained_paths():
            main(argv)
        sys.stdout.flush()
    except UserError as error:
        is_first = is_first_process()
        if not is_first and not _have_joined():
            # killed meanwhile, unless this error is of this rank only
            time.sleep(WAIT_SECONDS)
        if is_first or not _have_joined() or isinstance(error, RankError):
            print(f'vitzoo: error: {error}', file=sys.stderr)
        raise SystemExit(2) from None
    except RuntimeError as error:
        if not _have_joined() or not any(words in str(error) for words in _LOST_CONNECTION):
            raise
        rank = os.environ.get('RANK', '0')
        print(f'vitzoo: error: process {rank} ends, because another process has ended; see its error', file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(141) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _discard_output()
        place = 'the output' if error.filename is None else f"'{error.filename}'"
        print(f'vitzoo: error: {_FULL[error.errno]}, so {place} cannot be written', file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def _explained_paths() -> Iterator[None]:
    """Raise a RankError, because disks may differ, for a path that may not be used or is too long."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FILE_PROBLEMS or error.filename is None:
            raise
        raise RankError(_FILE_PROBLEMS[error.errno].format(error.filename)) from error


def _discard_output() -> None:
    """Do not let Python write the rest of the output at exit, where it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Print warnings that name a file of this package without the file and the source line."""
    package, default = str(Path(__file__).parent), warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(package) and category is UserWarning:
            return f'vitzoo: warning: {message}\n'
        return default(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = default


@contextmanager
def silenced(logger: logging.Logger) -> Iterator[None]:
    """Drop the messages of a logger."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def is_first_process() -> bool:
    """Return True in rank 0 of a distributed run, and without one; also before the processes have joined."""
    # torchrun and accelerate launch both set RANK
    return os.environ.get('RANK', '0') == '0'


def _have_joined() -> bool:
    """Return True if this process can communicate with those of the other ranks."""
    distributed = sys.modules.get('torch.distributed')
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Close matches of a mistyped name, formatted as ', did you mean a, b?'; empty if there are none."""
    matches = get_close_matches(name, list(candidates), n=3)
    return f', did you mean {", ".join(matches)}?' if matches else ''


def count_of(number: int, noun: str) -> str:
    """A number with its noun, such as '1 class' and '1,000 images'."""
    plural = f'{noun}es' if noun.endswith('s') else f'{noun}s'
    return f'{number:,} {noun if number == 1 else plural}'


def content_error(error: Exception, file: str = 'it') -> str:
    """The fault of a file whose content cannot be used; the message of a KeyError is the key alone."""
    return f'{file} has no {error}' if isinstance(error, KeyError) else str(error)


def format_flag(name: str) -> str:
    """The command-line option of a key, such as --batch-size of 'batch_size'."""
    return f'--{name.replace("_", "-")}'
