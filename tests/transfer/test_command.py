"""`vitzoo transfer`: its folder, its controls, interruption, several processes, and wrong inputs."""

import dataclasses
import io
import json
import math
import multiprocessing
import os
import pkgutil
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from shlex import split
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from processes import shard_accelerators, start_processes
from rich.console import Console
from teachers import batches, make_teacher, save_teacher
from torch.utils.data import TensorDataset

from vitzoo.data import DataOptions, open_dataset
from vitzoo.data.held_out import write_held_out
from vitzoo.errors import DivergenceError, UserError, format_flag
from vitzoo.load import fit_data_config, load_model
from vitzoo.report.markup import tag, to_html
from vitzoo.report.transfers import read_transfer, transfer_section
from vitzoo.train.kl import kl_divergence
from vitzoo.transfer import main, network
from vitzoo.transfer.command import transfer
from vitzoo.transfer.data import held_out_batches, open_transfer_data
from vitzoo.transfer.network import train_network
from vitzoo.transfer.opening import Transfer
from vitzoo.transfer.options import parse_args
from vitzoo.transfer.record import TransferRecord, hash_weights
from vitzoo.transfer.stages import try_rates
from vitzoo.transfer.summary import compare_speeds, explain_result, minutes, print_scores
from vitzoo.validate.command import validate

pytestmark = pytest.mark.usefixtures('fresh_accelerate')


QUICK = split('--steps 2 --network-steps 2 --evals 2 --batch-size 8 --eval-images 8 --workers 0 --sizes')
QUICK += split('--lr 1e-3 --network-lr scaled')
# trials of learning rates take longer than the rest
TRIALS = split('--network-lr auto')
# its largest window is one token, so that there is something to learn
LS = [*split('--mixer ls --mixer-kwargs window_size=1 rank=2 --keep-softmax 1'), *QUICK, *TRIALS]


@pytest.fixture(scope='module')
def teacher(tmp_path_factory) -> str:
    return save_teacher(tmp_path_factory.mktemp('teacher'))


@pytest.fixture(scope='module')
def finished(teacher, images, tmp_path_factory) -> Path:
    """A transfer that was not interrupted."""
    folder = tmp_path_factory.mktemp('finished') / 'ls'
    transfer([teacher, *LS, '--data-dir', images, '--output', str(folder)])
    return folder


def read_results(folder: Path) -> dict:
    """transfer.json without times, and without what depends on the machine."""
    results = json.loads((folder / 'transfer.json').read_text())
    return {key: value for key, value in results.items() if key not in ('seconds', 'machine')}


def test_the_folder_of_a_transfer_is_a_model_with_its_results(teacher, images, finished):
    results = read_results(finished)
    assert results['kind'] == 'top1'
    assert list(results['controls']) == ['zero', 'local', 'global', 'random']
    assert [len(results[stage]) for stage in ('matching', 'network')] == [3, 3]
    (kept,) = results['keep_softmax'][-1]['kept']
    assert results['student']['score'] == results['student']['top1']
    assert results['verdict'].startswith('ls: top-1 ')
    model = timm.create_model(f'local-dir:{finished}', pretrained=True)
    names = [type(block.attn).__name__ for block in model.blocks]
    assert sorted(names) == ['Attention', 'LongShort'] and names[int(kept.split('.')[1])] == 'Attention'
    assert model.pretrained_cfg['label_names'] == ['blue', 'green', 'red']
    assert not (finished / 'stages').exists()
    assert (finished / 'metrics.csv').read_text().count('\n') == 7


@pytest.mark.parametrize(
    ('with_checkpoint', 'weights', 'licence'), [(False, 'trained', 'mit'), (True, 'checkpoint', None)]
)
def test_a_student_has_the_licence_of_its_teacher_unless_that_has_other_weights(
    with_checkpoint, weights, licence, images, tmp_path
):
    teacher = save_teacher(tmp_path / 'teacher')
    config = json.loads((tmp_path / 'teacher' / 'config.json').read_text())
    config['pretrained_cfg']['license'] = 'mit'
    (tmp_path / 'teacher' / 'config.json').write_text(json.dumps(config))
    option = ['--checkpoint', f'{teacher}/model.safetensors'] if with_checkpoint else []
    command = [teacher, *option, '--mixer', 'linear', *QUICK, '--no-random-control', '--data-dir', images, '--output']
    transfer([*command, str(tmp_path / 'out')])
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert config['pretrained_cfg'].get('license') == licence
    assert config['vitzoo']['weights'] == weights


# functions during which each stage is interrupted
DURING = {
    'probe': 'vitzoo.transfer.measurements.probe',
    'matching': 'vitzoo.transfer.descent._save_state',
    'softmax blocks': 'vitzoo.transfer.hybrid._most_useful',
    'network': 'vitzoo.train.loop.train_step',
    'last evaluation': 'vitzoo.train.loop.end_epoch',
    'controls': 'vitzoo.transfer.measurements.randomize',
    'export': 'vitzoo.transfer.stages.export_model',
}


@pytest.mark.parametrize(
    'stage',
    [pytest.param(stage, marks=[pytest.mark.slow] * (stage != 'network')) for stage in DURING],
)
def test_sigterm_ends_a_transfer_with_a_sentence_and_it_continues_to_the_same_bytes(
    stage, teacher, images, finished, tmp_path, monkeypatch, capsys
):
    command = [teacher, *LS, '--data-dir', images, '--output', str(tmp_path)]
    call = pkgutil.resolve_name(DURING[stage])

    def call_after_signal(*args, **kwargs):
        if stage != 'last evaluation' or args[0].step == args[0].plan.max_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return call(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DURING[stage], call_after_signal)
        assert transfer(command) is None
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith('stopped by SIGTERM'))
    assert line.endswith('; continue with --resume')
    assert not (tmp_path / '.lock').exists()
    with pytest.raises(UserError, match='--resume'):
        transfer(command)
    transfer([*command, '--resume'])
    assert_same_files(tmp_path, finished)


