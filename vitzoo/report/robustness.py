"""Section on robustness: the published variants of ImageNet, and corruptions."""

from vitzoo.data.corruptions import SEVERITIES
from vitzoo.data.variants import SUITE
from vitzoo.report.blocks import figure, inline_symbol
from vitzoo.report.charts import Curve, bars, curves, dots
from vitzoo.report.markup import Element, tag
from vitzoo.validate.results import SUITE_ROWS, mean_or_none

# keys of tables of corruptions, with their title and the key of the clean accuracy
_TABLES = {
    'imagenet_c': ('ImageNet-C', 'imagenet_top1'),
    'imagenet_c_partial': ('A part of ImageNet-C', 'imagenet_top1'),
    'corrupt': ('The same images, corrupted', 'top1'),
}


def robustness_section(records: list[dict]) -> list[Element]:
    """Accuracy on each variant of ImageNet, and under each corruption."""
    parts = suite_figures(records)
    for field, (title, clean) in _TABLES.items():
        tested = [record for record in records if record.get(field)]
        if tested:
            parts += corruption_figures(tested, field, title, clean)
    return [tag('div', parts, class_='charts')] if parts else []


def suite_figures(records: list[dict]) -> list[Element]:
    """All variants of ImageNet in one chart."""
    titles = {f'{field}_top1': title for variant in SUITE for field, title in variant.titles.items()}
    titles |= {f'{field}_partial': f'{title} (a part)' for field, title in titles.items()}
    found = {field: title for field, title in titles.items() if any(field in record for record in records)}
    if not found:
        return []
    tested = [record for record in records if found.keys() & record.keys()]
    columns = [(record['index'], record['name'], [record.get(field) for field in found]) for record in tested]
    chart = dots('top-1 accuracy on variants of ImageNet', list(found.values()), columns, 'top-1 %')
    more = {field: title for field, title in SUITE_ROWS.items() if any(field in record for record in tested)}
    rows = [[title, *(record.get(field) for record in tested)] for field, title in (found | more).items()]
    head = ['top-1 %', *(record['name'] for record in tested)]
    return [figure('Variants of ImageNet', legend(tested), chart, head, rows)]


def corruption_figures(records: list[dict], field: str, title: str, clean: str) -> list[Element]:
    """Accuracy under corruptions: the mean, by corruption, and by severity."""
    names = list(dict.fromkeys(name for record in records for name in record[field]))
    labels = [name.replace('_', ' ') for name in names]
    overall = {r['index']: mean_or_none(value for row in r[field].values() for value in row) for r in records}
    rows = [(r['index'], r['name'], mean, r.get(clean)) for r in records if (mean := overall[r['index']]) is not None]
    parts = []
    if rows:
        chart = bars(f'{title}: mean top-1', rows, 'top-1 %', 'clean')
        about = 'Mean top-1; strokes are the accuracy on clean images.'
        parts.append(figure(title, about, chart, ['model', 'corrupted', 'clean'], [list(row[1:]) for row in rows]))
    columns = [(r['index'], r['name'], [mean_or_none(r[field].get(name) or [None]) for name in names]) for r in records]
    values = [[name, *(column[2][row] for column in columns)] for row, name in enumerate(labels)]
    if any(value is not None for _, *row in values for value in row):
        chart = dots(f'{title}: top-1 under each corruption', labels, columns, 'top-1 %')
        head = ['corruption', *(record['name'] for record in records)]
        parts.append(figure('By corruption', legend(records), chart, head, values, class_='tall'))
    return [*parts, *severity_figure(records, field, title)]


def severity_figure(records: list[dict], field: str, title: str) -> list[Element]:
    """Mean accuracy by severity, for models with a complete table."""
    lines = []
    for record in records:
        values = [mean_or_none(row[i] for row in record[field].values()) for i in range(len(SEVERITIES))]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            tips = [f'{record["name"]}, severity {i}: {value:.1f} %' for i, value in zip(SEVERITIES, known)]
            lines.append(Curve(record['index'], record['name'], SEVERITIES, known, tips))
    if not lines:
        return []
    chart = curves(f'{title}: top-1 by severity', lines, 'severity', 'top-1 %', x_ticks=SEVERITIES)
    rows = [[line.name, *line.y] for line in lines]
    return [figure('By severity', 'Mean over corruptions.', chart, ['model', *map(str, SEVERITIES)], rows)]


def legend(records: list[dict]) -> Element:
    """Symbols and names of the models, for charts without room for names."""
    names = (
        tag('span', inline_symbol(record['index']), record['name'], data_model=record['index']) for record in records
    )
    return tag('span', names, class_='legend')
