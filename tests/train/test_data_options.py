"""Training and validation on shards, and with options that say how a dataset is laid out."""

import json
import tarfile
from io import BytesIO
from pathlib import Path
from shlex import split

import pytest
from accelerate.state import AcceleratorState
from toys import make_images

from vitzoo.errors import UserError, run_command
from vitzoo.train.loop import train
from vitzoo.validate.command import validate

TINY = split('--model test_vit --img-size 32 --workers 0 --epochs 1 --batch-size 8 --crop-pct 1')


@pytest.fixture(autouse=True)
def fresh_and_quick(fresh_accelerate, quick_timing):
    """Reset Accelerate, and shorten the measurement of speed."""


def validate_run(run: Path, data_dir: str | Path, *options: str) -> dict:
    (record,) = validate([str(run), '--data-dir', str(data_dir), '--workers', '0', *options])
    return record


def make_shards(root: Path, place: str, **counts: int) -> str:
    """Write one shard per split; `train_red=6` writes six images of the class red to the one of train."""
    images = make_images(root / 'images', **counts)
    for folder in images.iterdir():
        path = root / 'shards' / place.format(folder.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, 'w') as tar:
            for image in sorted(folder.rglob('*.jpg')):
                key = f'{image.parent.name}-{image.stem}'
                for name, content in {'jpg': image.read_bytes(), 'cls': image.parent.name.encode()}.items():
                    info = tarfile.TarInfo(f'{key}.{name}')
                    info.size = len(content)
                    tar.addfile(info, BytesIO(content))
    return f'wds/{root / "shards"}'


@pytest.mark.parametrize('place', ['{}-000.tar', '{}/000.tar'])
def test_shards_with_validation_and_test_splits_are_trained_and_validated_on_the_former(tmp_path, place):
    counts = dict(train_red=6, train_blue=6, val_red=2, val_blue=3, test_red=4, test_blue=4)
    shards = make_shards(tmp_path, place, **counts)
    scores = train([*TINY, '--data-dir', shards, '--output', str(tmp_path / 'run'), '--balance', 'sampler'])
    record = validate_run(tmp_path / 'run', shards)
    assert (scores['n'], record['n'], record['top1']) == (5, 5, scores['top1'])


def test_undivided_shards_need_a_fraction_to_hold_out(tmp_path):
    shards = make_shards(tmp_path, '{}.tar', all_red=5, all_blue=5)
    arguments = [*TINY, '--data-dir', shards, '--output', str(tmp_path / 'run')]
    with pytest.raises(UserError, match='has no validation images'):
        train([*arguments, '--val-fraction', '0'])
    assert train(arguments)['n'] == validate_run(tmp_path / 'run', shards)['n'] == 2


@pytest.fixture
def vehicles(tmp_path) -> Path:
    """Three classes, one of them called train, with subfolders."""
    return make_images(tmp_path / 'vehicles', bus_red=4, car_blue=4, train_green=4)


def test_an_undivided_image_folder_of_torchvision_is_not_validated_on_its_training_images(tmp_path, capsys):
    images = make_images(tmp_path / 'images', train_red=10, train_blue=10) / 'train'
    arguments = [*TINY, '--data-dir', f'torch/image_folder:{images}']
    with pytest.raises(UserError, match='no validation images'):
        train([*arguments, '--output', str(tmp_path / 'none'), '--val-fraction', '0'])
    AcceleratorState._reset_state(reset_partial_state=True)
    scores = train([*arguments, '--output', str(tmp_path / 'run')])
    assert '16 training and 4 validation images' in capsys.readouterr().out
    record = validate_run(tmp_path / 'run', f'torch/image_folder:{images}')
    assert (record['n'], record['top1'], record['loss']) == (4, scores['top1'], pytest.approx(scores['loss'], rel=1e-5))


