"""What may be wrong with a dataset, found in the names of its files and in its pictures.

A finding is an error where training would end or its accuracy would be wrong, a warning where the model would be worse
than need be, and a note where images are read in a way that one should know.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vitzoo.data.dataset import Images
from vitzoo.data.label_table import TABLE
from vitzoo.data.layout import SPLIT_NAMES, SUFFIXES, find_split, is_hidden, is_image, natural_order
from vitzoo.doctor.facts import Facts, find_alike

SEVERITIES = ('error', 'warning', 'note')
# pictures that cameras and designers save, and training does not read
UNREAD = {'.heic', '.heif', '.avif', '.jxl', '.jp2', '.jfif', '.svg', '.psd', '.raw', '.dng', '.cr2', '.nef', '.arw'}
MOST_UNEQUAL, MOST_ELONGATED = 10, 3
TRAITS = {
    'deep': ('have more than 8 bits for a tone', 'they are scaled to 8 bits, 65535 being white; nothing to do'),
    'cmyk': (
        'are in CMYK, for print',
        'they are converted without a colour profile; save them as RGB if it matters',
    ),
    'transparent': ('are transparent in parts', 'these become white; paint what should lie behind them, if not white'),
    'palette': ('have a palette', 'they are converted to RGB; nothing to do'),
    'rotated': ('are turned by their EXIF data', 'they are turned as a person sees them; nothing to do'),
    'animated': ('hold several pictures', 'the first one counts; save others that matter as files of their own'),
}


@dataclass
class Finding:
    """Something that may be wrong, where, and what to do about it."""

    code: str
    severity: str
    message: str
    fix: str
    where: list[str]


@dataclass
class Part:
    """The training or the validation images, what each picture is like, and what lies around them."""

    split: str
    images: Images
    # of every file, images or not, and of hidden and empty folders, which end in '/'
    names: list[str]
    facts: list[Facts] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How many images have each class or label."""
        targets = self.images.targets
        labels = [label for target in targets for label in (target if self.images.is_multi_label else [target])]
        counts = Counter(labels)
        return {name: counts[label] for label, name in enumerate(self.images.class_names) if counts[label]}

    def pictures(self) -> list['Picture']:
        """Its images one by one."""
        targets, count = self.images.targets, len(self.facts)
        return [Picture(self.split, self.images.filename(i), targets[i], self.facts[i]) for i in range(count)]


@dataclass(frozen=True)
class Picture:
    """One image of a part."""

    split: str
    file: str
    target: int | list[int]
    facts: Facts

    def __str__(self) -> str:
        return f'{self.split}/{self.file}'

    @property
    def size(self) -> str:
        """Its name with its width and height."""
        return f'{self} ({self.facts.width} x {self.facts.height})'


def check(train: Part, val: Part | None, root: Path | None = None, img_size: int = 224) -> list[Finding]:
    """Everything that may be wrong with a dataset, errors first.

    Args:
        train: The training part, with the facts of its pictures.
        val: The validation part, where there is one; its classes need not be those of `train`.
        root: The folder that the parts lie in, where there is one.
        img_size: The size that images are going to be resized to.
    """
    parts = [train] if val is None else [train, val]
    pictures = [picture for part in parts for picture in part.pictures()]
    readable = [picture for picture in pictures if not picture.facts.error]
    findings = [*check_files(parts), *check_surroundings(parts, root), *check_classes(parts), *check_parts(train, val)]
    findings += [*check_reading(pictures), *check_sizes(readable, img_size), *check_copies(readable)]
    return sorted((one for one in findings if one.where), key=lambda one: SEVERITIES.index(one.severity))


def check_files(parts: list[Part]) -> Iterator[Finding]:
    """Files and folders that are no images of a class."""
    names = [(part.split, name) for part in parts for name in part.names]
    hidden = [(split, name) for split, name in names if is_hidden(name)]
    visible = [(split, name) for split, name in names if not is_hidden(name) and name[-1] != '/' and name != TABLE]
    yield Finding(
        'hidden',
        'note',
        'hidden folders and images do not count',
        'delete them: other programs would take .ipynb_checkpoints for a class',
        [f'{split}/{name}' for split, name in hidden if name[-1] == '/' or _suffix(name) in SUFFIXES],
    )
    yield Finding(
        'unread-format',
        'warning',
        'pictures are in a format that is not read',
        'convert them to JPEG or PNG, or remove them',
        [f'{split}/{name}' for split, name in visible if _suffix(name) in UNREAD],
    )
    yield Finding(
        'not-images',
        'note',
        'files are no images, and do not count',
        'nothing to do; if they are images, give them the suffix of their format',
        [f'{split}/{name}' for split, name in visible if _suffix(name) not in SUFFIXES | UNREAD],
    )


