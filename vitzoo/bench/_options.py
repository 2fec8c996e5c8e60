"""What every table of `vitzoo bench` takes on its command line."""

import argparse
import math
import shlex
import sys
from collections.abc import Iterable

import torch

from vitzoo.bench._harness import DTYPES, RESULTS, check_columns
from vitzoo.errors import UserError
from vitzoo.options import check_output, device, positive


def parse(parser: argparse.ArgumentParser, argv: list[str] | None, min_rounds: int = 5) -> argparse.Namespace:
    """Add what all tables take, and read the command line.

    Raises:
        UserError: The results file cannot be written, or has other columns.
    """
    add = parser.add_argument
    add('--device', type=device, default=default_device(), help='where to run (default: the GPU if there is one)')
    add('--seconds', type=seconds, default=1.0, metavar='S', help='time for each contender and size (default: 1)')
    add('--min-rounds', type=positive, default=min_rounds, metavar='N', help=f'fewest rounds (default: {min_rounds})')
    add('--threads', type=positive, metavar='N', help='threads of PyTorch (default: one per core)')
    add('--results-file', default=RESULTS, metavar='FILE.csv', help=f'add the measurements to it (default: {RESULTS})')
    args = parser.parse_args(argv)
    check_output(args.results_file, ('.csv',))
    check_columns(args.results_file)
    args.command = command_line(parser.prog, sys.argv[1:] if argv is None else argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def command_line(program: str, argv: list[str]) -> str:
    """The command as a shell takes it, without the file that its rows are in anyhow."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--results-file')
    return shlex.join([*program.split(), *parser.parse_known_args(argv)[1]])


def add_dtype(parser: argparse.ArgumentParser, **kwargs) -> None:
    """Take `--dtype`, one or several."""
    text = 'precision of the computation; what is not float32 runs under autocast (default: float32)'
    parser.add_argument('--dtype', choices=DTYPES, help=text, **kwargs)


def default_device() -> torch.device:
    """The accelerator if there is one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device('cpu')


def check_squares(tokens: Iterable[int]) -> None:
    """Raise UserError unless all numbers of tokens are squares."""
    for number in tokens:
        side = math.isqrt(number)
        if side**2 != number:
            raise UserError(f'--tokens {number} is no square; the grids here are, such as {side**2}')


def seconds(text: str) -> float:
    """A time of 0 seconds or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float('inf'):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return number
