"""Multi-label images, listed in a table next to them.

photos/train/labels.csv       file,labels
                              beach/1.jpg,sea;people
                              2.jpg,
photos/train/beach/1.jpg      photos/train/2.jpg
"""

import csv
from collections.abc import Iterator
from io import StringIO

from vitzoo.data.archives import Archive, ArchiveReader
from vitzoo.data.layout import LABEL_TABLE, natural_order
from vitzoo.errors import UserError

SEPARATOR = ';'


class LabelTableReader(ArchiveReader):
    """The images listed in labels.csv, each with its list of labels; `class_names` is in natural order.

    Args:
        archive: Holds the images and the table.
        prefix: The folder that contains the table, such as 'photos/train/'.

    Raises:
        UserError: The table is missing, has no labels, or lists an image that does not exist, or one twice.
    """

    is_multi_label = True

    def __init__(self, archive: Archive, prefix: str = '') -> None:
        table = read_label_table(archive, prefix)
        class_names = sorted({label for labels in table.values() for label in labels}, key=natural_order)
        if not class_names:
            raise UserError(f'{archive.root / prefix / LABEL_TABLE} gives no image a label; fill in its column labels')
        label_of = {name: label for label, name in enumerate(class_names)}
        labels = {file: [label_of[name] for name in table[file]] for file in sorted(table, key=natural_order)}
        super().__init__(archive, prefix, labels, class_names)


def read_label_table(archive: Archive, prefix: str = '') -> dict[str, list[str]]:
    """Read the label names of each image.

    Raises:
        UserError: The table is missing, is not UTF-8 or not CSV, lacks a column, has a line with more values than
            columns, or lists an image twice or one that does not exist.
    """
    path, existing = archive.root / prefix / LABEL_TABLE, set(archive.names)
    if prefix + LABEL_TABLE not in existing:
        raise UserError(
            f"--multi-label, or a run that was trained with it, needs '{path}', a table with the columns file and"
            f' labels (a{SEPARATOR}b)'
        )
    try:
        # Excel writes UTF-8 with a byte order mark
        text = archive.read(prefix + LABEL_TABLE).decode('utf-8-sig')
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8; save it as CSV UTF-8") from error
    table = {}
    for line in _read_lines(str(path), text):
        file = (line['file'] or '').strip().replace('\\', '/')
        if file in table:
            raise UserError(f'{path} lists {file} twice; put its labels in one line, separated by {SEPARATOR}')
        if prefix + file not in existing:
            raise UserError(f"{path} lists '{file}', which does not exist; correct the name or remove the line")
        labels = [label.strip() for label in (line['labels'] or '').split(SEPARATOR)]
        table[file] = list(dict.fromkeys(filter(None, labels)))
    return table


def _read_lines(path: str, text: str) -> Iterator[dict[str, str | None]]:
    """Yield the lines of a table by column."""
    # strict, because a quotation mark that is not closed would make all further lines a part of one label
    lines, first = csv.DictReader(StringIO(text, newline=''), strict=True), 1
    try:
        if not {'file', 'labels'} <= set(lines.fieldnames or ()):
            raise UserError(f'{path} has the columns {", ".join(lines.fieldnames or ())}, but needs file and labels')
        first = lines.line_num + 1
        for line in lines:
            # the values beyond the columns
            more = [value for value in line.pop(None, []) if value.strip()]
            if more:
                place = f'line {lines.line_num} of {path}'
                raise UserError(f"{place} has '{more[0]}' beyond its columns; separate labels by {SEPARATOR}")
            yield line
            first = lines.line_num + 1
    except csv.Error as error:
        raise UserError(f'{path} is not CSV from line {first} on ({error}); correct its quotation marks') from error
