"""Robustness: accuracy on the test images under corruptions, and on the published variants of ImageNet."""

import sys
from collections.abc import Sequence
from math import nan
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from timm.data import ImageNetInfo
from torch import Tensor, nn

from vitzoo.classes import label_names
from vitzoo.data import Images, split_eval_transform
from vitzoo.data.corruptions import CONDITIONS, MIN_SIZE, SEVERITIES, CorruptedImages
from vitzoo.data.variants import FoundVariant, Readout, find_suite
from vitzoo.data.variants.imagenet import IMAGENET_C_CONDITIONS
from vitzoo.errors import UserError
from vitzoo.metrics import mark_hits, rank_classes
from vitzoo.metrics.robustness import corruption_errors, score_allowed, summarize_allowed
from vitzoo.validate.scoring import Evaluation, score_dataset, score_in_turn
from vitzoo.validate.unfinished import UnfinishedScores


def evaluate_corruptions(evaluation: Evaluation, images: Images, clean_top1: float) -> dict:
    """Evaluate a model on its own test images under every corruption at five severities.

    Continues an evaluation with the same results file that was interrupted.

    Returns:
        corrupt, the top-1 accuracy at each severity of each corruption; corrupt_top1, their mean; corrupt_relative,
        the mean as a percentage of the accuracy on the clean images.
    """
    finished = UnfinishedScores(evaluation, images)
    missing = [condition for condition in CONDITIONS if condition not in finished.counts]
    transforms = split_eval_transform(evaluation.data_config)
    datasets = [CorruptedImages(images, *condition, *transforms) for condition in missing]
    images_before = len(finished.counts) * len(images)
    title = f'{evaluation.name}, corrupted'
    scored = score_in_turn(title, evaluation, datasets, _score_label, images_before=images_before)
    for condition, columns in zip(missing, scored, strict=True):
        finished.add(condition, int(columns['correct'].sum()), int(columns['counts'].sum()))
    correct, counts = zip(*(finished.counts[condition] for condition in CONDITIONS))
    accuracies = (100 * c / n if n else nan for c, n in zip(correct, counts))
    table = _by_corruption(dict(zip(CONDITIONS, accuracies)))
    top1 = 100 * sum(correct) / sum(counts) if sum(counts) else nan
    return dict(corrupt_top1=top1, corrupt_relative=100 * top1 / clean_top1 if clean_top1 else None, corrupt=table)


def check_corruptible(name: str, data_config: dict) -> None:
    """Raise UserError if the images of a model are too small to be corrupted."""
    height, width = data_config['input_size'][1:]
    if min(height, width) < MIN_SIZE:
        raise UserError(
            f'--corrupt needs images of at least {MIN_SIZE}x{MIN_SIZE} pixels, and those of {name} are '
            f'{height}x{width}; drop --corrupt'
        )


def open_suite(data_root: str, allow_partial: bool = False, is_main: bool = True) -> list[FoundVariant]:
    """Find the variants of ImageNet in a folder, check all of them, and list them on stderr.

    Raises:
        UserError: There is none, or one is not as published.
    """
    suite, notes = find_suite(data_root, allow_partial)
    console = Console(stderr=True)
    if is_main:
        titles = ', '.join(found.variant.title for found in suite)
        print(f'vitzoo: found in {data_root}: {titles}', *notes, sep='\nvitzoo: ', file=sys.stderr)
    # check all before the first evaluation, which may take hours
    parts = [(found, part) for found in suite for part in found.parts]
    for found, part in track(parts, 'checking', console=console, disable=not (is_main and console.is_terminal)):
        found.open(part, allow_partial)
    return suite


def evaluate_suite(evaluation: Evaluation, suite: Sequence[FoundVariant]) -> dict:
    """Evaluate a model on the variants of ImageNet that were found.

    Returns:
        <readout>_top1, _top5 and _n for each readout of a variant; also the table and errors of ImageNet-C, the gap of
        ImageNet-9, and the number of images without a ReaL label. Keys of an incomplete variant end in _partial.

    Raises:
        UserError: The model's classes are not ImageNet's.
    """
    check_imagenet_classes(evaluation.name, evaluation.model)
    record: dict[str, Any] = {}
    for found in suite:
        scores: dict[str, dict] = {}
        is_complete = len(found.parts) == found.variant.num_parts
        for part in found.parts:
            images, readouts = found.open(part, evaluation.options.allow_partial)
            images.transform = found.variant.transform(evaluation.data_config)
            scores |= score_readouts(f'{evaluation.name}, {part}', evaluation, images, readouts)
            is_complete &= images.is_complete
        columns = _SUMMARIES.get(found.variant.name, _columns)(scores)
        record |= {key if is_complete else f'{key}_partial': value for key, value in columns.items()}
    return record


