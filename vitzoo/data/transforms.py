"""From a decoded image to the model's input: timm's transforms, with albumentations where a recipe asks for it.

A recipe is anything with the attributes of `vitzoo.train.recipe.Recipe`. Training transforms have three stages: crop
and flip (as timm does), change the look (`aug: timm` or `aug: albumentations`, on PIL images), and erase. They
leave bytes, of which `Normalize` makes the model's input. Evaluation is always timm's own, from the data config.
"""

import os
import random
from itertools import chain
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform, resolve_input_data_config
from timm.data.auto_augment import posterize
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor, nn
from torchvision.transforms import Compose, Grayscale, PILToTensor, ToPILImage, ToTensor
from torchvision.transforms.v2.functional import resize

from vitzoo.data.decode import read_crop
from vitzoo.errors import UserError, did_you_mean

# what `albumentations: light`, `medium` and `strong` stand for; cropping and flipping come before, from the recipe
PIPELINES = {
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
    model: nn.Module, img_size: int | list[int] | None = None, crop_pct: float | None = None
) -> dict:
    """The model's own data config (input size, mean, std, interpolation, crop) at another image size or crop."""
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    return resolve_input_data_config(model, args=dict(img_size=size, crop_pct=crop_pct))


def eval_transform(data_config: dict) -> Compose:
    """timm's evaluation transform for a data config."""
    to_channels = _to_channels(data_config)
    return Compose(to_channels + [create_transform(**data_config, is_training=False)])


def split_eval_transform(data_config: dict) -> tuple[Compose, Compose]:
    """Evaluation in two parts: what makes a colour image the model's size, and what makes it the model's input."""
    steps = create_transform(**data_config, is_training=False).transforms
    first = next(number for number, step in enumerate(steps) if isinstance(step, ToTensor))
    return Compose(steps[:first]), Compose(_to_channels(data_config) + steps[first:])


def train_transform(recipe, data_config: dict) -> 'TrainTransform':
    """A recipe's training transform for a data config."""
    if recipe.aa and not recipe.aa.startswith(('rand', 'augmix', 'original', 'v0', '3a')):
        raise UserError(f"unknown aa '{recipe.aa}'; timm has rand-…, augmix-…, original, v0 and 3a")
    crop_and_flip, change_look, to_tensor = create_transform(
        data_config['input_size'],
        is_training=True,
        separate=True,
        scale=recipe.scale,
        ratio=recipe.ratio,
        hflip=recipe.hflip,
        vflip=recipe.vflip,
        color_jitter=recipe.color_jitter or None,
        auto_augment=recipe.aa,
        interpolation=recipe.train_interpolation or data_config['interpolation'],
        mean=data_config['mean'],
        std=data_config['std'],
        re_prob=recipe.reprob,
        re_mode=recipe.remode,
        re_count=recipe.recount,
    )
    crop, *steps = crop_and_flip.transforms
    _mend_posterize(change_look)
    if recipe.aug == 'albumentations':
        change_look = Compose([Albumentations(recipe.albumentations)])
    if change_look.transforms:
        steps += [ToPILImage(), change_look, PILToTensor()]
    steps += _to_channels(data_config)
    _, _, *erasing = to_tensor.transforms
    if erasing:
        # the noise that it fills holes with is that of normalised images
        steps += [Normalize(data_config), *erasing]
    return TrainTransform(crop, Compose(steps))


class TrainTransform:
    """A random crop, which is chosen before an image file is decoded, and what happens to it then.

    The result is uint8 (C, H, W), which travels from process to process at a quarter of the cost and is normalised in
    batches, or normalised already where `steps` do it.

    Args:
        crop: timm's random crop; its parameters and the random numbers are used, and resizing is torch's antialiased
            one, three times as fast and within 2 of 255 of PIL's.
        steps: What follows, on uint8 tensors.
    """

    def __init__(self, crop: RandomResizedCropAndInterpolation, steps: Compose):
        self.crop, self.steps = crop, steps

    def read(self, file: BinaryIO | Image.Image) -> Tensor:
        """The crop of an image or an image file, resized: uint8 (3, H, W)."""
        crop = self.crop
        pixels = read_crop(file, lambda image: crop.get_params(image, crop.scale, crop.ratio), crop.size)
        either = crop.interpolation
        interpolation = random.choice(either) if isinstance(either, tuple) else either
        return resize(pixels, crop.size, interpolation, antialias=True)

    def __call__(self, image: Tensor | Image.Image) -> Tensor:
        """Change what `read` has given; an image is cropped first."""
        return self.steps(self.read(image) if isinstance(image, Image.Image) else image)


