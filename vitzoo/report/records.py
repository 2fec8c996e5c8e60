"""What the parts of the page have to know of the records: their order, their names, what can be compared."""

from math import sqrt
from pathlib import Path

# what models are ranked by, with their names: images have one label or several
SCORES = {'top1': 'top-1', 'map': 'mAP'}
# load of a machine for each of its cores: an evaluation keeps all of them at work, and its loader a few more
BUSY = 1.5


def prepare(records: list[dict]) -> list[dict]:
    """The records, the best accuracy first, each with a short name, the number of its colour, and GFLOPs."""
    names = short_names([record['model'] for record in records])
    ready = [{**record, 'name': name} for record, name in zip(records, names)]
    ready.sort(key=lambda record: next((record[k] for k in SCORES if record.get(k) is not None), -1), reverse=True)
    for record in ready:
        if record.get('gmacs') is not None:
            record.setdefault('gflops', 2 * record['gmacs'])
    return [{**record, 'index': index} for index, record in enumerate(ready)]


def short_names(names: list[str]) -> list[str]:
    """For a path as many of its last parts as tell it from the others; equal names get numbers."""
    short = []
    for name in names:
        parts = Path(name).parts
        others = {Path(other).parts for other in names} - {parts}
        length = next(n for n in range(1, len(parts) + 1) if n == len(parts) or not _end_alike(parts, others, n))
        found = '/'.join(parts[-length:])
        short.append(f'{found} ({names[: len(short)].count(name) + 1})' if names.count(name) > 1 else found)
    return short


def _end_alike(parts: tuple, others: set[tuple], length: int) -> bool:
    return any(other[-length:] == parts[-length:] for other in others)


def machines(records: list[dict]) -> set[str]:
    """Where the models with a speed were timed."""
    return {record.get('measured_on', '') for record in records if record.get('images_per_second') is not None}


def busy(records: list[dict]) -> list[str]:
    """The models that were timed on a machine with other work than theirs, which made them slower than they are."""
    known = [record for record in records if record.get('images_per_second') is not None and record.get('cores')]
    return [record['name'] for record in known if (record.get('load') or 0) > BUSY * record['cores']]


def times_compare(records: list[dict]) -> bool:
    """Whether the times of some models say which is faster."""
    return len(machines(records)) == 1 and not busy(records)


def interval(percent: float, n: int | None) -> tuple[float, float]:
    """Wilson's 95 % interval of an accuracy over n images, in percent; without a width where n is not known."""
    if not n:
        return percent, percent
    share, z = percent / 100, 1.96
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return 100 * (middle - half), 100 * (middle + half)
