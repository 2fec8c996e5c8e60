"""The corruptions of ImageNet-C, and the table of accuracies that --corrupt adds to a record."""

import json
import os
import runpy
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf
from torch.utils.data import ConcatDataset, Subset

from vitzoo.data import corruptions, eval_loader, eval_transform, open_dataset, split_eval_transform
from vitzoo.data.corruptions import CONDITIONS, CORRUPTIONS, MIN_SIZE, SEVERITIES, CorruptedImages, corrupt
from vitzoo.data.variants import imagenet
from vitzoo.data.variants.imagenet import IMAGENET_C_CONDITIONS
from vitzoo.errors import UserError
from vitzoo.metrics.robustness import ALEXNET_ERRORS
from vitzoo.validate import main
from vitzoo.validate.command import validate
from vitzoo.validate.robustness import check_corruptible

DATA_CONFIG = dict(
    input_size=(3, 32, 32), interpolation='bicubic', mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9, crop_mode='center'
)
# without random numbers
FIXED = {'defocus_blur', 'zoom_blur', 'brightness', 'contrast', 'pixelate', 'jpeg_compression'}


def scene(height: int = 224, width: int = 224, seed: int = 0) -> np.ndarray:
    """A synthetic photograph: smooth colors, edges and fine grain."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(256, size=(7, 7, 3), dtype=np.uint8))
    image = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    image[height // 4 : height // 2, width // 4 : width // 2] = rng.integers(256, size=3)
    return (image + rng.integers(-12, 13, size=image.shape)).clip(0, 255).astype(np.uint8)


def change(image: np.ndarray, corruption: str, severity: int) -> float:
    return np.abs(corrupt(image, corruption, severity, 'a').astype(float) - image).mean()


def share_left(image: np.ndarray, corruption: str, severity: int) -> float:
    """Slope of the regression of the corrupted image on the original."""
    before, after = image.astype(float).ravel(), corrupt(image, corruption, severity, 'a').astype(float).ravel()
    return np.cov(before, after)[0, 1] / before.var(ddof=1)


def test_the_published_corruptions_are_implemented():
    assert [(name, severity) for name in ALEXNET_ERRORS for severity in (1, 2, 3, 4, 5)] == IMAGENET_C_CONDITIONS
    assert set(IMAGENET_C_CONDITIONS) <= set(CONDITIONS)


def test_one_more_corruption_leaves_a_full_imagenet_c_complete(monkeypatch, tmp_path):
    monkeypatch.setitem(CORRUPTIONS, 'rain', CORRUPTIONS['snow'])
    monkeypatch.setattr(
        corruptions, 'CONDITIONS', [(name, severity) for name in CORRUPTIONS for severity in SEVERITIES]
    )
    for name, severity in IMAGENET_C_CONDITIONS:
        (tmp_path / name / str(severity)).mkdir(parents=True)
    # the module is run again, as if the corruption had always been there
    variant_class = runpy.run_path(imagenet.__file__)['CorruptedVariant']
    variant = variant_class('imagenet_c', 'ImageNet-C', 'https://', ('imagenet-c',), 50_000)
    assert len(variant.parts(tmp_path, allow_partial=False)) == variant.num_parts == 75


@pytest.mark.parametrize('size', [(224, 224), (32, 32), (40, 61), (97, 64)], ids=str)
@pytest.mark.parametrize('corruption', CORRUPTIONS)
def test_a_corruption_is_a_function_of_image_severity_and_name(corruption, size):
    image = scene(*size)
    before = image.copy()
    for severity in SEVERITIES:
        result = corrupt(image, corruption, severity, 'a')
        assert result.dtype == np.uint8 and result.shape == image.shape
        assert (result == corrupt(image, corruption, severity, 'a')).all()
        # a slight blur may not change a small image
        assert (result != image).any() or (severity == 1 and 'blur' in corruption and size != (224, 224))
    assert (result == corrupt(image, corruption, 5, 'b')).all() == (corruption in FIXED)
    assert (image == before).all()


@pytest.mark.parametrize(
    'corruption',
    [
        *('gaussian_noise', 'shot_noise', 'impulse_noise', 'defocus_blur', 'glass_blur', 'motion_blur', 'zoom_blur'),
        *('snow', 'frost', 'contrast'),
    ],
)
def test_a_higher_severity_leaves_less_of_the_picture(corruption):
    images = [scene(seed=seed) for seed in range(3)]
    left = [np.mean([share_left(image, corruption, severity) for image in images]) for severity in SEVERITIES]
    assert (np.diff(left) < 0).all(), left


# mean change of the pixels of two scenes at each severity, with the parameters of the paper
CHANGES = {
    'gaussian_noise': [15.9, 23.3, 33.8, 46.4, 61.7],
    'shot_noise': [17.1, 25.9, 36.4, 53.6, 66.2],
    'impulse_noise': [3.9, 8.1, 11.7, 22.0, 34.6],
    'defocus_blur': [6.0, 6.1, 6.6, 7.1, 7.9],
    'glass_blur': [10.5, 6.8, 12.0, 12.5, 11.8],
    'motion_blur': [6.1, 9.8, 14.3, 18.9, 22.3],
    'zoom_blur': [10.1, 13.0, 15.7, 18.4, 21.5],
    'snow': [43.5, 89.0, 67.4, 83.5, 96.4],
    'frost': [33.4, 53.0, 28.6, 36.6, 30.5],
    'fog': [33.6, 38.4, 49.3, 47.0, 49.3],
    'brightness': [17.1, 31.5, 42.2, 49.0, 53.2],
    'contrast': [31.7, 37.0, 42.3, 47.6, 50.2],
    'elastic_transform': [27.8, 52.2, 16.0, 13.1, 16.9],
    'pixelate': [5.6, 6.0, 7.0, 8.8, 9.0],
    'jpeg_compression': [8.1, 9.0, 9.7, 11.6, 14.2],
}


@pytest.mark.parametrize('corruption', CORRUPTIONS)
def test_a_corruption_changes_as_much_as_was_recorded(corruption):
    images = [scene(112, 112, seed=seed) for seed in range(2)]
    changes = [np.mean([change(image, corruption, severity) for image in images]) for severity in SEVERITIES]
    assert changes == pytest.approx(CHANGES[corruption], rel=0.02, abs=0.1)


@pytest.mark.parametrize('size', [(MIN_SIZE, 64), (64, MIN_SIZE), (MIN_SIZE, MIN_SIZE)], ids=str)
@pytest.mark.parametrize('corruption', CORRUPTIONS)
def test_the_smallest_images_can_be_corrupted(corruption, size):
    for severity in SEVERITIES:
        assert corrupt(scene(*size), corruption, severity, 'a').shape == (*size, 3)


def test_frost_may_have_no_needles_in_the_smallest_images():
    with np.errstate(invalid='raise'):
        for name in range(100):
            corrupt(scene(MIN_SIZE, MIN_SIZE), 'frost', 1, str(name))


def test_an_image_that_is_too_small_is_refused():
    check_corruptible('strips', dict(input_size=(3, 3, 64)))
    with pytest.raises(UserError, match='--corrupt needs images of at least 3x3 pixels, and those of strips are 2x64'):
        check_corruptible('strips', dict(input_size=(3, 2, 64)))


def test_a_name_that_is_not_unicode_is_a_seed_like_another():
    first, second = (corrupt(scene(), 'gaussian_noise', 1, os.fsdecode(name)) for name in (b'a\xff', b'a\xfe'))
    assert not np.array_equal(first, second)


def test_fog_is_thicker_at_the_end_and_elastic_is_far_at_first_and_local_later():
    images = [scene(seed=seed) for seed in range(3)]
    fog, elastic = (
        [np.mean([share_left(image, corruption, severity) for image in images]) for severity in SEVERITIES]
        for corruption in ('fog', 'elastic_transform')
    )
    assert fog[4] < 0.8 * fog[0] and fog[0] < 0.5
    assert elastic[1] < elastic[0] < min(elastic[2:]) and elastic[4] < elastic[2]


@pytest.mark.parametrize('corruption', ['defocus_blur', 'motion_blur', 'snow'])
@pytest.mark.parametrize('severity', (3, 5))
@pytest.mark.parametrize(('size', 'larger'), [(56, 224), (224, 448)])
def test_lengths_in_pixels_grow_with_the_image(corruption, severity, size, larger):
    """An enlarged image is changed as much as before."""
    small = Image.fromarray(scene(56, 56))
    image, large = (
        np.asarray(small.resize((side, side), Image.Resampling.BICUBIC)) if side > 56 else np.asarray(small)
        for side in (size, larger)
    )
    assert 0.65 < change(large, corruption, severity) / change(image, corruption, severity) < 1.3


@pytest.mark.parametrize(('severity', 'std'), [(1, 0.08), (2, 0.12), (3, 0.18), (4, 0.26), (5, 0.38)])
def test_gaussian_noise_has_its_standard_deviation(severity, std):
    noise = corrupt(np.full((224, 224, 3), 128, np.uint8), 'gaussian_noise', severity, 'a') / 255 - 128 / 255
    inside = np.abs(noise) < 0.45
    assert np.median(np.abs(noise)) == pytest.approx(0.6745 * std, rel=0.02)
    assert inside.mean() > 0.7


@pytest.mark.parametrize(('severity', 'amount'), [(1, 0.03), (2, 0.06), (3, 0.09), (4, 0.17), (5, 0.27)])
def test_impulse_noise_hits_its_share_of_the_values(severity, amount):
    noise = corrupt(np.full((224, 224, 3), 128, np.uint8), 'impulse_noise', severity, 'a')
    assert (noise == 0).mean() == pytest.approx(amount / 2, rel=0.05)
    assert (noise == 255).mean() == pytest.approx(amount / 2, rel=0.05)
    assert set(np.unique(noise)) == {0, 128, 255}


def test_shot_noise_counts_photons():
    noise = corrupt(np.full((224, 224, 3), 102, np.uint8), 'shot_noise', 5, 'a')
    photons = noise / 85
    assert (photons == photons.round()).all()
    # white has 3 photons, so 102 has 1.2 on average; more than 3 are clipped
    assert photons.mean() == pytest.approx(1.2, abs=0.05)


def test_defocus_blur_makes_a_point_a_disk():
    image = np.zeros((224, 224, 3), np.uint8)
    image[100, 120] = 255
    disk = corrupt(image, 'defocus_blur', 1, 'a')[:, :, 0] > 0
    y, x = np.nonzero(disk)
    assert (y.min(), y.max(), x.min(), x.max()) == (97, 103, 117, 123)
    assert disk.sum() == 29


@pytest.mark.parametrize('severity', SEVERITIES)
def test_defocus_blur_makes_an_edge_as_wide_a_share_of_any_image(severity):
    def edge_width(side: int) -> float:
        image = np.zeros((side, side, 3), np.uint8)
        image[:, side // 2 :] = 255
        row = corrupt(image, 'defocus_blur', severity, 'a')[side // 2, :, 0]
        start, end = np.interp([0.1 * 255, 0.9 * 255], row, np.arange(side))
        return (end - start) / side

    for side in (160, 288, 384, 448):
        assert edge_width(side) == pytest.approx(edge_width(224), rel=0.1)


def test_motion_blur_makes_a_point_a_line_that_fades_to_one_side():
    image = np.zeros((224, 224, 3), np.uint8)
    image[112, 112] = 255
    line = corrupt(image, 'motion_blur', 2, 'a')[:, :, 0].astype(int)
    x = np.nonzero(line)[1]
    columns = line[:, x.min() : 113].sum(axis=0)
    assert line[112, 112] == line.max()
    assert x.max() == 112 and len(columns) > 8
    assert columns[-1] > columns[len(columns) // 2] > columns[0] > 0


def test_brightness_raises_the_value_and_keeps_the_hue():
    image = np.array([[[100, 50, 0], [0, 0, 0], [250, 125, 5]]], np.uint8)
    result = corrupt(image, 'brightness', 2, 'a')
    assert result.tolist() == [[[151, 76, 0], [51, 51, 51], [255, 128, 5]]]


def test_contrast_draws_every_channel_to_its_mean():
    image = np.array([[[0, 10, 100], [200, 30, 100]]], np.uint8)
    assert corrupt(image, 'contrast', 1, 'a').tolist() == [[[60, 16, 100], [140, 24, 100]]]


def test_pixelation_and_jpeg_are_pils():
    image = scene()
    blocks = corrupt(image, 'pixelate', 5, 'a').reshape(56, 4, 56, 4, 3)
    assert (blocks == blocks[:, :1, :, :1]).all()
    assert np.abs(blocks[:, 0, :, 0] - image.reshape(56, 4, 56, 4, 3).mean(axis=(1, 3))).max() <= 1
    file = BytesIO()
    Image.fromarray(image).save(file, 'JPEG', quality=7)
    assert (corrupt(image, 'jpeg_compression', 5, 'a') == np.asarray(Image.open(file))).all()


def test_glass_only_moves_colours_near_where_they_were():
    image = np.zeros((224, 224, 3), np.uint8)
    image[:, 112:] = 255
    for severity in SEVERITIES:
        blurred = corrupt(image, 'glass_blur', severity, 'a')
        assert (blurred[:, :60] == 0).all() and (blurred[:, 160:] == 255).all()
        assert 0 < blurred[:, 112].mean() < 255


@pytest.mark.parametrize('corruption', ['fog', 'frost', 'snow'])
def test_weather_differs_between_images_and_leaves_something_to_see(corruption):
    weather = [corrupt(scene(), corruption, 5, str(number)).astype(float) for number in range(3)]
    assert np.abs(weather[0] - weather[1]).mean() > 5
    correlation = np.corrcoef(np.ravel(np.mean(weather, axis=0)), np.ravel(scene()))[0, 1]
    assert correlation > 0.3


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp('data')
    for number in range(5):
        file = root / 'val' / 'abc'[number % 3] / f'{number}.png'
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scene(48, 40, number)).save(file)
    return root


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('runs')
    torch.manual_seed(0)
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=1, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    save_for_hf(model, folder, model_config=dict(label_names=['a', 'b', 'c']), safe_serialization=True)
    return folder


def corrupted_inputs(data_dir: Path, batch_size: int, workers: int) -> torch.Tensor:
    """Every fourth image of the dataset under each of the conditions, at least one per condition."""
    images, transforms = open_dataset(str(data_dir), 'val'), split_eval_transform(DATA_CONFIG)
    dataset = ConcatDataset([CorruptedImages(images, *condition, *transforms) for condition in CONDITIONS])
    assert len(dataset) == 75 * 5
    dataset = Subset(dataset, range(0, len(dataset), 4))
    return torch.cat([images for images, _ in eval_loader(dataset, batch_size, workers)])


def test_a_corrupted_image_is_the_same_in_any_batch_and_worker_and_from_a_tar(data, tmp_path):
    inputs = corrupted_inputs(data, batch_size=64, workers=0)
    assert inputs.shape == (94, 3, 32, 32)
    assert torch.equal(inputs, corrupted_inputs(data, batch_size=7, workers=2))
    with tarfile.open(tmp_path / 'data.tar', 'w') as tar:
        tar.add(data / 'val', 'photos/val')
    assert torch.equal(inputs, corrupted_inputs(tmp_path / 'data.tar', batch_size=64, workers=0))


def test_the_corruption_comes_after_the_crop(data):
    images = open_dataset(str(data), 'val')
    crop, to_tensor = split_eval_transform(DATA_CONFIG)
    for index in range(len(images)):
        assert torch.equal(to_tensor(crop(images[index][0])), eval_transform(DATA_CONFIG)(images[index][0]))
    pixels = corrupt(np.asarray(crop(images[3][0])), 'contrast', 4, images.filename(3))
    item = CorruptedImages(images, 'contrast', 4, crop, to_tensor)[3]
    assert torch.equal(item[0], to_tensor(Image.fromarray(pixels)))
    assert item[1] == images[3][1]


def test_a_grey_model_sees_grey_corruptions(data):
    config = dict(DATA_CONFIG, input_size=(1, 32, 32), mean=(0.5,), std=(0.5,))
    dataset = CorruptedImages(open_dataset(str(data), 'val'), 'fog', 1, *split_eval_transform(config))
    assert dataset[0][0].shape == (1, 32, 32)


def test_the_command_adds_a_table_to_the_record(data, trained, tmp_path, capsys, quick_timing):
    argv = [str(trained), '--data-dir', str(data), '--corrupt', '--workers', '0']
    (record,) = validate([*argv, '--results-file', str(tmp_path / 'results.json')])
    assert list(record['corrupt']) == list(CORRUPTIONS)
    assert all(value in (0, 20, 40, 60, 80, 100) for values in record['corrupt'].values() for value in values)
    mean = np.mean(list(record['corrupt'].values()))
    assert record['corrupt_top1'] == pytest.approx(mean)
    assert record['corrupt_relative'] == pytest.approx(100 * mean / record['top1'])
    table = capsys.readouterr().out
    assert all(name in table for name in CORRUPTIONS) and f'corrupted {mean:.2f}' in table
    assert json.loads((tmp_path / 'results.json').read_text())[0]['corrupt'] == record['corrupt']


def test_corruptions_need_images(capsys):
    with pytest.raises(SystemExit) as end:
        main(['test_resnet', '--no-data', '--corrupt'])
    assert end.value.code == 2
    assert '--corrupt needs images' in capsys.readouterr().err
