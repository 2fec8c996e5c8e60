"""The parts that sections are made of: a chart with its caption and its numbers, a model's sign, wide tables."""

from math import isnan

from vitzoo.report.markup import Element, tag
from vitzoo.report.svg import sign


def key(index: int) -> Element:
    """A model's sign, for a line of text."""
    return tag(
        'svg', tag(**sign(index, 7, 7)), class_='key', viewBox='0 0 14 14', width=14, height=14, aria_hidden='true'
    )


def scrolling(element: Element, label: str) -> Element:
    """What may be wider than the screen, in a box of its own that the keyboard reaches."""
    return tag('div', element, class_='scroll', role='region', aria_label=label, tabindex=0)


def figure(
    title: str | list,
    about: str | Element,
    chart: Element,
    head: list[str],
    rows: list[list],
    class_: str | None = None,
) -> Element:
    """A chart with its caption, and its numbers for who wants them or cannot see the chart."""
    lines = [
        tag('tr', tag('th', str(first), scope='row'), (tag('td', number(v)) for v in rest)) for first, *rest in rows
    ]
    table = tag('table', tag('thead', tag('tr', (tag('th', h, scope='col') for h in head))), tag('tbody', lines))
    numbers = tag('details', tag('summary', 'Numbers'), scrolling(table, f'{chart.get("aria-label")}: numbers'))
    caption = tag('figcaption', tag('strong', title), ' ', about)
    return tag('figure', caption, tag('div', chart, class_='chart'), numbers, class_=class_)


def number(value: object) -> str:
    """A number of a chart in four digits or so."""
    if value is None or (isinstance(value, float) and isnan(value)):
        return '–'
    return f'{value:,.4g}' if isinstance(value, float) else str(value)
