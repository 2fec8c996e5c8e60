"""timm's training transforms that are not random resized crops, and its color augmentation."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from vitzoo.data import Normalize, eval_transform, train_transform
from vitzoo.data.decode import read_rgb
from vitzoo.data.loader import seed_everything
from vitzoo.errors import UserError
from vitzoo.train.recipe import make_recipe

CONFIG = dict(input_size=(3, 32, 48), interpolation='bicubic', mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9)


def encode(size: tuple[int, int], kind: str = 'JPEG') -> io.BytesIO:
    """An image file with large blots."""
    noise = np.random.default_rng(0).integers(0, 255, (7, 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(file, kind)
    return file


def timms(**options):
    """timm's transform, to bytes."""
    return create_transform(CONFIG['input_size'], is_training=True, use_prefetcher=True, **options)


@pytest.mark.parametrize('size', [(200, 150), (60, 200), (20, 20), (1, 1), (400, 3)])
@pytest.mark.parametrize(
    ('values', 'options'),
    [
        (dict(train_crop_mode='rkrc'), dict(train_crop_mode='rkrc')),
        (dict(train_crop_mode='rkrr', vflip=0.5), dict(train_crop_mode='rkrr', vflip=0.5)),
        (dict(no_aug=True), dict(no_aug=True)),
        (dict(no_aug=True, train_interpolation='bicubic'), dict(no_aug=True, interpolation='bicubic')),
    ],
    ids=str,
)
def test_a_crop_is_that_of_timm(values, options, size):
    recipe = make_recipe(dict(color_jitter=0, **values))
    transform = train_transform(recipe, CONFIG)
    defaults = dict(scale=recipe.scale, ratio=recipe.ratio, color_jitter=None, interpolation='random')
    file, expected = encode(size), timms(**(defaults | options))
    for seed in range(5):
        seed_everything(seed)
        ours = transform(transform.read(file))
        seed_everything(seed)
        theirs = expected(read_rgb(file))
        assert ours.dtype == torch.uint8 and ours.shape == (3, 32, 48)
        assert torch.equal(ours, torch.as_tensor(np.asarray(theirs)))


@pytest.mark.parametrize('mode', ['rkrc', 'rkrr'])
@pytest.mark.parametrize(('ratio', 'least', 'most'), [([1, 1], 0, 1), ([0.5, 2], 8, 99)], ids=['kept', 'stretched'])
def test_a_resized_crop_keeps_the_ratio_of_a_disc_unless_it_is_stretched(mode, ratio, least, most):
    recipe = make_recipe(dict(train_crop_mode=mode, ratio=ratio, scale=[1, 1], hflip=0, color_jitter=0))
    transform = train_transform(recipe, dict(CONFIG, input_size=(3, 64, 64)))
    y, x = np.mgrid[-50:50, -60:60] + 0.5
    disc, file, differences = np.uint8(255 * (x**2 + y**2 < 15**2)), io.BytesIO(), []
    Image.fromarray(np.stack([disc] * 3, axis=-1)).save(file, 'PNG')
    for seed in range(20):
        seed_everything(seed)
        bright = transform(transform.read(file))[0] > 127
        differences.append(abs(int(bright.any(dim=0).sum()) - int(bright.any(dim=1).sum())))
    assert least <= max(differences) <= most


@pytest.mark.parametrize('mode', ['rkrc', 'rkrr'])
def test_a_resized_crop_is_augmented_and_erased(mode):
    recipe = make_recipe(dict(train_crop_mode=mode, aa='rand-m9-mstd0.5-inc1', reprob=1.0))
    transform = train_transform(recipe, CONFIG)
    seed_everything(1)
    image = transform(transform.read(encode((100, 90))))
    assert image.shape == (3, 32, 48) and image.dtype == torch.float32


@pytest.mark.parametrize('in_chans', [1, 3])
def test_without_augmentation_an_image_is_always_the_same(in_chans):
    values = dict(no_aug=True, aa='rand-m9', reprob=1.0, vflip=1.0, aug='albumentations')
    config = dict(CONFIG, input_size=(in_chans, 32, 48), mean=(0.5,) * in_chans, std=(0.5,) * in_chans)
    transform = train_transform(make_recipe(values), config)
    first, *others = (transform(transform.read(encode((100, 90), 'PNG'))) for _ in range(4))
    assert first.shape == (in_chans, 32, 48)
    assert all(torch.equal(first, other) for other in others)


