"""The stages of a transfer, one mixer after the other, and their results."""

import math
import sys
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitzoo.about import read_about
from vitzoo.classes import label_names
from vitzoo.data import Images
from vitzoo.data.held_out import HELD_OUT, Subset, write_held_out
from vitzoo.errors import DivergenceError, UserError, is_first_process
from vitzoo.machine import describe_machine
from vitzoo.metrics.oversmoothing import token_statistics
from vitzoo.metrics.speed import measure_throughput
from vitzoo.mixers import mixer_class
from vitzoo.train.lock import FolderLock
from vitzoo.train.processes import raise_together
from vitzoo.train.run_folder import check_sources, claim_folder, export_model, write_metrics
from vitzoo.transfer.attention import only_part, parts_of, zero_attention
from vitzoo.transfer.distillation import choose_rates, trial_steps
from vitzoo.transfer.hybrid import first_paths, keep_softmax, restore_softmax_blocks
from vitzoo.transfer.matching import match_blocks
from vitzoo.transfer.network import load_best, train_network
from vitzoo.transfer.opening import Transfer, open_transfer
from vitzoo.transfer.options import parse_args
from vitzoo.transfer.probing import probe
from vitzoo.transfer.record import STATES, TransferRecord
from vitzoo.transfer.stopping import Stopped, raise_on_sigterm
from vitzoo.transfer.students import check_student, randomize
from vitzoo.transfer.summary import explain_result, print_probe, print_scores

# for the control from random weights, which has more to learn than a student
_RANDOM_LR = 1e-3
# batch size of speed measurements, on an accelerator and on a CPU
_SPEED_BATCH = {True: 16, False: 1}


def transfer(argv: list[str] | None = None) -> list[dict] | None:
    """Run `vitzoo transfer` with these arguments; returns the results of each mixer, or None if stopped by SIGTERM.

    Raises:
        UserError: The teacher, a mixer, the images or the output folder is not valid.
    """
    options = parse_args(argv)
    for mixer in options.mixers:
        _check_mixer(mixer)
    try:
        with raise_on_sigterm():
            return _transfer(open_transfer(options))
    except Stopped as reason:
        if is_first_process():
            print(f'stopped {reason}' + ('' if options.probe_only else '; continue with --resume'), flush=True)
        return None


def _transfer(transfer: Transfer) -> list[dict]:
    options = transfer.options
    # all mixers before any work
    for mixer in options.mixers:
        student = transfer.student(mixer)
        with transfer.accelerator.autocast():
            check_student(transfer.name, student, transfer.data_config['input_size'])
        _check_count(options.keep_softmax, student)
    if options.probe_only:
        return [dict(mixer=mixer, probe=_probe(transfer, mixer)) for mixer in options.mixers]
    assert options.output is not None
    summary = TransferRecord(Path(options.output), options.settings, transfer.accelerator.is_main_process)
    if options.mixers[1:]:
        summary.open_summary()
    with ExitStack() as stack:
        folders = {mixer: _folder(transfer, mixer) for mixer in options.mixers}
        locks = {
            mixer: stack.enter_context(claim_folder(transfer.accelerator, folder, is_named=True))
            for mixer, folder in folders.items()
        }
        # a process that deletes, only does so after all have looked at the folders
        with raise_together(transfer.accelerator):
            records = {mixer: _open_record(transfer, mixer, folder) for mixer, folder in folders.items()}
        if options.overwrite:
            for record in records.values():
                record.clear()
        # before any process writes
        transfer.accelerator.wait_for_everyone()
        if transfer.data.note:
            transfer.console.print(f'note   {transfer.name}: {transfer.data.note}')
        results = [transfer_to(transfer, mixer, records[mixer], locks[mixer]) for mixer in options.mixers]
    if options.mixers[1:]:
        summary.write_students(results)
    print_scores(transfer.console, results, transfer.data.kind)
    return results


