"""`vitzoo bench startup`: importing vitzoo and creating a model, against timm.

Each import runs in a new process, in turn; `import vitzoo` includes the import of timm. The models, one of vitzoo and
one of timm of similar size, are created in one process.

Examples:
    vitzoo bench startup
    vitzoo bench startup --model vil_small --against deit_small_patch16_224
"""

import argparse
import subprocess
import sys
from collections.abc import Callable

import timm
import torch

import vitzoo  # noqa: F401  registers the models
from vitzoo.about import is_trained_folder
from vitzoo.bench._harness import Spread, ratios, time_in_turn
from vitzoo.bench._options import parse_common
from vitzoo.bench._results import append_rows, make_row, start_run
from vitzoo.bench._show import format_time, print_table
from vitzoo.errors import CommandParser, UserError
from vitzoo.load import SOURCES, find_models
from vitzoo.machine import describe_machine, format_machine

_CPU = torch.device('cpu')


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row per import and model.

    Raises:
        UserError: A model is unknown, or is a trained one.
    """
    args = parse_args(argv)
    names = find_architectures([args.against, args.model])
    run, machine = start_run(), describe_machine(_CPU)
    print(format_machine(machine))
    imports = {f'import {name}': import_in_new_process(name) for name in ('timm', 'vitzoo')}
    models = {f'create {name}': create_call(name) for name in names}
    rows = []
    for calls in imports, models:
        times = time_in_turn(calls, _CPU, seconds=args.seconds, min_rounds=args.min_rounds)
        baseline = next(iter(times))
        for name, seconds in times.items():
            fields = dict(table='startup', name=name, what='startup', against=baseline, device='cpu')
            rows.append(make_row(Spread.of(seconds), ratios(times[baseline], seconds), **fields))
    append_rows(args.results_file, rows, run=run, command=args.command, **machine)
    lines = [[fields['name'], format_time(fields['seconds']), f'{1 / fields["ratio"]:.2f}'] for fields in rows]
    print_table('startup; × is the time relative to timm', ['', 'time', '×'], lines)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo bench startup', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('--model', default='cvt_ls_13', help='model of vitzoo to create (default: cvt_ls_13, 20.3 M parameters)')
    add('--against', default='deit_small_patch16_224', help='model of timm (default: deit_small_patch16_224, 22.1 M)')
    return parse_common(parser, argv)


def find_architectures(patterns: list[str]) -> list[str]:
    """Expand names and wildcards.

    Raises:
        UserError: A name is unknown, or that of a folder or of a repository of the hub.
    """
    names = find_models(patterns)
    for name in names:
        if is_trained_folder(name) or name.startswith(SOURCES):
            raise UserError(f"'{name}' is a trained model; give the name of its architecture")
    return names


def import_in_new_process(name: str) -> Callable[[int], object]:
    """A call that imports a package in a new Python process."""
    return lambda number: subprocess.run([sys.executable, '-c', f'import {name}'], check=True)


def create_call(name: str) -> Callable[[int], object]:
    """A call that creates a model with random weights."""
    return lambda number: timm.create_model(name)
