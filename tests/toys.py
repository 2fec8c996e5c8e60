"""Recipes and small image folders to train on, and the metrics of a run."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

# those of transfers and studies are no recipes of `vitzoo train`
SHIPPED_RECIPES = [
    path
    for path in sorted((Path(__file__).parents[1] / 'configs').rglob('*.yaml'))
    if path.parent.name not in ('study', 'transfer')
]


def make_images(root: Path, **counts: int) -> Path:
    """Write noisy images with one colour per class; `train_red=6` writes six images to train/red."""
    colours = dict(red=(200, 60, 60), green=(60, 200, 60), blue=(60, 60, 200))
    for name, count in counts.items():
        side, _, label = name.partition('_')
        (root / side / label).mkdir(parents=True)
        for number in range(count):
            noise = np.random.default_rng([number, *name.encode()]).normal(0, 60, (40, 36, 3))
            pixels = (noise + colours.get(label, (128, 128, 128))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / side / label / f'{number}.jpg')
    return root


def read_metrics(folder: Path) -> list[dict]:
    """The rows of metrics.csv without the speed, which differs from run to run."""
    with (folder / 'metrics.csv').open() as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if name != 'images_per_second'} for row in rows]
