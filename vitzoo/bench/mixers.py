"""`vitzoo bench mixers`: time and memory of every token mixer against fused softmax attention, by number of tokens.

A whole layer is measured, with its linear projections. × is the speedup over softmax attention by PyTorch's
scaled_dot_product_attention in the same rounds. The crossover is the number of tokens above which the mixer is faster,
interpolated. The exponent is that of the time between 1024 tokens (or the next larger size) and the largest size.
"of matmul" is the time of the layer's matrix products alone, at the rate of a large product measured in the same run,
over the time of the layer. The ceiling is the speedup of a layer that takes no longer than these products or than
moving its tensors once, whichever is longer.

A GPU with little work waits for the launches of kernels. With --cuda-graphs all kernels of a pass are launched at once,
as by torch.compile(mode='reduce-overhead') but without other changes, and the times are those of the kernels.

Examples:
    vitzoo bench mixers
    vitzoo bench mixers --mixers ls performer --tokens 196 1024 4096 --dim 192 --heads 3 --dtype bfloat16
    vitzoo bench mixers --cuda-graphs --dtype bfloat16
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import psutil
import torch
from torch import nn

from vitzoo.bench._harness import (
    CUDA_GRAPHS,
    INPUT_SETS,
    LAYER_PASSES,
    PRECISIONS,
    Spread,
    call_peak_megabytes,
    in_cuda_graphs,
    ratios,
    time_in_turn,
    with_fused_attn,
)
from vitzoo.bench._options import (
    DEFAULT_TOKENS,
    add_dtype,
    add_layer_shape,
    check_dtypes,
    check_heads,
    check_squares,
    parse_common,
)
from vitzoo.bench._plot import plot_scaling
from vitzoo.bench._results import append_rows, make_row, start_run
from vitzoo.bench._roofline import Work, measure_rates, roofline
from vitzoo.bench._show import format_time, print_table, show_rounds
from vitzoo.errors import CommandParser, UserError, did_you_mean
from vitzoo.machine import describe_machine, format_machine
from vitzoo.metrics.macs import count_call_macs
from vitzoo.mixers import create_mixer, list_mixers
from vitzoo.options import autocast, check_output, nonnegative

BASELINE = 'softmax'
# the textbook form, which stores the N x N weights
UNFUSED = 'softmax, unfused'


@dataclass
class Cell:
    """The measurements of one pass of a mixer at one number of tokens."""

    times: Spread
    ratio: Spread
    peak_mb: float
    # the result of `roofline`, and GMACs
    limits: dict


def main(argv: list[str] | None = None) -> dict[tuple[str, str, int], Cell]:
    """Measure what the command line asks for; return the cells by mixer, pass and number of tokens.

    Raises:
        UserError: A mixer is unknown or cannot be made with the width and heads, a number of tokens is not a square, or
            the plots cannot be written.
    """
    args = parse_args(argv)
    names = select_mixers(args.mixers)
    check_mixers(names, args)
    run, machine = start_run(), describe_machine(args.device)
    print(format_machine(machine))
    cells: dict[tuple[str, str, int], Cell] = {}
    for tokens in sorted(args.tokens):
        for measured_pass in LAYER_PASSES:
            fitting = affordable(names, measured_pass, tokens, cells, args)
            if not fitting:
                continue
            new = measure_mixers(fitting, measured_pass, tokens, args)
            cells |= new
            # written now, so that an interrupted run keeps its results
            append_rows(args.results_file, cells_to_rows(new, args), run=run, command=args.command, **machine)
    for measured_pass in LAYER_PASSES:
        print_scaling(cells, names, measured_pass)
    for quantity in ('time', 'memory'):
        plot_scaling(f'{args.plots}_{quantity}.png', quantity, cells_to_rows(cells, args), format_machine(machine))
    return cells


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo bench mixers', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add_layers(parser, DEFAULT_TOKENS)
    add(
        '--max-seconds',
        type=nonnegative,
        default=15.0,
        metavar='S',
        help='skip slower calls except softmax (default: 15)',
    )
    add(
        '--max-memory',
        type=nonnegative,
        metavar='GB',
        help='skip calls that need more (default: half of the free memory)',
    )
    add('--cuda-graphs', action='store_true', help='launch the kernels of a pass at once (needs an NVIDIA GPU)')
    add('--plots', default='mixers', metavar='PATH', help='path prefix of the two plots (default: mixers)')
    args = parse_common(parser, argv, min_rounds=3)
    check_layers(args)
    if args.cuda_graphs and args.device.type != 'cuda':
        raise UserError(f"--cuda-graphs needs an NVIDIA GPU, and the device is '{args.device.type}'; leave it out")
    check_output(f'{args.plots}_time.png', ('.png',))
    if args.max_memory is None:
        args.max_memory = _free_gigabytes(args.device) / 2
    return args


def add_layers(parser: argparse.ArgumentParser, tokens: tuple[int, ...]) -> None:
    """Add the options that choose mixers, and the shape and precision of their layers."""
    text = 'mixers to compare with softmax (default: all)'
    parser.add_argument('--mixers', nargs='+', default=[], metavar='NAME', help=text)
    add_layer_shape(parser, tokens, batch_size=2)
    add_dtype(parser, default='float32')


def check_layers(args: argparse.Namespace) -> None:
    """Raise UserError unless layers of this shape and precision can be measured on the device."""
    check_squares(args.tokens)
    check_heads(args)
    check_dtypes([args.dtype], args.device)


def _free_gigabytes(device: torch.device) -> float:
    """Free memory of a device."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == 'cuda' else psutil.virtual_memory().available
    return free / 1e9