def check_imagenet_classes(name: str, model: nn.Module) -> None:
    """Raise UserError unless the model has the 1,000 classes of ImageNet in their usual order."""
    names = label_names(model)
    has_others = bool(names) and names != ImageNetInfo().label_names()
    if model.num_classes != 1000 or has_others:
        found = 'other classes' if model.num_classes == 1000 else f'{model.num_classes:,} classes'
        raise UserError(
            f'the robustness suite is for the 1,000 classes of ImageNet, but {name} has {found}; '
            '--corrupt works for any classes'
        )


def score_readouts(title: str, evaluation: Evaluation, images: Images, readouts: dict[str, Readout]) -> dict[str, dict]:
    """Run a model on images once and score every readout: top1, top5, n and the number of images dropped."""
    device = next(evaluation.model.parameters(), torch.empty(0)).device
    tables = {key: (readout.allowed.to(device), readout.classes) for key, readout in readouts.items()}

    def score(logits: Tensor, index: Tensor) -> dict[str, Tensor]:
        return {key: score_allowed(logits, allowed[index], classes) for key, (allowed, classes) in tables.items()}

    hits = score_dataset(title, evaluation, images, score)
    scores = {key: summarize_allowed(hits[key], readout.allowed) for key, readout in readouts.items()}
    return {key: {**score, 'dropped': len(images) - score['n']} for key, score in scores.items()}


def _score_label(logits: Tensor, label: Tensor) -> dict[str, Tensor]:
    """Mark the images that are correct, and those that count: multi-label data may have images without a label."""
    columns = rank_classes(logits, label)
    counts = label.any(dim=1) if label.ndim == 2 else torch.ones_like(label, dtype=torch.bool)
    return dict(correct=mark_hits(columns['top'], columns['label'])[:, 0], counts=counts)


def _columns(scores: dict[str, dict]) -> dict:
    """Flatten the scores to columns of a results file; a readout without images has none."""
    return {
        f'{key}_{column}': score[column]
        for key, score in scores.items()
        if score['n']
        for column in ('top1', 'top5', 'n')
    }


def _imagenet_columns(scores: dict[str, dict]) -> dict:
    return _columns(scores) | dict(imagenet_real_dropped=scores['imagenet_real']['dropped'])


def _imagenet_9_columns(scores: dict[str, dict]) -> dict:
    same, rand = (scores.get(f'imagenet_9_mixed_{kind}') for kind in ('same', 'rand'))
    return _columns(scores) | (dict(imagenet_9_gap=same['top1'] - rand['top1']) if same and rand else {})


def _imagenet_c_columns(scores: dict[str, dict]) -> dict:
    """The table of ImageNet-C, and its errors if the table is complete."""
    table = _by_corruption({tuple(part.split('/')): score['top1'] for part, score in scores.items()})
    columns = dict(imagenet_c=table, imagenet_c_n=sum(score['n'] for score in scores.values()))
    if len(scores) < len(IMAGENET_C_CONDITIONS):
        return columns
    known = {name: [value for value in row if value is not None] for name, row in table.items()}
    return {**{f'imagenet_c_{key}': value for key, value in corruption_errors(known).items()}, **columns}


def _by_corruption(top1: dict[tuple, float]) -> dict[str, list[float | None]]:
    """Arrange accuracies by (corruption, severity) as a list over severities per corruption, None if missing."""
    by_severity = {(corruption, int(severity)): value for (corruption, severity), value in top1.items()}
    corruptions = dict.fromkeys(corruption for corruption, _ in by_severity)
    return {name: [by_severity.get((name, severity)) for severity in SEVERITIES] for name in corruptions}


_SUMMARIES = dict(imagenet=_imagenet_columns, imagenet_9=_imagenet_9_columns, imagenet_c=_imagenet_c_columns)
