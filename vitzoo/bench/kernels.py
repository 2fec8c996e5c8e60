"""`vitzoo bench kernels`: Triton kernels on a GPU against other implementations of the same op, by number of tokens.

The others are the op in PyTorch, the same under torch.compile, flex_attention if it can express the op, and
scaled_dot_product_attention, which computes something else: it shows the cost of full attention. All take turns. A
contender gets a ratio only if its output and gradients agree with the PyTorch form in float32.

Bytes are those of inputs, outputs and their gradients, each counted once; FLOPs are those of the op's formula. The
shares are relative to the rates of large copies and large matrix products, measured in the same rounds.

Examples:
    vitzoo bench kernels
    vitzoo bench kernels --kernels aft_conv --tokens 196 4096 --against pytorch sdpa --dtype float32
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vitzoo.bench._contenders import KERNEL_TASKS, Case, KernelTask
from vitzoo.bench._harness import (
    INPUT_SETS,
    LAYER_PASSES,
    PRECISIONS,
    Spread,
    call_peak_megabytes,
    copying,
    matmul,
    ratios,
    time_in_turn,
    with_fused_attn,
)
from vitzoo.bench._options import DEFAULT_TOKENS, add_layer_shape, check_heads, check_squares, parse_common
from vitzoo.bench._results import append_rows, make_row, start_run
from vitzoo.bench._show import format_quartiles, format_time, print_table, show_rounds
from vitzoo.errors import CommandParser, UserError
from vitzoo.machine import describe_machine, format_machine

_KERNEL, _PYTORCH, _SDPA = 'kernel', 'pytorch', 'sdpa'
_CONTENDERS = (_PYTORCH, 'compile', 'flex', _SDPA)
# relative difference in norm from the PyTorch form in float32, for the output and every gradient
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row per contender, number of tokens and pass.

    Raises:
        UserError: The device is not a CUDA device, a number of tokens is not a square, or the heads do not divide the
            width.
    """
    args = parse_args(argv)
    if args.device.type != 'cuda':
        raise UserError(
            f"the kernels need a CUDA device, and the device is '{args.device.type}'; use a machine with a GPU"
        )
    run, machine = start_run(), describe_machine(args.device)
    print(format_machine(machine))
    rows = []
    for task in KERNEL_TASKS:
        if task.name not in args.kernels:
            continue
        for tokens in sorted(args.tokens):
            new = measure_kernel(task, tokens, args)
            append_rows(args.results_file, new, run=run, command=args.command, **machine)
            rows += new
    print_kernels(rows)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo bench kernels', description=__doc__.partition('\n')[0])
    add, names = parser.add_argument, [task.name for task in KERNEL_TASKS]
    add('--kernels', nargs='+', choices=names, default=names, help='kernels (default: all)')
    add('--against', nargs='+', choices=_CONTENDERS, default=_CONTENDERS, help='contenders (default: all)')
    add_layer_shape(parser, DEFAULT_TOKENS, batch_size=8)
    add('--dtype', choices=PRECISIONS, default='bfloat16', help='dtype of the inputs (default: bfloat16)')
    args = parse_common(parser, argv)
    check_squares(args.tokens)
    check_heads(args)
    return args


