"""The generator of the long-range tasks."""

import io
import tarfile

import numpy as np
import pytest
from long_range import (
    CLEARANCE,
    DASH,
    DISTRACTOR_DASHES,
    GAP,
    NUM_DASHES,
    NUM_DISTRACTORS,
    PADDING,
    SIZE,
    START_DISTANCE,
    draw,
    main,
    make_scene,
)
from PIL import Image


@pytest.fixture(scope='module')
def scenes() -> list:
    return [make_scene(seed=1, index=index) for index in range(12)]


def test_paths_are_dashed_and_turn_by_less_than_a_right_angle(scenes):
    for scene in scenes:
        assert [len(path) for path in scene.paths] == [NUM_DASHES, NUM_DASHES]
        assert {len(path) for path in scene.distractors} == {DISTRACTOR_DASHES}
        for path in (*scene.paths, *scene.distractors):
            dashes, gaps = path[:, 1] - path[:, 0], path[1:, 0] - path[:-1, 1]
            np.testing.assert_allclose(np.linalg.norm(dashes, axis=1), DASH)
            np.testing.assert_allclose(np.linalg.norm(gaps, axis=1), GAP)
            assert ((dashes[1:] * dashes[:-1]).sum(axis=1) > 0).all()
            assert path.min() >= PADDING and path.max() <= SIZE - PADDING
    starts = [np.linalg.norm(scene.paths[0][0, 0] - scene.paths[1][0, 0]) for scene in scenes]
    np.testing.assert_allclose(starts, START_DISTANCE)
    assert np.mean([len(scene.distractors) for scene in scenes]) > NUM_DISTRACTORS - 1


def test_dashes_that_do_not_follow_each_other_keep_apart(scenes):
    for scene in scenes:
        paths = (*scene.paths, *scene.distractors)
        middles = np.concatenate([path.mean(axis=1) for path in paths])
        owner = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
        place = np.concatenate([np.arange(len(path)) for path in paths])
        distances = np.linalg.norm(middles[:, None] - middles[None], axis=-1)
        is_neighbour = (owner[:, None] == owner[None]) & (abs(place[:, None] - place[None]) <= 1)
        assert distances[~is_neighbour].min() >= CLEARANCE


def test_the_markers_are_the_ends_of_one_path_in_every_other_image(scenes):
    for index, scene in enumerate(scenes):
        (start,) = [k for k, path in enumerate(scene.paths) if np.array_equal(path[0, 0], scene.markers[0])]
        (end,) = [k for k, path in enumerate(scene.paths) if np.array_equal(path[-1, 1], scene.markers[1])]
        assert (start == end) == bool(index % 2)


def test_an_image_shows_paths_and_markers(scenes):
    for scene in scenes:
        pixels = draw(scene)
        assert pixels.shape == (SIZE, SIZE) and pixels.dtype == np.uint8
        for center in scene.markers:
            x, y = np.clip(center.astype(int), 0, SIZE - 1)
            assert pixels[y, x] == 255
        assert 0.1 < (pixels > 64).mean() < 0.4
        for x, y in np.concatenate([path.mean(axis=1) for path in scene.paths]).astype(int):
            assert pixels[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2].max() > 64


@pytest.mark.slow
def test_neither_brightness_nor_the_distance_of_the_markers_tells_the_class():
    scenes = [make_scene(seed=2, index=index) for index in range(1000)]
    connected = np.arange(1000) % 2 == 1
    brightness = np.array([draw(scene).mean() for scene in scenes])
    distance = np.array([np.linalg.norm(scene.markers[0] - scene.markers[1]) for scene in scenes])
    for values in (brightness, distance):
        error = np.sqrt(values[connected].var() / 500 + values[~connected].var() / 500)
        assert abs(values[connected].mean() - values[~connected].mean()) < 4 * error
        # the best threshold
        order = np.argsort(values)
        right = np.cumsum(np.where(connected[order], 1, -1))
        assert 0.5 + max(right.max(), -right.min()) / 1000 < 0.6


def read_tar(path) -> dict[str, np.ndarray]:
    with tarfile.open(path) as tar:
        return {member.name: np.asarray(Image.open(io.BytesIO(tar.extractfile(member).read()))) for member in tar}


def test_a_strip_is_the_grid_read_row_by_row(tmp_path):
    main(['pathfinder', str(tmp_path), '--images', '10'])
    for split, number in (('train', 8), ('val', 1), ('test', 1)):
        grid, strip = (read_tar(tmp_path / form / f'{split}.tar') for form in ('grid', 'strip'))
        assert grid.keys() == strip.keys() and len(grid) == number
        for name, pixels in grid.items():
            assert strip[name].shape == (1, 1024)
            np.testing.assert_array_equal(strip[name].reshape(32, 32), pixels)
    assert sum(name.startswith('connected/') for name in read_tar(tmp_path / 'grid' / 'train.tar')) == 4


def test_cifar_10_becomes_grey_in_both_forms(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    with tarfile.open(tmp_path / 'cifar.tar', 'w') as tar:
        for name in ('train/cat/0010.png', 'train/cat/0011.png', 'test/dog/0000.png'):
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, 'PNG')
            member = tarfile.TarInfo(name)
            member.size = file.tell()
            file.seek(0)
            tar.addfile(member, file)
    main(['image', str(tmp_path / 'cifar.tar'), str(tmp_path / 'out')])
    found = {split: read_tar(tmp_path / 'out' / 'strip' / f'{split}.tar') for split in ('train', 'val', 'test')}
    assert {split: list(images) for split, images in found.items()} == dict(
        train=['cat/0011.png'], val=['cat/0010.png'], test=['dog/0000.png']
    )
    grey = np.asarray(Image.fromarray(pixels).convert('L'))
    np.testing.assert_array_equal(found['test']['dog/0000.png'].reshape(32, 32), grey)
