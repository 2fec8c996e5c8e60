"""Matplotlib figures of training, validation and explanation; the suffix of a path is the format of the figure."""

from collections.abc import Iterable
from math import ceil
from pathlib import Path

import numpy as np
import torch
from cycler import cycler
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vitzoo._files import replace_file
from vitzoo.errors import UserError
from vitzoo.metrics.confusion import Calibration
from vitzoo.metrics.oversmoothing import MEASURES

MEASURE_LABELS = {name: measure.label for name, measure in MEASURES.items()}


def literal(text: str) -> str:
    """Text for a figure in which dollar signs, as in the name of a class, do not enclose a formula."""
    return text.replace('$', r'\$')


def draw_token_statistics(path: str, records: list[dict]) -> None:
    """Draw the token statistics after each block, with all models in one figure and one panel per measure.

    The x axis is relative depth if the depths differ. Bands are one standard deviation over the images, and large dots
    mark the last block of a stage.

    Raises:
        UserError: No record has token statistics.
    """
    statistics = {record['model']: record['token_statistics'] for record in records if record['token_statistics']}
    if not statistics:
        raise UserError('there are no oversmoothing curves to draw')
    measures = [name for name in MEASURE_LABELS if any(name in found for found in statistics.values())]
    columns = min(len(measures), 3)
    rows = ceil(len(measures) / columns)
    figure = Figure(
        figsize=(8 if columns == 1 else 5.5 * columns, 5 if rows == 1 else 4.2 * rows), layout='constrained'
    )
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    same_depth = len({len(found['blocks']) for found in statistics.values()}) == 1
    for axes, measure in zip(panels, measures):
        axes.set_prop_cycle(cycler(linestyle=['-', '--', ':']) * rcParams['axes.prop_cycle'])
        for name, found in statistics.items():
            label = literal(', '.join([_legend_name(name, statistics), *found.get('options', ())]))
            # matplotlib leaves labels out of a legend that begin with an underscore
            label = f' {label}' if label.startswith('_') else label
            # more models need fainter bands, which overlap
            _plot_curve(axes, found, measure, label, same_depth, min(0.2, 0.5 / len(statistics)))
        axes.set_xlabel('block' if same_depth else 'relative depth (block / number of blocks)')
        axes.set_ylabel(MEASURE_LABELS[measure])
        axes.xaxis.get_major_locator().set_params(integer=same_depth)
        axes.grid(alpha=0.3)
    for axes in panels[len(measures) :]:
        axes.remove()
    figure.suptitle('Band: standard deviation over images. Large dot: last block of a stage.', fontsize='medium')
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside right center', fontsize='small')
    figure.savefig(path, dpi=150)


def _plot_curve(axes: Axes, statistics: dict, measure: str, label: str, same_depth: bool, band_alpha: float) -> None:
    if measure not in statistics:
        return
    mean, std = (np.array(statistics[measure][key], dtype=float) for key in ('mean', 'std'))
    depth = np.arange(1, len(mean) + 1) / (1 if same_depth else len(mean))
    (line,) = axes.plot(depth, mean, marker='o', markersize=3, label=label)
    axes.fill_between(depth, mean - std, mean + std, color=line.get_color(), alpha=band_alpha, linewidth=0)
    stages = np.array(statistics['stages'])
    last = np.append(stages[1:] != stages[:-1], True)
    axes.plot(depth[last], mean[last], marker='o', markersize=7, linestyle='', color=line.get_color())


def cut(text: str, length: int = 30) -> str:
    """Text for a figure that has no room for more characters."""
    return text if len(text) <= length else f'{text[: length - 1]}…'


def _legend_name(name: str, names: Iterable[str]) -> str:
    """The last component of a folder's path if it is unique among `names`, else the whole name."""
    short = Path(name).name
    return short if sum(Path(other).name == short for other in names) == 1 else name


def draw_confusion(path: str, matrix: Tensor, class_names: list[str]) -> None:
    """Draw a confusion matrix (K, K) with rows normalized, and names and counts in matrices of up to 30 classes.

    Classes without images have no row and share one column.
    """
    has_images = matrix.sum(dim=1) > 0
    names = [name for name, has in zip(class_names, has_images.tolist()) if has]
    matrix, elsewhere = matrix[has_images][:, has_images], matrix[has_images][:, ~has_images].sum(dim=1)
    columns = names + ['another class'] * bool(elsewhere.any())
    matrix = torch.cat([matrix, elsewhere[:, None]], dim=1)[:, : len(columns)]
    shares = (matrix.double() / matrix.sum(dim=1, keepdim=True)).numpy()
    side = min(max(5.0, 0.42 * len(names) + 2), 12)
    figure = Figure(figsize=(side + 1, side), layout='constrained')
    axes = figure.subplots()
    # square-root scale, because errors are rare compared with correct predictions
    picture = axes.imshow(shares, cmap='Blues', norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation='nearest')
    axes.set_xlabel('predicted class')
    axes.set_ylabel('class of the image')
    if len(names) <= 30:
        axes.set_xticks(range(len(columns)), [literal(cut(name)) for name in columns], rotation=90)
        axes.set_yticks(range(len(names)), [literal(cut(name)) for name in names])
        for i, j in matrix.nonzero().tolist():
            color = 'white' if shares[i, j] > 0.4 else 'black'
            axes.text(j, i, f'{matrix[i, j]:,}', ha='center', va='center', color=color, fontsize='x-small')
    figure.colorbar(picture, label='share of the images of the class', shrink=0.8)
    figure.savefig(path, dpi=150)


