"""Reading files by name from a folder, a tar file or a zip file.

An archive is opened again for each image: worker processes are forked, and would share the file position of a handle
that stays open.
"""

import os
import posixpath
import stat
import struct
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipExtFile, ZipFile, ZipInfo

from vitzoo.data.layout import is_hidden, is_image
from vitzoo.data.reader import LabelledReader
from vitzoo.errors import UserError


class Folder:
    """A folder on disk; `names` lists all visible files below it, and hidden or empty folders with a trailing '/'."""

    def __init__(self, root: Path) -> None:
        self.root, self.names = root, list(list_files(root))

    def read(self, name: str) -> bytes:
        """Read a file."""
        return (self.root / name).read_bytes()


class Tar:
    """An uncompressed tar file; a tar inside it (ImageNet has one per class) counts as a folder of that name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            # 'r:' refuses compressed files, which do not allow random access
            with tarfile.open(root, 'r:') as tar:
                self.places = _list_members(tar)
        except (tarfile.TarError, OSError) as error:
            raise UserError(f'cannot read the tar file {root} ({error}); make it again, without compression') from error
        self.names = list(self.places)

    def read(self, name: str) -> bytes:
        """Read a member."""
        offset, size = self.places[name]
        with open(self.root, 'rb') as file:
            file.seek(offset)
            return file.read(size)


class Zip:
    """A zip file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            with ZipFile(root) as archive:
                infos = _clean_names(archive.infolist())
                if any(info.flag_bits & 1 for info in infos.values()):
                    raise UserError(f'the zip file {root} is password-protected; unpack it')
                # the content of a symbolic link is its target
                links = {
                    name: _resolve(name, archive.read(info).decode(errors='surrogateescape'))
                    for name, info in infos.items()
                    if stat.S_ISLNK(info.external_attr >> 16)
                }
        except (BadZipFile, OSError) as error:
            raise UserError(f'cannot read the zip file {root} ({error}); make it again') from error
        files = {name: info for name, info in infos.items() if name not in links}
        self.members = _follow_links(str(root), files, links)
        self.names = list(self.members)

    def read(self, name: str) -> bytes:
        """Read a member.

        Raises:
            OSError: The member is damaged.
        """
        info = self.members[name]
        with open(self.root, 'rb') as file:
            # opening a ZipFile parses the directory of all members, far too slow to do for each image, so seek to the
            # content. Only the member's local header tells where it starts: its extra field may differ in length from
            # the one in the directory. Bytes 26 to 29 are the lengths of the name and of the extra field after them.
            file.seek(info.header_offset + 26)
            file.seek(sum(struct.unpack('<HH', file.read(4))), os.SEEK_CUR)
            try:
                return ZipExtFile(file, 'r', info).read()
            except (BadZipFile, EOFError, NotImplementedError, zlib.error) as error:
                raise OSError(str(error)) from error


Archive = Folder | Tar | Zip
# files in the folder of a run, of a transfer and of the error analysis of `vitzoo validate`
_WRITTEN = ({'recipe.yaml', 'curves.png'}, {'transfer.json', 'curves.png'}, {'confusion.csv', 'confusion.png'})


def list_files(root: Path) -> Iterator[str]:
    """Yield all visible files below a folder, and hidden or empty folders with a trailing '/'.

    Symbolic links are followed, except those to a folder around them, which would be followed in a circle. Folders that
    vitzoo wrote pictures to, such as a run, are left out: these are not images of a class.

    Raises:
        UserError: A folder cannot be read, whose images would be missing.
    """
    home = root.resolve()
    # the resolved path of each folder, after those of the folders around it
    chains = {str(root): (*map(str, home.parents), str(home))}
    for parent, folders, files in os.walk(root, onerror=_refuse_unreadable, followlinks=True):
        below = os.path.relpath(parent, root).replace(os.sep, '/')
        prefix, chain = '' if below == '.' else f'{below}/', chains.pop(parent)
        if prefix and any(written <= {*files} for written in _WRITTEN):
            folders.clear()
            continue
        yield from (prefix + name for name in files)
        if prefix and not files and not folders:
            yield prefix
        visible = []
        for name in folders:
            path = os.path.join(parent, name)
            place = os.path.realpath(path) if os.path.islink(path) else os.path.join(chain[-1], name)
            if is_hidden(name) or place in chain:
                yield f'{prefix}{name}/'
            else:
                visible.append(name)
                chains[path] = (*chain, place)
        folders[:] = visible


def _refuse_unreadable(error: OSError) -> None:
    # a folder may be removed meanwhile, and one of this name, of root only, is on every disk of Linux
    if not isinstance(error, FileNotFoundError) and Path(error.filename).name != 'lost+found':
        raise UserError(
            f"cannot read the folder '{error.filename}': {error.strerror}; change its permissions, or move it away"
        ) from error


