"""`vitzoo bench mixers`: time and memory of every token mixer against fused softmax attention, by number of tokens.

Measured is a whole layer, the linear layers before and after the attention included. The ratio is to softmax attention
in the same rounds, by PyTorch's scaled_dot_product_attention. The crossover is the number of tokens from which a mixer
is faster than that, interpolated; the exponent is that of its time between 1024 tokens (or the next size) and the most.
The share is that of the time that the layer's matrix products alone would take, at the rate of a large one measured
beside it. The ceiling is the ratio of a layer that takes no longer than that, or than moving its tensors takes.

Examples:
    vitzoo bench mixers
    vitzoo bench mixers --mixers ls performer --tokens 196 1024 4096 --dim 192 --heads 3 --dtype bfloat16
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from timm.layers import set_fused_attn
from torch import nn

from vitzoo.bench._harness import (
    DTYPES,
    INPUT_SETS,
    Spread,
    append_rows,
    autocast,
    describe_machine,
    peak_megabytes,
    ratios,
    row,
    say_machine,
    start_run,
    time_in_turn,
)
from vitzoo.bench._options import add_dtype, check_squares, parse
from vitzoo.bench._plot import plot_scaling
from vitzoo.bench._roofline import Work, measure_rates, roofline
from vitzoo.bench._show import milliseconds, print_table, progress
from vitzoo.errors import UserError, did_you_mean
from vitzoo.metrics.macs import count_call_macs
from vitzoo.mixers import create_mixer, list_mixers
from vitzoo.options import positive

TOKENS = (196, 784, 1024, 3136, 4096, 9216, 16384)
BASELINE = 'softmax'
# the textbook form, which holds the N x N weights
UNFUSED = 'softmax, unfused'
WHATS = ('forward', 'forward + backward')


@dataclass
class Cell:
    """What was measured of one mixer at one number of tokens."""

    times: Spread
    ratio: Spread
    peak_mb: float
    # what `roofline` and the count of its MACs say
    limits: dict


def main(argv: list[str] | None = None) -> dict[tuple[str, str, int], Cell]:
    """Measure what the command line asks for; return the cells by mixer, what was run, and tokens.

    Raises:
        UserError: A mixer or a number of tokens is not what it should be.
    """
    args = parse_args(argv)
    names = check_names(args.mixers)
    run, machine = start_run(), describe_machine(args.device)
    print(say_machine(machine))
    cells: dict[tuple[str, str, int], Cell] = {}
    for tokens in sorted(args.tokens):
        for what in WHATS:
            fitting = leave_out(names, what, tokens, cells, args)
            new = measure(fitting, what, tokens, args)
            cells |= new
            # at once, so that an interrupted run keeps what it has
            append_rows(args.results_file, to_rows(new, args), run=run, command=args.command, **machine)
    for what in WHATS:
        print_scaling(cells, names, what)
    for quantity in ('time', 'memory'):
        plot_scaling(f'{args.plots}_{quantity}.png', quantity, to_rows(cells, args), say_machine(machine))
    return cells


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser('vitzoo bench mixers', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('--mixers', nargs='+', default=[], metavar='NAME', help='mixers beside softmax (default: all)')
    add('--tokens', type=positive, nargs='+', default=TOKENS, metavar='N', help='squares, such as 196 1024 4096')
    add('--dim', type=positive, default=384, help='width (default: 384)')
    add('--heads', type=positive, default=6, help='heads (default: 6)')
    add('--batch', type=positive, default=2, help='images (default: 2)')
    add_dtype(parser, default='float32')
    add(
        '--max-seconds', type=float, default=15.0, metavar='S', help='leave out longer calls, not softmax (default: 15)'
    )
    add('--max-memory', type=float, metavar='GB', help='leave out larger calls (default: half of what is free)')
    add('--plots', default='mixers', metavar='PATH', help='beginning of the names of the two plots (default: mixers)')
    args = parse(parser, argv, min_rounds=3)
    check_squares(args.tokens)
    if args.max_memory is None:
        args.max_memory = free_gigabytes(args.device) / 2
    return args


def free_gigabytes(device: torch.device) -> float:
    """Memory of a device that nobody uses."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == 'cuda' else psutil.virtual_memory().available
    return free / 1e9


