"""Files of predictions: accuracies computed from them are those of the evaluation."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from processes import start_processes
from timm.models import save_for_hf

from vitzoo.errors import UserError
from vitzoo.validate import main
from vitzoo.validate.command import validate
from vitzoo.validate.predictions import read_predictions, write_predictions

NAMES = [f'class {i}' for i in range(7)]

pytestmark = pytest.mark.usefixtures('quick_timing')


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    """Noise in six of the model's seven classes; 11 images, so that batches of 4 leave a remainder."""
    root = tmp_path_factory.mktemp('data')
    random = np.random.default_rng(0)
    for i in range(11):
        file = root / 'val' / NAMES[i % 6] / f'{i}.png'
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(32, 32, 3), dtype=np.uint8)).save(file)
    return root


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('runs')
    torch.manual_seed(5)
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=1, num_classes=7)
    torch.nn.init.normal_(model.head.weight)
    save_for_hf(model, folder, model_config=dict(label_names=NAMES), safe_serialization=True)
    return folder


def save(data: Path, trained: Path, file: Path) -> dict:
    argv = [trained, '--data-dir', data, '--batch-size', 4, '--workers', 0, '--save-predictions', file]
    return validate([*map(str, argv)])[0]


@pytest.mark.parametrize('name', ('predictions.csv', 'new/predictions.npz', 'P.NPZ'))
def test_accuracies_computed_again_are_those_reported(name, data, trained, tmp_path, capsys):
    file = tmp_path / name
    record = save(data, trained, file)
    assert 0 < record['top1'] < record['top5'] < 100
    capsys.readouterr()
    (again,) = validate(['--from-predictions', str(file), '--results-file', str(tmp_path / 'again.csv')])
    assert all(again[key] == record[key] for key in ('n', 'top1', 'top5', 'loss'))
    assert f'top-1 {record["top1"]:.2f} %' in capsys.readouterr().out
    with open(tmp_path / 'again.csv', newline='') as rows:
        (row,) = csv.DictReader(rows)
    assert float(row['top1']) == record['top1'] and row['params'] == ''


def test_the_table_of_predictions_is_readable_by_itself(data, trained, tmp_path):
    file = tmp_path / 'predictions.csv'
    record = save(data, trained, file)
    with open(file, newline='') as table:
        rows = list(csv.DictReader(table))
    assert [int(row['index']) for row in rows] == list(range(11))
    assert all((data / 'val' / row['file']).is_file() for row in rows)
    assert all(row['label_name'] == Path(row['file']).parent.name == NAMES[int(row['label'])] for row in rows)
    assert all(row['top2_name'] == NAMES[int(row['top2'])] for row in rows)
    assert sum(row['top1_name'] == row['label_name'] for row in rows) * 100 / 11 == record['top1']
    assert all(1 >= float(row['prob1']) >= float(row['prob2']) >= float(row['prob5']) >= 0 for row in rows)


def test_names_that_are_not_unicode_are_written_and_read(data, trained, tmp_path):
    copied = shutil.copytree(data, tmp_path / 'data')
    image = next((copied / 'val').rglob('*.*'))
    image.rename(image.parent / os.fsdecode(b'bad\xff\xfe' + os.fsencode(image.suffix)))
    record = save(copied, trained, tmp_path / 'predictions.csv')
    assert b'bad\xff\xfe' in (tmp_path / 'predictions.csv').read_bytes()
    argv = ['--from-predictions', tmp_path / 'predictions.csv', '--errors', tmp_path / 'errors', '--data-dir', copied]
    (again,) = validate([*map(str, argv)])
    assert again['top1'] == record['top1'] < 100


