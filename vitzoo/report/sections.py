"""Sections on cost, oversmoothing, health, scaling, errors and explanations."""

from collections.abc import Iterable
from math import isnan, log

from vitzoo.errors import format_flag
from vitzoo.metrics.oversmoothing import MEASURES
from vitzoo.report.blocks import figure, inline_symbol, scrolling
from vitzoo.report.charts import Curve, Point, block_ticks, curves, matrix, scatter
from vitzoo.report.markup import Element, tag
from vitzoo.report.records import SCORES, are_times_comparable, interval, num_scored

# costs of a model by the label of their axis: key of the record, and conversion
_COSTS = {
    'GMACs': ('gmacs', float),
    'million parameters': ('params', lambda params: params / 1e6),
    'milliseconds per image': ('images_per_second', lambda speed: 1e3 / speed),
}
# quantity, unit and title of the scaling curves
_SCALES = (
    ('gmacs', 'GMACs', 'Multiply-accumulates'),
    ('kmacs_per_pixel', 'thousand MACs', 'Multiply-accumulates per pixel'),
    ('milliseconds', 'milliseconds per image', 'Time'),
    ('peak_mb', 'MB', 'Peak memory'),
)
# more bands would cover each other
_MAX_BANDS = 8


def cost_section(records: list[dict]) -> list[Element]:
    """Accuracy against multiply-accumulates, parameters and time."""
    parts = []
    for score, title in SCORES.items():
        for label, (cost, convert) in _COSTS.items():
            known = [record for record in records if record.get(score) is not None and record.get(cost)]
            if len(known) < 2 or (cost == 'images_per_second' and not are_times_comparable(known)):
                continue
            parts.append(_cost_figure(known, score, title, label, [convert(record[cost]) for record in known]))
    if not parts:
        return []
    note = 'Up and to the left is better; the grey line is the Pareto front. Error bars are 95 % intervals.'
    return [tag('div', parts, class_='grid three'), tag('p', note, class_='note')]


def _cost_figure(records: list[dict], score: str, title: str, label: str, costs: list[float]) -> Element:
    points = []
    for record, x in zip(records, costs):
        y = record[score]
        low, high = interval(y, num_scored(record) if score == 'top1' else None)
        tip = f'{record["name"]}: {y:.2f} %, {x:,.4g} {label}'
        points.append(Point(record['index'], record['name'], x, y, low, high, tip))
    chart = scatter(f'{title} against {label}', points, label, f'{title} %')
    rows = [[point.name, point.x, point.y, point.low, point.high] for point in points]
    return figure(f'{title} against {label}', '', chart, ['model', label, f'{title} %', 'from', 'to'], rows)


def oversmoothing_section(records: list[dict]) -> list[Element]:
    """Each measure of the tokens over the blocks."""
    parts, has_bands = [], False
    for name, measure in MEASURES.items():
        lines = [line for record in records if (line := _token_curve(record, name))]
        if not lines:
            continue
        same_depth = len({len(line.y) for line in lines}) == 1
        for line in lines:
            line.x = [i if same_depth else i / len(line.y) for i in line.x]
        if len(lines) > _MAX_BANDS:
            for line in lines:
                line.spread = None
        has_bands |= any(line.spread for line in lines)
        x_label = 'block' if same_depth else 'relative depth: block / number of blocks'
        ticks = block_ticks(lines) if same_depth else None
        label = measure.label
        chart = curves(f'{label} after each block', lines, x_label, label.lower(), x_ticks=ticks)
        parts.append(figure(label, measure.about, chart, *_block_table(lines)))
    if not parts:
        return []
    bands = ' Bands are one standard deviation over images.' if has_bands else ''
    note = f'Patch tokens after each block, mean over images; large markers are the last blocks of stages.{bands}'
    note = tag('p', note + _describe_options(records), class_='note')
    return [tag('div', parts, class_='charts'), note]


def _block_table(lines: list[Curve]) -> tuple[list[str], list[list]]:
    """Head and rows of a table with a column per block."""
    depth = max(len(line.y) for line in lines)
    return ['model', *(str(i + 1) for i in range(depth))], [[line.name, *line.y] for line in lines]


def _describe_options(records: list[dict]) -> str:
    """The options that the tokens were measured with."""
    found = {r['name']: (r.get('token_statistics') or {}).get('options') or [] for r in records if _has_curve(r)}
    ways = {name: ' '.join(map(format_flag, options)) for name, options in found.items()}
    if len(set(ways.values())) > 1:
        others = ', '.join(f'{name} with {way}' for name, way in ways.items() if way)
        return f' The options differ, so the values are not comparable: {others}.'
    way = next(iter(ways.values()), '')
    return f' Measured with {way}.' if way else ''


