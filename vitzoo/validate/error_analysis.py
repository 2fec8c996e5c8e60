"""Writes where a classifier errs into a folder: `vitzoo validate MODEL --errors FOLDER`.

<folder>/per_class.csv      accuracy (recall) and precision of each class, and what it is taken for most often
<folder>/confusion.csv      how many images of each class (row) were taken for each class (column); also confusion.png
<folder>/calibration.csv    accuracy and confidence in 15 bins of confidence; reliability.png draws them
<folder>/confused.csv       the pairs of classes confused most often, with the surest mistakes; confused.png shows them
"""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image
from torch import Tensor

from vitzoo.data.dataset import Images, Splits
from vitzoo.errors import UserError
from vitzoo.load import readable
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

NUM_PAIRS, NUM_EXAMPLES = 10, 6


def write_mistakes(
    folder: str, predictions: Predictions, load_image: Callable[[int], Image.Image] | None = None
) -> dict:
    """Write the files named above and return the expected calibration error in percent, as `ece`.

    Args:
        folder: Made where it does not exist.
        predictions: Of images with one label each.
        load_image: Gives the image of an index, for the mistakes that are shown; without it confused.png is left out.

    Raises:
        UserError: The images have several labels.
    """
    # imported here, because only who asks for figures waits for matplotlib
    from vitzoo.figures import draw_confusion, draw_mistakes, draw_reliability

    label, answer = predictions.columns['label'], predictions.columns['top'][:, 0]
    if label.ndim == 2:
        raise UserError('an error analysis is of images with one label, and these predictions are of several')
    confidence = predictions.columns['prob'][:, 0]
    Path(folder).mkdir(parents=True, exist_ok=True)
    matrix, names, present = count_present(predictions)
    calibration = calibrate(confidence, label == answer)
    pairs = [
        (names[i], names[j], times, most_confident(label, answer, confidence, (present[i], present[j]), NUM_EXAMPLES))
        for i, j, times in most_confused(matrix, NUM_PAIRS)
    ]
    _write_csv(folder, 'per_class.csv', PER_CLASS, _per_class_rows(matrix, names))
    _write_csv(folder, 'confusion.csv', ['', *names], [[name, *row] for name, row in zip(names, matrix.tolist())])
    _write_csv(folder, 'calibration.csv', CALIBRATION, _calibration_rows(calibration))
    examples = ([a, b, times, *(predictions.files[index] for index in found)] for a, b, times, found in pairs)
    _write_csv(folder, 'confused.csv', ['class', 'taken_for', 'times', 'examples'], examples)
    draw_confusion(f'{folder}/confusion.png', matrix, names)
    draw_reliability(f'{folder}/reliability.png', calibration)
    if pairs and load_image:
        rows = [_row(*pair, confidence, predictions.files, load_image) for pair in pairs]
        draw_mistakes(f'{folder}/confused.png', rows)
    return dict(ece=100 * calibration.error)


def count_present(predictions: Predictions) -> tuple[Tensor, list[str], list[int]]:
    """The confusion matrix of the classes that occur, their names as a person reads them, and their numbers.

    An ImageNet model on ten of its classes errs among few others.
    """
    label, answer = predictions.columns['label'], predictions.columns['top'][:, 0]
    matrix = confusion_matrix(label, answer, max(predictions.class_names) + 1)
    present = (matrix.sum(dim=0) + matrix.sum(dim=1)).nonzero().flatten().tolist()
    return matrix[present][:, present], readable([predictions.class_names[i] for i in present]), present


def open_predicted(data_dir: str, files: list[str]) -> Callable[[int], Image.Image]:
    """Find the images that were predicted, by their names, and return what gives the one of an index.

    Raises:
        UserError: There is no such data, or an image is not in it.
    """
    reader = Splits(data_dir, multi_label=None).open('val', or_train=True)
    images = Images(reader)
    place = {images.filename(index): index for index in range(len(images))}
    missing = next((name for name in files if name not in place), None)
    if missing is not None:
        raise UserError(f"'{missing}' is not among the {len(images):,} images of {data_dir}; name what was predicted")
    return lambda index: images[place[files[index]]][0]


PER_CLASS = ('class', 'images', 'accuracy', 'precision', 'taken_for', 'times')
CALIBRATION = ('above', 'up_to', 'images', 'confidence', 'accuracy')


def _per_class_rows(matrix: Tensor, names: list[str]) -> Iterable[list]:
    """One row for each class of which there are images, the least accurate first; shares in percent."""
    accuracies, precisions = 100 * recall(matrix), 100 * precision(matrix)
    wrong = matrix - matrix.diagonal().diag()
    for i in accuracies.argsort(stable=True).tolist():
        images, times = int(matrix[i].sum()), int(wrong[i].max())
        taken_for = names[int(wrong[i].argmax())] if times else ''
        if images:
            yield [names[i], images, f'{accuracies[i]:.2f}', _defined(precisions[i], '.2f'), taken_for, times]


def _calibration_rows(calibration: Calibration) -> Iterable[list]:
    bins = len(calibration.counts)
    for i in range(bins):
        shares = (_defined(values[i], '.4f') for values in (calibration.confidence, calibration.accuracy))
        yield [f'{i / bins:.4f}', f'{(i + 1) / bins:.4f}', int(calibration.counts[i]), *shares]


def _defined(value: Tensor, form: str) -> str:
    return '' if value.isnan() else format(value.item(), form)


def _row(
    name: str,
    taken_for: str,
    times: int,
    indices: list[int],
    confidence: Tensor,
    files: list[str],
    load_image: Callable,
) -> tuple[str, list[tuple[Image.Image, str]]]:
    """One row of the figure of confused pairs."""
    captions = (f'{Path(files[index]).name}\n{100 * confidence[index]:.0f} % sure' for index in indices)
    often = f'{times} times' if times > 1 else 'once'
    return f'{name}, taken for {taken_for} {often}', list(zip(map(load_image, indices), captions))


def _write_csv(folder: str, name: str, header: Iterable[str], rows: Iterable[list]) -> None:
    with open(Path(folder) / name, 'w', newline='', encoding='utf-8') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(header)
        writer.writerows(rows)
