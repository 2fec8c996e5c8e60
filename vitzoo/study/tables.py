"""The tables of a study: Markdown, LaTeX and CSV, and the HTML page of its finished cells."""

import csv
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

from vitzoo.report import read_records, write_report
from vitzoo.report.transfers import read_transfer
from vitzoo.study.intervals import Estimate
from vitzoo.study.plan import Study, StudyCell
from vitzoo.study.results import METRICS, ResultColumn, Row, pareto_front, visible_columns

_CSV_KEYS = (
    *('way', 'model', 'evaluation', 'metric', 'seeds', 'mean', 'low', 'high', 'is_doubtful'),
    *('baseline_way', 'baseline', 'pairs', 'difference', 'difference_low', 'difference_high', 'verdict'),
)
_ESCAPES = {character: f'\\{character}' for character in '&%$#_{}'} | {'~': r'\textasciitilde{}', '±': r'$\pm$'}


def write_tables(folder: Path, study: Study, rows: list[Row]) -> list[Path]:
    """Write all files of a report, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (('table.md', format_markdown(study, rows)), ('table.tex', format_latex(study, rows))):
        (folder / name).write_text(text + '\n', encoding='utf-8')
    write_csv(folder / 'table.csv', rows)
    write_cells(folder / 'cells.csv', study)
    records = [record for cell in study.cells for record in _page_records(study, cell)]
    now = datetime.now(timezone.utc)
    made = f'{now.day} {now:%B %Y, %H:%M} UTC'
    write_report(folder, dict(title=study.title, made=made, records=records, command='vitzoo study report'))
    return [folder / name for name in ('table.md', 'table.tex', 'table.csv', 'cells.csv', 'index.html')]


def format_markdown(study: Study, rows: list[Row]) -> str:
    """A table for each way, and the notes that they need."""
    return '\n\n'.join([*format_ways(study, rows), *_notes(study, rows)])


def format_ways(study: Study, rows: list[Row]) -> list[str]:
    """A heading, a table and the Pareto fronts of each way, in Markdown."""
    parts = []
    for way in _by_way(rows):
        headings, lines = _grid(study, way)
        rules = ['---:' if number != 1 else '---' for number in range(len(headings))]
        table = '\n'.join(f'| {" | ".join(line)} |' for line in (headings, rules, *lines))
        parts += [f'### {way[0].way}\n\n{table}', *_fronts(study, way)]
    return parts


def format_latex(study: Study, rows: list[Row]) -> str:
    """A tabular for each way, with the rules of the package booktabs."""
    parts = []
    for way in _by_way(rows):
        headings, lines = _grid(study, way)
        lines = [' & '.join(map(_to_latex, line)) + r' \\' for line in (headings, *lines)]
        columns = 'rl' + 'r' * (len(headings) - 2)
        body = '\n'.join([r'\toprule', lines[0], r'\midrule', *lines[1:], r'\bottomrule'])
        parts.append(f'% {way[0].way}\n\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}')
    return '\n\n'.join([*parts, *(f'% {note}' for note in _notes(study, rows))])


def write_csv(path: Path, rows: list[Row]) -> None:
    """Write one line for each model, way, evaluation and metric, with all digits."""
    with path.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, _CSV_KEYS)
        writer.writeheader()
        for row in rows:
            for column, value in row.values.items():
                line: dict[str, Any] = dict(
                    way=row.way, model=row.model, evaluation=column.evaluation, metric=column.key
                )
                line |= dict(seeds=value.n, mean=value.mean, is_doubtful=column in row.doubts)
                if not column.metric.is_exact:
                    line |= dict(low=value.low, high=value.high)
                difference = row.differences.get(column)
                if difference is not None and row.baseline is not None:
                    line |= dict(baseline_way=row.baseline[0], baseline=row.baseline[1], pairs=difference.n)
                    line |= dict(difference=difference.mean, difference_low=difference.low)
                    line |= dict(difference_high=difference.high, verdict=row.verdicts[column])
                writer.writerow(line)


def write_cells(path: Path, study: Study) -> None:
    """Write one line for each finished evaluation of a cell, with the metrics of its record."""
    with path.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(
            file, ['way', 'model', 'seed', 'evaluation', *METRICS, 'speed_doubt', 'seconds', 'command']
        )
        writer.writeheader()
        for cell in study.cells:
            trained = cell.record.finished.get(cell.command, {})
            for evaluation in cell.evaluations:
                record = cell.record.results(evaluation)
                if record is None:
                    continue
                line = {key: record.get(key) for key in (*METRICS, 'speed_doubt')}
                curve = line['oversmoothing']
                line |= dict(way=cell.way, model=cell.model, seed=cell.seed, evaluation=evaluation)
                line |= dict(oversmoothing=curve[-1] if curve else None)
                writer.writerow(line | {key: trained.get(key) for key in ('seconds', 'command')})


def _by_way(rows: list[Row]) -> list[list[Row]]:
    """The rows of each way."""
    return [list(group) for _, group in groupby(rows, lambda row: row.way)]


def _grid(study: Study, rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of a table; after each judged metric is a column of its differences, if there are any."""
    first = study.evaluations_of(rows[0].way)[0]
    headings, columns = ['rank', 'model', 'seeds'], []
    for column in visible_columns(study, rows):
        title = column.metric.title if column.evaluation == first else f'{column.metric.title}, {column.evaluation}'
        headings.append(title)
        columns.append((_format_value, column))
        if column.metric.sign and any(column in row.differences for row in rows):
            headings.append('difference')
            columns.append((_format_difference, column))
    lines = []
    for row in rows:
        seeds = max(value.n for value in row.values.values())
        name = f'{row.model} (baseline)' if row.is_baseline else row.model
        cells = [format_cell(row, column) for format_cell, column in columns]
        lines.append([str(row.rank) if row.rank else '–', name, str(seeds), *cells])
    return headings, lines


