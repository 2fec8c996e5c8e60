"""The HTML page of a study: for each way a table and charts, over the seeds, and what the conversions keep."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from vitzoo.errors import count_of
from vitzoo.metrics.oversmoothing import MEASURES
from vitzoo.report.blocks import figure, inline_symbol, number, scrolling
from vitzoo.report.charts import Curve, Point, curves, dots, scatter
from vitzoo.report.markup import Element, tag
from vitzoo.report.page import assemble
from vitzoo.report.robustness import legend, robustness_section
from vitzoo.report.sections import health_section, oversmoothing_section
from vitzoo.report.table import sort_heading
from vitzoo.report.transfers import retention_table
from vitzoo.study.plan import Study
from vitzoo.study.results import ResultColumn, Row, group_records, same_inputs, score_column, size_columns, teachers_of
from vitzoo.study.retention import find_kept
from vitzoo.study.tables import OTHER_OPTIONS, GridCell, format_fronts, format_size, make_grid

# of `vitzoo report`, with their titles
_SECTIONS = (
    ('Oversmoothing', oversmoothing_section),
    ('Approximation of softmax attention', health_section),
    ('Robustness', robustness_section),
)
_COSTS = ('gmacs', 'images_per_second')
_INTERVALS = 'Bars are 95 % intervals over the seeds; a single seed has none.'


@dataclass(frozen=True)
class _Entry:
    """A row with the index of its symbol on the page, and its name in charts."""

    row: Row
    index: int
    name: str

    def records(self, study: Study) -> dict[str, dict]:
        """The records for the sections of `vitzoo report`, by the first evaluation with their inputs."""
        records = group_records(study, self.row.records)
        own = same_inputs(study, study.evaluations_of(self.row.way)[0])
        first = records.get(own, {})
        for name, record in records.items():
            # a table of cells has the value of the last block only, which is no curve
            if not isinstance(record.get('oversmoothing'), list):
                record.pop('oversmoothing', None)
            records[name] = record | dict(index=self.index, name=self.name, model=self.row.model)
        for name in records.keys() - {own}:
            records[name] = _without_repeated(records[name], first)
        return records


def render_study(study: Study, rows: list[Row], about: Sequence[str], notes: Sequence[str]) -> str:
    """Render the page.

    Args:
        rows: As `collect` returns them.
        about: Facts for the line below the title.
        notes: Sentences that explain the tables.
    """
    entries = [_Entry(row, index, row.model) for index, row in enumerate(rows)]
    ways = [list(group) for _, group in groupby(entries, lambda entry: entry.row.way)]
    images = {round(record['n']) for row in rows for record in row.records.values() if record.get('n')}
    facts = [*about, *(count_of(n, 'image') for n in sorted(images))]
    sections = [(f'way-{way[0].row.way}', way[0].row.way, _way_section(study, way, entries)) for way in ways]
    kept = [chart for way in ways for chart in _retention_figures(study, way, rows)]
    if kept:
        sections.append(('retention', 'What conversion keeps', [tag('div', kept, class_='charts')]))
    sections.append(('notes', 'Notes', [tag('p', note) for note in notes]))
    sections.append(('provenance', 'How this was made', _provenance(study, rows)))
    return assemble(study.title, [' · '.join(facts)], sections)


def _way_section(study: Study, way: list[_Entry], entries: list[_Entry]) -> list[Element]:
    """Table, fronts and charts of a way; the charts of conversions show their teachers, too."""
    rows = [entry.row for entry in way]
    fronts = format_fronts(study, rows, [entry.row for entry in entries])
    parts = [_table(study, way, entries), *(tag('p', line, class_='note') for line in fronts)]
    shown = _with_teachers(way, entries)
    charts = [chart for key in _COSTS for chart in _cost_figures(study, shown, rows, key)]
    charts += _size_figures(study, shown, rows)
    parts += [tag('div', charts, class_='charts')] if charts else []
    found = [entry.records(study) for entry in shown]
    converted = [record for records in found for record in records.values() if record.get('transfer')]
    parts += [tag('h3', 'Stages of the conversions'), retention_table(converted)] if converted else []
    return parts + _measurements(study, rows[0].way, found)


def _measurements(study: Study, way: str, found: list[dict[str, dict]]) -> list[Element]:
    """The sections of `vitzoo report`, once for each kind of inputs, so that none mixes image sizes or data."""
    parts = []
    names = list(dict.fromkeys(same_inputs(study, name) for name in study.evaluations_of(way)))
    for title, section in _SECTIONS:
        for name in names:
            content = section([records[name] for records in found if name in records])
            heading = title if name == names[0] else f'{title}, {name}'
            parts += [tag('h3', heading), *content] if content else []
    return parts


def _without_repeated(record: dict, first: dict) -> dict:
    """A record without the measures of the tokens that the first evaluation has, too."""
    statistics, known = record.get('token_statistics') or {}, first.get('token_statistics') or {}
    if known or first.get('oversmoothing'):
        record = {key: value for key, value in record.items() if key != 'oversmoothing'}
    shown = {key: value for key, value in statistics.items() if key not in MEASURES or key not in known}
    return record | dict(token_statistics=shown)


def _with_teachers(way: list[_Entry], entries: list[_Entry]) -> list[_Entry]:
    """The teachers of a way, and its models, those of conversions named after their mixers."""
    teachers = teachers_of([entry.row for entry in way])
    shown = [entry for entry in entries if (entry.row.way, entry.row.model) in teachers]
    return shown + [replace(entry, name=entry.row.mixer or entry.name) for entry in way]


def _table(study: Study, way: list[_Entry], entries: list[_Entry]) -> Element:
    """The table of a way, which a click on a heading sorts."""
    (rank, model, *others), lines = make_grid(study, [entry.row for entry in way], [entry.row for entry in entries])
    head = [sort_heading(model, '', 'text'), *(sort_heading(text, '', 'number') for text in (rank, *others))]
    head[1].set('aria-sort', 'ascending')
    body = []
    for entry, (place, label, *rest) in zip(way, lines):
        name = tag('th', inline_symbol(entry.index), label.text, scope='row', data_value=label.value)
        body.append(tag('tr', name, map(_cell, (place, *rest)), data_model=entry.index))
    table = tag('table', tag('thead', tag('tr', head)), tag('tbody', body), class_='models')
    return scrolling(table, f'Models of {way[0].row.way}')


def _cell(cell: GridCell) -> Element:
    verdict = {'better': 'right', 'worse': 'wrong'}.get(cell.text.rpartition(' ')[2])
    return tag('td', cell.text, class_=verdict, data_value=None if cell.value is None else repr(cell.value))


def _cost_figures(study: Study, shown: list[_Entry], way: list[Row], key: str) -> list[Element]:
    """Accuracy against a cost; unreliable speeds, and those of two ways, are not compared."""
    score = score_column(study, way)
    cost = score and ResultColumn(score.evaluation, key)
    if key == 'images_per_second':
        shown = [entry for entry in shown if entry.row in way]
    known = [entry for entry in shown if score in entry.row.values and cost in entry.row.values]
    if score is None or cost is None or len(known) < 2 or any(cost in entry.row.doubts for entry in known):
        return []
    points = []
    for entry in known:
        x, y = entry.row.values[cost].mean, entry.row.values[score]
        low, high = (y.mean if end is None else end for end in (y.low, y.high))
        tip = f'{entry.name}: {y.mean:.2f} %, {x:,.4g} {cost.metric.title}'
        points.append(Point(entry.index, entry.name, x, y.mean, low, high, tip))
    title = f'{score.metric.title.removesuffix(" %")} against {cost.metric.title}'
    chart = scatter(title, points, cost.metric.title, score.metric.title, is_cost=key == 'gmacs')
    numbers = [[point.name, point.x, point.y, point.low, point.high] for point in points]
    head = ['model', cost.metric.title, score.metric.title, 'from', 'to']
    return [figure(title, f'The grey line is the Pareto front. {_INTERVALS}', chart, head, numbers)]


def _size_figures(study: Study, shown: list[_Entry], way: list[Row]) -> list[Element]:
    """Accuracy against image size, of evaluations that differ in nothing else."""
    columns = size_columns(study, way)
    if len(columns) < 2:
        return []
    title = columns[0].metric.title
    points = [(entry, _by_size(entry.row, columns)) for entry in shown]
    points = [(entry, known) for entry, known in points if len(known) > 1]
    if not points:
        return []
    sizes = sorted({size for _, known in points for size in known}, key=prod)
    is_square = all(height == width for height, width in sizes)
    lines = []
    for entry, known in points:
        tips = [f'{entry.name} at {format_size(size)} px: {value:.2f} %' for size, value in known.items()]
        own = [i for i, size in enumerate(known) if size == entry.row.img_size(columns[0].evaluation)]
        x = [height if is_square else height * width for height, width in known]
        lines.append(Curve(entry.index, entry.name, x, list(known.values()), tips, large=own))
    label = f'{title.removesuffix(" %")} against image size'
    x_label = 'height and width of the image' if is_square else 'pixels of the image'
    chart = curves(label, lines, x_label, title, x_ticks=[size[0] if is_square else prod(size) for size in sizes])
    numbers = [[entry.name, *(known.get(size) for size in sizes)] for entry, known in points]
    about = 'Large markers are the size of the first evaluation.'
    return [figure(label, about, chart, ['model', *map(format_size, sizes)], numbers)]


def _by_size(row: Row, columns: list[ResultColumn]) -> dict[tuple[int, int], float]:
    """The accuracies of a model by the size of the images, from the fewest pixels."""
    found = [(row.img_size(column.evaluation), row.values[column].mean) for column in columns if column in row.values]
    return dict(sorted(((size, value) for size, value in found if size is not None), key=lambda pair: prod(pair[0])))


def _retention_figures(study: Study, way: list[_Entry], rows: list[Row]) -> list[Element]:
    """Accuracies of the students of a way, of their teacher, and of the same mixers from scratch."""
    of_way = [entry.row for entry in way]
    score, found = score_column(study, of_way), find_kept(study, of_way, rows)
    if score is None or not found:
        return []
    # a way has one teacher
    teacher = next(row.baseline[1] for row in of_way if row.baseline is not None)
    names = [kept.mixer for kept in found]
    # others are not the same mixer in the same place
    scratch = [kept.scratch if kept.is_alike else None for kept in found]
    columns: dict[str, Sequence[float | None]] = {
        'teacher': [kept.teacher for kept in found],
        'from scratch': scratch,
        'converted': [kept.student for kept in found],
    }
    # symbols that no row has
    marks = [(number, name, list(values)) for number, (name, values) in enumerate(columns.items(), start=len(rows))]
    chart = dots(f'{score.metric.title} of mixers in {teacher}', names, marks, score.metric.title)
    head = ['mixer', 'converted', 'from scratch', '% of the teacher']
    marked = [other is not None and not kept.has_same_options for kept, other in zip(found, scratch)]
    shown = [f'{number(other)}†' if mark else other for other, mark in zip(scratch, marked)]
    numbers = [[kept.mixer, kept.student, other, kept.share] for kept, other in zip(found, shown)]
    symbols = [dict(index=number, name=name) for number, name, _ in marks]
    notes = [tag('p', OTHER_OPTIONS)] if any(marked) else []
    return [figure(f'Mixers in {teacher}', legend(symbols), chart, head, numbers), *notes]


def _provenance(study: Study, rows: list[Row]) -> list[Element]:
    """Commands, and the machines of the evaluations."""
    commands = [shlex.join(['vitzoo', 'study', action, study.path]) for action in ('run', 'report')]
    machines = sorted({machine for row in rows for machine in row.machines})
    parts = [tag('p', 'Commands:'), tag('pre', '\n'.join(commands))]
    return [*parts, tag('p', 'Evaluated on:'), tag('ul', (tag('li', m) for m in machines))] if machines else parts
