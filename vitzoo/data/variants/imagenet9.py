"""ImageNet-9: nine kinds of thing, cut out and put before backgrounds of the same kind or of another."""

import json
import re
from pathlib import Path

from vitzoo.data.variants.base import Readout, Variant, VariantImages, pad, wnid_to_class
from vitzoo.errors import UserError

# the names as published, two of them with a space
CLASS_NAMES = [
    *('00_dog', '01_bird', '02_wheeled vehicle', '03_reptile', '04_carnivore'),
    *('05_insect', '06_musical instrument', '07_primate', '08_fish'),
]
MAP_NAME = 'in_to_in9.json'
MAP_URL = f'https://raw.githubusercontent.com/MadryLab/backgrounds_challenge/master/{MAP_NAME}'


class ImageNet9(Variant):
    """ImageNet-9 original, mixed-same and mixed-rand, stored as 224 x 224.

    An answer over all 1,000 classes is right where in_to_in9.json, of the authors' repository, maps it to the kind of
    the image.
    """

    name, title = 'imagenet_9', 'ImageNet-9'
    titles = {
        'imagenet_9_original': 'ImageNet-9 original',
        'imagenet_9_mixed_same': 'ImageNet-9 mixed-same',
        'imagenet_9_mixed_rand': 'ImageNet-9 mixed-rand',
    }
    url = 'https://github.com/MadryLab/backgrounds_challenge/releases'
    folders = ('bg-challenge', 'imagenet-9/bg-challenge', 'in9/bg-challenge', 'imagenet-9', 'imagenet9', 'in9')
    num_images = (4050,)
    per_class = 450
    num_parts = 3
    is_cropped = True

    def parts(self, folder: Path, allow_partial: bool) -> dict[str, Path]:
        places = {name: folder / name.removeprefix('imagenet_9_') / 'val' for name in self.titles}
        missing = [str(place) for place in places.values() if not place.is_dir()]
        if len(missing) == 3 or (missing and not allow_partial):
            archive = f'backgrounds_challenge_data.tar.gz of {self.url}'
            raise UserError(f"a part of ImageNet-9 is missing, '{missing[0]}'; unpack {archive} again")
        return {name: place for name, place in places.items() if place.is_dir()}

    def open(self, part: Path, allow_partial: bool) -> VariantImages:
        images = super().open(part, allow_partial)
        kind_of_class = read_map(part.parents[1])
        # an image is named after the class of its foreground, as in fg_n02107574_00042_bg_…
        wnids = [re.search(r'n\d{8}', images.filename(index, basename=True)) for index in range(len(images))]
        kinds = [kind_of_class.get(wnid_to_class().get(wnid.group())) if wnid else None for wnid in wnids]
        names = [images.class_name(index) for index in range(len(images))]
        agree = [CLASS_NAMES.index(name) == kind for name, kind in zip(names, kinds) if kind is not None]
        self.check_agreement(images, agree)
        return images

    def check_classes(self, images: VariantImages, allow_partial: bool) -> None:
        unknown = [name for name in images.class_names if name not in CLASS_NAMES]
        if unknown:
            self.refuse(images, f"its class folder '{unknown[0]}' is not one of {', '.join(CLASS_NAMES)}")

    def readouts(self, images: VariantImages, part: str) -> dict[str, Readout]:
        kind_of_class = read_map(Path(images.root).parents[1])
        classes = [[index for index, kind in kind_of_class.items() if kind == wanted] for wanted in range(9)]
        names = (images.class_name(index) for index in range(len(images)))
        return {part: Readout(pad([classes[CLASS_NAMES.index(name)] for name in names]))}


def read_map(folder: Path) -> dict[int, int]:
    """The kind, 0 to 8 or -1 for none, of each ImageNet class; the file may lie in the set's folder or beside it.

    Raises:
        UserError: It is not there, or does not map 1,000 classes to nine kinds.
    """
    path = next((place / MAP_NAME for place in (folder, *folder.parents[:2]) if (place / MAP_NAME).is_file()), None)
    if path is None:
        raise UserError(f"ImageNet-9 needs the map of its authors: download {MAP_URL} to '{folder / MAP_NAME}'")
    try:
        kind_of_class = {int(index): int(kind) for index, kind in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"cannot read '{path}' ({error}); download it again from {MAP_URL}") from error
    if set(kind_of_class) != set(range(1000)) or set(kind_of_class.values()) != set(range(-1, 9)):
        raise UserError(f"'{path}' does not map 1,000 classes to nine kinds and none; download it again from {MAP_URL}")
    return kind_of_class