def check_names(names: list[str]) -> list[str]:
    """The mixers that are asked for, softmax first.

    Raises:
        UserError: There is no such mixer.
    """
    for name in names:
        if name not in list_mixers():
            raise UserError(f"unknown mixer '{name}'{did_you_mean(name, list_mixers())}; `vitzoo list --mixers`")
    return [BASELINE, UNFUSED] + sorted({*(names or list_mixers())} - {BASELINE})


def leave_out(names: list[str], what: str, tokens: int, cells: dict, args: argparse.Namespace) -> list[str]:
    """The mixers that are predicted to fit, and softmax in any case; say which do not."""
    fitting = []
    for name in names:
        known = {n: cell for (other, kind, n), cell in cells.items() if (other, kind) == (name, what)}
        seconds = predict({n: cell.times.median for n, cell in known.items()}, tokens)
        gigabytes = predict({n: cell.peak_mb for n, cell in known.items()}, tokens) / 1e3
        if gigabytes > args.max_memory:
            print(f'left out: {name} {what} at {tokens} tokens, about {gigabytes:.1f} GB')
        elif seconds > args.max_seconds and name != BASELINE:
            print(f'left out: {name} {what} at {tokens} tokens, about {seconds:.0f} seconds a call')
        elif not known and any(kind == what for _, kind, _ in cells):
            print(f'left out: {name} {what} at {tokens} tokens, as at fewer')
        else:
            fitting.append(name)
    return fitting


def predict(known: dict[int, float], tokens: int) -> float:
    """The value at `tokens` of a N + b N^2 through the last two known ones; b N^2 through one, 0 through none."""
    if not known:
        return 0.0
    *_, (m, low), (n, high) = [(0, 0.0), (0, 0.0), *sorted(known.items())][-2:]
    if m == 0:
        return high * (tokens / n) ** 2
    square = max((high / n - low / m) / (n - m), 0.0)
    return (high / n - square * n) * tokens + square * tokens**2


def measure(names: list[str], what: str, tokens: int, args: argparse.Namespace) -> dict[tuple[str, str, int], Cell]:
    """Time the mixers in turn, and count their memory."""
    side = math.isqrt(tokens)
    torch.manual_seed(0)
    inputs = [torch.randn(args.batch, tokens, args.dim, device=args.device) for _ in range(INPUT_SETS)]
    calls, macs, work = {}, {}, {}
    for name in names:
        mixer = create_mixer(name.partition(',')[0], args.dim, args.heads, grid_size=(side, side), device=args.device)
        macs[name] = count_call_macs(mixer, torch.empty(1, tokens, args.dim, device='meta'), (side, side))
        out = torch.empty(inputs[0].shape, dtype=DTYPES[args.dtype], device='meta')
        work[name] = Work.of(what, args.batch * macs[name], [inputs[0], out, *mixer.parameters()])
        call = make_call(mixer, inputs, (side, side), what, DTYPES[args.dtype])
        calls[name] = unfused(call) if name == UNFUSED else call
    rates = measure_rates(DTYPES[args.dtype], args.device)
    with progress(f'{tokens} tokens, {what}') as step:
        # first, because it warms up too
        peaks = {name: peak_megabytes(call, args.device) for name, call in calls.items()}
        times = time_in_turn(calls, args.device, seconds=args.seconds, min_rounds=args.min_rounds, on_round=step)
    cells = {}
    for name in names:
        own, fused = Spread.of(times[name]), Spread.of(times[BASELINE])
        limits = roofline(work[name], rates, own.median, fused.median) | dict(gmacs=macs[name] / 1e9)
        cells[name, what, tokens] = Cell(own, ratios(times[BASELINE], times[name]), peaks[name], limits)
    return cells


