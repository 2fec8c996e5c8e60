"""The stages of a transfer, one mixer after the other, and their results."""

import csv
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor, nn

from vitzoo.bench._harness import describe_machine
from vitzoo.data import eval_loader
from vitzoo.data.held_out import HELD_OUT, write_held_out
from vitzoo.errors import UserError
from vitzoo.load import find_model, fit_data_config, label_names, load_model
from vitzoo.metrics.oversmoothing import token_statistics
from vitzoo.metrics.speed import measure_throughput
from vitzoo.mixers import mixer_class
from vitzoo.options import autocast
from vitzoo.train.run_folder import export_model
from vitzoo.transfer.attention import mixer_paths, only_part, parts_of, zero_attention
from vitzoo.transfer.descent import StepBatches
from vitzoo.transfer.distillation import distil
from vitzoo.transfer.hybrid import give_back, keep_softmax
from vitzoo.transfer.matching import match_blocks
from vitzoo.transfer.measures import Retention
from vitzoo.transfer.options import TransferOptions, parse_args
from vitzoo.transfer.pictures import Pictures, divide, held_out_batches, open_pictures, training_batches
from vitzoo.transfer.probing import probe
from vitzoo.transfer.record import Ledger
from vitzoo.transfer.students import check_student, make_student, randomize, start_arguments
from vitzoo.transfer.summary import explain_result, print_probe, print_scores

# batch size of speed measurements, on an accelerator and on a CPU
_SPEED_BATCH = {True: 16, False: 1}


@dataclass
class Transfer:
    """A teacher and the images that its students learn from."""

    options: TransferOptions
    accelerator: Accelerator
    name: str
    teacher: nn.Module
    data_config: dict
    pictures: Pictures
    train: StepBatches
    held_out: list[Tensor]
    console: Console

    @cached_property
    def retention(self) -> Retention:
        """Measures students on the validation images."""
        load = partial(eval_loader, batch_size=self.options.batch_size, workers=self.options.workers)
        bank = load(self.pictures.plain) if self.pictures.kind == 'knn' else None
        return Retention(self.teacher, load(self.pictures.val), self.pictures.kind, bank)

    def arguments(self, mixer: str) -> dict:
        """Arguments of a mixer, with those that it starts with unless the user gave others."""
        return {**start_arguments(mixer), **self.options.mixer_kwargs.get(mixer, {})}

    def student(self, mixer: str) -> nn.Module:
        """A new student."""
        return make_student(self.name, self.teacher, mixer, self.arguments(mixer), self.options.seed)


def transfer(argv: list[str] | None = None) -> list[dict]:
    """Run `vitzoo transfer` with these arguments, and return the results of each mixer.

    Raises:
        UserError: The teacher, a mixer, the images or the output folder is not valid.
    """
    options = parse_args(argv)
    for mixer in options.mixers:
        _check_mixer(mixer)
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    with autocast(accelerator.device, options.amp_dtype):
        task = open_transfer(options, accelerator)
        # all mixers before any work
        for mixer in options.mixers:
            student = task.student(mixer)
            check_student(task.name, student, task.data_config['input_size'])
            _check_count(options.keep_softmax, student)
        if options.probe_only:
            return [dict(mixer=mixer, probe=_probe(task, mixer)) for mixer in options.mixers]
        ledgers = {mixer: _open_ledger(task, mixer) for mixer in options.mixers}
        # before any process writes
        accelerator.wait_for_everyone()
        if task.pictures.note:
            task.console.print(f'note   {task.name}: {task.pictures.note}')
        results = [transfer_to(task, mixer, ledger) for mixer, ledger in ledgers.items()]
    if len(results) > 1:
        summary = Ledger(Path(options.output), options.settings, accelerator.is_main_process)
        summary.results['students'] = results
        summary.write()
    print_scores(task.console, results, task.pictures.kind)
    return results


def open_transfer(options: TransferOptions, accelerator: Accelerator) -> Transfer:
    """Load the teacher, and open the images.

    Raises:
        UserError: The teacher has no weights, or the images are missing or too few.
    """
    name = find_model(options.teacher)
    teacher, source = load_model(name, img_size=options.img_size, checkpoint=options.checkpoint)
    if source == 'random weights':
        raise UserError(f'there are no weights of {name}; pass a --checkpoint, or the folder of a training run')
    teacher = teacher.to(accelerator.device)
    data_config = fit_data_config(name, teacher, options.img_size)
    pictures = open_pictures(name, teacher, options.data_dir, data_config, options.data_options, options.seed)
    train, chosen = divide(len(pictures.train), options.eval_images)
    batch, workers = options.batch_size, options.workers
    return Transfer(
        options,
        accelerator,
        name,
        teacher,
        data_config,
        pictures,
        training_batches(pictures.train, train, batch, workers, options.seed, data_config, accelerator),
        held_out_batches(pictures.plain, chosen, batch, accelerator),
        Console(quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True),
    )


