"""Writes the measured part of docs/performance.md from weights/benchmarks.csv. Run by `make docs`.

tools/measure.sh measures. Of each command and device the latest run counts. The targets are in tools/targets.py.
"""

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

from docs_models import fill, to_table
from targets import BOTH, TARGETS, Line, Target, read_lines

from vitzoo.bench._harness import read_rows, say_machine
from vitzoo.bench._show import milliseconds
from vitzoo.bench.mixers import BASELINE, exponent, say_crossover

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'weights' / 'benchmarks.csv'
PAGE = ROOT / 'docs' / 'performance.md'
# what a row of `vitzoo bench peers` says of its limits
LIMITS = {'gmacs': '.2f', 'io_mb': ',.1f', 'matmul_share': '.0%', 'ceiling': '.2f'}
VERDICTS = ('met', 'missed', 'out of reach', 'not measured')
TITLES = {
    'mixers': 'Mixers by the number of tokens',
    'peers': 'Against other packages',
    'models': 'Models',
    'startup': 'Startup',
}
# what tells targets of a group from each other
LABELS = {'name': '`{}`', 'tokens': 'N = {:,}', 'img_size': '{} px', 'what': '{}'}


def main() -> None:
    """Write the page."""
    rows = latest(read_rows(RESULTS)) if RESULTS.exists() else []
    PAGE.write_text(fill(PAGE.read_text(), sections(rows)))
    print(f'wrote {PAGE}', file=sys.stderr)


def latest(rows: list[dict]) -> list[dict]:
    """The rows of the latest run of each command and device; a run began at the time that is its name."""
    runs = defaultdict(str)
    for row in rows:
        runs[command_of(row)] = max(runs[command_of(row)], row['run'])
    return [row for row in rows if row['run'] == runs[command_of(row)]]


def command_of(row: dict) -> tuple:
    """What tells a command on a device from others; files of an earlier version do not say with which arguments."""
    return row.get('command') or f'vitzoo bench {row["table"]}', row['table'], row['device'], row['gpu']


def sections(rows: list[dict]) -> dict[str, str]:
    """What stands between the markers of the page: the targets, and every table."""
    runs = defaultdict(list)
    for row in rows:
        if row['table'] in TITLES:
            runs[command_of(row)].append(row)
    parts = []
    for table, title in TITLES.items():
        found = [run for run in runs.values() if run[0]['table'] == table]
        parts += [f'## {title}', *(part for run in found for part in [say_run(run), *RENDER[table](run)])]
        parts += [] if found else ['Not measured.']
    return {'targets': say_targets(rows), 'benchmarks': '\n\n'.join(parts)}


def say_targets(rows: list[dict]) -> str:
    """How many targets are met, then every one of them."""
    groups = {
        title: [line for target in group for line in read_lines(target, rows)] for title, group in TARGETS.items()
    }
    counts = {title: Counter(line.verdict for line in lines) for title, lines in groups.items()}
    counts['all'] = sum(counts.values(), Counter())
    overview = [[title, *(str(count[verdict]) for verdict in VERDICTS)] for title, count in counts.items()]
    parts = [to_table(['', *VERDICTS], overview)]
    for title, lines in groups.items():
        parts += [f'### {title}', to_table(*line_table(lines))]
    return '\n\n'.join(parts)


def line_table(lines: list[Line]) -> tuple[list[str], list[list[str]]]:
    """The heading and the cells of some targets; columns that none of them fills are left out."""
    varying = [key for key in LABELS if len({line.row.get(key) for line in lines}) > 1] or ['name']
    head = ['', 'target', 'measured', 'quartiles', '', 'ceiling', 'of matmul']
    cells = [[', '.join(labels(line, varying)), *line_cells(line)] for line in lines]
    kept = [column for column in range(len(head)) if column < 3 or any(row[column] for row in cells)]
    return [head[column] for column in kept], [[row[column] for column in kept] for row in cells]


def labels(line: Line, keys: list[str]) -> list[str]:
    """What tells a line from the others of its table."""
    words = {key: LABELS[key].format(line.row[key]) for key in keys}
    if 'name' in words and line.row['table'] == 'peers':
        words['name'] += f' against {line.row["against"]}'
    return [*words.values(), *([line.target.reads] if line.target.reads.startswith('memory') else [])]


def line_cells(line: Line) -> list[str]:
    """Target, measurement, verdict, and what says how much more is possible."""
    reading, digits = line.reading, '.1%' if line.target.reads == 'share of matmul' else '.3f'
    if reading is None:
        return [limit(line.target), '', '', line.verdict, '', '']
    verdict = line.verdict if line.verdict == 'met' else f'**{line.verdict}**'
    quartiles = '' if reading.low is None else f'{reading.low:{digits}} – {reading.high:{digits}}'
    ceiling = '' if reading.ceiling is None else f'{reading.ceiling:.2f}, {reading.bound}'
    share = '' if reading.matmul_share is None else f'{reading.matmul_share:.0%}'
    return [limit(line.target), f'{reading.value:{digits}}', quartiles, verdict, ceiling, share]


def limit(target: Target) -> str:
    """The limit as a table has it."""
    sign, value = ('≥', target.at_least) if target.at_most is None else ('≤', target.at_most)
    return f'{sign} {value:.0%}' if target.reads == 'share of matmul' else f'{sign} {value:g}'


def say_run(rows: list[dict]) -> str:
    """The command that measured some rows, and the machine."""
    command, *_ = command_of(rows[0])
    versions = dict.fromkeys(row['versions'] for row in rows if row['versions'])
    others = f'; {", ".join(versions)}' if versions else ''
    machine = f'Measured on {rows[0]["run"][:10]}: {say_machine(rows[0])}{others}.'
    return f'```sh\n{command}\n```\n\n{machine}{say_rates(rows)}'


