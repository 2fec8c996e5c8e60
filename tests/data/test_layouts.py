"""Finding images in folders, archives, shards and label tables, and holding out some for validation."""

import csv
import errno
import io
import json
import os
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from vitzoo.data import archives, eval_loader, open_dataset
from vitzoo.data.archives import open_archive
from vitzoo.data.dataset import Splits, merge_options
from vitzoo.data.folders import find_in_archive
from vitzoo.data.held_out import Subset, find_held_out, hold_out, write_held_out
from vitzoo.data.layout import common_folder, match_split
from vitzoo.data.options import DataOptions
from vitzoo.errors import UserError


def picture(*seed) -> bytes:
    """A PNG file of noise that is unique to the seed."""
    generator = np.random.default_rng([*''.join(map(str, seed)).encode()])
    file = io.BytesIO()
    Image.fromarray(generator.integers(0, 255, (6, 8, 3), dtype=np.uint8)).save(file, 'PNG')
    return file.getvalue()


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, 'w') as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_zip(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, 'w', method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


WRITERS = {'folder': write_files, 'tar': write_tar, 'zip': write_zip}


def write(kind: str, root: Path, files: dict[str, bytes]) -> str:
    return str(WRITERS[kind](root / 'photos' if kind == 'folder' else root / f'photos.{kind}', files))


def pictures(*names: str) -> dict[str, bytes]:
    return {name: picture(name) for name in names}


def contents(data_dir: str, split: str, **options) -> list[tuple]:
    """Name, label and pixels of each image."""
    dataset = open_dataset(data_dir, split, **options)
    return [(dataset.filename(i), dataset[i][1], dataset[i][0].tobytes()) for i in range(len(dataset))]


PARTS = pictures('train/cat/2.png', 'train/cat/10.png', 'train/dog/a/1.png', 'val/dog/3.png', 'val/cat/4.png')


@pytest.mark.parametrize('wrapping', ['', 'photos/', 'a/b/'])
@pytest.mark.parametrize('kind', ['tar', 'zip'])
def test_an_archive_reads_like_the_folder_it_was_made_from(tmp_path, kind, wrapping):
    clutter = {'.DS_Store': b'x', '__MACOSX/train/cat/._2.png': b'x', 'train/cat/notes.txt': b'x', 'cover.png': b'x'}
    folder = write('folder', tmp_path, PARTS | clutter)
    archive = write(kind, tmp_path, {wrapping + name: content for name, content in (PARTS | clutter).items()})
    for split in ('train', 'val'):
        assert contents(archive, split) == contents(folder, split)
    assert [name for name, _, _ in contents(archive, 'train')] == ['cat/2.png', 'cat/10.png', 'dog/a/1.png']
    assert [label for _, label, _ in contents(archive, 'train')] == [0, 0, 1]


@pytest.mark.parametrize('names', [('train', 'val'), ('Training', 'Test'), ('TRAIN', 'validation')])
@pytest.mark.parametrize('kind', ['folder', 'tar', 'zip'])
def test_a_part_may_be_an_archive_with_or_without_its_own_name_inside(tmp_path, kind, names):
    for split, name in zip(('train', 'val'), names, strict=True):
        files = {file.removeprefix(f'{split}/'): content for file, content in PARTS.items() if file.startswith(split)}
        path = tmp_path / 'data' / (name if kind == 'folder' else f'{name}.{kind}')
        WRITERS[kind](path, files)
        inside = {f'{split}/{file}': content for file, content in files.items()}
        WRITERS[kind](tmp_path / 'inside' / path.name, inside if kind != 'folder' else files)
    parts = write('folder', tmp_path, PARTS)
    for split in ('train', 'val'):
        assert contents(str(tmp_path / 'data'), split) == contents(parts, split)
        assert contents(str(tmp_path / 'inside'), split) == contents(parts, split)


def test_tars_in_a_tar_are_folders(tmp_path):
    inner = {name: write_tar(tmp_path / f'{name}.tar', pictures('1.png', f'{name}.png')) for name in ('n01', 'n02')}
    outer = write_tar(tmp_path / 'train.tar', {f'{name}.tar': path.read_bytes() for name, path in inner.items()})
    found = contents(str(outer), 'train')
    assert [(name, label) for name, label, _ in found] == [
        ('n01/1.png', 0), ('n01/n01.png', 0), ('n02/1.png', 1), ('n02/n02.png', 1)
    ]  # fmt: skip
    assert found[1][2] == Image.open(io.BytesIO(picture('n01.png'))).tobytes()


@pytest.mark.parametrize(
    'method', [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=str
)
def test_a_zip_may_be_compressed_in_any_way(tmp_path, method):
    archive = write_zip(tmp_path / 'photos.zip', PARTS, method)
    assert contents(str(archive), 'train') == contents(write('folder', tmp_path, PARTS), 'train')


@pytest.mark.parametrize('kind', ['tar', 'zip', 'wds'])
def test_worker_processes_read_the_same_from_an_archive(tmp_path, kind):
    files = pictures(*(f'cat/{i}.png' for i in range(40)))
    if kind == 'wds':
        labels = {f'{name[:-4]}.cls': b'0' for name in files}
        write_tar(tmp_path / 'train-0.tar', dict(sorted((files | labels).items())))
        data_dir = f'wds/{tmp_path}'
    else:
        data_dir = write(kind, tmp_path, files)
    batches = {}
    for workers in (0, 2):
        dataset = open_dataset(data_dir, 'train', lambda image: torch.tensor(np.asarray(image)))
        # opened in the parent first, where a shared file position would give other bytes
        dataset[0]
        batches[workers] = torch.cat([images for images, _ in eval_loader(dataset, 4, workers)])
    assert torch.equal(batches[0], batches[2])
    assert len(batches[0].flatten(1).unique(dim=0)) == 40


def damage(path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert content.count(old) >= 1
    path.write_bytes(content.replace(old, new))
    return path


def test_a_damaged_member_of_an_archive_is_named(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    file = io.BytesIO()
    noise.save(file, 'PNG')
    middle = file.getvalue()[2000:2040]
    stored = write_zip(tmp_path / 'a.zip', {'cat/1.png': file.getvalue()}, zipfile.ZIP_STORED)
    for archive in (damage(stored, middle, bytes(40)), write_tar(tmp_path / 'b.tar', {'cat/1.png': b'no image'})):
        with pytest.raises(UserError, match='cannot read the image cat/1.png of'):
            open_dataset(str(archive), 'train')[0]


def make_password_zip(root):
    path = write_zip(root / 'photos.zip', PARTS, zipfile.ZIP_STORED)
    content = bytearray(path.read_bytes())
    # the encryption bit in the central directory
    content[content.index(b'PK\x01\x02') + 8] |= 1
    path.write_bytes(content)
    return path


def make_half_a_tar(root):
    path = write_tar(root / 'photos.tar', {'cat/1.png': bytes(5000), 'cat/2.png': bytes(5000)})
    path.write_bytes(path.read_bytes()[:8000])
    return path


def make_tar_with_a_damaged_header(root, inner=False):
    path = write_tar(root / 'photos.tar', pictures('cat/1.png', 'cat/2.png', 'dog/1.png'))
    damage(path, b'dog/1.png', b'dog/1.pnj')
    return write_tar(root / 'outer.tar', {'train.tar': path.read_bytes()}) if inner else path


def make_tar_that_ends_in_a_header(root):
    path = write_tar(root / 'photos.tar', pictures('cat/1.png', 'cat/2.png', 'dog/1.png'))
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b'dog/1.png') + 300])
    return path


def make_compressed_tar(root):
    with tarfile.open(root / 'photos.tar', 'w:gz') as tar:
        tar.add(write_files(root, PARTS) / 'train', 'train')
    return root / 'photos.tar'


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda root: write_files(root, {'photos.zip': b'x'}) / 'photos.zip', 'cannot read the zip file'),
        (make_password_zip, 'is password-protected; unpack it'),
        (make_half_a_tar, 'cannot read the tar file .* without compression'),
        (make_compressed_tar, 'cannot read the tar file .* without compression'),
        (make_tar_with_a_damaged_header, r'cannot read the tar file .* header at byte \d+ is damaged'),
        (lambda root: make_tar_with_a_damaged_header(root, inner=True), 'outer.tar .* header at byte .* is damaged'),
        (make_tar_that_ends_in_a_header, r'cannot read the tar file .* header at byte \d+ is damaged'),
        (lambda root: write_zip(root / 'a.zip', {}), 'is empty'),
        (lambda root: write_tar(root / 'a.tar', pictures('1.png', '2.png')), 'has 2 images but no class folders'),
        (
            lambda root: write_tar(root / 'a.tar', pictures('1.png') | {'labels.csv': b''}),
            'or train a model on labels.csv by `vitzoo train --multi-label`',
        ),
        (lambda root: write_zip(root / 'a.zip', pictures('val/cat/1.png')), 'has a val split but no split named train'),
        (lambda root: write_tar(root / 'shard-0.tar', {'1.png': b'', '1.cls': b''}).parent, 'shards as wds/'),
    ],
    ids=[
        *('not a zip', 'password', 'half a tar', 'compressed', 'damaged header', 'damaged inner header', 'cut header'),
        *('empty', 'flat', 'flat with labels', 'no train', 'shards'),
    ],
)
def test_an_archive_that_cannot_be_used_gets_one_sentence(tmp_path, make, sentence):
    with pytest.raises(UserError, match=sentence):
        open_dataset(str(make(tmp_path)), 'train')