def select_mixers(names: list[str]) -> list[str]:
    """The two forms of softmax, then the mixers `names`, or all if there are none.

    Raises:
        UserError: A mixer is unknown.
    """
    for name in names:
        if name not in list_mixers():
            raise UserError(
                f"unknown mixer '{name}'{did_you_mean(name, list_mixers())}; `vitzoo list --mixers` lists them"
            )
    return [BASELINE, UNFUSED] + sorted({*(names or list_mixers())} - {BASELINE})


def check_mixers(names: list[str], args: argparse.Namespace) -> None:
    """Raise UserError unless all mixers can be made with the width and heads, for every number of tokens."""
    for name, tokens in product(names, args.tokens):
        side = math.isqrt(tokens)
        try:
            create_mixer(name.partition(',')[0], args.dim, args.heads, grid_size=(side, side), device='meta')
        except ValueError as error:
            reason = str(error).rstrip('.')
            raise UserError(f'{name} cannot be made with --dim {args.dim} --heads {args.heads}: {reason}') from error


def affordable(
    names: list[str], measured_pass: str, tokens: int, cells: dict[tuple[str, str, int], Cell], args: argparse.Namespace
) -> list[str]:
    """The mixers predicted to stay within the limits of time and memory; prints the others.

    Softmax, the baseline, may exceed the limit of time. Where it exceeds that of memory there are none, because the
    others are measured against it.
    """
    fitting = []
    for name in names:
        known = {n: cell for (mixer, kind, n), cell in cells.items() if (mixer, kind) == (name, measured_pass)}
        seconds = extrapolate({n: cell.times.median for n, cell in known.items()}, tokens)
        gigabytes = extrapolate({n: cell.peak_mb for n, cell in known.items()}, tokens) / 1e3
        if gigabytes > args.max_memory:
            print(f'skipped: {name} {measured_pass} at {tokens} tokens, about {gigabytes:.1f} GB')
        elif seconds > args.max_seconds and name != BASELINE:
            print(f'skipped: {name} {measured_pass} at {tokens} tokens, about {seconds:.0f} seconds per call')
        elif not known and any(kind == measured_pass for _, kind, _ in cells):
            print(f'skipped: {name} {measured_pass} at {tokens} tokens, as at fewer tokens')
        else:
            fitting.append(name)
    if fitting and BASELINE not in fitting:
        print(f'skipped: all others {measured_pass} at {tokens} tokens, as they are compared with {BASELINE}')
        return []
    return fitting


