"""Charts of the page: scatter plots, curves, dot plots, bars, and confusion matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, sqrt

from vitzoo.report.markup import Element, tag
from vitzoo.report.svg import (
    CHARACTER,
    LINE,
    Plot,
    Scale,
    color,
    dash,
    fit_scale,
    is_wide,
    place_labels,
    shorten,
    spread_out,
    symbol,
)

# margins above and below the frame, for the labels of the axes
TOP, BOTTOM = 30, 42


@dataclass
class Point:
    """A model in a scatter plot, with a confidence interval of y."""

    index: int
    name: str
    x: float
    y: float
    low: float
    high: float
    tip: str


@dataclass
class Curve:
    """A model's curve, with an optional band of +/- `spread`, and with large markers at some of its points."""

    index: int
    name: str
    x: Sequence[float]
    y: Sequence[float]
    tips: Sequence[str]
    spread: Sequence[float] | None = None
    large: Sequence[int] = ()


def scatter(label: str, points: list[Point], x_label: str, y_label: str, is_cost: bool = True) -> Element:
    """Points with their names, and a line through the Pareto front, for small x if x is a cost."""
    size = width, height = 340, 300
    x = fit_scale([point.x for point in points], 46, width - 12, log=is_wide(point.x for point in points))
    y = fit_scale([v for point in points for v in (point.low, point.high)], height - BOTTOM, TOP)
    plot = Plot(label, size, x, y, x_label, y_label)
    front = front_line(points, is_cost)
    plot.line([(point.x, point.y) for point in front], 'frontier')
    for point in points:
        line = [(point.x, point.low), (point.x, point.high)]
        plot.line(line, f'interval {color(point.index)}', data_model=point.index)
    for point in points:
        plot.marker(point.index, point.x, point.y, point.tip)

    def inside(box: tuple) -> bool:
        return box[0] >= x.start and box[2] <= width - 2 and box[1] >= y.end - 6 and box[3] <= y.start - 2

    places = place_labels([(x(point.x), y(point.y)) for point in points], [point.name for point in points], inside)
    for point, place in zip(points, places):
        if place:
            plot.text(point.name, *place[:2], f'name {place[2]}', data_model=point.index)
    return plot.root


