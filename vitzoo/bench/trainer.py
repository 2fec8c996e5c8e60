"""`vitzoo bench trainer`: an optimizer step of `vitzoo train` against a bare loop of timm and PyTorch, in turn.

Both train the same model on the same batches in memory, with timm's loss, AdamW and cosine schedule. The bare loop is
what timm's documentation shows; vitzoo's step also seeds its random numbers, shares its loss and its stop signal
between processes, checks that the loss is finite, and tells the mixers its number.

Examples:
    vitzoo bench trainer
    vitzoo bench trainer --models vil_tiny --img-size 64 --batch 4
"""

import argparse
from collections.abc import Callable
from itertools import count
from pathlib import Path

import timm
import torch
from accelerate.state import AcceleratorState
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
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
from vitzoo.bench._options import parse
from vitzoo.bench._show import milliseconds, print_table, progress
from vitzoo.load import find_models
from vitzoo.options import positive
from vitzoo.train.loop import create_accelerator, set_up
from vitzoo.train.recipe import Recipe, make_recipe
from vitzoo.train.run import Run
from vitzoo.train.step import train_step


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure what the command line asks for; return a row for each model.

    Raises:
        UserError: A model, a size or a batch is not what it should be.
    """
    args = parse_args(argv)
    run, machine = start_run(), describe_machine(args.device)
    print(say_machine(machine))
    rows = []
    for name in find_models(args.models):
        rows.append(measure(name, args))
        append_rows(args.results_file, rows[-1:], run=run, command=args.command, **machine)
    lines = [
        [fields['name'], milliseconds(fields['seconds']), f'{fields["ratio"]:.3f}']
        + [f'{fields["ratio_low"]:.3f} … {fields["ratio_high"]:.3f}', str(fields['rounds'])]
        for fields in rows
    ]
    print_table('speed of a step of vitzoo; 1 is that of a bare loop', ['', 'step', '×', 'quartiles', 'rounds'], lines)
    return rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser('vitzoo bench trainer', description=__doc__.partition('\n')[0])
    add, models = parser.add_argument, ['deit_tiny_patch16_224', 'cvt_ls_13']
    add('--models', nargs='+', default=models, metavar='MODEL', help=f'default: {" ".join(models)}')
    add('--img-size', type=positive, default=224, metavar='N', help='side of the images (default: 224)')
    add('--batch', type=positive, default=8, help='images of a step (default: 8)')
    add('--amp', action='store_true', help='train in bfloat16 mixed precision')
    return parse(parser, argv, min_rounds=20)


def measure(name: str, args: argparse.Namespace) -> dict:
    """Time the two kinds of step in turn on one model."""
    recipe = make_recipe(
        dict(model=name, img_size=args.img_size, batch_size=args.batch, amp=args.amp, workers=0, epochs=1000, lr=1e-4)
    )
    batches = [
        [torch.randn(args.batch, 3, args.img_size, args.img_size), torch.randint(10, (args.batch,))]
        for _ in range(INPUT_SETS)
    ]
    run = make_run(recipe)
    model = timm.create_model(name, num_classes=10, img_size=args.img_size).to(args.device)
    calls = {'bare': bare_step(recipe, model, run.plan.steps_per_epoch, batches), 'vitzoo': vitzoo_step(run, batches)}
    with progress(name) as step:
        times = time_in_turn(calls, args.device, seconds=args.seconds, min_rounds=args.min_rounds, on_round=step)
    ratio = ratios(times['bare'], times['vitzoo'])
    fields = dict(table='trainer', name=name, what='training step', against='bare loop', img_size=args.img_size)
    precision = 'bfloat16' if args.amp else 'float32'
    return row(
        Spread.of(times['vitzoo']), ratio, batch_size=args.batch, dtype=precision, device=args.device.type, **fields
    )


def make_run(recipe: Recipe) -> Run:
    """What `vitzoo train` has made before its first step."""
    # of an earlier model, perhaps in another precision
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = Path('runs')
    return set_up(recipe, create_accelerator(recipe, folder), folder)


def vitzoo_step(run: Run, batches: list[list[torch.Tensor]]) -> Callable[[int], object]:
    """A step as `vitzoo train` makes it."""
    run.task.train()
    micro_batches = (batches[number % len(batches)] for number in count())
    return lambda number: train_step(run, micro_batches)


def bare_step(
    recipe: Recipe, model: nn.Module, steps_per_epoch: int, batches: list[list[torch.Tensor]]
) -> Callable[[int], object]:
    """A step as timm's documentation has it, with the same settings."""
    device = next(model.parameters()).device
    optimizer = create_optimizer_v2(model, opt=recipe.opt, lr=recipe.lr, weight_decay=recipe.weight_decay)
    schedule = {name: getattr(recipe, name) for name in ('sched', 'warmup_epochs', 'warmup_lr', 'min_lr')}
    epochs = dict(num_epochs=recipe.epochs, step_on_epochs=False, updates_per_epoch=steps_per_epoch)
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