def transfer_until_killed(argv: list[str], folder: str, stage: str, seconds: float) -> None:
    """Transfer, and kill this process `seconds` after the stage began, or when it ends."""
    keys = [
        'machine',
        'probe',
        'start',
        'matching',
        'matched',
        'keep_softmax',
        'hybrid',
        'network',
        'student',
        'controls',
    ]

    def kill() -> None:
        began = None
        while True:
            time.sleep(1e-3)
            try:
                results = json.loads((Path(folder) / 'transfer.json').read_text())
            except FileNotFoundError:
                continue
            if began is None and keys[keys.index(stage) - 1] in results:
                began = time.monotonic()
            if stage in results or (began is not None and time.monotonic() - began > seconds):
                os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    main(argv)


@pytest.mark.slow
@pytest.mark.parametrize('part', [0.3, 0.8])
@pytest.mark.parametrize('stage', ['probe', 'matching', 'keep_softmax', 'network', 'controls'])
def test_a_transfer_that_is_killed_continues_to_the_same_bytes(stage, part, teacher, images, finished, tmp_path):
    command = [teacher, *LS, '--data-dir', images, '--output', str(tmp_path / 'ls'), '--resume']
    seconds = json.loads((finished / 'transfer.json').read_text())['seconds'][stage]
    moment = part * random.Random(f'{stage} {part}').random() * seconds
    outcome = start_processes(1, transfer_until_killed, command, str(tmp_path / 'ls'), stage, moment)
    assert outcome.codes == [-signal.SIGKILL], outcome.err
    outcome = start_processes(1, transfer_in_processes, command)
    assert outcome.codes == [0], outcome.err
    assert_same_files(tmp_path / 'ls', finished)


def assert_same_files(folder: Path, other: Path) -> None:
    """The same model and results, and nothing left of the stages."""
    assert (folder / 'model.safetensors').read_bytes() == (other / 'model.safetensors').read_bytes()
    assert read_results(folder) == read_results(other)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in other.iterdir())


def test_a_finished_transfer_is_not_repeated_and_other_settings_are_refused(teacher, images, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / 'ls')
    command = [teacher, *LS, '--data-dir', images, '--output', str(folder), '--resume']
    before = (folder / 'model.safetensors').stat().st_mtime_ns
    transfer(command)
    assert (folder / 'model.safetensors').stat().st_mtime_ns == before
    with pytest.raises(UserError, match='its seed is 0, not 1'):
        transfer([*command, '--seed', '1'])


def test_a_transfer_continues_with_a_teacher_that_was_moved_but_not_with_another(tmp_path):
    teacher = tmp_path / 'teacher'
    teacher.mkdir()
    (teacher / 'model.safetensors').write_bytes(b'weights')

    def record_of(name):
        settings = dict(teacher=name, seed=0)
        return TransferRecord(tmp_path / 'student', settings, teacher_weights=hash_weights(name))

    record_of(str(teacher)).compute_once('start', lambda: 1)
    moved = teacher.rename(tmp_path / 'moved')
    for name in (str(moved), f'local-dir:{moved}', os.path.relpath(moved)):
        again = record_of(name)
        again.open(resume=True, overwrite=False)
        assert again.results['start'] == 1 and again.results['settings']['teacher'] == name
    (moved / 'model.safetensors').write_bytes(b'others')
    with pytest.raises(UserError, match=f'its teacher is {teacher}, not {moved}'):
        record_of(str(moved)).open(resume=True, overwrite=False)


@pytest.mark.parametrize('is_checkpoint', [False, True], ids=['folder', 'checkpoint'])
def test_a_transfer_does_not_continue_with_other_weights_in_the_place_of_its_teacher(is_checkpoint, tmp_path):
    file = tmp_path / 'model.safetensors'
    teacher = 'vit_tiny_patch16_224' if is_checkpoint else str(tmp_path)
    checkpoint = str(file) if is_checkpoint else None

    def open_record(teacher=teacher):
        settings = dict(teacher=teacher, checkpoint=checkpoint)
        weights = hash_weights(teacher, checkpoint)
        record = TransferRecord(tmp_path / 'student', settings, teacher_weights=weights)
        record.open(resume=True, overwrite=False)
        return record

    file.write_bytes(b'weights')
    open_record().compute_once('start', lambda: 1)
    assert open_record().results['start'] == 1
    if is_checkpoint:
        with pytest.raises(UserError, match='its teacher is vit_tiny_patch16_224, not deit_tiny_patch16_224'):
            open_record('deit_tiny_patch16_224')
    file.write_bytes(b'others')
    with pytest.raises(UserError, match=f"the weights of its teacher, in '{checkpoint or teacher}', have changed"):
        open_record()


def transfer_in_processes(argv: list[str]) -> None:
    main(argv)


def transfer_sharded(argv: list[str]) -> None:
    """Transfer with FSDP, which Accelerate only starts on accelerators."""
    shard_accelerators()
    main(argv)


@pytest.mark.slow
@pytest.mark.parametrize('target', [transfer_in_processes, transfer_sharded], ids=['ddp', 'fsdp'])
def test_two_processes_give_the_numbers_of_one(target, teacher, images, finished, tmp_path):
    command = [teacher, *LS, '--data-dir', images, '--output', str(tmp_path / 'ls')]
    outcome = start_processes(2, target, command)
    assert outcome.codes == [0, 0], outcome.err
    assert outcome.out.count('ls, one block at a time') == 1
    # not the weights, because Adam amplifies rounding where the gradient is zero
    models = [timm.create_model(f'local-dir:{path}', pretrained=True).eval() for path in (tmp_path / 'ls', finished)]
    x = batches(1, size=32)[0]
    torch.testing.assert_close(models[0](x), models[1](x), rtol=1e-3, atol=1e-4)
    found, single = read_results(tmp_path / 'ls'), read_results(finished)
    for stage in ('matching', 'network'):
        for row, other in zip(found[stage], single[stage], strict=True):
            assert row['output_error'] == pytest.approx(other['output_error'], rel=1e-4)
    assert found['student']['top1'] == single['student']['top1']
    for cost, other in zip(found['probe'], single['probe'], strict=True):
        assert cost.pop('path') == other.pop('path') and cost == pytest.approx(other, rel=1e-4)
    for model, tokens in found['oversmoothing'].items():
        assert tokens['mean'] == pytest.approx(single['oversmoothing'][model]['mean'], rel=1e-3)


