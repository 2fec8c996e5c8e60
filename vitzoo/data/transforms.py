"""Image transforms for training and evaluation: timm's, optionally with albumentations.

A recipe is any object with the attributes of `vitzoo.train.recipe.Recipe`. Training transforms have three stages: crop
and flip (as in timm), augment colors and geometry (`aug: timm` or `aug: albumentations`, on PIL images), and random
erasing. They return uint8 tensors, which `Normalize` converts to the model's input in batches. Evaluation uses timm's
transform for the data config.
"""

import os
import random
import re
from collections.abc import Sequence
from itertools import chain
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform, resolve_input_data_config
from timm.data.auto_augment import posterize
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor, nn
from torchvision.transforms import Compose, PILToTensor, ToPILImage, ToTensor
from torchvision.transforms.v2.functional import pil_to_tensor, resize

from vitzoo.data.decode import read_crop, read_rgb
from vitzoo.errors import UserError, did_you_mean

# settings of each policy of timm, which follow its name and are separated by hyphens
_NUMBER = r'\d+(\.\d+)?'
_POLICIES = {
    'rand': rf'(m|n|mmax)\d+|inc[01]|(mstd|p){_NUMBER}|t(weights|3a|3aw)',
    'augmix': rf'(m|w|d)\d+|b[01]|(mstd|a){_NUMBER}',
    **dict.fromkeys(('original', 'originalr', 'v0', 'v0r', '3a'), rf'mstd{_NUMBER}'),
}
_EXAMPLES = dict(rand='rand-m9-mstd0.5-inc1', augmix='augmix-m5-w4-d2')
# of timm's Gaussian blur, which mirrors that many pixels at each edge
_BLUR_RADIUS = 11
# pipelines of `albumentations: light`, `medium` and `strong`; the recipe's crop and flip come first
PIPELINES: dict[str, list[dict]] = {
    'light': [
        {'RandomBrightnessContrast': {'brightness_limit': 0.2, 'contrast_limit': 0.2, 'p': 0.5}},
        {'HueSaturationValue': {'hue_shift_limit': 5, 'sat_shift_limit': 20, 'val_shift_limit': 10, 'p': 0.3}},
    ],
    'medium': [
        {'Affine': {'rotate': [-15, 15], 'scale': [0.9, 1.1], 'shear': [-5, 5], 'p': 0.5}},
        {'RandomBrightnessContrast': {'brightness_limit': 0.3, 'contrast_limit': 0.3, 'p': 0.5}},
        {'HueSaturationValue': {'hue_shift_limit': 10, 'sat_shift_limit': 30, 'val_shift_limit': 20, 'p': 0.5}},
        {'OneOf': {'transforms': [{'GaussianBlur': {}}, {'GaussNoise': {}}, {'ImageCompression': {}}], 'p': 0.2}},
    ],
    'strong': [
        {'Affine': {'rotate': [-30, 30], 'scale': [0.8, 1.2], 'shear': [-10, 10], 'p': 0.7}},
        {'RandomBrightnessContrast': {'brightness_limit': 0.4, 'contrast_limit': 0.4, 'p': 0.7}},
        {'HueSaturationValue': {'hue_shift_limit': 20, 'sat_shift_limit': 50, 'val_shift_limit': 30, 'p': 0.5}},
        {'OneOf': {'transforms': [{'Solarize': {}}, {'Posterize': {}}, {'Equalize': {}}, {'ToGray': {}}], 'p': 0.3}},
        {'OneOf': {'transforms': [{'GaussianBlur': {}}, {'GaussNoise': {}}, {'ImageCompression': {}}], 'p': 0.3}},
        {'CoarseDropout': {'num_holes_range': [1, 4], 'p': 0.3}},
    ],
}


def resolve_data_config(
    model: nn.Module, img_size: int | Sequence[int] | None = None, crop_pct: float | None = None
) -> dict:
    """The model's data config (input size, mean, std, interpolation, crop), with another image size or crop."""
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    return resolve_input_data_config(model, args=dict(img_size=size, crop_pct=crop_pct))