def test_the_logits_of_each_image_are_kept(data, trained, tmp_path):
    save(data, trained, tmp_path / 'predictions.npz')
    predictions = read_predictions(tmp_path / 'predictions.npz')
    model = timm.create_model(f'local-dir:{trained}', pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    for i in (0, 5, 10):
        with Image.open(data / 'val' / predictions.files[i]) as image, torch.no_grad():
            logits = model(transform(image)[None])[0]
        torch.testing.assert_close(predictions.columns['logits'][i], logits, rtol=1e-4, atol=1e-4)
    probabilities = predictions.columns['logits'].softmax(dim=1).topk(5).values
    torch.testing.assert_close(predictions.columns['prob'], probabilities)
    assert predictions.class_names == dict(enumerate(NAMES))


@pytest.mark.parametrize(
    ('names', 'expected'),
    [
        # as a training with a larger num_classes leaves them; one of the classes is called like the number of another
        (['7'], ['7', 'class 7', '8', '9', '10', '11']),
        # as in models of others
        (['crane', 'paper', 'crane'], ['crane (6)', 'paper', 'crane (8)', '9', '10', '11']),
    ],
    ids=('numbers', 'equal'),
)
def test_classes_beyond_those_of_the_data_are_numbered(data, tmp_path, names, expected):
    names = [*NAMES[:6], *names]
    torch.manual_seed(5)
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=1, num_classes=12)
    torch.nn.init.normal_(model.head.weight)
    save_for_hf(model, tmp_path / 'run', model_config=dict(label_names=names), safe_serialization=True)
    argv = [tmp_path / 'run', '--data-dir', data, '--workers', 0, '--errors', tmp_path / 'errors']
    for name in ('predictions.csv', 'predictions.npz'):
        validate([*map(str, argv), '--save-predictions', str(tmp_path / name)])
    expected = dict(enumerate([*NAMES[:6], *expected]))
    assert read_predictions(str(tmp_path / 'predictions.npz')).class_names == expected
    # only classes that occur
    assert read_predictions(str(tmp_path / 'predictions.csv')).class_names.items() <= expected.items()
    assert (tmp_path / 'errors').is_dir()


def test_images_of_a_name_that_two_classes_have_are_refused(data, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / 'run')
    config = json.loads((run / 'config.json').read_text())
    config['label_names'][0] = config['label_names'][6] = 'crane'
    (run / 'config.json').write_text(json.dumps(config))
    copied = shutil.copytree(data, tmp_path / 'data')
    (copied / 'val' / 'class 0').rename(copied / 'val' / 'crane')
    with pytest.raises(UserError, match=r"the class 'crane' of .* is not one of .*, did you mean crane \([06]\)"):
        save(copied, run, tmp_path / 'predictions.csv')


def test_several_labels_for_an_image(data, trained, tmp_path, capsys):
    val, run = shutil.copytree(data, tmp_path / 'photos') / 'val', shutil.copytree(trained, tmp_path / 'run')
    names = sorted(path.relative_to(val).as_posix() for path in val.rglob('*.png'))
    labels = ['', *(f'{name.split("/")[0]};{NAMES[number % 7]}' for number, name in enumerate(names[1:]))]
    (val / 'labels.csv').write_text('\n'.join(['file,labels', *map(','.join, zip(names, labels))]))
    config = json.loads((run / 'config.json').read_text())
    (run / 'config.json').write_text(json.dumps(config | dict(vitzoo=dict(multi_label=True))))
    argv = [str(run), '--data-dir', str(tmp_path / 'photos'), '--workers', '0', '--save-predictions']
    (record,) = validate([*argv, str(tmp_path / 'predictions.npz'), '--corrupt'])
    (again,) = validate(['--from-predictions', str(tmp_path / 'predictions.npz')])
    assert 0 < record['map'] < 100 and (record['n'], record['labelled']) == (11, 10)
    assert all(again[key] == record[key] for key in ('n', 'labelled', 'top1', 'top5', 'loss', 'map'))
    assert f'mAP {record["map"]:.2f} %, 11 images' in capsys.readouterr().out
    with pytest.raises(UserError, match='one label'):
        validate(['--from-predictions', str(tmp_path / 'predictions.npz'), '--errors', str(tmp_path / 'errors')])
    # one image has no label
    assert (record['corrupt']['fog'][0] * 10 / 100) == pytest.approx(round(record['corrupt']['fog'][0] * 10 / 100))
    with pytest.raises(UserError, match='save the predictions as .npz'):
        validate([*argv, str(tmp_path / 'predictions.csv')])