def test_a_run_records_its_data_options_for_validation_and_resuming(vehicles, tmp_path):
    run = tmp_path / 'run'
    with pytest.raises(UserError, match="'train' may be a split or a class"):
        train([*TINY, '--data-dir', str(vehicles), '--output', str(run)])
    scores = train([*TINY, '--data-dir', str(vehicles), '--output', str(run), '--train-split', '.'])
    config = json.loads((run / 'config.json').read_text())
    assert config['label_names'] == ['bus', 'car', 'train'] and config['vitzoo']['train_split'] == '.'
    record = validate_run(run, vehicles)
    assert (record['n'], record['top1']) == (scores['n'], scores['top1']) == (3, scores['top1'])
    AcceleratorState._reset_state(reset_partial_state=True)
    assert train(['--resume', str(run), '--epochs', '2'])['n'] == 3


def test_validation_chooses_another_split_than_training(tmp_path):
    images = make_images(tmp_path / 'photos', day_red=5, day_blue=5, night_red=2, night_blue=1, test_red=3, test_blue=1)
    run = tmp_path / 'run'
    splits = split('--train-split day --val-split night')
    assert train([*TINY, '--data-dir', str(images), '--output', str(run), *splits])['n'] == 3
    assert validate_run(run, images)['n'] == 3
    assert validate_run(run, images, '--val-split', 'test')['n'] == 4
    assert validate_run(run, images, '--val-split', 'day')['n'] == 10
    with pytest.raises(UserError, match="no folder or archive 'nigth', did you mean night"):
        validate_run(run, images, '--val-split', 'nigth')
    # shards do not have the splits of folders
    shards = make_shards(tmp_path, '{}.tar', val_red=2)
    assert validate_run(run, shards)['n'] == 2


@pytest.mark.parametrize('kind', ['folder', 'shards'])
def test_the_validation_split_must_not_be_the_training_split(tmp_path, kind):
    counts = dict(train_red=2, train_blue=2)
    data = make_shards(tmp_path, '{}-x.tar', **counts) if kind == 'shards' else str(make_images(tmp_path, **counts))
    name = 'x' if kind == 'shards' else 'train'
    with pytest.raises(UserError, match=f"the split '{name}' of .* has training images; correct --val-split"):
        train([*TINY, '--data-dir', data, '--output', str(tmp_path / 'run'), '--val-split', name])


def test_a_class_map_orders_merges_and_leaves_out_classes(tmp_path, capsys):
    counts = dict(train_red=6, train_blue=6, train_green=6, val_red=2, val_blue=3, val_green=4)
    images, run = make_images(tmp_path / 'photos', **counts), tmp_path / 'run'
    class_map = tmp_path / 'classes.json'
    class_map.write_text(json.dumps(dict(red='warm', blue='cold', brown='warm')))
    arguments = [*TINY, '--data-dir', str(images), '--output', str(run), '--class-map', str(class_map)]
    scores = train(arguments)
    assert 'is not in the class map and not used: green' in capsys.readouterr().out
    config = json.loads((run / 'config.json').read_text())
    assert config['label_names'] == ['cold', 'warm']
    # the run does not need the file
    class_map.unlink()
    record = validate_run(run, images)
    assert (record['n'], record['top1']) == (scores['n'], scores['top1']) == (5, scores['top1'])


def test_a_run_is_not_resumed_with_other_labels_of_a_class_map(tmp_path):
    images = make_images(
        tmp_path / 'photos', **{f'{split}_{name}': 3 for split in ('train', 'val') for name in ('red', 'blue', 'green')}
    )
    class_map = tmp_path / 'classes.json'
    class_map.write_text(json.dumps(dict(red='warm', blue='cold', green='cold')))
    arguments = [*TINY, '--data-dir', str(images), '--output', str(tmp_path / 'run'), '--class-map', str(class_map)]
    train([*arguments, '--epochs', '1'])
    class_map.write_text(json.dumps(dict(red='warm', blue='cold', green='warm')))
    with pytest.raises(UserError, match='its labels of the class map are different'):
        train([*arguments, '--epochs', '2', '--resume', 'auto'])


def test_data_options_need_data(capsys):
    with pytest.raises(SystemExit):
        run_command(validate, ['test_vit', '--no-data', '--val-split', 'x'])
    assert '--val-split needs images: drop --no-data' in capsys.readouterr().err