def check_surroundings(parts: list[Part], root: Path | None) -> Iterator[Finding]:
    """Images that are not used because of where they are."""
    is_listed = parts[0].images.is_multi_label
    unused = []
    for part in parts:
        used = {part.images.filename(index) for index in range(len(part.images))}
        unused += [f'{part.split}/{name}' for name in part.names if is_image(name) and name not in used]
    beside = [] if root is None else [path for path in sorted(root.iterdir()) if not _has_a_role(path.name)]
    # what is below the folder is named above where it is itself a part
    beside = [] if str(root) == parts[0].images.root else beside
    yield Finding(
        'unlisted' if is_listed else 'outside-class',
        'warning',
        f'images are not in {TABLE}, and not used' if is_listed else 'images are outside of the class folders, unused',
        f'add them to {TABLE}, or remove them' if is_listed else 'move each into the folder of its class, or remove it',
        unused + [path.name for path in beside if path.is_file() and is_image(path.name)],
    )
    yield Finding(
        'unused-folder',
        'warning',
        'folders beside those for training and validation hold images that are not used',
        'move their images into these two; if they are all classes, move all of them into a folder named train',
        [f'{path.name}/' for path in beside if path.is_dir() and _holds_images(path)],
    )


def check_classes(parts: list[Part]) -> Iterator[Finding]:
    """Folders of classes, and how many images each has."""
    train, is_listed = parts[0], parts[0].images.is_multi_label
    counts, word = train.counts(), 'labels' if is_listed else 'classes'
    yield Finding(
        'empty-class',
        'warning',
        'class folders have no images, and so are no classes',
        'add images, or remove them',
        [] if is_listed else [f'{part.split}/{name}/' for part in parts for name in _empty_classes(part)],
    )
    yield Finding(
        'case-only',
        'warning',
        'names differ in capital letters only; Windows and macOS take them for one',
        'merge the classes, or rename the files',
        [names for part in parts for names in _differ_in_case(part)],
    )
    yield Finding(
        'numeric-names',
        'note',
        f'{word} are named by numbers, which are in natural order here (2 before 10) and in that of text elsewhere',
        'go by the names that a run keeps in its config.json, not by position, or give them names that say something',
        [name for name in counts if name.isdecimal()],
    )
    yield Finding(
        'nested-classes',
        'warning',
        'class folders have folders of the same names in them, as if those were the classes and these the parts',
        'name the folder of the training images train, and that of the validation images val',
        [] if is_listed else _look_like_parts(train),
    )
    most = max(counts.values())
    yield Finding(
        'imbalance',
        'warning',
        f'{word} have less than a {MOST_UNEQUAL}th of the {most:,} images that the largest has',
        f'train with --balance loss{"" if is_listed else " or --balance sampler"}, or add images',
        [f'{name} ({counts[name]:,})' for name in counts if MOST_UNEQUAL * counts[name] < most],
    )


def check_parts(train: Part, val: Part | None) -> Iterator[Finding]:
    """Classes that are in one part only."""
    word = 'labels' if train.images.is_multi_label else 'classes'
    counts = train.counts()
    if val is None:
        yield Finding(
            'no-validation',
            'note',
            'there is no validation part: training holds out a share of each class, see --val-fraction',
            'nothing to do; only if some images belong together (one object, one day), divide them yourself into val/',
            [train.images.root],
        )
        yield Finding(
            'single-image',
            'warning',
            f'{word} have one image, so none can be held out for validation',
            'add images',
            [name for name in counts if counts[name] == 1],
        )
        return
    in_val = val.counts()
    yield Finding(
        'missing-in-train',
        'error',
        f'{word} are in the validation part only, so training does not start',
        'add training images, correct the name, or remove them',
        [name for name in in_val if name not in counts],
    )
    yield Finding(
        'missing-in-val',
        'warning',
        f'{word} have no validation images, so the accuracy says nothing of them',
        'move a part of their training images there',
        [name for name in counts if name not in in_val],
    )