@pytest.mark.parametrize('world', [1, 2, 3])
def test_each_process_measures_the_first_images_that_one_process_would(world):
    images = TensorDataset(torch.arange(11.0))
    fields: dict = {field.name: None for field in dataclasses.fields(Transfer)} | dict(held_out_images=images)
    for rank in range(world):
        accelerator: Any = SimpleNamespace(process_index=rank, num_processes=world)
        share = held_out_batches(images, 4, accelerator)
        fields |= dict(accelerator=accelerator, held_out=share, options=SimpleNamespace(batch_size=4))
        assert [batch.tolist() for batch in Transfer(**fields).first_held_out] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize('source', ['{}', 'local-dir:{}', '{} --checkpoint {}/model.safetensors'])
def test_a_transfer_does_not_replace_its_teacher(source, images, finished):
    before = {path: path.read_bytes() for path in finished.iterdir()}
    command = [*source.format(finished, finished).split(), *split('--mixer linear --overwrite'), *QUICK]
    with pytest.raises(UserError, match='which this run would replace; choose another --output'):
        transfer([*command, '--data-dir', images, '--output', str(finished)])
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


def test_the_weights_that_a_mixer_loses_are_named_once(teacher, images, tmp_path, caplog):
    options = split('--mixer pool --steps 0 --network-steps 0 --no-random-control')
    transfer([teacher, *QUICK, *options, '--data-dir', images, '--output', str(tmp_path)])
    assert caplog.text.count('pool does not inherit all weights of the attention') == 1
    assert 'softmax does not' not in caplog.text


def test_the_workers_of_a_transfer_end_with_it(teacher, images, tmp_path):
    others = set(multiprocessing.active_children())
    options = split('--mixer linear --steps 0 --network-steps 1 --no-random-control')
    transfer([teacher, *QUICK, *options, '--workers', '1', '--data-dir', images, '--output', str(tmp_path)])
    assert set(multiprocessing.active_children()) <= others


def test_several_mixers_give_one_table(teacher, images, tmp_path, capsys):
    command = [teacher, *QUICK, '--data-dir', images, '--no-random-control', '--output', str(tmp_path / 'all')]
    transfer([*command, '--mixer', 'linear,pool', '--mixer-kwargs', 'pool.pool_size=5'])
    both = json.loads((tmp_path / 'all' / 'transfer.json').read_text())['students']
    assert [result['settings']['mixer'] for result in both] == ['linear', 'pool']
    assert [result['settings']['mixer_kwargs'] for result in both] == [
        {'center_keys': True, 'dwc': 'v'},
        {'pool_size': 5},
    ]
    assert both[0]['teacher'] == both[1]['teacher']
    assert (tmp_path / 'all' / 'pool' / 'model.safetensors').is_file()
    assert capsys.readouterr().out.count('one block at a time') == 2
    assert len(both[1]['matching']) == 1
    with pytest.raises(UserError, match='has transfers to several mixers'):
        transfer([*command, '--mixer', 'linear', '--overwrite'])
    with pytest.raises(UserError, match='has a transfer to one mixer'):
        transfer([*command[:-1], str(tmp_path / 'all' / 'pool'), '--mixer', 'linear,local', '--overwrite'])


def test_the_summary_of_several_mixers_keeps_those_of_earlier_calls(tmp_path):
    def write(**steps):
        results = [dict(settings=dict(mixer=mixer), steps=number) for mixer, number in steps.items()]
        TransferRecord(tmp_path, {}).write_students(results)
        return {r['settings']['mixer']: r['steps'] for r in read_results(tmp_path)['students']}

    assert write(linear=1, pool=1) == dict(linear=1, pool=1)
    assert write(pool=2, local=2) == dict(linear=1, pool=2, local=2)


@pytest.mark.parametrize('content', ['{', '[]', '{}'])
def test_a_summary_that_cannot_be_read_is_not_replaced(content, tmp_path):
    (tmp_path / 'transfer.json').write_text(content)
    with pytest.raises(UserError, match='cannot read .*; remove it, or choose another --output'):
        TransferRecord(tmp_path, {}).open_summary()


def test_a_folder_is_the_same_for_all_processes_until_each_has_looked_at_it(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / 'ls')
    first, second = (TransferRecord(folder, {}, is_main=is_main) for is_main in (True, False))
    first.open(resume=False, overwrite=True)
    assert_same_files(folder, finished)
    second.open(resume=False, overwrite=True)
    second.clear()
    assert_same_files(folder, finished)
    first.clear()
    assert not {'transfer.json', 'model.safetensors'} & {path.name for path in folder.iterdir()}


@pytest.mark.parametrize('options', [dict(resume=True, overwrite=False), dict(resume=False, overwrite=True)])
def test_a_transfer_that_is_killed_while_it_replaces_another_begins_without_its_stages(options, tmp_path, monkeypatch):
    old = TransferRecord(tmp_path, dict(steps=500))
    old.compute_once('probe', lambda: 'old')
    old.state_file('matching').touch()
    (tmp_path / 'checkpoints').mkdir()
    (tmp_path / 'metrics.csv').touch()

    def kill(folder):
        raise KeyboardInterrupt

    new = TransferRecord(tmp_path, dict(steps=100))
    new.open(resume=False, overwrite=True)
    monkeypatch.setattr('vitzoo.transfer.record.remove_old_run', kill)
    with pytest.raises(KeyboardInterrupt):
        new.clear()
    again = TransferRecord(tmp_path, dict(steps=100))
    again.open(**options)
    assert 'probe' not in again.results
    assert not again.state_file('matching').exists() and not (tmp_path / 'checkpoints').exists()


@pytest.mark.parametrize(
    'dtype, rate', [pytest.param('float32', 'auto', marks=pytest.mark.slow), ('bfloat16', 'scaled')]
)
def test_a_student_is_the_same_after_another_mixer_and_alone(dtype, rate, teacher, images, tmp_path):
    command = [
        teacher,
        *QUICK,
        *split(f'--no-random-control --amp-dtype {dtype} --network-lr {rate}'),
        '--data-dir',
        images,
    ]
    transfer([*command, '--mixer', 'hedgehog,linear', '--output', str(tmp_path / 'both')])
    transfer([*command, '--mixer', 'linear', '--output', str(tmp_path / 'alone')])
    second, alone = tmp_path / 'both' / 'linear', tmp_path / 'alone'
    assert read_results(second) == read_results(alone)
    assert (second / 'model.safetensors').read_bytes() == (alone / 'model.safetensors').read_bytes()


