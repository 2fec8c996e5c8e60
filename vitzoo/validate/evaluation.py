"""Evaluation of models: accuracy, size, speed, oversmoothing and health, as one record per model."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn
from torch.utils.data import Dataset

from vitzoo.data import Images, eval_transform, open_dataset
from vitzoo.data.unlabelled import UnlabelledImages, find_files
from vitzoo.data.variants import Found
from vitzoo.errors import UserError
from vitzoo.load import find_models, fit_data_config, label_names, load_model, read_about
from vitzoo.metrics import HealthProbe, OversmoothingProbe, count_macs, rank_classes, summarise
from vitzoo.metrics.oversmoothing import MEASURES
from vitzoo.metrics.speed import PeakMemory, images_per_second
from vitzoo.options import add_model_options, autocast, check_output
from vitzoo.validate.error_analysis import open_predicted, write_mistakes
from vitzoo.validate.predictions import FORMATS, Predictions, read_predictions, write_predictions
from vitzoo.validate.results import KEYS, print_health, print_robustness, print_table, write_results
from vitzoo.validate.robustness import check_classes, evaluate_corruptions, evaluate_suite, open_suite
from vitzoo.validate.scoring import score_dataset

DESCRIPTION = 'accuracy, size, speed, oversmoothing and health of models, in a table, a file and a figure'
DATA_DIR_HELP = """class folders, in a folder, .tar or .zip, or one that holds them in val/, validation/ or test/, or
WebDataset shards (wds/FOLDER), or data of torchvision or Hugging Face (torch/NAME, hfds/NAME); by default the bundled
sample, or with --suite none"""
MEASURES_HELP = f'what to measure of the tokens after each block: {",".join(MEASURES)} (default: cosine)'


def validate(argv: list[str] | None = None) -> list[dict]:
    """Validate the models that the command line names, and return one record per model.

    Raises:
        UserError: A model, a file, a folder or a size is not what it should be.
    """
    args = parse_args(argv)
    names = find_models(args.models)
    for option in ('checkpoint', 'save_predictions', 'errors'):
        if getattr(args, option) and len(names) > 1:
            flag = option.replace('_', '-')
            raise UserError(f'--{flag} {getattr(args, option)} is for one model, and there are {len(names)}')
    _check_outputs(args)
    if args.from_predictions:
        return [_validate_predictions(args)]
    accelerator = _accelerator()
    is_main = accelerator is None or accelerator.is_main_process
    suite = open_suite(args.data_root, args.allow_partial, is_main) if args.suite else []
    records = []
    try:
        for name in names:
            records.append(validate_model(name, args, accelerator, suite))
            if is_main and args.results_file:
                write_results(args.results_file, records)
    finally:
        # a mistake in the last model, or whoever interrupts it, leaves what was found of the others
        if is_main and records:
            _show(records, args)
    return records


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser('vitzoo validate', description=DESCRIPTION)
    add = parser.add_argument
    add('models', nargs='*', metavar='MODEL', help='a timm name, a wildcard in quotes, or a folder that training wrote')
    add('--data-dir', '--dataset', metavar='DIR', help=DATA_DIR_HELP)
    add('--ignore-labels', action='store_true', help='take all images in --data-dir, of any class; no accuracy')
    add('--no-data', action='store_true', help='report only what needs no images')
    add('--random-weights', action='store_true', help='do not fetch published weights')
    add_model_options(parser)
    add('--results-file', metavar='FILE', help='write one record per model, .csv or .json')
    add('--measures', type=_measures, default=('cosine',), metavar='NAMES', help=MEASURES_HELP)
    add('--absolute', action='store_true', help='take the absolute value of each cosine')
    add('--include-self', action='store_true', help='count each token among those it is similar to')
    add('--include-cls', action='store_true', help='count class and distillation tokens among the tokens')
    add('--plot', metavar='FILE', help='draw what --measures names over the blocks, .png')
    add('--health', action='store_true', help='compare what approximates softmax attention with it, in a second pass')
    add('--save-predictions', metavar='FILE', help='write what the model says of each image, .csv, or .npz with logits')
    add('--errors', metavar='DIR', help='write accuracy per class, confusion matrix, calibration and confused images')
    add('--from-predictions', metavar='FILE', help='from such a file again, without a model: the accuracy, --errors')
    add('--corrupt', action='store_true', help="also evaluate under ImageNet-C's 15 corruptions at 5 severities")
    add('--suite', choices=['robust'], help='also evaluate on the variants of ImageNet that lie in --data-root')
    add('--data-root', metavar='DIR', help='the folder with imagenet-a, imagenet-c, imagenetv2-… (docs/robustness.md)')
    add('--allow-partial', action='store_true', help='let images of the suite be missing; the columns say so')
    args = parser.parse_args(argv)
    if args.data_dir is None and not args.suite and not args.from_predictions:
        args.data_dir = 'sample'
    _check_args(parser, args)
    return args


def validate_model(name: str, args: argparse.Namespace, accelerator=None, suite: Sequence[Found] = ()) -> dict:
    """Measure one model and return its record; what needs images is None with --no-data.

    The oversmoothing curve is None also for a model without feature maps of its blocks, health for one in which nothing
    approximates softmax attention. With a suite and no data of one's own, the accuracy is that on ImageNet's validation
    set.
    """
    device = args.device if accelerator is None else accelerator.device
    with PeakMemory(device) as memory:
        model, weights = load_model(
            name,
            img_size=args.img_size,
            num_classes=args.num_classes,
            checkpoint=args.checkpoint,
            pretrained=not (args.no_data or args.random_weights),
        )
        model = model.to(device)
        with autocast(device, args.amp_dtype):
            data_config = fit_data_config(name, model, args.img_size)
            probe = _find_probe(model, data_config['input_size'], args)
        # before the evaluation, because it fails where an operation has no formula
        gmacs = count_macs(model, data_config['input_size'][1:]) / 1e9
        with autocast(device, args.amp_dtype):
            scores = _evaluate(name, model, data_config, probe, suite, args, accelerator)
            speed = _measure_speed(model, data_config['input_size'], args.batch_size, accelerator)
    with autocast(device, args.amp_dtype):
        # exact attention needs memory that is not the model's
        health = _measure_health(name, model, data_config, args, accelerator) if args.health else None
    height, width = data_config['input_size'][1:]
    return dict(
        model=name,
        weights=weights,
        **{key: scores.pop(key, None) for key in ('top1', 'top5', 'loss', 'n', 'map')},
        **{key: scores.pop(key, None) for key in ('oversmoothing', 'token_statistics')},
        params=sum(parameter.numel() for parameter in model.parameters()),
        gmacs=gmacs,
        gflops=2 * gmacs,
        img_size=height if height == width else f'{height}x{width}',
        images_per_second=speed,
        peak_memory_mb=memory.megabytes,
        health=health,
        **scores,
    )


def open_validation_data(data_dir: str, model: nn.Module, transform=None, run: str | None = None) -> Images:
    """Open the validation split with the labels of the model's classes.

    With the folder of a run that held images of this very data out of training, these are the validation split.

    Classes are found by name where the model knows their names: those it was trained on, or ImageNet's WordNet ids, of
    which the data may have only some. Without names, class folders in natural order are the classes.

    Raises:
        UserError: The data has other classes than the model.
    """
    about = {} if run is None else read_about(run)
    options = {key: about[key] for key in ('multi_label', 'held_out') if key in about}
    dataset = open_dataset(data_dir, 'val', transform, **options)
    class_names = label_names(model)
    if not class_names:
        subset = infer_imagenet_subset(model)
        class_names = ImageNetInfo(subset).label_names() if subset else []
        if not set(dataset.class_names) <= set(class_names):
            class_names = []
    if class_names:
        return Images(dataset.reader, transform, {name: i for i, name in enumerate(class_names)})
    if len(dataset.class_names) != model.num_classes:
        raise UserError(
            f'the model has {model.num_classes} classes and {data_dir} has {len(dataset.class_names)}, which are not '
            f"ImageNet's WordNet ids ({', '.join(dataset.class_names[:3])}, …); validate a model that was trained on "
            'these classes: its folder, or --num-classes with --checkpoint'
        )
    return dataset


def _check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if bool(args.models) == bool(args.from_predictions):
        parser.error('name at least one MODEL, or give --from-predictions FILE alone')
    if args.from_predictions:
        return _check_predictions_args(parser, args)
    if bool(args.suite) != bool(args.data_root):
        parser.error('--suite robust and --data-root DIR go together')
    if args.suite and args.no_data:
        parser.error('--suite needs images: drop --no-data')
    if args.ignore_labels and args.data_dir in (None, 'sample'):
        parser.error('--ignore-labels takes any images: name them with --data-dir')
    for option in ('health', 'save_predictions', 'errors', 'corrupt'):
        if getattr(args, option) and args.ignore_labels:
            parser.error(f'--{option.replace("_", "-")} needs the labels: drop --ignore-labels')
    for option in ('plot', 'health', 'save_predictions', 'errors', 'corrupt'):
        if getattr(args, option) and (args.no_data or args.data_dir is None):
            remedy = 'drop --no-data' if args.no_data else 'name them with --data-dir'
            parser.error(f'--{option.replace("_", "-")} needs images: {remedy}')


def _check_predictions_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what only a model can answer."""
    default = vars(parser.parse_args([]))
    for option, value in vars(args).items():
        if option not in ('from_predictions', 'results_file', 'errors', 'data_dir') and value != default[option]:
            parser.error(f'--{option.replace("_", "-")} needs a MODEL; --from-predictions has none')
    if args.data_dir and not args.errors:
        parser.error('--from-predictions needs --data-dir only for the images that --errors shows')


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse a file that cannot be written before the work begins."""
    formats = dict(results_file=('.csv', '.json'), plot=('.png', '.pdf', '.svg'), save_predictions=FORMATS)
    for option, suffixes in formats.items():
        if getattr(args, option):
            check_output(getattr(args, option), suffixes)
    if args.errors:
        check_output(f'{args.errors}/per_class.csv', ('.csv',))


def _validate_predictions(args: argparse.Namespace) -> dict:
    """Compute the record of a file of predictions, which has no more than accuracies and mistakes."""
    predictions = read_predictions(args.from_predictions)
    scores = summarise(predictions.columns)
    record = dict.fromkeys(KEYS) | {key: scores.get(key) for key in ('top1', 'top5', 'loss', 'n', 'map')}
    record |= dict(model=args.from_predictions, weights='predictions')
    if args.errors:
        images = None if args.data_dir is None else open_predicted(args.data_dir, predictions.files)
        record |= write_mistakes(args.errors, predictions, images)
    if args.results_file:
        write_results(args.results_file, [record])
    print('{model}: top-1 {top1:.2f} %, top-5 {top5:.2f} %, loss {loss:.3f}, {n:,} images'.format(**record))
    _print_mistakes(record, args)
    return record


def _evaluate(
    name: str,
    model: nn.Module,
    data_config: dict,
    probe,
    suite: Sequence[Found],
    args: argparse.Namespace,
    accelerator,
) -> dict:
    """Everything that needs images but health: accuracy, and what --corrupt and --suite add to it."""
    if suite:
        check_classes(name, model)
    scores = {}
    if not args.no_data and args.data_dir is not None:
        images = _open_images(name, model, eval_transform(data_config), args)
        columns = _score(name, model, images, probe, args, accelerator)
        scores = {key: value for key, value in summarise(columns).items() if not key.startswith('correct')}
        if args.ignore_labels:
            scores = dict(n=scores['n'])
        if probe is not None:
            scores['token_statistics'] = probe.describe(columns[probe.key])
            scores[probe.key] = scores['token_statistics']['cosine']['mean']
        if accelerator is None or accelerator.is_main_process:
            scores |= _write_rows(images, columns, args)
        if args.corrupt:
            images.transform = None
            scores |= evaluate_corruptions(name, model, images, scores['top1'], data_config, args, accelerator)
    if suite:
        columns = evaluate_suite(name, model, suite, data_config, args, accelerator)
        scores = {key: columns.get(f'imagenet_{key}') for key in ('top1', 'top5', 'n')} | scores | columns
    return scores


def _open_images(name: str, model: nn.Module, transform: Callable, args: argparse.Namespace) -> Dataset:
    """The validation images, or all that there are where their labels do not matter."""
    if args.ignore_labels:
        return UnlabelledImages(find_files([args.data_dir]), transform)
    images = open_validation_data(args.data_dir, model, transform, run=name)
    if images.is_multi_label and (args.save_predictions or '').lower().endswith('.csv'):
        raise UserError(f'{args.data_dir} has several labels for an image: save the predictions as .npz')
    if images.is_multi_label and args.errors:
        raise UserError(f'--errors is for images with one label, and those of {images.root} have several')
    return images


def _write_rows(images: Images, columns: dict[str, Tensor], args: argparse.Namespace) -> dict:
    """Write what --save-predictions and --errors ask for, and return what the latter adds to the scores."""
    if not args.save_predictions and not args.errors:
        return {}
    files = [images.filename(index) for index in range(len(images))]
    predictions = Predictions(files, dict(enumerate(images.class_names)), columns)
    if args.save_predictions:
        write_predictions(args.save_predictions, predictions)
    if not args.errors:
        return {}
    untouched = copy(images)
    untouched.transform = None
    return write_mistakes(args.errors, predictions, lambda index: untouched[index][0])


def _print_mistakes(record: dict, args: argparse.Namespace) -> None:
    if args.errors:
        print(f'\nexpected calibration error {record["ece"]:.2f} %; who is taken for whom is in {args.errors}')


def _show(records: list[dict], args: argparse.Namespace) -> None:
    print_table(records, _title(args, records[0]['n']))
    print_health(records)
    print_robustness(records)
    _print_mistakes(records[0], args)
    if args.plot:
        # imported here, because only who asks for a figure waits for matplotlib
        from vitzoo.figures import plot_curves

        plot_curves(args.plot, records)


def _score(name: str, model: nn.Module, images: Dataset, probe, args: argparse.Namespace, accelerator) -> dict:
    """Score the validation images with a probe, if there is one, watching."""
    if getattr(images, 'is_held_out', False) and (accelerator is None or accelerator.is_main_process):
        share = f'the {len(images)} images that {name} held out of its training'
        print(f'vitzoo: of {args.data_dir}, {share}', file=sys.stderr)
    score = partial(rank_classes, keep_logits=(args.save_predictions or '').lower().endswith('.npz'))
    with probe or nullcontext():
        return score_dataset(name, model, images, score, args, accelerator, probe)


@torch.no_grad()
def _find_probe(
    model: nn.Module, input_size: tuple[int, int, int], args: argparse.Namespace
) -> OversmoothingProbe | None:
    """A probe of the model's blocks, tried on an image; None where they cannot be watched, and a line that says why."""
    images = torch.zeros(1, *input_size, device=next(model.parameters()).device)
    options = {key: getattr(args, key) for key in ('measures', 'absolute', 'include_self', 'include_cls')}
    try:
        with OversmoothingProbe(model, **options) as probe:
            model(images)
    except UserError as error:
        print(f'vitzoo: {error}', file=sys.stderr)
        return None
    probe.per_image()
    return probe