def transfer_to(task: Transfer, mixer: str, ledger: Ledger) -> dict:
    """All stages of one mixer, or those that are missing in its ledger; returns the results."""
    if 'student' in ledger.results and (ledger.folder / 'model.safetensors').is_file():
        task.console.print(f'{mixer}: finished already, in {ledger.folder}')
        return ledger.results
    once, score, student = ledger.once, task.retention.score, task.student(mixer)
    once('kind', lambda: task.pictures.kind)
    once('machine', lambda: describe_machine(task.accelerator.device))
    print_probe(task.console, mixer, once('probe', lambda: _measure_blocks(task, student)))
    once('teacher', lambda: task.retention.teacher)
    once('start', lambda: score(student))
    match(task, student, ledger)
    once('matched', lambda: score(student))
    keep(task, student, ledger)
    once('hybrid', lambda: score(student) if task.options.keep_softmax else ledger.results['matched'])
    distil_network(task, student, ledger)
    once('student', lambda: score(student) if task.options.network_steps else ledger.results['hybrid'])
    once('controls', lambda: measure_controls(task, student, ledger))
    once('images_per_second', lambda: measure_speed(task, student))
    once('oversmoothing', lambda: {name: _oversmoothing(task, model) for name, model in _pair(task, student)})
    once('verdict', lambda: explain_result(mixer, ledger.results))
    task.console.print(ledger.results['verdict'])
    if task.accelerator.is_main_process:
        export_student(task, student, ledger)
    task.accelerator.wait_for_everyone()
    ledger.forget_states()
    return ledger.results


def match(task: Transfer, student: nn.Module, ledger: Ledger) -> None:
    """Block matching."""
    options = task.options
    rates = dict(lr=options.lr, new_lr=options.new_lr)
    common = _common(task, ledger, 'matching', options.steps)
    ledger.stage('matching', lambda: match_blocks(task.teacher, student, task.train, task.held_out, **rates, **common))


def keep(task: Transfer, student: nn.Module, ledger: Ledger) -> None:
    """Give blocks back to softmax attention, if the user asked for it."""
    options = task.options
    if options.keep_softmax == 0:
        return

    def gap(hybrid: nn.Module) -> float:
        return task.retention.teacher['score'] - task.retention.score(hybrid)['score']

    def choose() -> list[dict]:
        return keep_softmax(
            task.teacher,
            deepcopy(student),
            task.held_out,
            options.keep_softmax,
            tolerance=options.tolerance,
            gap=gap,
            accelerator=task.accelerator,
            progress=lambda row: task.console.print(_describe_row('softmax blocks', len(row['kept']), row)),
        )

    rows = ledger.once('keep_softmax', choose)
    give_back(task.teacher, student, rows[-1]['kept'])


def distil_network(task: Transfer, student: nn.Module, ledger: Ledger) -> None:
    """Distillation of the whole network."""
    options = task.options
    rates = dict(lr=options.network_lr, new_lr=options.network_new_lr, block_weight=options.block_weight)
    common = _common(task, ledger, 'network', options.network_steps)
    ledger.stage('network', lambda: distil(task.teacher, student, task.train, task.held_out, **rates, **common))


def measure_controls(task: Transfer, student: nn.Module, ledger: Ledger) -> dict[str, dict]:
    """Scores of the student without attention, limited to its parts, and trained from random weights."""
    score = task.retention.score
    with zero_attention(student):
        found = dict(zero=score(student))
    for part in parts_of(student):
        with only_part(student, part):
            found[part] = score(student)
    options = task.options
    if options.random_control:
        other = randomize(deepcopy(student), options.seed)
        rates = dict(lr=options.network_new_lr, new_lr=options.network_new_lr, block_weight=options.block_weight)
        common = _common(task, ledger, 'random', options.steps + options.network_steps)
        distil(task.teacher, other, task.train, task.held_out, **rates, **common)
        found['random'] = score(other)
    return found


