"""The checks of a transfer, its folders, and its steps for one mixer after the other."""

from contextlib import ExitStack
from pathlib import Path

from torch import nn

from vitzoo.errors import UserError, is_first_process
from vitzoo.machine import describe_machine, note_slow_bfloat16
from vitzoo.mixers import mixer_class
from vitzoo.train.lock import FolderLock
from vitzoo.train.processes import raise_together
from vitzoo.train.run_folder import check_sources, claim_folder
from vitzoo.transfer.hybrid import first_paths
from vitzoo.transfer.measurements import measure_blocks, measure_controls, measure_oversmoothing, measure_speed
from vitzoo.transfer.opening import Transfer, open_transfer
from vitzoo.transfer.options import parse_args
from vitzoo.transfer.probing import with_softmax
from vitzoo.transfer.record import TransferRecord
from vitzoo.transfer.stages import choose_softmax_blocks, distil_network, export_student, match
from vitzoo.transfer.stopping import Stopped, raise_on_sigterm
from vitzoo.transfer.students import check_student
from vitzoo.transfer.summary import explain_result, print_probe, print_scores


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
            opened = open_transfer(options)
            try:
                return _transfer(opened)
            finally:
                # a garbage collection would wait 10 seconds for them
                opened.stop_workers()
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
    # the probe compares the students with it, the same for all of them
    with transfer.accelerator.autocast():
        check_student(transfer.name, with_softmax(transfer.teacher, student), transfer.data_config['input_size'])
    if options.probe_only:
        return [dict(mixer=mixer, probe=_probe(transfer, mixer)) for mixer in options.mixers]
    assert options.output is not None
    is_main, teacher_weights = transfer.accelerator.is_main_process, transfer.teacher_weights
    summary = TransferRecord(Path(options.output), options.settings, is_main, teacher_weights)
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
        for note in note_slow_bfloat16(transfer.accelerator.device, options.amp_dtype):
            transfer.console.print(f'note   {note}')
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
    print_probe(transfer.console, mixer, compute_once('probe', lambda: measure_blocks(transfer, student)))
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
    record = TransferRecord(folder, settings, transfer.accelerator.is_main_process, transfer.teacher_weights)
    record.open(options.resume, options.overwrite)
    return record


def _probe(transfer: Transfer, mixer: str) -> list[dict]:
    costs = measure_blocks(transfer, transfer.student(mixer))
    print_probe(transfer.console, mixer, costs)
    return costs
