"""`vitzoo predict`: probabilities and class names for folders, globs, archives and broken images."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models import save_for_hf

from vitzoo.classes import class_names, number_rest
from vitzoo.data.unlabelled import find_files
from vitzoo.errors import UserError
from vitzoo.predict import main, predict

ROOT = Path(__file__).parents[2]
NAMES = ['blue', 'green', 'red']
LABELS = ('label', 'label2', 'label3')
PROBABILITIES = ('probability', 'probability2', 'probability3')


@pytest.fixture(scope='module')
def images(tmp_path_factory) -> Path:
    """Seven images in three folders, a text file and hidden files."""
    root = tmp_path_factory.mktemp('images')
    for i, name in enumerate(
        ('10.png', '9.png', 'sea/a.JPG', 'sea/deep/b.png', 'sky/c.webp', 'sky/d.bmp', 'sky/e.tif')
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((40, 36)).save(root / name)
    (root / 'notes.txt').write_text('x')
    for name in ('.hidden/f.png', 'sea/.g.png'):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes((root / '9.png').read_bytes())
    return root


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp('runs') / 'deit')


def save_model(folder: Path, num_classes: int = 3, label_names: list[str] | dict | None = NAMES, **about) -> Path:
    """Write a random model as training does."""
    torch.manual_seed(0)
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=2, num_classes=num_classes)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    config = dict(label_names=label_names, vitzoo=about)
    save_for_hf(model, folder, model_config=config, safe_serialization=True)
    return folder


def rows_of(path: Path, *argv) -> list[dict]:
    """Predict to a CSV file, and read it."""
    predict([*map(str, argv), '--out', str(path / 'out.csv'), '--workers', '0'])
    with open(path / 'out.csv', newline='') as file:
        return list(csv.DictReader(file))


def fails(capsys, *argv) -> str:
    """Run the command, which must end with exit code 2 and one sentence on stderr, and return that sentence."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, argv), '--workers', '0'])
    assert end.value.code == 2
    output, error = capsys.readouterr()
    assert output == ''
    assert error.startswith('vitzoo: error: ') and error.count('\n') == 1, error
    return error