def eval_transform(data_config: dict) -> Compose:
    """timm's evaluation transform for a data config."""
    to_channels = _to_channels(data_config)
    return Compose(to_channels + [create_transform(**data_config, is_training=False)])


def split_eval_transform(data_config: dict) -> tuple[Compose, Compose]:
    """timm's evaluation transform in two: resize and crop of a PIL image, and conversion to the model's input."""
    steps = create_transform(**data_config, is_training=False).transforms
    first = next(number for number, step in enumerate(steps) if isinstance(step, ToTensor))
    return Compose(steps[:first]), Compose(_to_channels(data_config) + steps[first:])


def train_transform(recipe: Any, data_config: dict) -> 'TrainTransform':
    """The training transform of a recipe for a data config.

    Raises:
        UserError: `aa`, the albumentations pipeline or the number of input channels is not supported.
    """
    size = data_config['input_size']
    _check_augmentation(recipe, size)
    if recipe.no_aug:
        resize, crop, _ = create_transform(
            size, is_training=True, no_aug=True, interpolation=recipe.train_interpolation, use_prefetcher=True
        ).transforms
        return TrainTransform(Compose([resize, crop]), Compose(_to_channels(data_config)))
    # timm's annotation lacks None
    color_jitter: Any = recipe.color_jitter or None
    crop_and_flip, augment, to_tensor = create_transform(
        size,
        is_training=True,
        separate=True,
        train_crop_mode=recipe.train_crop_mode,
        scale=recipe.scale,
        ratio=recipe.ratio,
        hflip=recipe.hflip,
        vflip=recipe.vflip,
        color_jitter=color_jitter,
        color_jitter_prob=recipe.color_jitter_prob,
        grayscale_prob=recipe.grayscale_prob,
        gaussian_blur_prob=recipe.gaussian_blur_prob,
        auto_augment=recipe.aa,
        interpolation=recipe.train_interpolation or data_config['interpolation'],
        mean=data_config['mean'],
        std=data_config['std'],
        re_prob=recipe.reprob,
        re_mode=recipe.remode,
        re_count=recipe.recount,
    )
    crop, *steps = crop_and_flip.transforms
    if recipe.train_crop_mode != 'rrc':
        crop, steps = Compose([crop, steps[0]]), steps[1:]
    _allow_posterize_to_0_bits(augment)
    if recipe.aug == 'albumentations':
        augment = Compose([Albumentations(recipe.albumentations)])
    if augment.transforms:
        steps += [ToPILImage(), augment, PILToTensor()]
    steps += _to_channels(data_config)
    _, _, *erasing = to_tensor.transforms
    if erasing:
        # timm fills erased regions with noise for normalized images
        steps += [Normalize(data_config), *erasing]
    return TrainTransform(crop, Compose(steps))


def _check_augmentation(recipe: Any, size: tuple[int, int, int]) -> None:
    """Raise UserError for settings that timm would ignore, or at which it would fail during training."""
    if recipe.aa:
        _check_policy(recipe.aa)
    if recipe.gaussian_blur_prob and min(size[1:]) <= _BLUR_RADIUS:
        raise UserError(f'gaussian_blur_prob needs images of more than {_BLUR_RADIUS} pixels, not {min(size[1:])}')
    for name in ('scale', 'ratio'):
        low, high = getattr(recipe, name)
        if not 0 < low <= high:
            raise UserError(f'{name} must be two increasing numbers above 0, not {low} {high}')
    # brightness, contrast, saturation and hue
    jitter = recipe.color_jitter
    if isinstance(jitter, list) and len(jitter) == 4 and jitter[3] > 0.5:
        raise UserError(f'the hue of color_jitter, its last number, is at most 0.5, not {jitter[3]}')


def _check_policy(aa: str) -> None:
    """Check the name and the settings of a policy; timm ignores what it cannot read."""
    name, *settings = aa.split('-')
    if name not in _POLICIES:
        raise UserError(f"unknown aa '{aa}'; use rand-…, augmix-…, original, v0 or 3a")
    for setting in settings:
        if not re.fullmatch(_POLICIES[name], setting):
            example = _EXAMPLES.get(name, f'{name}-mstd0.5')
            raise UserError(f"the setting '{setting}' of aa '{aa}' does not exist; an example is {example}")


