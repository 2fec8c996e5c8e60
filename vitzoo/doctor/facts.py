"""What can be told of a picture by decoding it once, and which pictures look alike."""

import hashlib
import warnings
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from PIL import Image

from vitzoo.data.decode import DECODING_ERRORS, read_rgb, why_unreadable

ORIENTATION = 0x0112
# at most so many of the 64 bits of a hash, and of the 256 tones of a thumbnail on average, differ in two files of one
# picture, and their thumbnails correlate so much
MOST_BITS, MOST_TONES, LEAST_CORRELATION = 3, 4.0, 0.99
# below this spread of tones all pictures look alike
LEAST_CONTRAST = 4.0


@dataclass(frozen=True)
class Facts:
    """What is known of a picture; of one that cannot be read, the error alone."""

    error: str = ''
    width: int = 0
    height: int = 0
    # 'deep' (more than 8 bits), 'cmyk', 'transparent', 'palette', 'rotated', 'animated'
    traits: frozenset[str] = frozenset()
    # of the pixels as a model sees them, whatever the file's format
    digest: bytes = b''
    # 64 times whether a part of the picture is brighter than the part to its left
    brighter: int = 0
    # 16 x 16 tones of grey
    thumbnail: bytes = b''


def inspect(file: BinaryIO | Image.Image) -> Facts:
    """Decode a picture as `read_rgb` does, and say what it is like."""
    try:
        with warnings.catch_warnings():
            # of a large picture or an odd palette
            warnings.simplefilter('ignore')
            image = file if isinstance(file, Image.Image) else Image.open(file)
            traits = _find_traits(image)
            pixels = read_rgb(image)
    except DECODING_ERRORS as error:
        return Facts(error=why_unreadable(error))
    grey = pixels.convert('L')
    # resized at once, a large picture would leave out most of its pixels
    small = np.asarray(grey.resize((9, 8), Image.Resampling.BOX))
    return Facts(
        width=pixels.width,
        height=pixels.height,
        traits=frozenset(traits),
        digest=hashlib.sha256(f'{pixels.size}'.encode() + pixels.tobytes()).digest(),
        brighter=int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), 'big'),
        thumbnail=grey.resize((16, 16), Image.Resampling.BOX).tobytes(),
    )


def find_alike(facts: list[Facts]) -> list[tuple[int, int]]:
    """Pairs of pictures that are one photograph, saved again, resized or slightly cropped.

    Both must agree in 61 of the 64 bits of a difference hash, so one of four groups of 16 bits is the same and finds
    them, and in their thumbnails. Pictures with the same pixels, and those of hardly any contrast, are not compared.
    """
    readable = [index for index, one in enumerate(facts) if not one.error]
    hashes = np.array([facts[index].brighter for index in readable], dtype=np.uint64)
    thumbnails = np.array([np.frombuffer(facts[index].thumbnail, np.uint8) for index in readable], dtype=np.uint8)
    pairs = set()
    for shift in range(0, 64, 16):
        key = hashes >> np.uint64(shift) & np.uint64(0xFFFF)
        order = np.argsort(key, kind='stable')
        for group in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
            pairs.update(_compare(group, hashes, thumbnails))
    found = [(readable[i], readable[j]) for i, j in sorted(pairs)]
    return [(i, j) for i, j in found if facts[i].digest != facts[j].digest]


def _compare(group: np.ndarray, hashes: np.ndarray, thumbnails: np.ndarray) -> list[tuple[int, int]]:
    """The pairs of a group that are alike."""
    pairs = []
    for place, i in enumerate(group[:-1]):
        others = group[place + 1 :]
        bits = np.unpackbits((hashes[others] ^ hashes[i]).view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)
        others = others[bits <= MOST_BITS]
        pairs += [(min(i, j), max(i, j)) for j in others if _is_alike(thumbnails[i], thumbnails[j])]
    return pairs


def _is_alike(thumbnail: np.ndarray, other: np.ndarray) -> bool:
    a, b = thumbnail.astype(np.float64), other.astype(np.float64)
    if min(a.std(), b.std()) < LEAST_CONTRAST or np.abs(a - b).mean() > MOST_TONES:
        return False
    return np.corrcoef(a, b)[0, 1] >= LEAST_CORRELATION


def _find_traits(image: Image.Image) -> list[str]:
    is_deep = image.mode[0] in 'IF' or any(';16' in str(tile[3]) for tile in getattr(image, 'tile', ()))
    traits = dict(
        deep=is_deep,
        cmyk=image.mode == 'CMYK',
        palette=image.mode in ('P', 'PA'),
        animated=getattr(image, 'is_animated', False),
        rotated=image.getexif().get(ORIENTATION) in range(2, 9),
        transparent=image.has_transparency_data and image.convert('RGBA').getchannel('A').getextrema()[0] < 255,
    )
    return [name for name, has in traits.items() if has]
