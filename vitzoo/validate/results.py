"""Output of an evaluation: tables in the terminal, and a CSV or JSON file."""

import csv
import json
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitzoo._files import replace_file
from vitzoo.metrics.speed import format_speed
from vitzoo.options import num_processes
from vitzoo.validate.options import EvalOptions

if TYPE_CHECKING:
    from rich.table import Table

RECORD_KEYS = (
    'model',
    'license',
    'top1',
    'top5',
    'loss',
    'n',
    'images',
    'params',
    'gmacs',
    'gflops',
    'img_size',
    'crop_pct',
    'images_per_second',
    'speed_doubt',
    'peak_memory_mb',
    'oversmoothing',
    'token_statistics',
    'health',
    'map',
    'labelled',
)
# key: heading of two lines, to fit a terminal of 80 columns, and the function that formats a value
HEADINGS: dict[str, tuple[str, Callable[[Any], str]]] = {
    'top1': ('top-1\n%', '{:.2f}'.format),
    'top5': ('top-5\n%', '{:.2f}'.format),
    'map': ('mAP\n%', '{:.2f}'.format),
    'loss': ('\nloss', '{:.3f}'.format),
    'params': ('params\nM', '{:.2f}'.format),
    'gmacs': ('GMACs\nGFLOPs', '{:.3f}'.format),
    'img_size': ('\nsize', str),
    'images_per_second': ('images\n/s', format_speed),
    'peak_memory_mb': ('peak\nMB', '{:,.0f}'.format),
    'oversmoothing': ('last\ncosine', '{:.3f}'.format),
}
SUITE_ROWS = {
    'imagenet_9_gap': 'ImageNet-9 gap, in points',
    'imagenet_c_top1': 'ImageNet-C, mean',
    'imagenet_c_mce': "ImageNet-C mCE, AlexNet's is 100",
    'imagenet_c_mce_unnormalized': 'ImageNet-C mCE, unnormalized',
}
CORRUPTION_TABLES = {
    'imagenet_c': 'ImageNet-C',
    'imagenet_c_partial': 'a part of ImageNet-C',
    'corrupt': 'corrupted images',
}


def write_results(path: str, records: list[dict]) -> None:
    """Write one record per model with `RECORD_KEYS`, and with the keys of the robustness evaluation if there was one.

    Undefined values are null in JSON and empty in CSV; a CSV cell with a list or a dict is JSON.
    """
    more = [key for record in records for key in record if key not in (*RECORD_KEYS, 'weights')]
    keys = (*RECORD_KEYS, *dict.fromkeys(more))
    records = [{key: without_nan(record.get(key)) for key in keys} for record in records]
    # the file has the records of earlier models, which an interruption must not truncate
    with replace_file(Path(path)) as partial, partial.open('w', newline='', encoding='utf-8') as file:
        if Path(path).suffix.lower() == '.json':
            json.dump(records, file, indent=2, allow_nan=False)
        else:
            writer = csv.DictWriter(file, keys)
            writer.writeheader()
            writer.writerows({key: _to_csv(value) for key, value in record.items()} for record in records)


def print_results(records: list[dict], options: EvalOptions) -> None:
    """Print all tables of the records, and draw the figure of --plot."""
    print_records(records, _format_title(options, {record['n'] for record in records}))
    if have_different_images(records):
        print(f'the models are evaluated on different images of {options.data_dir}, such as those that each held out')
    print_health(records)
    print_robustness(records)
    print_calibration(records[0], options)
    if options.plot:
        # lazy: importing matplotlib takes a second
        from vitzoo.figures import draw_token_statistics

        draw_token_statistics(options.plot, records)


def print_calibration(record: dict, options: EvalOptions) -> None:
    """Print the calibration error and the folder of --errors."""
    if options.errors:
        print(f'\nexpected calibration error {record["ece"]:.2f} %; error analysis in {options.errors}')


def print_records(records: list[dict], title: str) -> None:
    """Print the records as a table, with params in millions and the oversmoothing of the last block."""
    from rich.table import Table
    from rich.text import Text

    # names and paths as text: their brackets are no markup
    table = Table(title=Text(title), title_justify='left', box=None, pad_edge=False, header_style='bold')
    table.add_column('\nmodel', overflow='fold')
    # mAP is for multi-label data
    has_map = any(record['map'] is not None for record in records)
    headings = {key: heading for key, heading in HEADINGS.items() if key != 'map' or has_map}
    for heading, _ in headings.values():
        table.add_column(heading, justify='right', no_wrap=True)
    doubts = []
    for record in records:
        curve = record['oversmoothing']
        shown = {**record, 'params': record['params'] / 1e6, 'oversmoothing': curve[-1] if curve else None}
        shown = without_nan({key: shown[key] for key in headings})
        cells = {key: '–' if shown[key] is None else form(shown[key]) for key, (_, form) in headings.items()}
        if record.get('speed_doubt'):
            cells['images_per_second'] += '?'
            doubts.append(f'{record["model"]} ({record["speed_doubt"]})')
        # stacked in one cell as in the heading, so that they cannot be confused
        cells['gmacs'] += f'\n{record["gflops"]:.3f}'
        table.add_row(Text(record['model']).append(f'\n{format_weights(record)}', style='dim'), *cells.values())
    _print_wide(table)
    if doubts:
        print(f'? images/s are unreliable, measure again: {", ".join(doubts)}')


