"""Decoding a picture, whatever its pixel format, to the 8-bit RGB a person would see; all of it, or a crop."""

import struct
from collections.abc import Callable
from typing import BinaryIO

import cv2
import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

# everything that PIL's decoders raise for a damaged file
DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)
# what libjpeg can divide the sides of an image by while it decodes it
JPEG_SCALES = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}


def why_unreadable(error: Exception) -> str:
    """What was wrong with a file, in words."""
    return 'it is no image, or empty' if isinstance(error, UnidentifiedImageError) else str(error) or repr(error)


def read_rgb(file: BinaryIO | Image.Image) -> Image.Image:
    """Decode an image file to 8-bit RGB.

    EXIF rotation is applied and transparent pixels become white, as a browser shows them. 16-bit grey keeps its tones
    (PIL's own conversion turns nearly every pixel white): 65535 is white. Floating-point pixels are taken as 0 to 1
    where none is above 1, else as 0 to 255. CMYK and palettes are PIL's own conversion; of an animation the first frame
    counts.

    Raises whatever PIL raises for a file it cannot decode.
    """
    image = file if isinstance(file, Image.Image) else Image.open(file)
    ImageOps.exif_transpose(image, in_place=True)
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

    The pixels are those of `read_rgb`, but for a JPEG whose crop has at least 4 times the height and width that are
    wanted: it is decoded at 1/2, 1/4 or 1/8, so that at least twice as many remain to be resized, and the crop's edges
    are rounded to this coarser grid.

    Args:
        file: An image file, or an image.
        choose: Gives the crop's top, left, height and width for an image, of which it may look at the size only.
        size: Height and width that the crop is resized to.

    Raises whatever PIL raises for a file it cannot decode.
    """
    image = file if isinstance(file, Image.Image) else Image.open(file)
    is_plain = image is not file and _is_plain_jpeg(image)
    image = image if is_plain else read_rgb(image)
    top, left, height, width = crop = choose(image)
    pixels = _decode_jpeg(file, crop, size) if is_plain else None
    if pixels is None:
        # PIL reads what OpenCV does not, or says what is wrong with it
        pixels = np.array(image.crop((left, top, left + width, top + height)))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _is_plain_jpeg(image: Image.Image) -> bool:
    """Whether an image file is seen right as soon as it is decoded; no pixel is decoded for the answer."""
    is_jpeg = image.format in ('JPEG', 'MPO') and image.mode == 'RGB'
    return is_jpeg and image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def _decode_jpeg(file: BinaryIO, crop: tuple[int, int, int, int], size: tuple[int, int]) -> np.ndarray | None:
    """The pixels (height, width, 3) of a crop; OpenCV's are PIL's, a fifth faster. None where it finds a fault."""
    spare = min(crop[2] / size[0], crop[3] / size[1]) / 2
    scale = max(scale for scale in JPEG_SCALES if scale <= max(spare, 1))
    file.seek(0)
    data = np.frombuffer(file.read(), np.uint8)
    pixels = cv2.imdecode(data, JPEG_SCALES[scale] | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        return None
    top, left, height, width = (side // scale for side in crop)
    return cv2.cvtColor(pixels[top : top + height, left : left + width], cv2.COLOR_BGR2RGB)


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Scale 16-bit ('I;16', and 'I', where older PILs put it) and floating-point ('F') grey to 8 bits."""
    values = np.asarray(image, dtype=np.float32)
    if image.mode == 'F':
        values = values * 255 if values.max() <= 1 else values
    else:
        values = values / 257
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
