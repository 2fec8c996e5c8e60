"""A stand-in for the package `datasets` of Hugging Face, with the part of its interface that is used."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace


class ImageFeature:
    """`datasets.Image`."""

    def __init__(self, decode: bool = True):
        self.decode = decode


class ClassLabel:
    """`datasets.ClassLabel`."""

    def __init__(self, *names: str):
        self.names = names


class ListOf:
    """`datasets.List`."""

    def __init__(self, feature):
        self.feature = feature


class Table:
    """`datasets.Dataset`."""

    def __init__(self, features: dict, rows: list[dict]):
        self.features, self.rows = features, rows

    def select_columns(self, names: list[str]) -> 'Table':
        return Table({name: self.features[name] for name in names}, [{n: row[n] for n in names} for row in self.rows])

    def cast_column(self, name: str, feature: ImageFeature) -> 'Table':
        if not isinstance(self.features[name], ImageFeature):
            raise TypeError('not an image')
        return Table({**self.features, name: feature}, self.rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, key: str | int):
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]


def unknown_split(split: str, splits: list[str]) -> ValueError:
    """The error of `datasets.load_dataset` for a split that a dataset does not have."""
    return ValueError(f'Unknown split "{split}". Should be one of {splits}.')


def make_package(load_dataset: Callable) -> ModuleType:
    """The package, with a function that loads datasets."""
    package = ModuleType('datasets')
    package.Image, package.ClassLabel, package.load_dataset = ImageFeature, ClassLabel, load_dataset
    package.exceptions = SimpleNamespace(DatasetsError=KeyError)
    return package
