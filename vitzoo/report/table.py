"""The table of models, with one column per metric; a click on a heading sorts it (script.js)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from typing import Any

from vitzoo.report.blocks import inline_symbol, scrolling
from vitzoo.report.markup import Element, tag
from vitzoo.report.records import (
    are_times_comparable,
    interval,
    num_scored,
    ranking_score,
    speed_doubts,
    timing_machines,
)
from vitzoo.validate.results import format_weights, have_different_images


@dataclass(frozen=True)
class Column:
    """A column of the table of models: how to read its values from a record, format and explain them.

    Attributes:
        key: Of its values in a record.
        better: 1 if higher is better, -1 if lower is better, and 0 otherwise.
        convert: Maps the value in a record to that in the table, by default the same.
    """

    key: str
    heading: str
    unit: str
    form: str
    better: int
    about: str
    convert: Callable[[Any], float | None] | None = None

    def read(self, record: dict) -> float | None:
        """The value of a record, None if it has none."""
        value = record.get(self.key)
        return value if value is None or self.convert is None else self.convert(value)


def _last(curve: list[float | None]) -> float | None:
    """Oversmoothing of the last block, None if it is not defined there, as for a single token."""
    last = curve[-1] if curve else None
    return None if last is None or isnan(last) else last


MODEL_COLUMNS = (
    Column('top1', 'top-1', '%', '.2f', 1, 'images whose top class is correct'),
    Column('top5', 'top-5', '%', '.2f', 1, 'images whose class is among the top 5'),
    Column('map', 'mAP', '%', '.2f', 1, 'mean average precision, for multi-label data'),
    Column('loss', 'loss', '', '.3f', -1, 'mean cross-entropy in nats, which is binary for multi-label data'),
    Column('ece', 'ECE', '%', '.1f', -1, 'expected calibration error: mean gap between confidence and accuracy'),
    Column('corrupt_top1', 'corrupted', '%', '.2f', 1, 'mean top-1 under 15 corruptions at 5 severities'),
    Column('n', 'images', '', ',d', 0, 'number of images evaluated'),
    Column('params', 'parameters', 'M', '.2f', -1, 'millions of parameters', lambda count: 1e-6 * count),
    Column('gmacs', 'cost', 'GMACs', '.3f', -1, '10⁹ multiply-accumulates per image'),
    Column('gflops', 'cost', 'GFLOPs', '.3f', -1, 'twice the GMACs; many papers call MACs FLOPs'),
    Column('images_per_second', 'speed', 'images/s', ',.1f', 1, 'median forward pass on random images'),
    Column('peak_memory_mb', 'memory', 'MB', ',.0f', -1, 'peak of the evaluation; on a CPU, of the whole process'),
    Column(
        'oversmoothing', 'cosine', 'last block', '.3f', 0, 'oversmoothing: mean cosine similarity of the tokens', _last
    ),
)
_INTERVAL = "half the width of Wilson's 95 % interval for this number of images; the best of a column is bold"
_MACHINES = (
    'The models were timed on different or unknown machines: images/s and memory are only comparable if the last '
    'section names the same machine.'
)
_IMAGES = (
    'The models were evaluated on different images, for example those that each held out. Differences of their scores '
    'are also those of the images; a validation split of its own makes them comparable.'
)
_DOUBTS = 'These images/s are unreliable: {}.'


def models_section(records: list[dict]) -> list[Element]:
    """The table of models, with notes."""
    columns = [column for column in MODEL_COLUMNS if any(column.read(record) is not None for record in records)]
    has_best_speed = are_times_comparable(records)
    best = [find_best(c, records) if c.key != 'images_per_second' or has_best_speed else None for c in columns]
    head = [sort_heading('model', '', 'text'), *(sort_heading(c.heading, c.unit, 'number', c.better) for c in columns)]
    head += [sort_heading('image', 'px', 'number'), sort_heading('weights', '', 'text')]
    ranked_by = {key for record in records if (key := ranking_score(record))}
    if len(ranked_by) == 1:
        place = [column.key for column in columns].index(ranked_by.pop())
        head[1 + place].set('aria-sort', 'descending')
    rows = [_row(record, columns, best) for record in records]
    table = tag('table', tag('thead', tag('tr', head)), tag('tbody', rows), class_='models', id='table')
    terms = [(f'{c.heading} {c.unit}' if c.key in ('gmacs', 'gflops') else c.heading, c.about) for c in columns]
    terms += [('±', _INTERVAL)] if any(c.key == 'top1' for c in columns) else []
    notes = tag(
        'dl', (tag('div', tag('dt', term), ' ', tag('dd', about)) for term, about in terms), class_='note terms'
    )
    warnings = [_IMAGES] if have_different_images(records) else []
    warnings += [_MACHINES] if len(timing_machines(records)) > 1 else []
    doubts = speed_doubts(records)
    warnings += [_DOUBTS.format(', '.join(f'{name} ({why})' for name, why in doubts.items()))] if doubts else []
    return [
        scrolling(table, 'Models and their metrics'),
        notes,
        *(tag('p', warning, class_='note warning') for warning in warnings),
    ]


def find_best(column: Column, records: list[dict]) -> float | None:
    """The best value of a column, or None if all values are equal or none is better."""
    values = {value for record in records if (value := column.read(record)) is not None}
    if not column.better or len(values) < 2:
        return None
    return max(values, key=lambda value: column.better * value)


def sort_heading(text: str, unit: str, kind: str, better: int = 0) -> Element:
    """A heading that sorts its table; `kind` is 'number' or 'text', and `better` that of `Column`."""
    # the first click puts the best model on top
    first = 'descending' if kind == 'number' and better >= 0 else 'ascending'
    button = tag('button', tag('span', text), ' ', tag('small', unit), type='button', data_first=first)
    return tag('th', button, scope='col', class_=kind, aria_sort='none')


def _row(record: dict, columns: list[Column], best: list[float | None]) -> Element:
    name = tag(
        'th',
        inline_symbol(record['index']),
        record['name'],
        scope='row',
        data_value=record['name'],
        title=record['model'],
    )
    cells = [_cell(record, column, top) for column, top in zip(columns, best)]
    size = str(record.get('img_size', ''))
    cells.append(tag('td', size.replace('x', ' × '), data_value=size.partition('x')[0] or None))
    weights = format_weights(record) or 'not recorded'
    cells.append(tag('td', weights, class_='text', data_value=weights))
    return tag('tr', name, cells, data_model=record['index'])


def _cell(record: dict, column: Column, best: float | None) -> Element:
    value = column.read(record)
    if value is None or isnan(value):
        return tag('td', '–')
    low, high = interval(value, num_scored(record) if column.key == 'top1' else None)
    half = tag('small', f' ±{(high - low) / 2:.1f}') if high > low else None
    class_ = 'best' if value == best else None
    return tag('td', format(value, column.form), half, class_=class_, data_value=repr(value))
