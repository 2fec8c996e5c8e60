"""ObjectNet: objects in unusual places and poses, with 113 classes shared with ImageNet."""

import json
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from torchvision.transforms import Compose

from vitzoo.data.held_out import Subset
from vitzoo.data.variants.base import Readout, Variant, VariantImages, pad_classes
from vitzoo.errors import UserError


class ObjectNet(Variant):
    """ObjectNet 1.0; only images of the 113 shared classes are scored, and any ImageNet class of an object is correct.

    Predictions are among all 1,000 classes. The class mapping is read from mappings/, which is part of the dataset.
    """

    name, title = 'objectnet', 'ObjectNet'
    titles = {name: title}
    url = 'https://objectnet.dev'
    folders = ('objectnet-1.0/images', 'objectnet/objectnet-1.0/images', 'objectnet/images')
    num_images = (50_273,)

    def open(self, part: Path, allow_partial: bool) -> VariantImages:
        images = super().open(part, allow_partial)
        shared = read_mapping(part.parent / 'mappings')
        images.reader = Subset(images.reader, [i for i in range(len(images)) if images.class_name(i) in shared])
        if not len(images):
            self.refuse(images, 'none of its class folders is shared with ImageNet')
        return images

    def check_classes(self, images: VariantImages, allow_partial: bool) -> None:
        folders = _read_json(Path(images.root).parent / 'mappings' / 'folder_to_objectnet_label.json')
        unknown = [name for name in images.class_names if name not in folders]
        if unknown:
            self.refuse(images, f"its class folder '{unknown[0]}' is not in mappings/folder_to_objectnet_label.json")

    def readouts(self, images: VariantImages, part: str) -> dict[str, Readout]:
        shared = read_mapping(Path(images.root).parent / 'mappings')
        return {part: Readout(pad_classes([shared[images.class_name(index)] for index in range(len(images))]))}

    def transform(self, data_config: dict) -> Callable:
        return Compose([crop_border, super().transform(data_config)])


def crop_border(image: Image.Image) -> Image.Image:
    """Crop the red border of 2 pixels, which marks images that must not be trained on."""
    return image.crop((2, 2, image.width - 2, image.height - 2))


def read_mapping(folder: Path) -> dict[str, list[int]]:
    """Read the ImageNet classes of each class folder shared with ImageNet."""
    label_of_folder = _read_json(folder / 'folder_to_objectnet_label.json')
    names_of_label = _read_json(folder / 'objectnet_to_imagenet_1k.json')
    line_of_class = _read_json(folder / 'pytorch_to_imagenet_2012_id.json')
    class_of_line = {line: int(index) for index, line in line_of_class.items()}
    lines = _read(folder / 'imagenet_to_label_2012_v2').splitlines()
    class_of_name = {name.strip(): class_of_line[line] for line, name in enumerate(lines) if line in class_of_line}
    return {
        name: [class_of_name[synonyms] for synonyms in names_of_label[label].split('; ')]
        for name, label in label_of_folder.items()
        if label in names_of_label
    }


def _read_json(path: Path) -> dict:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise UserError(f"cannot read '{path}' ({error}); unpack ObjectNet again from {ObjectNet.url}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(
            f"cannot read the ObjectNet classes from '{path}' ({error.strerror}); unpack ObjectNet again from "
            f'{ObjectNet.url}'
        ) from error
