"""Writes the two image tasks of the Long Range Arena, each read as a grid and as a strip of pixels.

    python tools/long_range.py image cifar10.tar.xz long_range/image
    python tools/long_range.py pathfinder long_range/pathfinder --workers 8

Each writes grid/ (32 x 32 pixels) and strip/ (1 x 1,024, row after row), with train.tar, val.tar and test.tar of grey
PNGs. configs/study/long_range.yaml trains on them.

Image is CIFAR-10 in grey: 45,000, 5,000 and 10,000 images. Its archive has train/<class>/ and test/<class>/.

Pathfinder asks if two dots are the ends of one dashed path or of two, among distractors: 160,000, 20,000 and 20,000
images, of which half are connected. The generator was written from the description of the task and the parameters that
the Arena gives for 32 pixels, at its highest difficulty, 14 dashes: its images are of the same kind as the Arena's, but
not the same images. https://arxiv.org/abs/1805.08315, https://arxiv.org/abs/2011.04006
"""

import argparse
import io
import math
import tarfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

SIZE = 32
# of the Arena's configuration for 32 pixels; lengths are in pixels
NUM_DASHES, DASH, GAP = 14, 2.0, 2.0
NUM_DISTRACTORS, DISTRACTOR_DASHES = 5, 4
PADDING, START_DISTANCE, MARKER_RADIUS, THICKNESS = 1.0, 7.0, 1.5, 0.5
# least distance between dashes that do not follow each other
CLEARANCE = 1.5
CLASSES = ('apart', 'connected')
SPLITS = {'train': 0.8, 'val': 0.1, 'test': 0.1}
_SCALE = 8
_TURNS = np.radians(np.arange(-85, 90, 10))


class Scene(NamedTuple):
    """A drawing: dashes as arrays (number, 2 ends, 2 coordinates), and the ends that are marked."""

    paths: tuple[np.ndarray, np.ndarray]
    distractors: list[np.ndarray]
    markers: tuple[np.ndarray, np.ndarray]


def make_scene(seed: int, index: int) -> Scene:
    """Image `index` of a seed: connected if it is odd."""
    rng = np.random.default_rng([seed, index])
    paths = None
    while paths is None:
        paths = _grow_together(rng)
    distractors: list[np.ndarray] = []
    for _ in range(4 * NUM_DISTRACTORS):
        if len(distractors) < NUM_DISTRACTORS:
            found = _grow(rng, [*paths, *distractors])
            distractors += [] if found is None else [found]
    first = int(rng.integers(2))
    second = first if index % 2 else 1 - first
    return Scene(paths, distractors, (paths[first][0, 0], paths[second][-1, 1]))


def draw(scene: Scene) -> np.ndarray:
    """A scene as grey pixels, (32, 32) bytes."""
    image = Image.new('L', (SIZE * _SCALE, SIZE * _SCALE))
    pen = ImageDraw.Draw(image)
    for dash in np.concatenate([*scene.paths, *scene.distractors]):
        pen.line([tuple(_SCALE * end) for end in dash], fill=255, width=round(THICKNESS * _SCALE))
    for center in scene.markers:
        box = [*(_SCALE * (center - MARKER_RADIUS)), *(_SCALE * (center + MARKER_RADIUS))]
        pen.ellipse(box, fill=255)
    # thin lines would be dark after the reduction
    return np.clip(3 * np.asarray(image.reduce(_SCALE), dtype=int), 0, 255).astype(np.uint8)


def _grow_together(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray] | None:
    """Two paths whose first dashes are near each other, a dash of each in turn; None in a dead end."""
    margin = PADDING + START_DISTANCE
    start = rng.uniform(margin, SIZE - margin, 2)
    angle = rng.uniform(0, 2 * math.pi)
    starts = start, start + START_DISTANCE * np.array([math.cos(angle), math.sin(angle)])
    paths: list[list[np.ndarray]] = [[], []]
    for _ in range(NUM_DASHES):
        for own, other, begin in ((paths[0], paths[1], starts[0]), (paths[1], paths[0], starts[1])):
            dash = _next_dash(rng, own, other, begin)
            if dash is None:
                return None
            own.append(dash)
    return np.stack(paths[0]), np.stack(paths[1])


def _grow(rng: np.random.Generator, others: list[np.ndarray]) -> np.ndarray | None:
    """A distractor; None in a dead end."""
    start, path = rng.uniform(PADDING, SIZE - PADDING, 2), []
    occupied = list(np.concatenate(others))
    for _ in range(DISTRACTOR_DASHES):
        dash = _next_dash(rng, path, occupied, start)
        if dash is None:
            return None
        path.append(dash)
    return np.stack(path)


