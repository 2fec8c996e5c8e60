"""Base class of the published ImageNet variants: finding, checking and scoring them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from timm.data import ImageNetInfo
from torch import Tensor

from vitzoo.data.archives import Folder
from vitzoo.data.dataset import Images
from vitzoo.data.folders import FolderReader
from vitzoo.data.transforms import eval_transform
from vitzoo.errors import UserError

PARTIAL_HINT = 'evaluate an incomplete copy with --allow-partial'


@dataclass
class Readout:
    """One way to score the images of a variant.

    Attributes:
        allowed: (N, L), the correct ImageNet classes of each image, padded with -1. Images without a correct class are
            not scored.
        classes: The classes that predictions are restricted to; by default all 1,000.
    """

    allowed: Tensor
    classes: Tensor | None = None


class VariantImages(Images):
    """The images of a variant, with their index in place of the label; the correct classes are in the readouts.

    Attributes:
        is_complete: Whether all published images are present.
    """

    is_complete = False

    def __getitem__(self, index: int) -> tuple:
        return super().__getitem__(index)[0], index

    def class_name(self, index: int) -> str:
        """The class folder of an image."""
        return self.reader.class_names[self.reader.labels[index]]


class Variant:
    """A published test set with its folder layout, class mapping, class mask and crop.

    Attributes:
        name: Prefix of its columns in a results file.
        title: Its name in the literature.
        titles: Title of each readout, by the name of its column.
        url: Where it is published.
        folders: Possible paths below the data root; matched ignoring case, with '_' equal to '-'.
        num_images: Number of images; several if different copies are in circulation.
        per_class: Number of images per class, if it is the same for all classes.
        num_parts: Number of folders with class folders.
        is_cropped: Whether images are stored at 224 x 224 and must not be cropped again.
    """

    name: str
    title: str
    titles: dict[str, str]
    url: str
    folders: tuple[str, ...]
    num_images: tuple[int, ...]
    per_class: int | None = None
    num_parts = 1
    is_cropped = False

    def find(self, root: Path) -> Path | None:
        """Find the variant's folder below the data root."""
        found = (_descend(root, folder.split('/')) for folder in self.folders)
        return next((folder for folder in found if folder is not None), None)

    def parts(self, folder: Path, allow_partial: bool) -> dict[str, Path]:
        """The folders that contain class folders, by the name of the part."""
        return {self.name: folder}

    def open(self, part: Path, allow_partial: bool) -> VariantImages:
        """Open a part and check it against the published one.

        Raises:
            UserError: The classes differ, or the number of images does and `allow_partial` is false.
        """
        images = VariantImages(FolderReader(Folder(part)))
        self.check_classes(images, allow_partial)
        images.is_complete = self._has_all(images)
        if not allow_partial and not images.is_complete:
            numbers = ' or '.join(f'{number:,}' for number in self.num_images)
            each = f', {self.per_class} of each class' if self.per_class else ''
            odd = _odd_class(images, self.per_class)
            self.refuse(images, f'expected {numbers} images{each}, found {len(images):,}{odd}', is_part=True)
        return images

    def check_classes(self, images: VariantImages, allow_partial: bool) -> None:
        """Raise UserError if the class folders are not the published ones."""
        raise NotImplementedError

    def readouts(self, images: VariantImages, part: str) -> dict[str, Readout]:
        """The ways to score a part, by the name of the column."""
        raise NotImplementedError

    def transform(self, data_config: dict) -> Callable:
        """The model's evaluation transform; images stored at 224 x 224 are resized but not cropped."""
        return eval_transform({**data_config, 'crop_pct': 1.0} if self.is_cropped else data_config)

    def check_agreement(self, images: VariantImages, agree: list[bool]) -> None:
        """Raise UserError if most images are in the folder of another class than their names say.

        Single labels may disagree (ReaL's for about one image in ten), so fewer than ten images are not checked.
        """
        if len(agree) >= 10 and sum(agree) < len(agree) / 2:
            self.refuse(images, f'only {sum(agree)} of {len(agree)} images are in the folder of their class')

    def refuse(self, images: VariantImages, problem: str, is_part: bool = False) -> None:
        """Raise the UserError for data that differs from the published one, or with `is_part` is part of it."""
        hint = f', or {PARTIAL_HINT}' if is_part else ''
        raise UserError(f"'{images.root}' is not {self.title}: {problem}; unpack it again from {self.url}{hint}")

    def _has_all(self, images: VariantImages) -> bool:
        counts: Counter[int] = Counter(images.reader.labels)
        return len(images) in self.num_images and (self.per_class is None or set(counts.values()) == {self.per_class})


@cache
def wnid_to_class() -> dict[str, int]:
    """The class index of each WordNet id of ImageNet-1k."""
    return {wnid: index for index, wnid in enumerate(ImageNetInfo().label_names())}


def timm_info(name: str) -> str:
    """The text of one of timm's class lists."""
    return (files('timm.data') / '_info' / name).read_text()


def pad_classes(classes: list[list[int]]) -> Tensor:
    """Stack lists of different lengths as rows of a tensor, padded with -1."""
    length = max((len(row) for row in classes), default=0)
    rows = [row + [-1] * (length - len(row)) for row in classes]
    return torch.tensor(rows, dtype=torch.int64).view(len(classes), length)


def _descend(folder: Path, names: list[str]) -> Path | None:
    """Follow a path down from a folder, ignoring case and with '_' equal to '-'."""
    for name in names:
        if not folder.is_dir():
            return None
        same = [child for child in sorted(folder.iterdir()) if normalize_name(child.name) == normalize_name(name)]
        if not same:
            return None
        folder = same[0]
    return folder if folder.is_dir() else None


def normalize_name(name: str) -> str:
    """Normalize the spelling of a folder name, which differs between copies of a dataset."""
    return name.lower().replace('_', '-')


def _odd_class(images: VariantImages, per_class: int | None) -> str:
    """Name a class with an unexpected number of images."""
    counts = Counter(images.class_name(index) for index in range(len(images)))
    odd = [name for name, count in counts.items() if count != per_class]
    return f" ({counts[odd[0]]} in '{odd[0]}')" if per_class and odd else ''
