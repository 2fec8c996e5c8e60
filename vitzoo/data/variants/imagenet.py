"""Variants with WordNet ids as class folders: the validation set itself, V2, A, R, Sketch, C and Stylized."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vitzoo.data.layout import SUFFIXES
from vitzoo.data.variants.base import (
    PARTIAL_HINT,
    Readout,
    Variant,
    VariantImages,
    pad_classes,
    timm_info,
    wnid_to_class,
)
from vitzoo.errors import UserError

# the published set, which is independent of the corruptions that `vitzoo.data.corruptions` implements
_IMAGENET_C_CORRUPTIONS = (
    *('gaussian_noise', 'shot_noise', 'impulse_noise'),
    *('defocus_blur', 'glass_blur', 'motion_blur', 'zoom_blur'),
    *('snow', 'frost', 'fog', 'brightness'),
    *('contrast', 'elastic_transform', 'pixelate', 'jpeg_compression'),
)
IMAGENET_C_CONDITIONS = [(corruption, severity) for corruption in _IMAGENET_C_CORRUPTIONS for severity in range(1, 6)]
VAL_NAME = re.compile(r'ILSVRC2012_val_(\d{8})')


class WnidVariant(Variant):
    """A variant with one folder per WordNet id, of all 1,000 classes or of a subset listed by timm."""

    subset: str | None = None

    def __init__(
        self, name: str, title: str, url: str, folders: tuple[str, ...], *num_images: int, per_class: int | None = None
    ) -> None:
        self.name, self.title, self.titles, self.url, self.folders = name, title, {name: title}, url, folders
        self.num_images, self.per_class = num_images, per_class

    @property
    def wnids(self) -> list[str]:
        """The WordNet ids of its classes."""
        return timm_info(self.subset).split() if self.subset else list(wnid_to_class())

    def check_classes(self, images: VariantImages, allow_partial: bool) -> None:
        names, wnids = images.class_names, set(self.wnids)
        unknown = [name for name in names if name not in wnids]
        if unknown and all(name.isdecimal() for name in names):
            self.refuse(images, 'its class folders are numbered instead of named by WordNet id')
        if unknown:
            self.refuse(images, f"its class folder '{unknown[0]}' is not one of the {len(wnids)} published classes")
        if len(names) < len(wnids) and not allow_partial:
            missing = min(wnids.difference(names))
            problem = f'it has {len(names)} of {len(wnids)} class folders; {missing} is missing, for example'
            self.refuse(images, problem, is_part=True)

    def readouts(self, images: VariantImages, part: str) -> dict[str, Readout]:
        classes = torch.tensor([wnid_to_class()[wnid] for wnid in self.wnids]) if self.subset else None
        return {part: Readout(pad_classes([[label] for label in self.labels(images)]), classes)}

    def labels(self, images: VariantImages) -> list[int]:
        """The class of each image."""
        of_folder = [wnid_to_class()[name] for name in images.reader.class_names]
        return [of_folder[label] for label in images.reader.labels]


class SubsetVariant(WnidVariant):
    """ImageNet-A and ImageNet-R: 200 classes, to which predictions are restricted."""

    def __init__(self, *args: Any, subset: str) -> None:
        super().__init__(*args)
        self.subset = subset


class V2Variant(WnidVariant):
    """ImageNetV2, with folders named by class index, or by WordNet id in later copies."""

    def check_classes(self, images: VariantImages, allow_partial: bool) -> None:
        names = images.class_names
        if not all(name.isdecimal() for name in names):
            if any(name.isdecimal() for name in names):
                self.refuse(images, 'some class folders are numbered and some are named by WordNet id')
            return super().check_classes(images, allow_partial)
        numbers = {int(name) for name in names}
        if max(numbers) > 999:
            self.refuse(images, f'its class folders are numbered up to {max(numbers)} instead of 999')
        if len(numbers) < len(names):
            self.refuse(images, 'two of its class folders have the same number')
        if len(numbers) < 1000 and not allow_partial:
            missing = min(set(range(1000)) - numbers)
            problem = f'it has {len(numbers)} of the class folders 0 to 999; {missing} is missing, for example'
            self.refuse(images, problem, is_part=True)

    def labels(self, images: VariantImages) -> list[int]:
        if not images.class_names[0].isdecimal():
            return super().labels(images)
        return [int(images.class_name(index)) for index in range(len(images))]


class ValNamedVariant(WnidVariant):
    """A variant of the validation images with their original names, which reveal images in wrong class folders."""

    def open(self, part: Path, allow_partial: bool) -> VariantImages:
        images = super().open(part, allow_partial)
        self.check_names(images, allow_partial)
        return images

    def check_names(self, images: VariantImages, allow_partial: bool) -> None:
        """Raise UserError if images were renamed, or if their ReaL labels contradict their folders."""
        real = [real_labels().get(val_number(images, index)) for index in range(len(images))]
        renamed = next((index for index, labels in enumerate(real) if labels is None), None)
        if renamed is not None:
            images.is_complete = False
        if renamed is not None and not allow_partial:
            name = images.filename(renamed)
            self.refuse(images, f"the image '{name}' was renamed from ILSVRC2012_val_<number>.JPEG")
        agree = [label in labels for label, labels in zip(self.labels(images), real) if labels]
        self.check_agreement(images, agree)


class ValVariant(ValNamedVariant):
    """ImageNet's validation set with its own labels, the ReaL labels, and restricted to the classes of A and R."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.titles = {
            'imagenet': 'ImageNet',
            'imagenet_real': 'ImageNet ReaL',
            'imagenet_a_clean': 'ImageNet, classes of A',
            'imagenet_r_clean': 'ImageNet, classes of R',
        }

    def open(self, part: Path, allow_partial: bool) -> VariantImages:
        flat = [path for path in part.iterdir() if path.suffix.lower() in SUFFIXES]
        if flat:
            raise UserError(
                f"'{part}' has {len(flat):,} images outside of class folders; move them into folders named by WordNet "
                'id by running valprep.sh of https://github.com/soumith/imagenetloader.torch in that folder'
            )
        return super().open(part, allow_partial)

    def readouts(self, images: VariantImages, part: str) -> dict[str, Readout]:
        labels = self.labels(images)
        real = [real_labels().get(val_number(images, index), []) for index in range(len(images))]
        readouts = {
            'imagenet': Readout(pad_classes([[label] for label in labels])),
            'imagenet_real': Readout(pad_classes(real)),
        }
        for letter in 'ar':
            classes = [wnid_to_class()[wnid] for wnid in timm_info(f'imagenet_{letter}_synsets.txt').split()]
            allowed = pad_classes([[label] if label in classes else [-1] for label in labels])
            readouts[f'imagenet_{letter}_clean'] = Readout(allowed, torch.tensor(classes))
        return readouts


