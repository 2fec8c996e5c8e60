"""Datasets opened by scheme and name: torchvision, Hugging Face, and WebDataset shards."""

import os
from functools import partial

import torch
from PIL import Image
from timm.data import create_dataset
from timm.data.readers.reader import Reader
from torch.utils.data import Dataset, IterableDataset

from vitzoo.data.layout import Split, split_names
from vitzoo.data.shards import find_shards
from vitzoo.errors import UserError


def find_third_party(data_dir: str, split: str) -> Split | None:
    """Find a split of a dataset such as 'torch/cifar10'; None if it has no such split.

    Raises:
        UserError: The dataset does not exist, its package is missing, or it can only be streamed. For torchvision
            raised on opening the split, as it is for a split that does not exist.
    """
    scheme, _, name = data_dir.partition('/')
    scheme = scheme.lower()
    if scheme == 'wds':
        return find_shards(name, split)
    if scheme == 'hfds':
        return _find_hugging_face(data_dir, split)
    # timm only streams the other schemes, which _create rejects
    return Split(lambda: TorchReader(_create(data_dir, split), f'{data_dir} ({split})'))


class TorchReader(Reader):
    """A torchvision dataset (PIL image, label) as a reader."""

    is_multi_label = False

    def __init__(self, dataset: Dataset, root: str):
        super().__init__()
        self.dataset, self.root = dataset, root
        names = getattr(dataset, 'classes', None) or sorted({label for _, label in dataset})
        # torchvision's ImageNet has a tuple of synonyms per class
        self.class_names = [', '.join(name) if isinstance(name, tuple) else str(name) for name in names]

    @property
    def labels(self) -> list[int]:
        """The label of each image; decodes all images if the dataset does not list its targets."""
        targets = getattr(self.dataset, 'targets', None)
        return [int(label) for label in (targets if targets is not None else (label for _, label in self.dataset))]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.dataset[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return f'{index:08d}'


class HuggingFaceReader(Reader):
    """timm's reader of a Hugging Face dataset, with `root`, `class_names` and `labels`; images are named by index."""

    is_multi_label = False

    def __init__(self, reader: Reader, root: str):
        super().__init__()
        self.reader, self.root = reader, root
        self.class_names = sorted(reader.class_to_idx, key=reader.class_to_idx.get)

    @property
    def labels(self) -> list[int]:
        """The label of each image; does not read images."""
        return list(self.reader.iter_targets())

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple:
        return self.reader[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        # reading the original file name would read the whole image
        return f'{index:08d}'


def _find_hugging_face(data_dir: str, split: str) -> Split | None:
    for name in split_names(split):
        try:
            dataset = _create(data_dir, name)
        except UserError as error:
            if 'Unknown split' not in str(error):
                raise
        else:
            return Split(partial(HuggingFaceReader, dataset.reader, f'{data_dir} ({name})'))
    return None


def _create(data_dir: str, split: str) -> Dataset:
    """Create timm's dataset.

    Raises:
        UserError: The dataset cannot be opened, or is a stream.
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
            f"the dataset '{data_dir}' is a stream, but images are read in random order; unpack it into class folders"
        )
    return dataset
