"""Shared by the scripts that write pages: tables, their places in a page, and the benchmarks that they show."""

import re
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
    """The rows of the latest run of each command and device."""
    # a run is identified by its start time
    runs = defaultdict(str)
    for row in rows:
        runs[command_of(row)] = max(runs[command_of(row)], row['run'])
    return [row for row in rows if row['run'] == runs[command_of(row)]]


def command_of(row: dict) -> tuple:
    """Key of a command on a device; rows of earlier versions do not have the command's arguments."""
    return row.get('command') or f'vitzoo bench {row["table"]}', row['table'], row['device'], row['gpu']
