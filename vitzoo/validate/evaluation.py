"""Evaluation of models: accuracy, size, speed, oversmoothing and health, as one record per model."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitzoo.data import Images, eval_transform
from vitzoo.data.unlabelled import UnlabelledImages, find_files
from vitzoo.data.variants import FoundVariant
from vitzoo.errors import UserError
from vitzoo.load import fit_data_config, load_as_chosen
from vitzoo.metrics import HealthProbe, OversmoothingProbe, count_macs, rank_classes, summarize
from vitzoo.metrics.speed import PeakMemory, Speed, measure_throughput
from vitzoo.options import autocast
from vitzoo.validate.data import open_validation_data
from vitzoo.validate.error_analysis import write_error_analysis
from vitzoo.validate.options import EvalOptions
from vitzoo.validate.predictions import Predictions, write_predictions
from vitzoo.validate.robustness import (
    check_corruptible,
    check_imagenet_classes,
    evaluate_corruptions,
    evaluate_suite,
)
from vitzoo.validate.scoring import Evaluation, score_dataset

if TYPE_CHECKING:
    from accelerate import Accelerator

ACCURACY_KEYS = ('top1', 'top5', 'loss', 'n', 'map', 'labelled')


def validate_model(
    name: str, options: EvalOptions, accelerator: 'Accelerator | None' = None, suite: Sequence[FoundVariant] = ()
) -> dict:
    """Evaluate one model and return its record; with --no-data, the values that need images are None.

    The oversmoothing curve is also None for a model without feature maps of its blocks, and health for one without
    approximate softmax attention. With a suite and no --data-dir, the accuracy is that on ImageNet's validation set.
    """
    device = options.device if accelerator is None else accelerator.device
    with PeakMemory(device) as memory:
        loaded = load_as_chosen(name, options, options.pretrained)
        model = loaded.model.to(device)
        with autocast(device, options.amp_dtype):
            data_config = fit_data_config(name, model, options.img_size, options.crop_pct)
            probe = _create_probe(model, data_config['input_size'], options)
        evaluation = Evaluation(loaded, data_config, options, accelerator)
        # before the evaluation, because it fails if an operation has no formula
        gmacs = count_macs(model, data_config['input_size'][1:]) / 1e9
        with autocast(device, options.amp_dtype):
            scores = _evaluate(evaluation, probe, suite)
            speed = _measure_speed(evaluation)
    with autocast(device, options.amp_dtype):
        # outside PeakMemory, because exact attention needs more memory than the model
        health = _measure_health(evaluation) if options.health else None
    height, width = data_config['input_size'][1:]
    record: dict[str, Any] = dict(model=name, weights=loaded.weights, license=loaded.license)
    record |= dict.fromkeys((*ACCURACY_KEYS, 'oversmoothing', 'token_statistics'))
    record |= dict(
        params=sum(parameter.numel() for parameter in model.parameters()),
        gmacs=gmacs,
        gflops=2 * gmacs,
        img_size=height if height == width else f'{height}x{width}',
        crop_pct=data_config['crop_pct'],
        images_per_second=speed and speed.images_per_second,
        speed_doubt=speed and speed.doubt,
        peak_memory_mb=memory.megabytes,
        health=health,
    )
    if options.model_kwargs:
        record['model_kwargs'] = options.model_kwargs
    return record | scores


def _evaluate(evaluation: Evaluation, probe: OversmoothingProbe | None, suite: Sequence[FoundVariant]) -> dict:
    """Evaluate a model on --data-dir, with --corrupt under corruptions, and on the suite."""
    options = evaluation.options
    if suite:
        check_imagenet_classes(evaluation.name, evaluation.model)
    if options.corrupt:
        check_corruptible(evaluation.name, evaluation.data_config)
    scores = {}
    if options.has_data:
        images = _open_images(evaluation)
        columns = _score(evaluation, images, probe)
        scores = {key: value for key, value in summarize(columns).items() if not key.startswith('correct')}
        if options.ignore_labels:
            scores = dict(n=scores['n'])
        else:
            scores['images'] = images.fingerprint
        if probe is not None:
            scores['token_statistics'] = probe.describe(columns[probe.key])
            scores[probe.key] = scores['token_statistics']['cosine']['mean']
        if evaluation.is_main:
            scores |= _write_predictions(images, columns, options)
        if options.corrupt:
            images.transform = None
            scores |= evaluate_corruptions(evaluation, images, scores['top1'])
    if suite:
        columns = evaluate_suite(evaluation, suite)
        scores = {key: columns.get(f'imagenet_{key}') for key in ('top1', 'top5', 'n')} | scores | columns
    return scores


def _open_images(evaluation: Evaluation) -> Any:
    """Open the validation images, or with --ignore-labels all images."""
    options, transform = evaluation.options, eval_transform(evaluation.data_config)
    if options.ignore_labels:
        return UnlabelledImages(find_files([options.data]), transform)
    images = open_validation_data(options.data, evaluation.loaded, transform, options.data_options)
    if images.is_multi_label and (options.save_predictions or '').lower().endswith('.csv'):
        raise UserError(f'{options.data_dir} has several labels per image: save the predictions as .npz')
    if images.is_multi_label and options.errors:
        raise UserError(f'--errors needs one label per image, and {images.root} has several')
    return images


def _score(evaluation: Evaluation, images: Any, probe: OversmoothingProbe | HealthProbe | None) -> dict[str, Tensor]:
    """Score the validation images, with the probe if there is one."""
    options = evaluation.options
    if getattr(images, 'is_held_out', False) and evaluation.is_main:
        missing = f', without {images.num_missing} that have gone or changed' if images.num_missing else ''
        # that of a --checkpoint is not the name of its model
        run = evaluation.name if options.checkpoint is None else images.reader.listed_in.parent
        print(
            f'vitzoo: evaluating the {len(images)} images of {options.data_dir} that {run} held out for'
            f' validation{missing}',
            file=sys.stderr,
        )
    if getattr(images, 'left_out', []) and evaluation.is_main:
        print(f'vitzoo: {images.describe_left_out()}', file=sys.stderr)
    score = partial(rank_classes, keep_logits=(options.save_predictions or '').lower().endswith('.npz'))
    with probe or nullcontext():
        return score_dataset(evaluation.name, evaluation, images, score, probe)


def _write_predictions(images: Images, columns: dict[str, Tensor], options: EvalOptions) -> dict:
    """Write the files of --save-predictions and --errors, and return the scores of the error analysis."""
    if not options.save_predictions and not options.errors:
        return {}
    files = [images.filename(index) for index in range(len(images))]
    predictions = Predictions(files, dict(enumerate(images.class_names)), columns)
    if options.save_predictions:
        write_predictions(options.save_predictions, predictions)
    if not options.errors:
        return {}
    untransformed = copy(images)
    untransformed.transform = None
    return write_error_analysis(options.errors, predictions, lambda index: untransformed[index][0])


@torch.no_grad()
def _create_probe(
    model: nn.Module, input_size: tuple[int, int, int], options: EvalOptions
) -> OversmoothingProbe | None:
    """Create a probe and try it on one image; if its tokens cannot be read, warn and return None."""
    images = torch.zeros(1, *input_size, device=next(model.parameters()).device)
    try:
        with OversmoothingProbe(
            model,
            measures=options.measures,
            absolute=options.absolute,
            include_self=options.include_self,
            include_cls=options.include_cls,
        ) as probe:
            model(images)
    except UserError as error:
        print(f'vitzoo: {error}', file=sys.stderr)
        return None
    probe.per_image()
    return probe


def _measure_health(evaluation: Evaluation) -> dict[str, dict[str, float]] | None:
    """Compare the mixers that approximate softmax attention with it, on the validation data."""
    model, data_config, options = evaluation.model, evaluation.data_config, evaluation.options
    try:
        probe = HealthProbe(model)
    except UserError as error:
        print(f'vitzoo: {evaluation.name}: {error}', file=sys.stderr)
        return None
    with torch.no_grad(), probe:
        # one image, so that the probe knows its columns even in a process without a share of the data
        model(torch.zeros(1, *data_config['input_size'], device=next(model.parameters()).device))
    probe.per_image()
    images = open_validation_data(options.data, evaluation.loaded, eval_transform(data_config), options.data_options)
    return probe.report(summarize(_score(evaluation, images, probe))[probe.key])


def _measure_speed(evaluation: Evaluation) -> Speed | None:
    """Measure the throughput in the main process."""
    model, accelerator = evaluation.model, evaluation.accelerator
    shape = evaluation.options.timed_batch_size, *evaluation.data_config['input_size']
    images = torch.randn(shape, device=next(model.parameters()).device)
    if accelerator is None:
        return measure_throughput(model, images)
    # one process at a time: processes on one machine would slow each other down
    accelerator.wait_for_everyone()
    speed = measure_throughput(model, images) if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    return speed