def test_the_error_analysis_of_predictions_is_that_of_the_model(data, trained, tmp_path, capsys):
    npz, table = tmp_path / 'predictions.npz', tmp_path / 'predictions.csv'
    argv = [trained, '--data-dir', data, '--batch-size', 4, '--workers', 0, '--save-predictions', npz]
    (record,) = validate([*map(str, argv), '--errors', str(tmp_path / 'model')])
    write_predictions(table, read_predictions(npz))
    capsys.readouterr()
    argv = ['--from-predictions', table, '--errors', tmp_path / 'again', '--data-dir', data]
    (again,) = validate([*map(str, argv)])
    assert again['ece'] == record['ece'] and f'{record["ece"]:.2f} %' in capsys.readouterr().out
    files = {path.name: path.read_bytes() for path in (tmp_path / 'model').iterdir()}
    assert len(files) == 7 and files == {path.name: path.read_bytes() for path in (tmp_path / 'again').iterdir()}
    # without --data-dir, everything but the images
    validate(['--from-predictions', str(npz), '--errors', str(tmp_path / 'blind')])
    del files['confused.png']
    assert files == {path.name: path.read_bytes() for path in (tmp_path / 'blind').iterdir()}


def test_the_images_to_show_are_those_of_the_predictions(data, trained, tmp_path):
    save(data, trained, tmp_path / 'predictions.csv')
    other = shutil.copytree(data, tmp_path / 'other')
    (other / 'val' / NAMES[0] / '6.png').unlink()
    argv = ['--from-predictions', str(tmp_path / 'predictions.csv'), '--errors', str(tmp_path / 'errors')]
    with pytest.raises(UserError, match="'class 0/6.png' is not among the 10 images of"):
        validate([*argv, '--data-dir', str(other)])


def validate_in_process(argv: list[str]) -> None:
    validate(argv)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_write_the_file_of_one_and_count_the_same_under_corruptions(data, trained, tmp_path):
    argv = [trained, '--data-dir', data, '--batch-size', 4, '--workers', 0, '--corrupt']
    save = ['--save-predictions', tmp_path / 'two.csv', '--results-file', tmp_path / 'two.json']
    outcome = start_processes(2, validate_in_process, [*map(str, (*argv, *save))])
    assert outcome.codes == [0, 0], outcome.err
    (record,) = validate([*map(str, argv), '--save-predictions', str(tmp_path / 'one.csv')])
    one, two = (read_predictions(tmp_path / name) for name in ('one.csv', 'two.csv'))
    assert one.files == two.files and one.class_names == two.class_names
    assert torch.equal(one.columns['top'], two.columns['top'])
    (other,) = json.loads((tmp_path / 'two.json').read_text())
    assert all(other[key] == record[key] for key in ('n', 'top1', 'top5', 'corrupt_top1', 'corrupt'))


@pytest.mark.parametrize('name', ('nothing.csv', 'nothing.npz', 'text.csv', 'text.npz', 'empty.csv', 'other.csv'))
def test_a_file_of_something_else_is_refused(name, tmp_path):
    contents = {'text': 'not a table of predictions', 'empty': '', 'other': 'label,top1\nred,1\n'}
    if name.split('.')[0] in contents:
        (tmp_path / name).write_text(contents[name.split('.')[0]])
    with pytest.raises(UserError, match=name):
        read_predictions(tmp_path / name)


