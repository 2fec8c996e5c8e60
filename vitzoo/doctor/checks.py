"""Checks of a dataset, by its file names and by the facts about its images.

A finding is an error if training would end or its accuracy would be wrong, a warning if the model would be worse than
necessary, and a note about images that are converted or ignored.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vitzoo.data.archives import list_files
from vitzoo.data.dataset import Images
from vitzoo.data.held_out import hold_out
from vitzoo.data.layout import LABEL_TABLE, SPLIT_NAMES, SUFFIXES, is_hidden, is_image, match_split, natural_order
from vitzoo.data.options import NO_OPTIONS, DataOptions
from vitzoo.doctor.facts import Facts, find_near_duplicates
from vitzoo.errors import UserError

FINDING_SEVERITIES = ('error', 'warning', 'note')
# image formats of cameras and design tools that training does not support
_UNSUPPORTED_SUFFIXES = {
    *('.heic', '.heif', '.avif', '.jxl', '.jp2', '.jfif', '.svg', '.psd', '.raw', '.dng', '.cr2', '.nef', '.arw'),
}
_MAX_IMBALANCE, _MAX_ASPECT_RATIO = 10, 3
# message and fix for each of `Facts.traits`
TRAITS = {
    'deep': ('have more than 8 bits per channel', 'they are scaled to 8 bits, with 65535 as white; nothing to do'),
    'cmyk': (
        'are in CMYK',
        'they are converted without a color profile; save them as RGB if the exact colors matter',
    ),
    'transparent': (
        'are partly transparent',
        'transparent pixels become white; save the images with another background if that is wrong',
    ),
    'palette': ('have a palette', 'they are converted to RGB; nothing to do'),
    'rotated': ('have an EXIF orientation', 'they are rotated accordingly; nothing to do'),
    'animated': ('have several frames', 'the first frame is used; save other frames that matter as separate files'),
}


@dataclass
class Finding:
    """A problem, the files or classes that have it, and the fix."""

    code: str
    severity: str
    message: str
    fix: str
    where: list[str]


@dataclass
class ExaminedSplit:
    """The training or the validation split, with the facts about its images and all file names.

    Attributes:
        name: 'train' or 'val'.
        images: The images, without a transform.
        names: All files, images or not, and hidden or empty folders, which end in '/'.
        prefix: What precedes the names in findings, such as 'train/'; nothing if the data is not divided.
        facts: The facts about each image.
    """

    name: str
    images: Images
    names: list[str]
    prefix: str
    facts: list[Facts] = field(default_factory=list)

    def class_counts(self) -> dict[str, int]:
        """The number of images of each class or label that has any."""
        targets = self.images.targets
        labels = [label for target in targets for label in (target if self.images.is_multi_label else [target])]
        counts = Counter(labels)
        return {name: counts[label] for label, name in enumerate(self.images.class_names) if counts[label]}

    def samples(self) -> list['Sample']:
        """The images of the split, each with its label and facts."""
        targets, count = self.images.targets, len(self.facts)
        files = [self.prefix + self.images.filename(i) for i in range(count)]
        return [Sample(self.name, file, targets[i], self.facts[i]) for i, file in enumerate(files)]


@dataclass(frozen=True)
class Sample:
    """An image of a split."""

    split: str
    file: str
    target: int | list[int]
    facts: Facts

    def __str__(self) -> str:
        return self.file

    @property
    def classes(self) -> frozenset[int]:
        """The class, or in a multi-label dataset the labels in any order."""
        return frozenset(self.target if isinstance(self.target, list) else [self.target])

    @property
    def name_with_size(self) -> str:
        """The name with width and height."""
        return f'{self} ({self.facts.width} x {self.facts.height})'


def check(
    train: ExaminedSplit,
    val: ExaminedSplit | None,
    root: Path | None = None,
    img_size: int = 224,
    options: DataOptions = NO_OPTIONS,
) -> list[Finding]:
    """Run all checks; errors come first.

    Args:
        train: The training split, with the facts about its images, or the validation split if there is no other.
        val: The validation split, if there is one; its classes may differ from those of `train`.
        root: The folder that contains the splits, if there is one.
        img_size: The size that images are going to be resized to.
        options: The names of the splits.
    """
    splits = [train] if val is None else [train, val]
    samples = [sample for split in splits for sample in split.samples()]
    readable = [sample for sample in samples if not sample.facts.error]
    findings = [*check_files(splits), *check_unused_images(splits, root, options)]
    findings += [*check_class_folders(splits), *check_splits(train, val)]
    findings += [*check_decoding(samples), *check_sizes(readable, img_size), *check_duplicates(readable)]
    return sorted((one for one in findings if one.where), key=lambda one: FINDING_SEVERITIES.index(one.severity))


def check_files(splits: list[ExaminedSplit]) -> Iterator[Finding]:
    """Find files that are ignored: hidden ones, unsupported formats, and files other than images."""
    names = [(split.prefix, name) for split in splits for name in split.names]
    hidden = [prefix + name for prefix, name in names if is_hidden(name)]
    visible = [(prefix, name) for prefix, name in names if not is_hidden(name) and name[-1] != '/']
    visible = [prefix + name for prefix, name in visible if name != LABEL_TABLE]
    yield Finding(
        'hidden',
        'note',
        'hidden folders and images are ignored',
        'delete them: other programs would read .ipynb_checkpoints as a class',
        [name for name in hidden if name[-1] == '/' or _suffix(name) in SUFFIXES],
    )
    yield Finding(
        'unread-format',
        'warning',
        'images are in an unsupported format',
        'convert them to JPEG or PNG, or remove them',
        [name for name in visible if _suffix(name) in _UNSUPPORTED_SUFFIXES],
    )
    yield Finding(
        'not-images',
        'note',
        'files are not images and are ignored',
        'nothing to do; if they are images, rename them with the suffix of their format',
        [name for name in visible if _suffix(name) not in SUFFIXES | _UNSUPPORTED_SUFFIXES],
    )


def check_unused_images(
    splits: list[ExaminedSplit], root: Path | None, options: DataOptions = NO_OPTIONS
) -> Iterator[Finding]:
    """Find images that are not used because of their location."""
    is_listed = splits[0].images.is_multi_label
    unused = []
    for split in splits:
        used, left_out = {split.images.filename(index) for index in range(len(split.images))}, {*split.images.left_out}
        used.update(name for name in split.names if name.partition('/')[0] in left_out)
        unused += [f'{split.prefix}{name}' for name in split.names if is_image(name) and name not in used]
    paths = [] if root is None else sorted(root.iterdir())
    others = [path for path in paths if not _is_split_or_hidden(path.name, options)]
    # if the folder itself is a split, the loop above has its content
    others = [] if str(root) == splits[0].images.root else others
    unused += [path.name for path in others if path.is_file() and is_image(path.name)]
    if is_listed:
        yield Finding(
            'unlisted',
            'warning',
            f'images are not listed in {LABEL_TABLE} and not used',
            f'add them to {LABEL_TABLE}, or remove them',
            unused,
        )
    else:
        yield Finding(
            'outside-class',
            'warning',
            'images are outside of the class folders and not used',
            'move each into the folder of its class, or remove it',
            unused,
        )
    yield Finding(
        'left-out',
        'note',
        f'{"labels" if is_listed else "classes"} are not in the class map and not used',
        'add them to the class map if they are to be learned',
        [f'{split.name}: {name}' for split in splits for name in split.images.left_out],
    )
    yield Finding(
        'unused-folder',
        'warning',
        'folders next to the training and validation folders contain images that are not used',
        'move their images into the training or validation folder; if all folders are classes, move them into train/',
        [f'{path.name}/' for path in others if path.is_dir() and _contains_images(path)],
    )


def check_class_folders(splits: list[ExaminedSplit]) -> Iterator[Finding]:
    """Check class folders: empty, ambiguous or numeric names, wrong nesting, imbalance."""
    train, is_listed = splits[0], splits[0].images.is_multi_label
    counts, noun = train.class_counts(), 'labels' if is_listed else 'classes'
    yield Finding(
        'empty-class',
        'warning',
        'class folders contain no images, so they are not classes',
        'add images, or remove them',
        [] if is_listed else [f'{split.prefix}{name}/' for split in splits for name in _empty_classes(split)],
    )
    yield Finding(
        'no-images',
        'warning',
        f'{noun} of the class map or of the dataset have no training images, so the model does not learn them',
        'add training images, or remove them from the class map or the list of the dataset',
        [name for name in train.images.class_names if name not in counts],
    )
    yield Finding(
        'case-only',
        'warning',
        'names differ only in case; they are the same on Windows and macOS',
        'merge the classes, or rename the files',
        [names for split in splits for names in _differ_in_case(split)],
    )
    yield Finding(
        'numeric-names',
        'note',
        f'{noun} have numeric names, which are sorted as numbers here (2 before 10), but as text by other programs',
        "look classes up by name in the run's config.json instead of by index, or give them descriptive names",
        [name for name in counts if name.isdecimal()],
    )
    yield Finding(
        'nested-classes',
        'warning',
        'class folders contain subfolders of the same names, as if they were splits and the subfolders the classes',
        'name the folder of the training images train, and that of the validation images val',
        [] if is_listed else _look_like_splits(train),
    )
    yield Finding(
        'one-class',
        'error',
        'there is only one class, so training does not start',
        'add images of other classes; if the folder is not a class, see --train-split',
        train.images.class_names if len(train.images.class_names) == 1 and not is_listed else [],
    )
    most = max(counts.values())
    yield Finding(
        'imbalance',
        'warning',
        f'{noun} have less than a {_MAX_IMBALANCE}th of the {most:,} images of the largest',
        f'train with --balance loss{"" if is_listed else " or --balance sampler"}, or add images',
        [f'{name} ({counts[name]:,})' for name in counts if _MAX_IMBALANCE * counts[name] < most],
    )


def check_splits(train: ExaminedSplit, val: ExaminedSplit | None) -> Iterator[Finding]:
    """Find classes that are in one split only, or cannot be held out if there is no validation split."""
    noun = 'labels' if train.images.is_multi_label else 'classes'
    counts = train.class_counts()
    if train.name == 'val':
        yield Finding(
            'no-training',
            'error',
            'there is no training split, so training does not start',
            'move part of the images of each class into train/; `vitzoo validate` needs none',
            [train.images.root],
        )
        return
    if val is None:
        yield Finding(
            'no-validation',
            'note',
            'there is no validation split: training holds out a fraction of each class, see --val-fraction',
            'nothing to do, unless images belong together (same object, same day): then move some groups into val/',
            [train.images.root],
        )
        yield Finding(
            'single-image',
            'warning' if _can_be_divided(train) else 'error',
            f'{noun} have only one image, so none can be held out for validation',
            'add images',
            [name for name in counts if counts[name] == 1],
        )
        return
    in_val, in_train = val.class_counts(), {*train.images.class_names}
    yield Finding(
        'missing-in-train',
        'error',
        f'{noun} are only in the validation split, so training does not start',
        'add training images, correct the name, or remove them',
        [name for name in in_val if name not in in_train],
    )
    yield Finding(
        'missing-in-val',
        'warning',
        f'{noun} have no validation images, so the accuracy does not include them',
        'move some of their training images into the validation split',
        [name for name in counts if name not in in_val],
    )


def check_decoding(samples: list[Sample]) -> Iterator[Finding]:
    """Find images that cannot be decoded, and images that are converted."""
    yield Finding(
        'unreadable',
        'error',
        'images cannot be read; training would end at the first of them',
        'replace or remove them',
        [f'{sample} ({sample.facts.error})' for sample in samples if sample.facts.error],
    )
    yield Finding(
        'dark',
        'warning',
        'images have more than 8 bits per channel and are nearly black when they are scaled to 8, with 65535 as white',
        'if their values have another range, such as 0 to 255 or 4095, save them with 8 bits, or scaled to 65535',
        [str(sample) for sample in samples if 'dark' in sample.facts.traits],
    )
    for trait, (message, fix) in TRAITS.items():
        where = [str(sample) for sample in samples if trait in sample.facts.traits]
        yield Finding(trait, 'note', f'images {message}', fix, where)


def check_sizes(samples: list[Sample], img_size: int) -> Iterator[Finding]:
    """Find images that are too small or too elongated."""
    facts = [(sample, sample.facts.width, sample.facts.height) for sample in samples]
    sides = [(sample, min(width, height), max(width, height)) for sample, width, height in facts]
    yield Finding(
        'small',
        'warning',
        f'images are enlarged more than twofold to {img_size} pixels, so patches contain little detail',
        'use the originals, or train at their size (--img-size, also an option of doctor) with small patches',
        [sample.name_with_size for sample, short, _ in sides if 2 * short < img_size],
    )
    yield Finding(
        'elongated',
        'note',
        f'images are more than {_MAX_ASPECT_RATIO} times as long as wide, and evaluation uses a central square crop',
        'cut them into pieces, or pad them to squares',
        [sample.name_with_size for sample, short, long in sides if long > _MAX_ASPECT_RATIO * short],
    )


def check_duplicates(samples: list[Sample]) -> Iterator[Finding]:
    """Find images with identical pixels, and near duplicates."""
    by_digest: dict[bytes, list[Sample]] = {}
    for sample in samples:
        by_digest.setdefault(sample.facts.digest, []).append(sample)
    copies = [group for group in by_digest.values() if len(group) > 1]
    across = [group for group in copies if _num_splits(group) > 1]
    within = [group for group in copies if _num_splits(group) == 1]
    similar = [[samples[i], samples[j]] for i, j in find_near_duplicates([sample.facts for sample in samples])]
    yield Finding(
        'copies-across',
        'error',
        'images are in both splits, so the accuracy is partly measured on training images',
        'remove them from one of the splits',
        _join(across),
    )
    yield Finding(
        'unclear-class',
        'warning',
        'images are in several classes',
        'remove all copies but the correct one',
        _join([group for group in within if _num_classes(group) > 1]),
    )
    yield Finding(
        'copies-within',
        'warning',
        'images have copies; if images are held out for validation, their copies may be trained on',
        'remove all copies but one',
        _join([group for group in within if _num_classes(group) == 1]),
    )
    yield Finding(
        'alike-across',
        'warning',
        'validation images are near duplicates of training images: saved again, resized, mirrored, or of one scene',
        'compare them, and keep images of the same origin in one split',
        _join([pair for pair in similar if _num_splits(pair) > 1]),
    )
    yield Finding(
        'alike-within',
        'note',
        'images are near duplicates of others in their split: saved again, resized, mirrored, or of one scene',
        'compare them; if images are held out for validation, keep one of each, or move some into val/ yourself',
        _join([pair for pair in similar if _num_splits(pair) == 1]),
    )


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_split_or_hidden(name: str, options: DataOptions) -> bool:
    return is_hidden(name) or any(match_split([name], split, options) for split in SPLIT_NAMES)


def _contains_images(folder: Path) -> bool:
    return any(map(is_image, list_files(folder)))


def _empty_classes(split: ExaminedSplit) -> list[str]:
    folders = {name.split('/')[0] for name in split.names if '/' in name and not is_hidden(name)}
    return sorted(folders - {name.split('/')[0] for name in split.names if is_image(name)}, key=natural_order)


def _differ_in_case(split: ExaminedSplit) -> list[str]:
    """Names in the same folder that differ only in case."""
    paths = {name for name in split.names if not is_hidden(name)}
    paths |= {name.split('/')[0] for name in paths if '/' in name}
    groups: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        folder, slash, name = path.rstrip('/').rpartition('/')
        groups.setdefault((folder, name.casefold()), set()).add(f'{split.prefix}{folder}{slash}{name}')
    return [' = '.join(sorted(group)) for group in groups.values() if len(group) > 1]


def _look_like_splits(split: ExaminedSplit) -> list[str]:
    """The class folders, if all their images are in subfolders and at least two subfolder names are repeated."""
    if not split.names:
        # not a dataset of files
        return []
    subfolders: dict[str, set[str]] = {}
    for index in range(len(split.images)):
        top, *folders = split.images.filename(index).split('/')[:-1]
        subfolders.setdefault(top, set()).add(folders[0] if folders else '')
    if any('' in folders for folders in subfolders.values()):
        return []
    counts = Counter(folder for folders in subfolders.values() for folder in folders)
    repeated = [folder for folder, count in counts.items() if count > 1]
    return [f'{split.prefix}{top}/' for top in subfolders] if len(repeated) > 1 else []


def _can_be_divided(split: ExaminedSplit) -> bool:
    try:
        hold_out(split.images.reader, 'val', fraction=0.2, seed=0)
    except UserError:
        return False
    return True


def _num_splits(samples: list[Sample]) -> int:
    return len({sample.split for sample in samples})


def _num_classes(samples: list[Sample]) -> int:
    return len({sample.classes for sample in samples})


def _join(groups: list[list[Sample]]) -> list[str]:
    return [' = '.join(map(str, group)) for group in groups]
