"""Writes the tables of docs/targets.md from weights/benchmarks.csv and tools/targets.py. Run by `make docs`."""

import sys
from collections import Counter

from pages import BENCHMARKS, ROOT, fill, latest, to_table
from targets import REASONS, TARGETS, Line, read_lines

from vitzoo.bench._results import read_rows

PAGE = ROOT / 'docs' / 'targets.md'
VERDICTS = ('met', 'missed', 'out of reach', 'not measured')
# columns that distinguish the targets of a section
LABELS = {'name': '`{}`', 'tokens': 'N = {:,}', 'img_size': '{} px', 'what': '{}'}


def main() -> None:
    """Write the page."""
    rows = latest(read_rows(BENCHMARKS)) if BENCHMARKS.exists() else []
    PAGE.write_text(fill(PAGE.read_text(), sections(rows)))
    print(f'wrote {PAGE}', file=sys.stderr)


def sections(rows: list[dict]) -> dict[str, str]:
    """The generated parts of the page, by the names of their markers."""
    groups = {
        title: [line for target in group for line in read_lines(target, rows)] for title, group in TARGETS.items()
    }
    tables = [
        f'## {title}\n\n{to_table(*line_table(lines, REASONS.get(title, {})))}' for title, lines in groups.items()
    ]
    return {'overview': overview(groups), 'targets': '\n\n'.join(tables)}


def overview(groups: dict[str, list[Line]]) -> str:
    """A table with the number of targets per section and verdict."""
    counts = {title: Counter(line.verdict for line in lines) for title, lines in groups.items()}
    counts['all'] = sum(counts.values(), Counter())
    cells = [[title, *(str(count[verdict]) for verdict in VERDICTS)] for title, count in counts.items()]
    return to_table(['', *VERDICTS], cells)


def line_table(lines: list[Line], reasons: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Heading and cells of a section, without columns that are empty in all lines.

    Lines that are not met have the reason of their name.
    """
    varying = [key for key in LABELS if len({line.row.get(key) for line in lines}) > 1] or ['name']
    head = ['', 'target', 'measured', 'quartiles', '', 'ceiling', 'of matmul', 'why']
    cells = [[', '.join(labels(line, varying)), *line_cells(line), reason_of(line, reasons)] for line in lines]
    kept = [column for column in range(len(head)) if column < 3 or any(row[column] for row in cells)]
    return [head[column] for column in kept], [[row[column] for column in kept] for row in cells]


def labels(line: Line, keys: list[str]) -> list[str]:
    """The values that distinguish a line from the others of its table."""
    words = {key: LABELS[key].format(line.row[key]) for key in keys}
    if 'name' in words and line.row['table'] == 'peers':
        words['name'] += f' against {line.row["against"]}'
    return [*words.values(), *([line.target.reads] if line.target.reads.startswith('memory') else [])]


def line_cells(line: Line) -> list[str]:
    """Limit, measurement, quartiles, verdict, ceiling and share of the rate of products."""
    reading, digits = line.reading, '.1%' if line.target.reads == 'share of matmul' else '.3f'
    if reading is None:
        return [format_limit(line), '', '', line.verdict, '', '']
    verdict = line.verdict if line.verdict == 'met' else f'**{line.verdict}**'
    quartiles = '' if reading.low is None else f'{reading.low:{digits}} – {reading.high:{digits}}'
    ceiling = '' if reading.ceiling is None else f'{reading.ceiling:.2f}, {reading.bound}'
    share = '' if reading.matmul_share is None else f'{reading.matmul_share:.0%}'
    return [format_limit(line), f'{reading.value:{digits}}', quartiles, verdict, ceiling, share]


def reason_of(line: Line, reasons: dict[str, str]) -> str:
    """Why a target is missed or out of reach, if it is."""
    return '' if line.verdict in ('met', 'not measured') else reasons.get(line.row['name'], '')


def format_limit(line: Line) -> str:
    """The limit as shown in a table."""
    sign, value = ('≥', line.at_least) if line.target.at_most is None else ('≤', line.target.at_most)
    return f'{sign} {value:.0%}' if line.target.reads == 'share of matmul' else f'{sign} {value:g}'


if __name__ == '__main__':
    main()