def test_a_teacher_from_a_file_of_its_own_classes_keeps_them(images, tmp_path):
    teacher, file = make_teacher(num_classes=3, img_size=48, depth=2), tmp_path / 'own.pth'
    torch.save(dict(state_dict=teacher.state_dict()), file)
    base = save_teacher(tmp_path / 'base', num_classes=5)
    words = [base, '--checkpoint', str(file), '--mixer', 'linear', *QUICK, '--data-dir', images]
    with pytest.raises(UserError, match='has 3 classes, and the model 5; add --num-classes 3$'):
        transfer([*words, '--output', str(tmp_path / 'student')])
    transfer([*words, '--num-classes', '3', '--output', str(tmp_path / 'student')])
    assert read_results(tmp_path / 'student')['kind'] == 'top1'
    student = timm.create_model(f'local-dir:{tmp_path / "student"}', pretrained=True)
    assert student.num_classes == student.pretrained_cfg['num_classes'] == 3


@pytest.mark.parametrize('kind', ['knn', 'cosine'])
def test_a_teacher_without_a_head_is_measured_by_its_features(kind, images, tmp_path, capsys):
    teacher = save_teacher(tmp_path / 'teacher', num_classes=0)
    data = Path(images)
    if kind == 'cosine':
        data = tmp_path / 'photos'
        data.mkdir()
        for number, path in enumerate(sorted(Path(images).rglob('*.jpg'))[:20]):
            shutil.copy(path, data / f'{number}.jpg')
    folder = tmp_path / 'linear'
    words = ['--data-dir', str(data), '--output', str(folder), '--amp-dtype', 'bfloat16']
    transfer([teacher, '--mixer', 'linear', *QUICK, *words])
    results = read_results(folder)
    assert results['kind'] == kind
    assert results['teacher']['cosine'] == pytest.approx(100)
    assert results['student']['score'] == results['student'][kind]
    assert ('linear_probe' in results['student']) == (kind == 'knn')
    assert 'is measured by' in capsys.readouterr().out
    assert timm.create_model(f'local-dir:{folder}', pretrained=True).num_classes == 0


def test_the_whole_network_is_trained(teacher, images, tmp_path, monkeypatch):
    students = []

    def keep_and_stop(teacher, student, *args, **options):
        students.append(student)
        raise KeyboardInterrupt

    monkeypatch.setattr('vitzoo.transfer.network._distillation', keep_and_stop)
    with pytest.raises(KeyboardInterrupt):
        transfer([teacher, '--mixer', 'linear', *QUICK, '--data-dir', images, '--output', str(tmp_path / 'linear')])
    assert all(parameter.requires_grad for parameter in students[0].parameters())


def test_the_network_stage_has_the_options_of_a_training(teacher, images, tmp_path, monkeypatch):
    weights = []

    def record(transfer, model):
        weights.append(make_task(transfer, model).task_loss_weight)
        return make_task(transfer, model)

    make_task = network._distillation
    monkeypatch.setattr('vitzoo.transfer.network._distillation', record)
    options = split('--mixer linear --labels --model-ema --model-ema-decay 0.5 --grad-accum-steps 2 --clip-grad 1')
    options += split('--amp-dtype bfloat16 --log-with tensorboard --no-random-control')
    transfer([teacher, *options, *QUICK, *TRIALS, '--data-dir', images, '--output', str(tmp_path)])
    results = read_results(tmp_path)
    # of the trials and of the stage
    assert {*weights} == {1.0}
    assert results['settings']['training'] == dict(model_ema=True, model_ema_decay=0.5, clip_grad=1.0)
    for stage in ('matching', 'network'):
        assert len({row['output_error'] for row in results[stage]}) == 3
    last = results['network'][-1]
    assert last['ema_output_error'] != last['output_error']
    assert len(list((tmp_path / 'vitzoo').glob('events.out.tfevents*'))) == 1


@pytest.mark.parametrize('words', ['scaled', 'scaled --network-new-lr 1e-3', '2e-5'])
def test_the_rates_of_the_network_stage_are_recorded_and_used(words, teacher, images, tmp_path):
    options = [*QUICK, *split(f'--mixer linear --no-random-control --network-lr {words}')]
    transfer([teacher, *options, '--data-dir', images, '--output', str(tmp_path)])
    results = read_results(tmp_path)
    lr = 2e-5 if '2e-5' in words else min(3e-5, 1e-4 * results['network'][0]['output_error'])
    assert results['network_rates'] == pytest.approx(dict(lr=lr, new_lr=1e-3 if '1e-3' in words else 10 * lr))
    assert 'network_trials' not in results
    # that of the last group, which has the new parameters, at the end of the warm-up of one step
    assert results['network'][1]['lr'] == pytest.approx(results['network_rates']['new_lr'])


def test_trials_choose_the_rates_of_the_network_stage(finished):
    results = read_results(finished)
    trials = results['network_trials']
    errors = [row['output_error'] for row in trials]
    assert [row['lr'] for row in trials] == [pytest.approx(trials[0]['lr'] * 3**power) for power in range(len(trials))]
    # each but the last is better than the one before
    assert errors[:-1] == sorted(errors[:-1], reverse=True)
    assert errors[-1] >= errors[-2]
    assert results['network_rates'] == {name: trials[-2][name] for name in ('lr', 'new_lr')}
    # the trial is the stage itself if that has no more steps
    assert results['network'][-1]['output_error'] == pytest.approx(errors[-2], rel=1e-5)


@pytest.mark.parametrize(
    ('faster', 'words'),
    [
        ({224: False, 512: True, 1024: True}, 'from 512 pixels'),
        ({1024: True, 224: True, 512: False}, 'from 1024 pixels'),
        ({224: True, 512: True, 1024: False}, 'at 224, 512 pixels, but not at 1024'),
        ({224: False, 512: False}, 'not faster than the teacher at 224, 512 pixels'),
    ],
)
def test_a_student_is_faster_from_a_size_on_only_if_it_is_at_all_larger_ones(faster, words):
    speeds = {str(side): dict(teacher=2.0, student=1.0 + 2 * is_faster) for side, is_faster in faster.items()}
    assert words in compare_speeds(speeds)


def test_the_minutes_of_a_transfer_include_its_trials():
    seconds = dict(matching=60, keep_softmax=60, network_rates=120, network=60, student=600, controls=600)
    assert minutes(dict(seconds=seconds)) == 5


