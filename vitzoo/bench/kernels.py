"""`vitzoo bench kernels`: every Triton kernel on a GPU against other ways to compute the same, by number of tokens.

The others are the op's form in PyTorch, what torch.compile makes of it, flex_attention where it can express it, and, as
a measure of what full attention costs, scaled_dot_product_attention, which computes something else. All run in turn. A
contender gets a ratio only if its output and gradients are those of the PyTorch form in float32.

Bytes are those of inputs and outputs, each once, and of their gradients; FLOPs those of the op's formula. The shares
are of the rates at which the GPU copies memory and multiplies large matrices, measured in the same rounds.

Examples:
    vitzoo bench kernels
    vitzoo bench kernels --kernels aft_conv --tokens 196 4096 --against pytorch sdpa --dtype float32
"""

import argparse
from collections.abc import Callable

import torch
from timm.layers import set_fused_attn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vitzoo.bench._contenders import KERNELS, Case, KernelTask
from vitzoo.bench._harness import (
    DTYPES,
    INPUT_SETS,
    Spread,
    append_rows,
    copying,
    describe_machine,
    matmul,
    peak_megabytes,
    ratios,
    row,
    say_machine,
    start_run,
    time_in_turn,
)
from vitzoo.bench._options import check_squares, parse
from vitzoo.bench._show import milliseconds, print_table, progress
from vitzoo.errors import UserError
from vitzoo.options import positive

TOKENS = (196, 784, 1024, 3136, 4096, 9216, 16384)
WHATS = ('forward', 'forward + backward')
OURS, PYTORCH, SDPA = 'kernel', 'pytorch', 'sdpa'
CONTENDERS = (PYTORCH, 'compile', 'flex', SDPA)
# norm of the difference over norm, from the PyTorch form in float32, of the output and of every gradient
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row for each contender, number of tokens and thing that is run.

    Raises:
        UserError: There is no CUDA device, or a number of tokens is not what it should be.
    """
    args = parse_args(argv)
    if args.device.type != 'cuda':
        raise UserError(f"the kernels are for CUDA devices and this is '{args.device.type}'; run it where there is one")
    run, machine = start_run(), describe_machine(args.device)
    print(say_machine(machine))
    rows = []
    for task in KERNELS:
        if task.name not in args.kernels:
            continue
        for tokens in sorted(args.tokens):
            new = measure(task, tokens, args)
            append_rows(args.results_file, new, run=run, command=args.command, **machine)
            rows += new
    print_rows(rows)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser('vitzoo bench kernels', description=__doc__.partition('\n')[0])
    add, names = parser.add_argument, [task.name for task in KERNELS]
    add('--kernels', nargs='+', choices=names, default=names, help='some of the kernels (default: all)')
    add('--tokens', type=positive, nargs='+', default=TOKENS, metavar='N', help='squares, such as 196 1024 4096')
    add('--against', nargs='+', choices=CONTENDERS, default=CONTENDERS, help='what they are measured against')
    add('--dim', type=positive, default=384, help='width (default: 384)')
    add('--heads', type=positive, default=6, help='heads (default: 6)')
    add('--batch', type=positive, default=8, help='images (default: 8)')
    add('--dtype', choices=DTYPES, default='bfloat16', help='precision of inputs (default: bfloat16)')
    args = parse(parser, argv)
    check_squares(args.tokens)
    return args


def measure(task: KernelTask, tokens: int, args: argparse.Namespace) -> list[dict]:
    """Check the contenders at one number of tokens, and time those that agree."""
    torch.manual_seed(0)
    cases = [task.make(tokens, args.batch, args.heads, args.dim // args.heads) for _ in range(INPUT_SETS)]
    cases = [case.to(args.device, DTYPES[args.dtype]) for case in cases]
    expected = outputs(task.op, cases[0].to(args.device, torch.float32))
    contenders = {}
    for name, op in find_contenders(task, args.against).items():
        failure = '' if name == SDPA else disagreement(op, cases[0], expected)
        if failure:
            print(f'refused: {task.name}, {name}, {tokens} tokens: {failure}')
        else:
            contenders[name] = op
    if OURS not in contenders:
        return []
    return [fields for what in WHATS for fields in measure_pass(task, what, contenders, cases, tokens, args)]


def find_contenders(task: KernelTask, against: tuple[str, ...]) -> dict[str, Callable[..., torch.Tensor]]:
    """All ways to compute a task, by name."""
    found = {OURS: with_kernel(task.op), PYTORCH: task.op, 'compile': torch.compile(task.op, dynamic=False)}
    found[SDPA] = lambda q, k, v, *args: F.scaled_dot_product_attention(q, k.expand_as(q), v)
    if task.flex is not None:
        found['flex'] = task.flex
    return {name: op for name, op in found.items() if name == OURS or name in against}


def with_kernel(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The op with timm's switch for what is experimental on."""

    def call(*args) -> torch.Tensor:
        set_fused_attn(True, experimental=True)
        try:
            return op(*args)
        finally:
            set_fused_attn(True)

    return call


