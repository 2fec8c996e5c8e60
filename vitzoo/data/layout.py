"""File naming conventions: the split and the class of an image follow from its path.

    photos/train/cat/1.jpg   photos/val/cat/2.jpg     two splits; also as train.tar, val.zip, …
    photos/cat/1.jpg         photos/dog/2.jpg         not divided into splits

Names are paths relative to the dataset, with '/' between folders. Names that begin with a dot (.ipynb_checkpoints,
._name.jpg) and the __MACOSX folder of zip files are ignored.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vitzoo.data.options import NO_OPTIONS, UNDIVIDED, DataOptions
from vitzoo.data.reader import LabelledReader
from vitzoo.errors import UserError, did_you_mean

SUFFIXES = {'.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif', '.tif', '.tiff', '.ppm', '.pgm'}
ARCHIVES = ('.tar', '.zip')
LABEL_TABLE = 'labels.csv'
SPLIT_NAMES = {'train': ('train', 'training'), 'val': ('val', 'validation', 'valid', 'eval', 'test')}


@dataclass(frozen=True)
class Split:
    """A split that was found in a dataset, with the function that opens it.

    Attributes:
        open: Indexes the images and returns their reader.
        is_whole: The dataset is not divided into splits, and this is all of it.
    """

    open: Callable[[], LabelledReader]
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
    # timm's natural_key takes digits such as ² for numbers, and raises
    return [int(part) if part.isdecimal() else part for part in re.split(r'(\d+)', name.lower())], name


def match_split(names: Iterable[str], split: str, options: DataOptions = NO_OPTIONS) -> str | None:
    """The folder or archive of a split, if any: that of 'val' may be named val, Validation, test.tar, …"""
    given = options.split_name(split)
    words = split_names(split) if given is None else (given.strip('/').lower(),)
    ranks = {f'{word}{suffix}': rank for rank, word in enumerate(words) for suffix in ('', *ARCHIVES)}
    found = [name for name in names if name.lower() in ranks]
    return min(found, key=lambda name: (ranks[name.lower()], name), default=None)


def choose_split(
    names: Iterable[str],
    split: str,
    images_in: Callable[[str], Iterable[str]],
    options: DataOptions = NO_OPTIONS,
) -> str | None:
    """The folder or archive of a split, '' if the data is not divided into splits, None if only others exist.

    Args:
        names: The folders and archives of the dataset.
        split: 'train' or 'val'.
        images_in: Lists the images and label tables at any depth in one of the folders, relative to it.
        options: The names of the splits.

    Raises:
        UserError: The name in the options does not exist, or a folder may be a split as well as a class.
    """
    if options.is_undivided:
        return ''
    visible = [name for name in names if not is_hidden(name)]
    found = match_split(visible, split, options)
    name = options.split_name(split)
    if found is None and name is not None:
        hint = did_you_mean(name, visible) or f', only {", ".join(sorted(visible, key=natural_order)[:5]) or "nothing"}'
        raise UserError(f"the data has no folder or archive '{name}'{hint}; correct --{split}-split")
    matches = {other: match_split(visible, other, options) for other in SPLIT_NAMES}
    if not any(matches.values()) or _are_classes(visible, matches, images_in, options):
        return ''
    return found


def _are_classes(
    names: list[str],
    matches: dict[str, str | None],
    images_in: Callable[[str], Iterable[str]],
    options: DataOptions,
) -> bool:
    """True if folders that are named like splits are classes, as in bus/, car/, train/.

    Raises:
        UserError: It cannot be told, because they contain folders of images themselves.
    """
    if options.train_split or options.val_split:
        return False
    matched = [name for name in names if any(match_split([name], split) for split in SPLIT_NAMES)]
    others = [name for name in names if name not in matched and any(map(is_image, images_in(name)))]
    # an archive is not a class
    if not others or any(name.lower().endswith(ARCHIVES) for name in matched):
        return False
    if not any('/' in name or name == LABEL_TABLE for match in matched for name in images_in(match)):
        return True
    if all(matches.values()):
        return False
    split = next(split for split, name in matches.items() if name)
    raise UserError(
        f"the folder '{matches[split]}' may be a split or a class, next to {', '.join(sorted(others)[:3])}; choose with"
        f' --{split}-split {matches[split]}, or --{split}-split {UNDIVIDED} if all folders are classes'
    )


def common_folder(names: Iterable[str], options: DataOptions = NO_OPTIONS) -> str:
    """The folder, such as 'photos/', around all splits or classes of an archive; '' if there is none."""
    folders = [name.split('/')[:-1] for name in names if is_image(name)]
    prefix = ''
    for depth in range(max(map(len, folders), default=0) - 1):
        # images higher up are outside of the class folders in any case
        here = {folder[depth] for folder in folders if len(folder) > depth}
        if len(here) > 1 or any(match_split(here, split, options) for split in SPLIT_NAMES):
            break
        prefix += f'{here.pop()}/'
    return prefix


def group_by_class(names: Iterable[str]) -> dict[str, list[str]]:
    """The images of each class, which is their top folder; classes and images in natural order."""
    classes: dict[str, list[str]] = {}
    for name in names:
        folder, slash, _ = name.partition('/')
        if slash and is_image(name):
            classes.setdefault(folder, []).append(name)
    return {folder: sorted(classes[folder], key=natural_order) for folder in sorted(classes, key=natural_order)}
