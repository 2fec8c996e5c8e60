"""Options of `vitzoo validate`: the command line and its checks."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from vitzoo.about import is_trained_folder
from vitzoo.data.options import DATA_OPTIONS, DataOptions
from vitzoo.errors import CommandParser, UserError, format_flag
from vitzoo.metrics.oversmoothing import MEASURES
from vitzoo.options import add_data_options, add_model_options, check_model_kwargs, check_output
from vitzoo.validate.predictions import FORMATS

_DESCRIPTION = 'accuracy, size, speed, oversmoothing and health of models, as a table, a file and a figure'
_DATA_DIR_HELP = """class folders, in a folder, .tar or .zip, or in its val/, validation/ or test/; WebDataset shards
(wds/FOLDER); or a dataset of torchvision (torch/NAME) or Hugging Face (hfds/NAME) (default: the bundled sample, or no
data with --suite)"""
_NO_MODEL = 'name at least one MODEL, or give --from-predictions FILE alone'
_MEASURES_HELP = f'measures of the tokens after each block: {",".join(MEASURES)} (default: cosine)'


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of an evaluation, named after those of `vitzoo validate`."""

    device: torch.device
    amp_dtype: str
    batch_size: int
    workers: int
    models: Sequence[str] = ()
    data_dir: str | None = None
    train_split: str | None = None
    val_split: str | None = None
    input_key: str | None = None
    target_key: str | None = None
    data_subset: str | None = None
    class_map: str | None = None
    ignore_labels: bool = False
    no_data: bool = False
    random_weights: bool = False
    checkpoint: str | None = None
    num_classes: int | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    img_size: tuple[int, int] | None = None
    crop_pct: float | None = None
    results_file: str | None = None
    measures: tuple[str, ...] = ('cosine',)
    absolute: bool = False
    include_self: bool = False
    include_cls: bool = False
    plot: str | None = None
    health: bool = False
    save_predictions: str | None = None
    errors: str | None = None
    from_predictions: str | None = None
    corrupt: bool = False
    suite: str | None = None
    data_root: str | None = None
    allow_partial: bool = False

    @property
    def has_data(self) -> bool:
        """True if models are evaluated on `data_dir`."""
        return self.data_dir is not None and not self.no_data

    @property
    def data(self) -> str:
        """`data_dir` of an evaluation that has data."""
        assert self.data_dir is not None
        return self.data_dir

    @property
    def timed_batch_size(self) -> int:
        """Images per batch in the measurement of speed; on a CPU at most 8, to save time."""
        return min(self.batch_size, 8) if self.device.type == 'cpu' else self.batch_size

    @property
    def data_options(self) -> DataOptions:
        """The options that say how `data_dir` is laid out."""
        return DataOptions(**{name: getattr(self, name) for name in DATA_OPTIONS})

    @property
    def pretrained(self) -> bool:
        """True if published weights are downloaded."""
        return not (self.no_data or self.random_weights)


