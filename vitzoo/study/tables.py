"""The tables of a study in Markdown, LaTeX and CSV."""

import csv
import json
from collections.abc import Iterator
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from vitzoo._files import replace_file
from vitzoo.errors import count_of
from vitzoo.metrics.oversmoothing import MEASURES
from vitzoo.report.transfers import read_transfer
from vitzoo.study.intervals import Estimate
from vitzoo.study.plan import Study, StudyCell
from vitzoo.study.results import (
    METRICS,
    ResultColumn,
    Row,
    mixed_evaluations,
    pareto_front,
    score_column,
    teachers_of,
    visible_columns,
)
from vitzoo.study.retention import KeptAccuracy, find_kept
from vitzoo.transfer.summary import STAGES

_CSV_KEYS = (
    *('way', 'model', 'evaluation', 'metric', 'seeds', 'mean', 'low', 'high', 'is_doubtful'),
    *('baseline_way', 'baseline', 'pairs', 'difference', 'difference_low', 'difference_high', 'verdict'),
)
# of a record, in cells.csv
_CELL_KEYS = ('img_size', 'n', 'images', *METRICS, 'speed_doubt')
CELL_COLUMNS = (
    *('way', 'model', 'seed', 'evaluation', *_CELL_KEYS),
    *('token_statistics', 'transfer', 'seconds', 'command'),
)
# columns of text, which are aligned at the left
_TEXTS = ('model', 'mixer')
OTHER_OPTIONS = (
    '"†" marks models whose mixer has its usual options, and not those with which a conversion starts, such as a'
    ' convolution of the values, or no gate.'
)
_RETENTION = (
    *('mixer', 'converted', '% of the teacher', 'from scratch'),
    *('before training', 'after matching', 'without attention'),
)
_ESCAPES = {character: f'\\{character}' for character in '&%$#_{}'} | {'±': r'$\pm$', '†': r'$\dagger$'}
# of paths of models
_ESCAPES |= {'~': r'\textasciitilde{}', '^': r'\textasciicircum{}', '\\': r'\textbackslash{}'}


class GridCell(NamedTuple):
    """The text of a cell, and the value that it is sorted by."""

    text: str
    value: float | str | None = None


def format_markdown(study: Study, rows: list[Row]) -> str:
    """A table for each way, and the notes that they need."""
    return '\n\n'.join([*format_ways(study, rows), f'{count_finished(study)}.', *format_notes(study, rows)])


def format_ways(study: Study, rows: list[Row]) -> list[str]:
    """A heading, the tables and the Pareto fronts of each way, in Markdown."""
    parts = []
    for way in by_way(rows):
        grids = [*_grids(study, way, rows)]
        table, *kept = (_to_markdown(headings, lines) for headings, lines, _ in grids)
        parts += [f'### {way[0].way}\n\n{table}', *format_fronts(study, way, rows), *kept]
        parts += [note for *_, notes in grids for note in notes]
    return parts


def format_latex(study: Study, rows: list[Row]) -> str:
    """The tabulars of each way, with the rules of the package booktabs."""
    parts = []
    for way in by_way(rows):
        for headings, lines, notes in _grids(study, way, rows):
            first, *others = (' & '.join(map(_to_latex, line)) + r' \\' for line in (headings, *lines))
            columns = ''.join('l' if heading in _TEXTS else 'r' for heading in headings)
            body = '\n'.join([r'\toprule', first, r'\midrule', *others, r'\bottomrule'])
            parts.append(f'% {way[0].way}\n\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}')
            parts += [f'% {note}' for note in notes]
    notes = [f'{count_finished(study)}.', *format_notes(study, rows)]
    return '\n\n'.join([*parts, *(f'% {note}' for note in notes)])


def _grids(study: Study, way: list[Row], rows: list[Row]) -> Iterator[tuple[list[str], list[list[str]], list[str]]]:
    """Headings, lines and notes of a way's table and, if it converts models, of the accuracies that they keep."""
    headings, lines = make_grid(study, way, rows)
    yield headings, [[cell.text for cell in line] for line in lines], []
    found = find_kept(study, way, rows)
    if found:
        yield [*_RETENTION], [_retention_line(kept) for kept in found], _retention_notes(found)


