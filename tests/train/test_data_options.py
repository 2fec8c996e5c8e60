"""Training and validation on shards, and with options that say how a dataset is laid out."""

import tarfile
from io import BytesIO
from pathlib import Path
from shlex import split

import pytest
from toys import make_images

from vitzoo.errors import UserError
from vitzoo.train.loop import train
from vitzoo.validate.evaluation import validate

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
