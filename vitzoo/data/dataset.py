"""Labelled images from folders, tar and zip files, and the other sources that timm reads."""

from collections.abc import Callable
from pathlib import Path

from timm.data import MultiLabelTarget
from timm.data.readers.reader import Reader
from torch.utils.data import Dataset

from vitzoo.data.archives import FileReader, Folder, Tar, Zip, open_source
from vitzoo.data.decode import DECODING_ERRORS, read_rgb, why_unreadable
from vitzoo.data.held_out import Subset, find_held_out, hold_out
from vitzoo.data.label_table import TABLE, LabelsReader
from vitzoo.data.layout import ARCHIVES, SPLIT_NAMES, SUFFIXES, common_folder, find_split, group_by_class, is_hidden
from vitzoo.data.third_party import open_named
from vitzoo.errors import UserError, did_you_mean

SAMPLE = Path(__file__).parent / 'sample'
SCHEMES = ('torch', 'hfds', 'hfids', 'wds', 'tfds')


def open_dataset(
    data_dir: str,
    split: str,
    transform: Callable | None = None,
    *,
    class_to_idx: dict[str, int] | None = None,
    multi_label: bool = False,
    val_fraction: float = 0,
    seed: int = 0,
    held_out: Path | None = None,
) -> 'Images':
    """Open one split of a dataset.

    Args:
        data_dir: 'sample' (the bundled one); a folder, tar or zip file with train/ and val/ (or validation/, valid/,
            eval/, test/), each a folder or an archive of class folders; such class folders alone; 'wds/<folder>' for
            WebDataset shards; 'torch/<name>[:<root>]' for a torchvision dataset, or 'hfds/<name>[:<cache>]' for a
            Hugging Face one.
        split: 'train' or 'val'.
        transform: Applied to each PIL image (RGB, 8 bits).
        class_to_idx: The classes of the training split, so that labels mean the same in both; by default the classes
            found here, in natural order (2 before 10).
        multi_label: Read the labels of each image from labels.csv (columns file, labels) instead of its folder.
        val_fraction: Where the data has no validation part, the share of each class that 'val' then is and 'train'
            lacks; 0 divides nothing.
        seed: Decides, with the names of the images, which of them that are.
        held_out: What `write_held_out` wrote: if the data holds any of these images, 'val' is just them.

    Raises:
        UserError: There is no such data, there are no images in it, or it has a class that `class_to_idx` lacks. Later,
            on indexing: an image cannot be read.
    """
    divides = bool(val_fraction or held_out)
    reader, is_undivided = open_reader(data_dir, split, multi_label=multi_label, divides=divides)
    if held_out is not None:
        reader = find_held_out(held_out, reader)
        if reader is None:
            # other data, which may have a validation part or must do without
            return open_dataset(data_dir, split, transform, class_to_idx=class_to_idx, multi_label=multi_label)
    elif val_fraction and is_undivided:
        reader = hold_out(reader, split, val_fraction, seed)
    return Images(reader, transform, class_to_idx)


def open_reader(
    data_dir: str, split: str, *, multi_label: bool | None = False, divides: bool = False
) -> tuple[Reader, bool]:
    """A reader for all images of a split, and whether the data has no validation part.

    Args:
        data_dir: As in `open_dataset`.
        split: As in `open_dataset`.
        multi_label: Whether labels are read from labels.csv; None for where there is one.
        divides: Whether 'val' is where 'train' is, if there is no validation part.
    """
    scheme, _, name = str(data_dir).partition('/')
    if name and scheme.lower() in SCHEMES and not Path(data_dir).exists():
        if multi_label:
            raise UserError(f"multi_label reads labels.csv from a folder, a tar or a zip file, not from '{data_dir}'")
        return open_named(str(data_dir), split, divides)
    root = SAMPLE if data_dir == 'sample' else Path(data_dir).expanduser()
    source, prefix, is_undivided = _find_images(root, split, divides)
    if multi_label is None:
        multi_label = prefix + TABLE in source.names
    return (LabelsReader if multi_label else FolderReader)(source, prefix), is_undivided