def test_an_image_gets_the_probabilities_that_timm_gives_it(images, trained, tmp_path):
    model = timm.create_model(f'local-dir:{trained}', pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    rows = rows_of(tmp_path, images, '--model', trained)
    assert [row['file'].removeprefix(f'{images}/') for row in rows] == [
        '9.png', '10.png', 'sea/a.JPG', 'sea/deep/b.png', 'sky/c.webp', 'sky/d.bmp', 'sky/e.tif'
    ]  # fmt: skip
    assert len({row['probability'] for row in rows}) == 7
    for row in rows:
        with torch.no_grad():
            probabilities = model(transform(Image.open(row['file']).convert('RGB'))[None]).softmax(1)[0]
        order = probabilities.argsort(descending=True).tolist()
        assert [row[key] for key in LABELS] == [NAMES[label] for label in order]
        values = [float(row[key]) for key in PROBABILITIES]
        assert values == pytest.approx(probabilities[order].tolist(), abs=1e-5)
        assert len(row) == 7


@pytest.mark.parametrize('options', (['--batch-size', '1'], ['--batch-size', '2', '--workers', '2']), ids=' '.join)
def test_batches_and_workers_change_nothing(images, trained, tmp_path, options):
    argv = [str(images), '--model', str(trained), '--out']
    predict([*argv, str(tmp_path / 'a.csv')])
    predict([*argv, str(tmp_path / 'b.csv'), *options])
    with open(tmp_path / 'a.csv', newline='') as one, open(tmp_path / 'b.csv', newline='') as other:
        pairs = list(zip(csv.DictReader(one), csv.DictReader(other), strict=True))
    assert len(pairs) == 7
    for expected, row in pairs:
        assert [row[key] for key in ('file', *LABELS)] == [expected[key] for key in ('file', *LABELS)]
        # floats differ in their last bits between batch sizes, which may round to the next digit
        probabilities = [float(expected[key]) for key in PROBABILITIES]
        assert [float(row[key]) for key in PROBABILITIES] == pytest.approx(probabilities, abs=1.01e-5)


def test_json_has_a_list_of_labels_for_each_file(images, trained, tmp_path, capsys):
    out = tmp_path / 'new' / 'out.json'
    predict([str(images / '9.png'), '--model', str(trained), '--top-k', '2', '--out', str(out)])
    (record,) = json.loads(out.read_text())
    assert capsys.readouterr().out == f'wrote {out}\n'
    assert record['file'] == str(images / '9.png')
    assert [list(item) for item in record['predictions']] == [['label', 'probability']] * 2
    assert record['predictions'][0]['probability'] > record['predictions'][1]['probability']


def test_a_pipe_gets_csv_and_a_terminal_a_table(images, trained, capsys, monkeypatch):
    # a long path would be folded in the table
    monkeypatch.chdir(images)
    argv = ['.', '--model', str(trained), '--workers', '0']
    predict(argv)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == 'file,label,probability,label2,probability2,label3,probability3'
    assert [row.count(',') for row in rows] == [6] * 7
    monkeypatch.setattr('sys.stdout.isatty', lambda: True)
    predict(argv)
    table = capsys.readouterr().out
    assert ',label' not in table and 'other classes' in table
    assert all(row.partition(',')[0] in table for row in rows)


def test_a_terminal_has_words_and_a_file_the_names_of_classes_that_are_wordnet_ids(
    images, tmp_path, capsys, monkeypatch
):
    names = ['n01440764', 'n02102040', 'n02979186']
    run = save_model(tmp_path / 'run', label_names=names)
    argv = [str(images / '9.png'), '--model', str(run), '--workers', '0']
    predict([*argv, '--out', str(tmp_path / 'out.csv')])
    assert sorted((tmp_path / 'out.csv').read_text().splitlines()[1].split(',')[1::2]) == names
    monkeypatch.setattr('sys.stdout.isatty', lambda: True)
    predict(argv)
    table = capsys.readouterr().out
    assert all(word in table for word in ('tench', 'springer', 'player')) and 'n0' not in table


def test_unreadable_images_are_named_and_the_others_done(images, trained, tmp_path, capsys):
    whole = (images / '9.png').read_bytes()
    for name, content in {'a.png': whole, 'b.jpg': b'text', 'c.png': whole[:100], 'd.png': whole, 'e.gif': b''}.items():
        (tmp_path / name).write_bytes(content)
    argv = [str(tmp_path), '--model', str(trained), '--workers', '0', '--out']
    with pytest.raises(SystemExit) as end:
        main([*argv, str(tmp_path / 'out.csv')])
    assert end.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(': ')[2] for line in lines] == [
        f'cannot read {tmp_path}/b.jpg: it is not an image',
        f'cannot read {tmp_path}/c.png: image file is truncated',
        f'cannot read {tmp_path}/e.gif: it is not an image',
    ]
    rows = (tmp_path / 'out.csv').read_text().splitlines()[1:]
    assert [row.partition(',')[0] for row in rows] == [f'{tmp_path}/a.png', f'{tmp_path}/d.png']
    # a damaged image does not affect the others in its batch
    assert len({row.partition(',')[2] for row in rows}) == 1
    assert predict([*argv, str(tmp_path / 'out.json')]) == [
        f'{tmp_path}/{name}' for name in ('b.jpg', 'c.png', 'e.gif')
    ]


