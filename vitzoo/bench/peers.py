"""`vitzoo bench peers`: layers and models of vitzoo against those of other packages, in turn.

The pairs and their settings are in vitzoo/bench/_pairs.py. Before a pair is timed, our op must equal its naive form in
float64, and if both packages define the same function, their outputs must agree for the same weights. A pair that fails
is not timed. A model is timed as in `vitzoo bench models`.

The ceiling is the speedup that ours would have if it took no longer than its matrix products, at the rate of a large
product measured in the same run, or than moving its tensors once, whichever is longer. "of matmul" is the time of these
products over the time of ours.

The packages are in the extra `bench`: pip install 'vitzoo-models[bench]'.

Examples:
    vitzoo bench peers
    vitzoo bench peers --pairs performer nystrom --tokens 1024
"""

import argparse
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from vitzoo.bench._harness import INPUT_SETS, LAYER_PASSES, Spread, ratios, time_in_turn
from vitzoo.bench._options import add_layer_shape, check_heads, check_squares, parse_common
from vitzoo.bench._pairs import PAIRS, Pair, Shape
from vitzoo.bench._results import append_rows, make_row, start_run
from vitzoo.bench._roofline import Work, measure_rates, roofline
from vitzoo.bench._show import format_quartiles, format_time, print_table, show_rounds
from vitzoo.bench.models import model_call
from vitzoo.errors import CommandParser, UserError, did_you_mean
from vitzoo.machine import describe_machine, format_machine
from vitzoo.metrics.macs import count_call_macs
from vitzoo.mixers import create_mixer, list_mixers
from vitzoo.mixers._op_calls import recorded_calls

_TOKENS = (196, 1024, 4096)
PEER_MODEL_PASSES = ('forward', 'training step')
# for an op and its naive form, as in the tests
OP_TOLERANCE = 1e-9
_OP_GRID = (5, 6)


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return two rows per pair, number of tokens and pass.

    Raises:
        UserError: A pair is unknown, a number of tokens is not a square, the heads do not divide the width, or none of
            the packages is installed.
    """
    args = parse_args(argv)
    pairs = [pair for pair in PAIRS if not args.pairs or pair.name in args.pairs]
    installed = [pair for pair in pairs if installed_version(pair.package)]
    for package in sorted({pair.package for pair in pairs if pair not in installed}):
        print(f'skipped: {package} is not installed')
    if not installed:
        raise UserError("none of the packages is installed; run pip install 'vitzoo-models[bench]'")
    run, machine = start_run(), describe_machine(args.device)
    print(format_machine(machine))
    rows = []
    for pair in installed:
        new = measure_pair(pair, args)
        append_rows(args.results_file, new, run=run, command=args.command, **machine)
        rows += new
    print_peers(rows)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo bench peers', description=__doc__.partition('\n')[0])
    add, names = parser.add_argument, sorted({pair.name for pair in PAIRS})
    add('--pairs', nargs='+', metavar='NAME', help=f'any of {", ".join(names)} (default: all)')
    add_layer_shape(parser, _TOKENS, batch_size=2)
    args = parse_common(parser, argv)
    for name in args.pairs or []:
        if name not in names:
            raise UserError(f"unknown pair '{name}'{did_you_mean(name, names)}; the pairs are {', '.join(names)}")
    check_squares(args.tokens)
    check_heads(args)
    return args


def installed_version(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def measure_pair(pair: Pair, args: argparse.Namespace) -> list[dict]:
    """Check a pair, and time it at every number of tokens; of one that fails the check nothing but a line."""
    rows = []
    for tokens in args.tokens if pair.is_layer else [None]:
        shape = Shape(tokens or 196, args.dim, args.heads)
        failure = parity_failure(pair, shape)
        if failure:
            print(f'refused: {pair.name} against {pair.package}: {failure}')
            return []
        rows += measure_shape(pair, shape, args)
    return rows


def measure_shape(pair: Pair, shape: Shape, args: argparse.Namespace) -> list[dict]:
    """Time the passes of both sides in turn, after measuring the rates of the machine."""
    torch.manual_seed(0)
    ours, theirs = (layer.to(args.device) for layer in pair.make(shape))
    inputs = make_inputs(shape, pair, args)
    macs = count_call_macs(ours, torch.empty_like(inputs[0][:1], device='meta'))
    # a layer's output is as large as its input, a model's is negligible
    tensors = [*inputs[: 2 if pair.is_layer else 1], *ours.parameters()]
    rates = measure_rates(torch.float32, args.device)
    rows = []
    for measured_pass in LAYER_PASSES if pair.is_layer else PEER_MODEL_PASSES:
        calls = {'theirs': peer_call(theirs, inputs, measured_pass), 'ours': peer_call(ours, inputs, measured_pass)}
        with show_rounds(f'{pair.name}, {shape.tokens if pair.is_layer else "model"}, {measured_pass}') as on_round:
            times = time_in_turn(
                calls, args.device, seconds=args.seconds, min_rounds=args.min_rounds, on_round=on_round
            )
        work = Work.of(measured_pass, len(inputs[0]) * macs, tensors)
        limits = roofline(work, rates, Spread.of(times['ours']).median, Spread.of(times['theirs']).median)
        common = dict(what=measured_pass, batch_size=len(inputs[0]), device=args.device.type)
        rows += pair_rows(pair, shape, times, limits | dict(gmacs=macs / 1e9), common)
    return rows


def make_inputs(shape: Shape, pair: Pair, args: argparse.Namespace) -> list[torch.Tensor]:
    """Several batches of random tokens for a layer, or of twice as many images for a model."""
    size = (args.batch, shape.tokens, shape.dim) if pair.is_layer else (2 * args.batch, 3, 224, 224)
    return [torch.randn(size, device=args.device) for _ in range(INPUT_SETS)]


def peer_call(layer: nn.Module, inputs: list[torch.Tensor], measured_pass: str) -> Callable[[int], object]:
    """A function of the round number that runs a pass of a layer or a model on one of the inputs."""
    if measured_pass != 'forward + backward':
        return model_call(layer, measured_pass, inputs, 'float32')

    def forward_backward(number: int) -> None:
        layer.train()
        x = inputs[number % len(inputs)].requires_grad_()
        layer(x).square().mean().backward()
        x.grad = None
        layer.zero_grad(set_to_none=True)

    return forward_backward


def parity_failure(pair: Pair, shape: Shape) -> str:
    """A sentence on why a pair cannot be compared, or '' if it can."""
    if pair.name in list_mixers() and not (error := op_error(pair.name)) < OP_TOLERANCE:
        return f'our op differs from its naive form by {error:.1e}'
    if pair.difference is None:
        return ''
    torch.manual_seed(0)
    difference = pair.difference(shape)
    if not difference < pair.tolerance:
        return f'with the same weights the outputs differ by {difference:.1e}, more than {pair.tolerance:.0e}'
    return ''


@torch.no_grad()
def op_error(name: str) -> float:
    """The largest difference between a mixer's op and its naive form, in float64 on a small grid."""
    torch.manual_seed(0)
    mixer = create_mixer(name, 24, 3, grid_size=_OP_GRID, dtype=torch.float64).eval()
    with recorded_calls(mixer) as calls:
        mixer(torch.randn(2, _OP_GRID[0] * _OP_GRID[1], 24, dtype=torch.float64), _OP_GRID)
    return (mixer.op(*calls[0]) - mixer.op_naive(*calls[0])).abs().max().item()


