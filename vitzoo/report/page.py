"""Renders a report as one HTML page; sections without data are left out.

A report is plain data: `title`, `made` (date and time), `command`, and `records`, one per model: the records of
`vitzoo validate` with the additions of `vitzoo.report.gather`. The page depends on nothing else.
"""

from importlib.resources import files
from string import Template

from vitzoo.errors import count_of
from vitzoo.report.blocks import inline_symbol, number, scrolling
from vitzoo.report.markup import Element, tag, to_html
from vitzoo.report.records import prepare
from vitzoo.report.robustness import robustness_section
from vitzoo.report.sections import (
    cost_section,
    errors_section,
    explanations_section,
    health_section,
    oversmoothing_section,
    scaling_section,
)
from vitzoo.report.table import models_section
from vitzoo.report.transfers import transfer_section

# id, title and function of the sections between the table of models and the commands
_SECTIONS = (
    ('cost', 'Accuracy and cost', cost_section),
    ('transfer', 'Transfer', transfer_section),
    ('oversmoothing', 'Oversmoothing', oversmoothing_section),
    ('health', 'Approximation of softmax attention', health_section),
    ('scaling', 'Scaling', scaling_section),
    ('robustness', 'Robustness', robustness_section),
    ('errors', 'Errors', errors_section),
    ('explanations', 'Explanations', explanations_section),
)


def render(report: dict) -> str:
    """Render the page."""
    records = prepare(report['records'])
    sections = [('models', 'Models', models_section(records))]
    for name, title, make in _SECTIONS:
        parts = make(records)
        if parts:
            sections.append((name, title, parts))
    sections.append(('provenance', 'How this was made', provenance_section(report, records)))
    return assemble(report['title'], _describe(report, records), sections)


def assemble(title: str, about: list[str], sections: list[tuple[str, str, list[Element]]]) -> str:
    """A page with a header, and sections of an id, a title and their elements.

    Args:
        about: Lines below the title.
    """
    body = [_header(title, about, sections)]
    for name, heading, parts in sections:
        body.append(
            tag('section', tag('h2', heading, id=f'{name}-title'), parts, id=name, aria_labelledby=f'{name}-title')
        )
    here = files('vitzoo.report')
    return Template((here / 'template.html').read_text(encoding='utf-8')).substitute(
        title=to_html(tag('title', title)),
        style=(here / 'style.css').read_text(encoding='utf-8'),
        script=(here / 'script.js').read_text(encoding='utf-8'),
        body='\n'.join(to_html(element) for element in body),
    )


def _header(title: str, about: list[str], sections: list[tuple]) -> Element:
    """Title, lines about the data, and links to the sections."""
    links = [tag('a', heading, href=f'#{name}') for name, heading, _ in sections]
    toggle = tag(
        'button', 'Dark', type='button', id='theme', aria_pressed='false', title='Switch between light and dark'
    )
    top = tag('div', tag('h1', title), toggle, class_='top')
    lines = [tag('p', line, class_='about') for line in about]
    return tag('header', top, lines, tag('nav', links, aria_label='Sections'))


def _describe(report: dict, records: list[dict]) -> list[str]:
    """Number of models, data, date, and the machine if it is the same for all."""
    data = dict.fromkeys(_describe_data(record) for record in records if record.get('n'))
    about = [count_of(len(records), 'model'), *data, report['made']]
    places = {str(record['measured_on']) for record in records if record.get('measured_on')}
    return [' · '.join(about), *(places if len(places) == 1 else ())]


def _describe_data(record: dict) -> str:
    data = 'the bundled sample' if record.get('data') == 'sample' else record.get('data')
    return count_of(record['n'], 'image') + (f' of {data}' if data else '')


def provenance_section(report: dict, records: list[dict]) -> list[Element]:
    """Commands, machines, and architecture and weights of each model."""
    fields = ('architecture', 'weights', 'measured_on', 'load')
    rows = []
    for record in records:
        name = tag('th', inline_symbol(record['index']), record['name'], scope='row')
        rows.append(tag('tr', name, (tag('td', number(record.get(field)), class_='text') for field in fields)))
    head = [
        tag('th', text, scope='col', class_='text')
        for text in ('model', 'architecture', 'weights', 'measured on', 'system load')
    ]
    commands = [command for record in records for command in record.get('commands', ())]
    # keep the last of equal commands, so that it follows all commands it depends on
    commands = [*dict.fromkeys([*commands, report['command']][::-1])][::-1]
    return [
        tag('p', 'Commands:'),
        tag('pre', '\n'.join(commands)),
        scrolling(
            tag('table', tag('thead', tag('tr', head)), tag('tbody', rows)),
            'Machine, architecture and weights of each model',
        ),
    ]
