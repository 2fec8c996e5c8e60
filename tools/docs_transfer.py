"""Writes the table of docs/transfer.md from weights/transfers.json. Run by `make docs`.

python tools/docs_transfer.py runs/study/students/transfer.json    # adds the results of `vitzoo transfer` first
"""

import json
import sys
from itertools import groupby
from pathlib import Path

from docs_models import fill, to_table

from vitzoo.transfer.measures import SCORE_TITLES
from vitzoo.transfer.summary import CONTROLS, STAGES, minutes

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / 'docs' / 'transfer.md', ROOT / 'weights' / 'transfers.json'
# the values in the table, and their circumstances
_KEPT = ('settings', 'kind', 'machine', 'seconds', 'teacher', *STAGES, 'controls', 'images_per_second', 'verdict')


def main(argv: list[str]) -> None:
    """Add the results in files, and write the page."""
    results = read_results()
    for path in argv:
        found = json.loads(Path(path).read_text())
        for result in found.get('students', [found]):
            kept = {key: result[key] for key in _KEPT}
            results = [other for other in results if other['settings'] != kept['settings']] + [kept]
    if argv:
        RESULTS.write_text(json.dumps(results, indent=1) + '\n')
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


def _order(result: dict) -> tuple:
    settings = result['settings']
    return (
        settings['teacher'],
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
        f'{settings["network_lr"]:g}',
        *('' if score is None else f'{score["score"]:.2f}' for score in scores),
        f'{minutes(result):.1f}',
    ]


if __name__ == '__main__':
    main(sys.argv[1:])
