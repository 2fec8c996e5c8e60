"""User errors, which a command reports as one sentence with exit code 2 and no traceback."""

import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches


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


def run_command(main: Callable[[list[str] | None], None], argv: list[str] | None = None) -> None:
    """Run a command's main function and exit with the code that a shell expects.

    A `UserError` is printed as one line on stderr with exit code 2, in a distributed run by rank 0 only, and a
    `RankError` by the rank that raises it. Ctrl-C exits with 130, and a closed output pipe, as with `head`, with 141.
    Every other exception keeps its traceback.
    """
    try:
        main(argv)
        sys.stdout.flush()
    except UserError as error:
        # torchrun and accelerate launch both set RANK
        if os.environ.get('RANK', '0') == '0' or isinstance(error, RankError):
            print(f'vitzoo: error: {error}', file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # otherwise Python would flush the rest of the output at exit and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Close matches of a mistyped name, formatted as ', did you mean a, b?'; empty if there are none."""
    matches = get_close_matches(name, list(candidates), n=3)
    return f', did you mean {", ".join(matches)}?' if matches else ''


def format_flag(name: str) -> str:
    """The command-line option of a key, such as --batch-size of 'batch_size'."""
    return f'--{name.replace("_", "-")}'
