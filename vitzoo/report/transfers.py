"""Section on transfers: scores of students with other mixers, with controls, speed and tokens next to the teacher."""

import json
from math import isnan
from pathlib import Path

from vitzoo.errors import UserError
from vitzoo.report.blocks import figure, inline_symbol, scrolling
from vitzoo.report.charts import Curve, Point, block_ticks, curves, scatter
from vitzoo.report.markup import Element, tag
from vitzoo.report.records import short_names
from vitzoo.report.sections import numbers
from vitzoo.transfer.record import RECORD
from vitzoo.transfer.scoring import SCORE_TITLES
from vitzoo.transfer.summary import CONTROLS, STAGES, find_doubts, minutes


def read_transfer(name: str) -> dict:
    """The results of the transfer that made a model, under 'transfer'; empty if none did.

    Raises:
        UserError: Its file cannot be read.
    """
    path = Path(name) / RECORD
    if not path.is_file():
        return {}
    try:
        results = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read '{path}': {error}; make the transfer again in another folder") from error
    return dict(transfer=results) if 'verdict' in results else {}


def transfer_section(records: list[dict]) -> list[Element]:
    """Scores of the stages and the controls, scores against speed, and tokens of teacher and student."""
    symbols = _teacher_symbols(records)
    records = [record for record in records if record.get('transfer')]
    if not records:
        return []
    sides = dict.fromkeys(side for record in records for side in record['transfer']['images_per_second'])
    parts = [_speed_figure(records, symbols, side) for side in sorted(sides, key=int)]
    # the tokens of some models are unknown
    known = [(record, lines) for record in records if (lines := _token_curves(record, symbols))]
    parts += [_token_figure(record['name'], lines) for record, lines in known]
    verdicts = tag('ul', (tag('li', record['transfer']['verdict']) for record in records), class_='note')
    return [retention_table(records), verdicts, tag('div', parts, class_='charts')]


def retention_table(records: list[dict]) -> Element:
    """Scores of teachers, of students after each stage, and of controls."""
    controls = [name for name in CONTROLS if any(name in record['transfer']['controls'] for record in records)]
    titles = [CONTROLS[name] for name in controls]
    heads = ['model', 'measure', 'teacher', *STAGES.values(), 'points', *titles, 'minutes']
    rows = []
    for record in records:
        results = record['transfer']
        name = tag('th', inline_symbol(record['index']), record['name'], scope='row')
        for measure in (results['kind'], 'linear_probe'):
            if measure in results['teacher']:
                cells = [SCORE_TITLES[measure], *_scores(results, measure, controls), f'{minutes(results):.1f}']
                rows.append(tag('tr', name, (tag('td', cell) for cell in cells)))
    head = tag('tr', (tag('th', text, scope='col', class_='text' if text == 'model' else None) for text in heads))
    return scrolling(tag('table', tag('thead', head), tag('tbody', rows)), 'Scores of teachers, students and controls')


def _scores(results: dict, measure: str, controls: list[str]) -> list[str]:
    """The teacher, the stages, the difference of the student from the teacher, and the controls."""
    scores = [results['teacher'], *(results[stage] for stage in STAGES)]
    found = [f'{score[measure]:.2f} %' for score in scores]
    difference = f'{results["student"][measure] - results["teacher"][measure]:+.2f}'.replace('-', '−')
    rest = [results['controls'].get(name) for name in controls]
    return [*found, difference, *('–' if score is None else f'{score[measure]:.2f} %' for score in rest)]


def _speed_figure(records: list[dict], symbols: dict[str, int], side: str) -> Element:
    """Score against speed at one image size; of each student and, once, of each teacher."""
    points: list[Point] = []
    short = short_names([*symbols])
    teachers = {folder: name if name == 'teacher' else f'teacher {name}' for folder, name in zip(symbols, short)}
    for record in records:
        results, speeds = record['transfer'], record['transfer']['images_per_second'].get(side, {})
        folder = results['settings']['teacher']
        sides = (('student', record['name'], record['index']), ('teacher', teachers[folder], symbols[folder]))
        for kind, name, index in sides:
            if kind not in speeds or name in [point.name for point in points]:
                continue
            x, y = speeds[kind], results[kind]['score']
            points.append(Point(index, name, x, y, y, y, f'{name}: {y:.2f} %, {x:,.4g} images/s'))
    title = f'Score against speed at {side} pixels'
    chart = scatter(title, points, 'images/s', 'score %', is_cost=False)
    doubts = find_doubts({record['name']: record['transfer']['images_per_second'].get(side, {}) for record in records})
    about = 'Up and to the right is better.' + (f' These speeds are unreliable: {doubts}.' if doubts else '')
    return figure(title, about, chart, ['model', 'images/s', 'score %'], [[p.name, p.x, p.y] for p in points])


def _token_curves(record: dict, symbols: dict[str, int]) -> list[Curve]:
    """Mean cosine similarity of the tokens of a student and of its teacher, as far as it is known."""
    results, lines = record['transfer'], []
    for kind, index in (('student', record['index']), ('teacher', symbols[results['settings']['teacher']])):
        # a block with a single token has none
        values = numbers(results['oversmoothing'].get(kind, {}).get('mean', ()))
        if all(map(isnan, values)):
            continue
        tips = [f'{kind}, block {block}: {value:.3f}' for block, value in enumerate(values, start=1)]
        lines.append(Curve(index, kind, range(1, len(values) + 1), values, tips))
    return lines


def _token_figure(name: str, lines: list[Curve]) -> Element:
    """Mean cosine similarity of the tokens of a student and its teacher."""
    title = f'Tokens of {name} and its teacher'
    chart = curves(title, lines, 'block', 'mean cosine similarity', x_ticks=block_ticks(lines))
    heads = ['model', *map(str, lines[0].x)]
    return figure(title, 'Mean cosine similarity.', chart, heads, [[line.name, *line.y] for line in lines])


def _teacher_symbols(records: list[dict]) -> dict[str, int]:
    """The symbol of each teacher: its own where the page has its model, else one that no model of the page has."""
    own = {str(Path(record['model'])): record['index'] for record in records}
    found: dict[str, int] = {}
    for record in records:
        if record.get('transfer'):
            teacher = record['transfer']['settings']['teacher']
            unlisted = len(records) + sum(index >= len(records) for index in found.values())
            found.setdefault(teacher, own.get(str(Path(teacher)), unlisted))
    return found
