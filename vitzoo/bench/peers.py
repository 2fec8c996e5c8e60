"""`vitzoo bench peers`: our layers and models against the packages that do the same, in turn.

vitzoo/bench/_pairs.py has what is compared, and what is equal on both sides. Before a pair is timed, our op must equal
its naive form in float64, and where both packages define the same function, their outputs must be the same for the
same weights. No ratio is printed for a pair that fails. A model is timed as `vitzoo bench models` does.

The ceiling is the ratio that ours would have if it took no longer than its matrix products alone, at the rate of a
large one measured beside it, or than moving its tensors takes; the share is that of those products in its time.

The packages are in the extra `bench`: pip install 'vitzoo[bench]'.

Examples:
    vitzoo bench peers
    vitzoo bench peers --pairs performer nystrom --tokens 1024
"""

import argparse
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from vitzoo.bench._harness import (
    INPUT_SETS,
    Spread,
    append_rows,
    describe_machine,
    ratios,
    row,
    say_machine,
    start_run,
    time_in_turn,
)
from vitzoo.bench._options import check_squares, parse
from vitzoo.bench._pairs import PAIRS, Pair, Shape, relative_difference
from vitzoo.bench._roofline import Work, measure_rates, roofline
from vitzoo.bench._show import milliseconds, print_table, progress
from vitzoo.bench.models import make_call as make_model_call
from vitzoo.errors import UserError, did_you_mean
from vitzoo.metrics.macs import count_call_macs
from vitzoo.mixers import TokenMixer, create_mixer, list_mixers
from vitzoo.options import positive

TOKENS = (196, 1024, 4096)
WHATS = ('forward', 'forward + backward')
MODEL_WHATS = ('forward', 'training step')
# the op against its naive form, as in the tests
OP_TOLERANCE = 1e-9
OP_GRID = (5, 6)


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row for each pair, number of tokens and thing that is run.

    Raises:
        UserError: A pair or a number of tokens is not what it should be, or none of the packages is installed.
    """
    args = parse_args(argv)
    pairs = [pair for pair in PAIRS if not args.pairs or pair.name in args.pairs]
    installed = [pair for pair in pairs if installed_version(pair.package)]
    for package in sorted({pair.package for pair in pairs if pair not in installed}):
        print(f'left out: {package} is not installed')
    if not installed:
        raise UserError("none of the packages is installed; pip install 'vitzoo[bench]'")
    run, machine = start_run(), describe_machine(args.device)
    print(say_machine(machine))
    rows = []
    for pair in installed:
        new = measure_pair(pair, args)
        append_rows(args.results_file, new, run=run, command=args.command, **machine)
        rows += new
    print_rows(rows)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser('vitzoo bench peers', description=__doc__.partition('\n')[0])
    add, names = parser.add_argument, sorted({pair.name for pair in PAIRS})
    add('--pairs', nargs='+', metavar='NAME', help=f'some of {", ".join(names)} (default: all)')
    add('--tokens', type=positive, nargs='+', default=TOKENS, metavar='N', help='squares (default: 196 1024 4096)')
    add('--dim', type=positive, default=384, help='width (default: 384)')
    add('--heads', type=positive, default=6, help='heads (default: 6)')
    add('--batch', type=positive, default=2, help='images for a layer, and half of those for a model (default: 2)')
    args = parse(parser, argv)
    for name in args.pairs or []:
        if name not in names:
            raise UserError(f"there is no peer of '{name}'{did_you_mean(name, names)}; there are {', '.join(names)}")
    check_squares(args.tokens)
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
    """Time both sides in turn, forward and with gradients, beside the machine's own rates."""
    torch.manual_seed(0)
    ours, theirs = (layer.to(args.device) for layer in pair.make(shape))
    inputs = make_inputs(shape, pair, args)
    macs = count_call_macs(ours, torch.empty_like(inputs[0][:1], device='meta'))
    # a layer's output is as large as its input, a model's is small
    tensors = [*inputs[: 2 if pair.is_layer else 1], *ours.parameters()]
    rates = measure_rates(torch.float32, args.device)
    rows = []
    for what in WHATS if pair.is_layer else MODEL_WHATS:
        calls = {'theirs': make_call(theirs, inputs, what), 'ours': make_call(ours, inputs, what)}
        with progress(f'{pair.name}, {shape.tokens if pair.is_layer else "model"}, {what}') as step:
            times = time_in_turn(calls, args.device, seconds=args.seconds, min_rounds=args.min_rounds, on_round=step)
        work = Work.of(what, len(inputs[0]) * macs, tensors)
        seconds = (Spread.of(times[side]).median for side in ('ours', 'theirs'))
        limits = roofline(work, rates, *seconds) | dict(gmacs=macs / 1e9)
        rows += to_rows(pair, what, shape, times, limits, len(inputs[0]), args)
    return rows