class Images(Dataset):
    """Images and their labels behind a reader; `class_names` is in label order.

    A label is the number of a class; of a multi-label dataset a float tensor with a 1 for each of the image's classes.
    """

    def __init__(self, reader: Reader, transform: Callable | None = None, class_to_idx: dict[str, int] | None = None):
        self.reader, self.transform = reader, transform
        class_to_idx = class_to_idx or {name: label for label, name in enumerate(reader.class_names)}
        self.is_multi_label = reader.is_multi_label
        unknown = [name for name in reader.class_names if name not in class_to_idx]
        if unknown:
            more = f' (and {len(unknown) - 1} more)' if unknown[1:] else ''
            raise UserError(
                f"the {'label' if self.is_multi_label else 'class folder'} '{unknown[0]}'{more} of {self.root} is not"
                f' one of the {len(class_to_idx)} training classes{did_you_mean(unknown[0], class_to_idx) or "."}'
                f' Rename or remove it, or add training images'
            )
        self.class_names = sorted(class_to_idx, key=class_to_idx.get)
        # of each class of the reader
        self.labels = [class_to_idx[name] for name in reader.class_names]
        self.to_multi_hot = MultiLabelTarget(len(class_to_idx)) if self.is_multi_label else None

    @property
    def root(self) -> str:
        """Where the images are."""
        return str(self.reader.root)

    @property
    def is_held_out(self) -> bool:
        """Whether these are part of the images only, because the data is not divided for training and validation."""
        return isinstance(self.reader, Subset)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Label of each class name, to open another split with."""
        return {name: label for label, name in enumerate(self.class_names)}

    @property
    def targets(self) -> list:
        """The label of every image, of a multi-label dataset the list of its labels; no image is read for it."""
        return [self._label(label) for label in self.reader.labels]

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple:
        if not -len(self) <= index < len(self):
            # the end of a loop over the images, no damaged file
            raise IndexError(index)
        # a training transform reads no more of a file than the crop that it chooses
        read = getattr(self.transform, 'read', read_rgb)
        try:
            file, label = self.reader[index]
            image = read(file)
        except DECODING_ERRORS as error:
            where, why = f'{self.filename(index)} of {self.root}', why_unreadable(error)
            raise UserError(f'cannot read the image {where} ({why}); replace or remove it') from error
        label = self._label(label)
        label = label if self.to_multi_hot is None else self.to_multi_hot(label)
        return image if self.transform is None else self.transform(image), label

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """Name of an image, relative to its dataset unless asked otherwise."""
        return self.reader.filename(index, basename, absolute)

    def _label(self, label: int | list[int]) -> int | list[int]:
        return [self.labels[item] for item in label] if self.is_multi_label else self.labels[label]


class FolderReader(FileReader):
    """Images under one folder per class, at any depth below it, in a folder or an archive.

    Unlike timm's, hidden files and folders (.ipynb_checkpoints, ._name.jpg) do not count, a class is the top folder
    rather than the innermost, and more file types are read.

    Args:
        source: What holds the files.
        prefix: The folders above those of the classes, as 'photos/train/'.

    Raises:
        UserError: There are no images in class folders.
    """

    def __init__(self, source: Folder | Tar | Zip, prefix: str = ''):
        names = [name.removeprefix(prefix) for name in source.names if name.startswith(prefix)]
        classes = group_by_class(names)
        if not classes:
            raise UserError(_why_no_images(source.root / prefix, names))
        labels = {name: label for label, names in enumerate(classes.values()) for name in names}
        super().__init__(source, prefix, labels, list(classes))


def _find_images(root: Path, split: str, divides: bool) -> tuple[Folder | Tar | Zip, str, bool]:
    """What holds a split, the folders in it that lead to the split, and whether there is no validation part.

    Where that is so and `divides`, 'val' is where 'train' is.
    """
    if not root.exists():
        raise UserError(f"the data folder '{root}' does not exist")
    if root.is_dir():
        parts = [path.name for path in root.iterdir() if path.is_dir() or path.suffix.lower() in ARCHIVES]
        part, is_undivided = _choose_part(root, parts, split, divides)
        source = open_source(root / part if part else root)
        return source, '' if isinstance(source, Folder) else _enter(source, split), is_undivided
    source = open_source(root)
    prefix = common_folder(source.names)
    part, is_undivided = _choose_part(root, _top_folders(source, prefix), split, divides)
    return source, prefix + (f'{part}/' if part else ''), is_undivided


def _choose_part(root: Path, parts: list[str], split: str, divides: bool) -> tuple[str | None, bool]:
    """Which of the folders and archives is the split, None for all of them, and whether there is no validation part."""
    parts = [name for name in parts if not is_hidden(name)]
    found = {wanted: find_split(parts, wanted) for wanted in SPLIT_NAMES}
    part = found[split] if split in found else find_split(parts, split)
    if part or not any(found.values()):
        return part, found['val'] is None
    if divides and split == 'val':
        return found['train'], True
    names = ', '.join(SPLIT_NAMES.get(split, (split,)))
    raise UserError(
        f"the data folder '{root}' has {', '.join(filter(None, found.values()))} but nothing for '{split}' (a folder,"
        f' .tar or .zip named {names}); move part of the images of each class there'
    )


def _enter(source: Tar | Zip, split: str) -> str:
    """The folders that lead to the classes in an archive that is one part of the data."""
    prefix = common_folder(source.names)
    part = find_split(_top_folders(source, prefix), split)
    return prefix + (f'{part}/' if part else '')


def _top_folders(source: Tar | Zip, prefix: str) -> list[str]:
    below = [name.removeprefix(prefix).partition('/') for name in source.names if name.startswith(prefix)]
    return list(dict.fromkeys(folder for folder, slash, _ in below if slash))


def _why_no_images(root: Path, names: list[str]) -> str:
    visible = [name for name in names if not is_hidden(name)]
    if not visible:
        return f"the data folder '{root}' is empty"
    images = [name for name in visible if '/' not in name and Path(name).suffix.lower() in SUFFIXES]
    if images:
        return (
            f"the data folder '{root}' has {len(images)} images but no class folders; move the images of each class"
            f' into a folder with its name'
        )
    shards = [name for name in visible if name.endswith('.tar')]
    hint = f'; WebDataset shards are wds/{root}' if shards else ''
    return f"there are no images ({', '.join(sorted(SUFFIXES))}) in class folders under '{root}'{hint}"