def make_call(
    mixer: nn.Module, inputs: list[torch.Tensor], grid_size: tuple[int, int], what: str, dtype: torch.dtype
) -> Callable[[int], object]:
    """A function of the number of the round, which mixes one of the inputs, with gradients for all or without."""
    device = inputs[0].device

    @torch.no_grad()
    def forward(number: int) -> None:
        with autocast(dtype, device):
            mixer(inputs[number % len(inputs)], grid_size)

    def forward_backward(number: int) -> None:
        x = inputs[number % len(inputs)].requires_grad_()
        with autocast(dtype, device):
            out = mixer(x, grid_size)
        out.backward(inputs[(number + 1) % len(inputs)].detach().to(out.dtype))
        x.grad = None
        mixer.zero_grad(set_to_none=True)

    is_forward = what == 'forward'
    mixer.train(not is_forward)
    return forward if is_forward else forward_backward


def unfused(call: Callable[[int], object]) -> Callable[[int], object]:
    """The same call with timm's switch for fused attention off."""

    def call_unfused(number: int) -> None:
        set_fused_attn(False)
        try:
            call(number)
        finally:
            set_fused_attn(True)

    return call_unfused


def to_rows(cells: dict, args: argparse.Namespace) -> list[dict]:
    """The cells as rows of a results file."""
    shape = dict(dim=args.dim, num_heads=args.heads, batch_size=args.batch, dtype=args.dtype, device=args.device.type)
    return [
        row(cell.times, cell.ratio, table='mixers', name=name, what=what, against=BASELINE, tokens=tokens, **shape)
        | dict(peak_mb=cell.peak_mb, **cell.limits)
        for (name, what, tokens), cell in cells.items()
    ]


def print_scaling(cells: dict, names: list[str], what: str) -> None:
    """Print times and ratios by the number of tokens, with exponent, crossover, and the memory at the most tokens."""
    sizes = sorted({tokens for _, _, tokens in cells})
    rows = []
    for name in names:
        known = {n: cells[name, what, n] for n in sizes if (name, what, n) in cells}
        if not known:
            continue
        power = exponent({n: cell.times.median for n, cell in known.items()})
        begin = say_crossover({n: cell.ratio.median for n, cell in known.items()})
        times = [
            f'{milliseconds(known[n].times.median)} ×{known[n].ratio.median:.2f}' if n in known else '–' for n in sizes
        ]
        last = known[max(known)]
        shown = ['–' if power is None else f'{power:.2f}', '' if name == BASELINE else begin, f'{last.peak_mb:,.0f} MB']
        shown += [f'{last.limits["matmul_share"]:.0%}', f'{last.limits["ceiling"]:.1f}', f'{max(known):,}']
        rows.append([name, *times, *shown])
    headings = ['exponent', 'crossover', 'peak memory', 'of matmul', 'ceiling', 'at']
    title = f'{what}; × how many times faster than {BASELINE} (fused)'
    print_table(title, ['mixer', *(f'{n:,}' for n in sizes), *headings], rows)


def exponent(known: dict[int, float], start: int = 1024) -> float | None:
    """The power of the number of tokens with which a time grows, from `start` or the next size to the largest."""
    sizes = [tokens for tokens in sorted(known) if tokens >= start]
    if len(sizes) < 2:
        return None
    first, last = sizes[0], sizes[-1]
    return math.log(known[last] / known[first]) / math.log(last / first)


def crossover(ratio: dict[int, float]) -> float:
    """The number of tokens from which a ratio stays above 1, interpolated; 0 where it always is, infinity if never."""
    sizes = sorted(ratio)
    slower = [i for i, tokens in enumerate(sizes) if ratio[tokens] <= 1]
    if not slower:
        return 0.0
    if slower[-1] == len(sizes) - 1:
        return math.inf
    below, above = sizes[slower[-1]], sizes[slower[-1] + 1]
    share = math.log(ratio[below]) / (math.log(ratio[below]) - math.log(ratio[above]))
    return math.exp(math.log(below) + share * math.log(above / below))


def say_crossover(ratio: dict[int, float]) -> str:
    """The crossover as a table has it."""
    start = crossover(ratio)
    return {0.0: f'≤ {min(ratio):,}', math.inf: f'never up to {max(ratio):,}'}.get(start, f'{start:,.0f}')
