"""Preparing records for the page: order, short names, comparability."""

from math import sqrt
from pathlib import Path
from typing import Any

from vitzoo.metrics.speed import is_busy

# scores that models are ranked by, for multi-label and single-label data: the former has both, and is selected by mAP
SCORES = {'map': 'mAP', 'top1': 'top-1'}
# keys of a record by the type of their value, with its name
_NUMBERS = ('top1', 'top5', 'loss', 'n', 'map', 'labelled', 'params', 'gmacs', 'gflops', 'ece')
_SPEEDS = ('images_per_second', 'peak_memory_mb', 'load', 'cores', 'corrupt_top1', 'corrupt_relative')
_TYPES = {
    (int, float): ((*_NUMBERS, *_SPEEDS), 'a number'),
    (list,): (('oversmoothing', 'explanations', 'commands'), 'a list'),
    (dict,): (('token_statistics', 'health', 'corrupt', 'scaling', 'mistakes', 'transfer'), 'a mapping'),
}


def check_record(record: Any) -> None:
    """Check that the values of a record have the types that `vitzoo validate` writes, as far as they are there.

    Raises:
        ValueError: They do not, or the record has no model.
    """
    if not isinstance(record, dict) or not isinstance(record.get('model'), str):
        raise ValueError(f'a record of {str(record)[:40]} has no model')
    for kind, (keys, title) in _TYPES.items():
        for key in keys:
            if record.get(key) is not None and not isinstance(record[key], kind):
                raise ValueError(f'{key} of {record["model"]} is {record[key]!r}, not {title}')


def prepare(records: list[dict]) -> list[dict]:
    """Sort records by accuracy, and add a short name, the index of the symbol, and GFLOPs."""
    names = short_names([record['model'] for record in records])
    ready = [{**record, 'name': name} for record, name in zip(records, names)]
    ready.sort(key=lambda record: record[key] if (key := ranking_score(record)) else -1, reverse=True)
    for record in ready:
        if record.get('gmacs') is not None:
            record.setdefault('gflops', 2 * record['gmacs'])
    return [{**record, 'index': index} for index, record in enumerate(ready)]


def ranking_score(record: dict) -> str | None:
    """The key of the score that a model is ranked by, None without one."""
    return next((key for key in SCORES if record.get(key) is not None), None)


def short_names(names: list[str]) -> list[str]:
    """Shorten paths to as many trailing parts as make them unique; equal names are numbered."""
    short: list[str] = []
    paths = [_split(name) for name in names]
    for parts in paths:
        others = set(paths) - {parts}
        length = next(n for n in range(1, len(parts) + 1) if n == len(parts) or not _is_shared_ending(parts, others, n))
        found = '/'.join(parts[-length:])
        short.append(f'{found} ({paths[: len(short)].count(parts) + 1})' if paths.count(parts) > 1 else found)
    return short


def _split(name: str) -> tuple[str, ...]:
    path = Path(name)
    # . and .. have no name of their own
    return path.resolve().parts if path.name in ('', '..') else path.parts


def _is_shared_ending(parts: tuple, others: set[tuple], length: int) -> bool:
    return any(other[-length:] == parts[-length:] for other in others)


def timing_machines(records: list[dict]) -> set[str]:
    """Machines on which models were timed."""
    return {record.get('measured_on', '') for record in records if record.get('images_per_second') is not None}


def speed_doubts(records: list[dict]) -> dict[str, str]:
    """The models whose speed is unreliable, with the reason; a file of an older version only has the load."""
    timed = [record for record in records if record.get('images_per_second') is not None]
    doubts = {record['name']: record.get('speed_doubt') for record in timed}
    doubts |= {r['name']: 'busy machine' for r in timed if is_busy(r.get('load'), r.get('cores'))}
    return {name: doubt for name, doubt in doubts.items() if doubt}


def are_times_comparable(records: list[dict]) -> bool:
    """Return True if all models were timed on one machine, reliably."""
    return len(timing_machines(records)) == 1 and not speed_doubts(records)


def num_scored(record: dict) -> int | None:
    """The number of images that top-1 is a share of: all, or in multi-label data those with a label."""
    return record.get('labelled') or record.get('n')


def interval(percent: float, n: int | None) -> tuple[float, float]:
    """Wilson's 95 % interval of an accuracy over n images, in percent; of zero width if n is unknown."""
    if not n:
        return percent, percent
    share, z = percent / 100, 1.96
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    # rounding passes the ends
    return max(0.0, 100 * (middle - half)), min(100.0, 100 * (middle + half))
