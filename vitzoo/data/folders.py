"""Images in class folders, or listed with their labels in a table, and the splits of such data."""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from vitzoo._files import printable
from vitzoo.data.archives import Archive, ArchiveReader, Folder, list_files, open_archive
from vitzoo.data.label_table import LabelTableReader
from vitzoo.data.layout import (
    ARCHIVES,
    LABEL_TABLE,
    SPLIT_NAMES,
    SUFFIXES,
    Split,
    choose_split,
    common_folder,
    group_by_class,
    is_hidden,
    is_image,
    match_split,
)
from vitzoo.data.options import DataOptions
from vitzoo.data.reader import LabelledReader
from vitzoo.errors import NoClassesError, UserError, count_of


class FolderReader(ArchiveReader):
    """Images in one folder per class, at any depth, in a folder or an archive.

    Unlike timm's reader it skips hidden files and folders (.ipynb_checkpoints, ._name.jpg), takes the top folder as the
    class rather than the innermost, and supports more file formats.

    Args:
        archive: Holds the images.
        prefix: The folder around the class folders, such as 'photos/train/'.

    Raises:
        UserError: There are no images in class folders, or the name of a folder is not UTF-8.
    """

    def __init__(self, archive: Archive, prefix: str = '') -> None:
        names = [name.removeprefix(prefix) for name in archive.names if name.startswith(prefix)]
        classes = group_by_class(names)
        if not classes:
            raise NoClassesError(_explain_no_images(archive.root / prefix, names))
        for name in classes:
            if printable(name) != name:
                # a model could be trained, but its files could not have the name
                raise UserError(f"the class folder '{archive.root / prefix / printable(name)}' is not UTF-8; rename it")
        labels = {name: label for label, names in enumerate(classes.values()) for name in names}
        super().__init__(archive, prefix, labels, list(classes))


def find_in_folder(root: Path, split: str, options: DataOptions, multi_label: bool | None) -> Split | None:
    """Find a split among the folders and archives in a folder."""
    names = [path.name for path in root.iterdir() if path.is_dir() or path.suffix.lower() in ARCHIVES]

    def images_in(name: str) -> Iterator[str]:
        return filter(_is_listed, list_files(root / name))

    part = choose_split(names, split, images_in, options)
    if part is None:
        return None

    def open_part() -> LabelledReader:
        archive = open_archive(root / part)
        if isinstance(archive, Folder):
            return _read_labelled(archive, '', multi_label)
        return _read_labelled(archive, _inner_folder(archive, split, options), multi_label)

    return Split(open_part, is_whole=not part)


def _inner_folder(archive: Archive, split: str, options: DataOptions) -> str:
    """The folder of the images in the archive of a split: train.tar may contain train/, or a class called train."""
    prefix = common_folder(archive.names, options)
    folders = _top_folders(archive, prefix)
    inner = match_split(folders, split, options)
    others = {name for name in folders if not any(match_split([name], other, options) for other in SPLIT_NAMES)}
    has_other_classes = any(is_image(name) for name in _below(archive, prefix) if name.partition('/')[0] in others)
    return prefix if inner is None or has_other_classes else f'{prefix}{inner}/'


def find_in_archive(archive: Archive, split: str, options: DataOptions, multi_label: bool | None) -> Split | None:
    """Find a split among the folders in an archive."""
    prefix = common_folder(archive.names, options)
    # to look through all files for each folder would take the time of both numbers multiplied
    below = cache(partial(_group_by_top_folder, archive, prefix))

    def images_in(folder: str) -> Iterator[str]:
        return filter(_is_listed, below()[folder])

    part = choose_split(_top_folders(archive, prefix), split, images_in, options)
    if part is None:
        return None
    path = f'{prefix}{part}/' if part else prefix
    return Split(partial(_read_labelled, archive, path, multi_label), is_whole=not part)


def _below(archive: Archive, prefix: str) -> Iterator[str]:
    """The files below a folder of an archive, relative to it."""
    return (name.removeprefix(prefix) for name in archive.names if name.startswith(prefix))


def _is_listed(name: str) -> bool:
    """True for an image or a table of labels."""
    return is_image(name) or name == LABEL_TABLE


def _top_folders(archive: Archive, prefix: str) -> list[str]:
    below = (name.partition('/') for name in _below(archive, prefix))
    return list(dict.fromkeys(folder for folder, slash, _ in below if slash))


def _group_by_top_folder(archive: Archive, prefix: str) -> dict[str, list[str]]:
    """The files below each of the top folders of an archive, relative to it."""
    groups: dict[str, list[str]] = {}
    for name in _below(archive, prefix):
        folder, slash, rest = name.partition('/')
        if slash:
            groups.setdefault(folder, []).append(rest)
    return groups


def _read_labelled(archive: Archive, prefix: str, multi_label: bool | None) -> ArchiveReader:
    """A reader that takes labels from labels.csv or from class folders; with `multi_label` None from what there is."""
    if multi_label is None:
        multi_label = prefix + LABEL_TABLE in archive.names
    return LabelTableReader(archive, prefix) if multi_label else FolderReader(archive, prefix)


def _explain_no_images(root: Path, names: list[str]) -> str:
    visible = [name for name in names if not is_hidden(name)]
    if not visible:
        return f"the data folder '{root}' is empty"
    images = [name for name in visible if '/' not in name and Path(name).suffix.lower() in SUFFIXES]
    if images:
        return (
            f"the data folder '{root}' has {count_of(len(images), 'image')} but no class folders; move the images of"
            f' each class into a folder with its name'
            + (f', or train a model on {LABEL_TABLE} by `vitzoo train --multi-label`' if LABEL_TABLE in visible else '')
        )
    shards = [name for name in visible if name.endswith('.tar')]
    hint = f'; open WebDataset shards as wds/{root}' if shards else ''
    return f"there are no images ({', '.join(sorted(SUFFIXES))}) in class folders under '{root}'{hint}"