def _fronts(study: Study, rows: list[Row]) -> list[str]:
    """The models of a way on the Pareto fronts of accuracy and cost, in one paragraph."""
    first, lines = study.evaluations_of(rows[0].way)[0], []
    score = next(
        (ResultColumn(first, key) for key in ('top1', 'map') if ResultColumn(first, key) in rows[0].values), None
    )
    if score is None:
        return []
    for key, sign in (('gmacs', -1), ('images_per_second', 1)):
        cost = ResultColumn(first, key)
        # unreliable speeds are not compared
        if any(cost in row.doubts for row in rows) or len([row for row in rows if cost in row.values]) < 2:
            continue
        names = ', '.join(row.model for row in pareto_front(rows, score, cost, sign))
        lines.append(f'Pareto front of {score.metric.title} and {cost.metric.title}: {names}.')
    return [' '.join(lines)] if lines else []


def _format_value(row: Row, column: ResultColumn) -> str:
    value = row.values.get(column)
    if value is None:
        return '–'
    text = _format_estimate(value, column, '')
    return f'{text}?' if column in row.doubts else text


def _format_difference(row: Row, column: ResultColumn) -> str:
    difference = row.differences.get(column)
    if difference is None:
        return '–'
    # the baseline may lack seeds that the model has
    pairs = f'({difference.n} of {row.values[column].n} seeds)' if difference.n < row.values[column].n else ''
    words = [_format_estimate(difference, column, '+'), pairs, row.verdicts[column]]
    return ' '.join(word for word in words if word)


def _format_estimate(value: Estimate, column: ResultColumn, sign: str) -> str:
    metric = column.metric
    text = format(value.mean * metric.factor, f'{sign}.{metric.digits}f')
    if metric.is_exact or value.half_width is None:
        return text
    return f'{text} ± {value.half_width * metric.factor:.{metric.digits}f}'


def _notes(study: Study, rows: list[Row]) -> list[str]:
    """Sentences that a reader of the tables needs."""
    expected = len(study.cells)
    finished = sum(cell.record.is_finished for cell in study.cells)
    notes = [
        f'{finished} of {expected} cells are finished. ± is the half-width of the 95 % confidence interval of the mean'
        f' over the seeds (Student t); a single seed has none.'
    ]
    pairs = [
        (row, column)
        for way in _by_way(rows)
        for column in visible_columns(study, way)
        for row in way
        if column.metric.sign and column in row.differences
    ]
    judged = sum(row.differences[column].half_width is not None for row, column in pairs)
    if pairs:
        baselines = dict.fromkeys(row.baseline[1] for row, _ in pairs if row.baseline is not None)
        notes.append(
            f'Differences are to {", ".join(baselines)}, of pairs with the same seed; a converted model is compared'
            f' with its teacher. "better" and "worse" stand only where the 95 % interval of the paired difference'
            f' excludes zero.'
        )
    if judged:
        notes.append(
            f'The intervals are not corrected for the number of comparisons, here {judged}: of 20 without a true'
            f' difference, one excludes zero on average.'
        )
    if any(row.doubts for row in rows):
        notes.append('? marks speeds that were measured on a busy machine.')
    return notes


def _page_records(study: Study, cell: StudyCell) -> list[dict]:
    """The record of a cell for the HTML page: its first evaluation, and the corruptions of the others."""
    names = [name for name in cell.evaluations if name in cell.record.finished]
    if not names:
        return []
    record: dict = {}
    for name in names:
        (found,) = read_records(str(cell.record.results_file(name)))
        record = found | cell.record.finished[name]['place'] | record
    trained = cell.record.finished.get(cell.command, {})
    commands = [trained['command']] if 'command' in trained else []
    return [record | read_transfer(str(cell.folder)) | dict(commands=commands)]


def _to_latex(text: str) -> str:
    return ''.join(_ESCAPES.get(character, character) for character in text)
