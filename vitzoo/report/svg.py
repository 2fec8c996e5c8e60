"""Drawing primitives of the charts: scales, axes with ticks, markers, and labels that do not overlap.

Colours, fonts and line widths are classes of style.css, so that charts follow the page's light or dark theme; a
plotting library would write them into every shape. Lengths are in pixels of the chart's view box.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitzoo.report.markup import Element, tag

# width of a character and height of a line, in the largest font of the charts
CHARACTER, LINE = 6.6, 13.0
# longer names would leave no room for the marks
_LONGEST_NAME = 32
SHAPES = {
    'circle': 'M-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0-8.4 0z',
    'square': 'M-3.7-3.7h7.4v7.4h-7.4z',
    'triangle': 'M0-4.8L4.7 3.6H-4.7z',
    'diamond': 'M0-5.2L5.2 0L0 5.2L-5.2 0z',
    'wedge': 'M0 4.8L4.7-3.6H-4.7z',
}
NUM_COLORS, NUM_DASHES = 8, 3


@dataclass
class Scale:
    """Maps values in [low, high] to pixels in [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: list[float] = field(default_factory=list)

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def fit_scale(values: Iterable[float], start: float, end: float, log: bool = False) -> Scale:
    """A scale with round ticks that contains all values, with a margin at both ends."""
    # lazy: importing matplotlib takes half a second
    from matplotlib.ticker import LogLocator, MaxNLocator

    values = list(values)
    low, high = min(values), max(values)
    if log:
        # a margin of 8 % of the axis, or half an octave if all values are equal
        margin = max((high / low) ** 0.08, 1.4 if low == high else 1.05)
        low, high = low / margin, high * margin
        ticks = LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)).tick_values(low, high)
    else:
        margin = 0.06 * (high - low) or abs(high) / 10 or 1
        low, high = low - margin, high + margin
        ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return Scale(low, high, start, end, log, [float(tick) for tick in ticks if low <= tick <= high])


def is_wide(values: Iterable[float]) -> bool:
    """Return True if values span a range that needs a logarithmic scale."""
    values = list(values)
    return min(values) > 0 and max(values) / min(values) > 8


def short_number(value: float) -> str:
    """Format a tick label, with the suffix k, M or G for large values."""
    for factor, letter in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if abs(value) >= factor * (10 if letter == 'k' else 1):
            return f'{value / factor:g}{letter}'
    return f'{value:.6g}'.replace('-', '−')


class Plot:
    """A chart with two axes, to which marks are added.

    Args:
        label: Accessible name, for screen readers.
        x: Scale from left to right; its ends determine the margins.
        y: Scale from bottom to top.
        x_label: Written below the axis.
        y_label: Written above the axis, horizontally.
    """

    def __init__(self, label: str, size: tuple[int, int], x: Scale, y: Scale, x_label: str, y_label: str) -> None:
        self.x, self.y = x, y
        width, height = size
        self.root = tag(
            'svg', viewBox=f'0 0 {width} {height}', width=width, height=height, role='img', aria_label=label
        )
        for tick in y.ticks:
            self.add('line', class_='rule', x1=x.start, x2=x.end, y1=y(tick), y2=y(tick))
            self.text(short_number(tick), x.start - 7, y(tick) + 3.5, 'tick end')
        free = 0.0
        for tick in x.ticks:
            self.add('line', class_='axis', x1=x(tick), x2=x(tick), y1=y.start, y2=y.start + 4)
            half = CHARACTER * len(short_number(tick)) / 2
            # a number that would touch the one before is left out
            if x(tick) - half >= free:
                self.text(short_number(tick), x(tick), y.start + 16, 'tick middle')
                free = x(tick) + half + CHARACTER / 2
        self.add('line', class_='axis', x1=x.start, x2=x.end, y1=y.start, y2=y.start)
        self.text(x_label, (x.start + x.end) / 2, y.start + 33, 'axis-label middle')
        self.text(y_label, 2, y.end - 12, 'axis-label')

    def add(self, name: str, *children: Element | str, **attributes: Any) -> Element:
        """Add an element to the chart."""
        element = tag(name, *children, **attributes)
        self.root.append(element)
        return element

    def text(self, text: str, x: float, y: float, class_: str, **attributes: Any) -> Element:
        """Write text that starts at x, or with the class `middle` or `end` is centred or ends at x."""
        return self.add('text', text, x=float(x), y=float(y), class_=class_, **attributes)

    def line(self, points: Sequence[tuple[float, float]], class_: str, **attributes: Any) -> Element:
        """Draw a line through points in data coordinates."""
        return self.add('path', d=self.path(points), class_=class_, **attributes)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        """The path through points in data coordinates."""
        return 'M' + 'L'.join(f'{self.x(x):.1f} {self.y(y):.1f}' for x, y in points)

    def marker(self, index: int, x: float, y: float, tip: str | None = None, small: bool = False) -> Element:
        """Draw the symbol of a model at a point in data coordinates."""
        return self.add(**symbol(index, self.x(x), self.y(y), tip, 0.55 if small else 1))