class Normalize(nn.Module):
    """Makes of bytes (..., C, H, W) what a model with this data config is trained on; other images pass unchanged."""

    def __init__(self, data_config: dict):
        super().__init__()
        for name in ('mean', 'std'):
            self.register_buffer(name, 255 * torch.tensor(data_config[name])[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.mean).div_(self.std) if images.dtype == torch.uint8 else images


class Albumentations:
    """An albumentations pipeline on PIL images that draws its randomness from torch's generator.

    Albumentations 2.0 keeps a random stream of its own, and every worker process starts with the same copy of it, in
    every epoch again. Here each image's stream starts from a number of torch's generator, which differs between
    workers, epochs and processes and follows the seed.

    Args:
        pipeline: 'light', 'medium', 'strong', or a list such as [{'Rotate': {'limit': 10, 'p': 0.5}}, …] in which a
            composition has its parts under `transforms`.

    Raises:
        UserError: A transform or one of its arguments does not exist, or the pipeline changes the image's size.
    """

    def __init__(self, pipeline: str | list[dict]):
        self.pipeline = expand_pipeline(pipeline)
        self.compose = _build_pipeline(self.pipeline)
        image = Image.new('RGB', (48, 40))
        if self(image).size != image.size:
            raise UserError('the albumentations pipeline changes the image size; leave cropping to scale and ratio')

    def __call__(self, image: Image.Image) -> Image.Image:
        seed = int(torch.randint(2**62, ()))
        self.compose.set_random_state(np.random.default_rng(seed), random.Random(seed))
        return Image.fromarray(self.compose(image=np.asarray(image))['image'])


def expand_pipeline(pipeline: str | list[dict]) -> list[dict]:
    """The list that a ready-made pipeline's name stands for; a list stays as it is."""
    if not isinstance(pipeline, str):
        return pipeline
    if pipeline not in PIPELINES:
        raise UserError(f"unknown albumentations pipeline '{pipeline}'; there are {', '.join(PIPELINES)}, or a list")
    return PIPELINES[pipeline]


def _build_pipeline(pipeline: list[dict]):
    # the import would otherwise ask the network for a newer version
    os.environ.setdefault('NO_ALBUMENTATIONS_UPDATE', '1')
    import albumentations
    import cv2

    # the loader's workers already use every core
    cv2.setNumThreads(0)
    return albumentations.Compose([_build_transform(step, albumentations) for step in pipeline])


def _build_transform(step: dict, albumentations):
    if not isinstance(step, dict) or len(step) != 1:
        raise UserError(
            f'an albumentations step is one name and its arguments, as {{Rotate: {{limit: 10}}}}, not {step}'
        )
    ((name, options),) = step.items()
    kind = getattr(albumentations, name, None)
    if not isinstance(kind, type) or not issubclass(kind, (albumentations.BasicTransform, albumentations.BaseCompose)):
        raise UserError(f"albumentations has no transform '{name}'{did_you_mean(name, dir(albumentations))}")
    options = dict(options or {})
    if 'transforms' in options:
        options['transforms'] = [_build_transform(part, albumentations) for part in options['transforms']]
    if issubclass(kind, albumentations.BasicTransform):
        # its own answer to a misspelled argument is a warning
        options['strict'] = True
    try:
        return kind(**{key: tuple(value) if _is_range(value) else value for key, value in options.items()})
    except (TypeError, ValueError) as error:
        raise UserError(f'albumentations {name}: {error}') from error


def _is_range(value) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(item, int | float) for item in value)


def _mend_posterize(change_look: Compose) -> None:
    """Let timm's policies keep 0 bits of an image, as they do at full strength, where Pillow 13 refuses to."""
    for policy in change_look.transforms:
        for op in chain(getattr(policy, 'ops', ()), *getattr(policy, 'policy', ())):
            if op.aug_fn is posterize:
                op.aug_fn = _posterize


def _posterize(image: Image.Image, bits_to_keep: int, **options) -> Image.Image:
    return posterize(image, bits_to_keep, **options) if bits_to_keep else image.point(lambda value: 0)


def _to_channels(data_config: dict) -> list:
    in_chans = data_config['input_size'][0]
    if in_chans not in (1, 3):
        raise UserError(f'in_chans is {in_chans}, but images are read in colour (3) or grey (1)')
    return [] if in_chans == 3 else [Grayscale()]


def unnormalize(image: Tensor, data_config: dict) -> Tensor:
    """An image (C, H, W) as a model takes it -> as a person sees it, (3, H, W) from 0 to 1."""
    mean, std = (torch.tensor(data_config[key]).view(-1, 1, 1) for key in ('mean', 'std'))
    return (image.float() * std + mean).clamp(0, 1).expand(3, -1, -1)
