"""`vitzoo bench models`: throughput, latency, training step and memory of any timm models, with their arithmetic.

"of matmul" is the model's rate of arithmetic over the rate of large square matrix products, measured in the same rounds
and precision. A training step is the forward pass, the loss, the backward pass and an AdamW step, and counts as three
forward passes.

Examples:
    vitzoo bench models vil_ls_medium resnet50 efficientnet_b0 --img-size 224 384
    vitzoo bench models deit_softmax_small --against deit_small_patch16_224
    vitzoo bench models 'cvt_*_13' --dtype float32 bfloat16
    vitzoo bench models cvt_ls_13 --what forward --backend eager,compile,onnxruntime,openvino
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from vitzoo.bench._backends import BACKENDS, backends, can_train, check_backends, largest_difference, run_with
from vitzoo.bench._harness import INPUT_SETS, PRECISIONS, Spread, call_peak_megabytes, matmul, ratios, time_in_turn
from vitzoo.bench._options import add_dtype, check_dtypes, parse_common
from vitzoo.bench._results import append_rows, make_row, start_run
from vitzoo.bench._show import format_time, print_table, show_rounds
from vitzoo.errors import CommandParser, UserError
from vitzoo.load import create_model, find_model, find_models, load_model
from vitzoo.machine import describe_machine, format_machine
from vitzoo.metrics.macs import count_macs, input_shape
from vitzoo.options import autocast, positive

# batch size (None for --batch) and the arithmetic relative to a forward pass
MODEL_PASSES = {'forward': (None, 1), 'latency': (1, 1), 'training step': (None, 3)}
_MATMUL = 'matmul'
# model or _MATMUL, precision, and backend or ''
_Key = tuple[str, str, str]
# calls before the first round: the default, and if backends are compared, some of which optimize while they run
_WARM_UP, _WARM_UP_BACKENDS = 2, 30


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row per model, image size, precision and pass.

    Raises:
        UserError: A model is unknown, cannot take an image size or cannot be trained on the batch.
    """
    args = parse_args(argv)
    names = find_models(args.models)
    if args.against is not None:
        args.against = find_model(args.against)
    run, machine = start_run(), describe_machine(args.device)
    print(format_machine(machine))
    rows = []
    for size in args.img_size or [None]:
        for name in names:
            new = measure_model(name, own_size(name) if size is None else size, args)
            append_rows(args.results_file, new, run=run, command=args.command, **machine)
            rows += new
    print_models(rows, args)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo bench models', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('models', nargs='+', metavar='MODEL', help='timm name, or a quoted wildcard')
    add('--img-size', type=positive, nargs='+', metavar='N', help="image sizes (default: the model's own)")
    add('--batch', type=positive, default=8, help='batch size (default: 8)')
    add('--what', dest='passes', choices=MODEL_PASSES, nargs='+', default=list(MODEL_PASSES), help='default: all')
    add('--against', metavar='MODEL', help='baseline, timed in turn with each model')
    known = ','.join(BACKENDS)
    add('--backend', type=backends, default=['eager'], metavar='NAMES', help=f'of {known}, in turn (default: eager)')
    add_dtype(parser, nargs='+', default=['float32'])
    args = parse_common(parser, argv)
    check_dtypes(args.dtype, args.device)
    check_backends(args)
    return args


def measure_model(name: str, img_size: int, args: argparse.Namespace) -> list[dict]:
    """Time a model at one size in every precision and backend, in turn with matrix products and the baseline."""
    models = {name: random_model(name, img_size, args.device)}
    if args.against not in (None, name):
        models[args.against] = random_model(args.against, img_size, args.device)
    gmacs = {key: count_macs(model, img_size) / 1e9 for key, model in models.items()}
    images = random_images(2, img_size, args.device)[0]
    runs = {
        (model_name, backend): run_with(backend, model, images)
        for model_name, model in models.items()
        for backend in args.backend
    }
    rows = []
    for measured_pass in args.passes:
        rows += _measure_pass(measured_pass, models, runs, gmacs, img_size, args)
    return rows