def test_files_folders_globs_and_archives_are_searched(images, tmp_path, monkeypatch):
    monkeypatch.chdir(images)
    with tarfile.open(tmp_path / 'images.tar', 'w') as tar:
        tar.add('.', 'all')
    with ZipFile(tmp_path / 'images.zip', 'w') as archive:
        for file in sorted(Path().rglob('*')):
            archive.write(file)
    assert list(find_files(['9.png', 'sea', './9.png'])) == ['9.png', 'sea/a.JPG', 'sea/deep/b.png']
    assert list(find_files(['*.png', '9.png', 's*y/[ce].*'])) == ['9.png', '10.png', 'sky/c.webp', 'sky/e.tif']
    assert list(find_files(['**/*.png'])) == ['9.png', '10.png', 'sea/deep/b.png']
    assert list(find_files(['*'])) == [
        '9.png',
        '10.png',
        'sea/a.JPG',
        'sea/deep/b.png',
        'sky/c.webp',
        'sky/d.bmp',
        'sky/e.tif',
    ]
    for name in ('images.tar/all', 'images.zip'):
        found = find_files([f'{tmp_path}/{name[:10]}'])
        assert len(found) == 7
        assert found[f'{tmp_path}/{name}/sea/a.JPG']() == Path('sea/a.JPG').read_bytes()