def symbol(index: int, x: float, y: float, tip: str | None = None, size: float = 1) -> dict:
    """Arguments of `tag` for a model's symbol, a shape in a colour."""
    shape = list(SHAPES.values())[index % len(SHAPES)]
    scale = f' scale({size:g})' if size != 1 else ''
    place = f'translate({x:.1f} {y:.1f}){scale}'
    return dict(name='path', d=shape, transform=place, class_=f'mark {color(index)}', data_model=index, data_tip=tip)


def shorten(name: str) -> str:
    """Cut the middle out of a name that is too long for a chart."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f'{name[: half - 1]}…{name[-half:]}'


def color(index: int) -> str:
    """CSS class of a model's colour."""
    return f'm{index % NUM_COLORS}'


def dash(index: int) -> str:
    """CSS class of a model's dash pattern, which distinguishes models of the same colour."""
    return f'd{index // NUM_COLORS % NUM_DASHES}'


def spread_out(positions: Sequence[float], low: float, high: float, gap: float = LINE) -> list[float]:
    """Move positions apart to at least `gap`; all stay within [low, high] if they fit."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    places, last = {}, -math.inf
    for i in order:
        last = places[i] = max(positions[i], last + gap, low)
    # move what exceeds the end back, and its neighbours with it
    last = math.inf
    for i in reversed(order):
        last = places[i] = min(places[i], last - gap, high)
    return [places[i] for i in range(len(positions))]


def place_labels(
    points: Sequence[tuple[float, float]], texts: Sequence[str], inside: Callable[[tuple], bool]
) -> list[tuple[float, float, str] | None]:
    """Place each text next to its point without overlaps: (x, y, class), or None if it does not fit.

    `inside` returns True if a box (left, top, right, bottom) is within the chart.
    """
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    labels = []
    for (x, y), text in zip(points, texts):
        width = CHARACTER * len(text)
        candidates = [
            *((x + 9, y + dy, 'start') for dy in (4, 0, 8, -4, 12)),
            *((x - 9, y + dy, 'end') for dy in (4, 0, 8, -4, 12)),
            *(
                (x + dx, y + dy, anchor)
                for dy in (-9, 16, -20, 27)
                for dx, anchor in ((0, 'middle'), (5, 'start'), (-5, 'end'))
            ),
        ]
        boxes = {place: _box(*place, width) for place in candidates}
        free = (place for place, box in boxes.items() if inside(box) and not any(_overlap(box, b) for b in taken))
        found = next(free, None)
        labels.append(found)
        if found:
            taken.append(boxes[found])
    return labels


def _box(x: float, y: float, anchor: str, width: float) -> tuple[float, float, float, float]:
    left = {'start': x, 'middle': x - width / 2, 'end': x - width}[anchor]
    return left, y - 10, left + width, y + 3


def _overlap(a: tuple, b: tuple) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
