"""Labelled images from class folders, tar files, and the other sources that timm reads."""

import os
import struct
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from timm.data import create_dataset
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.utils import natural_key
from torch.utils.data import Dataset, IterableDataset

from vitzoo.data.image import read_rgb
from vitzoo.errors import UserError, did_you_mean

SAMPLE = Path(__file__).parent / 'sample'
SUFFIXES = {'.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif', '.tif', '.tiff', '.ppm', '.pgm'}
SPLIT_NAMES = {'train': ('train', 'training'), 'val': ('val', 'validation', 'valid', 'eval', 'test')}
SCHEMES = ('torch', 'hfds', 'hfids', 'wds', 'tfds')
# everything that PIL's decoders raise for a damaged file
DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)


def open_dataset(
    data_dir: str,
    split: str,
    transform: Callable | None = None,
    *,
    class_to_idx: dict[str, int] | None = None,
) -> 'Images':
    """Open one split of a dataset.

    Args:
        data_dir: 'sample' (the bundled one), a folder with train/ and val/ (or validation/, valid/, eval/, test/; or a
            tar file of one of these names), a folder or tar file of class folders, 'torch/<name>[:<root>]' for a
            torchvision dataset, or 'hfds/<name>[:<cache>]' for a Hugging Face one.
        split: 'train' or 'val'.
        transform: Applied to each PIL image (RGB, 8 bits).
        class_to_idx: The classes of the training split, so that labels mean the same in both; by default the classes
            found here, in natural order (2 before 10).

    Raises:
        UserError: There is no such data, there are no images in it, or it has a class that `class_to_idx` lacks. Later,
            on indexing: an image cannot be read.
    """
    scheme, _, name = str(data_dir).partition('/')
    if name and scheme.lower() in SCHEMES and not Path(data_dir).exists():
        reader = _open_named(str(data_dir), split)
    else:
        path = _find_split(SAMPLE if data_dir == 'sample' else Path(data_dir).expanduser(), split)
        reader = TarReader(path) if path.is_file() else FolderReader(path)
    return Images(reader, transform, class_to_idx)


class Images(Dataset):
    """Images and their labels behind one of timm's readers; `class_names` is in label order."""

    def __init__(self, reader: Reader, transform: Callable | None = None, class_to_idx: dict[str, int] | None = None):
        self.reader, self.transform = reader, transform
        class_to_idx = class_to_idx or {name: label for label, name in enumerate(reader.class_names)}
        unknown = [name for name in reader.class_names if name not in class_to_idx]
        if unknown:
            more = f' (and {len(unknown) - 1} more)' if unknown[1:] else ''
            raise UserError(
                f"the class folder '{unknown[0]}'{more} of {self.root} is not one of the {len(class_to_idx)} training"
                f' classes{did_you_mean(unknown[0], class_to_idx) or "."} Rename or remove it, or add training images'
            )
        self.class_names = sorted(class_to_idx, key=class_to_idx.get)
        self.labels = [class_to_idx[name] for name in reader.class_names]

    @property
    def root(self) -> str:
        """Where the images are."""
        return str(self.reader.root)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Label of each class name, to open another split with."""
        return {name: label for label, name in enumerate(self.class_names)}

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple:
        file, label = self.reader[index]
        try:
            image = read_rgb(file)
        except DECODING_ERRORS as error:
            raise UserError(
                f'cannot read the image {self.filename(index)} of {self.root} ({error}); replace or remove it'
            ) from error
        return image if self.transform is None else self.transform(image), self.labels[label]

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """Name of an image, relative to its dataset unless asked otherwise."""
        return self.reader.filename(index, basename, absolute)


class FolderReader(Reader):
    """Images under one folder per class, at any depth below it.

    Unlike timm's, hidden files and folders (.ipynb_checkpoints, ._name.jpg) do not count, a class is the top folder
    rather than the innermost, and more file types are read.
    """

    def __init__(self, root: Path):
        super().__init__()
        self.root = root
        self.samples, self.class_names = [], []
        folders = [folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith('.')]
        for folder in sorted(folders, key=lambda folder: (natural_key(folder.name), folder.name)):
            files = _find_images(folder)
            if not files:
                continue
            self.samples += [(file, len(self.class_names)) for file in files]
            self.class_names.append(folder.name)
        if not self.samples:
            raise UserError(_why_no_images(root))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[BytesIO, int]:
        path, label = self.samples[index]
        # read whole, because an open file would stay open until PIL's image is collected
        return BytesIO(Path(path).read_bytes()), label

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = self.samples[index][0]
        if basename:
            return os.path.basename(path)
        return path if absolute else os.path.relpath(path, self.root)


class TarReader(ReaderImageInTar):
    """timm's reader of class folders in a tar file, made safe to share between worker processes."""

    def __init__(self, root: Path):
        try:
            super().__init__(str(root), cache_tarinfo=False)
        except tarfile.TarError as error:
            raise UserError(f'cannot read the tar file {root} ({error}); make it again') from error
        except ValueError as error:
            # timm unpacks the list of samples, which fails where there are none
            raise UserError(f'there are no images (.jpg, .jpeg, .png) in the tar file {root}') from error
        self.class_names = sorted(self.class_name_to_idx, key=self.class_name_to_idx.get)
        if '' in self.class_names:
            raise UserError(f'the tar file {root} has images outside of a class folder; pack it as <class>/<name>.jpg')

    def __getitem__(self, index: int) -> tuple[BytesIO, int]:
        info, parent, child = self.samples[index]
        # forked workers would move each other's place in a file that timm keeps open
        with open(os.path.join(self.root, parent) if parent else self.root, 'rb') as file:
            file.seek(info.offset_data + (child.offset_data if child else 0))
            return BytesIO(file.read(info.size)), int(self.targets[index])