def _has_curve(record: dict) -> bool:
    return any(_token_curve(record, measure) for measure in MEASURES)


def _token_curve(record: dict, measure: str) -> Curve | None:
    found = record.get('token_statistics') or {}
    values = found.get(measure) or ({'mean': record.get('oversmoothing')} if measure == 'cosine' else {})
    if not values.get('mean') or all(isnan(value) for value in numbers(values['mean'])):
        return None
    mean, spread = numbers(values['mean']), numbers(values['std']) if values.get('std') else None
    stages = found.get('stages') or [0] * len(mean)
    last = [i for i, stage in enumerate(stages) if i + 1 == len(stages) or stages[i + 1] != stage]
    names = found.get('blocks') or [f'block {i + 1}' for i in range(len(mean))]
    tips = [f'{record["name"]}, {name}: {value:.3f}' for name, value in zip(names, mean)]
    return Curve(record['index'], record['name'], range(1, len(mean) + 1), mean, tips, spread, last)


def health_section(records: list[dict]) -> list[Element]:
    """Error of approximate softmax attention, by mixer."""
    lines = []
    for record in records:
        health = record.get('health') or {}
        errors = {
            mixer: signs['softmax_error'] for mixer, signs in health.items() if signs.get('softmax_error') is not None
        }
        if errors:
            tips = [f'{record["name"]}, {mixer}: {error:.3f}' for mixer, error in errors.items()]
            lines.append(Curve(record['index'], record['name'], range(1, len(errors) + 1), list(errors.values()), tips))
    if not lines:
        return []
    label = 'error of approximate softmax attention'
    chart = curves(label, lines, 'mixer', 'relative error', x_ticks=block_ticks(lines))
    about = '|out − softmax| / |softmax| of each mixer that approximates softmax attention, for the same q, k and v.'
    part = figure('Error of the attention', about, chart, *_block_table(lines))
    return [tag('div', part, class_='charts')]


def scaling_section(records: list[dict]) -> list[Element]:
    """Cost against image size."""
    parts = []
    records = [{**record, 'scaling': _with_pixels(record['scaling'])} for record in records if record.get('scaling')]
    for quantity, unit, title in _SCALES:
        found = {record['name']: record for record in records if len(record['scaling'].get(quantity, ())) > 1}
        if not found:
            continue
        lines = [_scaling_curve(record, quantity, unit) for record in found.values()]
        sizes = sorted({size for line in lines for size in line.x})
        label = f'{title} against image size'
        chart = curves(label, lines, 'height and width of the image', unit, log=True, x_ticks=sizes)
        rows = [[name, *(dict(zip(line.x, line.y)).get(size) for size in sizes)] for name, line in zip(found, lines)]
        timed = sorted({record['scaling']['timed'] for record in found.values() if 'timed' in record['scaling']})
        is_timed = bool(timed) and quantity in ('milliseconds', 'peak_mb')
        about = f'against image size: {"; ".join(timed)}.' if is_timed else 'against image size.'
        parts.append(figure(title, about, chart, ['model', *map(str, sizes)], rows))
    if not parts:
        return []
    note = (
        'The factor after each name is the growth of the cost at the end of the curve for four times the pixels: ×4 is '
        'linear, ×16 quadratic. Per pixel, linear cost is constant and quadratic cost rises.'
    )
    return [tag('div', parts, class_='charts'), tag('p', note, class_='note')]


def _with_pixels(scaling: dict) -> dict:
    pixels = {size: 1e6 * gmacs / int(size) ** 2 for size, gmacs in scaling.get('gmacs', {}).items()}
    return {**scaling, 'kmacs_per_pixel': pixels}


def _scaling_curve(record: dict, quantity: str, unit: str) -> Curve:
    points = {int(size): value for size, value in record['scaling'][quantity].items()}
    sizes, values = list(points), list(points.values())
    growth = (values[-1] / values[-2]) ** (log(4) / (2 * log(sizes[-1] / sizes[-2])))
    tips = [f'{record["name"]} at {size} px: {value:,.4g} {unit}' for size, value in points.items()]
    own = [i for i, size in enumerate(sizes) if size == record.get('img_size')]
    name = record['name'] if quantity == 'kmacs_per_pixel' else f'{record["name"]} ×{growth:.1f}'
    return Curve(record['index'], name, sizes, values, tips, large=own)


