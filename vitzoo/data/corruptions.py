"""The fifteen corruptions of ImageNet-C, each a function of an image, a severity from 1 to 5 and a random generator.

Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, https://arxiv.org/abs/1903.12261.
Severities have the paper's parameters. Differences from the published images: they are not saved as JPEG with quality
85, `frost` is synthetic instead of photographed, and lengths in pixels, defined at 224 x 224, scale with the image. The
results compare models on one's own images; they are not comparable to published ImageNet-C results.
"""

import zlib
from collections.abc import Callable
from io import BytesIO
from math import ceil
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vitzoo.data.dataset import Images

SEVERITIES = (1, 2, 3, 4, 5)
# height and width that elastic_transform needs for three different corners
MIN_SIZE = 3


def gaussian_noise(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Sensor noise in low light."""
    std = (0.08, 0.12, 0.18, 0.26, 0.38)[severity - 1]
    return _to_uint8(image / 255 + rng.normal(scale=std, size=image.shape))


def shot_noise(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Photon noise: Poisson with the given number of photons for white."""
    photons = (60, 25, 12, 5, 3)[severity - 1]
    return _to_uint8(rng.poisson(image / 255 * photons) / photons)


def impulse_noise(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Salt and pepper noise, independent for each channel."""
    amount = (0.03, 0.06, 0.09, 0.17, 0.27)[severity - 1]
    chance = rng.random(image.shape)
    return np.where(chance < amount / 2, 0, np.where(chance < amount, 255, image)).astype(np.uint8)


def defocus_blur(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Out-of-focus blur: each point becomes a disk with a smoothed edge."""
    radius, alias_blur = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[severity - 1]
    # the disk of a smaller image fits into the kernel of 224 pixels
    enlarged = max(1, _scale(image))
    extent, margin = ceil(max(8, radius) * enlarged), round((1 if radius <= 8 else 2) * enlarged)
    radius = radius * _scale(image)
    y, x = np.mgrid[-extent : extent + 1, -extent : extent + 1]
    disk = (x**2 + y**2 <= radius**2).astype(np.float32)
    disk = cv2.GaussianBlur(disk / disk.sum(), (2 * margin + 1,) * 2, alias_blur * enlarged)
    return _to_uint8(cv2.filter2D(_to_float(image), -1, disk))


def glass_blur(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Frosted glass: pixels are replaced by nearby ones, between two blurs."""
    sigma, delta, rounds = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[severity - 1]
    sigma, delta = sigma * _scale(image), max(1, round(delta * _scale(image)))
    image = _to_uint8(_gaussian(_to_float(image), sigma))
    height, width = image.shape[:2]
    y, x = np.meshgrid(np.arange(height - delta, delta, -1), np.arange(width - delta, delta, -1), indexing='ij')
    source = np.arange(height * width).tolist()
    for _ in range(rounds):
        dy, dx = rng.integers(-delta, delta, size=(2, *y.shape))
        other = np.minimum(y + dy, height - 1) * width + np.minimum(x + dx, width - 1)
        # in sequence, because a pixel may pass on a value that it received. The original code was written to swap two
        # pixels, but since it swaps views of one array it only copies one to the other
        for target, origin in zip((y * width + x).ravel().tolist(), other.ravel().tolist()):
            source[target] = source[origin]
    return _to_uint8(_gaussian(_to_float(image.reshape(-1, 3)[source].reshape(image.shape)), sigma))


def motion_blur(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Motion of the camera."""
    radius, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[severity - 1]
    return _to_uint8(_smear(_to_float(image), radius, sigma, angle=rng.uniform(-45, 45)))


def zoom_blur(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Motion of the camera towards the scene: the mean of the image at increasing magnification."""
    stop, step = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))[severity - 1]
    image = _to_float(image)
    return _to_uint8(np.mean([image, *(_zoom(image, factor) for factor in np.arange(1, stop, step))], axis=0))


def snow(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Falling snow over paler colors."""
    mean, std, zoom, threshold, radius, sigma, keep = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )[severity - 1]
    image = _to_float(image)
    flakes = _zoom(rng.normal(mean, std, size=image.shape[:2]).astype(np.float32), max(1, zoom * _scale(image)))
    flakes = np.where(flakes < threshold, 0, flakes).clip(0, 1)
    flakes = _smear(flakes, radius, sigma, angle=rng.uniform(-135, -45))
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None]
    image = keep * image + (1 - keep) * np.maximum(image, 1.5 * grey + 0.5)
    return _to_uint8(image + (flakes + flakes[::-1, ::-1])[..., None])


def frost(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Synthetic ice on a window; ImageNet-C uses photographs."""
    keep, strength = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[severity - 1]
    return _to_uint8(keep * _to_float(image) + strength * _ice(image.shape[0], image.shape[1], rng))


def fog(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Fog: plasma noise blended over the image."""
    strength, decay = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))[severity - 1]
    image = _to_float(image)
    white = image.max()
    clouds = _plasma(image.shape[0], image.shape[1], decay, rng)[..., None]
    return _to_uint8((image + strength * clouds) * white / (white + strength))


def brightness(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Increase of the value in HSV space, with hue and saturation unchanged."""
    light = (0.1, 0.2, 0.3, 0.4, 0.5)[severity - 1]
    image = _to_float(image)
    value = image.max(axis=2, keepdims=True)
    # black has no hue and becomes grey
    hue = np.divide(image, value, out=np.ones_like(image), where=value > 0)
    return _to_uint8(hue * (value + light).clip(0, 1))


def contrast(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Reduced contrast: each channel moves towards its mean."""
    keep = (0.4, 0.3, 0.2, 0.1, 0.05)[severity - 1]
    image = _to_float(image)
    mean = image.mean(axis=(0, 1))
    return _to_uint8((image - mean) * keep + mean)


def elastic_transform(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """A random affine map and a smooth random displacement, large at severities 1 and 2, local from 3 on."""
    strengths = ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
    alpha, sigma, shift = (244 * _scale(image) * strength for strength in strengths[severity - 1])
    image = _to_float(image)
    height, width = image.shape[:2]
    third = min(height, width) // 3
    corners = np.array([(1, 1), (1, -1), (-1, -1)], np.float32) * third
    corners = corners + np.array([width // 2, height // 2], np.float32)
    moved = corners + rng.uniform(-shift, shift, size=corners.shape).astype(np.float32)
    affine = cv2.getAffineTransform(corners, moved)
    image = cv2.warpAffine(image, affine, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    size = (2 * int(3 * sigma + 0.5) + 1,) * 2
    dx, dy = rng.uniform(-1, 1, size=(2, height, width)).astype(np.float32)
    dx, dy = (alpha * cv2.GaussianBlur(noise, size, sigma, borderType=cv2.BORDER_REFLECT) for noise in (dx, dy))
    y, x = np.mgrid[:height, :width].astype(np.float32)
    return _to_uint8(cv2.remap(image, x + dx, y + dy, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT))


def pixelate(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Low resolution: box downsampling and upsampling."""
    factor = (0.6, 0.5, 0.4, 0.3, 0.25)[severity - 1]
    height, width = image.shape[:2]
    size = max(1, int(width * factor)), max(1, int(height * factor))
    small = Image.fromarray(image).resize(size, Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX))


def jpeg_compression(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Artifacts of strong JPEG compression."""
    file = BytesIO()
    Image.fromarray(image).save(file, 'JPEG', quality=(25, 18, 15, 10, 7)[severity - 1])
    return np.asarray(Image.open(file))


# in the paper's order: noise, blur, weather, digital
CORRUPTIONS: dict[str, Callable[[np.ndarray, int, np.random.Generator], np.ndarray]] = {
    corruption.__name__: corruption
    for corruption in (
        *(gaussian_noise, shot_noise, impulse_noise),
        *(defocus_blur, glass_blur, motion_blur, zoom_blur),
        *(snow, frost, fog, brightness),
        *(contrast, elastic_transform, pixelate, jpeg_compression),
    )
}

CONDITIONS = [(corruption, severity) for corruption in CORRUPTIONS for severity in SEVERITIES]


def corrupt(image: np.ndarray, corruption: str, severity: int, name: str) -> np.ndarray:
    """Corrupt an image, deterministically for a given name.

    Args:
        image: uint8 (H, W, 3), not modified; at least 3 x 3.
        corruption: One of `CORRUPTIONS`.
        severity: From 1 to 5.
        name: Seeds the random numbers together with the corruption and the severity.
    """
    # the loader's workers already use all cores
    cv2.setNumThreads(0)
    seed = zlib.crc32(f'{corruption} {severity} {name}'.encode(errors='surrogateescape'))
    return CORRUPTIONS[corruption](image, severity, np.random.default_rng(seed))


class CorruptedImages(Dataset):
    """A dataset under one corruption.

    Args:
        images: The dataset, without a transform.
        corruption: One of `CORRUPTIONS`.
        severity: From 1 to 5.
        crop: Resizes and crops a PIL image to the model's input size; the corruption is applied after it, as in
            ImageNet-C.
        to_tensor: Converts the corrupted PIL image to the model's input.
    """

    def __init__(self, images: Images, corruption: str, severity: int, crop: Callable, to_tensor: Callable) -> None:
        self.images, self.corruption, self.severity = images, corruption, severity
        self.crop, self.to_tensor = crop, to_tensor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple:
        image, label = self.images[index]
        # the last two components of the path are the same in a folder and in a tar of it
        name = '/'.join(Path(self.images.filename(index)).parts[-2:])
        pixels = corrupt(np.asarray(self.crop(image)), self.corruption, self.severity, name)
        return self.to_tensor(Image.fromarray(pixels)), label

    def filename(self, index: int) -> str:
        """Name of an image and its corruption."""
        return f'{self.images.filename(index)} ({self.corruption}, severity {self.severity})'


def _scale(image: np.ndarray) -> float:
    """Size of the image relative to 224 x 224, for which lengths in pixels are defined."""
    return min(image.shape[:2]) / 224


def _to_float(image: np.ndarray) -> np.ndarray:
    return image.astype(np.float32) / 255


def _to_uint8(image: np.ndarray) -> np.ndarray:
    return (image * 255).round().clip(0, 255).astype(np.uint8)


def _gaussian(image: np.ndarray, sigma: float) -> np.ndarray:
    return cv2.GaussianBlur(image, (0, 0), sigma, borderType=cv2.BORDER_REPLICATE)


def _zoom(image: np.ndarray, factor: float) -> np.ndarray:
    """Magnify an image about its center; the size stays the same."""
    height, width = image.shape[:2]
    x, y = (width - 1) / 2, (height - 1) / 2
    matrix = np.array([[factor, 0, x * (1 - factor)], [0, factor, y * (1 - factor)]], np.float32)
    return cv2.warpAffine(image, matrix, (width, height), borderMode=cv2.BORDER_REPLICATE)


def _smear(image: np.ndarray, radius: float, sigma: float, angle: float) -> np.ndarray:
    """Blur along a line to one side with half a Gaussian, as ImageMagick's motion blur, which ImageNet-C uses."""
    radius, sigma = radius * _scale(image), sigma * _scale(image)
    steps = np.arange(2 * int(np.ceil(radius)) + 1)
    extent = len(steps)
    x, y = (np.ceil(steps * trig(np.deg2rad(angle)) - 0.5).astype(int) for trig in (np.cos, np.sin))
    kernel = np.zeros((2 * extent + 1, 2 * extent + 1), np.float32)
    np.add.at(kernel, (extent + y, extent + x), np.exp(-(steps**2) / (2 * sigma**2)))
    return cv2.filter2D(image, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REPLICATE)


def _plasma(height: int, width: int, decay: float, rng: np.random.Generator) -> np.ndarray:
    """Plasma noise in [0, 1] by the diamond-square algorithm; larger `decay` is smoother."""
    size = step = 1 << (max(height, width) - 1).bit_length()
    clouds, amplitude = np.zeros((size, size)), 1.0

    def mean_of_four(total: np.ndarray) -> np.ndarray:
        return total / 4 + rng.uniform(-amplitude, amplitude, total.shape)

    while step >= 2:
        half = step // 2
        corners = clouds[::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=0)
        middles = mean_of_four(pairs + np.roll(pairs, -1, axis=1))
        clouds[half::step, half::step] = middles
        clouds[::step, half::step] = mean_of_four(
            corners + np.roll(corners, -1, axis=1) + middles + np.roll(middles, 1, axis=0)
        )
        clouds[half::step, ::step] = mean_of_four(pairs + middles + np.roll(middles, 1, axis=1))
        step, amplitude = half, amplitude / decay**2
    clouds = clouds[:height, :width]
    return ((clouds - clouds.min()) / np.ptp(clouds)).astype(np.float32)


def _ice(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Ice on glass, (H, W, 3) in [0, 1]: patches of needles with one direction each, under uneven rime."""
    seeds = np.ones((height, width), np.uint8)
    seeds[rng.integers(height, size=60), rng.integers(width, size=60)] = 0
    _, patch = cv2.distanceTransformWithLabels(seeds, cv2.DIST_L2, 5, labelType=cv2.DIST_LABEL_PIXEL)
    direction = rng.integers(8, size=patch.max() + 1)[patch]
    # a margin, so that needles also enter from outside of the image
    margin = max(1, max(height, width) // 8)
    grains = (rng.random((height + 2 * margin, width + 2 * margin)) < 0.15).astype(np.float32)
    angles = np.arange(0, 360, 45) + rng.uniform(0, 45)
    needles = np.stack([_smear(grains, 12, 8, angle)[margin:-margin, margin:-margin] for angle in angles])
    # an image of a few pixels may have none
    needles = np.take_along_axis(needles, direction[None], axis=0)[0] / (needles.max() or 1)
    ice = _plasma(height, width, 1.4, rng) + 0.4 * needles - 0.2
    return ice[..., None].clip(0, 1) * np.array([0.87, 0.95, 1], np.float32)
