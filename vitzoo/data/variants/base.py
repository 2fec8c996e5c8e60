"""What the published ImageNet variants have in common: where they lie, what is checked of them, how they are scored."""

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
from vitzoo.data.dataset import FolderReader, Images
from vitzoo.data.transforms import eval_transform
from vitzoo.errors import UserError

PARTIAL_HINT = 'try things out on a part of it with --allow-partial'


@dataclass
class Readout:
    """One way to score the images of a variant.

    Attributes:
        allowed: (N, L), the ImageNet classes that are right for each image, filled up with -1. An image without any
            does not count.
        classes: The only classes that may be answered; by default all 1,000.
    """

    allowed: Tensor
    classes: Tensor | None = None


class VariantImages(Images):
    """The images of a variant, each with its number in place of a label: what is right is in the readouts.

    Attributes:
        is_complete: Whether all that were published are there.
    """

    is_complete = False

    def __getitem__(self, index: int) -> tuple:
        return super().__getitem__(index)[0], index

    def class_name(self, index: int) -> str:
        """The class folder that an image is in."""
        return self.reader.class_names[self.reader.labels[index]]


class Variant:
    """A published test set: the registry entry that owns its layout, its mapping to classes, its mask and its crop.

    Attributes:
        name: What its columns begin with.
        title: Its name in the literature.
        titles: What its readouts are called, by the names of their columns.
        url: Where it is published.
        folders: Where it may lie below the data root, as names of any case, '_' for '-'.
        num_images: How many images it has, a choice where two are in circulation.
        per_class: How many of them each class has, where that is the same for all.
        num_parts: How many folders of class folders it consists of.
        is_cropped: Whether its images are stored as 224 x 224, so that they are not cropped again.
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
        """Find the folder it lies in below the data root."""
        found = (_descend(root, folder.split('/')) for folder in self.folders)
        return next((folder for folder in found if folder is not None), None)

    def parts(self, folder: Path, allow_partial: bool) -> dict[str, Path]:
        """The folders of class folders that it consists of, each with a name."""
        return {self.name: folder}

    def open(self, part: Path, allow_partial: bool) -> VariantImages:
        """Open a part and check that it is what was published.

        Raises:
            UserError: It has other classes, or another number of images and may not have fewer.
        """
        images = VariantImages(FolderReader(Folder(part)))
        self.check_classes(images, allow_partial)
        images.is_complete = self._has_all(images)
        if not allow_partial and not images.is_complete:
            numbers = ' or '.join(f'{number:,}' for number in self.num_images)
            each = f', {self.per_class} of each class' if self.per_class else ''
            odd = _odd_class(images, self.per_class)
            self.refuse(images, f'that has {numbers} images{each}, and here are {len(images):,}{odd}', is_part=True)
        return images

    def check_classes(self, images: VariantImages, allow_partial: bool) -> None:
        """Raise UserError where the class folders are not those that were published."""
        raise NotImplementedError

    def readouts(self, images: VariantImages, part: str) -> dict[str, Readout]:
        """The ways to score a part, by the names of their columns."""
        raise NotImplementedError

    def transform(self, data_config: dict) -> Callable:
        """The model's own evaluation transform; of images stored as 224 x 224 only what makes other sizes of them."""
        return eval_transform({**data_config, 'crop_pct': 1.0} if self.is_cropped else data_config)

    def check_agreement(self, images: VariantImages, agree: list[bool]) -> None:
        """Raise UserError where most images are named after another class than the folder they lie in.

        Labels disagree now and then (ReaL's about one image of ten), so a few images say nothing.
        """
        if len(agree) >= 10 and sum(agree) < len(agree) / 2:
            self.refuse(images, f'only {sum(agree)} of {len(agree)} images lie in the folder of a class that they show')

    def refuse(self, images: VariantImages, problem: str, is_part: bool = False) -> None:
        """Raise the UserError of a layout that was not published, or of one that is part of it."""
        hint = f', or {PARTIAL_HINT}' if is_part else ''
        raise UserError(f"'{images.root}' is not {self.title}: {problem}; unpack it again from {self.url}{hint}")

    def _has_all(self, images: VariantImages) -> bool:
        counts = Counter(images.reader.labels)
        return len(images) in self.num_images and (self.per_class is None or set(counts.values()) == {self.per_class})


@cache
def wnid_to_class() -> dict[str, int]:
    """Class index of each WordNet id of ImageNet-1k."""
    return {wnid: index for index, wnid in enumerate(ImageNetInfo().label_names())}


def timm_info(name: str) -> str:
    """The text of one of the lists that timm carries."""
    return (files('timm.data') / '_info' / name).read_text()


def pad(classes: list[list[int]]) -> Tensor:
    """Lay out lists of different lengths as the rows of a tensor, filled up with -1."""
    length = max((len(row) for row in classes), default=0)
    rows = [row + [-1] * (length - len(row)) for row in classes]
    return torch.tensor(rows, dtype=torch.int64).view(len(classes), length)


def _descend(folder: Path, names: list[str]) -> Path | None:
    """Follow names of any case, '_' for '-', down from a folder."""
    for name in names:
        if not folder.is_dir():
            return None
        folder = next((child for child in sorted(folder.iterdir()) if plain(child.name) == plain(name)), None)
        if folder is None:
            return None
    return folder if folder.is_dir() else None


def plain(name: str) -> str:
    """A folder's name without what differs between copies of a set."""
    return name.lower().replace('_', '-')


def _odd_class(images: VariantImages, per_class: int | None) -> str:
    """Name a class that has another number of images than the rest."""
    counts = Counter(images.class_name(index) for index in range(len(images)))
    odd = [name for name, count in counts.items() if count != per_class]
    return f" ({counts[odd[0]]} in '{odd[0]}')" if per_class and odd else ''
