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
# images whose thumbnails have a lower standard deviation are too uniform to compare
_MIN_CONTRAST = 4.0
# 12 bits of 16 are at most a 16th of the range
_MAX_DARK = 16


@dataclass(frozen=True)
class Facts:
    """Facts about an image.

    Attributes:
        error: Why it cannot be decoded; the other attributes then have their defaults.
        width: In pixels.
        height: In pixels.
        traits: 'deep' (more than 8 bits per channel), or 'dark' if it is also nearly black after its conversion to 8;
            'cmyk', 'transparent', 'palette', 'rotated', 'animated'.
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
    if 'deep' in traits and np.asarray(pixels).max() <= _MAX_DARK:
        traits[traits.index('deep')] = 'dark'
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

    Each image that has near duplicates is in a pair with the first of them, so that many frames of one scene make as
    many pairs. Difference hashes must agree in 61 of 64 bits, and thumbnails closely. With at most 3 differing bits,
    one of the four groups of 16 bits is equal, so only images that share a group are compared. Exact copies and nearly
    uniform images are excluded.
    """
    # copies have the same near duplicates, so one of them is compared
    by_digest: dict[bytes, list[int]] = {}
    for index, one in enumerate(facts):
        if not one.error and np.frombuffer(one.thumbnail, np.uint8).std() >= _MIN_CONTRAST:
            by_digest.setdefault(one.digest, []).append(index)
    copies = list(by_digest.values())
    distinct, count = [facts[indices[0]] for indices in copies], len(copies)
    # each image and after them the mirror image of each
    hashes = [one.difference_hash for one in distinct] + [one.mirrored_hash for one in distinct]
    hashes = np.array(hashes, dtype=np.uint64)
    thumbnails = np.array([np.frombuffer(one.thumbnail, np.uint8) for one in distinct], dtype=np.uint8)
    thumbnails = thumbnails.reshape(count, 16, 16)
    thumbnails = np.concatenate([thumbnails, thumbnails[:, :, ::-1]])
    first = np.full(count, count)
    for shift in range(0, 64, 16):
        key = hashes >> np.uint64(shift) & np.uint64(0xFFFF)
        order = np.argsort(key, kind='stable')
        for group in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
            if len(group) > 1:
                _compare(group, hashes, thumbnails, first)
    found = (
        (index, copies[place][0])
        for indices, place in zip(copies, first.tolist())
        for index in indices
        if place < count
    )
    return sorted({(min(pair), max(pair)) for pair in found})


def _hash_differences(small: np.ndarray) -> int:
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), 'big')


def _compare(group: np.ndarray, hashes: np.ndarray, thumbnails: np.ndarray, first: np.ndarray) -> None:
    """Look for near duplicates in a group of images and, in the second half of the arrays, mirror images.

    Args:
        first: The first near duplicate of each image that is known so far, the number of images if there is none.
    """
    count = len(first)
    # mirror images resemble each other if the images do
    for place, i in enumerate(group[group < count].tolist()):
        others = group[place + 1 :]
        images = others % count
        # those for which it may be the first, or the reverse: of the frames of a scene few are
        others = others[(images != i) & ((images < first[i]) | (i < first[images]))]
        bits = np.unpackbits((hashes[others] ^ hashes[i]).view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)
        others = others[bits <= _MAX_BITS]
        if others.size:
            similar = others[_are_similar(thumbnails[i], thumbnails[others])] % count
            first[i] = min(first[i], similar.min(initial=count))
            first[similar] = np.minimum(first[similar], i)


def _are_similar(thumbnail: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compare a thumbnail (16, 16) with others (N, 16, 16)."""
    a, b = thumbnail.reshape(256).astype(np.float64), others.reshape(-1, 256).astype(np.float64)
    differences = np.abs(a - b).mean(axis=1)
    a, b = a - a.mean(), b - b.mean(axis=1, keepdims=True)
    correlations = b @ a / (np.linalg.norm(a) * np.linalg.norm(b, axis=1))
    return (differences <= _MAX_DIFFERENCE) & (correlations >= _MIN_CORRELATION)


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
