"""Images without labels from files, folders, archives and globs, in the given order."""

from collections.abc import Callable
from functools import partial
from glob import escape, glob
from io import BytesIO
from pathlib import Path, PurePath

from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from vitzoo._files import printable
from vitzoo.data.archives import list_files, open_archive
from vitzoo.data.decode import DECODING_ERRORS, read_rgb
from vitzoo.data.layout import ARCHIVES, SUFFIXES, is_image, natural_order
from vitzoo.errors import UserError


class ImageFiles(Dataset):
    """Images with their names: items are (tensor, name, error).

    For an image that cannot be read, `error` is the reason and the tensor a blank image, so that batches keep their
    size and the batch that an image is in does not depend on other images.

    Args:
        files: A function per image name that reads the file, as returned by `find_files`.
        transform: Applied to each PIL image (RGB, 8 bits).
    """

    def __init__(self, files: dict[str, Callable[[], bytes]], transform: Callable[[Image.Image], Tensor]) -> None:
        self.files, self.transform = list(files.items()), transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple:
        name, read = self.files[index]
        try:
            image, reason = read_rgb(BytesIO(read())), ''
        except DECODING_ERRORS as error:
            # PIL's message contains the repr of a file object
            reason = 'it is not an image' if isinstance(error, UnidentifiedImageError) else str(error)
            image = Image.new('RGB', (32, 32))
        # names that are not valid UTF-8 could not be printed or written to a file
        return self.transform(image), printable(name), reason


class UnlabelledImages(ImageFiles):
    """Images with the dummy label 0; raises UserError for an image that cannot be read."""

    def __getitem__(self, index: int) -> tuple:
        image, name, reason = super().__getitem__(index)
        if reason:
            raise UserError(f'cannot read the image {name} ({reason}); replace or remove it')
        return image, 0

    def filename(self, index: int) -> str:
        """Name of an image."""
        return self.files[index][0]


def find_files(patterns: list[str]) -> dict[str, Callable[[], bytes]]:
    """Find images by paths and globs, each image once.

    Args:
        patterns: Image files with any suffix; folders, tar and zip files, of which all visible files with an image
            suffix are used; and globs of these (** matches any depth).

    Returns:
        A function per image name that reads the file.

    Raises:
        UserError: A pattern matches nothing, an archive cannot be read, or a folder, an archive or all globs together
            have no images.
    """
    files: dict[str, Callable[[], bytes]] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.exists():
            found_in_path = _find(path)
            if not found_in_path:
                raise _no_images(pattern)
            files |= found_in_path
            continue
        found = sorted(_expand(path), key=natural_order)
        if not found:
            raise UserError(f"there is no file, folder or archive '{pattern}'")
        for path in map(Path, found):
            if path.is_dir() or path.suffix.lower() in (*SUFFIXES, *ARCHIVES):
                files |= _find(path)
    if not files:
        raise _no_images(', '.join(patterns))
    return files


def _no_images(place: str) -> UserError:
    return UserError(f"there are no images ({', '.join(sorted(SUFFIXES))}) in '{place}'")


def _expand(pattern: Path) -> set[str]:
    """The paths that match a glob; unlike `glob`, ** does not follow links in a circle."""
    parts = pattern.parts
    if '**' not in parts:
        return set(glob(str(pattern)))
    place = parts.index('**')
    found, rest = set(), Path(*parts[place + 1 :] or '*')
    for top in glob(str(Path(*parts[:place]))):
        below = {parent for name in list_files(Path(top)) for parent in PurePath(name).parents}
        for folder in {PurePath(), *below}:
            found |= _expand(Path(escape(str(Path(top) / folder))) / rest)
    return {path for path in found if not _is_circle(Path(path))}


def _is_circle(path: Path) -> bool:
    """Return True for a link to a folder around it."""
    return path.is_symlink() and path.parent.resolve().is_relative_to(path.resolve())


def _find(path: Path) -> dict[str, Callable[[], bytes]]:
    if not path.is_dir() and path.suffix.lower() not in ARCHIVES:
        return {str(path): path.read_bytes}
    archive = open_archive(path)
    names = sorted(filter(is_image, archive.names), key=natural_order)
    return {str(path / name): partial(archive.read, name) for name in names}