def measure_speed(task: Transfer, student: nn.Module) -> dict[str, dict]:
    """Images per second of the teacher and the student, by the side of square images, measured by the main process.

    Sizes that a model cannot take are left out. `doubt` is the reason to doubt one of the two, if there is one.
    """
    found: dict[str, dict] = {}
    if not task.accelerator.is_main_process:
        return found
    batch_size = _SPEED_BATCH[task.accelerator.device.type != 'cpu']
    for name, model in _pair(task, student):
        for side in task.options.sizes:
            try:
                resized = deepcopy(model)
                resized.set_input_size(img_size=(side, side))
                images = torch.randn(batch_size, task.data_config['input_size'][0], side, side)
                speed = measure_throughput(resized, images.to(task.accelerator.device))
            except (AssertionError, RuntimeError, ValueError) as error:
                print(f'vitzoo: no speed of {name} at {side} pixels: {error}', file=sys.stderr)
                continue
            found.setdefault(str(side), {})[name] = round(speed.images_per_second, 3)
            if speed.doubt:
                found[str(side)]['doubt'] = speed.doubt
    return found


def export_student(task: Transfer, student: nn.Module, ledger: Ledger) -> None:
    """Write the model, the curve of the errors, and the list of the images held out."""
    pictures, options = task.pictures, task.options
    names = label_names(task.teacher)
    info = dict(teacher=task.name, data_dir=options.data_dir, seed=options.seed, transfer=ledger.results['verdict'])
    data_config = {key: value for key, value in task.data_config.items() if value is not None}
    export_model(ledger.folder, student, names, data_config, info | options.data_options.given())
    if getattr(pictures.val, 'is_held_out', False):
        write_held_out(ledger.folder / HELD_OUT, pictures.val.reader)
    rows = [(stage, row) for stage in ('matching', 'network') for row in ledger.results[stage]]
    with (ledger.folder / 'metrics.csv').open('w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(['stage', 'step', 'feature_error', 'best'])
        writer.writerows([stage, row['step'], row['feature_error'], int(row['best'])] for stage, row in rows)


def _check_mixer(mixer: str) -> None:
    try:
        mixer_class(mixer)
    except ValueError as error:
        raise UserError(str(error).rstrip('.')) from error


def _check_count(count: int | str, student: nn.Module) -> None:
    total = len(mixer_paths(student))
    if count != 'auto' and count >= total:
        raise UserError(f'--keep-softmax {count} leaves no mixer; give auto or 0 to {total - 1} of {total} blocks')


def _open_ledger(task: Transfer, mixer: str) -> Ledger:
    options = task.options
    folder = Path(options.output) / (mixer if len(options.mixers) > 1 else '')
    settings = options.settings | dict(mixer=mixer, mixer_kwargs=task.arguments(mixer))
    settings |= dict(training_images=len(task.pictures.train), validation_images=len(task.pictures.val))
    ledger = Ledger(folder, settings, task.accelerator.is_main_process)
    ledger.open(options.resume, options.overwrite)
    return ledger


def _probe(task: Transfer, mixer: str) -> list[dict]:
    costs = _measure_blocks(task, task.student(mixer))
    print_probe(task.console, mixer, costs)
    return costs


def _measure_blocks(task: Transfer, student: nn.Module) -> list[dict]:
    return [asdict(cost) for cost in probe(task.teacher, student, task.held_out[:2])]


def _common(task: Transfer, ledger: Ledger, stage: str, steps: int) -> dict:
    """Keywords of a stage."""
    return dict(
        steps=steps,
        eval_every=max(1, steps // task.options.evals),
        accelerator=task.accelerator,
        state_file=ledger.state_file(stage),
        progress=lambda row: task.console.print(_describe_row(stage, row['step'], row)),
    )


def _describe_row(stage: str, number: int, row: dict) -> str:
    mark = ' *' if row.get('best') else ''
    gap = f', gap {row["gap"]:.2f} points' if 'gap' in row else ''
    return f'{stage:14} {number:6}  error {row["feature_error"]:.5f}{gap}{mark}'


def _pair(task: Transfer, student: nn.Module) -> list[tuple[str, nn.Module]]:
    return [('teacher', task.teacher), ('student', student)]


def _oversmoothing(task: Transfer, model: nn.Module) -> dict:
    found = token_statistics(model, task.held_out[:1])
    return dict(blocks=found['blocks'], mean=found['cosine']['mean'])
