"""`vitzoo bench loader` on a few small images; speeds are not tested."""

import sys
from io import BytesIO
from pathlib import Path

import pytest
from hub import ClassLabel, ImageFeature, Table, make_package
from PIL import Image

from vitzoo import bench
from vitzoo.bench.loader import (
    copy_images,
    main,
    make_photos,
    parse_args,
    timm_loader,
    torchvision_loader,
    vitzoo_loader,
)
from vitzoo.errors import UserError

QUICK = ['--img-size', '32', '--batch-size', '8', '--workers', '0', '--rounds', '2']


@pytest.mark.parametrize('options', (['--images', '8'], ['--data-dir', 'sample', '--images', '20']), ids=' '.join)
def test_all_loaders_pass_over_the_images_in_every_round(options, capsys):
    passes = main([*QUICK, *options])
    assert list(passes) == ['torchvision', 'timm', 'vitzoo']
    for timed in passes.values():
        assert len(timed) == 2
        assert all(timing['images_per_second'] > 0 and timing['cpu_ms'] > 0 for timing in timed)
    printed = capsys.readouterr().out
    for name in ('torchvision', 'timm'):
        rounds = zip(passes[name], passes['vitzoo'])
        faster = [ours['images_per_second'] / theirs['images_per_second'] for theirs, ours in rounds]
        expected = f'times the images/s of {name} ({min(faster):.2f} – {max(faster):.2f}'
        assert f'vitzoo loads {sum(faster) / 2:.2f} {expected}' in printed
    assert f'{options[-1]} images' in printed


@pytest.fixture
def photos(tmp_path) -> Path:
    """Eight images of four formats in class folders, of which timm's reader takes two by default."""
    for number, suffix in enumerate(('.bmp', '.webp', '.gif', '.JPG') * 2):
        path = tmp_path / 'photos' / f'class{number // 4}' / f'{number}{suffix}'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (40, 40), (number, 0, 0)).save(path)
    return tmp_path / 'photos'


def test_every_loader_loads_the_images_of_all_formats(photos, tmp_path):
    folder = tmp_path / 'copies'
    folder.mkdir()
    args = parse_args([*QUICK, '--batch-size', '4'])
    assert copy_images(str(photos), folder, 100) == 8
    for make in torchvision_loader, timm_loader, vitzoo_loader:
        assert sum(len(images) for images, _ in make(str(folder), args)) == 8


def test_every_loader_loads_images_without_names(tmp_path, monkeypatch):
    rows = []
    for number in range(8):
        file = BytesIO()
        Image.new('RGB', (40, 40), (number, 0, 0)).save(file, 'PNG')
        rows.append(dict(image=dict(bytes=file.getvalue(), path=None), label=number % 2))
    table = Table(dict(image=ImageFeature(), label=ClassLabel('cat', 'dog')), rows)
    monkeypatch.setitem(sys.modules, 'datasets', make_package(lambda *args, **kwargs: table))
    args = parse_args([*QUICK, '--batch-size', '4'])
    assert copy_images('hfds/me/pets', tmp_path, 8) == 8
    for make in torchvision_loader, timm_loader, vitzoo_loader:
        assert sum(len(images) for images, _ in make(str(tmp_path), args)) == 8


def test_a_damaged_image_is_named(photos):
    file = photos / 'class0' / '3.JPG'
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(UserError, match=f'cannot read the image class0/3.JPG of {photos}'):
        main([*QUICK, '--data-dir', str(photos)])


def test_generated_images_are_as_large_as_those_of_imagenet(tmp_path):
    make_photos(tmp_path, 3)
    files = sorted(tmp_path.rglob('*.jpg'))
    assert len(files) == 3
    for file in files:
        assert Image.open(file).size == (500, 375)
        assert 70_000 < file.stat().st_size < 130_000


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['loader', *QUICK, '--images', '7'], '7 images are fewer than a batch of 8'),
        (['loader', *QUICK, '--data-dir', 'nowhere'], "'nowhere' does not exist"),
        (['loaders'], "unknown table 'loaders', did you mean loader"),
    ],
)
def test_a_user_error_is_one_sentence(argv, message, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(argv)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith('vitzoo: error: ') and message in error and error.count('\n') == 1