def extrapolate(known: dict[int, float], tokens: int) -> float:
    """Predict a cost at `tokens` from the costs at smaller sizes.

    The model is a N + b N^2 through the two largest sizes, b N^2 if only one is known, and 0 if none is.
    """
    if not known:
        return 0.0
    sizes = sorted(known)
    n = sizes[-1]
    if len(sizes) == 1:
        return known[n] * (tokens / n) ** 2
    m = sizes[-2]
    b = max((known[n] / n - known[m] / m) / (n - m), 0.0)
    a = known[n] / n - b * n
    return a * tokens + b * tokens**2


def measure_mixers(
    names: list[str], measured_pass: str, tokens: int, args: argparse.Namespace
) -> dict[tuple[str, str, int], Cell]:
    """Time a pass of the mixers in turn, and measure their memory."""
    torch.manual_seed(0)
    inputs = [torch.randn(args.batch, tokens, args.dim, device=args.device) for _ in range(INPUT_SETS)]
    calls, macs, work = {}, {}, {}
    for name in names:
        mixer, calls[name] = make_call(name, inputs, measured_pass, args)
        macs[name] = layer_macs(name, tokens, args.dim, args.heads)
        out = torch.empty(inputs[0].shape, dtype=PRECISIONS[args.dtype], device='meta')
        work[name] = Work.of(measured_pass, args.batch * macs[name], [inputs[0], out, *mixer.parameters()])
    rates = measure_rates(PRECISIONS[args.dtype], args.device)
    with show_rounds(f'{tokens} tokens, {measured_pass}') as on_round:
        # before the times, because it also warms up
        peaks = {name: call_peak_megabytes(call, args.device) for name, call in calls.items()}
        if args.cuda_graphs:
            calls = capture_calls(calls, f'{measured_pass} at {tokens} tokens')
        times = time_in_turn(calls, args.device, seconds=args.seconds, min_rounds=args.min_rounds, on_round=on_round)
    cells = {}
    for name in calls:
        spread, baseline = Spread.of(times[name]), Spread.of(times[BASELINE])
        limits = roofline(work[name], rates, spread.median, baseline.median) | dict(gmacs=macs[name] / 1e9)
        cells[name, measured_pass, tokens] = Cell(spread, ratios(times[BASELINE], times[name]), peaks[name], limits)
    return cells


@cache
def layer_macs(name: str, tokens: int, dim: int, num_heads: int) -> int:
    """Multiply-accumulates of a mixer or a form of softmax for one sample, which both passes need."""
    side = math.isqrt(tokens)
    mixer = create_mixer(name.partition(',')[0], dim, num_heads, grid_size=(side, side), device='meta')
    return count_call_macs(mixer, torch.empty(1, tokens, dim, device='meta'), (side, side))


def capture_calls(calls: dict[str, Callable[[int], object]], what: str) -> dict[str, Callable[[int], object]]:
    """The calls as CUDA graphs that share their memory; prints those that cannot be captured, and leaves them out."""
    stream, pool, captured = torch.cuda.Stream(), torch.cuda.graph_pool_handle(), {}
    for name, call in calls.items():
        try:
            captured[name] = in_cuda_graphs(call, stream, pool)
        except RuntimeError as error:
            if name == BASELINE:
                raise
            print(f'skipped: {name} {what}, not captured in a CUDA graph: {str(error).strip().partition(chr(10))[0]}')
    return captured


def make_call(
    name: str, inputs: list[torch.Tensor], measured_pass: str, args: argparse.Namespace
) -> tuple[nn.Module, Callable[[int], object]]:
    """A mixer for the inputs, or a form of softmax, and a function of the round number that runs a pass of it."""
    side = math.isqrt(inputs[0].shape[1])
    mixer = create_mixer(name.partition(',')[0], args.dim, args.heads, grid_size=(side, side), device=args.device)
    call = mixer_call(mixer, inputs, (side, side), measured_pass, args.dtype)
    return mixer, with_fused_attn(call, enable=False) if name == UNFUSED else call