def say_rates(rows: list[dict]) -> str:
    """The rates of the machine that the run measured, in the median, '' where it did not."""
    parts = []
    for dtype in dict.fromkeys(row['dtype'] for row in rows):
        rates = [row['matmul_gflops'] for row in rows if row.get('matmul_gflops') and row['dtype'] == dtype]
        parts += [f'in {dtype} {median(rates):,.0f} GFLOP/s'] if rates else []
    copies = [row['copy_gbs'] for row in rows if row.get('copy_gbs')]
    copy = f'; large copies: {median(copies):,.1f} GB/s, reading and writing' if copies else ''
    return f' Large products: {", ".join(parts)}{copy}.' if parts else ''


def mixer_tables(rows: list[dict]) -> list[str]:
    """Ratio by the number of tokens, crossover, exponent and memory of every mixer, and the plots."""
    parts, sizes = [], sorted({row['tokens'] for row in rows})
    for what in BOTH:
        lines = []
        for name in dict.fromkeys(row['name'] for row in rows):
            known = {row['tokens']: row for row in rows if (row['name'], row['what']) == (name, what)}
            if known:
                lines.append(mixer_line(name, known, sizes))
        last = max(sizes)
        head = ['mixer', *(f'N = {size:,}' for size in sizes), 'crossover', 'exponent', f'time at {last:,}']
        head += [f'MB at {last:,}', f'ceiling at {last:,}', f'of matmul at {last:,}']
        row = rows[0]
        shape = f'{row["dim"]} wide, {row["num_heads"]} heads, batches of {row["batch_size"]}, {row["dtype"]}'
        parts += [f'Times as fast as SDPA, {what}; {shape}:', to_table(head, lines)]
    plots = re.search(r'--plots docs/(\S+)', command_of(rows[0])[0])
    if plots:
        parts += [f'![{kind} by the number of tokens]({plots[1]}_{kind}.png)' for kind in ('time', 'memory')]
    return parts


def mixer_line(name: str, known: dict[int, dict], sizes: list[int]) -> list[str]:
    """A mixer's line; what was left out, for its time or memory, is a dash."""
    power = exponent({size: row['seconds'] for size, row in known.items()})
    start = '' if name == BASELINE else say_crossover({size: row['ratio'] for size, row in known.items()})
    cells = [f'{known[size]["ratio"]:.2f}' if size in known else '–' for size in sizes]
    cells += [start, '–' if power is None else f'{power:.2f}']
    last = known.get(max(sizes))
    if last is None:
        return [f'`{name}`', *cells, *['–'] * 4]
    ceiling, share = (shown(last.get(key), form) for key, form in (('ceiling', '.1f'), ('matmul_share', '.0%')))
    return [f'`{name}`', *cells, milliseconds(last['seconds']), f'{last["peak_mb"]:,.0f}', ceiling, share]


def shown(value: float | None, form: str) -> str:
    """A number that not every file has."""
    return '–' if value is None else format(value, form)


def peer_tables(rows: list[dict]) -> list[str]:
    """Ours beside theirs."""
    lines = []
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        size = f'{ours["tokens"]:,}' if ours['tokens'] else f'{ours["img_size"]} px'
        times = [milliseconds(ours['seconds']), milliseconds(theirs['seconds']), f'{ours["ratio"]:.2f}']
        times += [f'{ours["ratio_low"]:.2f} – {ours["ratio_high"]:.2f}', str(ours['rounds'])]
        limits = [shown(ours.get(key), form) for key, form in LIMITS.items()]
        lines.append([f'`{ours["name"]}`', ours['against'], size, ours['what'], *times, *limits])
    head = ['ours', 'package', 'tokens', '', 'ours', 'theirs', '×', 'quartiles', 'rounds']
    return [to_table([*head, 'GMACs', 'MB moved', 'of matmul', 'ceiling'], lines)]


def model_tables(rows: list[dict]) -> list[str]:
    """Throughput, time, memory and arithmetic of models, and the ratio where they are compared to others."""
    against = {row['against'] for row in rows if row['against'] != f'{row["name"]} {row["dtype"]}'}
    lines = [
        [
            *(f'`{row["name"]}`', str(row['img_size']), row['dtype'], row['what'], str(row['batch_size'])),
            f'{row["batch_size"] / row["seconds"]:,.1f}',
            milliseconds(row['seconds']),
            f'{milliseconds(row["seconds_low"])} – {milliseconds(row["seconds_high"])}',
            *(f'{row["gmacs"]:.2f}', f'{row["matmul_share"]:.0%}', f'{row["peak_mb"]:,.0f}'),
            *([f'{row["ratio"]:.2f}'] if against else []),
        ]
        for row in rows
    ]
    head = ['model', 'size', 'precision', '', 'batch', 'images/s', 'time', 'quartiles', 'GMACs', 'of matmul', 'MB']
    compared = [f'× {against.pop()}' if len(against) == 1 else '× in float32'] if against else []
    return [to_table([*head, *compared], lines)]


def startup_tables(rows: list[dict]) -> list[str]:
    """Imports and creation of a model."""
    lines = [
        [row['name'], milliseconds(row['seconds']), f'{1 / row["ratio"]:.2f}', row['against']]
        for row in rows
        if row['name'] != row['against']
    ]
    return [to_table(['', 'time', 'times as long', 'as'], lines)]


RENDER = {'mixers': mixer_tables, 'peers': peer_tables, 'models': model_tables, 'startup': startup_tables}


if __name__ == '__main__':
    main()
