"""Facts about an image, collected in one decoding pass, and near-duplicate detection."""

import hashlib
import warnings
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from vitzoo.data.decode import DECODING_ERRORS, describe_decoding_error, read_rgb

_ORIENTATION = 0x0112
# thresholds for near duplicates: Hamming distance of the 64-bit hashes, and mean absolute difference (of 256 levels)
# and correlation of the thumbnails
_MAX_BITS, _MAX_DIFFERENCE, _MIN_CORRELATION = 3, 4.0, 0.99
# thumbnails with a lower standard deviation are too uniform to compare
_MIN_CONTRAST = 4.0


@dataclass(frozen=True)
class Facts:
    """Facts about an image.

    Attributes:
        error: Why it cannot be decoded; the other attributes then have their defaults.
        width: In pixels.
        height: In pixels.
        traits: 'deep' (more than 8 bits per channel), 'cmyk', 'transparent', 'palette', 'rotated', 'animated'.
        digest: SHA-256 of size and decoded pixels, independent of the file format.
        difference_hash: 64 bits, whether each of 8 x 8 cells is brighter than its left neighbor.
        mirrored_hash: The same of the mirror image.
        thumbnail: 16 x 16 grey levels.
    """

    error: str = ''
    width: int = 0
    height: int = 0
    traits: frozenset[str] = frozenset()
    digest: bytes = b''
    difference_hash: int = 0
    mirrored_hash: int = 0
    thumbnail: bytes = b''


def inspect_image(file: BinaryIO | Image.Image) -> Facts:
    """Decode an image as `read_rgb` does and collect the facts about it."""
    try:
        with warnings.catch_warnings():
            # PIL warns of large images and unusual palettes
            warnings.simplefilter('ignore')
            image = file if isinstance(file, Image.Image) else Image.open(file)
            traits = _find_traits(image)
            pixels = read_rgb(image)
    except DECODING_ERRORS as error:
        return Facts(error=describe_decoding_error(error))
    grey = pixels.convert('L')
    # BOX averages over all pixels
    small = np.asarray(grey.resize((9, 8), Image.Resampling.BOX))
    return Facts(
        width=pixels.width,
        height=pixels.height,
        traits=frozenset(traits),
        digest=hashlib.sha256(f'{pixels.size}'.encode() + pixels.tobytes()).digest(),
        difference_hash=_hash_differences(small),
        mirrored_hash=_hash_differences(small[:, ::-1]),
        thumbnail=grey.resize((16, 16), Image.Resampling.BOX).tobytes(),
    )


def find_near_duplicates(facts: list[Facts]) -> list[tuple[int, int]]:
    """Find pairs of images that are the same photograph, saved again, resized, slightly cropped or mirrored.

    Their difference hashes must agree in 61 of 64 bits, and their thumbnails closely. With at most 3 differing bits,
    one of the four groups of 16 bits is equal, so only images that share a group are compared. Exact copies and nearly
    uniform images are excluded.
    """
    readable = [one for one in enumerate(facts) if not one[1].error]
    count = len(readable)
    # each image and after them the mirror image of each
    hashes = [one.difference_hash for _, one in readable] + [one.mirrored_hash for _, one in readable]
    hashes = np.array(hashes, dtype=np.uint64)
    thumbnails = np.array([np.frombuffer(one.thumbnail, np.uint8) for _, one in readable], dtype=np.uint8)
    thumbnails = thumbnails.reshape(count, 16, 16)
    thumbnails = np.concatenate([thumbnails, thumbnails[:, :, ::-1]])
    pairs = set()
    for shift in range(0, 64, 16):
        key = hashes >> np.uint64(shift) & np.uint64(0xFFFF)
        order = np.argsort(key, kind='stable')
        for group in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
            pairs.update(_compare(group, hashes, thumbnails))
    found = [(readable[i][0], readable[j][0]) for i, j in sorted(pairs)]
    return [(i, j) for i, j in found if facts[i].digest != facts[j].digest]


def _hash_differences(small: np.ndarray) -> int:
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), 'big')


def _compare(group: np.ndarray, hashes: np.ndarray, thumbnails: np.ndarray) -> list[tuple[int, int]]:
    """The near duplicates in a group of images and, in the second half of the arrays, mirror images."""
    pairs, count = [], len(hashes) // 2
    # mirror images resemble each other if the images do
    for place, i in enumerate(group[group < count]):
        others = group[place + 1 :]
        others = others[others % count != i]
        bits = np.unpackbits((hashes[others] ^ hashes[i]).view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)
        others = others[bits <= _MAX_BITS]
        similar = [j % count for j in others if _are_similar(thumbnails[i], thumbnails[j])]
        pairs += [(min(i, j), max(i, j)) for j in similar]
    return pairs


def _are_similar(thumbnail: np.ndarray, other: np.ndarray) -> bool:
    a, b = thumbnail.astype(np.float64), other.astype(np.float64)
    if min(a.std(), b.std()) < _MIN_CONTRAST or np.abs(a - b).mean() > _MAX_DIFFERENCE:
        return False
    return np.corrcoef(a.ravel(), b.ravel())[0, 1] >= _MIN_CORRELATION


def _find_traits(image: Image.Image) -> list[str]:
    is_deep = image.mode[0] in 'IF' or any(';16' in str(tile[3]) for tile in getattr(image, 'tile', ()))
    # one channel has one pair, which Pillow's annotation does not say
    alpha: Any = image.convert('RGBA').getchannel('A').getextrema() if image.has_transparency_data else (255, 255)
    traits = dict(
        deep=is_deep,
        cmyk=image.mode == 'CMYK',
        palette=image.mode in ('P', 'PA'),
        animated=getattr(image, 'is_animated', False),
        rotated=image.getexif().get(_ORIENTATION) in range(2, 9),
        transparent=alpha[0] < 255,
    )
    return [name for name, has in traits.items() if has]