def _next_dash(
    rng: np.random.Generator, own: list[np.ndarray], others: list[np.ndarray], start: np.ndarray
) -> np.ndarray | None:
    """A dash that continues a path with a turn t of weight cos(t)^2, and keeps away from all dashes before the last.

    The gap before it has the same direction, so that the path turns at the end of the last dash.
    """
    if own:
        direction = own[-1][1] - own[-1][0]
        angles = math.atan2(direction[1], direction[0]) + _TURNS
        weights = np.cos(_TURNS) ** 2
    else:
        angles = rng.uniform(0, 2 * math.pi, len(_TURNS))
        weights = np.ones(len(_TURNS))
    units = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    begin = own[-1][1] + GAP * units if own else np.broadcast_to(start, units.shape)
    dashes = np.stack([begin, begin + DASH * units], axis=1)
    is_free = ((dashes >= PADDING) & (dashes <= SIZE - PADDING)).all(axis=(1, 2))
    obstacles = own[:-1] + others
    if obstacles:
        is_free &= _distances(dashes, np.stack(obstacles)).min(axis=1) >= CLEARANCE
    weights = weights * is_free
    if not weights.any():
        return None
    return dashes[rng.choice(len(dashes), p=weights / weights.sum())]


def _distances(dashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Least distances (n, m) between the ends and middles of dashes."""
    points, targets = (np.stack([x[:, 0], x.mean(axis=1), x[:, 1]], axis=1) for x in (dashes, others))
    gaps = points[:, None, :, None] - targets[None, :, None]
    return np.sqrt((gaps**2).sum(axis=-1)).min(axis=(2, 3))


def make_pathfinder(folder: Path, images: int = 200_000, seed: int = 0, workers: int = 1) -> None:
    """Write both forms of Pathfinder; the images do not depend on the number of processes."""
    pixels = partial(_make_pixels, seed)
    with ProcessPoolExecutor(workers) as pool:
        first = 0
        for split, share in SPLITS.items():
            indices = range(first, first + round(share * images))
            first = indices.stop
            made = pool.map(pixels, indices, chunksize=256) if workers > 1 else map(pixels, indices)
            write_split(folder, split, ((CLASSES[i % 2], f'{i:06}', image) for i, image in zip(indices, made)))


def _make_pixels(seed: int, index: int) -> np.ndarray:
    return draw(make_scene(seed, index))


def make_image(archive: Path, folder: Path) -> None:
    """Write both forms of grey CIFAR-10; every tenth training image is for validation."""
    splits: dict[str, list[tuple[str, str, np.ndarray]]] = {split: [] for split in SPLITS}
    with tarfile.open(archive) as tar:
        for member in tar:
            if not member.isfile():
                continue
            part, name, file = Path(member.name).parts[-3:]
            stem = Path(file).stem
            split = 'test' if part == 'test' else 'val' if int(stem) % 10 == 0 else 'train'
            with Image.open(tar.extractfile(member)) as image:
                splits[split].append((name, stem, np.asarray(image.convert('L'))))
    for split, images in splits.items():
        write_split(folder, split, sorted(images, key=lambda item: item[:2]))


def write_split(folder: Path, split: str, images: Iterable[tuple[str, str, np.ndarray]]) -> None:
    """Write images (class, name, pixels) as grid/<split>.tar and strip/<split>.tar."""
    for form in ('grid', 'strip'):
        (folder / form).mkdir(parents=True, exist_ok=True)
    with (
        tarfile.open(folder / 'grid' / f'{split}.tar', 'w') as grid,
        tarfile.open(folder / 'strip' / f'{split}.tar', 'w') as strip,
    ):
        for name, stem, pixels in images:
            for tar, form in ((grid, pixels), (strip, pixels.reshape(1, -1))):
                file = io.BytesIO()
                Image.fromarray(form).save(file, 'PNG')
                member = tarfile.TarInfo(f'{name}/{stem}.png')
                member.size = file.tell()
                file.seek(0)
                tar.addfile(member, file)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    tasks = parser.add_subparsers(dest='task', required=True)
    image = tasks.add_parser('image')
    image.add_argument('archive', type=Path)
    pathfinder = tasks.add_parser('pathfinder')
    for task in (image, pathfinder):
        task.add_argument('folder', type=Path)
    pathfinder.add_argument('--images', type=int, default=200_000)
    pathfinder.add_argument('--seed', type=int, default=0)
    pathfinder.add_argument('--workers', type=int, default=1)
    args = parser.parse_args(argv)
    if args.task == 'image':
        make_image(args.archive, args.folder)
    else:
        make_pathfinder(args.folder, args.images, args.seed, args.workers)


if __name__ == '__main__':
    main()
