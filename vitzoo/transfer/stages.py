"""The stages of a transfer to one mixer, which continue from the record of its results."""

import math
from copy import deepcopy
from typing import Any

from torch import nn

from vitzoo.classes import label_names
from vitzoo.data import Images
from vitzoo.data.held_out import HELD_OUT, Subset, write_held_out
from vitzoo.errors import DivergenceError
from vitzoo.train.lock import FolderLock
from vitzoo.train.run_folder import export_model, write_metrics
from vitzoo.transfer.hybrid import keep_softmax, restore_softmax_blocks
from vitzoo.transfer.matching import match_blocks
from vitzoo.transfer.network import load_best, train_network
from vitzoo.transfer.opening import Transfer
from vitzoo.transfer.rates import choose_rates, trial_steps
from vitzoo.transfer.record import STATES, TransferRecord


def match(transfer: Transfer, student: nn.Module, record: TransferRecord) -> None:
    """Block matching."""
    options = transfer.options

    def show(row: dict) -> None:
        transfer.console.print(_describe_row('matching', row['step'], row))
        record.write_time()

    def compute() -> list[dict]:
        return match_blocks(
            transfer.teacher,
            student,
            transfer.train,
            transfer.held_out,
            steps=options.steps,
            lr=options.lr,
            new_lr=options.new_lr,
            eval_every=max(1, options.steps // options.evals),
            seed=options.seed,
            accelerator=transfer.accelerator,
            state_file=record.state_file('matching'),
            progress=show,
            multi_label=transfer.data.multi_label,
        )

    record.stage('matching', compute)


def choose_softmax_blocks(transfer: Transfer, student: nn.Module, record: TransferRecord) -> None:
    """Give blocks back to softmax attention, if the user asked for it."""
    options = transfer.options
    if options.keep_softmax == 0:
        return

    def gap(hybrid: nn.Module) -> float:
        return record.results['teacher']['score'] - transfer.score(hybrid)['score']

    def choose() -> list[dict]:
        # those of a search that was interrupted
        rounds = record.results.setdefault('rounds', [])

        def add(row: dict) -> None:
            transfer.console.print(_describe_row('softmax blocks', len(row['kept']), row))
            rounds.append(row)
            record.write_time()

        with transfer.accelerator.autocast():
            found = keep_softmax(
                transfer.teacher,
                deepcopy(student),
                transfer.held_out,
                options.keep_softmax,
                tolerance=options.tolerance,
                gap=gap,
                accelerator=transfer.accelerator,
                progress=add,
                done=rounds,
                multi_label=transfer.data.multi_label,
            )
        del record.results['rounds']
        return found

    chosen = record.compute_once('keep_softmax', choose)
    restore_softmax_blocks(transfer.teacher, student, chosen[-1]['kept'])


def distil_network(transfer: Transfer, student: nn.Module, record: TransferRecord, lock: FolderLock) -> None:
    """Distillation of the whole network, by the trainer."""
    options = transfer.options
    settings: dict[str, Any] = dict(steps=options.network_steps, log_with=options.recipe.log_with)
    settings |= dict(progress=record.write_time)
    if options.network_steps:
        settings['start_error'] = error = record.compute_once('network_start', lambda: transfer.output_error(student))
        rates = record.compute_once('network_rates', lambda: _find_rates(transfer, student, record, error))
        transfer.console.print(
            f'network        all parameters, learning rates {rates["lr"]:.2g} and {rates["new_lr"]:.2g}'
        )
        settings |= rates
    rows = record.compute_once('network', lambda: train_network(transfer, student, lock, **settings))
    load_best(student, record.folder, rows)


def _find_rates(transfer: Transfer, student: nn.Module, record: TransferRecord, error: float) -> dict[str, float]:
    """The learning rates of the network stage, by trials if the user gave none; those of an earlier process count."""
    options = transfer.options

    def trial(lr: float, new_lr: float) -> float:
        trials = record.results.setdefault('network_trials', [])
        known = [row['output_error'] for row in trials if (row['lr'], row['new_lr']) == (lr, new_lr)]
        if not known:
            known = [try_rates(transfer, student, record, error, lr, new_lr)]
            trials.append(dict(lr=lr, new_lr=new_lr, output_error=known[0]))
            record.write_time()
        return math.inf if known[0] is None else known[0]

    return choose_rates(options.network_lr, options.network_new_lr, options.network_steps, lambda: error, trial)


def try_rates(
    transfer: Transfer, student: nn.Module, record: TransferRecord, error: float, lr: float, new_lr: float
) -> float | None:
    """Error of the outputs after a short training of a copy, None if it diverges."""
    steps, folder = trial_steps(transfer.options.network_steps), record.folder / STATES / f'trial_{lr:g}'
    transfer.console.print(f'network        trial of {steps} steps, learning rates {lr:.2g} and {new_lr:.2g}')
    settings: dict[str, Any] = dict(steps=steps, lr=lr, new_lr=new_lr, start_error=error, evals=1)
    try:
        rows = train_network(transfer, student, FolderLock(folder), progress=record.write_time, **settings)
    except DivergenceError:
        return None
    return rows[-1]['output_error']


def export_student(transfer: Transfer, student: nn.Module, record: TransferRecord, verdict: str) -> str:
    """Write the model, the curve of the errors, and the list of the images held out; returns the verdict."""
    if not transfer.accelerator.is_main_process:
        return verdict
    data, options = transfer.data, transfer.options
    info: dict[str, Any] = dict(teacher=transfer.name, weights=transfer.loaded.weights, data_dir=options.data_dir)
    info |= dict(seed=options.seed, transfer=verdict)
    # `vitzoo validate` opens the data with the same options
    info |= data.about
    train, val = (images.reader if isinstance(images, Images) else None for images in (data.train, data.val))
    before = transfer.loaded.about.get('held_out')
    write_held_out(record.folder / HELD_OUT, val if isinstance(val, Subset) else None, train, before)
    rows = [dict(stage=stage, **row) for stage in ('matching', 'network') for row in record.results[stage]]
    write_metrics(record.folder, [{name: value for name, value in row.items() if name != 'errors'} for row in rows])
    # the last, because a model without its list would be validated on images that it was trained on
    export_model(record.folder, student, label_names(transfer.teacher), transfer.data_config, info)
    return verdict


def _describe_row(stage: str, number: int, row: dict) -> str:
    mark = ' *' if row.get('best') else ''
    gap = f', gap {row["gap"]:.2f} points' if 'gap' in row else ''
    return f'{stage:14} {number:6}  error {row["output_error"]:.5f}{gap}{mark}'
