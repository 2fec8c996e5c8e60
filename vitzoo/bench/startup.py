"""`vitzoo bench startup`: importing vitzoo, and creating a model, against the same with timm alone.

Each import runs in a fresh process, in turn; `import vitzoo` includes timm's import. Models are created in one process,
ours and a model of timm's of the same number of parameters.

Examples:
    vitzoo bench startup
    vitzoo bench startup --model vil_small --against deit_small_patch16_224
"""

import argparse
import subprocess
import sys

import timm
import torch

import vitzoo  # noqa: F401  registers the models
from vitzoo.bench._harness import (
    Spread,
    append_rows,
    describe_machine,
    ratios,
    row,
    say_machine,
    start_run,
    time_in_turn,
)
from vitzoo.bench._options import parse
from vitzoo.bench._show import milliseconds, print_table
from vitzoo.load import find_models

CPU = torch.device('cpu')


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row for each import and each model.

    Raises:
        UserError: There is no such model.
    """
    args = parse_args(argv)
    run, machine = start_run(), describe_machine(CPU)
    print(say_machine(machine))
    imports = {f'import {name}': import_in_a_fresh_process(name) for name in ('timm', 'vitzoo')}
    models = {f'create {name}': creation(name) for name in find_models([args.against, args.model])}
    rows = []
    for calls in imports, models:
        times = time_in_turn(calls, CPU, seconds=args.seconds, min_rounds=args.min_rounds)
        theirs = next(iter(times))
        for name, own in times.items():
            fields = dict(table='startup', name=name, what='startup', against=theirs, device='cpu')
            rows.append(row(Spread.of(own), ratios(times[theirs], own), **fields))
    append_rows(args.results_file, rows, run=run, command=args.command, **machine)
    lines = [[fields['name'], milliseconds(fields['seconds']), f'{1 / fields["ratio"]:.2f}'] for fields in rows]
    print_table('startup; × times as long as timm', ['', 'time', '×'], lines)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser('vitzoo bench startup', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('--model', default='cvt_ls_13', help='model of ours to create (default: cvt_ls_13, 20.3 M parameters)')
    add('--against', default='deit_small_patch16_224', help="model of timm's (default: deit_small_patch16_224, 22.1 M)")
    return parse(parser, argv)


def import_in_a_fresh_process(name: str):
    """A call that starts Python and imports one package."""
    return lambda number: subprocess.run([sys.executable, '-c', f'import {name}'], check=True)


def creation(name: str):
    """A call that creates a model with random weights."""
    return lambda number: timm.create_model(name)
