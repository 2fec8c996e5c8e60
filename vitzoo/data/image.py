"""Decoding a picture, whatever its pixel format, to the 8-bit RGB a person would see."""

import struct
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# everything that PIL's decoders raise for a damaged file
DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)


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


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Scale 16-bit ('I;16', and 'I', where older PILs put it) and floating-point ('F') grey to 8 bits."""
    values = np.asarray(image, dtype=np.float32)
    if image.mode == 'F':
        values = values * 255 if values.max() <= 1 else values
    else:
        values = values / 257
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