class TorchReader(Reader):
    """One of torchvision's datasets (PIL image, label) as a reader."""

    def __init__(self, dataset: Dataset, root: str):
        super().__init__()
        self.dataset, self.root = dataset, root
        names = getattr(dataset, 'classes', None) or sorted({label for _, label in dataset})
        # torchvision's ImageNet has a tuple of synonyms for each class
        self.class_names = [', '.join(name) if isinstance(name, tuple) else str(name) for name in names]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.dataset[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return f'{index:08d}'


def _find_split(root: Path, split: str) -> Path:
    """The folder or tar file of a split, or `root` itself where it is one set of class folders."""
    if not root.exists():
        raise UserError(f"the data folder '{root}' does not exist")
    if root.is_file():
        if root.suffix != '.tar':
            raise UserError(f"the data '{root}' is neither a folder nor a .tar file")
        return root
    found = {wanted: _split_in(root, names) for wanted, names in SPLIT_NAMES.items()}
    path = found.get(split) or _split_in(root, (split,))
    if path is not None:
        return path
    if any(found.values()):
        names = ', '.join(SPLIT_NAMES.get(split, (split,)))
        there = ', '.join(path.name for path in found.values() if path)
        raise UserError(
            f"the data folder '{root}' has {there} but nothing for '{split}' (a folder or .tar named {names});"
            f' move part of the images of each class there'
        )
    return root


def _split_in(root: Path, names: tuple[str, ...]) -> Path | None:
    candidates = [path for name in names for path in (root / name, root / f'{name}.tar')]
    return next((path for path in candidates if path.is_dir() or (path.is_file() and path.suffix == '.tar')), None)


def _find_images(folder: Path) -> list[str]:
    """Visible image files below a folder, in natural order."""
    files = []
    for parent, subfolders, names in os.walk(folder, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith('.')]
        images = [name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith('.')]
        files += [os.path.join(parent, name) for name in images]
    return sorted(files, key=lambda file: (natural_key(file), file))


def _why_no_images(root: Path) -> str:
    visible = [path for path in root.iterdir() if not path.name.startswith('.')]
    if not visible:
        return f"the data folder '{root}' is empty"
    images = [path for path in visible if path.suffix.lower() in SUFFIXES]
    if images:
        return (
            f"the data folder '{root}' has {len(images)} images but no class folders; move the images of each class"
            f' into a folder with its name'
        )
    return f"there are no images ({', '.join(sorted(SUFFIXES))}) in class folders under '{root}'"


def _open_named(data_dir: str, split: str) -> Reader:
    """A dataset that timm knows by name, such as 'torch/cifar10' or 'hfds/uoft-cs/cifar10'."""
    name, _, root = data_dir.partition(':')
    options = dict(root=root or None)
    if name.lower().startswith('torch/'):
        options = dict(root=root or os.path.join(torch.hub.get_dir(), 'datasets'), download=True)
    try:
        dataset = _create_dataset(name, split, options)
    except ImportError as error:
        raise UserError(f"the dataset '{data_dir}' needs the package {error.name}: pip install {error.name}") from error
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot open the dataset '{data_dir}': {error}") from error
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"the dataset '{data_dir}' is a stream, but images are read in random order; unpack it to class folders"
        )
    if name.lower().startswith('torch/'):
        return TorchReader(dataset, f'{data_dir} ({split})')
    reader = dataset.reader
    reader.root, reader.class_names = f'{data_dir} ({split})', sorted(reader.class_to_idx, key=reader.class_to_idx.get)
    return reader


def _create_dataset(name: str, split: str, options: dict) -> Dataset:
    """timm's dataset, with the first of the split's names that it has."""
    names = ('validation', 'test', 'val') if split == 'val' else (split,)
    for candidate in names[:-1]:
        try:
            return create_dataset(name, split=candidate, **options)
        except ValueError:
            # Hugging Face raises this for a split that is not there
            continue
    return create_dataset(name, split=names[-1], **options)
