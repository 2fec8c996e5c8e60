"""How names say what an image is: which part of a dataset it belongs to, and which class.

    photos/train/cat/1.jpg   photos/val/cat/2.jpg     two parts; also as train.tar, val.zip, …
    photos/cat/1.jpg         photos/dog/2.jpg         one part

Names are paths relative to the dataset, with '/' between folders. Those that begin with a dot (.ipynb_checkpoints,
._name.jpg), and the __MACOSX of zip files, do not count.
"""

import os
from collections.abc import Iterable

from timm.utils import natural_key

SUFFIXES = {'.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif', '.tif', '.tiff', '.ppm', '.pgm'}
ARCHIVES = ('.tar', '.zip')
SPLIT_NAMES = {'train': ('train', 'training'), 'val': ('val', 'validation', 'valid', 'eval', 'test')}


def is_hidden(name: str) -> bool:
    """Whether any part of a path is one that people do not see."""
    return any(part.startswith('.') or part == '__MACOSX' for part in name.split('/'))


def is_image(name: str) -> bool:
    """Whether this is the name of a visible file in a format that is read."""
    return os.path.splitext(name)[1].lower() in SUFFIXES and not is_hidden(name)


def natural_order(name: str) -> tuple:
    """Sorting key that puts 2 before 10, and is the same on every machine."""
    return natural_key(name), name


def find_split(names: Iterable[str], split: str) -> str | None:
    """The one of these folders and archives that is a split: 'val' may be called validation, Test, val.tar, …"""
    wanted = SPLIT_NAMES.get(split, (split,))
    ranks = {f'{word}{suffix}': rank for rank, word in enumerate(wanted) for suffix in ('', *ARCHIVES)}
    found = [name for name in names if name.lower() in ranks]
    return min(found, key=lambda name: (ranks[name.lower()], name), default=None)


def common_folder(names: Iterable[str]) -> str:
    """The folders, as 'photos/', that all of an archive lies in, so that what is below them are parts or classes."""
    folders = [name.split('/')[:-1] for name in names if is_image(name)]
    prefix = ''
    for depth in range(max(map(len, folders), default=0) - 1):
        # images further up lie outside of the classes anyway
        here = {folder[depth] for folder in folders if len(folder) > depth}
        if len(here) > 1 or any(find_split(here, split) for split in SPLIT_NAMES):
            break
        prefix += f'{here.pop()}/'
    return prefix


def group_by_class(names: Iterable[str]) -> dict[str, list[str]]:
    """The images of each class, which is the top folder above them; classes and images in natural order."""
    classes = {}
    for name in names:
        folder, slash, _ = name.partition('/')
        if slash and is_image(name):
            classes.setdefault(folder, []).append(name)
    return {folder: sorted(classes[folder], key=natural_order) for folder in sorted(classes, key=natural_order)}
