"""Holding out images for validation from a dataset that has no validation split.

The choice depends only on the seed and the file names, so it is the same in every process and on every machine. A run
lists the images in <run>/held_out.csv (file, sha256, data), so that a later validation never uses training images, even
if images were added since or the folder was moved. The list of a run that began with the weights of another, or of a
student, also has the images that the earlier run held out, with another number under `data`.
"""

import csv
import hashlib
from collections import Counter, defaultdict
from pathlib import Path

from PIL import Image

from vitzoo._files import replace_file
from vitzoo.data.decode import DECODING_ERRORS
from vitzoo.data.reader import LabelledReader
from vitzoo.errors import UserError, content_error

HELD_OUT = 'held_out.csv'
# of the images that a list has, enough to recognize its data; or a share of them, for a short list; or, for a part of
# the same data such as some classes or a later split, which has few of them, a share of its own images
_ENOUGH, _ENOUGH_OF_LIST, _ENOUGH_OF_DATA = 100, 1 / 2, 1 / 25


class Subset(LabelledReader):
    """A subset of the images of a reader, with all of its classes.

    Attributes:
        listed_in: The list of `write_held_out` by which all of these images were found.
        num_missing: The number of images in it that the reader does not have.
    """

    listed_in: Path | None = None
    num_missing = 0

    def __init__(self, reader: LabelledReader, indices: list[int]) -> None:
        super().__init__()
        self.reader, self.indices, self.root, self.class_names = reader, indices, reader.root, reader.class_names
        self.is_multi_label, self.source = reader.is_multi_label, reader.source
        labels = reader.labels
        self.labels = [labels[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple:
        return self.reader[self.indices[index]]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.reader.filename(self.indices[index], basename, absolute)


def hold_out(reader: LabelledReader, split: str, fraction: float, seed: int, known: Subset | None = None) -> Subset:
    """Divide a reader's images into 'train' and 'val' and return one of the two.

    'val' gets `fraction` of each class, at least one image but never all of them; the only image of a class goes to
    'train'. An image with several labels is assigned to the rarest of them. Of a class with images in `known`, 'val'
    gets these and no others.

    Raises:
        UserError: No class has two images.
    """
    names, classes = reader.filenames(), defaultdict(list)
    for index, label in enumerate(_single_labels(reader.labels)):
        classes[label].append(index)
    held_out = set() if known is None else {*known.indices}
    for indices in classes.values():
        if not held_out.isdisjoint(indices):
            continue
        count = min(max(round(fraction * len(indices)), 1), len(indices) - 1)
        held_out.update(sorted(indices, key=lambda index: _rank(seed, names[index]))[:count])
    if split == 'val' and known is not None and len(held_out) == len(known):
        return known
    if not held_out:
        raise UserError(f'cannot hold out images of {reader.root} for validation: no class has two images; add some')
    return Subset(reader, [index for index in range(len(reader)) if (index in held_out) == (split == 'val')])


def write_held_out(
    path: Path, val: LabelledReader | None, train: LabelledReader | None = None, before: Path | None = None
) -> None:
    """Write the names of images and the SHA-256 of their files, unless all were found by this list; no list if none.

    Args:
        val: The images that are held out; None if a split is used, or if images have no classes.
        train: Those that are trained on. They are not held out any more if they have the names that are in `before`.
        before: The list of the training that made the initial weights, which is continued.
    """
    listed_in = getattr(val, 'listed_in', None)
    if listed_in is not None and path.is_file() and path.resolve() == listed_in.resolve():
        return
    lists = [] if before is None else _read_lists(before)
    known = {digest for rows in lists for _, digest in rows}
    own = [] if val is None else [(val.filename(index), hash_file(val, index)) for index in range(len(val))]
    trained = set() if train is None else _hash_named(train, {name for rows in lists for name, _ in rows})
    lists = [[row for row in rows if row[1] not in trained] for rows in lists]
    lists = [rows for rows in (*lists, [row for row in own if row[1] not in known]) if rows]
    if not lists:
        return
    with (
        replace_file(path) as partial,
        partial.open('w', newline='', encoding='utf-8', errors='surrogateescape') as file,
    ):
        writer = csv.writer(file)
        writer.writerow(['file', 'sha256', 'data'])
        writer.writerows([*row, number] for number, rows in enumerate(lists, start=1) for row in rows)


def find_held_out(path: Path, reader: LabelledReader) -> Subset | None:
    """Find the images of a reader that a file lists, by content if their names have changed; None in other data.

    Of several copies of an image, the one with the listed name is taken. Datasets may share a few images: it is other
    data if it has less than 100 of the images listed for one number of `data` and less than half of them, and less than
    4 % of its own are listed.

    Raises:
        UserError: The file cannot be read.
    """
    lists, names = _read_lists(path), reader.filenames()
    listed = {name for rows in lists for name, _ in rows}
    missing = [Counter(digest for _, digest in rows) for rows in lists]
    found: list[list[int]] = [[] for _ in lists]
    total = sum(map(len, lists))
    # images that kept their names first: if that is all of them, no other file is read
    for index in sorted(range(len(names)), key=lambda index: names[index] not in listed):
        if sum(map(len, found)) == total:
            break
        digest = hash_file(reader, index)
        number = next((number for number, counter in enumerate(missing) if counter[digest]), None)
        if number is not None:
            found[number].append(index)
            missing[number][digest] -= 1
    enough = [min(_ENOUGH, _ENOUGH_OF_LIST * len(rows), _ENOUGH_OF_DATA * len(reader)) for rows in lists]
    chosen = [number for number, indices in enumerate(found) if indices and len(indices) >= enough[number]]
    if not chosen:
        return None
    subset = Subset(reader, sorted(index for number in chosen for index in found[number]))
    subset.listed_in = path
    subset.num_missing = sum(len(lists[number]) - len(found[number]) for number in chosen)
    return subset


def _read_lists(path: Path) -> list[list[tuple[str, str]]]:
    """The names and hashes in a file of `write_held_out`, a list for each number of `data`."""
    lists: dict[str | None, list[tuple[str, str]]] = defaultdict(list)
    try:
        with path.open(newline='', encoding='utf-8', errors='surrogateescape') as file:
            for row in csv.DictReader(file):
                # older lists have no such column
                lists[row.get('data')].append((row['file'], row['sha256']))
    except (OSError, KeyError, csv.Error) as error:
        raise UserError(f'cannot read {path}, the list of held-out images: {content_error(error)}') from error
    return [*lists.values()]


def _hash_named(reader: LabelledReader, listed: set[str]) -> set[str]:
    """The hashes of the images of a reader that have one of these names."""
    return {hash_file(reader, index) for index, name in enumerate(reader.filenames()) if name in listed}


def _single_labels(labels: list) -> list:
    """The label of each image; if it has several, the rarest."""
    if not any(isinstance(label, list) for label in labels):
        return labels
    counts = Counter(item for label in labels for item in label)
    return [min(label, key=lambda item: (counts[item], item), default=None) for label in labels]


def _rank(seed: int, name: str) -> bytes:
    return hashlib.sha256(f'{seed}/{name}'.encode(errors='surrogateescape')).digest()


def hash_file(reader: LabelledReader, index: int) -> str:
    """SHA-256 of the file of an image, '' if it cannot be read."""
    try:
        file = reader[index][0]
        # of an image of torchvision's datasets the pixels, as its own loader reads them, which made older lists
        content = file.convert('RGB').tobytes() if isinstance(file, Image.Image) else file.read()
    except DECODING_ERRORS:
        # a damaged file is reported when it is evaluated
        return ''
    return hashlib.sha256(content).hexdigest()