def test_trials_that_were_made_are_not_repeated(teacher, images, tmp_path, monkeypatch):
    options = [teacher, *split('--mixer linear --no-random-control'), *QUICK, *TRIALS, '--data-dir', images]
    options += ['--output', str(tmp_path), '--resume']
    made, limit = [], 1

    def make(transfer, student, record, error, lr, new_lr):
        if len(made) == limit:
            raise KeyboardInterrupt
        made.append(lr)
        return try_rates(transfer, student, record, error, lr, new_lr)

    monkeypatch.setattr('vitzoo.transfer.stages.try_rates', make)
    with pytest.raises(KeyboardInterrupt):
        transfer(options)
    limit = math.inf
    transfer(options)
    assert made == [row['lr'] for row in read_results(tmp_path)['network_trials']]


@pytest.mark.parametrize('what', ['loss', pytest.param('weights', marks=pytest.mark.slow)])
def test_a_trial_that_diverges_ends_the_search(what, teacher, images, tmp_path, monkeypatch):
    def train(*args, lr, **options):
        if lr > 2e-5:
            raise DivergenceError('the loss is nan')
        return train_network(*args, lr=lr, **options)

    def break_last_step(run):
        # so that no loss shows it
        if run.plan.lr > 2e-5 and run.step == run.plan.steps - 1:
            run.raw_model.norm.weight.grad.fill_(math.nan)

    if what == 'loss':
        monkeypatch.setattr('vitzoo.transfer.stages.train_network', train)
    else:
        monkeypatch.setattr('vitzoo.train.step.clip_gradients', break_last_step)
    options = split('--mixer linear --no-random-control')
    transfer([teacher, *options, *QUICK, *TRIALS, '--data-dir', images, '--output', str(tmp_path)])
    results = read_results(tmp_path)
    assert results['network_trials'][-1]['output_error'] is None
    assert results['network_rates']['lr'] == results['network_trials'][-2]['lr'] <= 2e-5


def test_a_network_stage_that_diverges_names_its_own_options(teacher, images, tmp_path):
    # evaluated after both steps, so that the loss of the second is the first that is not finite
    options = [*QUICK, *split('--mixer linear --network-lr 1e30 --evals 1 --no-random-control')]
    with pytest.raises(UserError, match=r'half the --network-lr \(5e\+29\), --clip-grad 1 or, with mixed precision'):
        transfer([teacher, *options, '--data-dir', images, '--output', str(tmp_path)])


def test_the_labels_of_training_images_are_those_of_the_teacher(images, tmp_path):
    name = save_teacher(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    config['label_names'] = ['red', 'blue', 'green']
    (tmp_path / 'config.json').write_text(json.dumps(config))
    teacher = load_model(name)
    data = open_transfer_data(teacher, images, fit_data_config(name, teacher.model), DataOptions(), 0)
    assert data.kind == 'top1'
    for index in range(0, 40, 13):
        assert config['label_names'][data.train[index][1]] == Path(data.train.filename(index)).parts[0]


def test_the_options_that_the_teacher_recorded_are_those_of_its_student(images, tmp_path):
    name = save_teacher(tmp_path / 'teacher')
    path = tmp_path / 'teacher' / 'config.json'
    class_map = dict(red='blue', rouge='green', blue='red')
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(vitzoo=dict(data_dir=images, class_map=class_map))))
    command = [name, '--mixer', 'linear', *QUICK, '--no-random-control', '--data-dir', images]
    command += ['--output', str(tmp_path / 'linear')]
    transfer(command)
    config = json.loads((tmp_path / 'linear' / 'config.json').read_text())
    assert (config['vitzoo']['class_map'], config['label_names']) == (class_map, ['blue', 'green', 'red'])
    results = read_results(tmp_path / 'linear')
    assert (results['kind'], results['settings']['data_options']) == ('top1', {})
    # green has its own name in the data
    assert results['settings']['training_images'] == 40
    transfer([*command, '--resume'])


@pytest.mark.parametrize(
    ('recorded', 'options', 'kind', 'sizes', 'about'),
    [
        (
            dict(class_map=dict(red='blue', blue='red')),
            {},
            'top1',
            (27, 7),
            dict(class_map=dict(red='blue', blue='red')),
        ),
        (
            dict(class_map=dict(red='blue')),
            dict(class_map=dict(green='red')),
            'top1',
            # red is in the map, too
            (27, 8),
            dict(class_map=dict(green='red')),
        ),
        (dict(class_map=dict(a='cyan')), {}, 'knn', (40, 11), dict(class_map=dict(a='cyan'))),
        (dict(val_split='dev'), {}, 'knn', (40, 11), {}),
        (dict(val_split='dev'), dict(val_split='val'), 'top1', (40, 11), dict(val_split='val')),
        (dict(val_split='.'), dict(train_split='train'), 'knn', (40, 11), dict(train_split='train')),
    ],
)
def test_recorded_options_are_used_if_others_are_not_given_and_they_suit_the_data(
    recorded, options, kind, sizes, about, images, tmp_path
):
    name = save_teacher(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(config | dict(vitzoo=recorded)))
    teacher = load_model(name)
    data = open_transfer_data(teacher, images, fit_data_config(name, teacher.model), DataOptions(**options), 0)
    assert (data.kind, (len(data.train), len(data.val)), data.about) == (kind, sizes, about)
    # those of the cases with other classes do not suit the data
    (flag,) = map(format_flag, recorded)
    assert (f'without {flag} of its run, because' in data.note) == (kind == 'knn')


@pytest.mark.parametrize(
    ('other', 'end'), [('wasp', 'training classes'), ('greens', 'training classes, did you mean green?')]
)
def test_the_reason_to_measure_by_neighbours_is_without_the_advice_of_other_commands(other, end, teacher, images):
    loaded = load_model(teacher)
    data_config = fit_data_config(teacher, loaded.model)
    data = open_transfer_data(loaded, images, data_config, DataOptions(class_map=dict(green=other)), 0)
    assert data.kind == 'knn' and f"the class '{other}' of " in data.reason and data.reason.endswith(end)


