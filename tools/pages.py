"""Shared by the scripts that write pages: tables, their places in a page, and the benchmarks that they show."""

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / 'weights' / 'benchmarks.csv'


def fill(text: str, tables: dict[str, str]) -> str:
    """Replace the text between the two markers of each table; markers are comments with the table's name.

    Raises:
        ValueError: A marker is missing or occurs twice.
    """
    for name, table in tables.items():
        begin, end = f'<!-- {name}: made by `make docs` -->', f'<!-- end of {name} -->'
        if (text.count(begin), text.count(end)) != (1, 1):
            raise ValueError(f'expected one {begin} and one {end}')
        text = f'{text.partition(begin)[0]}{begin}\n\n{table}\n\n{end}{text.partition(end)[2]}'
    return text


def to_table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table; columns of numbers, some of them perhaps marked by "?", are right-aligned."""
    numeric = [all(re.fullmatch(r'[\d,.]*\??', line[column]) for line in lines) for column in range(len(head))]
    rule = ['---:' if right else '---' for right in numeric]
    return '\n'.join(f'| {" | ".join(cells)} |' for cells in (head, rule, *lines))


def latest(rows: list[dict]) -> list[dict]:
    """The rows of the latest run of each command and device, of those that were not interrupted."""
    # a run is identified by its start time
    runs: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        runs[row['run'], command_of(row)].append(row)
    last: dict[tuple, list[dict]] = {}
    for start, command in sorted(runs, key=lambda key: key[0]):
        run = runs[start, command]
        if command in last and _is_interrupted(run, last[command]):
            print(f'left out an interrupted run, that of {start} of {command[0]}', file=sys.stderr)
        else:
            last[command] = run
    return [row for row in rows if row['run'] == last[command_of(row)][0]['run']]


def of_newest_gpu(rows: list[dict]) -> list[dict]:
    """The rows without those of GPUs that were measured before another."""
    runs = sorted((row['run'], row['gpu']) for row in rows if row['device'] == 'cuda')
    return [row for row in rows if row['device'] != 'cuda' or row['gpu'] == runs[-1][1]]


def _is_interrupted(run: list[dict], earlier: list[dict]) -> bool:
    """Return True if an earlier run of the command goes on after the last measurement of this run."""
    *others, final = map(_measurement, earlier)
    end = _measurement(run[-1])
    return end != final and end in others


def _measurement(row: dict) -> tuple:
    """Key of a measurement within a run."""
    return tuple(row.get(key) for key in ('name', 'what', 'against', 'tokens', 'img_size', 'dtype', 'backend'))


def command_of(row: dict) -> tuple:
    """Key of a command on a device; rows of earlier versions do not have the command's arguments."""
    return row.get('command') or f'vitzoo bench {row["table"]}', row['table'], row['device'], row['gpu']