def _measure_pass(
    measured_pass: str,
    models: dict[str, nn.Module],
    runs: dict[tuple[str, str], Any],
    gmacs: dict[str, float],
    img_size: int,
    args: argparse.Namespace,
) -> list[dict]:
    """Time one pass of the models with every backend that can do it."""
    skipped = [key for key in args.backend if measured_pass == 'training step' and not can_train(key)]
    if skipped:
        print(f'skipped: {next(iter(models))} {measured_pass} with {", ".join(skipped)}, which cannot train')
    timed = [key for key in args.backend if key not in skipped]
    if not timed:
        return []
    batch_size, forward_passes = MODEL_PASSES[measured_pass]
    batch_size = batch_size or args.batch
    # the graphs of other passes count towards the limit of graphs per model
    torch.compiler.reset()
    calls: dict[_Key, Callable[[int], object]] = {}
    work: dict[_Key, float] = {}
    differences: dict[_Key, float] = {}
    for dtype in args.dtype:
        key = (_MATMUL, dtype, '')
        calls[key], work[key] = matmul(PRECISIONS[dtype], args.device)
        for model_name, backend in product(models, timed):
            key, model, run = (model_name, dtype, backend), models[model_name], runs[model_name, backend]
            batches = random_images(batch_size, img_size, args.device)
            calls[key] = model_call(model, measured_pass, batches, dtype, run)
            work[key] = 2e9 * gmacs[model_name] * batch_size * forward_passes
            if backend != 'eager' and measured_pass != 'training step':
                differences[key] = largest_difference(run, model, batches[0], dtype)
    title = f'{next(iter(models))}, {img_size} px, {measured_pass}'
    with batch_errors(' or '.join(models), batch_size) if measured_pass == 'training step' else nullcontext():
        times, peaks = _time_and_peaks(title, calls, models, args)
    about = dict(what=measured_pass, img_size=img_size, batch_size=batch_size, device=args.device.type)
    return [
        _make_backend_row(key, _baseline(key, models, timed, args), times, work, args)
        | dict(gmacs=gmacs[key[0]], peak_mb=peaks.get(key), difference=differences.get(key), **about)
        for key in times
        if key[0] != _MATMUL
    ]


def _time_and_peaks(
    title: str, calls: dict[_Key, Callable[[int], object]], models: dict[str, nn.Module], args: argparse.Namespace
) -> tuple[dict[_Key, list[float]], dict[_Key, float]]:
    """The times of the calls, run in turn, and the peak memory of those of PyTorch, as that of others is not known."""
    with show_rounds(title) as on_round:
        peaks = {
            key: call_peak_megabytes(call, args.device) + weights_megabytes(models[key[0]])
            for key, call in calls.items()
            if key[0] != _MATMUL and can_train(key[2])
        }
        times = time_in_turn(
            calls,
            args.device,
            seconds=args.seconds,
            min_rounds=args.min_rounds,
            warm_up=_WARM_UP if args.backend == ['eager'] else _WARM_UP_BACKENDS,
            on_round=on_round,
        )
    return times, peaks


def _baseline(key: _Key, models: dict[str, nn.Module], timed: list[str], args: argparse.Namespace) -> _Key:
    """The call that another is compared with: --against in its precision, or the model in the first precision."""
    name, dtype = (args.against, key[1]) if args.against else (next(iter(models)), args.dtype[0])
    return name, dtype, timed[0]


def _make_backend_row(
    key: _Key, baseline: _Key, times: dict[_Key, list[float]], work: dict[_Key, float], args: argparse.Namespace
) -> dict:
    """The speed of one call against the baseline and against a matrix product of the same precision."""
    name, dtype, backend = key
    rate, product_rate = (
        Spread.of(work[call] / seconds for seconds in times[call]).median for call in (key, (_MATMUL, dtype, ''))
    )
    is_eager = args.backend == ['eager']
    return (
        make_row(Spread.of(times[key]), ratios(times[baseline], times[key]), name=name)
        | dict(table='models' if is_eager else 'backends', against=' '.join(baseline[:2] if is_eager else baseline))
        | dict(dtype=dtype, backend=backend, matmul_share=rate / product_rate, matmul_gflops=product_rate / 1e9)
        | dict(ceiling=Spread.of(times[baseline]).median * product_rate / work[key])
    )