@pytest.mark.parametrize(
    ('names', 'prefix'),
    [
        (['cat/1.png', 'dog/1.png'], ''),
        (['photos/cat/1.png', 'photos/dog/1.png', 'photos/cover.png', 'README'], 'photos/'),
        (['a/b/cat/1.png', 'a/b/dog/deep/1.png'], 'a/b/'),
        (['cat/1.png', 'cat/2.png'], ''),
        (['photos/train/cat/1.png', 'photos/train/dog/1.png'], 'photos/'),
        (['train/cat/1.png', 'train/dog/1.png'], ''),
        ([], ''),
    ],
)
def test_folders_around_everything_are_a_wrapping(names, prefix):
    assert common_folder(names) == prefix


def test_the_name_of_a_split_is_found_in_a_fixed_order_whatever_its_case():
    assert match_split(['test', 'Valid', 'train.tar'], 'val') == 'Valid'
    assert match_split(['test', 'TRAIN.ZIP'], 'train') == 'TRAIN.ZIP'
    assert match_split(['training_set', 'val.txt'], 'train') is None
    assert match_split(['extra'], 'extra') == 'extra'


STEAM = pictures('bus/1.png', 'car/1.png', 'train/steam/1.png', 'train/electric/1.png')


@pytest.mark.parametrize('kind', WRITERS)
@pytest.mark.parametrize(
    ('names', 'options', 'classes'),
    [
        (('bus/1.png', 'car/1.png', 'train/1.png'), {}, ['bus', 'car', 'train']),
        (('control/1.png', 'test/1.png', 'train/1.png'), {}, ['control', 'test', 'train']),
        (tuple(STEAM), dict(train_split='.'), ['bus', 'car', 'train']),
        (tuple(STEAM), dict(val_split='.'), ['bus', 'car', 'train']),
        (tuple(STEAM), dict(train_split='train'), ['electric', 'steam']),
        (('train/a/1.png', 'val/a/1.png', 'other/1.png'), {}, ['a']),
        (('day/a/1.png', 'day/b/1.png', 'night/a/1.png'), dict(train_split='Day'), ['a', 'b']),
        (('train/a/1.png', 'previews/notes.txt'), {}, ['a']),
    ],
)
def test_a_folder_called_train_may_be_a_class(tmp_path, kind, names, options, classes):
    data_dir = write(kind, tmp_path, pictures(*names))
    assert open_dataset(data_dir, 'train', options=DataOptions(**options)).class_names == classes


@pytest.mark.parametrize('kind', WRITERS)
@pytest.mark.parametrize(
    ('files', 'options', 'sentence'),
    [
        (STEAM, {}, "'train' may be a split or a class, next to bus, car; choose with --train-split train, or --train"),
        (pictures('a/1.png', 'test/x/1.png'), {}, "'test' may be a split or a class, next to a; choose with --val-spl"),
        (
            PARTS,
            dict(train_split='trian'),
            "no folder or archive 'trian', did you mean train\\?; correct --train-split",
        ),
        (PARTS, dict(input_key='img'), "has no input key 'img': remove --input-key"),
    ],
)
def test_a_layout_that_is_not_clear_gets_one_sentence(tmp_path, kind, files, options, sentence):
    with pytest.raises(UserError, match=sentence):
        open_dataset(write(kind, tmp_path, files), 'train', options=DataOptions(**options))


