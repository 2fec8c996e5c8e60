"""`vitzoo bench memory`: peak memory of every token mixer and of fused softmax attention, by number of tokens.

A whole layer is measured, with its linear projections. The peak is that of the tensors that a call allocates, which on
a CPU depends neither on the machine nor on what else runs on it.

Examples:
    vitzoo bench memory
    vitzoo bench memory --mixers ls performer --tokens 16384 --dtype bfloat16
"""

import argparse

import torch

from vitzoo.bench._harness import (
    LAYER_PASSES,
    append_rows,
    call_peak_megabytes,
    describe_machine,
    format_machine,
    make_row,
    start_run,
)
from vitzoo.bench._options import parse_common
from vitzoo.bench._show import print_table, show_rounds
from vitzoo.bench.mixers import (
    BASELINE,
    add_layers,
    check_layers,
    check_mixers,
    make_call,
    select_mixers,
    shape_columns,
)
from vitzoo.errors import CommandParser

_TOKENS = (196, 1024, 4096)


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row for each mixer, number of tokens and pass.

    Raises:
        UserError: A mixer is unknown or cannot be made with the width and heads, or a number of tokens is not a square.
    """
    args = parse_args(argv)
    names = select_mixers(args.mixers)
    check_mixers(names, args)
    run, machine = start_run(), describe_machine(args.device)
    print(format_machine(machine))
    rows: list[dict] = []
    for tokens in sorted(args.tokens):
        new = [measure_peak(name, what, tokens, args) for name in names for what in LAYER_PASSES]
        append_rows(args.results_file, new, run=run, command=args.command, **machine)
        rows += new
    print_peaks(rows, names)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser('vitzoo bench memory', description=__doc__.partition('\n')[0])
    add_layers(parser, _TOKENS)
    args = parse_common(parser, argv)
    check_layers(args)
    return args


def measure_peak(name: str, measured_pass: str, tokens: int, args: argparse.Namespace) -> dict:
    """The peak memory of a pass of a mixer, as a row of a results file."""
    torch.manual_seed(0)
    inputs = [torch.randn(args.batch, tokens, args.dim, device=args.device) for _ in range(2)]
    _, call = make_call(name, inputs, measured_pass, args)
    with show_rounds(f'{name}, {tokens} tokens, {measured_pass}'):
        peak = call_peak_megabytes(call, args.device)
    row = make_row(table='memory', name=name, what=measured_pass, against=BASELINE, tokens=tokens, peak_mb=peak)
    # no load of the machine changes it
    return row | shape_columns(args) | dict(load=None)


def print_peaks(rows: list[dict], names: list[str]) -> None:
    """Print the peak of each mixer, and its ratio to that of fused softmax attention."""
    peaks = {(row['name'], row['what'], row['tokens']): row['peak_mb'] for row in rows}
    sizes = sorted({tokens for _, _, tokens in peaks})
    for what in LAYER_PASSES:
        lines = [
            [name, *(f'{peaks[name, what, n]:,.1f} ×{ratio_to_baseline(peaks, name, what, n):.2f}' for n in sizes)]
            for name in names
        ]
        title = f'{what}: peak memory in MB; × is the ratio to {BASELINE} (fused)'
        print_table(title, ['mixer', *(f'{n:,}' for n in sizes)], lines)


def ratio_to_baseline(peaks: dict[tuple[str, str, int], float], name: str, what: str, tokens: int) -> float:
    """The ratio of a peak to that of fused softmax attention."""
    return peaks[name, what, tokens] / peaks[BASELINE, what, tokens]