def pair_rows(pair: Pair, shape: Shape, times: dict[str, list[float]], limits: dict, common: dict) -> list[dict]:
    """The times of both sides as rows of a results file; the row of ours has the speedup and the limits."""
    package = f'{pair.package} {installed_version(pair.package)}'
    size = dict(tokens=shape.tokens, dim=shape.dim, num_heads=shape.heads) if pair.is_layer else dict(img_size=224)
    fields = dict(table='peers', dtype='float32', versions=package, **size, **common)
    against = f'{pair.package} ({pair.note})' if pair.note else pair.package
    ratio = ratios(times['theirs'], times['ours'])
    ours = make_row(Spread.of(times['ours']), ratio, name=pair.name, against=against)
    theirs = make_row(Spread.of(times['theirs']), name=against, against=pair.name)
    return [fields | ours | limits, fields | theirs]


def print_peers(rows: list[dict]) -> None:
    """Print a line per pair, size and pass."""
    lines = [
        [
            f'{ours["name"]} against {ours["against"]}',
            f'{ours["tokens"]:,}' if 'tokens' in ours else 'model',
            ours['what'],
            format_time(ours['seconds']),
            format_time(theirs['seconds']),
            f'{ours["ratio"]:.2f}',
            format_quartiles(ours['ratio_low'], ours['ratio_high']),
            str(ours['rounds']),
            f'{ours["matmul_share"]:.0%}',
            f'{ours["ceiling"]:.2f}',
        ]
        for ours, theirs in zip(rows[::2], rows[1::2], strict=True)
    ]
    headings = ['', 'tokens', '', 'ours', 'theirs', '×', 'quartiles', 'rounds', 'of matmul', 'ceiling']
    print_table('× is the speedup of ours', headings, lines)
