"""The results of transfers for readers: tables and sentences."""

from rich.console import Console
from rich.table import Table

from vitzoo.transfer.scoring import SCORE_TITLES

# points above the control without attention from which a mixer is clearly better than it
_CLEAR = 2.0
# results in the order of the stages, with their column
STAGES = {'start': 'as it is', 'matched': 'matched', 'hybrid': 'hybrid', 'student': 'student'}
CONTROLS = {
    'zero': 'no attention',
    'local': 'local alone',
    'global': 'global alone',
    'random': 'from random',
}


def print_probe(console: Console, mixer: str, costs: list[dict]) -> None:
    """Print the cost of each block."""
    table = Table(box=None, pad_edge=False, header_style='bold', title=f'{mixer}, one block at a time')
    table.add_column('block')
    for head in ('relative error', 'shift of keys', 'cosine', 'divergence'):
        table.add_column(head, justify='right')
    for cost in costs:
        values = (cost['error'], cost['shift_ratio'], cost['cosine'], cost['divergence'])
        # a divergence of nothing may be below 0 by rounding
        cells = ('–' if value is None else f'{value:.4f}'.replace('-0.0000', '0.0000') for value in values)
        table.add_row(cost['path'], *cells)
    console.print(table)


def print_scores(console: Console, results: list[dict], kind: str) -> None:
    """Print the scores of all students in percent."""
    # as narrow as a terminal of 80 columns, also with the controls of ls
    table = Table(
        box=None, pad_edge=False, collapse_padding=True, header_style='bold', title=f'{SCORE_TITLES[kind]}, %'
    )
    is_hybrid = any(result['settings']['keep_softmax'] for result in results)
    stages = [stage for stage in STAGES if stage != 'hybrid' or is_hybrid]
    names = [name for name in CONTROLS if any(name in result['controls'] for result in results)]
    heads = ['teacher', *(STAGES[stage] for stage in stages), *(CONTROLS[name] for name in names), 'minutes']
    table.add_column('mixer')
    for head in heads:
        # the last word below the others
        table.add_column('\n'.join(head.rsplit(' ', 1)), justify='right')
    for result in results:
        scores = [result['teacher'], *(result[stage] for stage in stages)]
        scores += [result['controls'].get(name) for name in names]
        cells = ['–' if score is None else f'{score["score"]:.2f}' for score in scores]
        table.add_row(result['settings']['mixer'], *cells, f'{minutes(result):.1f}')
    console.print(table)


def minutes(result: dict) -> float:
    """Time of the stages that train the student, without its controls."""
    seconds = result['seconds']
    return sum(seconds.get(stage, 0) for stage in ('matching', 'keep_softmax', 'network_rates', 'network')) / 60


def find_doubts(speeds: dict[str, dict]) -> str:
    """The reasons to doubt speeds by image size, '' if there are none."""
    return ', '.join(dict.fromkeys(pair['doubt'] for pair in speeds.values() if 'doubt' in pair))


def compare_speeds(speeds: dict[str, dict]) -> str:
    """A sentence with the image sizes at which the student is faster than the teacher, of those with both speeds."""
    sides = sorted(speeds, key=int)
    faster = [side for side in sides if speeds[side]['student'] > speeds[side]['teacher']]
    slower = [side for side in sides if side not in faster]
    if not faster:
        return f'The student is not faster than the teacher at {", ".join(speeds)} pixels on this machine.'
    if sides[-1] in slower:
        return f'The student is faster than the teacher at {", ".join(faster)} pixels, but not at {", ".join(slower)}.'
    start = sides.index(slower[-1]) + 1 if slower else 0
    return f'The student is faster than the teacher from {sides[start]} pixels.'


def explain_result(mixer: str, results: dict) -> str:
    """Describe in a few sentences what a student kept, if its attention contributes, and when it is faster."""
    title = SCORE_TITLES[results['kind']]
    teacher, student = results['teacher']['score'], results['student']['score']
    lines = [
        f'{mixer}: {title} {student:.2f} %, teacher {teacher:.2f} %, {results["start"]["score"]:.2f} % before training.'
    ]
    zero = results['controls']['zero']['score']
    if student - zero < _CLEAR:
        lines.append(
            f'Without any attention the same student has {zero:.2f} %: {mixer} contributes nothing on these images.'
        )
    random = results['controls'].get('random')
    if random is not None and random['score'] >= student:
        lines.append(f'The same training from random weights gives {random["score"]:.2f} %: inheriting did not help.')
    # at the other sizes, one of the two failed
    found = results['images_per_second']
    speeds = {side: pair for side, pair in found.items() if {'teacher', 'student'} <= pair.keys()}
    if speeds:
        lines.append(compare_speeds(speeds))
        if doubts := find_doubts(speeds):
            lines.append(f'These speeds are unreliable ({doubts}): measure again on a quiet machine.')
    return ' '.join(lines)
