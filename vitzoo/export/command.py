"""The command line of `vitzoo export`."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import vitzoo
from vitzoo.classes import class_names
from vitzoo.errors import CommandParser, UserError
from vitzoo.export.formats import FILE_FORMATS, check_packages, write_file
from vitzoo.load import LoadedModel, find_model, fit_data_config, load_as_chosen
from vitzoo.options import (
    add_keywords,
    check_model_kwargs,
    check_num_classes,
    check_output,
    crop_pct,
    nonnegative,
    positive,
    size,
)

# traced with the first number of images, and compared with all
_BATCH_SIZES = (2, 1, 3)
_MB = 1e6


def export_to_file(argv: list[str] | None = None) -> None:
    """Run `vitzoo export` with these arguments.

    Raises:
        UserError: The model or an option is not valid, the model has no weights or cannot be exported, or the file's
            logits differ.
    """
    args = parse_args(argv)
    file_format = FILE_FORMATS[args.to]
    check_output(args.out, (file_format.suffix,))
    if Path(args.out).suffix != file_format.suffix:
        # OpenVINO's writer takes no other
        raise UserError(f"the name of the file '{args.out}' must end in {file_format.suffix} in lower case")
    check_num_classes(args.num_classes, args.checkpoint)
    check_model_kwargs(args.model_kwargs)
    check_packages(f'--to {args.to}', args.to)
    name = find_model(args.model)
    loaded = load_as_chosen(name, args)
    if not args.random_weights:
        loaded.require_weights()
    model = loaded.model
    data_config = fit_data_config(name, model, args.img_size, args.crop_pct)
    batches = random_batches(data_config['input_size'])
    out = Path(args.out)
    with TemporaryDirectory(dir=out.parent) as folder:
        written = Path(folder, out.name)
        write_file(args.to, model, batches[0], written, describe_export(loaded, data_config))
        difference, largest = compare_logits(model, file_format.open(written), batches)
        # also if the logits are not finite
        if not difference <= args.tolerance * largest < math.inf:
            raise UserError(
                f'the logits of the {args.to} file of {name} differ from those of the model by {difference:.1e}, with '
                f'logits up to {largest:.1e}, more than --tolerance {args.tolerance:g} allows; it was not kept'
            )
        megabytes = sum(path.stat().st_size for path in Path(folder).iterdir()) / _MB
        # OpenVINO has a second file for the weights
        for path in Path(folder).iterdir():
            os.replace(path, out.parent / path.name)
    sides = ' x '.join(map(str, data_config['input_size']))
    origin = loaded.weights.removesuffix(' weights')
    print(f'wrote {out} ({megabytes:,.1f} MB): {name}, {origin} weights, for any number of images of {sides}')
    print(f'largest difference from the logits of the model: {difference:.1e}, with logits up to {largest:.1e}')


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo export', description='Write a model to a file for another runtime.')
    add = parser.add_argument
    suffixes = ', '.join(f'{file_format.suffix} for {name}' for name, file_format in FILE_FORMATS.items())
    add('model', metavar='MODEL', help='folder of a trained, converted or swapped model, or timm name')
    add('--to', choices=FILE_FORMATS, required=True, help='format of the file')
    add('--out', required=True, metavar='FILE', help=f'file to write ({suffixes})')
    add('--checkpoint', metavar='FILE', help='weights to load, .safetensors or .pth')
    add('--num-classes', type=positive, metavar='N', help='number of classes of the checkpoint')
    add('--random-weights', action='store_true', help='allow a model without weights, to measure its speed')
    add_keywords(parser, '--model-kwargs', 'arguments of the model')
    add('--img-size', type=size, metavar='N', help='image size, N or HxW (default: that of the model)')
    add('--crop-pct', type=crop_pct, metavar='P', help="center crop of the metadata, a fraction (default: the model's)")
    add('--tolerance', type=nonnegative, default=1e-3, metavar='T',
        help='largest difference of the logits, as a fraction of the largest logit (default: 1e-3)')  # fmt: skip
    return parser.parse_args(argv)


def random_batches(input_size: tuple[int, int, int]) -> list[torch.Tensor]:
    """Batches of random images, like normalized ones, with each of the batch sizes to compare."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch_size, *input_size, generator=generator) for batch_size in _BATCH_SIZES]


def describe_export(loaded: LoadedModel, data_config: dict) -> dict:
    """The facts about a model that its file has as metadata."""
    facts: dict[str, Any] = dict(model=loaded.name, weights=loaded.weights, vitzoo=vitzoo.__version__)
    facts['class_names'] = class_names(loaded.model)
    if loaded.license:
        facts['license'] = loaded.license
    # logits of several labels need a sigmoid each
    facts['multi_label'] = loaded.about.get('multi_label', False)
    keys = ('input_size', 'mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')
    return facts | {key: data_config[key] for key in keys}


@torch.no_grad()
def compare_logits(
    model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], batches: list[torch.Tensor]
) -> tuple[float, float]:
    """The largest difference between the logits of a model and of its file, and the model's largest logit."""
    difference = largest = 0.0
    for images in batches:
        logits = model(images)
        difference = max(difference, _largest(run(images) - logits))
        largest = max(largest, _largest(logits))
    return difference, largest


def _largest(x: torch.Tensor) -> float:
    """The largest absolute value, infinite if any is not a number."""
    largest = x.abs().max().item()
    return math.inf if math.isnan(largest) else largest
