"""Writes the tables of docs/models.md from weights/results.csv. Run by `make docs`.

With --measure, it first counts the parameters and MACs of every row again and updates these cells of results.csv.
"""

import csv
import inspect
import json
import re
import sys

import timm
import torch
from pages import ROOT, fill, to_table
from rich.console import Console
from rich.progress import track

import vitzoo
from vitzoo.metrics import count_macs
from vitzoo.models.vil import ViL

RESULTS = ROOT / 'weights' / 'results.csv'
PAGE = ROOT / 'docs' / 'models.md'
FAMILIES = {'cvt': 'CvT', 'vil': 'ViL', 'deit': 'DeiT', 'aft': 'AFT'}
OTHERS = 'Others'
# the backbone that was published with several mixers
SWAPPED = 'vil_small_abs'


def main(argv: list[str]) -> None:
    """Write the page."""
    if argv == ['--measure']:
        measure_rows()
    PAGE.write_text(fill(PAGE.read_text(), page_tables(read_rows())))
    print(f'wrote {PAGE}', file=sys.stderr)


def read_rows() -> list[dict[str, str]]:
    """The rows of results.csv."""
    with RESULTS.open(newline='') as file:
        return list(csv.DictReader(file))


def measure_rows() -> None:
    """Count parameters and MACs of every row, and update results.csv."""
    rows = read_rows()
    for row in track(rows, 'counting', console=Console(stderr=True)):
        params, macs = measure(row)
        row |= dict(params=params, gmacs=round(macs / 1e9, 4), versions=versions())
    write_rows(rows)