def test_a_glob_of_any_depth_does_not_follow_links_in_a_circle(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ('a[1]', 'b/c'):
        Path(folder).mkdir(parents=True)
        shutil.copy(sorted(images.glob('*.png'))[0], Path(folder, 'image.png'))
    # with two of them Python's own glob does not end
    Path('a[1]', 'up').symlink_to(tmp_path)
    Path('b/c', 'up').symlink_to(tmp_path)
    Path('b', 'sibling').symlink_to(tmp_path / 'a[1]')
    expected = ['a[1]/image.png', 'b/c/image.png', 'b/sibling/image.png']
    for pattern in ('**/*.png', '**/*', '**', '**/**/i*.png'):
        assert list(find_files([pattern])) == expected
    assert list(find_files([str(tmp_path / 'b' / '**' / '*.png')])) == [str(tmp_path / name) for name in expected[1:]]


def test_a_file_with_brackets_in_its_name_is_no_glob(images, tmp_path):
    (tmp_path / 'a[1].png').write_bytes((images / '9.png').read_bytes())
    assert list(find_files([str(tmp_path / 'a[1].png')])) == [str(tmp_path / 'a[1].png')]


def test_an_image_in_a_tar_is_predicted_like_the_file(images, trained, tmp_path):
    with tarfile.open(tmp_path / 'images.tar', 'w') as tar:
        tar.add(images / 'sea', 'sea')
    files = rows_of(tmp_path, images / 'sea', '--model', trained)
    tarred = rows_of(tmp_path, tmp_path / 'images.tar', '--model', trained)
    assert len(files) == 2
    assert [{**row, 'file': ''} for row in files] == [{**row, 'file': ''} for row in tarred]


def test_a_file_name_that_is_not_text_can_be_written(images, trained, tmp_path):
    (tmp_path / 'caf\udce9.png').write_bytes((images / '9.png').read_bytes())
    (row,) = rows_of(tmp_path, tmp_path, '--model', trained)
    assert row['file'] == f'{tmp_path}/caf\ufffd.png'


@pytest.mark.parametrize(
    ('label_names', 'expected'),
    [
        (NAMES, [*NAMES, '3', '4']),
        ({'1': 'green', '0': 'blue', '2': 'red'}, [*NAMES, '3', '4']),
        (['3', '4', '5'], ['3', '4', '5', 'class 3', 'class 4']),
        (['crane', 'tench', 'crane'], ['crane (0)', 'tench', 'crane (2)', '3', '4']),
    ],
    ids=('list', 'dict', 'numbers', 'equal'),
)
def test_classes_have_the_names_they_were_trained_by_and_no_two_the_same(tmp_path, label_names, expected):
    save_model(tmp_path, 5, label_names)
    model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
    assert class_names(model) == expected


def test_classes_without_names_have_numbers_and_imagenets_its_words():
    assert class_names(timm.create_model('test_resnet', num_classes=2)) == ['0', '1']
    names = class_names(timm.create_model('test_resnet'))
    assert (len(set(names)), names[0]) == (1000, 'tench, Tinca tinca')
    assert names[134] == 'crane (n02012849)' and names[517] == 'crane (n03126707)'


def test_a_multi_label_model_gives_each_class_a_probability_of_its_own(images, trained, tmp_path):
    save_model(tmp_path / 'run', multi_label=True)
    model = timm.create_model(f'local-dir:{trained}', pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    with torch.no_grad():
        expected = model(transform(Image.open(images / '9.png'))[None]).sigmoid()[0].sort(descending=True).values
    (row,) = rows_of(tmp_path, images / '9.png', '--model', tmp_path / 'run')
    values = [float(row[key]) for key in PROBABILITIES]
    assert values == pytest.approx(expected.tolist(), abs=1e-5)
    assert abs(sum(values) - 1) > 0.1


@pytest.mark.parametrize(
    ('multi_label', 'logits', 'probabilities'),
    [(True, [18.0, 33, 25], [1, 1, 1]), (False, [200.0, -2, 40], [1, 0, 0])],
)
def test_classes_of_equal_probability_are_ranked_by_their_logits(images, tmp_path, multi_label, logits, probabilities):
    save_model(tmp_path / 'run', multi_label=multi_label)
    model = timm.create_model(f'local-dir:{tmp_path}/run', pretrained=True)
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor(logits)
    save_file(model.state_dict(), tmp_path / 'run' / 'model.safetensors')
    (row,) = rows_of(tmp_path, images / '9.png', '--model', tmp_path / 'run')
    assert [row[key] for key in LABELS] == [NAMES[label] for label in np.argsort(logits)[::-1]]
    assert [float(row[key]) for key in PROBABILITIES] == probabilities


def test_a_checkpoint_a_size_and_a_precision_are_taken(images, tmp_path):
    model = timm.create_model('test_resnet', num_classes=3)
    torch.nn.init.zeros_(model.fc.weight)
    model.fc.bias.data = torch.tensor([0.0, 3, 0])
    save_file(model.state_dict(), tmp_path / 'weights.safetensors')
    checkpoint = ('--checkpoint', tmp_path / 'weights.safetensors', '--num-classes', 3)
    sizes = ('--img-size', '48x32', '--amp-dtype', 'bfloat16', '--top-k', 1)
    (row,) = rows_of(tmp_path, images / '9.png', '--model', 'test_resnet', *checkpoint, *sizes)
    assert row['label'] == '1'
    assert float(row['probability']) == pytest.approx(torch.tensor([0.0, 3, 0]).softmax(0)[1].item(), abs=0.005)


@pytest.mark.parametrize('fraction', [None, 0.5])
def test_a_given_crop_is_that_of_timms_transform(images, trained, tmp_path, fraction):
    model = timm.create_model(f'local-dir:{trained}', pretrained=True).eval()
    config = timm.data.resolve_model_data_config(model) | ({} if fraction is None else dict(crop_pct=fraction))
    image = timm.data.create_transform(**config)(Image.open(images / '9.png').convert('RGB'))
    crop = () if fraction is None else ('--crop-pct', fraction)
    (row,) = rows_of(tmp_path, images / '9.png', '--model', trained, *crop)
    with torch.no_grad():
        expected = model(image[None]).softmax(-1)[0].sort(descending=True).values
    assert [float(row[key]) for key in PROBABILITIES] == pytest.approx(expected.tolist(), abs=1e-5)


def test_an_answer_that_is_not_finite_is_refused(images, tmp_path, capsys):
    save_model(tmp_path)
    model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
    model.head.bias.data[1] = float('nan')
    save_file(model.state_dict(), tmp_path / 'nan.safetensors')
    argv = ('--model', tmp_path, '--checkpoint', tmp_path / 'nan.safetensors', '--out', tmp_path / 'out.csv')
    error = fails(capsys, images / '9.png', *argv)
    assert '9.png are not finite: the weights head.bias are not finite' in error


@pytest.mark.parametrize('out', ['out.csv', 'out.json'])
def test_an_interruption_leaves_the_former_file(images, trained, tmp_path, monkeypatch, out):
    def interrupted(*args):
        yield dict(file='9.png', predictions=[dict(label=name, probability=0.1) for name in NAMES])
        raise KeyboardInterrupt

    argv = [str(images), '--model', str(trained), '--out', str(tmp_path / 'link' / out), '--workers', '0']
    (tmp_path / 'link').mkdir()
    (tmp_path / 'link' / out).symlink_to(tmp_path / out)
    predict(argv)
    before = (tmp_path / out).read_text()
    assert '9.png' in before and (tmp_path / 'link' / out).is_symlink()
    monkeypatch.setattr('vitzoo.predict.predict_images', interrupted)
    with pytest.raises(KeyboardInterrupt):
        predict(argv)
    assert (tmp_path / out).read_text() == before


@pytest.mark.parametrize('out', ['out.csv', 'out.json'])
def test_a_model_without_a_classifier_predicts_nothing(images, tmp_path, capsys, out):
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=2, num_classes=0)
    save_for_hf(model, tmp_path / 'run', safe_serialization=True)
    error = fails(capsys, images, '--model', tmp_path / 'run', '--out', tmp_path / out)
    assert f'{tmp_path}/run has no classifier' in error and not (tmp_path / out).exists()


@pytest.mark.parametrize(
    ('images', 'options', 'message'),
    [
        ('nowhere', '--model run', "there is no file, folder or archive 'nowhere'"),
        ('*.jpg', '--model run', "there is no file, folder or archive '*.jpg'"),
        ('run', '--model run', 'there are no images (.bmp, '),
        ('a.png empty', '--model run', 'there are no images (.bmp, .gif'),
        ('bad.tar', '--model run', 'cannot read the tar file bad.tar'),
        ('a.png', '--model runn', "unknown model 'runn'"),
        ('a.png', '--model test_vit*', "'test_vit*' stands for"),
        ('a.png', '--model cvt_ls_13', 'there are no weights of cvt_ls_13'),
        ('a.png', '--model cvt_ls_13 --num-classes 3', '--num-classes 3 is for the weights of a --checkpoint'),
        ('a.png', '--model run --img-size 8', 'run cannot be made with img_size=(8, 8)'),
        ('a.png', '--model run --model-kwargs img_size=64', 'give --img-size'),
        ('a.png', '--model run --model-kwargs mixer=agent', 'do not fit the model made with mixer=agent'),
        ('a.png', '--model run --out a.txt', 'must end in .csv or .json'),
    ],
    ids=str,
)
def test_a_mistake_gets_one_sentence(trained, tmp_path, capsys, monkeypatch, images, options, message):
    monkeypatch.chdir(tmp_path)
    Path('run').symlink_to(trained)
    Path('bad.tar').write_bytes(b'x' * 2000)
    Path('empty').mkdir()
    Image.new('RGB', (8, 8)).save('a.png')
    assert message in fails(capsys, *images.split(), *options.split())


def test_a_compressed_tar_is_refused(images, tmp_path):
    with tarfile.open(tmp_path / 'images.tar', 'w:gz') as tar:
        tar.add(images / 'sea', 'sea')
    with pytest.raises(UserError, match='make it again, without compression'):
        find_files([str(tmp_path / 'images.tar')])


def test_the_command_runs_from_a_shell(images, trained):
    command = [sys.executable, '-m', 'vitzoo', 'predict', 'sky', '--model', str(trained), '--top-k', '1']
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    child = subprocess.run(command, cwd=images, env=environment, capture_output=True, text=True, timeout=120)
    assert (child.returncode, child.stderr) == (0, '')
    assert [line.split(',')[0] for line in child.stdout.splitlines()] == [
        'file',
        'sky/c.webp',
        'sky/d.bmp',
        'sky/e.tif',
    ]


def test_classes_without_a_name_are_numbered_without_a_search_for_each():
    class Names(list):
        def __contains__(self, name: object) -> bool:
            raise AssertionError('all names were searched for one')

    assert number_rest(Names(['a', '3']), 5) == ['a', '3', '2', 'class 3', '4']
