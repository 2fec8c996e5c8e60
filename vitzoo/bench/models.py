"""`vitzoo bench models`: throughput, latency, training step and memory of any timm models, beside their arithmetic.

The share is that of the rate at which this machine multiplies large square matrices, measured in the same rounds and
precision: what a model made of nothing but matrix products could reach. A training step is counted as three forward
passes. It is forward, loss, backward and an AdamW step.

Examples:
    vitzoo bench models vil_ls_medium resnet50 efficientnet_b0 --img-size 224 384
    vitzoo bench models deit_softmax_small --against deit_small_patch16_224
    vitzoo bench models 'cvt_*_13' --dtype float32 bfloat16
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from vitzoo.bench._harness import (
    DTYPES,
    INPUT_SETS,
    Spread,
    append_rows,
    autocast,
    describe_machine,
    matmul,
    peak_megabytes,
    ratios,
    row,
    say_machine,
    start_run,
    time_in_turn,
)
from vitzoo.bench._options import add_dtype, parse
from vitzoo.bench._show import milliseconds, print_table, progress
from vitzoo.errors import UserError
from vitzoo.load import find_models, load_model
from vitzoo.metrics import count_macs
from vitzoo.options import positive

# what is run, with how many images of a batch (None for all), and how many forward passes it is worth
WHATS = {'forward': (None, 1), 'latency': (1, 1), 'training step': (None, 3)}
MATMUL = 'matmul'


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row for each model, size, precision and thing that is run.

    Raises:
        UserError: A model or a size is not what it should be.
    """
    args = parse_args(argv)
    names = find_models(args.models)
    run, machine = start_run(), describe_machine(args.device)
    print(say_machine(machine))
    rows = []
    for img_size in args.img_size:
        for name in names:
            new = measure(name, img_size, args)
            append_rows(args.results_file, new, run=run, command=args.command, **machine)
            rows += new
    print_rows(rows, args)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser('vitzoo bench models', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('models', nargs='+', metavar='MODEL', help='a timm name, or a wildcard in quotes')
    add('--img-size', type=positive, nargs='+', default=[224], metavar='N', help='sides of the images (default: 224)')
    add('--batch', type=positive, default=8, help='images of a batch (default: 8)')
    add('--what', choices=WHATS, nargs='+', default=list(WHATS), help='what is run (default: all)')
    add('--against', metavar='MODEL', help='a model to be timed in turn with each of the others')
    add_dtype(parser, nargs='+', default=['float32'])
    return parse(parser, argv)


def measure(name: str, img_size: int, args: argparse.Namespace) -> list[dict]:
    """One model at one size, in every precision in turn, with matrix products and with what it is compared to."""
    models = {name: load(name, img_size, args.device)}
    if args.against not in (None, name):
        models[args.against] = load(args.against, img_size, args.device)
    gmacs = {key: count_macs(model, img_size) / 1e9 for key, model in models.items()}
    rows = []
    for what in args.what:
        batch_size, passes = WHATS[what]
        batch_size = batch_size or args.batch
        calls, work = {}, {}
        for dtype in args.dtype:
            calls[MATMUL, dtype], work[MATMUL, dtype] = matmul(DTYPES[dtype], args.device)
            for key, model in models.items():
                calls[key, dtype] = make_call(model, what, images(batch_size, img_size, args.device), DTYPES[dtype])
                work[key, dtype] = 2e9 * gmacs[key] * batch_size * passes
        with progress(f'{name}, {img_size} px, {what}') as step:
            peaks = {key: peak_megabytes(call, args.device) for key, call in calls.items() if key[0] != MATMUL}
            times = time_in_turn(calls, args.device, seconds=args.seconds, min_rounds=args.min_rounds, on_round=step)
        rate = {key: Spread.of(work[key] / t for t in times[key]).median for key in times}
        for key in peaks:
            products = work[key] / rate[MATMUL, key[1]]
            baseline = (args.against or name, key[1] if args.against else args.dtype[0])
            rows.append(
                row(Spread.of(times[key]), ratios(times[baseline], times[key]), table='models', name=key[0], what=what)
                | dict(against=' '.join(baseline), img_size=img_size, batch_size=batch_size, dtype=key[1])
                | dict(device=args.device.type, peak_mb=peaks[key] + weights_megabytes(models[key[0]]))
                | dict(gmacs=gmacs[key[0]], matmul_share=rate[key] / rate[MATMUL, key[1]])
                | dict(matmul_gflops=rate[MATMUL, key[1]] / 1e9, ceiling=Spread.of(times[baseline]).median / products)
            )
    return rows


def load(name: str, img_size: int, device: torch.device) -> nn.Module:
    """A model with random weights, for images of this size."""
    model, _ = load_model(name, img_size=(img_size, img_size), pretrained=False)
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, img_size, img_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(f'{name} cannot take images of {img_size} x {img_size}: {error}') from error
    return model.to(device)


def images(batch_size: int, img_size: int, device: torch.device) -> list[torch.Tensor]:
    """Several batches of random images."""
    return [torch.randn(batch_size, 3, img_size, img_size, device=device) for _ in range(INPUT_SETS)]


def make_call(model: nn.Module, what: str, batches: list[torch.Tensor], dtype: torch.dtype) -> Callable[[int], object]:
    """A function of the number of the round, which runs the model on one of the batches."""
    device = batches[0].device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6) if what == 'training step' else None

    @torch.no_grad()
    def forward(number: int) -> None:
        model.eval()
        with autocast(dtype, device):
            model(batches[number % len(batches)])

    def training_step(number: int) -> None:
        model.train()
        batch = batches[number % len(batches)]
        with autocast(dtype, device):
            logits = model(batch)
        F.cross_entropy(logits.float(), torch.arange(len(batch), device=device) % logits.shape[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return forward if optimizer is None else training_step


def weights_megabytes(model: nn.Module) -> float:
    """Memory of parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) / 1e6


def print_rows(rows: list[dict], args: argparse.Namespace) -> None:
    """Print a table of each thing that was run."""
    for what in args.what:
        lines = [
            [
                fields['name'],
                str(fields['img_size']),
                fields['dtype'],
                f'{fields["batch_size"] / fields["seconds"]:,.1f}',
                milliseconds(fields['seconds']),
                f'{milliseconds(fields["seconds_low"])} … {milliseconds(fields["seconds_high"])}',
                f'{fields["gmacs"]:.2f}',
                f'{fields["matmul_share"]:.0%}',
                f'{fields["peak_mb"]:,.0f}',
                f'{fields["ratio"]:.2f} {fields["against"]}',
            ]
            for fields in rows
            if fields['what'] == what
        ]
        headings = [
            'model',
            'size',
            'precision',
            'images/s',
            'batch',
            'quartiles',
            'GMACs',
            'of matmul',
            'MB',
            '× faster than',
        ]
        print_table(f'{what}, batches of {WHATS[what][0] or args.batch}', headings, lines)
