"""What an evaluation leaves behind: a table in the terminal, a CSV or JSON file, a figure of oversmoothing curves."""

import csv
import json
import os
from collections.abc import Iterable
from math import isnan
from pathlib import Path

from vitzoo.errors import UserError

KEYS = (
    'model',
    'top1',
    'top5',
    'loss',
    'n',
    'params',
    'gmacs',
    'img_size',
    'images_per_second',
    'peak_memory_mb',
    'oversmoothing',
    'health',
    'map',
)
# two lines each, to fit a terminal of 80 columns
HEADINGS = {
    'top1': ('top-1\n%', '.2f'),
    'top5': ('top-5\n%', '.2f'),
    'map': ('mAP\n%', '.2f'),
    'loss': ('\nloss', '.3f'),
    'params': ('params\nM', '.2f'),
    'gmacs': ('\nGMACs', '.3f'),
    'img_size': ('\nsize', ''),
    'images_per_second': ('images\n/s', ',.0f'),
    'peak_memory_mb': ('peak\nMB', ',.0f'),
    'oversmoothing': ('last\ncosine', '.3f'),
}


def check_output(path: str, suffixes: tuple[str, ...]) -> None:
    """Raise UserError unless a file of one of these formats can be written at `path`, whose folder is made.

    Called before an evaluation that may take hours.
    """
    if Path(path).suffix.lower() not in suffixes:
        raise UserError(f"cannot tell the format of '{path}': its name must end in {' or '.join(suffixes)}")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder of '{path}': {error.strerror}") from error
    if Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK):
        raise UserError(f"cannot write '{path}': it is a folder, or lies in one that you may not write to")


def write_results(path: str, records: list[dict]) -> None:
    """Write one record per model with the keys of `KEYS`; a value that is not defined is null, in a CSV file empty."""
    records = [{key: _plain(record[key]) for key in KEYS} for record in records]
    with open(path, 'w', newline='') as file:
        if Path(path).suffix.lower() == '.json':
            json.dump(records, file, indent=2, allow_nan=False)
            return
        writer = csv.DictWriter(file, KEYS)
        writer.writeheader()
        for record in records:
            nested = {key: json.dumps(record[key]) for key in ('oversmoothing', 'health') if record[key] is not None}
            writer.writerow({**record, **nested})


def print_table(records: list[dict], title: str) -> None:
    """Print the records as a table: params in millions, and of the oversmoothing curve its last block."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify='left', box=None, pad_edge=False, header_style='bold')
    table.add_column('\nmodel', overflow='fold')
    # only of models with several labels for an image
    has_map = any(record['map'] is not None for record in records)
    headings = {key: heading for key, heading in HEADINGS.items() if key != 'map' or has_map}
    for heading, _ in headings.values():
        table.add_column(heading, justify='right', no_wrap=True)
    for record in records:
        curve = record['oversmoothing']
        shown = {**record, 'params': record['params'] / 1e6, 'oversmoothing': curve[-1] if curve else None}
        numbers = ['–' if shown[key] is None else format(shown[key], form) for key, (_, form) in headings.items()]
        table.add_row(Text(record['model']).append(f'\n{record["weights"]}', style='dim'), *numbers)
    console = Console()
    # a file has no width that a long name would have to be folded to
    Console(width=None if console.is_terminal else 160).print(table)


def print_health(records: list[dict]) -> None:
    """Print the health of each model that has one, a row for each mixer; 0 is good in every column."""
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


def plot_curves(path: str, records: list[dict]) -> None:
    """Draw the oversmoothing curves of all models in one figure, over relative depth where their depths differ."""
    from cycler import cycler
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    curves = {record['model']: record['oversmoothing'] for record in records if record['oversmoothing']}
    if not curves:
        raise UserError('there is no oversmoothing curve to draw')
    same_depth = len({len(curve) for curve in curves.values()}) == 1
    figure = Figure(figsize=(8, 5), layout='constrained')
    axes = figure.subplots()
    axes.set_prop_cycle(cycler(linestyle=['-', '--', ':']) * rcParams['axes.prop_cycle'])
    for name, curve in curves.items():
        depth = [i + 1 if same_depth else (i + 1) / len(curve) for i in range(len(curve))]
        axes.plot(depth, curve, marker='o', markersize=4, label=_short(name, curves))
    axes.set_xlabel('block' if same_depth else 'relative depth (block / number of blocks)')
    axes.set_ylabel('mean cosine similarity of patch tokens')
    axes.set_title('Oversmoothing')
    axes.xaxis.get_major_locator().set_params(integer=same_depth)
    axes.grid(alpha=0.3)
    axes.legend(fontsize='small', ncols=1 + len(curves) // 16)
    figure.savefig(path, dpi=150)


def _short(name: str, names: Iterable[str]) -> str:
    """The last part of a folder's path, where that is enough to tell it from the others."""
    short = Path(name).name
    return short if sum(Path(other).name == short for other in names) == 1 else name


def _plain(value):
    """Replace nan, which JSON does not have, by None."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and isnan(value) else value