def have_different_images(records: list[dict]) -> bool:
    """Return True if the scores of some records are of other images than those of others."""
    return len({record['images'] for record in records if record.get('images')}) > 1


def format_weights(record: dict) -> str:
    """The origin of a model's weights and, if it is known, their licence; before them, the --model-kwargs in lines."""
    arguments = [f'{key}={value}\n' for key, value in record.get('model_kwargs', {}).items()]
    return ''.join(arguments) + ', '.join(filter(None, [record.get('weights'), record.get('license')]))


def print_robustness(records: list[dict]) -> None:
    """Print the suite with a column per model, then the tables of corruptions of each model."""
    from vitzoo.data.variants import SUITE

    titles = {f'{key}_top1': title for variant in SUITE for key, title in variant.titles.items()} | SUITE_ROWS
    titles |= {f'{key}_partial': f'{title} (part of it)' for key, title in titles.items()}
    rows = []
    for key, title in titles.items():
        values = [record.get(key) for record in records]
        if any(value is not None for value in values):
            n = records[0].get(key.replace('_top1', '_n')) if '_top1' in key else None
            rows.append([title, *values, n and f'{n:,}'])
    if rows:
        _print_grid('Robustness: top-1 %', ['', *(record['model'] for record in records), 'images'], rows)
    for record in records:
        for key, title in CORRUPTION_TABLES.items():
            if key in record:
                _print_corruptions(f'{record["model"]} on {title}: top-1 %', record[key])
        if record.get('corrupt_relative') is not None:
            print('clean {top1:.2f}, corrupted {corrupt_top1:.2f} ({corrupt_relative:.1f} % of clean)'.format(**record))


def print_health(records: list[dict]) -> None:
    """Print the health of each model, with a row per mixer; lower is better in every column."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    for record in records:
        if not record['health']:
            continue
        title = Text(f'\nhealth of {record["model"]}')
        table = Table(title=title, title_justify='left', box=None, pad_edge=False, header_style='bold')
        signs = dict.fromkeys(sign for mixer in record['health'].values() for sign in mixer)
        table.add_column('mixer', overflow='fold')
        for sign in signs:
            table.add_column(sign.replace('_', ' '), justify='right')
        for mixer, values in record['health'].items():
            table.add_row(mixer, *('–' if sign not in values else format(values[sign], '.3f') for sign in signs))
        Console().print(table)


def without_nan(value: Any) -> Any:
    """Replace nan and infinities, which JSON does not have, with None, also inside lists and dicts."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Mean of numbers, or None if one is None."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _format_title(options: EvalOptions, num_images: set[int | None]) -> str:
    """Data, device, precision, batch sizes and the options of the cosine."""
    device = torch.cuda.get_device_name(options.device) if options.device.type == 'cuda' else options.device.type
    data = f'the suite in {options.data_root}' if options.suite else 'no images'
    if num_images != {None}:
        counts = ' or '.join(f'{count:,}' for count in sorted(filter(None, num_images)))
        data = f'{counts} images of {options.data_dir or "ImageNet"}'
    batches = f'batches of {options.batch_size}'
    if options.timed_batch_size != options.batch_size:
        batches += f' ({options.timed_batch_size} for images/s)'
    parts = [data, device, options.amp_dtype, batches]
    if num_processes() > 1:
        parts.append(f'{num_processes()} processes')
    cosine = dict(absolute='absolute', include_self='with self-pairs', include_cls='with class tokens')
    chosen = [words for name, words in cosine.items() if getattr(options, name)]
    if chosen:
        parts.append(f'cosine {", ".join(chosen)}')
    return ', '.join(parts)


def _print_corruptions(title: str, table: dict[str, list[float | None]]) -> None:
    """Print the accuracy under each corruption with a column per severity; means of incomplete rows are left out."""
    rows = [[name, *values, mean_or_none(values)] for name, values in table.items()]
    mean = [mean_or_none(values) for values in zip(*(row[1:] for row in rows))]
    _print_grid(title, ['severity', '1', '2', '3', '4', '5', 'mean'], [*rows, ['mean', *mean]])


def _print_grid(title: str, columns: list[str], rows: list[list]) -> None:
    """Print a table of names and of numbers with two decimals."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f'\n{title}'), title_justify='left', box=None, pad_edge=False, header_style='bold')
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify='right' if number else 'left', overflow='fold')
    for row in rows:
        table.add_row(*map(_format_cell, row))
    _print_wide(table)


def _format_cell(value: str | float | None) -> str:
    if value is None:
        return '–'
    return f'{value:.2f}' if isinstance(value, float) else value


def _print_wide(table: 'Table') -> None:
    from rich.console import Console

    console = Console()
    # wide output to a file, so that long names are not folded
    Console(width=None if console.is_terminal else 160).print(table)


def _to_csv(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value
