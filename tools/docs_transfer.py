"""Writes the tables and the picture of docs/transfer.md from weights/transfers.json. Run by `make docs`.

python tools/docs_transfer.py runs/study/students/transfer.json    # adds the results of `vitzoo transfer` first
"""

import json
import sys
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure
from pages import ROOT, fill, to_table

from vitzoo.transfer.scoring import SCORE_TITLES
from vitzoo.transfer.summary import CONTROLS, STAGES, minutes

PAGE, RESULTS = ROOT / 'docs' / 'transfer.md', ROOT / 'weights' / 'transfers.json'
PICTURE = PAGE.with_suffix('.png')
# titles and colors of the stages in the picture
_DRAWN = {'start': ('as it is', '#bbbbbb'), 'matched': ('matched', '#ff7f0e'), 'student': ('student', '#1f77b4')}
# the values in the table, and their circumstances
_KEPT = (
    *('settings', 'kind', 'machine', 'seconds', 'teacher', *STAGES),
    *('network_rates', 'controls', 'images_per_second', 'verdict'),
)


def main(argv: list[str]) -> None:
    """Add the results in files, and write the page."""
    results = read_results()
    for path in argv:
        found = json.loads(Path(path).read_text())
        for result in found.get('students', [found]):
            kept = {key: result[key] for key in _KEPT if key in result}
            results = [other for other in results if _identity(other) != _identity(kept)] + [kept]
    if argv:
        RESULTS.write_text(json.dumps(results, indent=1) + '\n')
    draw_stages(PICTURE, largest_group(results))
    PAGE.write_text(fill(PAGE.read_text(), {'results': results_table(results)}))
    print(f'wrote {PAGE}', file=sys.stderr)


def read_results() -> list[dict]:
    """The committed results."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def results_table(results: list[dict]) -> str:
    """Scores in percent, a table for each teacher and budget, best students first."""
    if not results:
        return 'Nothing yet.'
    head = ['mixer', 'learning rate', 'teacher', *STAGES.values(), *CONTROLS.values(), 'minutes']
    parts = []
    for caption, group in groupby(sorted(results, key=_order), key=_caption):
        parts += [caption, to_table(head, [_cells(result) for result in group])]
    return '\n\n'.join(parts)


def largest_group(results: list[dict]) -> list[dict]:
    """The last student of each mixer, without softmax blocks, of the teacher and budget with the most steps in all."""
    groups: dict[str, dict[str, dict]] = {}
    for result in results:
        if not result['settings']['keep_softmax']:
            groups.setdefault(_caption(result), {})[result['settings']['mixer']] = result

    def num_steps(group: dict[str, dict]) -> int:
        settings = [result['settings'] for result in group.values()]
        return sum(each['steps'] + each['network_steps'] for each in settings)

    return [*max(groups.values(), key=num_steps, default={}).values()]


def draw_stages(path: Path, results: list[dict]) -> None:
    """Draw the scores of students after each stage, the best at the top, and the range of those of their teachers."""
    figure = Figure(figsize=(8, 0.22 * len(results) + 1.4), layout='constrained')
    axes = figure.subplots()
    results = sorted(results, key=lambda result: result['student']['score'])
    for place, result in enumerate(results):
        scores = [result[stage]['score'] for stage in _DRAWN]
        axes.plot([min(scores), max(scores)], [place, place], color='#dddddd', linewidth=2, zorder=1)
        for score, (_, color) in zip(scores, _DRAWN.values()):
            axes.scatter(score, place, color=color, s=22, zorder=2)
        axes.text(97, place, f'{scores[-1]:.1f}', fontsize=7, va='center')
    for title, color in _DRAWN.values():
        axes.scatter([], [], color=color, s=22, label=title)
    teachers = [result['teacher']['score'] for result in results]
    axes.axvspan(min(teachers) - 0.15, max(teachers) + 0.15, color='#2ca02c', alpha=0.5, linewidth=0, label='teacher')
    axes.set_yticks(range(len(results)), [result['settings']['mixer'] for result in results], fontsize='small')
    axes.set(xlabel=f'{SCORE_TITLES[results[0]["kind"]]}, %', xlim=(0, 103), ylim=(-0.8, len(results) - 0.2))
    axes.grid(axis='x', alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    figure.legend(loc='outside upper center', ncols=len(_DRAWN) + 1, frameon=False)
    figure.savefig(path, dpi=130)


def _identity(result: dict) -> tuple:
    """A new result replaces an older one of the same mixer, teacher, budget, images and rate."""
    settings = result['settings']
    keys = ('mixer', 'steps', 'network_steps', 'keep_softmax', 'network_lr', 'validation_images')
    return Path(settings['teacher']).name, *(settings[key] for key in keys)


def _order(result: dict) -> tuple:
    settings = result['settings']
    return (
        Path(settings['teacher']).name,
        -settings['steps'] - settings['network_steps'],
        settings['validation_images'],
        -result['student']['score'],
    )


def _caption(result: dict) -> str:
    settings = result['settings']
    name, score = Path(settings['teacher']).name, SCORE_TITLES[result['kind']]
    steps = f'{settings["steps"]} + {settings["network_steps"]} steps'
    return f'**{steps}**; {name}, {score} of {settings["validation_images"]:,} images'


def _cells(result: dict) -> list[str]:
    settings = result['settings']
    scores = [result['teacher'], *(result[stage] for stage in STAGES)]
    scores += [result['controls'].get(name) for name in CONTROLS]
    return [
        f'`{settings["mixer"]}`' + (f' and {settings["keep_softmax"]} softmax' if settings['keep_softmax'] else ''),
        f'{result["network_rates"]["lr"]:.2g}' if 'network_rates' in result else '',
        *('' if score is None else f'{score["score"]:.2f}' for score in scores),
        f'{minutes(result):.1f}',
    ]


if __name__ == '__main__':
    main(sys.argv[1:])
