"""Command-line options shared by the tables of `vitzoo bench`."""

import argparse
import math
import shlex
import sys
from collections.abc import Iterable
from typing import Any

import torch

from vitzoo.bench._harness import PRECISIONS
from vitzoo.bench._results import RESULTS, check_columns
from vitzoo.errors import UserError
from vitzoo.options import check_output, default_device, device, nonnegative, positive

DEFAULT_TOKENS = (196, 784, 1024, 3136, 4096, 9216, 16384)


def parse_common(parser: argparse.ArgumentParser, argv: list[str] | None, min_rounds: int = 5) -> argparse.Namespace:
    """Add the options that all tables take, and parse the command line.

    Raises:
        UserError: The results file cannot be written, has other columns, or is not a table in UTF-8.
    """
    add = parser.add_argument
    add('--device', type=device, default=default_device(), help='device to run on (default: the GPU if there is one)')
    add('--seconds', type=nonnegative, default=1.0, metavar='S', help='time per contender and size (default: 1)')
    add('--min-rounds', type=positive, default=min_rounds, metavar='N', help=f'minimum rounds (default: {min_rounds})')
    add('--threads', type=positive, metavar='N', help='threads of PyTorch (default: one per core)')
    add('--results-file', default=RESULTS, metavar='FILE.csv', help=f'append the results to it (default: {RESULTS})')
    args = parser.parse_args(argv)
    check_output(args.results_file, ('.csv',))
    check_columns(args.results_file)
    print(f'results are appended to {args.results_file}')
    args.command = _command_line(parser.prog, sys.argv[1:] if argv is None else argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def add_layer_shape(parser: argparse.ArgumentParser, tokens: tuple[int, ...], batch_size: int) -> None:
    """Add the options for the input of a layer, with the defaults that differ between tables."""
    add = parser.add_argument
    sizes = ' '.join(map(str, tokens))
    add('--tokens', type=positive, nargs='+', default=tokens, metavar='N', help=f'square numbers (default: {sizes})')
    add('--dim', type=positive, default=384, help='width (default: 384)')
    add('--heads', type=positive, default=6, help='number of heads (default: 6)')
    add('--batch', type=positive, default=batch_size, help=f'batch size (default: {batch_size})')


def add_dtype(parser: argparse.ArgumentParser, **kwargs: Any) -> None:
    """Add `--dtype`, which takes one or several precisions."""
    text = 'precision of the computation; bfloat16 and float16 use autocast (default: float32)'
    parser.add_argument('--dtype', choices=PRECISIONS, help=text, **kwargs)


def check_squares(tokens: Iterable[int]) -> None:
    """Raise UserError unless all numbers of tokens are squares."""
    for number in tokens:
        side = math.isqrt(number)
        if side**2 != number:
            raise UserError(f'--tokens {number} is not a square number; the nearest below is {side**2}')


def check_heads(args: argparse.Namespace) -> None:
    """Raise UserError unless the heads divide the width."""
    if args.dim % args.heads:
        raise UserError(f'--dim {args.dim} is not divisible by --heads {args.heads}; choose another number of either')


def check_dtypes(dtypes: Iterable[str], device: torch.device) -> None:
    """Raise UserError for float16 on a CPU, where a product of the reference takes minutes."""
    if 'float16' in dtypes and device.type == 'cpu':
        raise UserError('--dtype float16 needs a GPU; on a CPU, use --dtype bfloat16 or float32')


def _command_line(program: str, argv: list[str]) -> str:
    """The command as typed in a shell, without --results-file, which does not affect the results."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--results-file')
    return shlex.join([*program.split(), *parser.parse_known_args(argv)[1]])
