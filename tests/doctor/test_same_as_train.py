"""Doctor reads a dataset as training does: the same splits, classes and images, and an error where training ends."""

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import install_datasets, make_data

from vitzoo.data import DataOptions, Images
from vitzoo.data.options import DATA_OPTIONS
from vitzoo.doctor.command import examine, open_splits
from vitzoo.errors import UserError
from vitzoo.train.opening import open_data
from vitzoo.train.recipe_cli import load_recipe

Layout = tuple[str, list[str]]


def write(root: Path, *names: str) -> Path:
    """Write pictures, none of which resembles another."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng([*name.encode()]).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((64, 64)).save(root / name)
    return root


def several(*folders: str, count: int = 3) -> list[str]:
    return [f'{folder}/{number}.png' for folder in folders for number in range(count)]


def pack(folder: Path, file: Path) -> str:
    with tarfile.open(file, 'w') as tar:
        tar.add(folder, folder.name)
    return str(file)


def class_called_train(root: Path) -> Layout:
    return str(write(root, *several('bus', 'car', 'train'))), []


def class_called_train_in_a_split(root: Path) -> Layout:
    return str(write(root, *several('train/bus', 'train/train', 'val/bus', 'val/train'))), []


def classes_called_like_all_splits(root: Path) -> Layout:
    return str(write(root, *several('train/a', 'val/b', 'test/c', 'other/d'))), ['--train-split', '.']


def unclear_split(root: Path) -> Layout:
    return str(write(root, *several('bus', 'car', 'train/steam', 'train/electric'))), []


def hard_links(root: Path) -> Layout:
    write(root, *several('train/a', 'val/a', 'val/b'))
    (root / 'train' / 'b').mkdir()
    for number in range(3):
        write(root, f'elsewhere/{number}.png')
        os.link(root / 'elsewhere' / f'{number}.png', root / 'train' / 'b' / f'{number}.png')
    return str(root), []


def hard_links_in_a_tar(root: Path) -> Layout:
    # tar stores the second name of a file as a link
    write(root / 'photos', *several('a', 'b'))
    os.link(root / 'photos' / 'a' / '0.png', root / 'photos' / 'b' / 'again.png')
    return pack(root / 'photos', root / 'photos.tar'), []


def links_in_circles(root: Path) -> Layout:
    write(root, *several('train/a', 'train/b', 'val/a', 'val/b'))
    (root / 'train' / 'a' / 'loop').symlink_to(root)
    (root / 'train' / 'c').symlink_to('..')
    (root / 'val' / 'b' / 'up').symlink_to('../..')
    return str(root), []


def linked_classes(root: Path) -> Layout:
    write(root / 'elsewhere', *several('a', 'b'))
    (root / 'photos').mkdir()
    for name in ('a', 'b'):
        (root / 'photos' / name).symlink_to(root / 'elsewhere' / name)
    return str(root / 'photos'), []


def undivided(root: Path) -> Layout:
    return str(write(root, *several('10', '2', '1/deep'), 'stray.png')), []


def one_image_each(root: Path) -> Layout:
    return str(write(root, 'a/0.png', 'b/1.png')), []


def one_class(root: Path) -> Layout:
    return str(write(root, *several('a', 'empty/.hidden', '__MACOSX/b'))), []


def hidden_folders(root: Path) -> Layout:
    names = several('train/a', 'train/b', 'train/.ipynb_checkpoints', 'val/a', 'val/b', 'val/a/__MACOSX')
    return str(write(root, *names, 'train/a/._0.png')), []


def wrapped_in_a_tar(root: Path) -> Layout:
    write(root / 'photos', *several('set/train/a', 'set/train/b', 'set/val/b'), 'cover.png')
    return pack(root / 'photos', root / 'photos.tar'), []


def archives_of_splits(root: Path) -> Layout:
    write(root / 'a', *several('train/bus', 'train/train'))
    write(root / 'b', *several('val/bus', 'val/train'))
    (root / 'data').mkdir()
    pack(root / 'a' / 'train', root / 'data' / 'train.tar')
    pack(root / 'b' / 'val', root / 'data' / 'test.tar')
    return str(root / 'data'), []


def list_of_classes(root: Path) -> Layout:
    (root / 'map.txt').write_text('cow\nant\n')
    return str(write(root / 'photos', *several('ant', 'bee', 'cow'))), ['--class-map', str(root / 'map.txt')]


def merged_classes(root: Path) -> Layout:
    (root / 'map.json').write_text(json.dumps(dict(kitten='cat', cat='cat', dog='dog')))
    names = several('train/cat', 'train/kitten', 'train/dog', 'val/kitten', 'val/dog', 'val/cow')
    return str(write(root / 'photos', *names)), ['--class-map', str(root / 'map.json')]


def one_class_in_the_map(root: Path) -> Layout:
    (root / 'map.txt').write_text('ant\n')
    return str(write(root / 'photos', *several('ant', 'bee'))), ['--class-map', str(root / 'map.txt')]


def classes_of_the_map_without_images(root: Path) -> Layout:
    (root / 'map.txt').write_text('ant\nbee\n')
    return str(write(root / 'photos', *several('train/ant', 'val/ant', 'val/bee'))), [
        '--class-map',
        str(root / 'map.txt'),
    ]


def class_only_in_val(root: Path) -> Layout:
    return str(write(root, *several('train/a', 'train/b', 'val/a', 'val/c'))), []


def class_only_in_train(root: Path) -> Layout:
    return str(write(root, *several('train/a', 'train/b', 'train/c', 'validation/b'))), []


def no_training_images(root: Path) -> Layout:
    (root / 'train').mkdir()
    return str(write(root, *several('val/a', 'val/b'))), []


def no_validation_images(root: Path) -> Layout:
    (root / 'val' / 'a').mkdir(parents=True)
    return str(write(root, *several('train/a', 'train/b'))), []


def only_a_training_split(root: Path) -> Layout:
    return str(write(root, *several('train/a', 'train/b'))), []


def named_splits(root: Path) -> Layout:
    options = ['--train-split', 'day', '--val-split', 'night']
    return str(write(root, *several('day/a', 'day/b', 'night/b', 'val/a', 'train/a'))), options


def the_same_split_twice(root: Path) -> Layout:
    return str(write(root, *several('train/a', 'train/b', 'val/a'))), ['--val-split', 'train/']


def shards(root: Path) -> Layout:
    return make_data('wds', root), []


def undivided_shards(root: Path) -> Layout:
    return make_data('wds undivided', root), []


def hugging_face(root: Path) -> Layout:
    install_datasets()
    return make_data('hfds', root), []


def labels(root: Path) -> Layout:
    return make_data('labels undivided', root), ['--multi-label']


LAYOUTS = [
    *(class_called_train, class_called_train_in_a_split, classes_called_like_all_splits, unclear_split),
    *(hard_links, hard_links_in_a_tar, links_in_circles, linked_classes, hidden_folders),
    *(undivided, one_image_each, one_class, wrapped_in_a_tar, archives_of_splits),
    *(list_of_classes, merged_classes, one_class_in_the_map, classes_of_the_map_without_images),
    *(class_only_in_val, class_only_in_train),
    *(no_training_images, no_validation_images, only_a_training_split, named_splits, the_same_split_twice),
    *(shards, undivided_shards, hugging_face, labels),
]
REFUSED = {
    *(unclear_split, one_image_each, one_class, one_class_in_the_map, class_only_in_val, no_training_images),
    *(no_validation_images, the_same_split_twice),
}


def files_of(images: Images) -> dict[str, list]:
    """The files of each class."""
    files = {name: [] for name in images.class_names}
    for number, target in enumerate(images.targets):
        for label in target if images.is_multi_label else [target]:
            files[images.class_names[label]].append(images.filename(number))
    return {name: sorted(found) for name, found in files.items()}


@pytest.mark.parametrize('layout', LAYOUTS, ids=lambda layout: layout.__name__)
def test_doctor_reads_a_dataset_as_training_does(layout: Callable[[Path], Layout], tmp_path, capsys):
    data_dir, argv = layout(tmp_path)
    recipe = load_recipe(['--model', 'test_vit', '--data-dir', data_dir, *argv])
    found = examine([data_dir, *argv, '--workers', '0', '--img-size', '64'])
    has_error = any(finding.severity == 'error' for finding in found)
    if layout in REFUSED:
        with pytest.raises(UserError):
            open_data(recipe)
        assert has_error
        return
    train, val = map(files_of, open_data(recipe))
    assert not has_error, [finding for finding in found if finding.severity == 'error']
    options = DataOptions(**{name: getattr(recipe, name) for name in DATA_OPTIONS})
    examined = [files_of(split.images) for split in open_splits(data_dir, recipe.multi_label, options)]
    if len(examined) == 1:
        # training holds out some of the images
        train, val = {name: sorted(train[name] + val[name]) for name in train}, None
    assert list(examined[0]) == list(train) and examined[0] == train
    warned = [finding.where for finding in found if (finding.code, finding.severity) == ('no-images', 'warning')]
    empty = [name for name, files in train.items() if not files]
    assert warned == ([empty] if empty else [])
    if val is not None:
        assert examined[1] == {name: files for name, files in val.items() if files}
