"""ImageNet-9: foregrounds of nine classes, pasted on backgrounds of the same or of a random class."""

import json
import re
from pathlib import Path

from vitzoo.data.variants.base import Readout, Variant, VariantImages, pad_classes, wnid_to_class
from vitzoo.errors import UserError

# as published, two of them with a space
CLASS_NAMES = [
    *('00_dog', '01_bird', '02_wheeled vehicle', '03_reptile', '04_carnivore'),
    *('05_insect', '06_musical instrument', '07_primate', '08_fish'),
]
MAP_NAME = 'in_to_in9.json'
MAP_URL = f'https://raw.githubusercontent.com/MadryLab/backgrounds_challenge/master/{MAP_NAME}'


class ImageNet9(Variant):
    """ImageNet-9 original, mixed-same and mixed-rand, stored at 224 x 224.

    A prediction among all 1,000 classes is correct if in_to_in9.json, from the authors' repository, maps it to the
    class of the image.
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
        in9_of_class = read_map(part.parents[1])
        # images are named after the class of their foreground: fg_n02107574_00042_bg_…
        wnids = [re.search(r'n\d{8}', images.filename(index, basename=True)) for index in range(len(images))]
        expected = [in9_of_class.get(wnid_to_class().get(wnid.group(), -1)) if wnid else None for wnid in wnids]
        names = [images.class_name(index) for index in range(len(images))]
        agree = [CLASS_NAMES.index(name) == label for name, label in zip(names, expected) if label is not None]
        self.check_agreement(images, agree)
        return images

    def check_classes(self, images: VariantImages, allow_partial: bool) -> None:
        unknown = [name for name in images.class_names if name not in CLASS_NAMES]
        if unknown:
            self.refuse(images, f"its class folder '{unknown[0]}' is not one of {', '.join(CLASS_NAMES)}")

    def readouts(self, images: VariantImages, part: str) -> dict[str, Readout]:
        in9_of_class = read_map(Path(images.root).parents[1])
        classes = [[index for index, label in in9_of_class.items() if label == wanted] for wanted in range(9)]
        names = (images.class_name(index) for index in range(len(images)))
        return {part: Readout(pad_classes([classes[CLASS_NAMES.index(name)] for name in names]))}


def read_map(folder: Path) -> dict[int, int]:
    """Read the ImageNet-9 class, 0 to 8 or -1 for none, of each ImageNet class.

    The file is looked for in the dataset's folder and in the two above it.

    Raises:
        UserError: The file does not exist, or does not map 1,000 classes to nine.
    """
    path = next((place / MAP_NAME for place in (folder, *folder.parents[:2]) if (place / MAP_NAME).is_file()), None)
    if path is None:
        raise UserError(f"ImageNet-9 needs its class mapping: download {MAP_URL} to '{folder / MAP_NAME}'")
    try:
        in9_of_class = {int(index): int(label) for index, label in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"cannot read '{path}' ({error}); download it again from {MAP_URL}") from error
    if set(in9_of_class) != set(range(1000)) or set(in9_of_class.values()) != set(range(-1, 9)):
        raise UserError(f"'{path}' does not map 1,000 classes to nine and none; download it again from {MAP_URL}")
    return in9_of_class