def test_recorded_options_are_not_refused_for_images_without_classes(images, tmp_path):
    name = save_teacher(tmp_path / 'teacher')
    path, recorded = tmp_path / 'teacher' / 'config.json', dict(class_map=dict(red='blue'), val_split='dev')
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(vitzoo=recorded)))
    (tmp_path / 'flat').mkdir()
    for number, file in enumerate(sorted(Path(images).rglob('*.jpg'))[:5]):
        shutil.copy(file, tmp_path / 'flat' / f'{number}.jpg')
    teacher = load_model(name)
    data_config = fit_data_config(name, teacher.model)
    data = open_transfer_data(teacher, str(tmp_path / 'flat'), data_config, DataOptions(), 0)
    assert (data.kind, data.about) == ('cosine', dict(class_map=dict(red='blue')))


def test_the_student_of_a_multi_label_teacher_predicts_several_labels(
    images, tmp_path, quick_timing, capsys, monkeypatch
):
    compared = {}
    for place in ('train.network_loss', 'transfer.outputs', 'transfer.probing', 'transfer.scoring'):

        def compare(logits, teacher_logits, multi_label=False, place=place):
            compared.setdefault(place, set()).add(multi_label)
            return kl_divergence(logits, teacher_logits, multi_label)

        monkeypatch.setattr(f'vitzoo.{place}.kl_divergence', compare)
    name, data = save_multi_label_teacher(tmp_path / 'teacher'), write_label_tables(Path(images), tmp_path / 'data')
    command = [name, '--mixer', 'linear', *QUICK, '--no-random-control', '--data-dir', data]
    transfer([*command, '--keep-softmax', '1', '--output', str(tmp_path / 'linear')])
    assert len(compared) == 4 and all(values == {True} for values in compared.values())
    assert 'measured by the similarity of its features' in capsys.readouterr().out
    results = read_results(tmp_path / 'linear')
    assert (results['kind'], results['teacher']['score']) == ('cosine', pytest.approx(100))
    assert json.loads((tmp_path / 'linear' / 'config.json').read_text())['vitzoo']['multi_label'] is True
    (record,) = validate([str(tmp_path / 'linear'), '--data-dir', data, '--workers', '0'])
    assert (record['n'], record['labelled']) == (11, 11) and record['map'] > 0


@pytest.mark.parametrize(
    ('kind', 'expected'),
    [('table', ('cosine', 40, 11)), ('class folders', ('knn', 40, 11)), ('none', ('cosine', 41, 10))],
)
def test_a_multi_label_teacher_takes_images_of_any_kind(kind, expected, images, tmp_path):
    name, data = save_multi_label_teacher(tmp_path / 'teacher'), images
    if kind != 'class folders':
        data = write_label_tables(Path(images), tmp_path / 'data')
    if kind == 'none':
        for number, path in enumerate(sorted(Path(data).rglob('*.jpg'))):
            path.rename(tmp_path / 'data' / f'{number}.jpg')
        for part in ('train', 'val'):
            shutil.rmtree(tmp_path / 'data' / part)
    teacher = load_model(name)
    data = open_transfer_data(teacher, data, fit_data_config(name, teacher.model), DataOptions(), 0)
    assert (data.kind, len(data.train), len(data.val)) == expected
    assert data.reason and data.about['multi_label'] is True


def save_multi_label_teacher(folder: Path) -> str:
    """The folder of a teacher as `vitzoo train --multi-label` writes it."""
    name = save_teacher(folder)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | dict(vitzoo=dict(multi_label=True))))
    return name


def write_label_tables(images: Path, root: Path) -> str:
    """A copy of images in class folders with tables of labels instead: each has its class, and green is also red."""
    for part in ('train', 'val'):
        (root / part).mkdir(parents=True)
        rows = ['file,labels']
        for path in sorted((images / part).rglob('*.jpg')):
            label, name = path.parent.name, f'{path.parent.name}{path.name}'
            shutil.copy(path, root / part / name)
            rows.append(f'{name},{"green;red" if label == "green" else label}')
        (root / part / 'labels.csv').write_text('\n'.join(rows))
    return str(root)


@pytest.mark.parametrize('kind', ['none', 'other'])
def test_a_student_knows_what_its_teacher_held_out(kind, images, tmp_path, quick_timing):
    name, known, pool = save_teacher(tmp_path / 'teacher'), tmp_path / 'known', tmp_path / 'pool'
    shutil.copytree(Path(images) / 'val', known)
    val_set = open_dataset(str(known), 'val', val_fraction=0.3)
    write_held_out(tmp_path / 'teacher' / 'held_out.csv', val_set.reader)
    for number, file in enumerate(sorted(Path(images, 'train').rglob('*.jpg'))):
        folder = pool / (file.parent.name if kind == 'other' else '')
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / f'{number}.jpg')
    options = ['--mixer', 'linear', *QUICK, '--no-random-control', '--data-dir', str(pool)]
    transfer([name, *options, '--output', str(tmp_path / 'linear')])
    expected = {str(known): len(val_set)} | ({str(pool): 9} if kind == 'other' else {})
    for folder, number in expected.items():
        (record,) = validate([str(tmp_path / 'linear'), '--data-dir', folder, '--workers', '0'])
        assert record['n'] == number


def test_a_student_that_is_stopped_before_its_held_out_images_are_listed_is_no_model(
    teacher, images, tmp_path, monkeypatch
):
    def stop(*args):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr('vitzoo.transfer.stages.write_held_out', stop)
    options = ['--mixer', 'linear', *QUICK, '--no-random-control', '--data-dir', images]
    assert transfer([teacher, *options, '--output', str(tmp_path)]) is None
    assert (tmp_path / 'transfer.json').is_file() and not (tmp_path / 'model.safetensors').exists()


def test_images_without_classes_are_validated_on_their_val_split(images, tmp_path):
    name = save_teacher(tmp_path / 'teacher')
    files = sorted(Path(images).rglob('*.jpg'))
    for part, number in dict(train=8, val=2).items():
        (tmp_path / 'flat' / part).mkdir(parents=True)
        for index in range(number):
            shutil.copy(files.pop(), tmp_path / 'flat' / part / f'{index}.jpg')
    teacher = load_model(name)
    data_config = fit_data_config(name, teacher.model)
    data = open_transfer_data(teacher, str(tmp_path / 'flat'), data_config, DataOptions(), 0)
    assert (data.kind, len(data.train), len(data.val)) == ('cosine', 8, 2)
    assert {Path(data.val.filename(index)).parts[-2] for index in range(2)} == {'val'}