@pytest.mark.parametrize(
    ('options', 'sentence'),
    [
        (dict(train_split='.', val_split='test'), "'.' stands for data that is not divided"),
        (dict(train_split='a', val_split='a'), "train_split and val_split are both 'a'"),
    ],
)
def test_names_of_splits_that_contradict_each_other_get_one_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        DataOptions(**options)


def test_splits_that_an_option_takes_for_classes_get_one_sentence(tmp_path):
    data_dir, options = write('folder', tmp_path, PARTS), DataOptions(train_split='.')
    sentence = "the class 'train' .and 1 more. of .* is not one of .* If it is a split, give --val-split val, because a"
    with pytest.raises(UserError, match=sentence):
        open_dataset(data_dir, 'val', class_to_idx={'cat': 0, 'dog': 1}, options=options)
    # as `vitzoo validate` merges it with what a run recorded
    merged = merge_options(DataOptions(val_split='val'), dict(train_split='.', data_dir=data_dir), data_dir)
    assert len(open_dataset(data_dir, 'val', class_to_idx={'cat': 0, 'dog': 1}, options=merged)) == 2


@pytest.mark.parametrize('kind', ['folder', 'tar', 'zip'])
def test_splits_have_the_names_in_the_options(tmp_path, kind):
    names = ('day/a/1.png', 'day/b/1.png', 'night/a/2.png', 'val/b/3.png')
    data_dir, options = write(kind, tmp_path, pictures(*names)), DataOptions(train_split='day', val_split='night')
    assert [name for name, _, _ in contents(data_dir, 'val', options=options)] == ['a/2.png']
    assert [name for name, _, _ in contents(data_dir, 'val', options=DataOptions(train_split='day'))] == ['b/3.png']
    assert Splits(data_dir, options=options).has_val
    assert not Splits(write(kind, tmp_path / 'day', pictures('day/a/1.png')), options=DataOptions('day')).has_val


def test_an_archive_of_a_split_may_hold_a_class_with_the_name_of_the_split(tmp_path):
    write_tar(tmp_path / 'train.tar', pictures('bus/1.png', 'train/1.png'))
    assert open_dataset(str(tmp_path), 'train').class_names == ['bus', 'train']
    write_tar(tmp_path / 'day' / 'day.tar', pictures('day/bus/1.png', 'day/car/1.png'))
    assert open_dataset(str(tmp_path / 'day'), 'train', options=DataOptions('day')).class_names == ['bus', 'car']


def test_a_link_to_a_folder_around_it_is_not_followed(tmp_path):
    root = write_files(tmp_path / 'photos', pictures('cat/1.png', 'dog/1.png', 'dog/more/2.png'))
    (root / 'cat' / 'loop').symlink_to(root)
    (root / 'dog' / 'more' / 'up').symlink_to('..')
    (root / 'dog' / 'far').symlink_to(tmp_path)
    # other links are followed, also one below another
    write_files(tmp_path / 'elsewhere', pictures('3.png'))
    (root / 'dog' / 'linked').symlink_to(tmp_path / 'elsewhere')
    (tmp_path / 'elsewhere' / 'back').symlink_to(root / 'dog')
    names = ['cat/1.png', 'dog/1.png', 'dog/linked/3.png', 'dog/more/2.png']
    assert open_dataset(str(root), 'train').reader.filenames() == names


def test_a_folder_that_may_not_be_read_gets_one_sentence(tmp_path, monkeypatch):
    root, scandir = write_files(tmp_path / 'photos', pictures('cat/1.png', 'dog/1.png', 'lost+found/1.png')), os.scandir
    closed = {str(root / 'dog'), str(root / 'lost+found')}

    def scan(path):
        if str(path) in closed:
            raise PermissionError(errno.EACCES, 'Permission denied', str(path))
        return scandir(path)

    # root may read any folder
    monkeypatch.setattr(os, 'scandir', scan)
    with pytest.raises(UserError, match=rf"cannot read the folder '{root / 'dog'}': Permission denied; change"):
        open_dataset(str(root), 'train')
    closed.remove(str(root / 'dog'))
    assert open_dataset(str(root), 'train').class_names == ['cat', 'dog']


def write_linked(path: Path, files: dict[str, bytes], symbolic: dict[str, str], hard: dict[str, str]) -> Path:
    """An archive with links; a zip file has no hard links."""
    if path.suffix == '.zip':
        write_zip(path, files)
        with zipfile.ZipFile(path, 'a') as archive:
            for name, target in symbolic.items():
                info = zipfile.ZipInfo(name)
                info.external_attr = 0o120777 << 16
                archive.writestr(info, target)
        return path
    write_tar(path, files)
    with tarfile.open(path, 'a') as tar:
        for kind, links in {tarfile.SYMTYPE: symbolic, tarfile.LNKTYPE: hard}.items():
            for name, target in links.items():
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, target
                tar.addfile(info)
    return path


@pytest.mark.parametrize('kind', ['tar', 'zip'])
@pytest.mark.parametrize('below', ['', 'photos/'])
def test_links_in_an_archive_lead_to_files_and_folders_of_it(tmp_path, kind, below):
    files = {below + name: picture(name) for name in ('cat/1.png', 'cat/2.png', 'dog/1.png')}
    symbolic = {'dog/2.png': '../cat/2.png', 'dog/3.png': '2.png', 'cow': 'dog', 'cat/up': '..', 'dog/notes.txt': 'x'}
    # links may come before links that they lead to
    symbolic = {below + name: target for name, target in reversed(symbolic.items())}
    hard = {f'{below}cat/4.png': f'{below}cat/1.png', f'{below}emu/5.png': f'{below}cat/4.png'} if kind == 'tar' else {}
    found = contents(str(write_linked(tmp_path / f'a.{kind}', files, symbolic, hard)), 'train')
    dogs = {'1.png': 'dog/1.png', '2.png': 'cat/2.png', '3.png': 'cat/2.png'}
    expected = {'cat/1.png': 'cat/1.png', 'cat/2.png': 'cat/2.png'}
    expected |= {f'{folder}/{name}': source for folder in ('dog', 'cow') for name, source in dogs.items()}
    expected |= {'cat/4.png': 'cat/1.png', 'emu/5.png': 'cat/1.png'} if hard else {}
    pixels = {name: Image.open(io.BytesIO(picture(name))).tobytes() for name in set(expected.values())}
    assert {name: content for name, _, content in found} == {name: pixels[to] for name, to in expected.items()}


