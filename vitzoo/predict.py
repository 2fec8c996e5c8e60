"""`vitzoo predict`: predict the most likely classes of images, as a table, CSV or JSON.

Examples:
    vitzoo predict photo.jpg --model runs/photos
    vitzoo predict holiday 'scans/**/*.png' more.tar --model runs/photos --out predictions.csv
    vitzoo predict holiday --model resnet50.a1_in1k --top-k 1 > predictions.csv

An image that cannot be read is reported on stderr and skipped, and the exit code is 1. Wrong arguments exit with 2.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TextIO

import torch
from torch import nn
from torch.utils.data import DataLoader

from vitzoo._files import replace_file
from vitzoo.classes import class_names, readable
from vitzoo.classifier import load_classifier, open_images, skip_unreadable
from vitzoo.data.unlabelled import find_files
from vitzoo.errors import CommandParser, run_command
from vitzoo.load import fit_data_config
from vitzoo.metrics.accuracy import most_likely
from vitzoo.metrics.finite import check_logits
from vitzoo.options import add_model_options, autocast, check_output, positive


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(_predict_and_exit, argv)


def predict(argv: list[str] | None = None) -> list[str]:
    """Run `vitzoo predict` with these arguments, and return the names of images that could not be read.

    Raises:
        UserError: There are no images, or the model or another option is not valid.
    """
    args = parse_args(argv)
    if args.out:
        check_output(args.out, ('.csv', '.json'))
    files = find_files(args.images)
    loaded = load_classifier(args)
    name, model = loaded.name, loaded.model
    with autocast(args.device, args.amp_dtype):
        loader = open_images(files, fit_data_config(name, model, args.img_size, args.crop_pct), args)
        top_k = min(args.top_k, model.num_classes)
        unreadable: list[str] = []
        is_multi_label = loaded.about.get('multi_label', False)
        records = predict_images(model, loader, top_k, is_multi_label, name)
        records = skip_unreadable(records, len(files), unreadable, 'predicting')
        if args.out is None and sys.stdout.isatty():
            names = class_names(model)
            _print_table(list(records), dict(zip(names, readable(names))))
        else:
            _write_predictions(records, top_k, args.out)
            if args.out:
                print(f'wrote {args.out}')
    return unreadable


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = __doc__.partition('\n')
    parser = CommandParser('vitzoo predict', description=summary, epilog=rest.rpartition('\n\n')[2])
    add = parser.add_argument
    add('images', nargs='+', metavar='IMAGES', help='files, folders, .tar or .zip archives, or globs in quotes')
    add('--model', required=True, help='folder of a trained model, or timm name')
    add('--top-k', type=positive, default=5, metavar='K', help='number of classes per image (default: 5)')
    add('--out', metavar='FILE', help='.csv or .json file (default: a table on a terminal, CSV in a pipe)')
    add_model_options(parser)
    return parser.parse_args(argv)


@torch.no_grad()
def predict_images(
    model: nn.Module, loader: DataLoader, top_k: int, is_multi_label: bool = False, name: str | None = None
) -> Iterator[dict]:
    """Yield the `top_k` most likely classes of each image of a loader of `ImageFiles`, in order.

    A record is {file, predictions: [{label, probability}, …]}, or {file, error} for an image that cannot be read.
    Probabilities are a softmax over the classes, or a sigmoid of each in a multi-label model.

    Args:
        name: Name of the model in errors.

    Raises:
        UserError: The logits are not finite.
    """
    names = class_names(model)
    device = next(model.parameters()).device
    for images, files, errors in loader:
        images = images.to(device, non_blocking=True)
        logits = model(images).float()
        check_logits(logits, model, images, files.__getitem__, name)
        top, prob = most_likely(logits, top_k, is_multi_label)
        for file, error, *best in zip(files, errors, top.tolist(), prob.tolist()):
            if error:
                yield dict(file=file, error=error)
                continue
            # rounded, because the last digits of a float depend on the batch size
            predictions = [dict(label=names[label], probability=round(value, 5)) for label, value in zip(*best)]
            yield dict(file=file, predictions=predictions)


def _write_predictions(records: Iterable[dict], top_k: int, path: str | None) -> None:
    """Write records to a .csv or .json file once all have arrived, or to stdout as CSV, each as it arrives."""
    if path is None:
        _write_csv(records, top_k, sys.stdout)
        return
    with replace_file(Path(path)) as partial, partial.open('w', newline='', encoding='utf-8') as file:
        if path.lower().endswith('.json'):
            json.dump(list(records), file, indent=2, ensure_ascii=False)
        else:
            _write_csv(records, top_k, file)


def _write_csv(records: Iterable[dict], top_k: int, file: TextIO) -> None:
    """Write one row per image: file, label, probability, label2, probability2, …"""
    writer = csv.writer(file, lineterminator='\n')
    numbers = ['', *range(2, top_k + 1)]
    writer.writerow(['file', *chain(*((f'label{n}', f'probability{n}') for n in numbers))])
    for record in records:
        best = [(item['label'], f'{item["probability"]:.5f}') for item in record['predictions']]
        writer.writerow([record['file'], *chain(*best)])


def _print_table(records: list[dict], words: dict[str, str]) -> None:
    """Print the most likely class of each image, and the others in a last column, all in words."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style='bold')
    table.add_column('image', overflow='fold')
    table.add_column('label')
    table.add_column('%', justify='right', no_wrap=True)
    table.add_column('other classes', style='dim')
    for record in records:
        first, *others = record['predictions']
        rest = ', '.join(f'{words[item["label"]]} {100 * item["probability"]:.1f}' for item in others)
        table.add_row(
            Text(record['file']), Text(words[first['label']]), f'{100 * first["probability"]:.1f}', Text(rest)
        )
    Console().print(table)


def _predict_and_exit(argv: list[str] | None) -> None:
    if predict(argv):
        raise SystemExit(1)


if __name__ == '__main__':
    main()
