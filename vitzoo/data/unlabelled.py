"""Images without labels, from files, folders, archives and globs, in the order in which they were named."""

from collections.abc import Callable
from functools import partial
from glob import glob
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from vitzoo.data.archives import open_source
from vitzoo.data.dataset import DECODING_ERRORS
from vitzoo.data.decode import read_rgb
from vitzoo.data.layout import ARCHIVES, SUFFIXES, is_image, natural_order
from vitzoo.errors import UserError


class ImageFiles(Dataset):
    """Images with their names; one that cannot be read is blank and comes with the reason.

    The blank keeps every batch as large as it would be, so that no image's neighbours depend on another's health.

    Args:
        files: What reads the content of each image, by its name, as `find_files` gives them.
        transform: Applied to each PIL image (RGB, 8 bits).
    """

    def __init__(self, files: dict[str, Callable[[], bytes]], transform: Callable[[Image.Image], Tensor]):
        self.files, self.transform = list(files.items()), transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, str, str]:
        name, read = self.files[index]
        try:
            image, reason = read_rgb(BytesIO(read())), ''
        except DECODING_ERRORS as error:
            # PIL's own words name an object in memory
            reason = 'it is not an image' if isinstance(error, UnidentifiedImageError) else str(error)
            image = Image.new('RGB', (32, 32))
        # bytes that are no text would stop whatever the name is written to
        return self.transform(image), name.encode(errors='surrogateescape').decode(errors='replace'), reason


class UnlabelledImages(ImageFiles):
    """Images whose labels do not matter and are all 0; one that cannot be read raises UserError."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, name, reason = super().__getitem__(index)
        if reason:
            raise UserError(f'cannot read the image {name} ({reason}); replace or remove it')
        return image, 0


def find_files(patterns: list[str]) -> dict[str, Callable[[], bytes]]:
    """Find the images that paths stand for, each once.

    Args:
        patterns: Files of any suffix; folders, tar and zip files, in which everything counts that has an image's suffix
            and is not hidden; and globs of all these (** crosses folders).

    Raises:
        UserError: There is nothing of such a name, an archive cannot be read, or there are no images.
    """
    files = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.exists():
            files |= _find(path)
            continue
        found = sorted(glob(str(path), recursive=True), key=natural_order)
        if not found:
            raise UserError(f"there is no file, folder or archive '{pattern}'")
        for path in map(Path, found):
            if path.is_dir() or path.suffix.lower() in (*SUFFIXES, *ARCHIVES):
                files |= _find(path)
    if not files:
        raise UserError(f"there are no images ({', '.join(sorted(SUFFIXES))}) in '{', '.join(patterns)}'")
    return files


def _find(path: Path) -> dict[str, Callable[[], bytes]]:
    if not path.is_dir() and path.suffix.lower() not in ARCHIVES:
        return {str(path): path.read_bytes}
    source = open_source(path)
    names = sorted(filter(is_image, source.names), key=natural_order)
    return {str(path / name): partial(source.read, name) for name in names}