def measure_kernel(task: KernelTask, tokens: int, args: argparse.Namespace) -> list[dict]:
    """Check the contenders at one number of tokens, and time those that are correct."""
    torch.manual_seed(0)
    # the graphs of other sizes count towards the limit of graphs per function
    torch.compiler.reset()
    cases = [task.make(tokens, args.batch, args.heads, args.dim // args.heads) for _ in range(INPUT_SETS)]
    cases = [case.to(args.device, PRECISIONS[args.dtype]) for case in cases]
    expected = run_op(without_kernel(task.op), cases[0].to(args.device, torch.float32))
    contenders = {}
    for name, op in find_contenders(task, args.against).items():
        try:
            failure = '' if name == _SDPA else disagreement(op, cases[0], expected)
        except torch.OutOfMemoryError:
            failure = 'the memory is too small'
        if failure:
            print(f'refused: {task.name}, {name}, {tokens} tokens: {failure}')
        else:
            contenders[name] = op
    if _KERNEL not in contenders:
        return []
    return [
        fields
        for measured_pass in LAYER_PASSES
        for fields in measure_pass(task, measured_pass, contenders, cases, tokens, args)
    ]


def find_contenders(task: KernelTask, against: tuple[str, ...]) -> dict[str, Callable[..., torch.Tensor]]:
    """The implementations to compare, by name."""
    found = {_KERNEL: with_kernel(task.op), _PYTORCH: without_kernel(task.op)}
    found['compile'] = without_kernel(torch.compile(task.op, dynamic=False))
    found[_SDPA] = full_attention
    if task.flex is not None:
        found['flex'] = task.flex
    return {name: op for name, op in found.items() if name == _KERNEL or name in against}


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
    """Softmax attention; keys of one channel, which no fused kernel takes, are replaced by the values."""
    return F.scaled_dot_product_attention(q, k if k.shape == q.shape else v, v)


def with_kernel(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The op with timm's switch for experimental fused attention on, so with its kernel for all inputs."""
    return with_fused_attn(op, experimental=True)


def without_kernel(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The op with timm's switch for fused attention off; no op with a kernel has other uses of it."""
    return with_fused_attn(op, enable=False)


def run_op(op: Callable[..., torch.Tensor], case: Case) -> list[torch.Tensor]:
    """The output of an op and the gradients of its inputs, in float32."""
    case = case.with_gradients()
    out = op(*case.args())
    grads = torch.autograd.grad(out, case.inputs, case.grad.to(out.dtype))
    return [x.detach().float() for x in (out, *grads)]


def disagreement(op: Callable[..., torch.Tensor], case: Case, expected: list[torch.Tensor]) -> str:
    """A sentence on the first tensor that is wrong, or '' if all are right."""
    tolerance = _TOLERANCES[case.inputs[0].dtype]
    for number, (ours, right) in enumerate(zip(run_op(op, case), expected, strict=True)):
        error = ((ours - right).norm() / right.norm()).item()
        if not error < tolerance:
            tensor = f'gradient {number}' if number else 'the output'
            return f'{tensor} differs from the PyTorch form in float32 by {error:.1e}, more than {tolerance:.0e}'
    return ''


def measure_pass(
    task: KernelTask, measured_pass: str, contenders: dict, cases: list[Case], tokens: int, args: argparse.Namespace
) -> list[dict]:
    """Time the contenders, a large product and a large copy in turn."""
    calls = {name: kernel_call(op, cases, measured_pass) for name, op in contenders.items()}
    multiply, matmul_flops = matmul(PRECISIONS[args.dtype], args.device)
    move, copy_bytes = copying(args.device)
    with show_rounds(f'{task.name}, {tokens} tokens, {measured_pass}') as on_round:
        peaks = {}
        for name in [*calls]:
            try:
                peaks[name] = call_peak_megabytes(calls[name], args.device)
            except torch.OutOfMemoryError:
                print(f'skipped: {task.name}, {name}, {tokens} tokens, {measured_pass}: the memory is too small')
                del calls[name]
        if _KERNEL not in calls:
            return []
        times = time_in_turn(
            calls | dict(matmul=multiply, copying=move),
            args.device, seconds=args.seconds, min_rounds=args.min_rounds, on_round=on_round,
        )  # fmt: skip
    flops, moved = count_flops(calls[_KERNEL]), cases[0].bytes(backward=measured_pass != 'forward')
    rates = dict(
        matmul_gflops=matmul_flops / Spread.of(times['matmul']).median / 1e9,
        copy_gbs=copy_bytes / Spread.of(times['copying']).median / 1e9,
    )
    rows = []
    for name in calls:
        share = flops / matmul_flops * ratios(times['matmul'], times[name]).median
        # full attention does other work
        work = {} if name == _SDPA else dict(gmacs=flops / 2e9, io_mb=moved / 1e6, matmul_share=share)
        rows.append(
            make_row(Spread.of(times[name]), ratios(times[name], times[_KERNEL]), table='kernels', name=task.name)
            | dict(
                what=measured_pass,
                against=name,
                tokens=tokens,
                dim=args.dim,
                num_heads=args.heads,
                batch_size=args.batch,
            )
            | dict(dtype=args.dtype, device=args.device.type, peak_mb=peaks[name], **work, **rates)
        )
    return rows


def kernel_call(op: Callable[..., torch.Tensor], cases: list[Case], measured_pass: str) -> Callable[[int], object]:
    """A function of the round number that runs a pass of the op on one of the cases."""
    cases = [case.with_gradients() for case in cases]

    @torch.no_grad()
    def forward(number: int) -> None:
        op(*cases[number % len(cases)].args())

    def forward_backward(number: int) -> None:
        case = cases[number % len(cases)]
        torch.autograd.grad(op(*case.args()), case.inputs, case.grad, allow_unused=True)

    return forward if measured_pass == 'forward' else forward_backward


def count_flops(call: Callable[[int], object]) -> int:
    """Floating-point operations of a call, by the formulas registered for its ops."""
    with FlopCounterMode(display=False) as counter:
        call(0)
    return counter.get_total_flops()


def print_kernels(rows: list[dict]) -> None:
    """Print a table per kernel."""
    headings = ['tokens', '', '', 'time', '× kernel', 'quartiles', 'GFLOP', 'of matmul', 'MB moved', 'of copy', 'peak']
    for name in dict.fromkeys(fields['name'] for fields in rows):
        lines = [
            [
                f'{fields["tokens"]:,}',
                fields['what'],
                fields['against'],
                format_time(fields['seconds']),
                f'{fields["ratio"]:.2f}',
                format_quartiles(fields['ratio_low'], fields['ratio_high']),
                *_format_work(fields),
                f'{fields["peak_mb"]:,.0f} MB',
            ]
            for fields in rows
            if fields['name'] == name
        ]
        print_table(f'{name}; × is the speedup of the kernel', headings, lines)


def _format_work(fields: dict) -> list[str]:
    """FLOPs and bytes with their shares of the machine's rates, or dashes if the contender does other work."""
    if 'gmacs' not in fields:
        return ['–'] * 4
    return [
        f'{2 * fields["gmacs"]:,.2f}',
        f'{fields["matmul_share"]:.0%}',
        f'{fields["io_mb"]:,.0f}',
        f'{fields["io_mb"] / 1e3 / fields["seconds"] / fields["copy_gbs"]:.0%}',
    ]
