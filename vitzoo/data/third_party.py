"""Datasets of other makes, opened by name: torchvision's, Hugging Face's, and WebDataset shards by their folder."""

import os

import torch
from PIL import Image
from timm.data import create_dataset
from timm.data.readers.reader import Reader
from torch.utils.data import Dataset, IterableDataset

from vitzoo.data.layout import SPLIT_NAMES
from vitzoo.data.shards import open_shards
from vitzoo.errors import UserError


def open_named(data_dir: str, split: str, divides: bool = False) -> tuple[Reader, bool]:
    """A reader for a split of a dataset such as 'torch/cifar10', and whether there is no validation part.

    Where that is so and `divides`, 'val' is what 'train' is.

    Raises:
        UserError: There is no such dataset, or split, or its package is missing, or it can only be read in order.
    """
    scheme, _, name = data_dir.partition('/')
    scheme = scheme.lower()
    if scheme == 'wds':
        return open_shards(name, split, divides)
    if scheme == 'hfds':
        return _open_hugging_face(data_dir, split, divides)
    # of other schemes timm has streams only, which are refused here
    return TorchReader(_create(data_dir, split), f'{data_dir} ({split})'), False


class TorchReader(Reader):
    """One of torchvision's datasets (PIL image, label) as a reader."""

    is_multi_label = False

    def __init__(self, dataset: Dataset, root: str):
        super().__init__()
        self.dataset, self.root = dataset, root
        names = getattr(dataset, 'classes', None) or sorted({label for _, label in dataset})
        # torchvision's ImageNet has a tuple of synonyms for each class
        self.class_names = [', '.join(name) if isinstance(name, tuple) else str(name) for name in names]

    @property
    def labels(self) -> list[int]:
        """The label of each image; a dataset that does not list them has its images decoded."""
        targets = getattr(self.dataset, 'targets', None)
        return [int(label) for label in (targets if targets is not None else (label for _, label in self.dataset))]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.dataset[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return f'{index:08d}'


class HuggingFaceReader(Reader):
    """timm's reader of a Hugging Face dataset with what ours have besides; an image is named by its number."""

    is_multi_label = False

    def __init__(self, reader: Reader, root: str):
        super().__init__()
        self.reader, self.root = reader, root
        self.class_names = sorted(reader.class_to_idx, key=reader.class_to_idx.get)

    @property
    def labels(self) -> list[int]:
        """The label of each image; no image is read."""
        return list(self.reader.iter_targets())

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple:
        return self.reader[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        # the file's own name, where it has one, comes only with the whole image
        return f'{index:08d}'


def _open_hugging_face(data_dir: str, split: str, divides: bool) -> tuple[Reader, bool]:
    reader = _first_split(data_dir, SPLIT_NAMES.get(split, (split,)))
    if split == 'val':
        is_undivided = reader is None and divides
        reader = _first_split(data_dir, SPLIT_NAMES['train']) if is_undivided else reader
    else:
        is_undivided = divides and _first_split(data_dir, SPLIT_NAMES['val']) is None
    if reader is None:
        raise UserError(f"the dataset '{data_dir}' has no split named {', '.join(SPLIT_NAMES.get(split, (split,)))}")
    return reader, is_undivided


def _first_split(data_dir: str, names: tuple[str, ...]) -> HuggingFaceReader | None:
    """The first of these splits that a Hugging Face dataset has."""
    for name in names:
        try:
            return HuggingFaceReader(_create(data_dir, name).reader, f'{data_dir} ({name})')
        except UserError as error:
            if 'Unknown split' not in str(error):
                raise
    return None


def _create(data_dir: str, split: str) -> Dataset:
    """timm's dataset of this name.

    Raises:
        UserError: It cannot be opened, or is a stream.
    """
    name, _, root = data_dir.partition(':')
    options = dict(root=root or None)
    if name.lower().startswith('torch/'):
        options = dict(root=root or os.path.join(torch.hub.get_dir(), 'datasets'), download=True)
    try:
        dataset = create_dataset(name, split=split, **options)
    except ImportError as error:
        raise UserError(f"the dataset '{data_dir}' needs the package {error.name}: pip install {error.name}") from error
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot open the dataset '{data_dir}': {error}") from error
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"the dataset '{data_dir}' is a stream, but images are read in random order; unpack it to class folders"
        )
    return dataset