@pytest.mark.parametrize('kind', ['tar', 'zip'])
@pytest.mark.parametrize('links', [{'dog/2.png': '/data/2.png'}, {'dog': '../dogs'}, {'a': 'b', 'b': 'a'}])
def test_a_link_out_of_an_archive_gets_one_sentence(tmp_path, kind, links):
    path = write_linked(tmp_path / f'a.{kind}', pictures('cat/1.png'), links, {})
    with pytest.raises(UserError, match=f"the link '{next(iter(links))}' in .* leads to .* not in the archive; make"):
        open_dataset(str(path), 'train')


def test_a_link_that_leads_nowhere_is_not_compared_with_all_files(tmp_path, monkeypatch):
    compared, is_below = [], archives._is_below
    monkeypatch.setattr(archives, '_is_below', lambda *names: compared.append(names) or is_below(*names))
    symbolic = {f'cat/{index}.txt': 'nowhere' for index in range(20)} | {'emu': 'dog', 'dog': 'cat'}
    path = write_linked(tmp_path / 'a.tar', pictures(*(f'cat/{index}.png' for index in range(20))), symbolic, {})
    names = [f'{folder}/{index}.png' for folder in ('cat', 'dog', 'emu') for index in range(20)]
    assert open_dataset(str(path), 'train').reader.filenames() == names
    assert len(compared) == len(symbolic)


def test_a_zip_file_may_be_written_by_windows(tmp_path):
    names = [name.replace('/', '\\') for name in PARTS]
    archive = write_zip(tmp_path / 'windows.zip', dict(zip(names, PARTS.values(), strict=True)))
    with zipfile.ZipFile(archive) as zip_file:
        assert zip_file.namelist() == names
    dotted = write_zip(tmp_path / 'dotted.zip', {f'./{name}': content for name, content in PARTS.items()})
    for path in (archive, dotted):
        assert contents(str(path), 'train') == contents(write('folder', tmp_path, PARTS), 'train')


def make_shards(root: Path, parts: dict[str, list[str]], side: str = 'cls') -> str:
    """Shards of two samples each with the labels of each part."""
    for part, labels in parts.items():
        for number in range(0, len(labels), 2):
            files = {}
            for i, label in enumerate(labels[number : number + 2], start=number):
                text = label if side == 'cls' else json.dumps(dict(label=int(label) if label.isdecimal() else label))
                files |= {f'{part}/{i:03d}.png': picture(part, i), f'{part}/{i:03d}.{side}': text.encode()}
            write_tar(root / f'set-{part}-{number:04d}.tar', files)
    return f'wds/{root}'


@pytest.mark.parametrize('side', ['cls', 'json'])
def test_shards_are_read_in_any_order(tmp_path, side):
    data_dir = make_shards(tmp_path, dict(train=['1', '0', '10', '2', '0'], val=['10', '1']), side)
    train_set = open_dataset(data_dir, 'train')
    assert train_set.class_names == ['0', '1', '2', '10']
    assert train_set.targets == [1, 0, 3, 2, 0]
    for i in (4, 0, 3, 1, 2):
        image, label = train_set[i]
        assert label == train_set.targets[i]
        assert image.tobytes() == Image.open(io.BytesIO(picture('train', i))).tobytes()
    assert train_set.filename(4) == 'set-train-0004.tar/train/004.png'
    val_set = open_dataset(data_dir, 'val', class_to_idx=train_set.class_to_idx)
    assert val_set.targets == [3, 1]


def test_shards_in_folders_of_parts_take_their_class_names_from_a_file(tmp_path):
    for part, labels in dict(train=['2', '0'], test=['2']).items():
        for i, label in enumerate(labels):
            write_tar(tmp_path / part / f'{i}.tar', {'a.png': picture(part, i), 'a.cls': f'{label}\n'.encode()})
    (tmp_path / 'classnames.txt').write_text('tench\ngoldfish\nbee\n')
    dataset = open_dataset(f'wds/{tmp_path}', 'train')
    assert dataset.class_names == ['tench', 'goldfish', 'bee']
    assert dataset.targets == [2, 0]
    assert open_dataset(f'wds/{tmp_path}', 'val').targets == [2]


def test_a_class_in_the_file_of_names_without_images_is_not_unknown(tmp_path):
    data_dir = make_shards(tmp_path, dict(val=['2', '1']))
    (tmp_path / 'classnames.txt').write_text('purple\nred\ngreen\n')
    assert open_dataset(data_dir, 'val', class_to_idx={'green': 0, 'red': 1}).targets == [0, 1]
    with pytest.raises(UserError, match="the class 'green' of .* is not one of the 1 training classes"):
        open_dataset(data_dir, 'val', class_to_idx={'red': 0})


@pytest.mark.parametrize('place', ['{}-{}.tar', 'test-set-{}-{}.tar', '{}/{}.tar'])
def test_of_val_and_test_shards_the_former_are_the_validation_split(tmp_path, place):
    for part in ('test', 'train', 'val'):
        for i in range(2):
            files = {f'{part}{i}.png': picture(part, i), f'{part}{i}.cls': b'0'}
            write_tar(tmp_path / place.format(part, i), files)
    for split in ('train', 'val'):
        assert [Path(name).stem for name, _, _ in contents(f'wds/{tmp_path}', split)] == [f'{split}0', f'{split}1']


def test_shards_without_a_validation_part_are_divided(tmp_path):
    data_dir = make_shards(tmp_path, {'all': ['cat', 'dog'] * 5})
    parts = [open_dataset(data_dir, split, val_fraction=0.2, seed=1) for split in ('train', 'val')]
    assert [Counter(part.targets) for part in parts] == [{0: 4, 1: 4}, {0: 1, 1: 1}]


