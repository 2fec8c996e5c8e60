"""Building blocks of the sections: figures with a caption and their numbers, model symbols, scrollable tables."""

from math import isnan

from vitzoo.report.markup import Element, tag
from vitzoo.report.svg import symbol


def inline_symbol(index: int) -> Element:
    """A model's symbol, inline in text."""
    return tag(
        'svg', tag(**symbol(index, 7, 7)), class_='key', viewBox='0 0 14 14', width=14, height=14, aria_hidden='true'
    )


def scrolling(element: Element, label: str) -> Element:
    """Wrap an element that may be wider than the screen in a scrollable box that can be focused."""
    return tag('div', element, class_='scroll', role='region', aria_label=label, tabindex=0)


def figure(
    title: str | list,
    about: str | Element,
    chart: Element,
    head: list[str],
    rows: list[list],
    class_: str | None = None,
) -> Element:
    """A chart with its caption, and its numbers in a collapsed table."""
    lines = [
        tag('tr', tag('th', str(first), scope='row'), (tag('td', number(v)) for v in rest)) for first, *rest in rows
    ]
    table = tag('table', tag('thead', tag('tr', (tag('th', h, scope='col') for h in head))), tag('tbody', lines))
    numbers = tag('details', tag('summary', 'Numbers'), scrolling(table, f'{chart.get("aria-label")}: numbers'))
    caption = tag('figcaption', tag('strong', title), ' ', about)
    return tag('figure', caption, tag('div', chart, class_='chart'), numbers, class_=class_)


def number(value: object) -> str:
    """Format a value with four significant digits."""
    if value is None or (isinstance(value, float) and isnan(value)):
        return '–'
    return f'{value:,.4g}' if isinstance(value, float) else str(value)