def count(values: dict, is_changed) -> int:
    """The number of images with a property among 200 augmented ones."""
    plain = dict(scale=[1, 1], ratio=[1, 1], hflip=0, color_jitter=0, train_interpolation='bicubic')
    transform = train_transform(make_recipe(plain | values), dict(CONFIG, input_size=(3, 32, 32)))
    image = read_rgb(encode((32, 32), 'PNG'))
    before, changed = train_transform(make_recipe(plain), dict(CONFIG, input_size=(3, 32, 32)))(image), 0
    for seed in range(200):
        seed_everything(seed)
        changed += bool(is_changed(before, transform(image)))
    return changed


def test_training_and_evaluation_make_the_same_grey_of_a_color():
    config = dict(CONFIG, input_size=(1, 256, 256), mean=(0.5,), std=(0.5,), crop_pct=1.0)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8))
    grey = train_transform(make_recipe(dict(no_aug=True)), config)(image)
    assert torch.equal(grey[0], torch.from_numpy(np.array(image.convert('L'))))
    torch.testing.assert_close(Normalize(config)(grey), eval_transform(config)(image))


@pytest.mark.parametrize(
    ('values', 'is_changed'),
    [
        (dict(grayscale_prob=0.3), lambda before, after: torch.equal(after[0], after[1])),
        (dict(gaussian_blur_prob=0.3), lambda before, after: after.float().std() < before.float().std() - 1),
        (dict(color_jitter=0.4, color_jitter_prob=0.3), lambda before, after: not torch.equal(before, after)),
    ],
    ids=['grayscale', 'blur', 'colors'],
)
def test_colors_are_augmented_with_the_probability(values, is_changed):
    assert 40 < count(values, is_changed) < 80


@pytest.mark.parametrize('mode', ['const', 'rand', 'pixel'])
def test_regions_are_erased_with_the_probability_and_filled_as_the_recipe_says(mode):
    fills = []

    def is_erased(before, after):
        erased = after[0] != Normalize(CONFIG)(before)[0]
        if erased.any():
            fills.append(after[0][erased].unique().tolist())
        return erased.any()

    assert 40 < count(dict(reprob=0.3, remode=mode), is_erased) < 80
    # noise in every pixel, one random color, or the mean of the images
    assert all(len(fill) > 1 for fill in fills) if mode == 'pixel' else all(len(fill) == 1 for fill in fills)
    assert all(fill == [0] for fill in fills) == (mode == 'const')


def test_images_that_are_too_small_to_blur_are_refused():
    with pytest.raises(UserError, match='gaussian_blur_prob needs images of more than 11 pixels, not 8'):
        train_transform(make_recipe(dict(gaussian_blur_prob=0.1)), dict(CONFIG, input_size=(3, 32, 8)))
    train_transform(make_recipe(dict(gaussian_blur_prob=1)), dict(CONFIG, input_size=(3, 12, 12)))(
        Image.new('RGB', (12, 12))
    )


@pytest.mark.parametrize('values', [dict(scale=[0, 1]), dict(ratio=[2, 1]), dict(ratio=[0, 0])], ids=str)
def test_ranges_that_are_empty_or_begin_at_0_are_refused(values):
    with pytest.raises(UserError, match='must be two increasing numbers above 0'):
        train_transform(make_recipe(values), CONFIG)


@pytest.mark.parametrize(
    ('aa', 'setting'),
    [('rand-m99-mstdx', 'mstdx'), ('rand-m9-mst0.5', 'mst0.5'), ('rand-9', '9'), ('augmix-n3', 'n3'), ('v0-m9', 'm9'),
     ('rand-m9-tnone', 'tnone'), ('rand-', '')],
)  # fmt: skip
def test_a_misspelt_setting_of_a_policy_is_refused(aa, setting):
    with pytest.raises(UserError, match=f"the setting '{setting}' of aa '{aa}' does not exist; an example is"):
        train_transform(make_recipe(dict(aa=aa)), CONFIG)


@pytest.mark.parametrize('aa', ['rand', 'rand-m9-n3-p0.4-mstd0.5-mmax20-inc1-tweights', 'augmix-m5-w4-d2-b1-a0.5',
                                'original-mstd0.5', 'v0r', '3a'])  # fmt: skip
def test_every_setting_of_a_policy_is_accepted(aa):
    assert train_transform(make_recipe(dict(aa=aa)), CONFIG)(Image.new('RGB', (50, 40))).shape == (3, 32, 48)
