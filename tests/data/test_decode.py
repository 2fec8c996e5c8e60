"""Decoding a crop for training gives the pixels of the whole image, at a lower cost."""

from io import BytesIO
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, features
from torch.utils.data import Dataset
from torchvision.transforms import Compose, InterpolationMode, ToTensor
from torchvision.transforms import Normalize as TorchNormalize
from torchvision.transforms.functional import resized_crop

from vitzoo.data import Normalize, eval_loader, open_dataset, train_transform
from vitzoo.data.decode import read_crop, read_rgb
from vitzoo.data.loader import seed_everything
from vitzoo.errors import UserError
from vitzoo.train.recipe import make_recipe

CONFIG = dict(input_size=(3, 64, 64), interpolation='bicubic', mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CROP_AND_FLIP = dict(train_interpolation='bicubic', color_jitter=0)


def photograph(width: int = 200, height: int = 150) -> Image.Image:
    """A synthetic photograph: smooth colors with a texture."""
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    fine = Image.fromarray(random.normal(0, 12, (height // 4, width // 4)).astype(np.float32)).resize((width, height))
    return Image.fromarray((np.asarray(coarse) + np.asarray(fine)[..., None]).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, kind: str = 'JPEG', **options) -> BytesIO:
    file = BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize(
    ('mode', 'kind', 'options'),
    [
        ('RGB', 'JPEG', {}),
        ('RGB', 'JPEG', dict(progressive=True, quality=95, subsampling=0)),
        ('RGB', 'JPEG', dict(keep_rgb=True)),
        ('RGB', 'JPEG', dict(exif=turned())),
        ('RGB', 'MPO', dict(save_all=True, append_images=[Image.new('RGB', (200, 150))])),
        ('L', 'JPEG', {}),
        ('CMYK', 'JPEG', {}),
        ('RGBA', 'PNG', {}),
        ('P', 'GIF', {}),
        ('I;16', 'PNG', {}),
    ],
    ids=['jpeg', 'progressive', 'rgb jpeg', 'turned', 'two images', 'grey', 'cmyk', 'transparent', 'palette', '16-bit'],
)
def test_a_crop_is_that_of_the_whole_image(mode, kind, options):
    image = photograph()
    image = image.convert('I').point(lambda value: value * 257).convert(mode) if mode == 'I;16' else image.convert(mode)
    file = encode(image, kind, **options)
    whole = np.asarray(read_rgb(file))
    crop = read_crop(file, lambda image: (30, 20, 100, 110), (64, 64))
    assert (crop.permute(1, 2, 0).numpy() == whole[30:130, 20:130]).all()


def test_the_image_of_a_caller_stays_as_it_is():
    file = BytesIO()
    Image.new('RGB', (4, 2)).save(file, 'JPEG', exif=turned())
    image = Image.open(file)
    assert read_rgb(image).size == (2, 4)
    assert image.size == (4, 2) and image.getexif()[0x0112] == 6


def test_an_image_with_values_that_are_not_finite_is_refused():
    image = Image.fromarray(np.array([[0.5, np.nan]], np.float32))
    with pytest.raises(ValueError, match='pixels that are not finite'):
        read_rgb(image)


def test_the_crop_is_chosen_by_the_size_of_the_upright_image():
    sizes = []
    for options in ({}, dict(exif=turned())):
        read_crop(encode(photograph(), **options), lambda image: sizes.append(image.size) or (0, 0, 50, 50), (64, 64))
    assert sizes == [(200, 150), (150, 200)]


@pytest.mark.parametrize(('side', 'scale'), [(255, 1), (256, 2), (511, 2), (512, 4), (1023, 4), (1024, 8), (1100, 8)])
def test_a_large_jpeg_is_decoded_at_a_scale_that_leaves_twice_the_pixels(side, scale):
    file = encode(photograph(1200, 1104), quality=95)
    crop = read_crop(file, lambda image: (8, 16, side, side), (64, 64))
    assert crop.shape == (3, side // scale, side // scale)
    assert side // scale >= 128
    side = side // scale * scale
    small = torch.nn.functional.interpolate(crop[None], (64, 64), mode='bicubic', antialias=True)[0]
    exact = resized_crop(read_rgb(file), 8, 16, side, side, [64, 64], InterpolationMode.BICUBIC)
    difference = np.abs(small.permute(1, 2, 0).numpy().astype(int) - np.asarray(exact))
    assert difference.mean() < 1


def test_the_scale_leaves_twice_the_height_and_twice_the_width():
    file = encode(photograph(1104, 1200))
    # 8 times as high and 4 times as wide, or the reverse
    assert read_crop(file, lambda image: (0, 0, 1024, 256), (128, 64)).shape == (3, 512, 128)
    assert read_crop(file, lambda image: (0, 0, 256, 1024), (64, 128)).shape == (3, 128, 512)


def test_what_opencv_cannot_read_is_left_to_pil(monkeypatch):
    file = encode(photograph())
    expected = read_crop(file, lambda image: (10, 20, 100, 90), (64, 64))
    monkeypatch.setattr('vitzoo.data.decode.cv2.imdecode', lambda *args: None)
    assert torch.equal(read_crop(file, lambda image: (10, 20, 100, 90), (64, 64)), expected)


@pytest.mark.parametrize('damage', ['text', 'truncated', 'empty'])
def test_an_unreadable_image_is_named_in_training_too(tmp_path, damage):
    whole = encode(photograph()).getvalue()
    (tmp_path / 'train' / 'ant').mkdir(parents=True)
    content = {'text': b'not an image', 'truncated': whole[: len(whole) // 2], 'empty': b''}[damage]
    (tmp_path / 'train' / 'ant' / 'a.jpg').write_bytes(content)
    dataset = open_dataset(str(tmp_path), 'train', train_transform(make_recipe(CROP_AND_FLIP), CONFIG))
    with pytest.raises(UserError, match='cannot read the image ant/a.jpg of .*train'):
        dataset[0]


@pytest.mark.skipif(not features.check('avif'), reason='this PIL reads no AVIF')
def test_a_damaged_avif_with_the_suffix_of_a_jpeg_is_named(tmp_path):
    without_locations = encode(photograph(), 'AVIF').getvalue().replace(b'iloc', b'xloc')
    (tmp_path / 'train' / 'ant').mkdir(parents=True)
    (tmp_path / 'train' / 'ant' / 'a.jpg').write_bytes(without_locations)
    with pytest.raises(UserError, match='cannot read the image ant/a.jpg of .*train'):
        open_dataset(str(tmp_path), 'train')[0]


@pytest.mark.parametrize('interpolation', ('bilinear', 'bicubic'))
def test_crops_are_resized_as_pil_does(interpolation):
    transform = train_transform(make_recipe({**CROP_AND_FLIP, 'train_interpolation': interpolation}), CONFIG)
    file = encode(photograph())
    for seed in range(20):
        seed_everything(seed)
        ours = transform.read(file).permute(1, 2, 0).numpy()
        seed_everything(seed)
        # timm's own, on the whole image
        theirs = np.asarray(transform.crop(read_rgb(file)))
        assert np.abs(ours.astype(int) - theirs).max() <= 2


def test_the_image_that_a_file_holds_is_augmented_like_the_file():
    transform = train_transform(make_recipe(dict(aa='rand-m9-mstd0.5', reprob=1.0)), CONFIG)
    file, results = encode(photograph()), []
    for source in (file, read_rgb(file)):
        seed_everything(3)
        results.append(transform(transform.read(source)))
        seed_everything(3)
        results.append(transform(read_rgb(file)))
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize('aa', ('rand-m9-mstd0.5-inc1', 'rand-m10-n6-inc1', 'augmix-m10', 'original', 'v0', '3a'))
def test_every_policy_of_timm_runs_at_full_strength(aa):
    transform = train_transform(make_recipe(dict(aa=aa)), {**CONFIG, 'input_size': (3, 16, 16)})
    image = photograph(20, 20)
    for seed in range(300):
        seed_everything(seed, cpu_only=True)
        assert transform(image).shape == (3, 16, 16)


def test_what_is_not_erased_stays_bytes_until_it_is_normalized():
    pixels = np.array(photograph(64, 64))
    recipe = make_recipe({**CROP_AND_FLIP, 'scale': [1, 1], 'ratio': [1, 1], 'hflip': 0})
    images = torch.stack([train_transform(recipe, CONFIG)(Image.fromarray(pixels))] * 2)
    assert images.dtype == torch.uint8
    expected = Compose([ToTensor(), TorchNormalize(CONFIG['mean'], CONFIG['std'])])(pixels)
    torch.testing.assert_close(Normalize(CONFIG)(images), torch.stack([expected] * 2), rtol=0, atol=1e-6)
    erased = train_transform(SimpleNamespace(**{**vars(recipe), 'reprob': 1.0}), CONFIG)(Image.fromarray(pixels))
    same = (erased - expected).abs().amax(dim=0) < 1e-6
    assert 0.5 < same.float().mean() < 0.99
    assert torch.equal(Normalize(CONFIG)(erased), erased)


class Threads(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return cv2.getNumThreads(), torch.get_num_threads()


def test_a_worker_keeps_to_one_core():
    assert [[n.item() for n in batch] for batch in eval_loader(Threads(), 1, workers=1)] == [[1, 1]]