def _measure_health(
    name: str, model: nn.Module, data_config: dict, args: argparse.Namespace, accelerator
) -> dict[str, dict[str, float]] | None:
    """Compare the mixers that approximate softmax attention with it on the validation data."""
    try:
        probe = HealthProbe(model)
    except UserError as error:
        print(f'vitzoo: {name}: {error}', file=sys.stderr)
        return None
    with torch.no_grad(), probe:
        # an image shows what each mixer has to say, also to a process with no share of the data
        model(torch.zeros(1, *data_config['input_size'], device=next(model.parameters()).device))
    probe.per_image()
    images = open_validation_data(args.data_dir, model, eval_transform(data_config), run=name)
    return probe.report(summarise(_score(name, model, images, probe, args, accelerator))[probe.key])


def _measure_speed(model: nn.Module, input_size: tuple[int, int, int], batch_size: int, accelerator) -> float | None:
    """Time batches of the given size in the main process; on a CPU of at most 8 images, more only take longer."""
    device = next(model.parameters()).device
    batch_size = min(batch_size, 8) if device.type == 'cpu' else batch_size
    images = torch.randn(batch_size, *input_size, device=device)
    if accelerator is None:
        return images_per_second(model, images)
    # processes that share a machine would slow each other down
    accelerator.wait_for_everyone()
    speed = images_per_second(model, images) if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    return speed


