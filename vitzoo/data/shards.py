"""WebDataset shards: tar files with <key>.jpg and <key>.cls or <key>.json for each image.

Shards are indexed once and then read in random order, not streamed, so an epoch has each image once, its order does not
depend on the number of processes, and training resumes at any step. https://github.com/webdataset/webdataset
"""

import json
import re
import sys
from collections.abc import Iterable
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.progress import track

from vitzoo.data.archives import Tar
from vitzoo.data.layout import SPLIT_NAMES, SUFFIXES, Split, is_hidden, is_image, natural_order, split_names
from vitzoo.data.options import NO_OPTIONS, DataOptions
from vitzoo.data.reader import LabelledReader
from vitzoo.errors import UserError, count_of, is_first_process

# keys of a .json file that may hold the label
JSON_KEYS = ('label', 'cls', 'class')


def find_shards(folder: str, split: str, options: DataOptions) -> Split | None:
    """Find a split of the shards in a folder; None if there are only other splits.

    The shards of a split are in a subfolder (train/…, val/…) or have its name in theirs (imagenet-train-000.tar). Of
    val and test, 'val' is the former. If there are no splits, all shards are used. A name in the options is looked up
    in the same way, anywhere in the names of the shards.

    Raises:
        UserError: There are no shards, or none of the name in the options. On opening the split: they contain no
            images, or images without labels.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(f"the folder of shards '{root}' does not exist")
    everything = _in_natural_order(root.glob('*.tar'))
    if not options.is_undivided:
        if shards := _shards_of(root, split, options):
            return Split(partial(ShardReader, root, shards, options))
        if name := options.split_name(split):
            raise UserError(f"no shard (.tar) in '{root}' has '{name}' in its name; correct --{split}-split")
        if any(_shards_of(root, other, options) for other in SPLIT_NAMES):
            return None
    if not everything:
        raise UserError(f"there are no shards (.tar) in '{root}'")
    return Split(partial(ShardReader, root, everything, options), is_whole=True)


class ShardReader(LabelledReader):
    """The images of shards, labelled by the .cls (a number or a name) or .json (`label`) file of the same key.

    Numbers are looked up in classnames.txt (one name per line) if it exists in the folder of the shards. `input_key` in
    the options is the suffix of the images, and `target_key` that of their labels, or their key in the .json file.
    """

    root: Path
    is_multi_label = False

    def __init__(self, root: Path, shards: list[Path], options: DataOptions = NO_OPTIONS) -> None:
        super().__init__()
        self.root = root
        self.tars: list[Tar] = []
        self.places: list[tuple[int, str]] = []
        names: list[str] = []
        for number, shard in enumerate(_show_progress(shards)):
            self.tars.append(Tar(shard))
            found = _find_samples(self.tars[-1], options)
            self.places += [(number, image) for image in found]
            names += found.values()
        if not names:
            suffixes = options.input_key or ', '.join(sorted(SUFFIXES))
            raise UserError(f"the shards in '{root}' contain no images ({suffixes})")
        listed = {str(number): name for number, name in enumerate(_read_class_names(root))}
        # 007 is the number 7
        names = [str(int(name)) if listed and name.isdecimal() else name for name in names]
        known = {*listed, *listed.values()}
        unnamed = next((name for name in names if listed and name.isdecimal() and name not in known), None)
        if unnamed is not None:
            raise UserError(
                f"'{root}/classnames.txt' has {count_of(len(listed), 'name')}, and none for the label {unnamed}; add it"
            )
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
    # no bar in log files, and one bar for all processes
    hidden = not is_first_process() or not sys.stderr.isatty()
    return track(shards, 'reading the shards', transient=True, console=Console(stderr=True), disable=hidden)


def _shards_of(root: Path, split: str, options: DataOptions) -> list[Path]:
    """The shards of the first name of the split that has any, in a subfolder of that name or with it in theirs."""
    given = options.split_name(split)
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
    for word in split_names(split) if given is None else (given.lower(),):
        shards = [shard for folder in folders if folder.name.lower() == word for shard in folder.glob('*.tar')]
        if not shards and given is None:
            shards = [shard for shard in root.glob('*.tar') if _split_word(shard) == word]
        elif not shards:
            whole_word = re.compile(rf'(?<![^\W_]){re.escape(word)}(?![^\W_])')
            shards = [shard for shard in root.glob('*.tar') if whole_word.search(shard.stem.lower())]
        if shards:
            return _in_natural_order(shards)
    return []


def _split_word(shard: Path) -> str | None:
    """The last word of a shard's name that is the name of a split, so that no shard is in two of them."""
    words = re.split(r'[\W_]+', shard.stem.lower())
    return next((word for word in reversed(words) if any(word in split_names(split) for split in SPLIT_NAMES)), None)


def _in_natural_order(shards: Iterable[Path]) -> list[Path]:
    return sorted(shards, key=lambda path: natural_order(path.name))


def _find_samples(tar: Tar, options: DataOptions) -> dict[str, str]:
    """The label of each image of a shard."""
    images: dict[str, str] = {}
    labels: dict[str, str] = {}
    for name in tar.names:
        # the key ends at the first dot of the file name
        folder, slash, file = name.rpartition('/')
        stem, _, suffix = file.partition('.')
        key, suffix = f'{folder}{slash}{stem}', suffix.lower()
        if suffix in ('json', (options.target_key or 'cls').lower()):
            labels[key] = name if suffix != 'json' else labels.get(key, name)
        elif _is_input(name, suffix, options.input_key):
            images[name] = key
    samples, kinds = {}, f'.{options.target_key or "cls"} or .json'
    for name, key in images.items():
        if key not in labels:
            raise UserError(f"the image '{name}' of the shard {tar.root} has no {kinds} file; correct --target-key")
        samples[name] = _read_label(tar, labels[key], (options.target_key,) if options.target_key else JSON_KEYS)
    return samples


def _is_input(name: str, suffix: str, input_key: str | None) -> bool:
    if is_hidden(name):
        return False
    # timm separates alternatives by ;
    return suffix in input_key.lower().split(';') if input_key else '.' not in suffix and is_image(name)


def _read_label(tar: Tar, name: str, keys: tuple[str, ...]) -> str:
    place, content = f"'{name}' of the shard {tar.root}", tar.read(name)
    try:
        label = content.decode().strip()
    except UnicodeDecodeError as error:
        raise UserError(f'{place} is not UTF-8; write it again') from error
    if name.lower().endswith('.json'):
        label = _label_in_json(place, label, keys)
    if label in ('', '-1'):
        raise UserError(f'{place} has {f"the label {label}" if label else "no label"}; remove its image, or label it')
    return label


def _label_in_json(place: str, text: str, keys: tuple[str, ...]) -> str:
    try:
        content = json.loads(text)
        label = next(content[key] for key in keys if content.get(key) is not None)
    except (ValueError, AttributeError, StopIteration) as error:
        raise UserError(f'{place} has no {", ".join(keys)}; see --target-key') from error
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if not isinstance(label, str | int):
        raise UserError(f'{place} has the label {label!r}, which is neither a name nor a whole number; correct it')
    return str(label).strip()


def _read_class_names(folder: Path) -> list[str]:
    """The lines of classnames.txt, or [] if it does not exist or has duplicates."""
    path = folder / 'classnames.txt'
    try:
        # Windows' editor writes a byte order mark
        names = path.read_text(encoding='utf-8-sig').split('\n') if path.is_file() else []
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8; save it in this encoding") from error
    names = [name.strip() for name in names if name.strip()]
    return names if len(set(names)) == len(names) else []