def _retention_line(kept: KeptAccuracy) -> list[str]:
    scores = (kept.student, kept.scratch, kept.start, kept.matched, kept.zero)
    student, scratch, *others = ('–' if score is None else f'{score:.2f}' for score in scores)
    share = '–' if kept.share is None else f'{kept.share:.1f}'
    mark = ('' if kept.is_alike else '*') + ('' if kept.has_same_options else '†')
    return [kept.mixer, student, share, scratch + mark, *others]


def _retention_notes(found: list[KeptAccuracy]) -> list[str]:
    """The meaning of the marks of `_retention_line`."""
    notes = []
    if not all(kept.is_alike for kept in found):
        notes.append(
            '"*" marks models that have the mixer in other blocks, or with other numbers of heads, than the converted'
            ' one.'
        )
    if not all(kept.has_same_options for kept in found):
        notes.append(OTHER_OPTIONS)
    return notes


def _to_markdown(headings: list[str], lines: list[list[str]]) -> str:
    rules = ['---' if heading in _TEXTS else '---:' for heading in headings]
    return '\n'.join(f'| {" | ".join(line)} |' for line in (headings, rules, *lines))


def write_csv(path: Path, rows: list[Row]) -> None:
    """Write one line for each model, way, evaluation and metric, with all digits."""
    with replace_file(path) as partial, partial.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, _CSV_KEYS)
        writer.writeheader()
        for row in rows:
            for column, value in row.values.items():
                line: dict[str, Any] = dict(
                    way=row.way, model=row.model, evaluation=column.evaluation, metric=column.key
                )
                line |= dict(seeds=value.n, mean=value.mean, is_doubtful=column in row.doubts)
                if not _is_constant(value, column):
                    line |= dict(low=value.low, high=value.high)
                difference = row.differences.get(column)
                if difference is not None and row.baseline is not None:
                    line |= dict(baseline_way=row.baseline[0], baseline=row.baseline[1], pairs=difference.n)
                    line |= dict(difference=difference.mean, difference_low=difference.low)
                    line |= dict(difference_high=difference.high, verdict=row.verdicts[column])
                writer.writerow(line)


def write_cells(path: Path, study: Study) -> None:
    """Write one line for each finished evaluation of a cell, with the metrics of its record.

    The columns `token_statistics` and `transfer` are JSON: the means of each measure of the tokens by block, and in the
    first line of a converted model the scores of the stages and controls.
    """
    with replace_file(path) as partial, partial.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, CELL_COLUMNS)
        writer.writeheader()
        for cell in study.cells:
            trained, transfer = cell.record.finished.get(cell.command, {}), _shorten_transfer(cell)
            for evaluation in cell.evaluations:
                record = cell.record.results(evaluation)
                if record is None:
                    continue
                line = {key: record.get(key) for key in _CELL_KEYS}
                curve = line['oversmoothing']
                line |= dict(way=cell.way, model=cell.model, seed=cell.seed, evaluation=evaluation)
                line |= dict(oversmoothing=curve[-1] if curve else None, transfer=transfer)
                line |= dict(token_statistics=_shorten_statistics(record.get('token_statistics')))
                writer.writerow(line | {key: trained.get(key) for key in ('seconds', 'command')})
                transfer = ''


def _shorten_statistics(statistics: dict | None) -> str:
    """The means of the tokens' statistics by block, with the stages of the blocks."""
    found = statistics or {}
    short = {name: dict(mean=_round(found[name]['mean'])) for name in MEASURES if name in found}
    stages = dict(stages=found['stages']) if 'stages' in found else {}
    return json.dumps(short | stages) if short else ''


def _shorten_transfer(cell: StudyCell) -> str:
    """The scores of a conversion, which `read_transfer` has in more detail, and its time."""
    found = read_transfer(str(cell.folder)).get('transfer')
    if found is None:
        return ''
    measures = (found['kind'], 'linear_probe')

    def shorten(scores: dict) -> dict:
        return {name: _round(scores[name]) for name in measures if name in scores}

    short = {name: shorten(found[name]) for name in ('teacher', *STAGES)}
    controls = {name: shorten(scores) for name, scores in found['controls'].items()}
    return json.dumps(dict(kind=found['kind'], **short, controls=controls, seconds=found['seconds']))


