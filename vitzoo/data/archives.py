"""What holds image files: a folder, a tar file or a zip file, each as names and the bytes behind them.

A file is opened anew for every image that is read: forked worker processes would move each other's place in one that
stays open.
"""

import os
import struct
import tarfile
import zlib
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile, ZipExtFile, ZipFile

from timm.data.readers.reader import Reader

from vitzoo.data.layout import is_hidden
from vitzoo.errors import UserError


class Folder:
    """A folder on disk; `names` has every visible file below it, and, ending in '/', every hidden or empty folder."""

    def __init__(self, root: Path):
        self.root, self.names = root, []
        for parent, folders, files in os.walk(root, followlinks=True):
            below = os.path.relpath(parent, root).replace(os.sep, '/')
            prefix = '' if below == '.' else f'{below}/'
            self.names += [prefix + name for name in files]
            self.names += [f'{prefix}{name}/' for name in folders if is_hidden(name)]
            if prefix and not files and not folders:
                self.names.append(prefix)
            folders[:] = [name for name in folders if not is_hidden(name)]

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return (self.root / name).read_bytes()


class Tar:
    """An uncompressed tar file; those inside it (as ImageNet has one for each class) are folders of that name."""

    def __init__(self, root: Path):
        self.root = root
        try:
            # only what is not compressed can be read in random order
            with tarfile.open(root, 'r:') as tar:
                self.places = _list_tar(tar)
        except (tarfile.TarError, OSError) as error:
            raise UserError(f'cannot read the tar file {root} ({error}); make it again, without compression') from error
        self.names = list(self.places)

    def read(self, name: str) -> bytes:
        """The content of a member."""
        offset, size = self.places[name]
        with open(self.root, 'rb') as file:
            file.seek(offset)
            return file.read(size)


class Zip:
    """A zip file."""

    def __init__(self, root: Path):
        self.root = root
        try:
            with ZipFile(root) as archive:
                self.members = {info.filename: info for info in archive.infolist()}
        except (BadZipFile, OSError) as error:
            raise UserError(f'cannot read the zip file {root} ({error}); make it again') from error
        if any(info.flag_bits & 1 for info in self.members.values()):
            raise UserError(f'the zip file {root} has a password; unpack it')
        self.names = list(self.members)

    def read(self, name: str) -> bytes:
        """The content of a member; OSError where it is damaged."""
        info = self.members[name]
        with open(self.root, 'rb') as file:
            # behind 26 bytes of the member's header are the lengths of its name and of what precedes the content
            file.seek(info.header_offset + 26)
            file.seek(sum(struct.unpack('<HH', file.read(4))), os.SEEK_CUR)
            try:
                return ZipExtFile(file, 'r', info).read()
            except (BadZipFile, EOFError, NotImplementedError, zlib.error) as error:
                raise OSError(str(error)) from error


def open_source(path: Path) -> Folder | Tar | Zip:
    """What is at a path.

    Raises:
        UserError: It is none of the three, or damaged.
    """
    if path.is_dir():
        return Folder(path)
    kinds = {'.tar': Tar, '.zip': Zip}
    if path.suffix.lower() not in kinds:
        raise UserError(f"the data '{path}' is neither a folder nor a .tar or .zip file")
    return kinds[path.suffix.lower()](path)


class FileReader(Reader):
    """Image files of a source and the label of each, or the list of its labels.

    Args:
        source: What holds the files.
        prefix: The folders above those in `labels`, as 'photos/train/'.
        labels: The label of each file, in order.
        class_names: The name of each label.
    """

    is_multi_label = False

    def __init__(self, source: Folder | Tar | Zip, prefix: str, labels: dict, class_names: list[str]):
        super().__init__()
        self.source, self.prefix, self.root = source, prefix, source.root / prefix
        self.names, self.labels, self.class_names = list(labels), list(labels.values()), class_names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[BytesIO, int | list[int]]:
        return BytesIO(self.source.read(self.prefix + self.names[index])), self.labels[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        name = self.names[index]
        if basename:
            return os.path.basename(name)
        return str(self.root / name) if absolute else name


def _list_tar(tar: tarfile.TarFile, start: int = 0, prefix: str = '') -> dict[str, tuple[int, int]]:
    """Where each file's content begins, counted from the start of the outermost tar, and its length."""
    places = {}
    for member in tar:
        name = prefix + member.name.removeprefix('./')
        if member.isfile() and name.lower().endswith('.tar') and not prefix:
            with tarfile.open(fileobj=tar.extractfile(member), mode='r:') as inner:
                places |= _list_tar(inner, member.offset_data, f'{name[:-4]}/')
        elif member.isfile():
            places[name] = start + member.offset_data, member.size
    return places
