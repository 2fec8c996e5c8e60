"""The results file of `vitzoo bench`: a row for each measurement, with the machine and the command."""

import csv
import os
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vitzoo.bench._harness import Spread
from vitzoo.errors import UserError
from vitzoo.machine import was_busy
from vitzoo.metrics.speed import is_busy, rounds_disagree, system_load

RESULTS = 'weights/benchmarks.csv'
BENCHMARK_COLUMNS = (
    *('run', 'table', 'name', 'what', 'against'),
    *('tokens', 'img_size', 'dim', 'num_heads', 'batch_size', 'dtype', 'device'),
    *('seconds', 'seconds_low', 'seconds_high', 'rounds', 'ratio', 'ratio_low', 'ratio_high'),
    *('peak_mb', 'gmacs', 'matmul_share'),
    *('cpu', 'threads', 'gpu', 'load', 'torch', 'timm', 'python', 'versions'),
    *('matmul_gflops', 'io_mb', 'copy_gbs', 'ceiling', 'command', 'backend', 'difference'),
)
_QUARTILES = ('seconds_low', 'seconds', 'seconds_high')


def start_run() -> str:
    """Identifier of a run, shared by its rows: its start time in UTC."""
    return datetime.now(timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ')


def make_row(times: Spread | None = None, ratio: Spread | None = None, **fields: Any) -> dict:
    """A measurement as a dictionary with keys from `BENCHMARK_COLUMNS`."""
    if times is not None:
        fields |= dict(seconds=times.median, seconds_low=times.low, seconds_high=times.high, rounds=times.count)
    if ratio is not None:
        fields |= dict(ratio=ratio.median, ratio_low=ratio.low, ratio_high=ratio.high)
    return fields


def check_columns(path: str) -> bool:
    """Return True if a results file is missing or empty, and so needs a header.

    Raises:
        UserError: The file has other columns, as a results file of another version has, or is not a table in UTF-8.
    """
    if not Path(path).exists() or not Path(path).stat().st_size:
        return True
    try:
        with open(path, newline='', encoding='utf-8') as file:
            columns = next(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"cannot append to '{path}': it is not a table in UTF-8 ({error}); choose another file with --results-file"
        ) from error
    if columns != [*BENCHMARK_COLUMNS]:
        other = ', '.join(sorted({*BENCHMARK_COLUMNS} ^ {*columns})) or 'order'
        raise UserError(
            f"cannot append to '{path}': its columns differ ({other}); choose another file with --results-file"
        )
    return False


def append_rows(path: str, rows: list[dict], **common: Any) -> None:
    """Append rows to a CSV file with the columns `BENCHMARK_COLUMNS`; `common` is added to each of them.

    If the machine has become busy, its load is recorded as it is now. Prints the names of unreliable rows.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    is_new = check_columns(path)
    load = system_load()
    if load is not None and is_busy(load, os.cpu_count()):
        common['load'] = max(load, common.get('load') or 0)
    rows = [{**common, **fields} for fields in rows]
    with open(path, 'a', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, BENCHMARK_COLUMNS)
        if is_new:
            writer.writeheader()
        for fields in rows:
            writer.writerow({key: _short(value) for key, value in fields.items()})
    doubtful = defaultdict(list)
    for fields in rows:
        doubtful[find_doubt(fields)].append(f'{fields.get("name")} {fields.get("what")}')
    for doubt in filter(None, doubtful):
        print(f'{doubt}: {", ".join(dict.fromkeys(doubtful[doubt]))}; measure again on a quiet machine')


def _short(value: Any) -> Any:
    return float(f'{value:.5g}') if isinstance(value, float) else value


def find_doubt(row: dict) -> str | None:
    """The reason to doubt the times in a row of a results file: 'busy machine', 'uneven rounds' or None."""
    if was_busy(row):
        return 'busy machine'
    quartiles = [row[key] for key in _QUARTILES if row.get(key) is not None]
    return 'uneven rounds' if len(quartiles) == len(_QUARTILES) and rounds_disagree(*quartiles) else None


def read_rows(path: str) -> list[dict]:
    """The rows of a results file, with numbers converted and None for empty fields."""
    with open(path, newline='', encoding='utf-8') as file:
        # rows of earlier versions lack the last columns
        reader = csv.DictReader(file, restval='')
        return [{key: _number(value) for key, value in fields.items()} for fields in reader]


def _number(text: str) -> float | str | None:
    try:
        number = float(text)
    except ValueError:
        return text or None
    return int(number) if number.is_integer() and '.' not in text and 'e' not in text else number
