"""Images with any number of labels, from a table beside them.

photos/train/labels.csv       file,labels
                              beach/1.jpg,sea;people
                              2.jpg,
photos/train/beach/1.jpg      photos/train/2.jpg
"""

import csv
from io import StringIO

from vitzoo.data.archives import FileReader, Folder, Tar, Zip
from vitzoo.data.layout import natural_order
from vitzoo.errors import UserError

TABLE, SEPARATOR = 'labels.csv', ';'


class LabelsReader(FileReader):
    """The images that labels.csv names, each with the list of its labels; `class_names` is in natural order.

    Args:
        source: What holds the files.
        prefix: The folders above the table, as 'photos/train/'.

    Raises:
        UserError: There is no such table, or it names an image that is not there, or one twice.
    """

    is_multi_label = True

    def __init__(self, source: Folder | Tar | Zip, prefix: str = ''):
        table = read_labels(source, prefix)
        class_names = sorted({label for labels in table.values() for label in labels}, key=natural_order)
        if not class_names:
            raise UserError(f'{source.root / prefix / TABLE} gives no image a label')
        label_of = {name: label for label, name in enumerate(class_names)}
        labels = {file: [label_of[name] for name in table[file]] for file in sorted(table, key=natural_order)}
        super().__init__(source, prefix, labels, class_names)


def read_labels(source: Folder | Tar | Zip, prefix: str = '') -> dict[str, list[str]]:
    """The names of each image's labels, as the table has them."""
    path, there = source.root / prefix / TABLE, set(source.names)
    if prefix + TABLE not in there:
        raise UserError(f"multi_label needs '{path}', a table with the columns file and labels (a{SEPARATOR}b)")
    # Excel puts a mark in front of its UTF-8
    lines = csv.DictReader(StringIO(source.read(prefix + TABLE).decode('utf-8-sig', errors='replace'), newline=''))
    if not {'file', 'labels'} <= set(lines.fieldnames or ()):
        raise UserError(f'{path} has the columns {", ".join(lines.fieldnames or ())}, and needs file and labels')
    table = {}
    for line in lines:
        file = (line['file'] or '').strip().replace('\\', '/')
        if file in table:
            raise UserError(f'{path} names {file} twice; put its labels in one line, with {SEPARATOR} between them')
        if prefix + file not in there:
            raise UserError(f"{path} names '{file}', which is not there; correct the name or remove the line")
        labels = [label.strip() for label in (line['labels'] or '').split(SEPARATOR)]
        table[file] = list(dict.fromkeys(filter(None, labels)))
    return table