def open_archive(path: Path) -> Archive:
    """Open a folder, a tar file or a zip file.

    Raises:
        UserError: The path is none of the three, or the archive is damaged.
    """
    if path.is_dir():
        return Folder(path)
    kinds: dict[str, type[Tar] | type[Zip]] = {'.tar': Tar, '.zip': Zip}
    if path.suffix.lower() not in kinds:
        raise UserError(f"the data '{path}' is neither a folder nor a .tar or .zip file")
    return kinds[path.suffix.lower()](path)


class ArchiveReader(LabelledReader):
    """Images in an archive, each with one label or a list of labels.

    Args:
        archive: Holds the images.
        prefix: The folder that the names in `labels` are relative to, such as 'photos/train/'.
        labels: The label of each image by name, in order.
        class_names: The name of each label.
    """

    root: Path
    is_multi_label = False

    def __init__(self, archive: Archive, prefix: str, labels: dict, class_names: list[str]) -> None:
        super().__init__()
        self.archive, self.prefix, self.root = archive, prefix, archive.root / prefix
        self.names, self.labels, self.class_names = list(labels), list(labels.values()), class_names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[BytesIO, int | list[int]]:
        return BytesIO(self.archive.read(self.prefix + self.names[index])), self.labels[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        name = self.names[index]
        if basename:
            return os.path.basename(name)
        return str(self.root / name) if absolute else name


def _list_members(tar: tarfile.TarFile, start: int = 0, prefix: str = '') -> dict[str, tuple[int, int]]:
    """Offset and size of the content of each file; offsets count from the start of the outermost tar."""
    places: dict[str, tuple[int, int]] = {}
    links: dict[str, str] = {}
    for member in tar:
        name = prefix + member.name.removeprefix('./')
        if member.isfile() and name.lower().endswith('.tar') and not prefix:
            with tarfile.open(fileobj=tar.extractfile(member), mode='r:') as inner:
                places |= _list_members(inner, member.offset_data, f'{name[:-4]}/')
        elif member.isfile():
            places[name] = start + member.offset_data, member.size
        elif member.islnk():
            links[name] = prefix + member.linkname.removeprefix('./')
        elif member.issym():
            links[name] = _resolve(name, member.linkname)
        # tarfile would keep all of them, 350 bytes each; its stubs lack the list
        tar.members.clear()  # type: ignore[attr-defined]
    # tarfile takes any header that it cannot read for the end of the file; after the last member are zeros, or nothing
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b'\0'):
        raise tarfile.ReadError(f'the header at byte {start + tar.offset} is damaged')
    return _follow_links(str(tar.name), places, links)


def _clean_names(infos: list[ZipInfo]) -> dict[str, ZipInfo]:
    """The members of a zip file by name, with / between folders."""
    # some programs for Windows write \\ instead
    is_windows = not any('/' in info.filename for info in infos)
    names = [info.filename.replace('\\', '/') if is_windows else info.filename for info in infos]
    return {name.removeprefix('./'): info for name, info in zip(names, infos, strict=True)}


def _resolve(name: str, target: str) -> str:
    """The path that a symbolic link leads to, in the archive."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), target))


def _follow_links(archive: str, members: dict[str, Any], links: dict[str, str]) -> dict[str, Any]:
    """The members of an archive with those that links lead to, which may be files, folders, or links.

    Raises:
        UserError: A link to an image or to a folder leads to nothing in the archive.
    """
    # a link to a folder around it would be followed in a circle
    found, pending = dict(members), {name: to for name, to in links.items() if to != '.' and not _is_below(name, to)}
    below: dict[str, list[str]] = defaultdict(list)
    if pending:
        _add_to_folders(found, below)
    waits = True
    while pending:
        followed, waiting = set(), {folder for name in pending for folder in _folders_around(name)}
        for name, target in pending.items():
            new = {name: found[target]} if target in found else {}
            # a folder after the links in it, unless they lead nowhere
            if not new and not (waits and target in waiting):
                new = {name + other.removeprefix(target): found[other] for other in below.get(target, ())}
            if new:
                _add_to_folders([other for other in new if other not in found], below)
                found.update(new)
                followed.add(name)
        if not followed and not waits:
            break
        pending = {name: target for name, target in pending.items() if name not in followed}
        waits = bool(followed)
    names = [name for name in pending if not is_hidden(name) and (is_image(name) or not os.path.splitext(name)[1])]
    if names:
        raise UserError(
            f"the link '{names[0]}' in {archive} leads to '{pending[names[0]]}', which is not in the archive; make it"
            ' again with the files in place of links (tar --dereference, zip without --symlinks)'
        )
    return found


def _add_to_folders(names: Iterable[str], below: dict[str, list[str]]) -> None:
    """Add files to the lists of the files below each folder."""
    for name in names:
        for folder in _folders_around(name):
            below[folder].append(name)


def _folders_around(name: str) -> Iterator[str]:
    return (name[:place] for place, letter in enumerate(name) if letter == '/')


def _is_below(name: str, folder: str) -> bool:
    return name.startswith(f'{folder}/')
