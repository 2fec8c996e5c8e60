"""What a command says when its user made a mistake: one sentence, exit code 2, no traceback."""

import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A mistake of the user; the message says what was wrong, with which value, and what to do."""

    def __str__(self) -> str:
        # a DataLoader worker hands its error on with the traceback as the message; the sentence is what follows it
        message = super().__str__()
        if message.startswith('Caught UserError in DataLoader worker'):
            message = message.rpartition('UserError: ')[2]
        return ' '.join(message.split('\n')).strip()


class RankError(UserError):
    """A mistake that one process of several meets alone, so that it has to speak for itself."""


def run_command(main: Callable[[list[str] | None], None], argv: list[str] | None = None) -> None:
    """Run a command's main function and end the process the way a shell expects.

    A `UserError` becomes one line on stderr (from the main process where several run, unless one met it alone) and exit
    code 2. Ctrl-C becomes exit code 130, and a reader of the output that goes away, as `head` does, 141. Every other
    exception keeps its traceback.
    """
    try:
        main(argv)
        sys.stdout.flush()
    except UserError as error:
        # torchrun and accelerate launch both number their processes in RANK
        if os.environ.get('RANK', '0') == '0' or isinstance(error, RankError):
            print(f'vitzoo: error: {error}', file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # what is left of the output would be written, and fail, once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Say which candidates are close to a mistyped name, as ', did you mean a, b?' or nothing."""
    matches = get_close_matches(name, list(candidates), n=3)
    return f', did you mean {", ".join(matches)}?' if matches else ''