def _accelerator():
    """The processes that `accelerate launch` or torchrun started; None where there is one."""
    if int(os.environ.get('WORLD_SIZE', '1')) == 1:
        return None
    from accelerate import Accelerator

    # without cpu=True, processes on a machine without an accelerator would not see each other
    return Accelerator(cpu=not torch.accelerator.is_available())


def _title(args: argparse.Namespace, num_images: int | None) -> str:
    device = torch.cuda.get_device_name(args.device) if args.device.type == 'cuda' else args.device.type
    data = f'the suite in {args.data_root}' if args.suite else 'no images'
    if num_images is not None:
        data = f'{num_images:,} images of {args.data_dir or "ImageNet"}'
    world = int(os.environ.get('WORLD_SIZE', '1'))
    processes = f', {world} processes' if world > 1 else ''
    ways = dict(absolute='absolute', include_self='with self-pairs', include_cls='with class tokens')
    ways = ', '.join(way for option, way in ways.items() if getattr(args, option))
    ways = f', cosine {ways}' if ways else ''
    return f'{data}, {device}, {args.amp_dtype}, batches of {args.batch_size}{processes}{ways}'


def _measures(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(['cosine', *(name.strip() for name in text.split(','))]))
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        raise argparse.ArgumentTypeError(f"'{unknown[0]}' is not one of {', '.join(MEASURES)}")
    return names