@pytest.mark.parametrize(
    ('files', 'sentence'),
    [
        ({}, 'there are no shards'),
        ({'a.png': b'', 'b.cls': b'1'}, "the image 'a.png' of the shard .*0.tar has no .cls or .json"),
        ({'a.png': b'', 'a.json': b'{"caption": "a cat"}'}, "'a.json' of the shard .*0.tar has no label, cls"),
        (
            {'a.png': b'', 'a.json': b'{"label": null}'},
            "'a.json' of the shard .*0.tar has no label, cls",
        ),
        ({'a.png': b'', 'a.json': b'{"label": [1]}'}, r'has the label \[1\], which is neither'),
        ({'a.png': b'', 'a.json': b'{"label": 0.5}'}, 'has the label 0.5, which is neither'),
        ({'a.png': b'', 'a.cls': b' '}, "'a.cls' of the shard .*0.tar has no label; remove its image"),
        ({'a.png': b'', 'a.cls': b'-1'}, "'a.cls' of the shard .*0.tar has the label -1; remove its image"),
        ({'a.png': b'', 'a.cls': b'p\xeache'}, "'a.cls' of the shard .*0.tar is not UTF-8"),
        ({'a.txt': b''}, 'contain no images'),
    ],
)
def test_shards_that_cannot_be_used_get_one_sentence(tmp_path, files, sentence):
    if files:
        write_tar(tmp_path / '0.tar', files)
    with pytest.raises(UserError, match=sentence):
        open_dataset(f'wds/{tmp_path}', 'train')


@pytest.mark.parametrize(
    ('names', 'sentence'),
    [(b'p\xeache\nsea', "classnames.txt' is not UTF-8"), (b'tench\n', 'has 1 name, and none for the label 1; add it')],
)
def test_a_file_of_class_names_that_cannot_be_used_gets_one_sentence(tmp_path, names, sentence):
    data_dir = make_shards(tmp_path, dict(train=['0', '1']))
    (tmp_path / 'classnames.txt').write_bytes(names)
    with pytest.raises(UserError, match=sentence):
        open_dataset(data_dir, 'train')


def test_class_names_of_shards_may_be_numbers(tmp_path):
    data_dir = make_shards(tmp_path, dict(train=['10', '20']))
    (tmp_path / 'classnames.txt').write_text('10\n20\n')
    assert open_dataset(data_dir, 'train').class_names == ['10', '20']


def test_numbers_of_classes_of_shards_may_be_padded(tmp_path):
    data_dir = make_shards(tmp_path, dict(train=['00', '01']))
    (tmp_path / 'classnames.txt').write_text('cat\ndog\n')
    dataset = open_dataset(data_dir, 'train')
    assert (dataset.class_names, dataset.targets) == (['cat', 'dog'], [0, 1])


def test_class_names_of_shards_may_begin_with_a_byte_order_mark(tmp_path):
    data_dir = make_shards(tmp_path, dict(train=['0', '1']))
    (tmp_path / 'classnames.txt').write_text('tench\nbee\n', encoding='utf-8-sig')
    assert open_dataset(data_dir, 'train').class_names == ['tench', 'bee']


def test_a_folder_of_shards_that_is_not_there_gets_one_sentence():
    with pytest.raises(UserError, match="the folder of shards 'nowhere' does not exist"):
        open_dataset('wds/nowhere', 'train')


UNDIVIDED = pictures(
    *(f'cat/{i}.png' for i in range(10)), *(f'dog/{i}.png' for i in range(4)), 'ant/1.png', 'ant/2.png', 'bee/1.png'
)


@pytest.mark.parametrize(
    'written', [('recipe.yaml', 'curves.png'), ('transfer.json', 'curves.png'), ('confusion.csv', 'confusion.png')]
)
def test_pictures_that_vitzoo_wrote_are_not_images_of_a_class(tmp_path, written):
    files = pictures('cat/1.png', 'dog/1.png', 'dog/curves.png', 'runs/deit/best/1.png')
    files |= {f'runs/deit/{name}': picture('runs') for name in written}
    reader = open_dataset(write('folder', tmp_path, files), 'train').reader
    assert reader.class_names == ['cat', 'dog'] and len(reader) == 3


def test_a_class_folder_whose_name_no_file_of_a_run_could_have_is_refused(tmp_path):
    name = os.fsdecode(b'\xe9t\xe9')
    data_dir = write('folder', tmp_path, pictures('cat/1.png') | {f'{name}/1.png': picture('a')})
    with pytest.raises(UserError, match='class folder .* is not UTF-8; rename it'):
        open_dataset(data_dir, 'train')


def test_a_folder_with_the_name_of_the_bundled_data_needs_a_path(tmp_path, monkeypatch):
    write_files(tmp_path / 'sample', pictures('cat/1.png', 'dog/1.png'))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match='write ./sample for the folder'):
        open_dataset('sample', 'train')
    assert open_dataset('./sample', 'train').class_names == ['cat', 'dog']


@pytest.mark.parametrize('kind', WRITERS)
@pytest.mark.parametrize('below', ['', 'train/'])
def test_without_a_validation_part_a_share_of_each_class_is_held_out(tmp_path, kind, below):
    data_dir = write(kind, tmp_path, {below + name: content for name, content in UNDIVIDED.items()})
    train_set, val_set = (open_dataset(data_dir, split, val_fraction=0.2, seed=1) for split in ('train', 'val'))
    assert train_set.is_held_out and val_set.is_held_out
    assert train_set.class_names == val_set.class_names == ['ant', 'bee', 'cat', 'dog']
    # 2 of 10, 1 of 4, 1 of 2 and 0 of 1
    assert Counter(val_set.targets) == {2: 2, 3: 1, 0: 1}
    assert Counter(train_set.targets) == {2: 8, 3: 3, 0: 1, 1: 1}
    names = [{part.filename(i) for i in range(len(part))} for part in (train_set, val_set)]
    assert names[0] | names[1] == set(UNDIVIDED) and not names[0] & names[1]


