"""Time and memory against image size, from the rows of `vitzoo bench models`."""

import csv
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from vitzoo.bench._results import find_doubt, read_rows
from vitzoo.errors import UserError

# rows are comparable if they agree in these columns
_CONDITIONS = ('cpu', 'threads', 'gpu', 'device', 'dtype', 'batch_size', 'torch')


def read_timings(path: str) -> list[dict]:
    """The forward passes of models in a file of `vitzoo bench`.

    Raises:
        UserError: The file cannot be read, or is not a file of `vitzoo bench`.
    """
    try:
        rows = read_rows(path)
    except OSError as error:
        raise UserError(f"cannot read the benchmarks '{path}': {error.strerror}") from error
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(f"'{path}' is not a file of `vitzoo bench`: {error}") from error
    for column in ('table', 'what', 'name', 'img_size', *_CONDITIONS):
        if not all(column in row for row in rows):
            raise UserError(f"'{path}' has no column '{column}': it is not a file of `vitzoo bench`")
    return [row for row in rows if row['table'] == 'models' and row['what'] == 'forward']


def add_timings(records: list[dict], rows: list[dict], path: str) -> None:
    """Add the curves of time and memory to each record whose model was timed at several sizes.

    All curves are from the machine, precision and batch size with rows of the most models.

    Args:
        rows: Those of `read_timings` for the file `path`.

    Raises:
        UserError: The file has none of the models.
    """
    timed = find_timed(records, rows, path)
    for record in records:
        sizes = timed.get(_timed_name(record, timed))
        if sizes:
            record['scaling'] = {
                **record.get('scaling', {}),
                **_curves(sizes),
                'timed': _describe_conditions([*sizes.values()], path),
            }


def find_timed(records: list[dict], rows: list[dict], path: str) -> dict[str, dict[int, dict]]:
    """The rows of the models of some records by name and image size; arguments and errors as in `add_timings`."""
    known = {row['name'] for row in rows}
    names = {_timed_name(record, known) for record in records}
    found: defaultdict[tuple, dict[str, dict]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row['name'] in names:
            # a later measurement replaces an earlier one
            found[tuple(row[key] for key in _CONDITIONS)][row['name']][row['img_size']] = row
    complete = [{name: sizes for name, sizes in models.items() if len(sizes) > 1} for models in found.values()]
    best = max(complete, key=len, default={})
    if not best:
        raise UserError(
            f"'{path}' has none of {', '.join(sorted(names))} at two sizes; run `vitzoo bench models` first"
        )
    return best


def _timed_name(record: dict, known: Collection[str]) -> str:
    """The name of the rows that are of a record's model: its own or, without arguments, that of its architecture."""
    name = record['model']
    architecture = record.get('architecture', name)
    # with other mixers or arguments it is another model
    if name in known or ' ' in architecture or record.get('arguments'):
        return name
    return architecture.partition('.')[0]


def _curves(sizes: dict[int, dict]) -> dict:
    rows = sorted(sizes.items())
    time = {size: 1e3 * row['seconds'] / row['batch_size'] for size, row in rows}
    memory = {size: row['peak_mb'] for size, row in rows if row['peak_mb'] is not None}
    return dict(milliseconds=time) | (dict(peak_mb=memory) if len(memory) > 1 else {})


def _describe_conditions(rows: list[dict], path: str) -> str:
    row, doubts = rows[0], ', '.join(sorted(filter(None, {find_doubt(row) for row in rows})))
    where = row['gpu'] or f'{row["cpu"]}, {row["threads"]} threads'
    unreliable = f' (unreliable: {doubts})' if doubts else ''
    return f'{where}, {row["dtype"]}, batches of {row["batch_size"]}; {Path(path).name}{unreliable}'