def _round(value: Any) -> Any:
    """Numbers with six significant digits; None, a measure that is not defined for a block, stays."""
    if isinstance(value, list):
        return [_round(part) for part in value]
    return None if value is None else float(f'{value:.6g}')


def by_way(rows: list[Row]) -> list[list[Row]]:
    """The rows of each way."""
    return [list(group) for _, group in groupby(rows, lambda row: row.way)]


def make_grid(study: Study, way: list[Row], rows: list[Row]) -> tuple[list[str], list[list[GridCell]]]:
    """Headings and cells of a way's table; each judged metric is followed by its differences, if there are any.

    If the models of the study, all of whose rows are given, are evaluated at several image sizes of their own, these
    have a column.
    """
    first = study.evaluations_of(way[0].way)[0]
    headings, columns = ['rank', 'model', 'seeds'], []
    has_sizes = len({row.img_size(first) for row in rows} - {None}) > 1
    headings += ['image'] if has_sizes else []
    for column in visible_columns(study, way):
        title = column.metric.title if column.evaluation == first else f'{column.metric.title}, {column.evaluation}'
        headings.append(title)
        columns.append((_value_cell, column))
        if column.metric.sign and any(column in row.differences for row in way):
            headings.append('difference')
            columns.append((_difference_cell, column))
    lines, score = [], score_column(study, way)
    for row in way:
        seeds = _num_seeds(row, score)
        name = f'{row.model} (baseline)' if row.is_baseline else row.model
        rank = GridCell(str(row.rank), row.rank) if row.rank else GridCell('–')
        cells = [make_cell(row, column, seeds) for make_cell, column in columns]
        size = [_size_cell(row.img_size(first))] if has_sizes else []
        lines.append([rank, GridCell(name, row.model), GridCell(str(seeds), seeds), *size, *cells])
    return headings, lines


def format_fronts(study: Study, way: list[Row], rows: list[Row]) -> list[str]:
    """The models of a way on the Pareto fronts of accuracy and cost, in one paragraph.

    GMACs are compared with those of the teachers, among the rows of the whole study; speeds of two ways are not.
    """
    score, lines, teachers = score_column(study, way), [], teachers_of(way)
    if score is None:
        return []
    for key, sign in (('gmacs', -1), ('images_per_second', 1)):
        cost = ResultColumn(score.evaluation, key)
        known = [row for row in rows if (row.way, row.model) in teachers] if key == 'gmacs' else []
        known += [row for row in way if row not in known]
        # unreliable speeds are not compared
        if any(cost in row.doubts for row in known) or len([row for row in known if cost in row.values]) < 2:
            continue
        names = ', '.join(row.model for row in pareto_front(known, score, cost, sign))
        lines.append(f'Pareto front of {score.metric.title} and {cost.metric.title}: {names}.')
    return [' '.join(lines)] if lines else []


def format_size(size: tuple[int, int]) -> str:
    """The side of a square image, or its height and width."""
    height, width = size
    return str(height) if height == width else f'{height}x{width}'


def _size_cell(size: tuple[int, int] | None) -> GridCell:
    return GridCell('–') if size is None else GridCell(format_size(size), prod(size))


def _num_seeds(row: Row, score: ResultColumn | None) -> int:
    """The seeds of the accuracy that ranks a model; without it, of the value with the most."""
    found = row.values.get(score) if score is not None else None
    return found.n if found else max(value.n for value in row.values.values())


def _value_cell(row: Row, column: ResultColumn, seeds: int) -> GridCell:
    value = row.values.get(column)
    if value is None:
        return GridCell('–')
    text = _format_estimate(value, column, '') + ('?' if column in row.doubts else '')
    if value.n != seeds and not _is_constant(value, column):
        text += f' ({value.n} of {seeds} seeds)' if value.n < seeds else f' ({value.n} seeds)'
    return GridCell(text, value.mean)