def held_out_of(data_dir: str, **options) -> set[str]:
    dataset = open_dataset(data_dir, 'val', **{'val_fraction': 0.3, 'seed': 1, **options})
    return {dataset.filename(i) for i in range(len(dataset))}


@pytest.mark.parametrize(('fraction', 'cats', 'dogs'), [(0.26, 3, 1), (0.24, 2, 1), (0.4, 4, 2), (0.04, 1, 1)])
def test_the_share_of_a_class_that_is_held_out_is_rounded(tmp_path, fraction, cats, dogs):
    held_out = held_out_of(write('folder', tmp_path, UNDIVIDED), val_fraction=fraction)
    assert Counter(name.partition('/')[0] for name in held_out) == {'ant': 1, 'cat': cats, 'dog': dogs}


def test_what_is_held_out_follows_from_the_seed_and_the_names_alone(tmp_path):
    folders = {kind: write(kind, tmp_path / kind, UNDIVIDED) for kind in WRITERS}
    held_out = [held_out_of(data_dir) for data_dir in folders.values()]
    # the same in every process and on every machine
    assert held_out[0] == held_out[1] == held_out[2]
    assert held_out[0] == {'ant/1.png', 'cat/2.png', 'cat/6.png', 'cat/7.png', 'dog/0.png'}
    assert held_out_of(folders['folder'], seed=2) != held_out[0]
    # adding an image to one class does not affect the others
    write_files(Path(folders['folder']), pictures('cat/new.png'))
    assert {name for name in held_out_of(folders['folder']) if 'cat' not in name} == {
        name for name in held_out[0] if 'cat' not in name
    }


def test_data_with_a_validation_part_is_not_divided(tmp_path):
    data_dir = write('folder', tmp_path, PARTS)
    assert contents(data_dir, 'train', val_fraction=0.5) == contents(data_dir, 'train')
    assert contents(data_dir, 'val', val_fraction=0.5) == contents(data_dir, 'val')
    assert not open_dataset(data_dir, 'val', val_fraction=0.5).is_held_out


@pytest.mark.parametrize('kind', ['tar', 'zip'])
def test_an_archive_of_the_training_split_alone_is_divided_by_its_classes(tmp_path, kind):
    WRITERS[kind](tmp_path / f'train.{kind}', {f'train/{name}': content for name, content in UNDIVIDED.items()})
    val_set = open_dataset(str(tmp_path), 'val', val_fraction=0.2)
    assert val_set.class_names == ['ant', 'bee', 'cat', 'dog']
    assert Counter(val_set.targets) == {2: 2, 3: 1, 0: 1}


@pytest.mark.parametrize(
    ('names', 'has_val', 'val'),
    [
        (('train/cat/1.png', 'val/cat/2.png'), True, ['cat/2.png']),
        (('val/cat/2.png',), True, ['cat/2.png']),
        (('train/cat/1.png',), False, ['cat/1.png']),
        (('cat/1.png',), False, ['cat/1.png']),
    ],
    ids=['both splits', 'val alone', 'train alone', 'undivided'],
)
@pytest.mark.parametrize('kind', WRITERS)
def test_without_a_validation_split_the_training_images_may_stand_in_for_it(tmp_path, kind, names, has_val, val):
    splits = Splits(write(kind, tmp_path, pictures(*names)))
    assert splits.has_val == has_val
    assert splits.open('val', or_train=True).filenames() == val


