"""Writes docs/imagenette.html, docs/study.png and the tables of docs/study.md from the csv files of weights/.

Run by `make docs`.

python tools/docs_study.py study/imagenette.yaml    # first copies the finished cells

Cells that were finished on another machine, and are not in the study's folder here, are kept, also those of models that
the study had before.
"""

import csv
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from docs_models import measure, read_rows, versions, write_rows
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pages import ROOT, fill, to_table

from vitzoo.errors import UserError, run_command
from vitzoo.mixers import list_mixers
from vitzoo.study.page import render_study
from vitzoo.study.plan import Study, StudyCell, read_study
from vitzoo.study.results import METRICS, Row, collect
from vitzoo.study.tables import CELL_COLUMNS, format_notes, format_ways, write_cells

PAGE, CELLS = ROOT / 'docs' / 'study.md', ROOT / 'weights' / 'study.csv'
PICTURE = ROOT / 'docs' / 'study.png'
# the ways whose models are trained, and their columns in the picture
BACKBONES = {'deit': 'DeiT', 'aft': 'AFT', 'vil': 'ViL', 'cvt': 'CvT'}
# by the end of the name of a way
KINDS = {'_converted_auto': 'converted, rate by trials', '_converted': 'converted', '': 'from scratch'}
COLORS = {'from scratch': '#1f77b4', 'converted': '#ff7f0e', 'converted, rate by trials': '#d62728'}
# written by `vitzoo validate --corrupt`; docs/study.md has the command
ROBUSTNESS = ROOT / 'weights' / 'robustness.csv'
# the groups of ImageNet-C, in its order
GROUPS = {'noise': 3, 'blur': 4, 'weather': 4, 'digital': 4}
# the page that `vitzoo study report` would write, of the cells of all machines
REPORT = ROOT / 'docs' / 'imagenette.html'
STUDY = 'study/imagenette.yaml'
# other work ran beside some cells, so speed and memory are left to docs/performance.md
SHOWN = [name for name in METRICS if name not in ('images_per_second', 'peak_memory_mb')]
NOTE = 'docs/study.md says how the cells were computed, and what they show.'
# the evaluation whose results are also in weights/results.csv
MAIN = 'clean'
TRAINED_ON, DATA, IMG_SIZE = 'Imagenette', 'Imagenette, 3,925 photographs', '128'


def main(argv: list[str]) -> None:
    """Copy the results of the study, also from a copy of its file, and write the page.

    Raises:
        UserError: The file is that of another study.
    """
    for path in argv:
        study, title = read_study(path), read_study(STUDY).title
        if study.title != title:
            # its cells would replace those of the same names
            raise UserError(f"'{path}' is the study '{study.title}', but weights/ has only '{title}'; give {STUDY}")
        merge_cells(study)
        write_results(study)
    REPORT.write_text(study_page())
    draw_accuracies(PICTURE)
    PAGE.write_text(fill(PAGE.read_text(), {'imagenette': study_tables(), 'robustness': robustness_table()}))
    print(f'wrote {PAGE}, {PICTURE} and {REPORT}', file=sys.stderr)


def study_tables() -> str:
    """The tables of all ways that have results, and how many cells have them."""
    study, rows, finished = collect_committed()
    return '\n\n'.join([*format_ways(study, rows), f'{finished}.']) if rows else 'Nothing yet.'


def study_page() -> str:
    """The HTML page of all ways that have results."""
    study, rows, finished = collect_committed()
    return render_study(study, rows, [finished], [*format_notes(study, rows), NOTE])


def collect_committed() -> tuple[Study, list[Row], str]:
    """The study, the rows of its committed records, and how many of its cells have all of them."""
    study, records = read_study(STUDY), read_cells()
    rows = collect(study, lambda cell, evaluation: records.get((*_key(cell), evaluation)))
    finished = sum(all((*_key(cell), name) in records for name in cell.evaluations) for cell in study.cells)
    return study, rows, f'{finished} of {len(study.cells)} cells are finished'


