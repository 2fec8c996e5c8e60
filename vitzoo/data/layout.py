"""File naming conventions: the split and the class of an image follow from its path.

    photos/train/cat/1.jpg   photos/val/cat/2.jpg     two splits; also as train.tar, val.zip, …
    photos/cat/1.jpg         photos/dog/2.jpg         not divided into splits

Names are paths relative to the dataset, with '/' between folders. Names that begin with a dot (.ipynb_checkpoints,
._name.jpg) and the __MACOSX folder of zip files are ignored.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from timm.data.readers.reader import Reader
from timm.utils import natural_key

SUFFIXES = {'.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif', '.tif', '.tiff', '.ppm', '.pgm'}
ARCHIVES = ('.tar', '.zip')
SPLIT_NAMES = {'train': ('train', 'training'), 'val': ('val', 'validation', 'valid', 'eval', 'test')}


@dataclass(frozen=True)
class Split:
    """A split that was found in a dataset, with the function that opens it.

    Attributes:
        open: Indexes the images and returns their reader.
        is_whole: The dataset is not divided into splits, and this is all of it.
    """

    open: Callable[[], Reader]
    is_whole: bool = False


def split_names(split: str) -> tuple[str, ...]:
    """The names that a split may have, in lower case, the preferred one first."""
    return SPLIT_NAMES.get(split, (split,))


def is_hidden(name: str) -> bool:
    """Return True if any component of a path is hidden."""
    return any(part.startswith('.') or part == '__MACOSX' for part in name.split('/'))


def is_image(name: str) -> bool:
    """Return True for the path of a visible file in a supported image format."""
    return os.path.splitext(name)[1].lower() in SUFFIXES and not is_hidden(name)


def natural_order(name: str) -> tuple:
    """Sort key that puts 2 before 10, on every machine in the same order."""
    return natural_key(name), name


def match_split(names: Iterable[str], split: str) -> str | None:
    """The folder or archive of a split, if any: that of 'val' may be named val, Validation, test.tar, …"""
    ranks = {f'{word}{suffix}': rank for rank, word in enumerate(split_names(split)) for suffix in ('', *ARCHIVES)}
    found = [name for name in names if name.lower() in ranks]
    return min(found, key=lambda name: (ranks[name.lower()], name), default=None)


def choose_split(names: Iterable[str], split: str) -> str | None:
    """The folder or archive of a split, '' if none of the names is a split, None if only others are."""
    visible = [name for name in names if not is_hidden(name)]
    found = match_split(visible, split)
    if found is None and not any(match_split(visible, other) for other in SPLIT_NAMES):
        return ''
    return found


def common_folder(names: Iterable[str]) -> str:
    """The folder, such as 'photos/', around all splits or classes of an archive; '' if there is none."""
    folders = [name.split('/')[:-1] for name in names if is_image(name)]
    prefix = ''
    for depth in range(max(map(len, folders), default=0) - 1):
        # images higher up are outside of the class folders in any case
        here = {folder[depth] for folder in folders if len(folder) > depth}
        if len(here) > 1 or any(match_split(here, split) for split in SPLIT_NAMES):
            break
        prefix += f'{here.pop()}/'
    return prefix


def group_by_class(names: Iterable[str]) -> dict[str, list[str]]:
    """The images of each class, which is their top folder; classes and images in natural order."""
    classes = {}
    for name in names:
        folder, slash, _ = name.partition('/')
        if slash and is_image(name):
            classes.setdefault(folder, []).append(name)
    return {folder: sorted(classes[folder], key=natural_order) for folder in sorted(classes, key=natural_order)}