def _difference_cell(row: Row, column: ResultColumn, seeds: int) -> GridCell:
    difference = row.differences.get(column)
    if difference is None:
        return GridCell('–')
    # the baseline may lack seeds that the model has
    pairs = f'({difference.n} of {seeds} seeds)' if difference.n < seeds else ''
    words = [_format_estimate(difference, column, '+'), pairs, row.verdicts[column]]
    return GridCell(' '.join(word for word in words if word), difference.mean)


def _is_constant(value: Estimate, column: ResultColumn) -> bool:
    """Return True for a count that is the same for all seeds, as unless `keep_softmax: auto` chose other numbers."""
    return column.metric.is_exact and not value.half_width


def _format_estimate(value: Estimate, column: ResultColumn, sign: str) -> str:
    metric = column.metric
    text = format(value.mean * metric.factor, f'{sign}.{metric.digits}f')
    if value.half_width is None or _is_constant(value, column):
        return text
    return f'{text} ± {value.half_width * metric.factor:.{metric.digits}f}'


def count_finished(study: Study) -> str:
    """The number of finished cells, in words."""
    finished = sum(cell.record.is_finished for cell in study.cells)
    verb = 'is' if 1 in (finished, len(study.cells)) else 'are'
    return f'{finished} of {count_of(len(study.cells), "cell")} {verb} finished'


def format_notes(study: Study, rows: list[Row]) -> list[str]:
    """Sentences that a reader of the tables needs."""
    notes = [
        '± is the half-width of the 95 % confidence interval of the mean over the seeds (Student t); a single seed has'
        ' none.'
    ]
    pairs = [
        (row, column)
        for way in by_way(rows)
        for column in visible_columns(study, way)
        for row in way
        if column.metric.sign and column in row.differences
    ]
    judged = sum(row.differences[column].half_width is not None for row, column in pairs)
    if pairs:
        baselines = dict.fromkeys(row.baseline[1] for row, _ in pairs if row.baseline is not None)
        notes.append(
            f'Differences are to {", ".join(baselines)}, of pairs with the same seed; a converted model is compared'
            f' with its teacher, at the same image size. "better" and "worse" stand only where the 95 % interval of the'
            f' paired difference excludes zero.'
        )
    if judged:
        notes.append(
            f'The intervals are not corrected for the number of comparisons, here {judged}: of 20 without a true'
            f' difference, one excludes zero on average.'
        )
    notes += _override_notes(study, rows)
    mixed = mixed_evaluations(study, rows)
    if mixed:
        notes.append(
            f'In {", ".join(mixed)} the models were evaluated on different images, such as those that each held out, or'
            f' of data that has changed. Differences of their scores are also those of the images; an evaluation of'
            f' another name repeats it for all models.'
        )
    if any(row.doubts for row in rows):
        notes.append(
            '? marks speeds that were measured on a busy machine or in uneven rounds, and speeds and memory that were'
            ' measured on several machines.'
        )
    return notes


def _override_notes(study: Study, rows: list[Row]) -> list[str]:
    """For each way, the models in the tables that have other options than the rest."""
    shown = {(row.way, row.model) for row in rows}
    # the seeds of a model have the same options
    cells: dict[str, dict[str, StudyCell]] = {}
    for cell in study.cells:
        cells.setdefault(cell.way, {}).setdefault(cell.model, cell)
    found: dict[str, dict[str, list[str]]] = {}
    for way, of_way in cells.items():
        # without a model that has the options of the way only, all are compared
        others = [other.options for other in of_way.values() if not other.overrides]
        others = others or [other.options for other in of_way.values()]
        for model, cell in of_way.items():
            if not cell.overrides or (way, model) not in shown:
                continue
            # of a mapping, an override has some keys; a mixer has no arguments of others
            own = {
                key: value
                for key, value in cell.overrides.items()
                if key in cell.options and any(x.get(key) != cell.options[key] for x in others)
            }
            if own:
                options = ', '.join(f'{key} = {value}' for key, value in own.items())
                found.setdefault(way, {}).setdefault(options, []).append(model)
    return [
        f'In {way}, options differ from those of the other models: {options} for {", ".join(models)}.'
        for way, groups in found.items()
        for options, models in groups.items()
    ]


def _to_latex(text: str) -> str:
    return ''.join(_ESCAPES.get(character, character) for character in text)
