"""Datasets opened by scheme and name: torchvision, Hugging Face, and WebDataset shards."""

import os
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import create_dataset
from torch.utils.data import IterableDataset
from torchvision.datasets.folder import default_loader

from vitzoo.data.hugging_face import find_hugging_face
from vitzoo.data.layout import Split
from vitzoo.data.options import UNDIVIDED, DataOptions
from vitzoo.data.reader import LabelledReader
from vitzoo.data.shards import find_shards
from vitzoo.errors import UserError, format_flag

# the options that a kind of dataset has, besides a class map
_OPTIONS = {
    'hfds': ('train_split', 'val_split', 'input_key', 'target_key', 'data_subset'),
    'wds': ('train_split', 'val_split', 'input_key', 'target_key'),
}


def find_third_party(data_dir: str, split: str, options: DataOptions) -> Split | None:
    """Find a split of a dataset such as 'torch/cifar10'; None if it has no such split.

    Raises:
        UserError: The dataset does not exist, its package is missing, or it can only be streamed. For torchvision
            raised on opening the split, as it is for a split that does not exist.
    """
    scheme, _, name = data_dir.partition('/')
    scheme = scheme.lower()
    check_options(data_dir, options, _OPTIONS.get(scheme, ()))
    if scheme == 'wds':
        return find_shards(name, split, options)
    if scheme == 'hfds':
        return find_hugging_face(data_dir, split, options)
    if name.lower().startswith(('image_folder:', 'folder:')):
        return _find_image_folder(data_dir, split)
    # without its folder, which may be another on each machine
    source = f'{data_dir.partition(":")[0]} {split}'
    # timm only streams the other schemes, which _create rejects
    return Split(lambda: TorchReader(_create(data_dir, split), f'{data_dir} ({split})', source))


def check_options(data_dir: str, options: DataOptions, allowed: tuple[str, ...]) -> None:
    """Raise UserError for an option that this kind of dataset does not have."""
    for name, value in options.given().items():
        if name not in (*allowed, 'class_map'):
            raise UserError(f"'{data_dir}' has no {name.replace('_', ' ')} '{value}': remove {format_flag(name)}")
    if options.is_undivided and data_dir.lower().startswith('hfds/'):
        raise UserError(f"'{data_dir}' has named splits, not '{UNDIVIDED}'; remove --train-split and --val-split")


def _find_image_folder(data_dir: str, split: str) -> Split:
    """A split of torchvision's ImageFolder, for which timm takes the whole folder if it has none."""
    dataset = _create(data_dir, split)
    is_whole = Path(dataset.root) == Path(data_dir.partition(':')[2])
    root = data_dir if is_whole else f'{data_dir} ({split})'
    return Split(lambda: TorchReader(dataset, root), is_whole)


class TorchReader(LabelledReader):
    """A torchvision dataset (PIL image, label) as a reader."""

    is_multi_label = False

    def __init__(self, dataset: Any, root: str, source: str = '') -> None:
        super().__init__()
        self.dataset, self.root, self.source = dataset, root, source or root
        # of ImageNet, whose words are not unique: two of its classes are cranes
        names = getattr(dataset, 'wnids', None) or getattr(dataset, 'classes', None)
        self.class_names = [str(name) for name in names or sorted({label for _, label in dataset})]

    # an attribute of the other readers; here all images may have to be decoded
    @cached_property
    def labels(self) -> list[int]:  # type: ignore[override]
        """The label of each image; decodes all images if the dataset does not list its targets."""
        targets: Any = getattr(self.dataset, 'targets', None)
        if targets is None:
            targets = [label for _, label in self.dataset]
        # after its label, QMNIST says who wrote a digit, and on which form
        return [int(label) for label in (targets[:, 0] if getattr(targets, 'ndim', 1) == 2 else targets)]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.dataset[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return f'{index:08d}'


def _create(data_dir: str, split: str) -> Any:
    """Create timm's dataset.

    Raises:
        UserError: The dataset cannot be opened, or is a stream.
    """
    name, _, root = data_dir.partition(':')
    options: dict[str, Any] = dict(root=root or None)
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
    if getattr(dataset, 'loader', None) is default_loader:
        # converting to RGB there would clip 16-bit grey, and show the colors below transparent pixels
        dataset.loader = _open_image
    return dataset


def _open_image(path: str) -> Image.Image:
    return Image.open(BytesIO(Path(path).read_bytes()))
