"""Datasets of Hugging Face, from the Hub or a local folder, indexed by image; their package `datasets` is optional."""

from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from vitzoo.data.layout import Split, natural_order, split_names
from vitzoo.data.options import DataOptions
from vitzoo.data.reader import LabelledReader
from vitzoo.errors import UserError, did_you_mean, format_flag

# columns that are used without an option, even if others would do
_IMAGE_COLUMN, _LABEL_COLUMN = 'image', 'label'


def find_hugging_face(data_dir: str, split: str, options: DataOptions) -> Split | None:
    """Find a split of a dataset such as 'hfds/uoft-cs/cifar10'; None if it has no such split.

    Raises:
        UserError: The package or the dataset is missing, or a split, subset or column that is named in the options.
    """
    given = options.split_name(split)
    for name in split_names(split) if given is None else (given,):
        try:
            dataset = _load(data_dir, name, options)
        except UserError as error:
            if given is not None or 'Unknown split' not in str(error):
                raise
        else:
            return Split(partial(HuggingFaceReader, data_dir, dataset, name, options))
    return None


class HuggingFaceReader(LabelledReader):
    """The images of a split, named by index, with one label or a list of labels each.

    The labels may be classes with names, whole numbers, strings or booleans, or lists of them.

    Raises:
        UserError: A column is missing or ambiguous, or does not contain images or classes.
    """

    def __init__(self, data_dir: str, dataset: Any, split: str, options: DataOptions) -> None:
        super().__init__()
        import datasets

        self.root, features = f'{data_dir} ({split})', dataset.features
        # without the folder of the cache, which may be another on each machine
        self.source = ' '.join(filter(None, (data_dir.partition(':')[0], options.data_subset, split)))
        images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        self.input_key = self._choose('input_key', options.input_key, _IMAGE_COLUMN, images, list(features))
        labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
        target_key = self._choose('target_key', options.target_key, _LABEL_COLUMN, labels, list(features))
        try:
            # other columns would be decoded with each image
            images = dataset.select_columns([self.input_key])
            self.dataset = images.cast_column(self.input_key, datasets.Image(decode=False))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UserError(f"the column '{self.input_key}' of {self.root} has no images: {error}") from error
        targets = dataset[target_key][:]
        self.is_multi_label = any(isinstance(target, list) for target in targets)
        self.class_names, self.labels = self._read_labels(target_key, features[target_key], targets)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[BytesIO, int | list[int]]:
        image = self.dataset[index][self.input_key]
        if image is None:
            raise OSError('the dataset has no image in this row')
        data = image['bytes'] if image['bytes'] else Path(image['path']).read_bytes()
        return BytesIO(data), self.labels[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return f'{index:08d}'

    def _choose(self, option: str, given: str | None, usual: str, suitable: list[str], columns: list[str]) -> str:
        """The column that is given, or else has the usual name, or else is the only suitable one."""
        flag = format_flag(option)
        if given is not None:
            if given not in columns:
                hint = did_you_mean(given, columns) or f', only {", ".join(columns)}'
                raise UserError(f"{self.root} has no column '{given}'{hint}; correct {flag}")
            return given
        if usual in columns:
            return usual
        if len(suitable) != 1:
            raise UserError(
                f"{self.root} has no column '{usual}', but {', '.join(columns)}; choose one of them with {flag}"
            )
        return suitable[0]

    def _read_labels(self, column: str, feature: Any, targets: list) -> tuple[list[str], list]:
        """The class names, and the label or labels of each image; without names, the values are the classes."""
        # a column of lists has the feature of its items
        names = getattr(getattr(feature, 'feature', feature), 'names', None)
        label_of = {label: label for label in range(len(names or ()))}
        if names is None:
            values = {value for target in targets for value in _as_list(target) if value is not None}
            if not all(isinstance(value, int | str) for value in values):
                raise UserError(
                    f"the column '{column}' of {self.root} has values such as {next(iter(values))!r}, which are not"
                    ' classes; choose another with --target-key'
                )
            ordered = sorted(values, key=lambda value: natural_order(str(value)))
            names, label_of = [str(value) for value in ordered], {value: label for label, value in enumerate(ordered)}
        labels = []
        for row, target in enumerate(targets):
            found = [label_of.get(value) for value in _as_list(target)]
            # -1 marks an unlabelled image in many datasets
            if None in found:
                raise UserError(
                    f"row {row} of {self.root} has the label {target!r}, which is not a class of its column '{column}';"
                    ' remove the row, or choose another split or column with --train-split, --val-split, --target-key'
                )
            labels.append(found if self.is_multi_label else found[0])
        return list(names), labels


def _as_list(target: Any) -> list:
    return target if isinstance(target, list) else [target]


def _load(data_dir: str, split: str, options: DataOptions) -> Any:
    name, _, cache = data_dir.partition('/')[2].partition(':')
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"the dataset '{data_dir}' needs the package {error.name}: pip install {error.name}") from error
    try:
        return datasets.load_dataset(name, options.data_subset, split=split, cache_dir=cache or None)
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        hint = '; choose one with --data-subset' if 'Config name is missing' in str(error) else ''
        raise UserError(f"cannot open the dataset '{data_dir}': {error}{hint}") from error