def write_rows(rows: list[dict]) -> None:
    """Replace the rows of results.csv."""
    with RESULTS.open('w', newline='') as file:
        writer = csv.DictWriter(file, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def measure(row: dict[str, str]) -> tuple[int, int]:
    """Parameters of a row's model, and its MACs at the row's image size."""
    model = timm.create_model(row['model'], device='meta', **json.loads(row['kwargs'] or '{}'))
    sizes = [int(size) for size in row['img_size'].split('x')]
    return sum(parameter.numel() for parameter in model.parameters()), count_macs(model, (sizes[0], sizes[-1]))


def versions() -> str:
    """Versions of the packages that the counts depend on."""
    packages = dict(torch=torch.__version__.partition('+')[0], timm=timm.__version__, vitzoo=vitzoo.__version__)
    return ', '.join(f'{name} {version}' for name, version in packages.items())


def overview_table(rows: list[dict[str, str]]) -> str:
    """One line per architecture at 224 x 224 pixels, with the accuracy after training on ImageNet-1k alone."""
    lines = {}
    for row in rows:
        name, is_published = row['model'].partition('.')[0], row['source'] in ('paper', '')
        if is_published and name not in lines and not row['kwargs'] and row['img_size'] == '224':
            lines[name] = [f'`{name}`', *(numbers(row)[key] for key in ('params', 'gmacs', 'top1'))]
    return to_table(['model', 'parameters', 'GMACs', 'top-1 %'], list(lines.values()))


def page_tables(rows: list[dict[str, str]]) -> dict[str, str]:
    """The overview, published results by backbone, one backbone with several mixers, and our own measurements."""
    published = [row for row in rows if row['source'] in ('paper', '')]
    tables = {'overview': overview_table(rows)}
    for family in (*FAMILIES.values(), OTHERS):
        members = [row for row in published if family_of(row) == family and not row['kwargs']]
        tables[family] = published_table(members)
    same_backbone = [row for row in published if row['model'].partition('.')[0] == SWAPPED]
    tables['swapped'] = swapped_table(same_backbone)
    # docs/study.md has the cells of the study
    tables['measured'] = measured_table([row for row in rows if row not in published and not is_cell(row)])
    return tables


def is_cell(row: dict[str, str]) -> bool:
    """Return True if a row has the result of a cell of a study."""
    return row['reference'].startswith('`vitzoo study run')


def published_table(rows: list[dict[str, str]]) -> str:
    """Size, cost, published accuracy, and the licence of the weights."""
    head = [
        'model',
        'trained on',
        'image',
        'parameters',
        'GMACs',
        'GFLOPs',
        'top-1 %',
        'top-5 %',
        'licence',
        'published in',
    ]
    keys = ('trained_on', 'img_size', 'params', 'gmacs', 'gflops', 'top1', 'top5', 'license', 'reference')
    return to_table(head, [[f'`{row["model"]}`', *(numbers(row)[key] for key in keys)] for row in rows])


def swapped_table(rows: list[dict[str, str]]) -> str:
    """Size, cost and published accuracy of one backbone with several mixers, the best first."""
    own_mixer = inspect.signature(ViL).parameters['mixer'].default
    lines = []
    for row in sorted(rows, key=lambda row: -float(row['top1'])):
        kwargs = json.loads(row['kwargs'] or '{}')
        mixer = kwargs.pop('mixer', own_mixer)
        mixers = [mixer] * 4 if isinstance(mixer, str) else mixer
        stages = [str(stage) for stage, name in enumerate(mixers, 1) if name == mixers[0]]
        options = ', '.join(f'{key}={value}' for key, value in kwargs.items())
        keys = ('params', 'gmacs', 'gflops', 'top1', 'top5')
        lines.append([f'`{mixers[0]}`', f'{stages[0]}–{stages[-1]}', options and f'`{options}`'])
        lines[-1] += [numbers(row)[key] for key in keys]
    return to_table(['mixer', 'stages', 'keywords', 'parameters', 'GMACs', 'GFLOPs', 'top-1 %', 'top-5 %'], lines)


def measured_table(rows: list[dict[str, str]]) -> str:
    """Results of `vitzoo validate`, and the origin of the weights."""
    head = ['model', 'images', 'image', 'top-1 %', 'top-5 %', 'last cosine', 'weights', 'made by']
    keys = ('data', 'img_size', 'top1', 'top5', 'oversmoothing', 'source', 'reference')
    return to_table(head, [[name_with_mixers(row), *(numbers(row)[key] for key in keys)] for row in rows])


def name_with_mixers(row: dict[str, str]) -> str:
    """A row's model, and the mixers that replace its own."""
    kwargs = json.loads(row['kwargs'] or '{}')
    mixers = dict.fromkeys(swap['mixer'] for swap in kwargs.get('swap_mixer', []))
    name = f'`{kwargs.get("base_model", row["model"])}`'
    return f'{name} with {", ".join(f"`{mixer}`" for mixer in mixers)}' if mixers else name


def numbers(row: dict[str, str]) -> dict[str, str]:
    """A row's cells, formatted."""
    shown = {**row, **{key: accuracy(row[key]) for key in ('top1', 'top5')}, 'params': f'{int(row["params"]):,}'}
    for key, factor in (('gmacs', 1), ('gflops', 2)):
        value = factor * float(row['gmacs'])
        shown[key] = f'{value:.2f}' if value >= 1 else f'{value:.3f}'
    shown['oversmoothing'] = f'{float(row["oversmoothing"]):.3f}' if row['oversmoothing'] else ''
    # weights without a tag are not published
    has_tag = '.' in row['model']
    shown['license'] = (timm.get_pretrained_cfg(row['model']).license or 'not stated') if has_tag else ''
    shown['reference'] = re.sub(r'https://(\S+)', lambda link: f'[{link_name(link[1])}]({link[0]})', row['reference'])
    return shown


def accuracy(cell: str) -> str:
    """A percentage with as many digits as were published, at most two."""
    return f'{float(cell):.{min(2, len(cell.partition(".")[2]))}f}' if cell else ''


def link_name(address: str) -> str:
    """Text of a link: the arXiv identifier, or the repository."""
    host, first, second, *_ = address.split('/')
    return f'arXiv {second}' if host == 'arxiv.org' else f'{first}/{second}'


def family_of(row: dict[str, str]) -> str:
    """The backbone of a row's model."""
    return FAMILIES.get(row['model'].partition('_')[0], OTHERS)


if __name__ == '__main__':
    main(sys.argv[1:])
