"""Error analysis of a classifier, written to a folder: `vitzoo validate MODEL --errors FOLDER`.

<folder>/per_class.csv      accuracy (recall) and precision of each class, and its most frequent confusion
<folder>/confusion.csv      number of images of each class (row) predicted as each class (column); also confusion.png
<folder>/calibration.csv    accuracy and confidence in 15 bins of confidence; plotted in reliability.png
<folder>/confused.csv       the most confused pairs of classes, with the most confident errors; shown in confused.png
"""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from vitzoo._files import printable
from vitzoo.classes import readable
from vitzoo.data.dataset import Images, Splits
from vitzoo.data.options import NO_OPTIONS, DataOptions
from vitzoo.errors import UserError
from vitzoo.metrics.confusion import (
    Calibration,
    calibrate,
    confusion_matrix,
    most_confident,
    most_confused,
    precision,
    recall,
)
from vitzoo.validate.predictions import Predictions

FILES = (
    *('per_class.csv', 'confusion.csv', 'confusion.png', 'calibration.csv', 'reliability.png'),
    *('confused.csv', 'confused.png'),
)
_NUM_PAIRS, _NUM_EXAMPLES = 10, 6
_PER_CLASS_COLUMNS = ('class', 'images', 'accuracy', 'precision', 'taken_for', 'times')
_CALIBRATION_COLUMNS = ('above', 'up_to', 'images', 'confidence', 'accuracy')


def write_error_analysis(
    folder: str, predictions: Predictions, load_image: Callable[[int], Image.Image] | None = None
) -> dict:
    """Write the files listed above and return the expected calibration error in percent, as `ece`.

    Args:
        folder: Created if it does not exist.
        predictions: Predictions of images with one label each.
        load_image: Maps an index to its image; without it, confused.png is left out.

    Raises:
        UserError: The images have several labels.
    """
    # lazy: importing matplotlib takes a second
    from vitzoo.figures import draw_confusion, draw_mistakes, draw_reliability

    label, predicted = predictions.columns['label'], predictions.columns['top'][:, 0]
    if label.ndim == 2:
        raise UserError('the error analysis needs one label per image, and these predictions have several')
    confidence = predictions.columns['prob'][:, 0]
    Path(folder).mkdir(parents=True, exist_ok=True)
    matrix, names, present = count_confusions(predictions)
    calibration = calibrate(confidence, label == predicted)
    pairs = []
    for i, j, times in most_confused(matrix, _NUM_PAIRS):
        examples = most_confident(label, predicted, confidence, (present[i], present[j]), _NUM_EXAMPLES)
        pairs.append((names[i], names[j], times, examples))
    _write_csv(folder, 'per_class.csv', _PER_CLASS_COLUMNS, _per_class_rows(matrix, names))
    _write_csv(folder, 'confusion.csv', ['', *names], [[name, *row] for name, row in zip(names, matrix.tolist())])
    _write_csv(folder, 'calibration.csv', _CALIBRATION_COLUMNS, _calibration_rows(calibration))
    rows = ([a, b, times, *(predictions.files[index] for index in examples)] for a, b, times, examples in pairs)
    _write_csv(folder, 'confused.csv', ['class', 'taken_for', 'times', 'examples'], rows)
    draw_confusion(f'{folder}/confusion.png', matrix, names)
    draw_reliability(f'{folder}/reliability.png', calibration)
    if pairs and load_image:
        rows = [_to_figure_row(*pair, confidence, predictions.files, load_image) for pair in pairs]
        draw_mistakes(f'{folder}/confused.png', rows)
    return dict(ece=100 * calibration.error)


def count_confusions(predictions: Predictions) -> tuple[Tensor, list[str], list[int]]:
    """Confusion matrix of the classes that occur as label or prediction, their readable names and their indices.

    An ImageNet model evaluated on ten classes predicts few of the others.
    """
    label, predicted = predictions.columns['label'], predictions.columns['top'][:, 0]
    # a matrix of all 21,841 classes of ImageNet-21k would take 4 GB
    classes, places = torch.cat([label, predicted]).unique(return_inverse=True)
    rows, columns = places.chunk(2)
    matrix, present = confusion_matrix(rows, columns, len(classes)), classes.tolist()
    return matrix, readable([predictions.class_names[i] for i in present]), present


def open_predicted(data_dir: str, files: list[str], options: DataOptions = NO_OPTIONS) -> Callable[[int], Image.Image]:
    """Find the images of a file of predictions by their names, and return a function from index to image.

    Raises:
        UserError: The data does not exist, or an image is not in it.
    """
    reader = Splits(data_dir, multi_label=None, options=options).open('val', or_train=True)
    images = Images(reader)
    place = {images.filename(index): index for index in range(len(images))}
    missing = next((name for name in files if name not in place), None)
    if missing is not None:
        raise UserError(
            f"'{missing}' is not among the {len(images):,} images of {data_dir}; give the data of the predictions"
        )
    return lambda index: images[place[files[index]]][0]


def _per_class_rows(matrix: Tensor, names: list[str]) -> Iterable[list]:
    """One row per class with images, the least accurate first; accuracy and precision in percent."""
    accuracies, precisions = 100 * recall(matrix), 100 * precision(matrix)
    for i in accuracies.argsort(stable=True).tolist():
        # a row at a time: a copy of the matrix is large for many classes
        images, wrong = int(matrix[i].sum()), matrix[i].clone()
        wrong[i] = 0
        times = int(wrong.max())
        taken_for = names[int(wrong.argmax())] if times else ''
        if images:
            yield [names[i], images, f'{accuracies[i]:.2f}', _defined(precisions[i], '.2f'), taken_for, times]


def _calibration_rows(calibration: Calibration) -> Iterable[list]:
    bins = len(calibration.counts)
    for i in range(bins):
        shares = (_defined(values[i], '.4f') for values in (calibration.confidence, calibration.accuracy))
        yield [f'{i / bins:.4f}', f'{(i + 1) / bins:.4f}', int(calibration.counts[i]), *shares]


def _defined(value: Tensor, form: str) -> str:
    return '' if value.isnan() else format(value.item(), form)


def _to_figure_row(
    name: str,
    taken_for: str,
    times: int,
    indices: list[int],
    confidence: Tensor,
    files: list[str],
    load_image: Callable,
) -> tuple[str, list[tuple[Image.Image, str]]]:
    """Title and captioned images of a confused pair, with names that fit into the figure."""
    from vitzoo.figures import cut

    shown = (cut(printable(Path(files[index]).name)) for index in indices)
    captions = (f'{file}\n{100 * confidence[index]:.0f} % confident' for file, index in zip(shown, indices))
    often = f'{times} times' if times > 1 else 'once'
    return f'{cut(name)} predicted as {cut(taken_for)} {often}', list(zip(map(load_image, indices), captions))


def _write_csv(folder: str, name: str, header: Iterable[str], rows: Iterable[list]) -> None:
    with open(Path(folder) / name, 'w', newline='', encoding='utf-8', errors='surrogateescape') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(header)
        writer.writerows(rows)
