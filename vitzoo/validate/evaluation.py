"""Evaluation of models: accuracy, size, speed, oversmoothing and health, as one record per model."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn

from vitzoo.about import read_about
from vitzoo.classes import label_names, number_rest
from vitzoo.data import Images, eval_transform, open_dataset
from vitzoo.data.dataset import merge_options
from vitzoo.data.options import NO_OPTIONS, DataOptions
from vitzoo.data.unlabelled import UnlabelledImages, find_files
from vitzoo.data.variants import Found
from vitzoo.errors import UserError, count_of
from vitzoo.load import find_models, fit_data_config, load_model
from vitzoo.metrics import HealthProbe, OversmoothingProbe, count_macs, rank_classes, summarize
from vitzoo.metrics.speed import PeakMemory, Speed, measure_throughput
from vitzoo.options import autocast
from vitzoo.validate.error_analysis import open_predicted, write_error_analysis
from vitzoo.validate.options import EvalOptions, check_outputs, check_single_model, parse_args
from vitzoo.validate.predictions import Predictions, read_predictions, write_predictions
from vitzoo.validate.results import RECORD_KEYS, print_calibration, print_results, write_results
from vitzoo.validate.robustness import (
    check_corruptible,
    check_imagenet_classes,
    evaluate_corruptions,
    evaluate_suite,
    open_suite,
)
from vitzoo.validate.scoring import score_dataset
from vitzoo.validate.unfinished import remove_unfinished

if TYPE_CHECKING:
    from accelerate import Accelerator

ACCURACY_KEYS = ('top1', 'top5', 'loss', 'n', 'map', 'labelled')


def validate(argv: list[str] | None = None) -> list[dict]:
    """Validate the models named on the command line, and return one record per model.

    Raises:
        UserError: A model, a file, a folder or a size is invalid.
    """
    options = parse_args(argv)
    names = find_models(options.models)
    check_single_model(options, names)
    check_outputs(options)
    if options.from_predictions:
        return [_validate_predictions(options.from_predictions, options)]
    accelerator = _create_accelerator()
    is_main = accelerator is None or accelerator.is_main_process
    suite = open_suite(options.data_root, options.allow_partial, is_main) if options.suite and options.data_root else []
    records = []
    try:
        for name in names:
            records.append(validate_model(name, options, accelerator, suite))
            if is_main and options.results_file:
                write_results(options.results_file, records)
        if is_main:
            remove_unfinished(options, names)
    finally:
        # print what we have even if a later model fails or the user interrupts
        if is_main and records:
            print_results(records, options)
    return records


def validate_model(
    name: str, options: EvalOptions, accelerator: 'Accelerator | None' = None, suite: Sequence[Found] = ()
) -> dict:
    """Evaluate one model and return its record; with --no-data, the values that need images are None.

    The oversmoothing curve is also None for a model without feature maps of its blocks, and health for one without
    approximate softmax attention. With a suite and no --data-dir, the accuracy is that on ImageNet's validation set.
    """
    device = options.device if accelerator is None else accelerator.device
    with PeakMemory(device) as memory:
        model, weights = load_model(
            name,
            img_size=options.img_size,
            num_classes=options.num_classes,
            checkpoint=options.checkpoint,
            pretrained=options.pretrained,
        )
        model = model.to(device)
        with autocast(device, options.amp_dtype):
            data_config = fit_data_config(name, model, options.img_size)
            probe = _create_probe(model, data_config['input_size'], options)
        # before the evaluation, because it fails if an operation has no formula
        gmacs = count_macs(model, data_config['input_size'][1:]) / 1e9
        with autocast(device, options.amp_dtype):
            scores = _evaluate(name, model, weights, data_config, probe, suite, options, accelerator)
            speed = _measure_speed(model, data_config['input_size'], options.timed_batch_size, accelerator)
    with autocast(device, options.amp_dtype):
        # outside PeakMemory, because exact attention needs more memory than the model
        health = _measure_health(name, model, weights, data_config, options, accelerator) if options.health else None
    height, width = data_config['input_size'][1:]
    # that of a trained model is of the published weights that it began with, or chosen by `vitzoo push`
    terms = model.pretrained_cfg.get('license') if weights in ('published', 'trained') else None
    record = dict(model=name, weights=weights, license=terms)
    record |= dict.fromkeys((*ACCURACY_KEYS, 'oversmoothing', 'token_statistics'))
    record |= dict(
        params=sum(parameter.numel() for parameter in model.parameters()),
        gmacs=gmacs,
        gflops=2 * gmacs,
        img_size=height if height == width else f'{height}x{width}',
        images_per_second=speed and speed.images_per_second,
        speed_doubt=speed and speed.doubt,
        peak_memory_mb=memory.megabytes,
        health=health,
    )
    return record | scores


def open_validation_data(
    data_dir: str,
    model: nn.Module,
    transform: Callable | None = None,
    run: str | None = None,
    options: DataOptions = NO_OPTIONS,
    weights: str = 'published',
    checkpoint: str | None = None,
) -> Images:
    """Open the validation split, with the model's class indices as labels.

    If `run` is a training run that held out images of this dataset, these are the validation split. Its data options
    are used if `options` does not have others. It is a folder, or a name, with `weights` and `checkpoint` as in
    `read_about`.

    Classes are matched by name if the model knows its class names: those it was trained on, or ImageNet's WordNet ids,
    of which the data may have a subset. Otherwise the class folders in natural order are the classes.

    Raises:
        UserError: The classes of the data are not the model's.
    """
    if not model.num_classes:
        raise UserError(f'{run or "the model"} has no classifier to be scored; use --ignore-labels')
    about = {} if run is None else read_about(run, weights, checkpoint)
    settings = {key: about[key] for key in ('multi_label', 'held_out') if key in about}
    options = merge_options(options, about, data_dir)
    dataset = open_dataset(data_dir, 'val', transform, options=options, **settings)
    class_names = label_names(model)
    if not class_names:
        subset = infer_imagenet_subset(model)
        class_names = ImageNetInfo(subset).label_names() if subset else []
        if not set(dataset.class_names) <= set(class_names):
            class_names = []
    if class_names:
        class_to_idx = {name: i for i, name in enumerate(class_names)}
        try:
            Images(dataset.reader, transform, class_to_idx)
        except UserError as error:
            if data_dir != 'sample':
                raise
            raise UserError(f'{error}; without --data-dir, a model is validated on the bundled sample') from error
        # after the check, so that no class of the data is taken for one that has only a number
        all_names = number_rest(class_names, model.num_classes)
        return Images(dataset.reader, transform, {name: i for i, name in enumerate(all_names)})
    if len(dataset.class_names) != model.num_classes:
        raise UserError(
            f'the model has {model.num_classes} classes and {data_dir} has {len(dataset.class_names)}, which are not '
            f"ImageNet's WordNet ids ({', '.join(dataset.class_names[:3])}, …); validate a model trained on these "
            'classes: the folder of its run, or --num-classes with --checkpoint'
        )
    return dataset


def _validate_predictions(path: str, options: EvalOptions) -> dict:
    """Compute the record of a file of predictions: accuracies and error analysis only."""
    predictions = read_predictions(path)
    summary = summarize(predictions.columns)
    record: dict[str, Any] = dict.fromkeys(RECORD_KEYS) | {key: summary.get(key) for key in ACCURACY_KEYS}
    record |= dict(model=path, weights='predictions')
    if options.errors:
        load_image = (
            None
            if options.data_dir is None
            else open_predicted(options.data_dir, predictions.files, options.data_options)
        )
        record |= write_error_analysis(options.errors, predictions, load_image)
    if options.results_file:
        write_results(options.results_file, [record])
    scores = f'top-1 {record["top1"]:.2f} %, top-5 {record["top5"]:.2f} %, loss {record["loss"]:.3f}'
    if record['map'] is not None:
        scores += f', mAP {record["map"]:.2f} %'
    print(f'{path}: {scores}, {count_of(record["n"], "image")}')
    print_calibration(record, options)
    return record


def _evaluate(
    name: str,
    model: nn.Module,
    weights: str,
    data_config: dict,
    probe: OversmoothingProbe | None,
    suite: Sequence[Found],
    options: EvalOptions,
    accelerator: 'Accelerator | None',
) -> dict:
    """Evaluate a model on --data-dir, with --corrupt under corruptions, and on the suite."""
    if suite:
        check_imagenet_classes(name, model)
    if options.corrupt:
        check_corruptible(name, data_config)
    scores = {}
    if options.has_data:
        images = _open_images(name, model, weights, eval_transform(data_config), options)
        columns = _score(name, model, images, probe, options, accelerator)
        scores = {key: value for key, value in summarize(columns).items() if not key.startswith('correct')}
        if options.ignore_labels:
            scores = dict(n=scores['n'])
        else:
            scores['images'] = images.fingerprint
        if probe is not None:
            scores['token_statistics'] = probe.describe(columns[probe.key])
            scores[probe.key] = scores['token_statistics']['cosine']['mean']
        if accelerator is None or accelerator.is_main_process:
            scores |= _write_predictions(images, columns, options)
        if options.corrupt:
            images.transform = None
            scores |= evaluate_corruptions(name, model, images, scores['top1'], data_config, options, accelerator)
    if suite:
        columns = evaluate_suite(name, model, suite, data_config, options, accelerator)
        scores = {key: columns.get(f'imagenet_{key}') for key in ('top1', 'top5', 'n')} | scores | columns
    return scores


def _open_images(name: str, model: nn.Module, weights: str, transform: Callable, options: EvalOptions) -> Any:
    """Open the validation images, or with --ignore-labels all images."""
    if options.ignore_labels:
        return UnlabelledImages(find_files([options.data]), transform)
    images = open_validation_data(
        options.data, model, transform, name, options.data_options, weights, options.checkpoint
    )
    if images.is_multi_label and (options.save_predictions or '').lower().endswith('.csv'):
        raise UserError(f'{options.data_dir} has several labels per image: save the predictions as .npz')
    if images.is_multi_label and options.errors:
        raise UserError(f'--errors needs one label per image, and {images.root} has several')
    return images


def _score(
    name: str,
    model: nn.Module,
    images: Any,
    probe: OversmoothingProbe | HealthProbe | None,
    options: EvalOptions,
    accelerator: 'Accelerator | None',
) -> dict[str, Tensor]:
    """Score the validation images, with the probe if there is one."""
    if getattr(images, 'is_held_out', False) and (accelerator is None or accelerator.is_main_process):
        missing = f', without {images.num_missing} that have gone or changed' if images.num_missing else ''
        print(
            f'vitzoo: evaluating the {len(images)} images of {options.data_dir} that {name} held out for'
            f' validation{missing}',
            file=sys.stderr,
        )
    if getattr(images, 'left_out', []) and (accelerator is None or accelerator.is_main_process):
        print(f'vitzoo: {images.describe_left_out()}', file=sys.stderr)
    score = partial(rank_classes, keep_logits=(options.save_predictions or '').lower().endswith('.npz'))
    with probe or nullcontext():
        return score_dataset(name, model, images, score, options, accelerator, probe)


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


def _measure_health(
    name: str,
    model: nn.Module,
    weights: str,
    data_config: dict,
    options: EvalOptions,
    accelerator: 'Accelerator | None',
) -> dict[str, dict[str, float]] | None:
    """Compare the mixers that approximate softmax attention with it, on the validation data."""
    try:
        probe = HealthProbe(model)
    except UserError as error:
        print(f'vitzoo: {name}: {error}', file=sys.stderr)
        return None
    with torch.no_grad(), probe:
        # one image, so that the probe knows its columns even in a process without a share of the data
        model(torch.zeros(1, *data_config['input_size'], device=next(model.parameters()).device))
    probe.per_image()
    transform = eval_transform(data_config)
    images = open_validation_data(
        options.data, model, transform, name, options.data_options, weights, options.checkpoint
    )
    return probe.report(summarize(_score(name, model, images, probe, options, accelerator))[probe.key])


def _measure_speed(
    model: nn.Module, input_size: tuple[int, int, int], batch_size: int, accelerator: 'Accelerator | None'
) -> Speed | None:
    """Measure the throughput in the main process."""
    images = torch.randn(batch_size, *input_size, device=next(model.parameters()).device)
    if accelerator is None:
        return measure_throughput(model, images)
    # one process at a time: processes on one machine would slow each other down
    accelerator.wait_for_everyone()
    speed = measure_throughput(model, images) if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    return speed


def _create_accelerator() -> 'Accelerator | None':
    """The `Accelerator` of processes started by `accelerate launch` or torchrun; None for a single process."""
    if int(os.environ.get('WORLD_SIZE', '1')) == 1:
        return None
    from accelerate import Accelerator

    # without cpu=True, Accelerate does not connect the processes of a machine without a GPU
    return Accelerator(cpu=not torch.accelerator.is_available())