def draw_reliability(path: str, calibration: Calibration) -> None:
    """Draw accuracy over confidence, above a histogram of the confidence."""
    bins = len(calibration.counts)
    middle, width = (np.arange(bins) + 0.5) / bins, 1 / bins
    figure = Figure(figsize=(5, 6), layout='constrained')
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    accuracy, confidence = calibration.accuracy.numpy(), calibration.confidence.numpy()
    top.plot([0, 1], [0, 1], color='grey', linestyle='--', linewidth=1, label='perfectly calibrated')
    top.bar(middle, accuracy, width, color='tab:blue', edgecolor='white', label='accuracy')
    low, gap = np.minimum(accuracy, confidence), np.abs(accuracy - confidence)
    top.bar(middle, gap, width, low, color='none', edgecolor='tab:red', hatch='///', label='gap to the confidence')
    top.set(xlim=(0, 1), ylim=(0, 1), ylabel='accuracy')
    top.set_title(f'expected calibration error {100 * calibration.error:.2f} %', fontsize='medium')
    top.legend(fontsize='small', loc='upper left')
    bottom.bar(middle, calibration.counts.numpy(), width, color='tab:grey', edgecolor='white')
    bottom.set(xlabel='confidence', ylabel='images')
    figure.savefig(path, dpi=150)


def draw_mistakes(path: str, rows: list[tuple[str, list[tuple[Image.Image, str]]]]) -> None:
    """Draw rows of images, with a title for each row and a caption below each image."""
    columns = max(len(images) for _, images in rows)
    figure = Figure(figsize=(max(1.7 * columns, 5), 2.2 * len(rows)), layout='constrained')
    for part, (title, images) in zip(figure.subfigures(len(rows), squeeze=False)[:, 0], rows):
        part.suptitle(literal(title), fontsize='small', x=0.01, ha='left')
        panels = part.subplots(1, columns, squeeze=False)[0]
        for axes, (image, caption) in zip(panels, images):
            axes.imshow(image)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            axes.set_xlabel(literal(caption), fontsize=6)
        for axes in panels[len(images) :]:
            axes.axis('off')
    figure.savefig(path, dpi=150)


def draw_explanation(path: str, image: Tensor, heat: Tensor, title: str) -> None:
    """Draw an image (3, H, W) next to the same image overlaid with a heatmap (H, W), both in [0, 1]."""
    height, width = heat.shape
    figure = Figure(figsize=(7, 3.5 * height / width + 0.5), layout='constrained')
    left, right = figure.subplots(1, 2)
    pixels = image.permute(1, 2, 0).numpy()
    for axes in (left, right):
        axes.imshow(pixels)
        axes.axis('off')
    # more transparent at low values
    right.imshow(heat.numpy(), cmap='turbo', vmin=0, vmax=1, alpha=(0.2 + 0.5 * heat).numpy())
    figure.suptitle(literal(title), fontsize='medium')
    figure.savefig(path, dpi=150)


def draw_history(folder: Path, history: list[dict]) -> None:
    """Draw loss, score and learning rate to curves.png in `folder`, per epoch, or of a transfer per step."""
    panels = {
        'loss': dict(train_loss='training', eval_loss='validation', ema_eval_loss='validation, averaged weights'),
        'top-1 in %': dict(top1='validation', ema_top1='validation, averaged weights'),
        'error of the outputs': dict(output_error='held-out images', ema_output_error='averaged weights'),
        'learning rate': dict(lr='last layers'),
    }
    is_transfer = any('output_error' in row for row in history)
    del panels['top-1 in %' if is_transfer else 'error of the outputs']
    x = 'step' if is_transfer else 'epoch'
    figure = Figure(figsize=(12, 3.6), layout='constrained')
    for axes, (title, curves) in zip(figure.subplots(1, len(panels)), panels.items()):
        for name, label in curves.items():
            # not every epoch is validated
            rows = [row for row in history if name in row]
            if rows:
                axes.plot([row[x] for row in rows], [row[name] for row in rows], marker='.', label=label)
        axes.set(title=title, xlabel=x)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    with replace_file(folder / 'curves.png') as partial:
        figure.savefig(partial, dpi=120)
