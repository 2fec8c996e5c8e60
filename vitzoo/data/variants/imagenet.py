"""The variants whose class folders are WordNet ids: the validation set itself, V2, A, R, Sketch, C, Stylized."""

import json
import re
from functools import cache
from pathlib import Path

import torch

from vitzoo.data.corruptions import CONDITIONS
from vitzoo.data.layout import SUFFIXES
from vitzoo.data.variants.base import PARTIAL_HINT, Readout, Variant, VariantImages, pad, timm_info, wnid_to_class
from vitzoo.errors import UserError

VAL_NAME = re.compile(r'ILSVRC2012_val_(\d{8})')
IMAGENET_C_CONDITIONS = tuple(CONDITIONS)


class WnidVariant(Variant):
    """A variant with one folder per WordNet id, of all 1,000 or of a subset that timm lists."""

    subset: str | None = None

    def __init__(self, name: str, title: str, url: str, folders: tuple[str, ...], *num_images: int, per_class=None):
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
            self.refuse(images, 'its class folders are numbered, and only the WordNet ids say which class each is')
        if unknown:
            self.refuse(images, f"its class folder '{unknown[0]}' is not one of the {len(wnids)} that it should have")
        if len(names) < len(wnids) and not allow_partial:
            missing = min(wnids.difference(names))
            problem = f'it has {len(names)} of {len(wnids)} class folders, {missing} for one is missing'
            self.refuse(images, problem, is_part=True)

    def readouts(self, images: VariantImages, part: str) -> dict[str, Readout]:
        classes = torch.tensor([wnid_to_class()[wnid] for wnid in self.wnids]) if self.subset else None
        return {part: Readout(pad([[label] for label in self.labels(images)]), classes)}

    def labels(self, images: VariantImages) -> list[int]:
        """The class of each image."""
        of_folder = [wnid_to_class()[name] for name in images.reader.class_names]
        return [of_folder[label] for label in images.reader.labels]


class SubsetVariant(WnidVariant):
    """ImageNet-A and ImageNet-R: 200 classes, and only these may be answered."""

    def __init__(self, *args, subset: str):
        super().__init__(*args)
        self.subset = subset


class V2Variant(WnidVariant):
    """ImageNetV2, whose folders are named by class index, or by WordNet id in later copies."""

    def check_classes(self, images: VariantImages, allow_partial: bool) -> None:
        names = images.class_names
        if not all(name.isdecimal() for name in names):
            if any(name.isdecimal() for name in names):
                self.refuse(images, 'some class folders are numbered and some are named by WordNet id')
            return super().check_classes(images, allow_partial)
        numbers = {int(name) for name in names}
        if max(numbers) > 999:
            self.refuse(images, f'its class folders are numbered up to {max(numbers)}, where 0 to 999 were published')
        if len(numbers) < len(names):
            self.refuse(images, 'two of its class folders have the same number')
        if len(numbers) < 1000 and not allow_partial:
            missing = min(set(range(1000)) - numbers)
            problem = f'it has {len(numbers)} of the class folders 0 to 999, {missing} for one is missing'
            self.refuse(images, problem, is_part=True)

    def labels(self, images: VariantImages) -> list[int]:
        if not images.class_names[0].isdecimal():
            return super().labels(images)
        return [int(images.class_name(index)) for index in range(len(images))]


class ValNamedVariant(WnidVariant):
    """A variant made from the validation images, which keep their names: from these a wrong class folder shows."""

    def open(self, part: Path, allow_partial: bool) -> VariantImages:
        images = super().open(part, allow_partial)
        self.check_names(images, allow_partial)
        return images

    def check_names(self, images: VariantImages, allow_partial: bool) -> None:
        """Raise UserError where images were renamed, or where their ReaL labels contradict their folders."""
        real = [real_labels().get(val_number(images, index)) for index in range(len(images))]
        renamed = next((index for index, labels in enumerate(real) if labels is None), None)
        if renamed is not None:
            images.is_complete = False
        if renamed is not None and not allow_partial:
            name = images.filename(renamed)
            self.refuse(images, f"the image '{name}' was renamed, it has no name such as ILSVRC2012_val_00000001.JPEG")
        agree = [label in labels for label, labels in zip(self.labels(images), real) if labels]
        self.check_agreement(images, agree)


class ValVariant(ValNamedVariant):
    """ImageNet's validation set, read four ways: as it is, by the ReaL labels, and over the classes of A and R."""

    def __init__(self, *args, **kwargs):
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
                f"'{part}' has {len(flat):,} images outside of class folders; sort them into folders named by WordNet "
                'id, with valprep.sh of https://github.com/soumith/imagenetloader.torch run in that folder'
            )
        return super().open(part, allow_partial)

    def readouts(self, images: VariantImages, part: str) -> dict[str, Readout]:
        labels = self.labels(images)
        real = [real_labels().get(val_number(images, index), []) for index in range(len(images))]
        readouts = {'imagenet': Readout(pad([[label] for label in labels])), 'imagenet_real': Readout(pad(real))}
        for letter in 'ar':
            classes = [wnid_to_class()[wnid] for wnid in timm_info(f'imagenet_{letter}_synsets.txt').split()]
            allowed = pad([[label] if label in classes else [-1] for label in labels])
            readouts[f'imagenet_{letter}_clean'] = Readout(allowed, torch.tensor(classes))
        return readouts


class StylizedVariant(ValNamedVariant):
    """Stylized-ImageNet, made from the validation images and stored as 224 x 224."""

    is_cropped = True


class CorruptedVariant(ValNamedVariant):
    """ImageNet-C: a copy of the validation set for each corruption and severity, stored as 224 x 224."""

    num_parts = len(CONDITIONS)
    is_cropped = True

    def parts(self, folder: Path, allow_partial: bool) -> dict[str, Path]:
        # each corruption lies in the folder itself, or in that of its archive: noise, blur, weather, digital
        places = [folder, *(path for path in sorted(folder.iterdir()) if path.is_dir())]
        parts, missing = {}, []
        for name in (f'{corruption}/{severity}' for corruption, severity in CONDITIONS):
            part = next((place / name for place in places if (place / name).is_dir()), None)
            if part is None:
                missing.append(name)
            else:
                parts[name] = part
        if not parts or (missing and not allow_partial):
            raise UserError(
                f"'{folder}' has {len(parts)} of ImageNet-C's 75 folders <corruption>/<severity>, {missing[0]} for one "
                f'is missing; unpack noise.tar, blur.tar, weather.tar and digital.tar of {self.url} there, or '
                f'{PARTIAL_HINT}'
            )
        return parts


@cache
def real_labels() -> dict[int, list[int]]:
    """The ReaL labels of each validation image by its number from 1; an empty list where nothing was agreed on."""
    return dict(enumerate(json.loads(timm_info('imagenet_real_labels.json')), start=1))


def val_number(images: VariantImages, index: int) -> int | None:
    """The number in the name of a validation image, None where it has another name."""
    match = VAL_NAME.match(images.filename(index, basename=True))
    return int(match.group(1)) if match else None
