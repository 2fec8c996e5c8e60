"""The published variants of ImageNet, each an entry that owns its layout, mapping, mask and crop."""

from dataclasses import dataclass
from pathlib import Path

from vitzoo.data.variants.base import Readout, Variant, VariantImages, plain
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

IMAGENET, V2 = 'https://image-net.org', 'https://huggingface.co/datasets/vaishaal/ImageNetV2'
A, R = 'https://github.com/hendrycks/natural-adv-examples', 'https://github.com/hendrycks/imagenet-r'
SKETCH, C = 'https://github.com/HaohanWang/ImageNet-Sketch', 'https://zenodo.org/records/2235448'
STYLIZED = 'https://github.com/rgeirhos/Stylized-ImageNet'
VAL_FOLDERS = (
    *('imagenet/val', 'imagenet-1k/val', 'imagenet1k/val', 'ilsvrc2012/val', 'ilsvrc/data/cls-loc/val'),
    *('imagenet/validation', 'imagenet-val', 'imagenet-validation', 'val', 'validation'),
)
SKETCH_FOLDERS = ('imagenet-sketch/sketch', 'imagenet-sketch', 'sketch')
STYLIZED_FOLDERS = ('stylized-imagenet/val', 'imagenet-stylized/val', 'stylized-imagenet', 'imagenet-stylized')


def _v2_folders(name: str, letter: str) -> tuple[str, ...]:
    names = (f'imagenetv2-{name}-format-val', f'imagenetv2-{name}', f'imagenetv2-{letter}-format-val')
    return tuple(prefix + name for prefix in ('', 'imagenetv2/', 'imagenet-v2/') for name in names)


SUITE: tuple[Variant, ...] = (
    ValVariant('imagenet', 'ImageNet', IMAGENET, VAL_FOLDERS, 50_000, per_class=50),
    *(
        V2Variant(f'imagenet_v2_{key}', f'ImageNetV2 {title}', V2, _v2_folders(name, letter), 10_000, per_class=10)
        for key, title, name, letter in (
            ('matched_frequency', 'matched-frequency', 'matched-frequency', 'b-33'),
            ('threshold_07', 'threshold-0.7', 'threshold0.7', 'a-44'),
            ('top_images', 'top-images', 'top-images', 'c-12'),
        )
    ),
    SubsetVariant('imagenet_a', 'ImageNet-A', A, ('imagenet-a',), 7_500, subset='imagenet_a_synsets.txt'),
    SubsetVariant('imagenet_r', 'ImageNet-R', R, ('imagenet-r',), 30_000, subset='imagenet_r_synsets.txt'),
    # the authors say 50,000, and their archive has 50,889
    WnidVariant('imagenet_sketch', 'ImageNet-Sketch', SKETCH, SKETCH_FOLDERS, 50_889, 50_000),
    ObjectNet(),
    ImageNet9(),
    StylizedVariant('stylized_imagenet', 'Stylized-ImageNet', STYLIZED, STYLIZED_FOLDERS, 50_000, per_class=50),
    CorruptedVariant('imagenet_c', 'ImageNet-C', C, ('imagenet-c', 'imagenetc'), 50_000, per_class=50),
)


@dataclass
class Found:
    """A variant that lies below the data root, with the folders of its parts."""

    variant: Variant
    parts: dict[str, Path]

    def open(self, part: str, allow_partial: bool = False) -> tuple[VariantImages, dict[str, Readout]]:
        """Open a part, which is checked, and say how it is scored."""
        images = self.variant.open(self.parts[part], allow_partial)
        return images, self.variant.readouts(images, part)


def find_suite(root: str, allow_partial: bool = False) -> tuple[list[Found], list[str]]:
    """Find the variants that lie below a folder.

    Returns:
        Those found, and a sentence for each other thing of note: what is missing, what was not recognised.

    Raises:
        UserError: The folder does not exist or none is in it, or one of them is not laid out as it was published.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(f"the data root '{root}' is not a folder")
    places = {variant: variant.find(folder) for variant in SUITE}
    found = [Found(variant, variant.parts(place, allow_partial)) for variant, place in places.items() if place]
    if not found:
        raise UserError(f"no variant of ImageNet is in '{root}'{_where_to_look(folder)}")
    known = {plain(name.split('/')[0]) for variant in SUITE for name in variant.folders}
    rest = [path for path in sorted(folder.iterdir()) if plain(path.name) not in known and path.name[0] != '.']
    notes = {
        'not found': [variant.title for variant, place in places.items() if not place],
        'not recognised': [path.name for path in rest if path.is_dir()],
        'not unpacked': [path.name for path in rest if path.suffix in ('.tar', '.gz', '.tgz', '.zip')],
    }
    return found, [f'{problem}: {", ".join(names)}' for problem, names in notes.items() if names]


def _where_to_look(folder: Path) -> str:
    """Say what the folders should be called, and whether the data root is one of them itself."""
    names = ', '.join(variant.folders[0] for variant in SUITE)
    last = {plain(name).split('/')[-1] for variant in SUITE for name in variant.folders}
    above = f'; give the folder above it, {folder.resolve().parent}' if plain(folder.resolve().name) in last else ''
    return f', which is searched for folders such as {names}{above}'