class TrainTransform:
    """A random crop, chosen before the image file is decoded, followed by the other steps.

    Returns uint8 (C, H, W), a quarter of the bytes to pass between processes, to be normalized in batches; or
    normalized floats if `steps` normalize.

    Args:
        crop: timm's crop. Of a random resized crop the parameters and random numbers are used, and resizing is torch's,
            with antialiasing: three times as fast as PIL's, and within 2 of 255 of it. Any other is applied to the
            whole PIL image.
        steps: The remaining transforms, on uint8 tensors.
    """

    def __init__(self, crop: RandomResizedCropAndInterpolation | Compose, steps: Compose) -> None:
        self.crop, self.steps = crop, steps

    def read(self, file: BinaryIO | Image.Image) -> Tensor:
        """Read a random crop of an image or an image file and resize it: uint8 (3, H, W)."""
        crop = self.crop
        if isinstance(crop, Compose):
            return pil_to_tensor(crop(read_rgb(file)))
        pixels = read_crop(file, self._choose_crop, crop.size)
        # timm has a tuple of modes for 'random'
        modes = crop.interpolation
        interpolation = random.choice(modes) if isinstance(modes, tuple) else modes
        return resize(pixels, crop.size, interpolation, antialias=True)

    def _choose_crop(self, image: Image.Image) -> tuple[int, int, int, int]:
        """Draw top, left, height and width; timm's crop of an image of a few pixels may round to none."""
        top, left, height, width = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        return min(top, image.height - 1), min(left, image.width - 1), max(height, 1), max(width, 1)

    def __call__(self, image: Tensor | Image.Image) -> Tensor:
        """Apply the steps to a crop from `read`; a PIL image is cropped first."""
        return self.steps(self.read(image) if isinstance(image, Image.Image) else image)