def outputs(op: Callable[..., torch.Tensor], case: Case) -> list[torch.Tensor]:
    """The output of an op, and the gradients of its inputs, in float32."""
    case = case.with_gradients()
    out = op(*case.args())
    grads = torch.autograd.grad(out, case.inputs, case.grad.to(out.dtype))
    return [x.detach().float() for x in (out, *grads)]


def disagreement(op: Callable[..., torch.Tensor], case: Case, expected: list[torch.Tensor]) -> str:
    """What is wrong with a contender, '' where nothing is."""
    tolerance = TOLERANCES[case.inputs[0].dtype]
    for number, (ours, right) in enumerate(zip(outputs(op, case), expected, strict=True)):
        error = ((ours - right).norm() / right.norm()).item()
        if not error < tolerance:
            what = f'gradient {number}' if number else 'the output'
            return f'{what} differs from the PyTorch form in float32 by {error:.1e}, more than {tolerance:.0e}'
    return ''


def measure_pass(
    task: KernelTask, what: str, contenders: dict, cases: list[Case], tokens: int, args: argparse.Namespace
) -> list[dict]:
    """Time the contenders and the ceilings in turn."""
    calls = {name: make_call(op, cases, what) for name, op in contenders.items()}
    multiply, matmul_flops = matmul(DTYPES[args.dtype], args.device)
    move, copy_bytes = copying(args.device)
    with progress(f'{task.name}, {tokens} tokens, {what}') as step:
        peaks = {name: peak_megabytes(call, args.device) for name, call in calls.items()}
        times = time_in_turn(
            calls | dict(matmul=multiply, copying=move),
            args.device, seconds=args.seconds, min_rounds=args.min_rounds, on_round=step,
        )  # fmt: skip
    flops, moved = count_flops(calls[OURS]), cases[0].bytes(what == WHATS[1])
    rates = dict(
        matmul_gflops=matmul_flops / Spread.of(times['matmul']).median / 1e9,
        copy_gbs=copy_bytes / Spread.of(times['copying']).median / 1e9,
    )
    rows = []
    for name in calls:
        # full attention does more, and something else
        share = flops / matmul_flops * ratios(times['matmul'], times[name]).median
        work = dict(gmacs=flops / 2e9, io_mb=moved / 1e6, matmul_share=share) if name != SDPA else {}
        rows.append(
            row(Spread.of(times[name]), ratios(times[name], times[OURS]), table='kernels', name=task.name, what=what)
            | dict(against=name, tokens=tokens, dim=args.dim, num_heads=args.heads, batch_size=args.batch)
            | dict(dtype=args.dtype, device=args.device.type, peak_mb=peaks[name], **work, **rates)
        )
    return rows


def make_call(op: Callable[..., torch.Tensor], cases: list[Case], what: str) -> Callable[[int], object]:
    """A function of the number of the round, which runs the op on one of the cases."""
    cases = [case.with_gradients() for case in cases]

    @torch.no_grad()
    def forward(number: int) -> None:
        op(*cases[number % len(cases)].args())

    def forward_backward(number: int) -> None:
        case = cases[number % len(cases)]
        torch.autograd.grad(op(*case.args()), case.inputs, case.grad, allow_unused=True)

    return forward if what == WHATS[0] else forward_backward


def count_flops(call: Callable[[int], object]) -> int:
    """Floating-point operations of a call, by the formulas that ops are registered with."""
    with FlopCounterMode(display=False) as counter:
        call(0)
    return counter.get_total_flops()


def print_rows(rows: list[dict]) -> None:
    """Print a table for each kernel."""
    headings = ['tokens', '', '', 'time', '× kernel', 'quartiles', 'GFLOP', 'of matmul', 'MB moved', 'of copy', 'peak']
    for name in dict.fromkeys(fields['name'] for fields in rows):
        lines = [
            [
                f'{fields["tokens"]:,}',
                fields['what'],
                fields['against'],
                milliseconds(fields['seconds']),
                f'{fields["ratio"]:.2f}',
                f'{fields["ratio_low"]:.2f} … {fields["ratio_high"]:.2f}',
                *say_work(fields),
                f'{fields["peak_mb"]:,.0f} MB',
            ]
            for fields in rows
            if fields['name'] == name
        ]
        print_table(f'{name}; × how many times faster the kernel is', headings, lines)


def say_work(fields: dict) -> list[str]:
    """FLOPs and bytes, and the shares of the ceilings; nothing where something else is computed."""
    if 'gmacs' not in fields:
        return ['–'] * 4
    return [
        f'{2 * fields["gmacs"]:,.2f}',
        f'{fields["matmul_share"]:.0%}',
        f'{fields["io_mb"]:,.0f}',
        f'{fields["io_mb"] / 1e3 / fields["seconds"] / fields["copy_gbs"]:.0%}',
    ]
