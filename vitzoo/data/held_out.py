"""Images held out for validation, where a dataset has no validation part of its own.

Which ones they are follows from the seed and the names of the files, so it is the same in every process and on every
machine. A run lists them in <run>/held_out.csv (file, sha256), so that what is validated later is never what was
trained on, even if images were added since or the folder has moved.
"""

import csv
import hashlib
from collections import Counter
from pathlib import Path

from timm.data.readers.reader import Reader

from vitzoo.errors import UserError

HELD_OUT = 'held_out.csv'


class Subset(Reader):
    """Some of the images of a reader, with all of its classes."""

    def __init__(self, reader: Reader, indices: list[int]):
        super().__init__()
        self.reader, self.indices, self.root, self.class_names = reader, indices, reader.root, reader.class_names
        self.is_multi_label = reader.is_multi_label
        labels = reader.labels
        self.labels = [labels[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple:
        return self.reader[self.indices[index]]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.reader.filename(self.indices[index], basename, absolute)


def hold_out(reader: Reader, split: str, fraction: float, seed: int) -> Subset:
    """The part of a reader's images that is 'val', or the rest of them, which is 'train'.

    `val` has the share `fraction` of each class, but at least one image, and leaves at least one; the only image of a
    class is trained on. An image with several labels counts for the rarest of them.

    Raises:
        UserError: No class has two images.
    """
    names, classes = reader.filenames(), {}
    for index, label in enumerate(_single_labels(reader.labels)):
        classes.setdefault(label, []).append(index)
    held_out = set()
    for indices in classes.values():
        count = min(max(round(fraction * len(indices)), 1), len(indices) - 1)
        held_out.update(sorted(indices, key=lambda index: _rank(seed, names[index]))[:count])
    if not held_out:
        raise UserError(f'none of the images of {reader.root} can be held out for validation: no class has two')
    return Subset(reader, [index for index in range(len(reader)) if (index in held_out) == (split == 'val')])


def write_held_out(path: Path, reader: Reader) -> None:
    """List the images of a reader and the hashes of their files."""
    with path.open('w', newline='', encoding='utf-8', errors='surrogateescape') as file:
        writer = csv.writer(file)
        writer.writerow(['file', 'sha256'])
        writer.writerows([reader.filename(index), _sha256(reader, index)] for index in range(len(reader)))


def find_held_out(path: Path, reader: Reader) -> Subset | None:
    """Those images of a reader that a file lists, by name and content; None where there are none.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        with path.open(newline='', encoding='utf-8', errors='surrogateescape') as file:
            listed = {row['file']: row['sha256'] for row in csv.DictReader(file)}
    except (OSError, KeyError, csv.Error) as error:
        raise UserError(f'cannot read {path}, the list of the images that were held out: {error}') from error
    named = [index for index, name in enumerate(reader.filenames()) if name in listed]
    indices = [index for index in named if _sha256(reader, index) == listed[reader.filename(index)]]
    return Subset(reader, indices) if indices else None


def _single_labels(labels: list) -> list:
    """The label of each image, of several the rarest."""
    if not any(isinstance(label, list) for label in labels):
        return labels
    counts = Counter(item for label in labels for item in label)
    return [min(label, key=lambda item: (counts[item], item), default=None) for label in labels]


def _rank(seed: int, name: str) -> bytes:
    return hashlib.sha256(f'{seed}/{name}'.encode(errors='surrogateescape')).digest()


def _sha256(reader: Reader, index: int) -> str:
    return hashlib.sha256(reader[index][0].read()).hexdigest()
