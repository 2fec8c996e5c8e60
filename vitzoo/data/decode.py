"""Decoding images of any pixel format to 8-bit RGB as a viewer would show them, whole or cropped."""

import struct
from collections.abc import Callable
from typing import BinaryIO

import cv2
import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

# all that the decoders of PIL and OpenCV raise for damaged files; PIL's of AVIF, which may be in a .jpg, RuntimeError
DECODING_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, RuntimeError, struct.error),
    *(Image.DecompressionBombError, cv2.error),
)
# libjpeg can downscale an image by these factors while decoding it
_JPEG_SCALES = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}


def describe_decoding_error(error: Exception) -> str:
    """Describe in a few words why a file cannot be decoded."""
    return 'not an image, or empty' if isinstance(error, UnidentifiedImageError) else str(error) or repr(error)


def read_rgb(file: BinaryIO | Image.Image) -> Image.Image:
    """Decode an image file to 8-bit RGB.

    EXIF rotation is applied and transparent pixels become white, as in a browser. Grey of 16 bits, or 32-bit integers,
    is scaled so that 65535 becomes 255, also if no value comes near it (PIL's own conversion clips it to nearly white).
    Floating-point pixels range from 0 to 1, or from 0 to 255 if any is above 1. CMYK and palettes are converted by PIL;
    of an animation the first frame is read.

    Raises:
        One of `DECODING_ERRORS`: The file cannot be decoded.
    """
    image = file if isinstance(file, Image.Image) else Image.open(file)
    # the image of a caller stays as it is
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode[0] in 'IF':
        image = _to_8_bit(image)
    if image.has_transparency_data:
        image = image.convert('RGBA')
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    return image.convert('RGB')


def read_crop(
    file: BinaryIO | Image.Image,
    choose: Callable[[Image.Image], tuple[int, int, int, int]],
    size: tuple[int, int],
) -> Tensor:
    """Decode a crop that is going to be resized, for training: uint8 (3, height, width).

    The pixels are those of `read_rgb`, except if a JPEG's crop is at least 4 times as high and as wide as `size`. It is
    then decoded at 1/2, 1/4 or 1/8, which leaves at least twice `size`, and its edges are rounded to the coarser grid.

    Args:
        file: An image file, or an image.
        choose: Returns the crop's top, left, height and width for an image; must only use the image's size.
        size: Height and width that the crop is going to be resized to.

    Raises:
        One of `DECODING_ERRORS`: The file cannot be decoded.
    """
    image = file if isinstance(file, Image.Image) else Image.open(file)
    is_plain = image is not file and _is_plain_jpeg(image)
    image = image if is_plain else read_rgb(image)
    top, left, height, width = crop = choose(image)
    pixels = _decode_jpeg(file, crop, size) if is_plain and not isinstance(file, Image.Image) else None
    if pixels is None:
        # PIL may read what OpenCV cannot, and otherwise raises an informative error
        pixels = np.array(image.crop((left, top, left + width, top + height)))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _is_plain_jpeg(image: Image.Image) -> bool:
    """Return True for an upright RGB JPEG, which needs no conversion; reads the header only."""
    is_jpeg = image.format in ('JPEG', 'MPO') and image.mode == 'RGB'
    return is_jpeg and image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def _decode_jpeg(file: BinaryIO, crop: tuple[int, int, int, int], size: tuple[int, int]) -> np.ndarray | None:
    """Decode a crop with OpenCV, (height, width, 3): equal to PIL and a fifth faster. None if OpenCV fails."""
    spare = min(crop[2] / size[0], crop[3] / size[1]) / 2
    scale = max(scale for scale in _JPEG_SCALES if scale <= max(spare, 1))
    file.seek(0)
    data = np.frombuffer(file.read(), np.uint8)
    pixels = cv2.imdecode(data, _JPEG_SCALES[scale] | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        return None
    top, left, height, width = (side // scale for side in crop)
    return cv2.cvtColor(pixels[top : top + height, left : left + width], cv2.COLOR_BGR2RGB)


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Scale 16-bit ('I;16', or 'I' in older versions of PIL) and floating-point ('F') grey to 8 bits."""
    values = np.asarray(image, dtype=np.float32)
    if image.mode == 'F':
        if not np.isfinite(values).all():
            raise ValueError('it has pixels that are not finite numbers')
        values = values * 255 if values.max() <= 1 else values
    else:
        values = values / 257
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
