"""WebDataset shards: tar files with <key>.jpg and, of the same key, <key>.cls or <key>.json.

They are indexed once and then read in random order, not streamed, so an epoch has each image once, in the same order
for any number of processes, and is taken up again anywhere. https://github.com/webdataset/webdataset
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.progress import track
from timm.data.readers.reader import Reader

from vitzoo.data.archives import Tar
from vitzoo.data.layout import SPLIT_NAMES, SUFFIXES, is_image, natural_order
from vitzoo.errors import UserError

# the keys of a .json in which a label is looked for
JSON_KEYS = ('label', 'cls', 'class')


def open_shards(folder: str, split: str, divides: bool = False) -> tuple['ShardReader', bool]:
    """A reader for a split of the shards in a folder, and whether there is no validation part.

    A split is a subfolder (train/…, val/…), or all shards with its name in theirs (imagenet-train-000.tar), or, where
    there is neither, all of them. Where there is no validation part and `divides`, 'val' is what 'train' is.

    Raises:
        UserError: There are no shards, or they hold no images with labels.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(f"the folder of shards '{root}' does not exist")
    found = {wanted: _find_shards(root, words) for wanted, words in SPLIT_NAMES.items()}
    is_undivided = not found['val']
    shards = found.get(split) or (found['train'] if divides and is_undivided else [])
    if not any(found.values()):
        shards = sorted(root.glob('*.tar'), key=lambda path: natural_order(path.name))
    if not shards:
        raise UserError(f"there are no shards for '{split}' (.tar) in '{root}'")
    return ShardReader(root, shards), is_undivided


class ShardReader(Reader):
    """The images of shards, each with the label in the .cls file (a number or a name) or .json (`label`) of its key.

    Labels that are numbers are looked up in classnames.txt (one name in a line), where it lies next to the shards.
    """

    is_multi_label = False

    def __init__(self, root: Path, shards: list[Path]):
        super().__init__()
        self.root, self.tars, self.places, names = root, [], [], []
        for number, shard in enumerate(_show_progress(shards)):
            self.tars.append(Tar(shard))
            found = _find_samples(self.tars[-1])
            self.places += [(number, image) for image in found]
            names += found.values()
        if not names:
            raise UserError(f"the shards in '{root}' hold no images ({', '.join(sorted(SUFFIXES))})")
        listed = {str(number): name for number, name in enumerate(_read_class_names(root))}
        names = [listed.get(name, name) for name in names]
        self.class_names = list(dict.fromkeys([*listed.values(), *sorted(set(names), key=natural_order)]))
        label_of = {name: label for label, name in enumerate(self.class_names)}
        self.labels = [label_of[name] for name in names]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[BytesIO, int]:
        number, name = self.places[index]
        return BytesIO(self.tars[number].read(name)), self.labels[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        number, name = self.places[index]
        if basename:
            return PurePosixPath(name).name
        shard = self.tars[number].root
        return f'{shard if absolute else shard.relative_to(self.root)}/{name}'


def _show_progress(shards: list[Path]) -> Iterable[Path]:
    # one of many processes is enough, and a file needs no bar
    hidden = os.environ.get('RANK', '0') != '0' or not sys.stderr.isatty()
    return track(shards, 'reading the shards', transient=True, console=Console(stderr=True), disable=hidden)


def _find_shards(root: Path, words: tuple[str, ...]) -> list[Path]:
    """The shards in a subfolder with one of these names, or else with one of them as a part of their own name."""
    folders = [folder for folder in root.iterdir() if folder.is_dir() and folder.name.lower() in words]
    shards = [shard for folder in folders[:1] for shard in folder.glob('*.tar')]
    if not shards:
        shards = [shard for shard in root.glob('*.tar') if set(words) & set(re.split(r'[\W_]+', shard.stem.lower()))]
    return sorted(shards, key=lambda path: natural_order(path.name))


def _find_samples(tar: Tar) -> dict[str, str]:
    """The label of each image of a shard."""
    images, labels = {}, {}
    for name in tar.names:
        # a key ends at the first dot of the file's name
        folder, slash, file = name.rpartition('/')
        stem, _, suffix = file.partition('.')
        key, suffix = f'{folder}{slash}{stem}', suffix.lower()
        if suffix in ('cls', 'json'):
            labels[key] = name if suffix == 'cls' else labels.get(key, name)
        elif '.' not in suffix and is_image(name):
            images[name] = key
    samples = {}
    for name, key in images.items():
        if key not in labels:
            raise UserError(f"the image '{name}' of the shard {tar.root} has no .cls or .json of the same name")
        samples[name] = _read_label(tar, labels[key])
    return samples


def _read_label(tar: Tar, name: str) -> str:
    text = tar.read(name).decode(errors='replace').strip()
    if name.lower().endswith('.cls'):
        return text
    try:
        content = json.loads(text)
        return str(next(content[key] for key in JSON_KEYS if key in content))
    except (ValueError, TypeError, StopIteration) as error:
        raise UserError(f"'{name}' of the shard {tar.root} has no {', '.join(JSON_KEYS)}") from error


def _read_class_names(folder: Path) -> list[str]:
    """The lines of classnames.txt, if there is one and no name is in it twice."""
    path = folder / 'classnames.txt'
    names = path.read_text(encoding='utf-8').split('\n') if path.is_file() else []
    names = [name.strip() for name in names if name.strip()]
    return names if len(set(names)) == len(names) else []