class Normalize(nn.Module):
    """Normalize uint8 images (..., C, H, W) with the mean and std of a data config; floats pass unchanged."""

    mean: Tensor
    std: Tensor

    def __init__(self, data_config: dict) -> None:
        super().__init__()
        for name in ('mean', 'std'):
            self.register_buffer(name, 255 * torch.tensor(data_config[name])[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.mean).div_(self.std) if images.dtype == torch.uint8 else images


class Albumentations:
    """An albumentations pipeline on PIL images, seeded for each image from torch's generator.

    Albumentations 2.0 has its own random state, and all worker processes would start from the same copy of it in every
    epoch. torch's generator differs between workers, epochs and processes, and follows the seed.

    Args:
        pipeline: 'light', 'medium', 'strong', or a list such as [{'Rotate': {'limit': 10, 'p': 0.5}}, …]; a composition
            (OneOf, …) lists its transforms under `transforms`.

    Raises:
        UserError: A transform or one of its arguments does not exist, or the pipeline changes the size or the channels
            of an image.
    """

    def __init__(self, pipeline: str | list[dict]) -> None:
        self.pipeline = expand_pipeline(pipeline)
        self.compose = _build_pipeline(self.pipeline)
        image = Image.new('RGB', (48, 40))
        try:
            result = self._apply(image)
        except (TypeError, ValueError) as error:
            raise UserError(f'the albumentations pipeline fails on a uint8 image: {error}') from error
        if result.shape[:2] != image.size[::-1]:
            raise UserError('the albumentations pipeline changes the image size; leave cropping to scale and ratio')
        if result.shape[2:] != (3,) or result.dtype != np.uint8:
            raise UserError(
                f'the albumentations pipeline makes an array of {result.dtype} of shape {result.shape} of an RGB image;'
                f' leave out what changes the channels or normalizes'
            )

    def __call__(self, image: Image.Image) -> Image.Image:
        return Image.fromarray(self._apply(image))

    def _apply(self, image: Image.Image) -> np.ndarray:
        seed = int(torch.randint(2**62, ()))
        self.compose.set_random_state(np.random.default_rng(seed), random.Random(seed))
        return self.compose(image=np.asarray(image))['image']


def expand_pipeline(pipeline: str | list[dict]) -> list[dict]:
    """Look up a pipeline by name; a list is returned as it is."""
    if not isinstance(pipeline, str):
        return pipeline
    if pipeline not in PIPELINES:
        raise UserError(f"unknown albumentations pipeline '{pipeline}'; use {', '.join(PIPELINES)}, or a list")
    return PIPELINES[pipeline]


def _build_pipeline(pipeline: list[dict]) -> Any:
    # importing albumentations would check for a newer version over the network
    os.environ.setdefault('NO_ALBUMENTATIONS_UPDATE', '1')
    import albumentations
    import cv2

    # the loader's workers already use all cores
    cv2.setNumThreads(0)
    return albumentations.Compose([_build_transform(step, albumentations) for step in pipeline])


def _build_transform(step: dict, albumentations: ModuleType) -> Any:
    if not isinstance(step, dict) or len(step) != 1:
        raise UserError(
            f'an albumentations step is one name with its arguments, such as {{Rotate: {{limit: 10}}}}, not {step}'
        )
    ((name, options),) = step.items()
    kind = getattr(albumentations, name, None)
    if not isinstance(kind, type) or not issubclass(kind, (albumentations.BasicTransform, albumentations.BaseCompose)):
        raise UserError(f"albumentations has no transform '{name}'{did_you_mean(name, dir(albumentations))}")
    if not isinstance(options, dict | None):
        raise UserError(f'the arguments of albumentations {name} are names with their values, not {options}')
    options = dict(options or {})
    if not isinstance(options.get('transforms', []), list):
        raise UserError(f'the transforms of albumentations {name} are a list, not {options["transforms"]}')
    if 'transforms' in options:
        options['transforms'] = [_build_transform(part, albumentations) for part in options['transforms']]
    if issubclass(kind, albumentations.BasicTransform):
        # albumentations only warns of a misspelled argument by default
        options['strict'] = True
    try:
        return kind(**{key: tuple(value) if _is_range(value) else value for key, value in options.items()})
    except (TypeError, ValueError) as error:
        raise UserError(f'albumentations {name}: {error}') from error


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(item, int | float) for item in value)


def _allow_posterize_to_0_bits(augment: Compose) -> None:
    """Patch timm's policies, which posterize to 0 bits at full magnitude, an error in Pillow 13."""
    for policy in augment.transforms:
        for op in chain(getattr(policy, 'ops', ()), *getattr(policy, 'policy', ())):
            if op.aug_fn is posterize:
                op.aug_fn = _posterize


def _posterize(image: Image.Image, bits_to_keep: int, **options: Any) -> Image.Image:
    return posterize(image, bits_to_keep, **options) if bits_to_keep else image.point(lambda value: 0)


def _to_channels(data_config: dict) -> list:
    in_chans = data_config['input_size'][0]
    if in_chans not in (1, 3):
        raise UserError(f'in_chans is {in_chans}, but images are read as RGB (3) or greyscale (1)')
    return [] if in_chans == 3 else [_to_grey]


def _to_grey(image: Tensor | Image.Image) -> Tensor | Image.Image:
    """Convert RGB to grey, a uint8 tensor (3, H, W) to (1, H, W) exactly as PIL does; torchvision's would be darker."""
    if isinstance(image, Image.Image):
        return image.convert('L')
    red, green, blue = image.int().unbind()
    return (19595 * red + 38470 * green + 7471 * blue + 32768 >> 16).byte().unsqueeze(0)


def unnormalize(image: Tensor, data_config: dict) -> Tensor:
    """Invert the normalization of an image (C, H, W): (3, H, W) in [0, 1]."""
    mean, std = (torch.tensor(data_config[key]).view(-1, 1, 1) for key in ('mean', 'std'))
    return (image.float() * std + mean).clamp(0, 1).expand(3, -1, -1)