def own_size(name: str) -> int:
    """The side of the images that a model is for.

    Raises:
        UserError: They are not square.
    """
    with torch.device('meta'):
        _, height, width = input_shape(create_model(name))
    if height != width:
        raise UserError(f'{name} is for images of {height} x {width}, which are not square; give --img-size')
    return height


def random_model(name: str, img_size: int, device: torch.device) -> nn.Module:
    """A model with random weights for images of this size, checked by a forward pass."""
    model = load_model(name, img_size=(img_size, img_size), pretrained=False).model
    in_chans = input_shape(model)[0]
    if in_chans != 3:
        raise UserError(f'{name} takes images of {in_chans} channels; only models of RGB images are compared')
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, img_size, img_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(f'{name} cannot take images of {img_size} x {img_size}: {error}') from error
    return model.to(device)


@contextmanager
def batch_errors(name: str, batch_size: int) -> Iterator[None]:
    """Report a batch that a model cannot be trained on as a UserError; BatchNorm needs several values per channel."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f'{name} cannot be trained on --batch {batch_size}, choose a larger one: {error}') from error


def random_images(batch_size: int, img_size: int, device: torch.device) -> list[torch.Tensor]:
    """Several batches of random images."""
    return [torch.randn(batch_size, 3, img_size, img_size, device=device) for _ in range(INPUT_SETS)]


def model_call(
    model: nn.Module,
    measured_pass: str,
    batches: list[torch.Tensor],
    dtype: str,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Callable[[int], object]:
    """A function of the round number that runs a pass of the model on one of the batches, by `run` if given."""
    # the truth value of a compiled model is its length, which it does not have
    run = model if run is None else run
    device = batches[0].device

    @torch.no_grad()
    def forward(number: int) -> None:
        model.eval()
        with autocast(device, dtype):
            run(batches[number % len(batches)])

    if measured_pass != 'training step':
        return forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def training_step(number: int) -> None:
        model.train()
        compute_gradients(run, batches[number % len(batches)], dtype)
        optimizer.step()
        optimizer.zero_grad()

    return training_step


def compute_gradients(run: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor, dtype: str) -> None:
    """The forward pass, the loss for arbitrary labels, and the backward pass."""
    with autocast(images.device, dtype):
        logits = run(images)
    F.cross_entropy(logits.float(), torch.arange(len(images), device=images.device) % logits.shape[1]).backward()


def weights_megabytes(model: nn.Module) -> float:
    """Memory of parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) / 1e6


def print_models(rows: list[dict], args: argparse.Namespace) -> None:
    """Print a table per pass."""
    headings = ['model', 'size', 'precision', 'images/s', 'batch', 'quartiles', 'GMACs', 'of matmul', 'MB']
    headings += ['× faster than', 'backend', 'largest difference of logits']
    for measured_pass in args.passes:
        lines = [
            [
                fields['name'],
                str(fields['img_size']),
                fields['dtype'],
                f'{fields["batch_size"] / fields["seconds"]:,.1f}',
                format_time(fields['seconds']),
                f'{format_time(fields["seconds_low"])} … {format_time(fields["seconds_high"])}',
                f'{fields["gmacs"]:.2f}',
                f'{fields["matmul_share"]:.0%}',
                _format_known(fields['peak_mb'], ',.0f'),
                f'{fields["ratio"]:.2f} {fields["against"]}',
                fields['backend'],
                _format_known(fields['difference'], '.1e'),
            ]
            for fields in rows
            if fields['what'] == measured_pass
        ]
        # the last two columns compare backends
        shown = slice(None) if args.backend != ['eager'] else slice(-2)
        title = f'{measured_pass}, batch size {MODEL_PASSES[measured_pass][0] or args.batch}'
        print_table(title, headings[shown], [line[shown] for line in lines])


def _format_known(value: float | None, form: str) -> str:
    """A number, or a dash if it was not measured."""
    return '–' if value is None else format(value, form)
