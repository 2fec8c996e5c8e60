"""Class maps: the classes of a run, their order, and the names that they have in a dataset."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

from timm.data.readers.class_map import load_class_map

from vitzoo.data.layout import natural_order
from vitzoo.data.reader import LabelledReader
from vitzoo.errors import UserError


class ClassMapReader(LabelledReader):
    """A reader with the classes of a class map; images of other classes are left out, as are other labels of an image.

    A class of the map that the map does not rename has its own name in the data, too. If all classes of the reader are
    whole numbers that the map does not contain, they are positions in the map. Classes without images do not count.

    Attributes:
        left_out: The names of the classes that are not in the map.

    Raises:
        UserError: None of the classes is in the map.
    """

    def __init__(self, reader: LabelledReader, class_map: dict[str, str]) -> None:
        super().__init__()
        self.reader, self.root, self.is_multi_label = reader, reader.root, reader.is_multi_label
        self.source = reader.source
        self.class_map, self.class_names = class_map, list(dict.fromkeys(class_map.values()))
        label_of = {name: label for label, name in enumerate(self.class_names)}
        label_of |= {name: label_of[new_name] for name, new_name in class_map.items()}
        labels, used = reader.labels, reader.used_labels()
        names = {i: name for i, name in enumerate(reader.class_names) if i in used}
        if label_of.keys().isdisjoint(names.values()) and all(map(str.isdecimal, names.values())):
            new = {i: int(name) for i, name in names.items() if int(name) < len(self.class_names)}
        else:
            new = {i: label_of[name] for i, name in names.items() if name in label_of}
        if not new:
            raise UserError(
                f'none of the classes of {reader.root} ({", ".join([*names.values()][:3])}, …) is in the class map'
                f' ({", ".join(list(class_map)[:3])}, …)'
            )
        self.left_out = [name for i, name in names.items() if i not in new]
        self.indices = [i for i, label in enumerate(labels) if self.is_multi_label or label in new]
        self.labels = [_relabel(labels[i], new) for i in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple:
        return self.reader[self.indices[index]][0], self.labels[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.reader.filename(self.indices[index], basename, absolute)


def read_class_map(source: str | dict[str, str]) -> dict[str, str]:
    """The class of each name in the data, in label order.

    Args:
        source: A .txt file with a class per line; a .json or .pkl file (of built-in types only) that maps names to
            labels from 0 or, if .json, to names of classes; or the result of an earlier call.

    Raises:
        UserError: The file cannot be read, or has the wrong content.
    """
    if isinstance(source, dict):
        return source
    suffix = Path(source).suffix.lower()
    if suffix not in ('.txt', '.json', '.pkl'):
        raise UserError(f"the class map '{source}' must be a .txt, .json or .pkl file")
    try:
        if suffix == '.txt':
            content = _number_lines(Path(source).expanduser().read_text(encoding='utf-8-sig').splitlines())
        elif suffix == '.json':
            content = json.loads(Path(source).expanduser().read_text(encoding='utf-8'), object_pairs_hook=_pair_once)
        else:
            content = load_class_map(str(Path(source).expanduser()))
    except (OSError, AssertionError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"cannot read the class map '{source}': {getattr(error, 'strerror', None) or error}") from error
    return _to_names(source, content)


def _number_lines(lines: list[str]) -> dict[str, int]:
    names = list(filter(None, map(str.strip, lines)))
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"several lines are '{repeated[0]}'; leave one of them")
    return {name: label for label, name in enumerate(names)}


def _pair_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of the pairs in JSON, of which json.loads would keep the last with a name."""
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"the name '{repeated[0]}' is there several times; leave one of them")
    return dict(pairs)


def _to_names(source: str, content: Any) -> dict[str, str]:
    """Convert names or labels to names of classes, in label order."""
    is_mapping = isinstance(content, dict) and content
    if is_mapping and all(isinstance(name, str) for name in content.values()):
        return dict(sorted(content.items(), key=lambda item: natural_order(item[1])))
    if not is_mapping or not all(type(label) is int for label in content.values()):
        raise UserError(f"the class map '{source}' must map names of classes to labels from 0, or to names of classes")
    labels = sorted(set(content.values()))
    if labels != list(range(len(labels))):
        raise UserError(f"the labels of the class map '{source}' must be 0, 1, 2, …, not {str(labels[:5])[1:-1]}")
    # the first name of a label is that of the class
    first = {label: str(name) for name, label in reversed(content.items())}
    return {str(name): first[label] for name, label in sorted(content.items(), key=lambda item: item[1])}


def _relabel(label: int | list[int], new: dict[int, int]) -> int | list[int]:
    if isinstance(label, list):
        return list(dict.fromkeys(new[item] for item in label if item in new))
    return new[label]
