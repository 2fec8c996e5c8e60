"""The interface of the readers, which are timm's with labels and names of classes."""

from itertools import chain
from pathlib import Path
from typing import Any

from timm.data.readers.reader import Reader


class LabelledReader(Reader):
    """Images by index, each with one label or, in a multi-label dataset, a list of labels.

    An item is the image, as a file or decoded, and its label.

    Attributes:
        root: Path or name of the data.
        class_names: The name of each label.
        labels: The label of each image.
        source: Dataset and split of images that are named by their index; empty if their names are those of files.
    """

    root: Path | str
    class_names: list[str]
    labels: list
    is_multi_label: bool
    source = ''

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        raise NotImplementedError

    def used_labels(self) -> set[int]:
        """The labels that images have; the data may list others."""
        return set(chain.from_iterable(self.labels) if self.is_multi_label else self.labels)