def mixer_call(
    mixer: nn.Module, inputs: list[torch.Tensor], grid_size: tuple[int, int], measured_pass: str, dtype: str
) -> Callable[[int], object]:
    """A function of the round number that runs a pass of the mixer on one of the inputs."""
    device = inputs[0].device

    @torch.no_grad()
    def forward(number: int) -> None:
        with autocast(device, dtype):
            mixer(inputs[number % len(inputs)], grid_size)

    def forward_backward(number: int) -> None:
        x = inputs[number % len(inputs)].requires_grad_()
        with autocast(device, dtype):
            out = mixer(x, grid_size)
        out.backward(inputs[(number + 1) % len(inputs)].detach().to(out.dtype))
        x.grad = None
        mixer.zero_grad(set_to_none=True)

    is_forward = measured_pass == 'forward'
    mixer.train(not is_forward)
    return forward if is_forward else forward_backward


def cells_to_rows(cells: dict[tuple[str, str, int], Cell], args: argparse.Namespace) -> list[dict]:
    """The cells as rows of a results file."""
    return [
        make_row(cell.times, cell.ratio, table='mixers', name=name, what=measured_pass, against=BASELINE)
        | dict(tokens=tokens, peak_mb=cell.peak_mb, **shape_columns(args), **cell.limits)
        | dict(backend=CUDA_GRAPHS if args.cuda_graphs else None)
        for (name, measured_pass, tokens), cell in cells.items()
    ]


def shape_columns(args: argparse.Namespace) -> dict:
    """Shape, precision and device of the layers, as columns of a results file."""
    return dict(dim=args.dim, num_heads=args.heads, batch_size=args.batch, dtype=args.dtype, device=args.device.type)


def print_scaling(cells: dict[tuple[str, str, int], Cell], names: list[str], measured_pass: str) -> None:
    """Print times and speedups by number of tokens, with exponent, crossover, and memory at the largest size."""
    sizes = sorted({tokens for _, _, tokens in cells})
    rows = []
    for name in names:
        known = {n: cells[name, measured_pass, n] for n in sizes if (name, measured_pass, n) in cells}
        if not known:
            continue
        power = exponent({n: cell.times.median for n, cell in known.items()})
        start = format_crossover({n: cell.ratio.median for n, cell in known.items()})
        times = [
            f'{format_time(known[n].times.median)} ×{known[n].ratio.median:.2f}' if n in known else '–' for n in sizes
        ]
        last = known[max(known)]
        shown = ['–' if power is None else f'{power:.2f}', '' if name == BASELINE else start, f'{last.peak_mb:,.0f} MB']
        shown += [f'{last.limits["matmul_share"]:.0%}', f'{last.limits["ceiling"]:.1f}', f'{max(known):,}']
        rows.append([name, *times, *shown])
    headings = ['exponent', 'crossover', 'peak memory', 'of matmul', 'ceiling', 'at']
    title = f'{measured_pass}; × is the speedup over {BASELINE} (fused)'
    print_table(title, ['mixer', *(f'{n:,}' for n in sizes), *headings], rows)


def exponent(known: dict[int, float], start: int = 1024) -> float | None:
    """Exponent of the growth of a time with the number of tokens, from `start` or the next size to the largest."""
    sizes = [tokens for tokens in sorted(known) if tokens >= start]
    if len(sizes) < 2:
        return None
    first, last = sizes[0], sizes[-1]
    return math.log(known[last] / known[first]) / math.log(last / first)


def crossover(ratio: dict[int, float]) -> float:
    """The number of tokens above which a speedup stays above 1, interpolated; 0 if always, infinity if never."""
    sizes = sorted(ratio)
    slower = [i for i, tokens in enumerate(sizes) if ratio[tokens] <= 1]
    if not slower:
        return 0.0
    if slower[-1] == len(sizes) - 1:
        return math.inf
    below, above = sizes[slower[-1]], sizes[slower[-1] + 1]
    share = math.log(ratio[below]) / (math.log(ratio[below]) - math.log(ratio[above]))
    return math.exp(math.log(below) + share * math.log(above / below))


def format_crossover(ratio: dict[int, float]) -> str:
    """The crossover as shown in a table."""
    start = crossover(ratio)
    if start == 0:
        return f'≤ {min(ratio):,}'
    if start == math.inf:
        return f'never up to {max(ratio):,}'
    return f'{start:,.0f}'
