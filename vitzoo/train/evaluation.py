"""Evaluates the model of a run, and exports its better weights."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from vitzoo._files import replace_file
from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import UserError
from vitzoo.metrics import evaluate
from vitzoo.train.processes import share_buffers
from vitzoo.train.progress import Display
from vitzoo.train.recipe import Recipe
from vitzoo.train.run import Run
from vitzoo.train.run_folder import export_model, write_on_main

_LOWER_IS_BETTER = ('eval_loss', 'output_error')


def evaluate_epoch(run: Run, display: Display) -> dict:
    """Evaluate the model and its EMA; returns the second half of a row of metrics.csv."""
    row = _evaluate_with_bar(run, display, run.full_model.gather(), prefix='')
    if run.ema is not None:
        row |= _evaluate_with_bar(run, display, run.ema.module, prefix='ema_')
    return row


def _evaluate_with_bar(run: Run, display: Display, model: nn.Module, prefix: str) -> dict:
    if run.measure_model is not None:
        share_buffers(run, model)
        with run.accelerator.autocast():
            return {prefix + name: value for name, value in run.measure_model(model).items()}
    with run.accelerator.autocast(), display.evaluation() as advance:
        scores = evaluate_shared(run, model, advance)
        if not math.isfinite(scores['loss']):
            # the logits are finite: `evaluate` has checked them
            raise UserError(
                f'the validation loss is {scores["loss"]} after step {run.step}, although all logits are finite; resume'
                f' an earlier checkpoint with a smaller lr'
            )
    columns = {f'{prefix}eval_loss': scores['loss'], f'{prefix}top1': scores['top1'], f'{prefix}top5': scores['top5']}
    if 'map' in scores:
        columns[f'{prefix}map'] = scores['map']
    return columns


def evaluate_shared(run: Run, model: nn.Module, advance: Callable[[int], None] | None = None) -> dict:
    """Evaluate a model on all processes, each on its share of the validation set."""
    share_buffers(run, model)
    return evaluate(model, run.val_loader, run.accelerator, progress=advance)


def export_best(run: Run) -> None:
    """Export the model to best/ if it is better than in every epoch before in this branch."""
    rows = [row for row in run.history[run.best_from :] if _metric_column(run.recipe) in row]
    if run.start_row is not None:
        rows.insert(0, run.start_row)
    *earlier, last = (max(selection_score(row, run.recipe), selection_score(row, run.recipe, 'ema_')) for row in rows)
    if not earlier or last > max(earlier):
        export(run, run.folder / 'best')


def selection_score(row: dict, recipe: Recipe, prefix: str = '') -> float:
    """The recipe's metric in a row of metrics.csv, negated if lower is better; -inf if it is not a number."""
    column = _metric_column(recipe)
    value = row.get(prefix + column, math.nan)
    if math.isnan(value):
        return -math.inf
    return -value if column in _LOWER_IS_BETTER else value


def _metric_column(recipe: Recipe) -> str:
    metric = recipe.eval_metric or ('map' if recipe.multi_label else 'top1')
    return 'eval_loss' if metric == 'loss' else metric


def export(run: Run, folder: Path) -> str:
    """Export the raw weights or their EMA, whichever is better by the recipe's metric; returns 'raw' or 'ema'."""
    row = run.history[-1]
    if run.ema is not None and selection_score(row, run.recipe, 'ema_') >= selection_score(row, run.recipe):
        weights, model = 'ema', run.ema.module
    else:
        weights, model = 'raw', run.full_model.gather()
    info: dict[str, Any] = dict(
        weights=weights, epochs=row['epoch'], seed=run.recipe.seed, data_dir=run.recipe.data_dir
    )
    if run.recipe.multi_label:
        info['multi_label'] = True
    # `vitzoo validate` opens the data with the same options
    info |= run.train_set.options.given()

    def write() -> None:
        export_model(folder, model, run.train_set.class_names, run.data_config, info)
        if folder != run.folder and (run.folder / HELD_OUT).is_file():
            # a copy of the best epoch is a model of its own
            with replace_file(folder / HELD_OUT) as partial:
                shutil.copyfile(run.folder / HELD_OUT, partial)

    write_on_main(
        run.accelerator,
        run.lock,
        write,
        lambda error: f'cannot write the model to {folder}: {error}; free some space and --resume',
    )
    return weights