def test_probing_alone_writes_nothing(teacher, images, tmp_path, capsys):
    (found,) = transfer([teacher, '--mixer', 'performer', *QUICK, '--data-dir', images, '--probe-only'])
    assert [cost['path'] for cost in found['probe']] == ['blocks.0.attn', 'blocks.1.attn']
    assert 'performer, one block at a time' in capsys.readouterr().out


WRONG = {
    'unknown mixer': ('{teacher} --mixer lz --data-dir {images} --output {out}', "Unknown mixer 'lz'"),
    'no mixer': ('{teacher} --mixer , --data-dir {images} --output {out}', 'names no mixer'),
    'no teacher': ('vit_tinny --mixer ls --data-dir {images} --output {out}', "unknown model 'vit_tinny'"),
    'random weights': ('deit_softmax_tiny --mixer ls --data-dir {images} --output {out}', 'there are no weights'),
    'not swappable': ('{resnet} --mixer ls --data-dir {images} --output {out}', 'cannot replace the attention'),
    'no images': ('{teacher} --mixer ls --data-dir {out}/none --output {out}', 'does not exist'),
    'empty': ('{teacher} --mixer ls --data-dir {empty} --output {out}', 'no images'),
    'split': ('{teacher} --mixer ls --data-dir {images} --train-split trian --output {out}', 'did you mean train'),
    'split of images without classes': (
        '{teacher} --mixer ls --data-dir {flat} --train-split . --output {out}',
        'no class folders',
    ),
    'class map': (
        '{teacher} --mixer ls --data-dir {images} --class-map no.txt --output {out}',
        'cannot read the class',
    ),
    'key': ('{teacher} --mixer ls --data-dir {images} --input-key img --output {out}', 'no input key'),
    'tolerance': (
        '{teacher} --mixer ls --data-dir {images} --tolerance nan --output {out}',
        "'nan' is not a number of 0 or more",
    ),
    'channels': ('{two} --mixer ls --data-dir {images} --output {out}', 'in_chans is 2'),
    'grid': ('{teacher} --mixer ls --data-dir {images} --img-size 8 --output {out}', 'single row or column'),
    'positions': ('{rope} --mixer pool --data-dir {images} --output {out}', 'would lose its rotary positions'),
    'argument': (
        '{teacher} --mixer ls --mixer-kwargs rang=2 --data-dir {images} --output {out}',
        "--mixer-kwargs: ls does not take the argument 'rang', did you mean rank?",
    ),
    'argument of the swap': (
        '{teacher} --mixer ls --mixer-kwargs blocks=[0] --data-dir {images} --output {out}',
        "'blocks' is not an argument of the mixer ls",
    ),
    'ambiguous argument': (
        '{teacher} --mixer ls,linear --mixer-kwargs rank=2 --data-dir {images} --output {out}',
        'is ambiguous',
    ),
    'no output': ('{teacher} --mixer ls --data-dir {images}', '--output is missing'),
    'labels without classes': (
        '{teacher} --mixer ls --data-dir {flat} --labels --output {out}',
        'no class folders; leave --labels out$',
    ),
    'labels without a head': (
        '{headless} --mixer ls --data-dir {images} --labels --output {out}',
        'but it has no head; leave --labels out',
    ),
    'labels with several per image': (
        '{several} --mixer ls --data-dir {labelled} --labels --output {out}',
        '--labels learns one class per image, but .* predicts several labels; leave --labels out$',
    ),
    'training option': (
        '{teacher} --mixer ls --data-dir {images} --output {out} --model-ema --model-ema-decay 2',
        'model_ema_decay must be from 0 to 1, not 2',
    ),
    'tracker': ('{teacher} --mixer ls --data-dir {images} --output {out} --log-with paper', "unknown tracker 'paper'"),
    'another run': ('{teacher} --mixer ls --data-dir {images} --output {run} --resume', 'that is not of a transfer'),
    'broken teacher': ('{broken} --mixer ls --data-dir {images} --output {out}', 'weights blocks.0.* are not finite'),
    'half a size': (
        '{teacher} --mixer ls --data-dir {images} --img-size 64x --output {out}',
        "'64x' is not a size such",
    ),
    'too many blocks': (
        '{teacher} --mixer ls --data-dir {images} --output {out} --keep-softmax 2',
        '0 to 1 of 2 blocks',
    ),
}


@pytest.fixture(scope='module')
def places(teacher, images, tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp('places')
    (root / 'empty').mkdir()
    resnet = timm.create_model('test_resnet', num_classes=3)
    timm.models.save_for_hf(resnet, str(root / 'resnet'), safe_serialization=True)
    places = dict(teacher=teacher, images=images, resnet=str(root / 'resnet'), empty=str(root / 'empty'))
    rope = save_teacher(root / 'rope', name='vit_small_patch16_dinov3')
    for name, file in dict(flat='a.jpg', run='recipe.yaml').items():
        (root / name).mkdir()
        shutil.copy(next(Path(images).rglob('*.jpg')), root / name / file)
    shutil.copy(root / 'flat' / 'a.jpg', root / 'flat' / 'b.jpg')
    places |= dict(flat=str(root / 'flat'), run=str(root / 'run'), headless=save_teacher(root / 'none', num_classes=0))
    places |= dict(several=save_multi_label_teacher(root / 'several'))
    places |= dict(labelled=write_label_tables(Path(images), root / 'labelled'))
    broken = timm.create_model(f'local-dir:{teacher}', pretrained=True)
    torch.nn.init.constant_(broken.blocks[0].attn.proj.weight, math.nan)
    timm.models.save_for_hf(broken, str(root / 'broken'), safe_serialization=True)
    return places | dict(two=save_teacher(root / 'two', in_chans=2), rope=rope, broken=str(root / 'broken'))


@pytest.mark.parametrize('case', WRONG)
def test_wrong_inputs_are_refused_in_one_sentence_before_any_work(case, places, tmp_path, monkeypatch):
    monkeypatch.setattr('vitzoo.transfer.measurements.probe', lambda *args: 1 / 0)
    command, message = WRONG[case]
    with pytest.raises(UserError, match=message) as error:
        transfer([*split(command.format(**places, out=tmp_path / 'out')), '--workers', '0'])
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'out').exists()