def draw_accuracies(path: Path) -> None:
    """Draw the top-1 accuracies of every mixer, from scratch and converted, in a column for each backbone."""
    accuracies: dict[str, dict[str, dict[str, float]]] = {}
    for row in collect_committed()[1]:
        suffix = next(suffix for suffix in KINDS if row.way.endswith(suffix))
        way, kind = row.way.removesuffix(suffix), KINDS[suffix]
        mixer = row.mixer or _mixer_of(row.model, way)
        accuracies.setdefault(mixer, {}).setdefault(way, {})[kind] = row.records[MAIN]['top1']
    softmax = accuracies.pop('softmax')
    # the best in DeiT, which has all mixers, at the top
    mixers = sorted(accuracies, key=lambda mixer: max(accuracies[mixer].get('deit', {}).values(), default=0))
    figure = Figure(figsize=(10, 0.22 * len(mixers) + 1.6), layout='constrained')
    columns = figure.subplots(1, len(BACKBONES), sharey=True, width_ratios=[2, 1, 1, 1])
    for axes, (way, title) in zip(columns, BACKBONES.items()):
        axes.axvline(softmax[way]['from scratch'], color='#2ca02c', alpha=0.6, linewidth=3, zorder=0)
        for place, mixer in enumerate(mixers):
            found = accuracies[mixer].get(way, {})
            axes.plot([*found.values()], [place] * len(found), color='#dddddd', linewidth=2, zorder=1)
            for kind, accuracy in found.items():
                axes.scatter(accuracy, place, color=COLORS[kind], s=22, zorder=2)
        axes.set(title=title, xlabel='top-1, %')
        axes.grid(alpha=0.3)
        axes.tick_params(axis='y', length=0)
        axes.spines[['top', 'right']].set_visible(False)
    _equalize_scales(columns[1:])
    columns[0].set_yticks(range(len(mixers)), mixers, fontsize='small')
    columns[0].set_ylim(-0.8, len(mixers) - 0.2)
    for kind, color in COLORS.items():
        columns[0].scatter([], [], color=color, s=22, label=kind)
    columns[0].plot([], [], color='#2ca02c', alpha=0.6, linewidth=3, label='softmax, from scratch')
    figure.legend(loc='outside upper center', ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def _equalize_scales(columns: Sequence[Axes]) -> None:
    """Give axes the same width in data units, around the middle of their data."""
    limits = [axes.get_xlim() for axes in columns]
    half = max(high - low for low, high in limits) / 2
    for axes, (low, high) in zip(columns, limits):
        axes.set_xlim((low + high) / 2 - half, (low + high) / 2 + half)


def _mixer_of(model: str, way: str) -> str:
    """The mixer of a model like 'deit_ls_nano'; 'aft_conv_nano' is the body AFT with the mixer 'aft_conv'."""
    name = model.removesuffix('_nano')
    mixer = name.removeprefix(f'{way}_')
    return mixer if mixer in list_mixers() else name


def robustness_table() -> str:
    """Accuracy of the shipped weights on corrupted images: the mean, its share of the clean one, and the groups."""
    head = ['model', 'top-1 %', 'corrupted', 'of clean', *GROUPS]
    lines = []
    for row in _read_lines(ROBUSTNESS):
        by_corruption, start = list(json.loads(row['corrupt']).values()), 0
        groups = []
        for size in GROUPS.values():
            scores = [score for scores in by_corruption[start : start + size] for score in scores]
            groups.append(f'{mean(scores):.1f}')
            start += size
        corrupted, share = float(row['corrupt_top1']), float(row['corrupt_relative'])
        model = row['model'].partition('.')[0]
        lines.append([model, f'{float(row["top1"]):.1f}', f'{corrupted:.1f}', f'{share:.0f} %', *groups])
    return to_table(head, lines)


def read_cells() -> dict[tuple[str, ...], dict]:
    """The committed records by way, model, seed and evaluation."""
    return {_line_key(line): _read_record(line) for line in _read_lines(CELLS)}


def _read_record(line: dict[str, str]) -> dict:
    """A record as `vitzoo validate` writes it, without what is not committed."""
    record: dict = {name: float(line[name]) for name in SHOWN if line[name]}
    record |= {name: json.loads(line[name]) for name in ('n', 'token_statistics', 'transfer') if line.get(name)}
    return record | {name: line[name] for name in ('img_size', 'images') if line.get(name)}


def merge_cells(study: Study) -> None:
    """Replace the lines of the finished cells in study.csv, or add them, in the order of the study, others last."""
    with TemporaryDirectory() as folder:
        new = Path(folder, CELLS.name)
        write_cells(new, study)
        lines = {_line_key(line): line for path in (CELLS, new) for line in _read_lines(path)}
    order = [(*_key(cell), evaluation) for cell in study.cells for evaluation in study.evaluations]
    with CELLS.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, CELL_COLUMNS)
        writer.writeheader()
        writer.writerows(lines[key] for key in dict.fromkeys([*order, *lines]) if key in lines)


def write_results(study: Study) -> None:
    """Replace the rows of the finished cells in results.csv, or add them, in the order of the study, others last."""
    rows, origin = read_rows(), f'`vitzoo study run {STUDY}`, '
    others = [row for row in rows if not row['reference'].startswith(origin)]
    cells = {found[1]: row for row in rows if (found := re.match(f'{re.escape(origin)}cell ([^,]+)', row['reference']))}
    cells |= {cell.name: _result(cell, origin) for cell in study.cells if cell.record.results(MAIN)}
    order = dict.fromkeys([*(cell.name for cell in study.cells), *cells])
    write_rows([*others, *(cells[name] for name in order if name in cells)])


def _read_lines(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline='', encoding='utf-8') as file:
        return list(csv.DictReader(file))


def _line_key(line: dict[str, str]) -> tuple[str, ...]:
    return line['way'], line['model'], line['seed'], line['evaluation']


def _result(cell: StudyCell, origin: str) -> dict:
    """A cell's row in results.csv."""
    record, config = cell.record.results(MAIN) or {}, json.loads((cell.folder / 'config.json').read_text())
    kwargs = {'num_classes': config['num_classes'], **config.get('model_args', {})}
    row = dict(model=config['architecture'], kwargs=json.dumps(kwargs), img_size=IMG_SIZE)
    params, macs = measure(row)
    curve = record['oversmoothing']
    return row | dict(
        trained_on=TRAINED_ON,
        data=DATA,
        top1=f'{record["top1"]:.2f}',
        top5=f'{record["top5"]:.2f}',
        params=params,
        gmacs=round(macs / 1e9, 4),
        oversmoothing=round(curve[-1], 4) if curve else '',
        source='reproduced',
        reference=f'{origin}cell {cell.name}, validated on {_machine(cell)}',
        versions=versions(),
    )


def _machine(cell: StudyCell) -> str:
    """The machine that validated a cell, and its versions."""
    return cell.record.finished[MAIN]['place'].get('measured_on', 'an unknown machine')


def _key(cell: StudyCell) -> tuple[str, str, str]:
    return cell.way, cell.model, str(cell.seed)


if __name__ == '__main__':
    run_command(main, sys.argv[1:])