def check_reading(pictures: list[Picture]) -> Iterator[Finding]:
    """Images that cannot be read, and those that are not read as they are."""
    yield Finding(
        'unreadable',
        'error',
        'images cannot be read, and training ends at the first of them',
        'replace or remove them',
        [f'{picture} ({picture.facts.error})' for picture in pictures if picture.facts.error],
    )
    for trait, (message, fix) in TRAITS.items():
        has = [str(picture) for picture in pictures if trait in picture.facts.traits]
        yield Finding(trait, 'note', f'images {message}', fix, has)


def check_sizes(pictures: list[Picture], img_size: int) -> Iterator[Finding]:
    """Images of which a model sees little."""
    sides = [(picture, *sorted((picture.facts.width, picture.facts.height))) for picture in pictures]
    yield Finding(
        'small',
        'warning',
        f'images are enlarged more than twice to be {img_size} pixels high, so a patch shows hardly anything',
        'use the originals, or train at their size (--img-size, and doctor takes it too) with small patches',
        [picture.size for picture, short, _ in sides if 2 * short < img_size],
    )
    yield Finding(
        'elongated',
        'note',
        f'images are more than {MOST_ELONGATED} times as long as wide, and evaluation looks at a square in the middle',
        'cut them into pieces, or pad them to squares',
        [picture.size for picture, short, long in sides if long > MOST_ELONGATED * short],
    )


def check_copies(pictures: list[Picture]) -> Iterator[Finding]:
    """Pictures that are there more than once."""
    copies = {}
    for picture in pictures:
        copies.setdefault(picture.facts.digest, []).append(picture)
    copies = [group for group in copies.values() if len(group) > 1]
    across = [group for group in copies if _splits(group) > 1]
    unclear = [group for group in copies if group not in across and any(one.target != group[0].target for one in group)]
    within = [group for group in copies if group not in across and group not in unclear]
    alike = [[pictures[i], pictures[j]] for i, j in find_alike([picture.facts for picture in pictures])]
    yield Finding(
        'copies-across',
        'error',
        'images are in both parts, so the accuracy is measured on what was trained on',
        'remove them from one part',
        _join(across),
    )
    yield Finding(
        'unclear-class', 'warning', 'images are in several classes', 'remove all but the right one', _join(unclear)
    )
    yield Finding(
        'copies-within',
        'warning',
        'images are there more than once; where part of them is held out, a copy may be trained on',
        'remove all but one',
        _join(within),
    )
    yield Finding(
        'alike-across',
        'warning',
        'images of the validation part look like training images: saved again, resized, or frames of one scene',
        'look at them, and keep what is of one origin in one part',
        _join([pair for pair in alike if _splits(pair) > 1]),
    )
    yield Finding(
        'alike-within',
        'note',
        'images look like another of the same part: saved again, resized, or frames of one scene',
        'look at them; where part of the images is held out, keep one of each or divide them yourself into val/',
        _join([pair for pair in alike if _splits(pair) == 1]),
    )


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _has_a_role(name: str) -> bool:
    return is_hidden(name) or any(find_split([name], split) for split in SPLIT_NAMES)


def _holds_images(folder: Path) -> bool:
    return any(is_image(name) for _, _, names in os.walk(folder) for name in names)


def _empty_classes(part: Part) -> list[str]:
    folders = {name.split('/')[0] for name in part.names if '/' in name and not is_hidden(name)}
    return sorted(folders - set(part.images.class_names), key=natural_order)


def _differ_in_case(part: Part) -> list[str]:
    """Names in one folder that only their capital letters tell apart."""
    paths = {name for name in part.names if not is_hidden(name)}
    paths |= {name.split('/')[0] for name in paths if '/' in name}
    alike = {}
    for path in paths:
        folder, slash, name = path.rstrip('/').rpartition('/')
        alike.setdefault((folder, name.casefold()), set()).add(f'{part.split}/{folder}{slash}{name}')
    return [' = '.join(sorted(group)) for group in alike.values() if len(group) > 1]


def _look_like_parts(part: Part) -> list[str]:
    """The class folders, where all images lie in folders below them and two of these are in several."""
    below = {}
    for index in range(len(part.images)):
        top, *folders = part.images.filename(index).split('/')[:-1]
        below.setdefault(top, set()).add(folders[0] if folders else '')
    times = Counter(folder for folders in below.values() for folder in folders)
    is_nested = all('' not in folders for folders in below.values())
    return [f'{part.split}/{top}/' for top in below] if is_nested and sum(n > 1 for n in times.values()) > 1 else []


def _splits(pictures: list[Picture]) -> int:
    return len({picture.split for picture in pictures})


def _join(groups: list[list[Picture]]) -> list[str]:
    return [' = '.join(map(str, group)) for group in groups]
