"""Published variants of ImageNet, each with its folder layout, class mapping, class mask and crop."""

from dataclasses import dataclass
from pathlib import Path

from vitzoo.data.variants.base import Readout, Variant, VariantImages, normalize_name
from vitzoo.data.variants.imagenet import (
    CorruptedVariant,
    StylizedVariant,
    SubsetVariant,
    V2Variant,
    ValVariant,
    WnidVariant,
)
from vitzoo.data.variants.imagenet9 import ImageNet9
from vitzoo.data.variants.objectnet import ObjectNet
from vitzoo.errors import UserError

_IMAGENET_URL = 'https://image-net.org'
_V2_URL = 'https://huggingface.co/datasets/vaishaal/ImageNetV2'
_A_URL = 'https://github.com/hendrycks/natural-adv-examples'
_R_URL = 'https://github.com/hendrycks/imagenet-r'
_SKETCH_URL = 'https://github.com/HaohanWang/ImageNet-Sketch'
_STYLIZED_URL = 'https://github.com/rgeirhos/Stylized-ImageNet'
_C_URL = 'https://zenodo.org/records/2235448'
_VAL_FOLDERS = (
    *('imagenet/val', 'imagenet-1k/val', 'imagenet1k/val', 'ilsvrc2012/val', 'ilsvrc/data/cls-loc/val'),
    *('imagenet/validation', 'imagenet-val', 'imagenet-validation', 'val', 'validation'),
)
_SKETCH_FOLDERS = ('imagenet-sketch/sketch', 'imagenet-sketch', 'sketch')
_STYLIZED_FOLDERS = ('stylized-imagenet/val', 'imagenet-stylized/val', 'stylized-imagenet', 'imagenet-stylized')


def _v2_folders(name: str, letter: str) -> tuple[str, ...]:
    names = (f'imagenetv2-{name}-format-val', f'imagenetv2-{name}', f'imagenetv2-{letter}-format-val')
    return tuple(prefix + name for prefix in ('', 'imagenetv2/', 'imagenet-v2/') for name in names)


SUITE: tuple[Variant, ...] = (
    ValVariant('imagenet', 'ImageNet', _IMAGENET_URL, _VAL_FOLDERS, 50_000, per_class=50),
    *(
        V2Variant(f'imagenet_v2_{key}', f'ImageNetV2 {title}', _V2_URL, _v2_folders(name, letter), 10_000, per_class=10)
        for key, title, name, letter in (
            ('matched_frequency', 'matched-frequency', 'matched-frequency', 'b-33'),
            ('threshold_07', 'threshold-0.7', 'threshold0.7', 'a-44'),
            ('top_images', 'top-images', 'top-images', 'c-12'),
        )
    ),
    SubsetVariant('imagenet_a', 'ImageNet-A', _A_URL, ('imagenet-a',), 7_500, subset='imagenet_a_synsets.txt'),
    SubsetVariant('imagenet_r', 'ImageNet-R', _R_URL, ('imagenet-r',), 30_000, subset='imagenet_r_synsets.txt'),
    # 50,000 according to the authors, but their archive contains 50,889
    WnidVariant('imagenet_sketch', 'ImageNet-Sketch', _SKETCH_URL, _SKETCH_FOLDERS, 50_889, 50_000),
    ObjectNet(),
    ImageNet9(),
    StylizedVariant('stylized_imagenet', 'Stylized-ImageNet', _STYLIZED_URL, _STYLIZED_FOLDERS, 50_000, per_class=50),
    CorruptedVariant('imagenet_c', 'ImageNet-C', _C_URL, ('imagenet-c', 'imagenetc'), 50_000, per_class=50),
)


@dataclass
class FoundVariant:
    """A variant found below the data root, with the folders of its parts."""

    variant: Variant
    parts: dict[str, Path]

    def open(self, part: str, allow_partial: bool = False) -> tuple[VariantImages, dict[str, Readout]]:
        """Open and check a part, and return its images with the ways to score them."""
        images = self.variant.open(self.parts[part], allow_partial)
        return images, self.variant.readouts(images, part)


def find_suite(root: str, allow_partial: bool = False) -> tuple[list[FoundVariant], list[str]]:
    """Find the variants below a folder.

    Returns:
        The variants found, and notes on those not found and on folders and archives that were not used.

    Raises:
        UserError: The folder does not exist, contains no variant, or one whose layout differs from the published one.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(f"the data root '{root}' is not a folder")
    places = {variant: variant.find(folder) for variant in SUITE}
    found = [FoundVariant(variant, variant.parts(place, allow_partial)) for variant, place in places.items() if place]
    if not found:
        raise UserError(f"no variant of ImageNet is in '{root}'{_folder_hint(folder)}")
    known = {normalize_name(name.split('/')[0]) for variant in SUITE for name in variant.folders}
    rest = [path for path in sorted(folder.iterdir()) if normalize_name(path.name) not in known and path.name[0] != '.']
    notes = {
        'not found': [variant.title for variant, place in places.items() if not place],
        'not recognised': [path.name for path in rest if path.is_dir()],
        'not unpacked': [path.name for path in rest if path.suffix in ('.tar', '.gz', '.tgz', '.zip')],
    }
    return found, [f'{problem}: {", ".join(names)}' for problem, names in notes.items() if names]


def _folder_hint(folder: Path) -> str:
    """Suggest folder names, and the parent folder if the data root is itself a variant."""
    names = ', '.join(variant.folders[0] for variant in SUITE)
    last = {normalize_name(name).split('/')[-1] for variant in SUITE for name in variant.folders}
    folder = folder.resolve()
    parent = f'; use its parent folder, {folder.parent}' if normalize_name(folder.name) in last else ''
    return f'; expected folders such as {names}{parent}'
