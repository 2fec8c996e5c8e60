"""Files of per-image predictions, from which accuracies and the error analysis can be computed again.

.csv    one row per image: index, file, label, loss, and the top 5 classes with their names and probabilities; not for
        multi-label data
.npz    the same as arrays, and all logits, for calibration, ensembles and other sets of classes
"""

import csv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitzoo.errors import UserError

FORMATS = ('.csv', '.npz')
# binary content as a table, numbers beyond 64 bits and fields beyond the limit of csv among others
_UNREADABLE = (
    *(AttributeError, EOFError, IndexError, KeyError, RuntimeError, TypeError, ValueError),
    *(csv.Error, zipfile.BadZipFile),
)
# of probabilities in single precision, and in a table
_ROUNDING = 1e-4


@dataclass
class Predictions:
    """The columns of `rank_classes` for the images of a dataset, in its order.

    Attributes:
        files: Name of each image, relative to its dataset.
        class_names: Name of each class index; from a .csv, of the classes that occur in it.
        columns: label (N,), or booleans (N, num_classes) for multi-label data; loss (N,); top (N, k) and prob (N, k),
            where k is at most 5; logits (N, num_classes) if they were kept; oversmoothing (N, columns) if measured.
    """

    files: list[str]
    class_names: dict[int, str]
    columns: dict[str, Tensor]


def write_predictions(path: str, predictions: Predictions) -> None:
    """Write predictions to a .csv file, or all columns to an .npz file."""
    columns: dict[str, Any] = {name: column.numpy() for name, column in predictions.columns.items()}
    if Path(path).suffix.lower() == '.npz':
        names = np.array([predictions.class_names[label] for label in sorted(predictions.class_names)])
        # numpy would add .npz to a path that ends in .NPZ
        with open(path, 'wb') as file:
            np.savez(file, files=np.array(predictions.files), class_names=names, **columns)
        return
    ranks = range(1, columns['top'].shape[1] + 1)
    ranked = [f'{key}{rank}{end}' for rank in ranks for key, end in (('top', ''), ('top', '_name'), ('prob', ''))]
    # names of files may not be Unicode
    with open(path, 'w', newline='', encoding='utf-8', errors='surrogateescape') as table:
        writer = csv.writer(table)
        writer.writerow(['index', 'file', 'label', 'label_name', 'loss', *ranked])
        rows = zip(predictions.files, *(columns[name].tolist() for name in ('label', 'loss', 'top', 'prob')))
        for index, (name, label, loss, top, prob) in enumerate(rows):
            ranked = [value for c, p in zip(top, prob) for value in (c, predictions.class_names[c], p)]
            writer.writerow([index, name, label, predictions.class_names[label], loss, *ranked])


def read_predictions(path: str) -> Predictions:
    """Read a file of `write_predictions`.

    Raises:
        UserError: The file does not exist, is not a file of predictions, or has columns that do not fit together,
            numbers that are not finite, probabilities beyond 0 and 1, or classes that do not exist.
    """
    read = _read_npz if Path(path).suffix.lower() == '.npz' else _read_csv
    try:
        predictions = read(path)
    except OSError as error:
        raise UserError(f"cannot read the predictions '{path}': {error.strerror or error}") from error
    except _UNREADABLE as error:
        raise UserError(f"'{path}' is not a file written by --save-predictions: {error!r}") from error
    _check_shapes(path, predictions)
    for name in ('loss', 'prob', 'logits'):
        broken = predictions.columns.get(name, torch.empty(0)).isfinite().logical_not().nonzero()
        if len(broken):
            raise UserError(
                f"the {name} of {predictions.files[broken[0, 0]]} in '{path}' is not finite, so there is no accuracy; "
                'validate the model again, with weights that are finite'
            )
    prob = predictions.columns['prob']
    beyond = prob[(prob < -_ROUNDING) | (prob > 1 + _ROUNDING)]
    if len(beyond):
        raise UserError(
            f"'{path}' has the probability {beyond[0]:.4g}, which is not between 0 and 1; "
            'give a file as --save-predictions wrote it'
        )
    _check_classes(path, predictions)
    return predictions


def _check_shapes(path: str, predictions: Predictions) -> None:
    """Raise UserError if the columns are not of the same images and classes."""
    columns, num_images, problem = predictions.columns, len(predictions.files), ''
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    has_several = columns['label'].dtype == torch.bool
    dims = dict(label=1 + has_several, loss=1, top=2, prob=2, logits=2)
    for name, shape in shapes.items():
        if shape[:1] != (num_images,) or len(shape) != dims.get(name, len(shape)):
            problem = problem or f"names {num_images} images, but its column '{name}' has the shape {shape}"
    if shapes['top'] != shapes['prob'] or not columns['top'].numel():
        pair = f"'top' of the shape {shapes['top']} and 'prob' of {shapes['prob']}"
        problem = problem or f'has {pair}, which must be equal and not empty'
    if has_several and shapes['label'] != shapes.get('logits'):
        problem = problem or f'has several labels per image, but no logits of their shape {shapes["label"]}'
    if problem:
        raise UserError(f"'{path}' {problem}; give a file as --save-predictions wrote it")


def _check_classes(path: str, predictions: Predictions) -> None:
    """Raise UserError if a label or a prediction is not the number of a class."""
    for name in ('label', 'top'):
        column = predictions.columns[name]
        # booleans of several labels are no numbers of classes
        found = [] if column.dtype == torch.bool else column.unique().tolist()
        wrong = next((value for value in found if value < 0 or value not in predictions.class_names), None)
        if wrong is not None:
            raise UserError(
                f"'{path}' has {wrong} in its column '{name}', which is not the number of a class; "
                'give a file as --save-predictions wrote it'
            )


def _read_npz(path: str) -> Predictions:
    with np.load(path) as file:
        arrays = dict(file)
    files, class_names = arrays.pop('files').tolist(), dict(enumerate(arrays.pop('class_names').tolist()))
    if not {'label', 'loss', 'top', 'prob'} <= arrays.keys():
        raise ValueError(f'it only has {", ".join(arrays)}')
    return Predictions(files, class_names, {name: torch.from_numpy(array) for name, array in arrays.items()})


def _read_csv(path: str) -> Predictions:
    with open(path, newline='', encoding='utf-8', errors='surrogateescape') as file:
        rows = list(csv.DictReader(file))
    ranks = range(1, sum(key.startswith('prob') for key in rows[0]) + 1)
    class_names = {int(row['label']): row['label_name'] for row in rows}
    class_names |= {int(row[f'top{rank}']): row[f'top{rank}_name'] for row in rows for rank in ranks}
    columns = dict(
        label=torch.tensor([int(row['label']) for row in rows]),
        loss=torch.tensor([float(row['loss']) for row in rows]),
        top=torch.tensor([[int(row[f'top{rank}']) for rank in ranks] for row in rows]),
        prob=torch.tensor([[float(row[f'prob{rank}']) for rank in ranks] for row in rows]),
    )
    return Predictions([row['file'] for row in rows], dict(sorted(class_names.items())), columns)