@pytest.mark.parametrize('content', [b'\x00\x01,\xff\n1,2,3\n', b'label,prob1\n' + 200_000 * b'1', b'a\n1,2\n'])
def test_a_table_that_cannot_be_read_is_refused(content, tmp_path):
    (tmp_path / 'binary.csv').write_bytes(content)
    with pytest.raises(UserError, match='is not a file written by --save-predictions'):
        read_predictions(str(tmp_path / 'binary.csv'))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(label=[0, 1, 2]), r"names 4 images, but its column 'label' has the shape \(3,\)"),
        (dict(files=['a']), r"names 1 images, but its column 'label' has the shape \(4,\)"),
        (dict(loss=1.0), r"names 4 images, but its column 'loss' has the shape \(\)"),
        (dict(label=[[0, 1]] * 4), r"its column 'label' has the shape \(4, 2\)"),
        (
            dict(prob=[[0.5]] * 4),
            r"'top' of the shape \(4, 2\) and 'prob' of \(4, 1\), which must be equal and not empty",
        ),
        (
            dict(top=[[]] * 4, prob=[[]] * 4),
            r"'top' of the shape \(4, 0\) and 'prob' of \(4, 0\), which must be equal and not empty",
        ),
        (dict(label=[[True, False, False]] * 4), r'several labels per image, but no logits of their shape \(4, 3\)'),
        (dict(label=[[True, False]] * 4, logits=[[0.0] * 3] * 4), r'but no logits of their shape \(4, 2\)'),
        (dict(prob=[[1.7, 0.1]] * 4), 'has the probability 1.7, which is not between 0 and 1'),
        (dict(prob=[[0.5, -0.1]] * 4), 'has the probability -0.1, which is not between 0 and 1'),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(tmp_path, changes, message):
    columns = dict(files=list('abcd'), class_names=list('xyz'), label=[0, 1, 2, 0], loss=[1.0] * 4)
    columns |= dict(top=[[0, 1]] * 4, prob=[[0.75, 0.25 + 1e-7]] * 4)
    np.savez(tmp_path / 'right.npz', **columns)
    assert len(read_predictions(str(tmp_path / 'right.npz')).files) == 4
    np.savez(tmp_path / 'wrong.npz', **columns | changes)
    with pytest.raises(UserError, match=message + '; give a file as --save-predictions wrote it'):
        validate(['--from-predictions', str(tmp_path / 'wrong.npz'), '--errors', str(tmp_path / 'errors')])
    assert not any((tmp_path / 'errors').iterdir())


@pytest.mark.parametrize(
    ('name', 'column', 'wrong'),
    [('p.csv', 'label', -1), ('p.csv', 'top', -1), ('p.npz', 'label', -1), ('p.npz', 'top', 7)],
)
def test_classes_that_do_not_exist_are_refused(data, trained, tmp_path, name, column, wrong):
    file = str(tmp_path / name)
    save(data, trained, file)
    predictions = read_predictions(file)
    predictions.columns[column].view(-1)[0] = wrong
    # a table has the name of each number in it
    predictions.class_names |= {wrong: 'other'} if name == 'p.csv' else {}
    write_predictions(file, predictions)
    with pytest.raises(UserError, match=f"has {wrong} in its column '{column}'"):
        read_predictions(file)


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        ([], 'name at least one MODEL'),
        (['test_resnet', '--from-predictions', 'a.csv'], 'name at least one MODEL'),
        (
            ['test_resnet', '--no-data', '--save-predictions', 'a.csv'],
            '--save-predictions needs images: drop --no-data',
        ),
        (['--from-predictions', 'a.csv', '--corrupt'], '--corrupt needs a MODEL'),
        (['--from-predictions', 'a.csv', '--plot', 'a.png'], '--plot needs a MODEL'),
        (['--from-predictions', 'a.csv', '--img-size', '32'], '--img-size needs a MODEL'),
        (['--from-predictions', 'a.csv', '--data-dir', 'photos'], 'only for the images that --errors shows'),
        (['test_v*', '--save-predictions', 'a.csv'], '--save-predictions a.csv is for one model'),
        (
            ['test_resnet', '--results-file', 'a.csv', '--save-predictions', './a.csv'],
            "--results-file and --save-predictions are both './a.csv'",
        ),
        (
            ['test_resnet', '--plot', 'a/confused.png', '--errors', 'a'],
            "--plot and --errors are both 'a/confused.png'",
        ),
        (
            ['--from-predictions', 'a.csv', '--results-file', 'a.csv'],
            "--from-predictions and --results-file are both 'a.csv'",
        ),
        (['test_resnet', '--save-predictions', 'a.json'], "'a.json': its name must end in .csv or .npz"),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, list) else '',
)
def test_a_mistake_gets_one_sentence(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(('name', 'column'), [('old.csv', 'loss'), ('old.npz', 'loss'), ('old.npz', 'logits')])
def test_predictions_that_are_not_finite_have_no_accuracy(data, trained, tmp_path, capsys, name, column):
    file = tmp_path / name
    save(data, trained, file)
    predictions = read_predictions(str(file))
    predictions.columns[column][3] = torch.nan
    write_predictions(str(file), predictions)
    with pytest.raises(SystemExit) as end:
        main(['--from-predictions', str(file)])
    error = capsys.readouterr().err
    assert end.value.code == 2 and f'the {column} of {predictions.files[3]} in ' in error and 'not finite' in error