def parse_args(argv: list[str] | None = None, no_model: str = _NO_MODEL) -> EvalOptions:
    """Read the command line; `no_model` is the error if it neither has a model nor takes one's place."""
    # an option that is not given is left to the defaults of EvalOptions
    parser = CommandParser('vitzoo validate', description=_DESCRIPTION, argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add('models', nargs='*', metavar='MODEL', help='a timm name, a wildcard in quotes, or a folder of a training run')
    add('--data-dir', '--dataset', metavar='DIR', help=_DATA_DIR_HELP)
    add_data_options(parser)
    add('--ignore-labels', action='store_true', help='use all images in --data-dir, labelled or not; no accuracy')
    add('--no-data', action='store_true', help='only report what needs no images')
    add('--random-weights', action='store_true', help='do not download pretrained weights')
    add_model_options(parser)
    add('--results-file', metavar='FILE', help='write one record per model, .csv or .json')
    add('--measures', type=_measures, metavar='NAMES', help=_MEASURES_HELP)
    add('--absolute', action='store_true', help='average the absolute values of the cosines')
    add('--include-self', action='store_true', help="include each token's cosine with itself")
    add('--include-cls', action='store_true', help='include class and distillation tokens')
    add('--plot', metavar='FILE', help='plot the --measures over the blocks, .png, .pdf or .svg')
    add('--health', action='store_true', help='compare approximate with exact softmax attention, in a second pass')
    add('--save-predictions', metavar='FILE', help='write the predictions of each image, .csv, or .npz with logits')
    add('--errors', metavar='DIR', help='write per-class accuracy, confusion matrix, calibration and confused images')
    add('--from-predictions', metavar='FILE', help='compute accuracy and --errors from saved predictions; no model')
    add('--corrupt', action='store_true', help="also evaluate under ImageNet-C's 15 corruptions at 5 severities")
    add('--suite', choices=['robust'], help='also evaluate on the variants of ImageNet in --data-root')
    add('--data-root', metavar='DIR', help='folder of imagenet-a, imagenet-c, imagenetv2-… (docs/robustness.md)')
    add('--allow-partial', action='store_true', help='accept incomplete sets of the suite; their columns are marked')
    options = EvalOptions(**vars(parser.parse_args(argv)))
    if options.data_dir is None and not options.suite and not options.from_predictions:
        options = replace(options, data_dir='sample')
    _check_options(parser, options, no_model)
    return options


def check_models(options: EvalOptions, names: Sequence[str]) -> None:
    """Raise UserError if an option for one model is given with several, or one that discards the weights of a run."""
    check_model_kwargs(options.model_kwargs)
    trained = [name for name in names if is_trained_folder(name)]
    if options.num_classes is not None and options.checkpoint is None and trained:
        raise UserError(
            f'--num-classes {options.num_classes} is for the weights of a --checkpoint; {trained[0]} has its own'
        )
    for name in ('checkpoint', 'save_predictions', 'errors'):
        if getattr(options, name) and len(names) > 1:
            raise UserError(
                f'{format_flag(name)} {getattr(options, name)} is for one model, but there are {len(names)}'
            )


def check_outputs(options: EvalOptions) -> None:
    """Raise UserError if an output file cannot be written or is given twice, before the evaluation starts."""
    formats = dict(results_file=('.csv', '.json'), plot=('.png', '.pdf', '.svg'), save_predictions=FORMATS)
    for name, suffixes in formats.items():
        if getattr(options, name):
            check_output(getattr(options, name), suffixes)
    if options.errors:
        check_output(f'{options.errors}/per_class.csv', ('.csv',))
    _check_different(options)


def _check_different(options: EvalOptions) -> None:
    """Raise UserError if two outputs, or an output and --from-predictions, are the same file."""
    # lazy: importing the datasets takes a second
    from vitzoo.validate.error_analysis import FILES

    given = [
        (name, getattr(options, name)) for name in ('from_predictions', 'results_file', 'plot', 'save_predictions')
    ]
    paths = [(name, path) for name, path in given if path]
    paths += [('errors', f'{options.errors}/{name}') for name in FILES if options.errors]
    owners: dict[Path, str] = {}
    for name, path in paths:
        other = owners.setdefault(Path(path).resolve(), name)
        if other != name:
            raise UserError(
                f"{format_flag(other)} and {format_flag(name)} are both '{path}', and one would overwrite the other; "
                'give two names'
            )


def _check_options(parser: argparse.ArgumentParser, options: EvalOptions, no_model: str) -> None:
    """Reject options that contradict each other."""
    if bool(options.models) == bool(options.from_predictions):
        parser.error(no_model)
    if options.from_predictions:
        return _check_predictions_options(parser, options)
    if bool(options.suite) != bool(options.data_root):
        parser.error('--suite robust and --data-root DIR go together')
    if options.suite and options.no_data:
        parser.error('--suite needs images: drop --no-data')
    if options.ignore_labels and options.data_dir in (None, 'sample'):
        parser.error('--ignore-labels needs --data-dir')
    for name in ('health', 'save_predictions', 'errors', 'corrupt', *DATA_OPTIONS):
        if getattr(options, name) and options.ignore_labels:
            parser.error(f'{format_flag(name)} needs labels: drop --ignore-labels')
    for name in ('plot', 'health', 'save_predictions', 'errors', 'corrupt', *DATA_OPTIONS):
        if getattr(options, name) and not options.has_data:
            remedy = 'drop --no-data' if options.no_data else 'give --data-dir'
            parser.error(f'{format_flag(name)} needs images: {remedy}')


def _check_predictions_options(parser: argparse.ArgumentParser, options: EvalOptions) -> None:
    """Reject options that need a model."""
    default = EvalOptions(**vars(parser.parse_args([])))
    for name in (each.name for each in fields(options)):
        is_allowed = name in ('from_predictions', 'results_file', 'errors', 'data_dir', *DATA_OPTIONS)
        if not is_allowed and getattr(options, name) != getattr(default, name):
            parser.error(f'{format_flag(name)} needs a MODEL; --from-predictions has none')
    for name in DATA_OPTIONS:
        if getattr(options, name) and not options.data_dir:
            parser.error(f'{format_flag(name)} needs --data-dir')
    if options.data_dir and not options.errors:
        parser.error('--from-predictions needs --data-dir only for the images that --errors shows')


def _measures(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(['cosine', *(name.strip() for name in text.split(','))]))
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        raise argparse.ArgumentTypeError(f"'{unknown[0]}' is not one of {', '.join(MEASURES)}")
    return names
