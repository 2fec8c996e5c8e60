"""Labelled images from folders, tar and zip files, WebDataset shards, torchvision and Hugging Face."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from timm.data import MultiLabelTarget
from torch.utils.data import Dataset

from vitzoo.data.archives import open_archive
from vitzoo.data.class_map import ClassMapReader, read_class_map
from vitzoo.data.decode import DECODING_ERRORS, describe_decoding_error, read_rgb
from vitzoo.data.folders import find_in_archive, find_in_folder
from vitzoo.data.held_out import Subset, find_held_out, hold_out
from vitzoo.data.layout import SPLIT_NAMES, Split, match_split, split_names
from vitzoo.data.options import DATA_OPTIONS, NO_OPTIONS, UNDIVIDED, DataOptions
from vitzoo.data.reader import LabelledReader
from vitzoo.data.third_party import check_options, find_third_party
from vitzoo.errors import UserError, count_of, did_you_mean

SAMPLE = Path(__file__).parent / 'sample'
SCHEMES = ('torch', 'hfds', 'hfids', 'wds', 'tfds')


def open_dataset(
    data_dir: str,
    split: str,
    transform: Callable | None = None,
    *,
    class_to_idx: dict[str, int] | None = None,
    multi_label: bool | None = False,
    val_fraction: float = 0,
    seed: int = 0,
    held_out: Path | None = None,
    held_out_before: Path | None = None,
    options: DataOptions = NO_OPTIONS,
) -> 'Images':
    """Open one split of a dataset.

    Args:
        data_dir: 'sample' (bundled with vitzoo); a folder, tar or zip file that contains train/ and val/ (or
            validation/, valid/, eval/, test/), each a folder or an archive of class folders; a folder, tar or zip file
            of class folders; 'wds/<folder>' for WebDataset shards; 'torch/<name>[:<root>]' for a torchvision dataset;
            'hfds/<name>[:<cache>]' for a Hugging Face dataset.
        split: 'train' or 'val'.
        transform: Applied to each PIL image (RGB, 8 bits).
        class_to_idx: The classes of the training split, so that both splits have the same labels; by default the
            classes found in this one, in natural order (2 before 10).
        multi_label: Read the labels of each image from labels.csv (columns file, labels) instead of its folder; None
            reads them from it if it exists.
        val_fraction: If the data has no validation split, the fraction of each class that is held out as 'val' and
            excluded from 'train'; 0 holds out nothing.
        seed: Together with the names of the images determines which ones are held out.
        held_out: A file written by `write_held_out`; if the data contains the images in it, 'val' is these.
        held_out_before: Such a file, of the training that made the initial weights. If `val_fraction` holds out images
            and the data contains those in the file, they are held out, and no others of their classes, which the
            weights know.
        options: The names of splits, columns and classes, if they are not the usual ones.

    Raises:
        UserError: The data does not exist, contains no images, or has images of a class that is not in `class_to_idx`.
            On indexing: an image cannot be read.
    """
    splits = Splits(data_dir, multi_label, options)
    reader, known = splits.open(split, or_train=bool(val_fraction or held_out)), None
    if held_out is not None:
        # other data is evaluated as it is
        subset = find_held_out(held_out, reader)
        reader = splits.open(split) if subset is None else subset
    elif val_fraction and not splits.has_val:
        known = None if held_out_before is None else find_held_out(held_out_before, reader)
        reader = hold_out(reader, split, val_fraction, seed, known)
    images = Images(reader, transform, class_to_idx)
    images.held_out_before = None if known is None else held_out_before
    # with the content of the class map, which a run records
    images.options = replace(options, class_map=splits.class_map)
    return images


def merge_options(given: DataOptions, about: dict, data_dir: str) -> DataOptions:
    """Complete options with those that a training run recorded, as far as they suit another kind of dataset.

    Args:
        given: The options that take precedence.
        about: What the run recorded about its data.
        data_dir: The dataset that is going to be opened.
    """
    recorded = {name: about[name] for name in DATA_OPTIONS if name in about}
    if _scheme(data_dir) != _scheme(str(about.get('data_dir', data_dir))):
        # a column of a Hugging Face dataset, for example, has no meaning for folders
        recorded = {name: value for name, value in recorded.items() if name == 'class_map'}
    if given.val_split is not None:
        recorded.pop('train_split', None)
    return DataOptions(**{**recorded, **given.given()})


class Splits:
    """The splits of a dataset; an archive of the whole dataset is indexed once for all of them.

    Args:
        data_dir: As in `open_dataset`.
        multi_label: Read labels from labels.csv; None reads them from it if it exists.
        options: As in `open_dataset`.

    Raises:
        UserError: The data does not exist, or `multi_label` or an option is set for data that does not have it.
    """

    def __init__(self, data_dir: str, multi_label: bool | None = False, options: DataOptions = NO_OPTIONS) -> None:
        self.data_dir, self.multi_label = data_dir, multi_label
        self.class_map = None if options.class_map is None else read_class_map(options.class_map)
        self._find = cache(_split_finder(str(data_dir), multi_label, options))

    @property
    def has_train(self) -> bool:
        """True if the data has training images: a split of its own, or data that is not divided."""
        return self._find('train') is not None

    @property
    def has_val(self) -> bool:
        """True if the data has a validation split of its own."""
        return self._has('val')

    @property
    def is_divided(self) -> bool:
        """True if the data has splits."""
        return any(map(self._has, SPLIT_NAMES))

    def _has(self, split: str) -> bool:
        found = self._find(split)
        return found is not None and not found.is_whole

    def open(self, split: str, *, or_train: bool = False) -> LabelledReader:
        """Index the images of a split; data that is not divided into splits is used whole.

        Args:
            split: 'train' or 'val'.
            or_train: If there is no such split, use the training images.

        Raises:
            UserError: There is no such split, or it contains no images, or none with a label.
        """
        found = self._find(split)
        if found is None and or_train:
            found = self._find('train')
        if found is None:
            other = next((f'a {name} split but ' for name in SPLIT_NAMES if name != split and self._find(name)), '')
            raise UserError(
                f"the data '{self.data_dir}' has {other}no split named {', '.join(split_names(split))}; move part of "
                f'the images of each class into one'
            )
        reader = found.open()
        if not len(reader):
            raise UserError(f'{reader.root} contains no images; choose another split, or add some')
        if self.multi_label is not None and reader.is_multi_label != self.multi_label:
            if reader.is_multi_label:
                advice = 'several labels per image; add --multi-label, or take a model that was trained with it'
            else:
                advice = 'one label per image; remove --multi-label, or take a model that was trained without it'
            raise UserError(f'{reader.root} has {advice}')
        if reader.is_multi_label and not any(reader.labels):
            raise UserError(f'{reader.root} gives no image a label; add labels, or choose another column')
        return reader if self.class_map is None else ClassMapReader(reader, self.class_map)


class Images(Dataset):
    """Labelled images from a reader; `class_names` is in label order.

    A label is a class index, or in a multi-label dataset a multi-hot float tensor (num_classes,).
    """

    options = NO_OPTIONS
    # the list of an earlier training that these images, or the others, are in
    held_out_before: Path | None = None

    def __init__(
        self, reader: LabelledReader, transform: Callable | None = None, class_to_idx: dict[str, int] | None = None
    ) -> None:
        self.reader, self.transform = reader, transform
        repeated = [name for name, count in Counter(reader.class_names).items() if count > 1]
        if repeated:
            raise UserError(f"{self.root} has several classes called '{repeated[0]}'; give them different names")
        class_to_idx = class_to_idx or {name: label for label, name in enumerate(reader.class_names)}
        self.is_multi_label = reader.is_multi_label
        others = [name for name in reader.class_names if name not in class_to_idx]
        # the data may list classes without images
        unknown = _with_images(others, reader) if others else []
        if unknown:
            more = f' (and {len(unknown) - 1} more)' if unknown[1:] else ''
            raise UserError(
                f"the {'label' if self.is_multi_label else 'class'} '{unknown[0]}'{more} of {self.root} is not"
                f' one of the {len(class_to_idx)} training classes{did_you_mean(unknown[0], class_to_idx) or "."}'
                f' {_advise_on_unknown(others)}'
            )
        self.class_names = sorted(class_to_idx, key=class_to_idx.__getitem__)
        # maps the reader's class indices to ours; those of unknown classes do not occur
        self.label_map = [class_to_idx.get(name, -1) for name in reader.class_names]
        self.to_multi_hot = MultiLabelTarget(len(class_to_idx)) if self.is_multi_label else None

    @property
    def root(self) -> str:
        """Path or name of the data."""
        return str(self.reader.root)

    @property
    def is_held_out(self) -> bool:
        """True if this is a subset of the images found: those held out, or the others."""
        return isinstance(self.reader, Subset)

    @property
    def num_missing(self) -> int:
        """The number of images that a run held out and that the data does not have any more."""
        return self.reader.num_missing if isinstance(self.reader, Subset) else 0

    @property
    def left_out(self) -> list[str]:
        """The classes of the data that are not in the class map, so that their images are not used."""
        reader = self.reader.reader if isinstance(self.reader, Subset) else self.reader
        return getattr(reader, 'left_out', [])

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that differ for images of other names, without names also of other datasets."""
        names = self.reader.filenames()
        names = [self.reader.source, *names] if self.reader.source else names
        return hashlib.sha256('\0'.join(names).encode(errors='surrogateescape')).hexdigest()[:8]

    def describe_left_out(self) -> str:
        """Describe in one sentence the classes of `left_out`."""
        more, are = ', …' if self.left_out[3:] else '', 'are' if self.left_out[1:] else 'is'
        return (
            f'{count_of(len(self.left_out), "class")} of {self.root} {are} not in the class map and not used:'
            f' {", ".join(self.left_out[:3])}{more}'
        )

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Label of each class name, as `open_dataset` takes it for another split."""
        return {name: label for label, name in enumerate(self.class_names)}

    @property
    def targets(self) -> list:
        """The label of each image, in a multi-label dataset the list of its labels; does not read images."""
        return [self._label(label) for label in self.reader.labels]

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple:
        if not -len(self) <= index < len(self):
            # ends a for loop; DECODING_ERRORS below include IndexError
            raise IndexError(index)
        # a training transform chooses its crop first and decodes only that
        read = getattr(self.transform, 'read', read_rgb)
        try:
            file, label = self.reader[index]
            image = read(file)
        except DECODING_ERRORS as error:
            name, problem = self.filename(index), describe_decoding_error(error)
            raise UserError(
                f'cannot read the image {name} of {self.root} ({problem}); replace or remove it; `vitzoo doctor` lists'
                f' all such images'
            ) from error
        label = self._label(label)
        label = label if self.to_multi_hot is None else self.to_multi_hot(label)
        return image if self.transform is None else self.transform(image), label

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """Name of an image, by default its path relative to the dataset."""
        return self.reader.filename(index, basename, absolute)

    def _label(self, label: int | list[int]) -> int | list[int]:
        return [self.label_map[item] for item in label] if isinstance(label, list) else self.label_map[label]


def _split_finder(data_dir: str, multi_label: bool | None, options: DataOptions) -> Callable[[str], Split | None]:
    """A function of the name of a split that finds it in a dataset, or returns None."""
    if not data_dir:
        # Path('') is the current folder
        raise UserError('the data folder is an empty text, such as the value of a variable that is not set')
    scheme = _scheme(data_dir)
    if scheme:
        if multi_label and scheme != 'hfds':
            raise UserError(
                '--multi-label, or a run that was trained with it, reads labels.csv from a folder, a tar or a zip file,'
                f" not from '{data_dir}'"
            )
        return partial(find_third_party, data_dir, options=options)
    check_options(data_dir, options, ('train_split', 'val_split'))
    if data_dir == 'sample' and Path(data_dir).is_dir():
        raise UserError("the data 'sample' is that of vitzoo, but also a folder here; write ./sample for the folder")
    root = SAMPLE if data_dir == 'sample' else Path(data_dir).expanduser()
    if not root.exists():
        raise UserError(f"the data folder '{root}' does not exist")
    if root.is_dir():
        return partial(find_in_folder, root, options=options, multi_label=multi_label)
    return partial(find_in_archive, open_archive(root), options=options, multi_label=multi_label)


def _scheme(data_dir: str) -> str:
    """The scheme of a dataset such as 'hfds/uoft-cs/cifar10', '' for a path."""
    scheme, _, name = data_dir.partition('/')
    return scheme.lower() if name and scheme.lower() in SCHEMES and not Path(data_dir).exists() else ''


def _with_images(names: list[str], reader: LabelledReader) -> list[str]:
    used = {reader.class_names[label] for label in reader.used_labels()}
    return [name for name in names if name in used]


def _advise_on_unknown(classes: list[str]) -> str:
    """Advice on classes that are not those of the training, which may be the splits of divided data."""
    if not all(any(match_split([name], split) for split in SPLIT_NAMES) for name in classes):
        return 'Rename or remove it, or add training images'
    return (
        f'If it is a split, give --val-split {match_split(classes, "val") or classes[0]}, because a run that was'
        f' trained with --train-split {UNDIVIDED} takes data as not divided'
    )