def test_an_archive_is_indexed_once_for_all_splits(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr('vitzoo.data.dataset.open_archive', lambda path: opened.append(path) or open_archive(path))
    path = write('zip', tmp_path, UNDIVIDED)
    open_dataset(path, 'train', val_fraction=0.2)
    assert opened == [Path(path)]


def test_images_that_are_all_alone_in_their_classes_cannot_be_held_out(tmp_path):
    data_dir = write('folder', tmp_path, pictures('cat/1.png', 'dog/1.png'))
    with pytest.raises(UserError, match='no class has two images'):
        open_dataset(data_dir, 'val', val_fraction=0.2)


def listed_in(path: Path, data_dir: str) -> set[str]:
    dataset = open_dataset(data_dir, 'val', held_out=path)
    return {dataset.filename(i) for i in range(len(dataset))}


def test_a_run_finds_again_what_it_held_out_and_takes_other_data_whole(tmp_path):
    data_dir = write('folder', tmp_path, UNDIVIDED)
    val_set = open_dataset(data_dir, 'val', val_fraction=0.2, seed=1)
    path = tmp_path / 'held_out.csv'
    write_held_out(path, val_set.reader)
    held_out = {val_set.filename(i) for i in range(len(val_set))}
    assert {row['file'] for row in csv.DictReader(path.open())} == held_out == listed_in(path, data_dir)
    # also after images were added, or moved into an archive or a split
    write_files(Path(data_dir), pictures('cat/new.png', 'cow/new.png'))
    assert listed_in(path, data_dir) == held_out
    assert (
        listed_in(path, write('zip', tmp_path, {f'train/{name}': data for name, data in UNDIVIDED.items()})) == held_out
    )
    # the same names, other pictures
    other = {name: picture(name, 'other') for name in UNDIVIDED}
    assert listed_in(path, write('tar', tmp_path, other)) == set(UNDIVIDED)
    with pytest.raises(UserError, match='has a train split but no split named val'):
        listed_in(path, write('tar', tmp_path / 'b', {f'train/{name}': data for name, data in other.items()}))


@pytest.mark.parametrize(('num_shared', 'num_others', 'expected'), [(1, 40, 41), (2, 40, 2), (1, 9, 1)])
def test_data_that_shares_few_images_is_other_data(tmp_path, num_shared, num_others, expected):
    data_dir, path = write('folder', tmp_path, UNDIVIDED), tmp_path / 'held_out.csv'
    val_set = open_dataset(data_dir, 'val', val_fraction=0.2, seed=1)
    assert len(val_set) == 4
    write_held_out(path, val_set.reader)
    files = {f'val/cat/shared{index}.png': picture(val_set.filename(index)) for index in range(num_shared)}
    files |= pictures(*(f'val/dog/{index}.png' for index in range(num_others)))
    assert len(listed_in(path, write('tar', tmp_path, files))) == expected


@pytest.mark.parametrize('num_classes', [1, 3])
def test_a_class_map_of_some_classes_leaves_the_data_the_same(tmp_path, num_classes):
    names = 'abcdefghij'
    files = pictures(*(f'{name}/{index}.png' for name in names for index in range(40)))
    data_dir, path = write('folder', tmp_path, files), tmp_path / 'held_out.csv'
    val_set = open_dataset(data_dir, 'val', val_fraction=0.05, seed=1)
    write_held_out(path, val_set.reader)
    held_out = {val_set.filename(i) for i in range(len(val_set))}
    (tmp_path / 'map.txt').write_text('\n'.join(names[:num_classes]))
    options = DataOptions(class_map=str(tmp_path / 'map.txt'))
    some = open_dataset(data_dir, 'val', held_out=path, options=options)
    assert {some.filename(i) for i in range(len(some))} == {n for n in held_out if n[0] in names[:num_classes]}


def test_a_new_class_has_held_out_images_beside_those_of_an_earlier_training(tmp_path):
    data_dir, path = write('folder', tmp_path, UNDIVIDED), tmp_path / 'held_out.csv'
    before = open_dataset(data_dir, 'val', val_fraction=0.2, seed=1)
    write_held_out(path, before.reader)
    write_files(Path(data_dir), pictures(*(f'eel/{index}.png' for index in range(10)), 'cat/new.png'))
    options = dict(val_fraction=0.2, seed=5, held_out_before=path)
    train_set, val_set = (open_dataset(data_dir, split, **options) for split in ('train', 'val'))
    names = {val_set.filename(index) for index in range(len(val_set))}
    known = {before.filename(index) for index in range(len(before))}
    assert known < names and {name.split('/')[0] for name in names - known} == {'eel'} and len(names - known) == 2
    assert names.isdisjoint(train_set.filename(index) for index in range(len(train_set)))
    assert len(train_set) + len(val_set) == len(UNDIVIDED) + 11


def test_what_two_trainings_held_out_is_found_in_the_data_of_each(tmp_path):
    first, second = tmp_path / 'first.csv', tmp_path / 'second.csv'
    data_dir = write('folder', tmp_path, UNDIVIDED)
    # the same names with other pictures, ten times as many, so that the first list is a small part of both
    others = {f'{name[:-4]}-{number}.png' for name in UNDIVIDED for number in range(9)} | {*UNDIVIDED}
    other_dir = write('folder', tmp_path / 'other', {name: picture(name, 'other') for name in others})
    sets = [open_dataset(folder, 'val', val_fraction=0.2, seed=1) for folder in (data_dir, other_dir)]
    write_held_out(first, sets[0].reader)
    write_held_out(second, sets[1].reader, before=first)
    for folder, val_set in zip((data_dir, other_dir), sets):
        assert listed_in(second, folder) == {val_set.filename(index) for index in range(len(val_set))}
    # a third training that holds out nothing, and one that trains on what the first held out
    third = tmp_path / 'third.csv'
    write_held_out(third, None, before=second)
    assert third.read_text() == second.read_text()
    write_held_out(third, None, open_dataset(data_dir, 'train').reader, before=second)
    assert listed_in(third, data_dir) == set(UNDIVIDED)
    assert listed_in(third, other_dir) == listed_in(second, other_dir)


@pytest.mark.parametrize('kind', WRITERS)
def test_held_out_images_are_found_after_renaming(tmp_path, kind):
    data_dir = write('folder', tmp_path, UNDIVIDED)
    path, held_out = tmp_path / 'held_out.csv', open_dataset(data_dir, 'val', val_fraction=0.2, seed=1)
    write_held_out(path, held_out.reader)
    renamed = {f'train/{name.replace("/", "/photo-")}': content for name, content in UNDIVIDED.items()}
    # an image that is new under the name of a held-out one, and a copy of another
    renamed |= {f'train/{held_out.filename(0)}': picture('new'), 'train/zoo/copy.png': picture(held_out.filename(1))}
    found = contents(write(kind, tmp_path / 'renamed', renamed), 'val', held_out=path)
    pixels = [pixels for _, _, pixels in contents(data_dir, 'val', val_fraction=0.2, seed=1)]
    assert sorted(content for _, _, content in found) == sorted(pixels)
    assert not any('zoo' in name for name, _, _ in found)


def test_held_out_images_with_their_names_are_found_without_reading_others(tmp_path, monkeypatch):
    data_dir, path = write('folder', tmp_path, UNDIVIDED), tmp_path / 'held_out.csv'
    write_held_out(path, open_dataset(data_dir, 'val', val_fraction=0.2, seed=1).reader)
    read = []
    monkeypatch.setattr(Path, 'read_bytes', lambda self, original=Path.read_bytes: read.append(self) or original(self))
    assert len(open_dataset(data_dir, 'val', held_out=path)) == len(read) == 4


def test_an_interruption_leaves_the_list_of_held_out_images(tmp_path, monkeypatch):
    data_dir, path = write('folder', tmp_path, UNDIVIDED), tmp_path / 'held_out.csv'
    reader = open_dataset(data_dir, 'val', val_fraction=0.2, seed=1).reader
    write_held_out(path, reader)
    written = path.read_text()
    monkeypatch.setattr('vitzoo.data.held_out.hash_file', Mock(side_effect=['digest', KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        write_held_out(path, reader)
    assert path.read_text() == written


def test_a_list_is_written_again_only_if_more_images_are_held_out(tmp_path):
    data_dir, path = write('folder', tmp_path, UNDIVIDED), tmp_path / 'held_out.csv'
    held_out = open_dataset(data_dir, 'val', val_fraction=0.2, seed=1)
    write_held_out(path, held_out.reader)
    written = path.read_text()
    options = dict(val_fraction=0.2, held_out_before=path)
    # images that may come back stay in the list
    (Path(data_dir) / held_out.filename(0)).unlink()
    write_held_out(path, open_dataset(data_dir, 'val', **options).reader)
    assert path.read_text() == written
    write_files(Path(data_dir), pictures('eel/1.png', 'eel/2.png'))
    more = open_dataset(data_dir, 'val', **options)
    write_held_out(path, more.reader)
    assert listed_in(path, data_dir) == {more.filename(index) for index in range(len(more))}
    assert len(more) == len(held_out)


def test_of_equal_held_out_images_as_many_are_found_as_are_listed(tmp_path):
    names = [f'cat/{index}.png' for index in range(4)]
    files = dict.fromkeys(names, picture('same')) | pictures('dog/1.png', 'dog/2.png')
    reader = open_dataset(write('folder', tmp_path, files), 'train').reader
    write_held_out(tmp_path / 'held_out.csv', Subset(reader, [1, 3, 4]))
    found = find_held_out(tmp_path / 'held_out.csv', reader)
    assert (found.filenames(), found.num_missing) == ([names[1], names[3], 'dog/1.png'], 0)
    # of the two that are listed and the three that are left, the one with a listed name comes first
    left = Subset(reader, [0, 2, 3, 5])
    found = find_held_out(tmp_path / 'held_out.csv', left)
    assert (found.filenames(), found.num_missing) == ([names[0], names[3]], 1)


def table(**rows: str) -> bytes:
    # as written by Excel, with a byte order mark
    return ('\ufefffile,labels\r\n' + ''.join(f'{file}.png,{labels}\r\n' for file, labels in rows.items())).encode()


LABELS = dict(a='sea;people', b=' people ; dog', c='', d='sea;sea')


@pytest.mark.parametrize('kind', WRITERS)
def test_a_table_gives_an_image_any_number_of_labels(tmp_path, kind):
    files = pictures('train/a.png', 'train/b.png', 'train/c.png', 'train/d.png', 'val/x/a.png', 'train/unlisted.png')
    files |= {'train/labels.csv': table(**LABELS), 'val/labels.csv': table(**{'x/a': 'dog;sea'})}
    data_dir = write(kind, tmp_path, files)
    train_set = open_dataset(data_dir, 'train', multi_label=True)
    assert train_set.class_names == ['dog', 'people', 'sea']
    assert train_set.targets == [[2, 1], [1, 0], [], [2]]
    assert torch.equal(train_set[0][1], torch.tensor([0.0, 1, 1]))
    assert torch.equal(train_set[2][1], torch.zeros(3))
    assert [train_set.filename(i) for i in range(4)] == ['a.png', 'b.png', 'c.png', 'd.png']
    val_set = open_dataset(data_dir, 'val', multi_label=True, class_to_idx=train_set.class_to_idx)
    assert torch.equal(val_set[0][1], torch.tensor([1.0, 0, 1]))


def test_of_several_labels_the_rarest_decides_what_is_held_out(tmp_path):
    rows = {f'{i:02d}': 'common;rare' if i < 4 else 'common' for i in range(20)}
    data_dir = write('folder', tmp_path, pictures(*(f'{i:02d}.png' for i in range(20))) | {'labels.csv': table(**rows)})
    val_set = open_dataset(data_dir, 'val', multi_label=True, val_fraction=0.25)
    assert sorted(map(len, val_set.targets)) == [1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ('content', 'sentence'),
    [
        (None, "or a run that was trained with it, needs '.*labels.csv', a table with the columns file and labels"),
        (b'name,tags\na.png,x\n', 'has the columns name, tags, but needs file and labels'),
        (b'', 'needs file and labels'),
        (table(a='x', b='y'), "lists 'b.png', which does not exist"),
        (b'file,labels\na.png,x\na.png,y\n', 'lists a.png twice'),
        (table(a=''), 'gives no image a label'),
        ('file,labels\na.png,pêche\n'.encode('latin-1'), "labels.csv' is not UTF-8; save it as CSV UTF-8"),
        (b'file,labels\na.png,"x\nb.png,y\n', 'is not CSV from line 2 on .*; correct its quotation marks'),
        # longer than csv's limit of a field
        (b'file,labels\n\na.png,"x' + 9999 * b'\nb.png,dog;sea', 'is not CSV from line 2 on .*; correct its quotation'),
        (b'file,labels\na.png,x,y\n', "line 2 of .*labels.csv has 'y' beyond its columns; separate labels by ;"),
    ],
)
def test_a_table_that_cannot_be_used_gets_one_sentence(tmp_path, content, sentence):
    data_dir = write('folder', tmp_path, pictures('a.png') | ({} if content is None else {'labels.csv': content}))
    with pytest.raises(UserError, match=sentence):
        open_dataset(data_dir, 'train', multi_label=True)


def test_empty_values_without_a_column_lose_no_label(tmp_path):
    data_dir = write('folder', tmp_path, pictures('a.png') | {'labels.csv': b'file,labels\na.png,x;y,, \n'})
    assert open_dataset(data_dir, 'train', multi_label=True).class_names == ['x', 'y']


def test_a_label_that_was_not_trained_on_is_named(tmp_path):
    data_dir = write('folder', tmp_path, pictures('a.png') | {'labels.csv': table(a='see')})
    with pytest.raises(UserError, match="the label 'see' of .* is not one of the 2 training classes, did you mean sea"):
        open_dataset(data_dir, 'val', multi_label=True, class_to_idx={'dog': 0, 'sea': 1})


def test_only_files_have_a_table_of_labels():
    with pytest.raises(UserError, match='or a run that was trained with it, reads labels.csv from a folder'):
        open_dataset('torch/cifar10', 'train', multi_label=True)


def test_holding_out_takes_any_reader_of_labelled_images():
    val_set = hold_out(open_dataset('sample', 'train').reader, 'val', 0.1, seed=3)
    assert Counter(val_set.labels) == dict.fromkeys(range(10), 20)


def test_an_archive_with_a_class_called_train_is_not_read_once_for_each_class():
    class Names(list):
        times_read = 0

        def __iter__(self):
            self.times_read += 1
            return super().__iter__()

    times = []
    for num_classes in (3, 30):
        names = Names(['train/1.png', *(f'{number}/1.png' for number in range(num_classes))])
        split = find_in_archive(Mock(names=names, root=Path()), 'train', DataOptions(), multi_label=False)
        assert split is not None and split.is_whole
        times.append(names.times_read)
    assert times[0] == times[1]


def test_the_members_of_a_tar_file_are_not_kept_while_it_is_indexed(tmp_path):
    files = {f'cat/{number}.png': b'x' for number in range(9)}
    with tarfile.open(write_tar(tmp_path / 'photos.tar', files)) as tar:
        assert list(archives._list_members(tar)) == list(files)
        assert not tar.members
