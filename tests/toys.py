"""Small folders of images to train on, and what a run on them left."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image


def make_images(root: Path, **counts: int) -> Path:
    """Noisy pictures, each class with a colour of its own; `train_red=6` are six of class red for training."""
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
    with (folder / 'metrics.csv').open() as file:
        rows = list(csv.DictReader(file))
    # the clock is not part of a run
    return [{name: value for name, value in row.items() if name != 'images_per_second'} for row in rows]