def transfer_to(transfer: Transfer, mixer: str, record: TransferRecord, lock: FolderLock) -> dict:
    """All stages of one mixer, or those that are missing in its record; returns the results."""
    if 'verdict' in record.results:
        transfer.console.print(f'{mixer}: finished already, in {record.folder}')
        record.delete_states()
        return record.results
    compute_once, score, student = record.compute_once, transfer.score, transfer.student(mixer)
    compute_once('kind', lambda: transfer.data.kind)
    compute_once('machine', lambda: describe_machine(transfer.accelerator.device))
    print_probe(transfer.console, mixer, compute_once('probe', lambda: _measure_blocks(transfer, student)))
    compute_once('teacher', transfer.score_teacher)
    compute_once('start', lambda: score(student))
    match(transfer, student, record)
    compute_once('matched', lambda: score(student))
    choose_softmax_blocks(transfer, student, record)
    compute_once('hybrid', lambda: score(student) if transfer.options.keep_softmax else record.results['matched'])
    distil_network(transfer, student, record, lock)
    compute_once('student', lambda: score(student) if transfer.options.network_steps else record.results['hybrid'])
    compute_once('controls', lambda: measure_controls(transfer, student, record))
    compute_once('images_per_second', lambda: measure_speed(transfer, student))
    compute_once('oversmoothing', lambda: measure_oversmoothing(transfer, student))
    # the last result, so that a transfer that has it is complete
    compute_once('verdict', lambda: export_student(transfer, student, record, explain_result(mixer, record.results)))
    transfer.accelerator.wait_for_everyone()
    transfer.console.print(record.results['verdict'])
    record.delete_states()
    return record.results


def match(transfer: Transfer, student: nn.Module, record: TransferRecord) -> None:
    """Block matching."""
    options = transfer.options
    rates: dict[str, Any] = dict(lr=options.lr, new_lr=options.new_lr)
    common = _common(transfer, record, 'matching', options.steps)
    record.stage(
        'matching',
        lambda: match_blocks(transfer.teacher, student, transfer.train, transfer.held_out, **rates, **common),
    )


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


def measure_controls(transfer: Transfer, student: nn.Module, record: TransferRecord) -> dict[str, dict]:
    """Scores of the student without attention, limited to its parts, and trained from random weights."""
    with zero_attention(student):
        found = dict(zero=transfer.score(student))
    for part in parts_of(student):
        with only_part(student, part):
            found[part] = transfer.score(student)
    options = transfer.options
    if options.random_control:
        transfer.console.print('control        all parameters from random weights')
        other, folder = randomize(deepcopy(student), options.seed), record.folder / STATES / 'random'
        steps, lr = options.steps + options.network_steps, _RANDOM_LR
        lock, progress = FolderLock(folder), record.write_time
        rows = train_network(transfer, other, lock, steps=steps, lr=lr, new_lr=lr, progress=progress)
        load_best(other, folder, rows)
        found['random'] = transfer.score(other)
    return found


def measure_speed(transfer: Transfer, student: nn.Module) -> dict[str, dict]:
    """Images per second of the teacher and the student, by the side of square images, measured by the main process.

    Sizes that a model cannot take are left out. `doubt` is the reason to doubt one of the two, if there is one.
    """
    found: dict[str, dict] = {}
    if not transfer.accelerator.is_main_process:
        return found
    batch_size = _SPEED_BATCH[transfer.accelerator.device.type != 'cpu']
    for name, model in _pair(transfer, student):
        for side in transfer.options.sizes:
            try:
                resized: Any = deepcopy(model)
                # others take images of any size, or fail
                if transfer.data_config['input_size'][1:] != (side, side) and hasattr(resized, 'set_input_size'):
                    resized.set_input_size(img_size=(side, side))
                images = torch.randn(batch_size, transfer.data_config['input_size'][0], side, side)
                with transfer.accelerator.autocast():
                    speed = measure_throughput(resized, images.to(transfer.accelerator.device))
            except (AssertionError, RuntimeError, ValueError) as error:
                print(f'vitzoo: no speed of {name} at {side} pixels: {error}', file=sys.stderr)
                continue
            found.setdefault(str(side), {})[name] = round(speed.images_per_second, 3)
            if speed.doubt:
                found[str(side)]['doubt'] = speed.doubt
    return found