def errors_section(records: list[dict]) -> list[Element]:
    """Reliability diagram, most confused classes, and confusion matrices if there are few classes."""
    records = [record for record in records if record.get('mistakes')]
    if not records:
        return []
    lines = [_reliability_curve(record) for record in records]
    chart = curves('accuracy against confidence', lines, 'confidence', 'accuracy', is_share=True)
    rows = [[line.name, x, y] for line in lines for x, y in zip(line.x, line.y)]
    about = 'Accuracy against confidence; a calibrated model is on the dotted line.'
    parts = [figure('Reliability', about, chart, ['model', 'confidence', 'accuracy'], rows), _confused_figure(records)]
    few = [record for record in records if 'confusion' in record['mistakes']]
    if not few:
        return [tag('div', parts, class_='charts')]
    matrices = []
    for record in few:
        names, counts = record['mistakes']['class_names'], record['mistakes']['confusion']
        chart = matrix(f'confusion matrix of {record["name"]}', counts, names)
        rows = [[name, *row] for name, row in zip(names, counts)]
        matrices.append(figure([inline_symbol(record['index']), record['name']], '', chart, ['', *names], rows))
    note = tag('p', 'Rows are classes, columns are predicted classes; correct predictions are blue.', class_='note')
    return [tag('div', parts, class_='charts'), tag('div', matrices, class_='grid matrices'), note]


def _reliability_curve(record: dict) -> Curve:
    """Accuracy over confidence, for the bins with images."""
    found = record['mistakes']['calibration']
    bins = [(c, a, n) for c, a, n in zip(found['confidence'], found['accuracy'], found['counts']) if n]
    tips = [f'{record["name"]}: {a:.0%} of {n} images correct at {c:.0%} confidence' for c, a, n in bins]
    return Curve(record['index'], record['name'], [c for c, _, _ in bins], [a for _, a, _ in bins], tips)


def _confused_figure(records: list[dict]) -> Element:
    """The most confused pairs of classes of each model."""
    rows = []
    for record in records:
        pairs = record['mistakes']['pairs'][:3]
        name = tag('th', inline_symbol(record['index']), record['name'], scope='row')
        cells = (tag('td', f'{a} → {b}\u00a0', tag('small', str(times)), class_='text') for a, b, times in pairs)
        rows.append(tag('tr', name, cells, data_model=record['index']))
    table = tag('table', tag('tbody', rows), class_='pairs')
    caption = tag('figcaption', tag('strong', 'Most confused'), ' Class, predicted class, and number of images.')
    return tag('figure', caption, scrolling(table, 'Most confused classes of each model'))


def explanations_section(records: list[dict]) -> list[Element]:
    """A few images with the saliency map of each model."""
    records = [record for record in records if record.get('explanations')]
    if not records:
        return []
    pictures = {item['file']: item for record in records for item in record['explanations']}
    head = [
        tag('th', 'image', scope='col'),
        *(tag('th', inline_symbol(r['index']), r['name'], scope='col') for r in records),
    ]
    rows = []
    for file, item in pictures.items():
        cells = [tag('th', _picture(item['picture'], item['label']), tag('span', item['label']), scope='row')]
        for record in records:
            found = [other for other in record['explanations'] if other['file'] == file]
            cells.append(tag('td', _explained(record, found[0]) if found else '–', data_model=record['index']))
        rows.append(tag('tr', cells))
    table = tag('table', tag('thead', tag('tr', head)), tag('tbody', rows), class_='pictures')
    methods = sorted({item['method'] for record in records for item in record['explanations']})
    note = f'Saliency maps ({" or ".join(methods)}), from dark to bright, with the prediction and its confidence.'
    return [scrolling(table, 'Explained images'), tag('p', note, class_='note')]


def _explained(record: dict, item: dict) -> list[Element]:
    is_right = item['prediction'] == item['label']
    mark = tag('span', '✓ ' if is_right else '✗ ', class_='right' if is_right else 'wrong')
    picture = _picture(item['overlay'], f'{item["label"]}: {item["method"]} of {record["name"]}')
    return [picture, tag('span', mark, f'{item["prediction"]} {item["confidence"]:.0%}')]


def _picture(address: str, alt: str) -> Element:
    return tag('img', src=address, alt=alt, width=112, height=112)


def numbers(values: Iterable[float | None]) -> list[float]:
    """Replace None with nan."""
    return [float('nan') if value is None else value for value in values]
