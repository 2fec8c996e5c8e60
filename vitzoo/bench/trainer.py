"""`vitzoo bench trainer`: a training step of `vitzoo train` against a plain loop of timm and PyTorch, in turn.

Both train the same model on the same batches in memory, with timm's loss, AdamW and cosine schedule. The plain loop is
that of timm's documentation. The step of vitzoo also seeds the random number generators, all-reduces the loss and the
stop signal, checks that the loss is finite, and sets the step of the mixers.

Examples:
    vitzoo bench trainer
    vitzoo bench trainer --models vil_tiny --img-size 64 --batch 4
"""

import argparse
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from vitzoo.bench._harness import INPUT_SETS, Spread, ratios, time_in_turn
from vitzoo.bench._options import parse_common
from vitzoo.bench._results import append_rows, make_row, start_run
from vitzoo.bench._show import format_quartiles, format_time, print_table, show_rounds
from vitzoo.bench.models import batch_errors
from vitzoo.errors import CommandParser
from vitzoo.load import create_model, find_models
from vitzoo.machine import describe_machine, format_machine
from vitzoo.options import positive
from vitzoo.train.lock import FolderLock
from vitzoo.train.opening import create_accelerator, set_up
from vitzoo.train.recipe import Recipe, make_recipe
from vitzoo.train.run import Run
from vitzoo.train.step import train_step


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row per model.

    Raises:
        UserError: A model is unknown, or cannot take the image size or the batch.
    """
    args = parse_args(argv)
    run, machine = start_run(), describe_machine(args.device)
    print(format_machine(machine))
    rows = []
    for name in find_models(args.models):
        rows.append(measure_step(name, args))
        append_rows(args.results_file, rows[-1:], run=run, command=args.command, **machine)
    lines = [
        [
            fields['name'],
            format_time(fields['seconds']),
            f'{fields["ratio"]:.3f}',
            format_quartiles(fields['ratio_low'], fields['ratio_high'], digits=3),
            str(fields['rounds']),
        ]
        for fields in rows
    ]
    headings = ['', 'step', '×', 'quartiles', 'rounds']
    print_table('training step of vitzoo; × is the speed relative to a plain loop', headings, lines)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo bench trainer', description=__doc__.partition('\n')[0])
    add, models = parser.add_argument, ['deit_tiny_patch16_224', 'cvt_ls_13']
    add('--models', nargs='+', default=models, metavar='MODEL', help=f'default: {" ".join(models)}')
    add('--img-size', type=positive, default=224, metavar='N', help='image size (default: 224)')
    add('--batch', type=positive, default=8, help='batch size (default: 8)')
    add('--amp', action='store_true', help='train with bfloat16 mixed precision')
    return parse_common(parser, argv, min_rounds=20)


def measure_step(name: str, args: argparse.Namespace) -> dict:
    """Time the steps of both loops in turn on one model."""
    recipe = make_recipe(
        dict(model=name, img_size=args.img_size, batch_size=args.batch, amp=args.amp, workers=0, epochs=1000, lr=1e-4)
    )
    batches = [
        [torch.randn(args.batch, 3, args.img_size, args.img_size), torch.randint(10, (args.batch,))]
        for _ in range(INPUT_SETS)
    ]
    run = make_run(recipe)
    model = create_model(name, num_classes=10, img_size=args.img_size).to(args.device)
    calls = {'plain': plain_step(recipe, model, run.plan.steps_per_epoch, batches), 'vitzoo': vitzoo_step(run, batches)}
    with batch_errors(name, args.batch), show_rounds(name) as on_round:
        times = time_in_turn(calls, args.device, seconds=args.seconds, min_rounds=args.min_rounds, on_round=on_round)
    ratio = ratios(times['plain'], times['vitzoo'])
    # the name of the plain loop in results files
    fields = dict(table='trainer', name=name, what='training step', against='bare loop', img_size=args.img_size)
    dtype = 'bfloat16' if args.amp else 'float32'
    fields |= dict(batch_size=args.batch, dtype=dtype, device=args.device.type)
    return make_row(Spread.of(times['vitzoo']), ratio, **fields)


def make_run(recipe: Recipe) -> Run:
    """The state of `vitzoo train` before its first step."""
    # an earlier model may have set another precision
    AcceleratorState._reset_state(reset_partial_state=True)
    return set_up(recipe, create_accelerator(recipe), FolderLock(Path('runs')))


def vitzoo_step(run: Run, batches: list[list[torch.Tensor]]) -> Callable[[int], object]:
    """The training step of `vitzoo train`."""
    run.task.train()
    micro_batches = (batches[number % len(batches)] for number in count())
    return lambda number: train_step(run, micro_batches)


def plain_step(
    recipe: Recipe, model: nn.Module, steps_per_epoch: int, batches: list[list[torch.Tensor]]
) -> Callable[[int], object]:
    """The training step of timm's documentation, with the same settings."""
    device = next(model.parameters()).device
    optimizer = create_optimizer_v2(model, opt=recipe.opt, lr=recipe.lr, weight_decay=recipe.weight_decay)
    schedule: dict[str, Any] = {
        name: getattr(recipe, name) for name in ('sched', 'warmup_epochs', 'warmup_lr', 'min_lr')
    }
    epochs: dict[str, Any] = dict(num_epochs=recipe.epochs, step_on_epochs=False, updates_per_epoch=steps_per_epoch)
    scheduler, _ = create_scheduler_v2(optimizer, **schedule, **epochs)
    criterion = LabelSmoothingCrossEntropy(recipe.smoothing)
    model.train()
    steps = count()

    def step(number: int) -> None:
        done = next(steps)
        scheduler.step_update(done)
        images, target = (tensor.to(device, non_blocking=True) for tensor in batches[done % len(batches)])
        with torch.autocast(device.type, torch.bfloat16, enabled=bool(recipe.amp)):
            loss = criterion(model(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