def test_a_config_file_gives_options_and_the_command_line_takes_precedence(tmp_path):
    file = tmp_path / 'transfer.yaml'
    file.write_text(
        'steps: 7\nlr: 1.0e-3\nsizes: [32, 64]\nno_random_control: true\nmixer_kwargs: {rank: 2}\nresume: false'
        '\nworkers: 0'
    )
    options = parse_args(['teacher', '--config', str(file), *split('--mixer ls --data-dir x --output y --steps 3')])
    assert (options.steps, options.lr, options.sizes) == (3, 1e-3, (32, 64))
    assert (options.random_control, options.mixer_kwargs, options.resume) == (False, {'ls': {'rank': 2}}, False)
    # also on a machine whose default is higher
    assert options.workers == 0
    file.write_text('stepps: 7')
    with pytest.raises(UserError, match=r"unknown option 'stepps' .* did you mean steps"):
        parse_args(['teacher', '--config', str(file)])
    # it would print the help and end
    file.write_text('help: true')
    with pytest.raises(UserError, match="unknown option 'help' in"):
        parse_args(['teacher', '--config', str(file), *split('--mixer ls --data-dir x --output y')])


@pytest.mark.parametrize(
    'path',
    sorted((Path(__file__).parents[2] / 'configs' / 'transfer').glob('*.yaml')),
    ids=lambda path: path.stem,
)
def test_the_configs_of_transfer_are_valid(path):
    parse_args(['teacher', '--config', str(path), *split('--mixer ls --data-dir x --output y')])


@pytest.mark.parametrize(
    ('mixer', 'controls'), [('ls', ('zero', 'local', 'global', 'random')), ('gated_linear', ('zero', 'random'))]
)
@pytest.mark.parametrize('keep_softmax', [0, 2, 'auto'])
def test_the_table_of_scores_fits_a_terminal(mixer, controls, keep_softmax):
    score = dict(score=88.88)
    result = dict.fromkeys(('teacher', 'start', 'matched', 'hybrid', 'student'), score)
    result |= dict(controls=dict.fromkeys(controls, score), settings=dict(mixer=mixer, keep_softmax=keep_softmax))
    output = io.StringIO()
    print_scores(Console(file=output, width=80), [result | dict(seconds=dict(matching=900))], 'top1')
    _title, *heads, row = output.getvalue().splitlines()
    assert '…' not in output.getvalue() and ('hybrid' in heads[-1]) == bool(keep_softmax)
    assert row.split() == [mixer, *['88.88'] * (4 + bool(keep_softmax) + len(controls)), '15.0']


def test_the_report_shows_scores_speed_and_tokens_of_a_transfer(finished):
    results = read_transfer(str(finished))['transfer']
    results['images_per_second'] = {'224': dict(teacher=100.0, student=80.0, doubt='busy machine')}
    assert 'These speeds are unreliable (busy machine): measure again' in explain_result('ls', results)
    results['seconds'] = dict(matching=90.0, network=30.0)
    other = dict(model='other', name='other', index=1)
    section = tag('div', transfer_section([dict(model='ls', name='ls', index=0, transfer=results), other]))
    text = to_html(section)
    for score in (results['teacher'], results['matched'], results['controls']['zero'], results['controls']['random']):
        assert f'{score["score"]:.2f} %' in text
    assert 'Score against speed at 224 pixels' in text and 'These speeds are unreliable: busy machine.' in text
    assert 'Tokens of ls and its teacher' in text
    others = [
        dict(model=name, name=name, index=index, transfer=_taught_by(results, f'study/{name}/seed-0'))
        for index, name in enumerate(('cvt', 'vil', 'vil'))
    ]
    text = to_html(tag('div', transfer_section(others)))
    assert 'teacher cvt/seed-0: ' in text and 'teacher vil/seed-0: ' in text
    assert [cell.text for cell in section.iter('td')][11] == '2.0'
    assert transfer_section([other]) == []
    assert read_transfer(str(finished / 'none')) == {}


def test_blocks_of_a_single_token_have_no_similarity_in_the_report(finished):
    results = read_transfer(str(finished))['transfer']
    record = dict(model='ls', name='ls', index=0, transfer=results)
    # as the report writes what is not a number
    results['oversmoothing'] = dict(student=dict(mean=[0.25, None]), teacher=dict(mean=[None, None]))
    text = to_html(tag('div', transfer_section([record])))
    assert '<td>0.25</td><td>–</td>' in text and 'student, block 1: 0.250' in text and 'block 2' not in text
    results['oversmoothing']['student']['mean'] = [None, None]
    assert 'Tokens of ls and its teacher' not in to_html(tag('div', transfer_section([record])))


def test_a_teacher_has_the_symbol_of_its_row_on_the_page_or_one_that_no_model_has(finished):
    results = read_transfer(str(finished))['transfer']
    taught = [('a', 'runs/listed/'), ('b', 'runs/absent'), ('c', 'elsewhere'), ('d', 'runs/absent')]
    records = [
        dict(model=name, name=name, index=index, transfer=_taught_by(results, teacher))
        for index, (name, teacher) in enumerate(taught)
    ]
    section = tag('div', transfer_section([*records, dict(model='runs/listed', name='listed', index=4)]))
    charts = [{path.get('data-model') for path in svg.iter('path')} - {None} for svg in section.iter('svg')]
    assert charts[-4:] == [{'0', '4'}, {'1', '5'}, {'2', '6'}, {'3', '5'}]


def _taught_by(results: dict, teacher: str) -> dict:
    return results | dict(settings=results['settings'] | dict(teacher=teacher))


def test_a_teacher_that_its_config_has_at_another_size_is_one_sentence(images, tmp_path):
    kwargs = dict(embed_dim=24, num_heads=2, depth=2, num_classes=3, img_size=64, neck_chans=8, window_size=2)
    model = timm.create_model('samvit_base_patch16_224', global_attn_indexes=(0,), **kwargs)
    timm.models.save_for_hf(model, str(tmp_path / 'sam'), safe_serialization=True)
    argv = [str(tmp_path / 'sam'), '--mixer', 'ls', *QUICK, '--data-dir', images, '--output', str(tmp_path / 'out')]
    # timm writes the size of the name
    with pytest.raises(UserError, match='cannot take 224 x 224 pixels; choose another --img-size'):
        transfer(argv)
    assert not (tmp_path / 'out').exists()