def make_inputs(shape: Shape, pair: Pair, args: argparse.Namespace) -> list[torch.Tensor]:
    """Several batches of random tokens, or images for a model, as many again."""
    size = (args.batch, shape.tokens, shape.dim) if pair.is_layer else (2 * args.batch, 3, 224, 224)
    return [torch.randn(size, device=args.device) for _ in range(INPUT_SETS)]


def make_call(layer: nn.Module, inputs: list[torch.Tensor], what: str) -> Callable[[int], object]:
    """A function of the number of the round, which runs a layer or a model on one of the inputs."""
    if what != 'forward + backward':
        return make_model_call(layer, what, inputs, torch.float32)

    def forward_backward(number: int) -> None:
        layer.train()
        x = inputs[number % len(inputs)].requires_grad_()
        layer(x).square().mean().backward()
        x.grad = None
        layer.zero_grad(set_to_none=True)

    return forward_backward


def parity_failure(pair: Pair, shape: Shape) -> str:
    """What is wrong with a pair, '' where nothing is."""
    if pair.name in list_mixers() and not (error := op_error(pair.name)) < OP_TOLERANCE:
        return f'our op differs from its naive form by {error:.1e}'
    if pair.tolerance is None:
        return ''
    torch.manual_seed(0)
    difference = pair.check(shape) if pair.check else output_difference(pair, shape)
    if not difference < pair.tolerance:
        return f'with the same weights the outputs differ by {difference:.1e}, more than {pair.tolerance:.0e}'
    return ''


@torch.no_grad()
def output_difference(pair: Pair, shape: Shape) -> float:
    """The relative difference of what a pair makes of the same tokens."""
    shape = Shape(pair.check_tokens or shape.tokens, shape.dim, shape.heads)
    ours, theirs = pair.make(shape)
    x = torch.randn(1, shape.tokens, shape.dim)
    return relative_difference(ours.eval()(x), theirs.eval()(x))


@torch.no_grad()
def op_error(name: str) -> float:
    """The largest difference between a mixer's op and its naive form, in float64 on a small grid."""
    torch.manual_seed(0)
    mixer = create_mixer(name, 24, 3, grid_size=OP_GRID, dtype=torch.float64).eval()
    args = recorded_call(mixer, torch.randn(2, OP_GRID[0] * OP_GRID[1], 24, dtype=torch.float64))
    return (mixer.op(*args) - mixer.op_naive(*args)).abs().max().item()


def recorded_call(mixer: TokenMixer, x: torch.Tensor) -> tuple:
    """The arguments with which a mixer calls its op."""
    calls = []

    def recorder(*args):
        calls.append(args)
        return type(mixer).op(*args)

    mixer.op = recorder
    mixer(x, OP_GRID)
    del mixer.op
    return calls[0]


def to_rows(
    pair: Pair,
    what: str,
    shape: Shape,
    times: dict[str, list[float]],
    limits: dict,
    batch_size: int,
    args: argparse.Namespace,
) -> list[dict]:
    """The times of both sides as rows of a results file; the ratio says how many times faster ours is."""
    package = f'{pair.package} {installed_version(pair.package)}'
    size = dict(tokens=shape.tokens, dim=shape.dim, num_heads=shape.heads) if pair.is_layer else dict(img_size=224)
    fields = dict(table='peers', what=what, batch_size=batch_size, dtype='float32', device=args.device.type, **size)
    against = f'{pair.package} ({pair.note})' if pair.note else pair.package
    ratio = ratios(times['theirs'], times['ours'])
    ours = row(Spread.of(times['ours']), ratio, name=pair.name, against=against, versions=package)
    return [
        fields | ours | limits,
        # the other side, so that both times can be looked up
        fields | row(Spread.of(times['theirs']), name=against, against=pair.name, versions=package),
    ]


def print_rows(rows: list[dict]) -> None:
    """Print ours beside theirs."""
    lines = [
        [
            f'{ours["name"]} against {ours["against"]}',
            f'{ours["tokens"]:,}' if 'tokens' in ours else 'model',
            ours['what'],
            milliseconds(ours['seconds']),
            milliseconds(theirs['seconds']),
            f'{ours["ratio"]:.2f}',
            f'{ours["ratio_low"]:.2f} … {ours["ratio_high"]:.2f}',
            str(ours['rounds']),
            f'{ours["matmul_share"]:.0%}',
            f'{ours["ceiling"]:.2f}',
        ]
        for ours, theirs in zip(rows[::2], rows[1::2], strict=True)
    ]
    headings = ['', 'tokens', '', 'ours', 'theirs', '×', 'quartiles', 'rounds', 'of matmul', 'ceiling']
    print_table('× how many times faster', headings, lines)
