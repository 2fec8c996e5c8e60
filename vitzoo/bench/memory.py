"""`vitzoo bench memory`: peak memory of every token mixer by number of tokens, or of a training step of models.

A mixer is measured as a layer, with its linear projections, and compared with fused softmax attention. The peak is that
of the tensors that a call allocates, which on a CPU depends neither on the machine nor on what else runs on it. To that
of a model, in a forward and backward pass, its weights and the two moments of AdamW are added.

Examples:
    vitzoo bench memory
    vitzoo bench memory --mixers ls performer --tokens 16384 --dtype bfloat16
    vitzoo bench memory --models 'deit_*_small' --img-size 384
"""

import argparse
from collections.abc import Iterator
from itertools import product

import torch

from vitzoo.bench._harness import LAYER_PASSES, call_peak_megabytes
from vitzoo.bench._options import parse_common
from vitzoo.bench._results import append_rows, make_row, start_run
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
from vitzoo.bench.models import (
    batch_errors,
    compute_gradients,
    own_size,
    random_images,
    random_model,
    weights_megabytes,
)
from vitzoo.errors import CommandParser, UserError
from vitzoo.load import find_models
from vitzoo.machine import describe_machine, format_machine
from vitzoo.options import positive

_TOKENS = (196, 1024, 4096)
_TRAINING = 'training step'


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row for each mixer, number of tokens and pass, or each model.

    Raises:
        UserError: A mixer is unknown or cannot be made with the width and heads, a number of tokens is not a square, a
            model is unknown or cannot take the image size, or cannot be trained on the batch.
    """
    args = parse_args(argv)
    names = find_models(args.models) if args.models else select_mixers(args.mixers)
    if not args.models:
        check_mixers(names, args)
    run, machine = start_run(), describe_machine(args.device)
    print(format_machine(machine))
    rows = []
    for row in _measure_models(names, args) if args.models else _measure_mixers(names, args):
        append_rows(args.results_file, [row], run=run, command=args.command, **machine)
        rows.append(row)
    if args.models:
        print_training(rows, args)
    else:
        print_peaks(rows, names)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo bench memory', description=__doc__.partition('\n')[0])
    add_layers(parser, _TOKENS)
    add = parser.add_argument
    add('--models', nargs='+', metavar='MODEL', help='train these instead: timm names, or quoted wildcards')
    add('--img-size', type=positive, metavar='N', help="image size of --models (default: the model's own)")
    args = parse_common(parser, argv)
    shaped = [name for name in ('mixers', 'tokens', 'dim', 'heads') if getattr(args, name) != parser.get_default(name)]
    if args.models and shaped:
        raise UserError(f'--{shaped[0]} describes layers, and does not apply to --models; leave it out')
    if args.img_size and not args.models:
        raise UserError('--img-size is that of --models; the size of layers is --tokens')
    check_layers(args)
    return args


def _measure_mixers(names: list[str], args: argparse.Namespace) -> Iterator[dict]:
    for tokens, name, measured_pass in product(sorted(args.tokens), names, LAYER_PASSES):
        yield measure_peak(name, measured_pass, tokens, args)


def _measure_models(names: list[str], args: argparse.Namespace) -> Iterator[dict]:
    for name in names:
        yield measure_training(name, args.img_size or own_size(name), args)


def measure_training(name: str, img_size: int, args: argparse.Namespace) -> dict:
    """The peak memory of a training step of a model, as a row of a results file."""
    torch.manual_seed(0)
    model = random_model(name, img_size, args.device).train()
    images = random_images(args.batch, img_size, args.device)[0]

    with show_rounds(f'{name}, {img_size} px, {_TRAINING}'), batch_errors(name, args.batch):
        peak = call_peak_megabytes(
            lambda number: compute_gradients(model, images, args.dtype), args.device, warm_up=False
        )
    moments = 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / 1e6
    row = make_row(table='training memory', name=name, what=_TRAINING, img_size=img_size, batch_size=args.batch)
    # no load of the machine changes it
    about = dict(dtype=args.dtype, device=args.device.type, load=None)
    return row | about | dict(peak_mb=peak + weights_megabytes(model) + moments)


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


def print_training(rows: list[dict], args: argparse.Namespace) -> None:
    """Print the peak of each model."""
    lines = [[row['name'], str(row['img_size']), f'{row["peak_mb"]:,.0f}'] for row in rows]
    print_table(f'{_TRAINING}, batch size {args.batch}, {args.dtype}', ['model', 'size', 'MB'], lines)


def print_peaks(rows: list[dict], names: list[str]) -> None:
    """Print the peak of each mixer, and its ratio to that of fused softmax attention."""
    peaks = {(row['name'], row['what'], row['tokens']): row['peak_mb'] for row in rows}
    sizes = sorted({tokens for _, _, tokens in peaks})
    for measured_pass in LAYER_PASSES:
        lines = []
        for name in names:
            ratios = {n: ratio_to_baseline(peaks, name, measured_pass, n) for n in sizes}
            lines.append([name, *(f'{peaks[name, measured_pass, n]:,.1f} ×{ratios[n]:.2f}' for n in sizes)])
        title = f'{measured_pass}: peak memory in MB; × is the ratio to {BASELINE} (fused)'
        print_table(title, ['mixer', *(f'{n:,}' for n in sizes)], lines)


def ratio_to_baseline(peaks: dict[tuple[str, str, int], float], name: str, measured_pass: str, tokens: int) -> float:
    """The ratio of a peak to that of fused softmax attention."""
    return peaks[name, measured_pass, tokens] / peaks[BASELINE, measured_pass, tokens]