def measure_oversmoothing(transfer: Transfer, student: nn.Module) -> dict[str, dict]:
    """Similarity of the tokens of teacher and student by block; a model whose tokens are unknown is left out."""
    found: dict[str, dict] = {}
    for name, model in _pair(transfer, student):
        try:
            with transfer.accelerator.autocast():
                statistics = token_statistics(model, transfer.held_out[:1])
        except UserError as error:
            transfer.console.print(f'note   no similarity of the tokens of the {name}: {error}')
            continue
        found[name] = dict(blocks=statistics['blocks'], mean=statistics['cosine']['mean'])
    return found


def export_student(transfer: Transfer, student: nn.Module, record: TransferRecord, verdict: str) -> str:
    """Write the model, the curve of the errors, and the list of the images held out; returns the verdict."""
    if not transfer.accelerator.is_main_process:
        return verdict
    data, options = transfer.data, transfer.options
    info: dict[str, Any] = dict(teacher=transfer.name, weights=transfer.weights, data_dir=options.data_dir)
    info |= dict(seed=options.seed, transfer=verdict)
    # `vitzoo validate` opens the data with the same options
    info |= data.about
    export_model(record.folder, student, label_names(transfer.teacher), transfer.data_config, info)
    train, val = (images.reader if isinstance(images, Images) else None for images in (data.train, data.val))
    before = read_about(transfer.name, transfer.weights, options.checkpoint).get('held_out')
    write_held_out(record.folder / HELD_OUT, val if isinstance(val, Subset) else None, train, before)
    rows = [dict(stage=stage, **row) for stage in ('matching', 'network') for row in record.results[stage]]
    write_metrics(record.folder, [{name: value for name, value in row.items() if name != 'errors'} for row in rows])
    return verdict


def _check_mixer(mixer: str) -> None:
    try:
        mixer_class(mixer)
    except ValueError as error:
        raise UserError(str(error).rstrip('.')) from error


def _check_count(count: int | str, student: nn.Module) -> None:
    total = len(first_paths(student))
    if isinstance(count, int) and count >= total:
        raise UserError(f'--keep-softmax {count} leaves no mixer; give auto or 0 to {total - 1} of {total} blocks')


def _folder(transfer: Transfer, mixer: str) -> Path:
    options = transfer.options
    assert options.output is not None
    folder = Path(options.output) / (mixer if options.mixers[1:] else '')
    if folder.is_file():
        raise UserError(f"'{folder}' is a file; choose another --output")
    if options.overwrite:
        check_sources({'the teacher': transfer.name, '--checkpoint': options.checkpoint}, folder)
    return folder


def _open_record(transfer: Transfer, mixer: str, folder: Path) -> TransferRecord:
    options = transfer.options
    settings = options.settings | dict(mixer=mixer, mixer_kwargs=transfer.arguments(mixer))
    settings |= dict(training_images=len(transfer.data.train), validation_images=len(transfer.data.val))
    record = TransferRecord(folder, settings, transfer.accelerator.is_main_process)
    record.open(options.resume, options.overwrite)
    return record


def _probe(transfer: Transfer, mixer: str) -> list[dict]:
    costs = _measure_blocks(transfer, transfer.student(mixer))
    print_probe(transfer.console, mixer, costs)
    return costs


def _measure_blocks(transfer: Transfer, student: nn.Module) -> list[dict]:
    with transfer.accelerator.autocast():
        costs = probe(transfer.teacher, student, transfer.held_out[:2], multi_label=transfer.data.multi_label)
        return [asdict(cost) for cost in costs]


def _common(transfer: Transfer, record: TransferRecord, stage: str, steps: int) -> dict:
    """Keywords of a stage."""

    def show(row: dict) -> None:
        transfer.console.print(_describe_row(stage, row['step'], row))
        record.write_time()

    return dict(
        steps=steps,
        eval_every=max(1, steps // transfer.options.evals),
        accelerator=transfer.accelerator,
        state_file=record.state_file(stage),
        progress=show,
        multi_label=transfer.data.multi_label,
    )


def _describe_row(stage: str, number: int, row: dict) -> str:
    mark = ' *' if row.get('best') else ''
    gap = f', gap {row["gap"]:.2f} points' if 'gap' in row else ''
    return f'{stage:14} {number:6}  error {row["output_error"]:.5f}{gap}{mark}'


def _pair(transfer: Transfer, student: nn.Module) -> list[tuple[str, nn.Module]]:
    return [('teacher', transfer.teacher), ('student', student)]