def front_line(points: list[Point], is_cost: bool = True) -> list[Point]:
    """The Pareto front for large y, and small x if it is a cost, from the best x on."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x if is_cost else -point.x, -point.y)):
        if not front or point.y > front[-1].y:
            front.append(point)
    return front


def block_ticks(lines: list[Curve]) -> list[int]:
    """Ticks at up to 16 blocks."""
    depth = max(len(line.y) for line in lines)
    return [*range(1, depth + 1, 1 + depth // 16)]


def curves(
    label: str,
    lines: list[Curve],
    x_label: str,
    y_label: str,
    log: bool = False,
    x_ticks: Sequence[float] | None = None,
    is_share: bool = False,
) -> Element:
    """Curves with bands, each labelled at its end.

    With `log`, x is logarithmic, and so is y if its values span a wide range. With `is_share`, both axes are from 0 to
    1, with a diagonal.
    """
    # tall enough for the names
    width, height = 480, max(300, TOP + BOTTOM + LINE * len(lines))
    margin = 26 + CHARACTER * max(len(shorten(line.name)) for line in lines)
    values = [v for line in lines for v in (*_band(line, -1), *_band(line, 1)) if not isnan(v)]
    x = fit_scale([0, 1] if is_share else [v for line in lines for v in line.x], 50, width - margin, log)
    x.ticks = list(x_ticks or x.ticks)
    y = fit_scale([0, 1] if is_share else values, height - BOTTOM, TOP, log and is_wide(values))
    plot = Plot(label, (width, round(height)), x, y, x_label, y_label)
    if is_share:
        plot.line([(0, 0), (1, 1)], 'reference')
    for line in lines:
        if line.spread:
            _draw_band(plot, line)
    for line in lines:
        points = _defined(line.x, line.y)
        plot.line(points, f'curve {color(line.index)} {dash(line.index)}', data_model=line.index)
        for i, (at, value) in enumerate(zip(line.x, line.y)):
            if not isnan(value):
                plot.marker(line.index, at, value, line.tips[i], small=i not in line.large)
    _write_names(plot, lines)
    return plot.root


def _draw_band(plot: Plot, line: Curve) -> None:
    there, back = (_defined(line.x, _band(line, side)) for side in (1, -1))
    outline = plot.path(there + back[::-1]) + 'z'
    plot.add('path', d=outline, class_=f'band {color(line.index)}', data_model=line.index)


def _write_names(plot: Plot, lines: list[Curve]) -> None:
    """Write the name of each curve after its end, with a leader line if it had to move."""
    x, y = plot.x, plot.y
    ends = [_defined(line.x, line.y)[-1] for line in lines]
    heights = spread_out([y(value) for _, value in ends], y.end + 4, y.start - 2)
    for line, (at, value), height in zip(lines, ends, heights):
        leader = f'M{x(at) + 5:.1f} {y(value):.1f}L{x.end + 6:.1f} {height:.1f}'
        plot.add('path', d=leader, class_=f'leader {color(line.index)}', data_model=line.index)
        plot.text(shorten(line.name), x.end + 10, height + 3.5, 'name', data_model=line.index)


def dots(label: str, rows: list[str], columns: list[tuple[int, str, list[float | None]]], x_label: str) -> Element:
    """A dot plot with a line per row and a dot per model; `columns` are (index, name, value in each row) of models."""
    left, width, gap = 14 + CHARACTER * max(len(shorten(row)) for row in rows), 480, 18
    height = TOP + gap * len(rows) + BOTTOM
    found = [value for _, _, values in columns for value in values if value is not None]
    x = fit_scale(found, left, width - 12)
    # rows from top to bottom, with a margin of half a row
    y = Scale(-0.5, len(rows) - 0.5, TOP, height - BOTTOM)
    plot = Plot(label, (width, height), x, Scale(0, 1, height - BOTTOM, TOP), x_label, '')
    for number, row in enumerate(rows):
        plot.add('line', class_='rule', x1=x.start, x2=x.end, y1=y(number), y2=y(number))
        plot.text(shorten(row), left - 8, y(number) + 3.5, 'row end')
    for index, name, values in columns:
        for number, value in enumerate(values):
            if value is not None:
                plot.add(**symbol(index, x(value), y(number), f'{name}, {rows[number]}: {value:.1f}'))
    return plot.root


def bars(label: str, rows: list[tuple[int, str, float, float | None]], x_label: str, marked: str) -> Element:
    """A bar per model; `rows` are (index, name, value, reference), and the reference, called `marked`, is a stroke."""
    left, width, gap = 30 + CHARACTER * max(len(shorten(name)) for _, name, *_ in rows), 480, 24
    height = TOP + gap * len(rows) + BOTTOM
    x = fit_scale([0, *(v for row in rows for v in row[2:] if v is not None)], left, width - 84)
    x = Scale(0, x.high, left, width - 84, ticks=[tick for tick in x.ticks if tick >= 0])
    plot = Plot(label, (width, height), x, Scale(0, 1, height - BOTTOM, TOP), x_label, '')
    for number, (index, name, value, other) in enumerate(rows):
        top = TOP + gap * number + 5
        tip = f'{name}: {value:.1f}' + (f', {marked} {other:.1f}' if other is not None else '')
        size = dict(x=float(left), y=float(top), width=float(x(value) - left), height=gap - 10)
        plot.add('rect', class_=f'bar mark {color(index)}', data_model=index, data_tip=tip, **size)
        plot.add(**symbol(index, left - 12, top + 7))
        plot.text(shorten(name), left - 22, top + 11, 'row end', data_model=index)
        plot.text(f'{value:.1f}', width - 46, top + 11, 'value end', data_model=index)
        if other is not None:
            plot.text(f'of {other:.1f}', width - 2, top + 11, 'value second end', data_model=index)
            plot.add('line', class_='stroke', x1=x(other), x2=x(other), y1=top - 2, y2=top + gap - 8)
    return plot.root


def matrix(label: str, counts: list[list[int]], names: list[str]) -> Element:
    """A confusion matrix with a row per class and a column per predicted class."""
    short = [shorten(name) for name in names]
    cell, left = 22 if len(names) <= 12 else 12, 10 + CHARACTER * max(map(len, short))
    side = cell * len(names)
    width, height = left + side + 6, left + side + 6
    root = tag('svg', viewBox=f'0 0 {width:.0f} {height:.0f}', width=f'{width:.0f}', height=f'{height:.0f}', role='img')
    root.set('aria-label', label)
    for i, row in enumerate(counts):
        middle = left + cell * (i + 0.5)
        root.append(tag('text', short[i], class_='row end', x=left - 6.0, y=middle + 3.5))
        root.append(
            tag('text', short[i], class_='row', transform=f'translate({middle + 3.5:.1f} {left - 6:.1f}) rotate(-90)')
        )
        for j, count in enumerate(row):
            # opacity is the square root, because errors are few compared with correct predictions
            share = count / max(sum(row), 1)
            place = dict(x=left + cell * j, y=left + cell * i)
            tip = f'{count} of {sum(row)} images of {names[i]} predicted as {names[j]}'
            size = dict(width=cell - 1, height=cell - 1, fill_opacity=round(sqrt(share), 3), data_tip=tip)
            root.append(tag('rect', class_=f'cell mark{" right" if i == j else ""}', **place, **size))
            if count and cell > 12:
                class_ = 'count strong' if share > 0.3 else 'count'
                root.append(tag('text', str(count), class_=class_, x=left + cell * (j + 0.5) - 0.5, y=middle + 3.0))
    return root


def _band(line: Curve, side: int) -> list[float]:
    return [y + side * spread for y, spread in zip(line.y, line.spread or [0] * len(line.y))]


def _defined(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    return [(at, value) for at, value in zip(x, y) if not isnan(value)]