class StylizedVariant(ValNamedVariant):
    """Stylized-ImageNet, made from the validation images and stored at 224 x 224."""

    is_cropped = True


class CorruptedVariant(ValNamedVariant):
    """ImageNet-C: a copy of the validation set for each corruption and severity, stored at 224 x 224."""

    num_parts = len(IMAGENET_C_CONDITIONS)
    is_cropped = True

    def parts(self, folder: Path, allow_partial: bool) -> dict[str, Path]:
        # corruptions are in the folder itself or in subfolders named after the archives: noise, blur, weather, digital
        places = [folder, *(path for path in sorted(folder.iterdir()) if path.is_dir())]
        parts, missing = {}, []
        for name in (f'{corruption}/{severity}' for corruption, severity in IMAGENET_C_CONDITIONS):
            part = next((place / name for place in places if (place / name).is_dir()), None)
            if part is None:
                missing.append(name)
            else:
                parts[name] = part
        if not parts or (missing and not allow_partial):
            raise UserError(
                f"'{folder}' has {len(parts)} of the {self.num_parts} folders <corruption>/<severity> of ImageNet-C; "
                f'{missing[0]} is missing, for example; unpack noise.tar, blur.tar, weather.tar and digital.tar of '
                f'{self.url} there, or {PARTIAL_HINT}'
            )
        return parts


@cache
def real_labels() -> dict[int, list[int]]:
    """The ReaL labels of each validation image by its number from 1; [] if the annotators did not agree."""
    return dict(enumerate(json.loads(timm_info('imagenet_real_labels.json')), start=1))


def val_number(images: VariantImages, index: int) -> int:
    """The number in the name of a validation image, from 1; 0 if it was renamed."""
    match = VAL_NAME.match(images.filename(index, basename=True))
    return int(match.group(1)) if match else 0
