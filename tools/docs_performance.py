"""Writes the tables of docs/performance.md from weights/benchmarks.csv. Run by `make docs`.

The rows come from tools/measure.sh and tools/measure_gpu.py; only the latest complete run of each command is shown, and
of GPUs only the one that was measured last.
"""

import re
import sys
from collections import defaultdict
from statistics import median

from pages import BENCHMARKS, ROOT, command_of, fill, latest, of_newest_gpu, to_table
from targets import LINEAR

from vitzoo.bench._harness import CUDA_GRAPHS, LAYER_PASSES
from vitzoo.bench._results import find_doubt, read_rows
from vitzoo.bench._show import format_time
from vitzoo.bench.mixers import BASELINE, exponent, format_crossover
from vitzoo.machine import format_machine
from vitzoo.metrics.speed import MAX_SPREAD

PAGE = ROOT / 'docs' / 'performance.md'
# columns of `vitzoo bench peers` that limit the speedup
LIMITS = {'gmacs': '.2f', 'io_mb': ',.1f', 'matmul_share': '.0%', 'ceiling': '.2f'}
TITLES = {
    'mixers': 'Mixers by the number of tokens',
    'memory': 'Memory of the mixers',
    'training memory': 'Memory of training',
    'peers': 'Against other packages',
    'models': 'Models',
    'startup': 'Startup',
}


def main() -> None:
    """Write the page."""
    rows = latest(read_rows(BENCHMARKS)) if BENCHMARKS.exists() else []
    PAGE.write_text(fill(PAGE.read_text(), sections(rows)))
    print(f'wrote {PAGE}', file=sys.stderr)


def sections(rows: list[dict]) -> dict[str, str]:
    """The generated part of the page, by the name of its markers."""
    runs = defaultdict(list)
    for row in of_newest_gpu(rows):
        # docs/gpu.md has the times in CUDA graphs
        if row['table'] in TITLES and row.get('backend') != CUDA_GRAPHS:
            runs[command_of(row)].append(row)
    parts = []
    for table, title in TITLES.items():
        found = [run for run in runs.values() if run[0]['table'] == table]
        parts += [f'## {title}', *(part for run in found for part in [format_run(run), *RENDER[table](run)])]
        parts += [] if found else ['Not measured.']
    return {'benchmarks': '\n\n'.join(parts)}


def format_run(rows: list[dict]) -> str:
    """The command of a run, the machine and its rates."""
    command, *_ = command_of(rows[0])
    versions = dict.fromkeys(row['versions'] for row in rows if row['versions'])
    others = f'; {", ".join(versions)}' if versions else ''
    busiest = max(rows, key=lambda row: row['load'] or 0)
    machine = f'Measured on {rows[0]["run"][:10]}: {format_machine(busiest)}{others}.'
    return f'```sh\n{command}\n```\n\n{machine}{format_rates(rows)}{format_doubts(rows)}'


def format_doubts(rows: list[dict]) -> str:
    """The number of times of a run that are marked, in a sentence, '' if none is."""
    uneven = sum(is_uneven(row) for row in rows)
    spread = f'the quartiles are more than {MAX_SPREAD:.0%} of the median apart'
    return f' {uneven} of {len(rows)} times are marked by "?": {spread}.' if uneven else ''


def is_uneven(row: dict) -> bool:
    """Return True if the rounds of a measurement disagree."""
    return find_doubt(row) == 'uneven rounds'


def mark(text: str, row: dict) -> str:
    """Mark a number that was computed from an unreliable time."""
    return f'{text}?' if is_uneven(row) else text


def format_rates(rows: list[dict]) -> str:
    """The median rates of the machine in a run, '' if they were not measured."""
    parts = []
    for dtype in dict.fromkeys(row['dtype'] for row in rows):
        rates = [row['matmul_gflops'] for row in rows if row.get('matmul_gflops') and row['dtype'] == dtype]
        parts += [f'in {dtype} {median(rates):,.0f} GFLOP/s'] if rates else []
    copies = [row['copy_gbs'] for row in rows if row.get('copy_gbs')]
    copy = f'; large copies: {median(copies):,.1f} GB/s, reads and writes' if copies else ''
    return f' Large products: {", ".join(parts)}{copy}.' if parts else ''


def mixer_tables(rows: list[dict]) -> list[str]:
    """A summary, then speedup by number of tokens, crossover, exponent and memory of every mixer, and the plots."""
    sizes = sorted({row['tokens'] for row in rows})
    parts = ['Mixers with linear cost that are faster than SDPA, and their median speedup:', linear_table(rows, sizes)]
    for measured_pass in LAYER_PASSES:
        lines = []
        for name in dict.fromkeys(row['name'] for row in rows):
            known = {row['tokens']: row for row in rows if (row['name'], row['what']) == (name, measured_pass)}
            if known:
                lines.append(mixer_line(name, known, sizes))
        last = max(sizes)
        head = ['mixer', *(f'N = {size:,}' for size in sizes), 'crossover', 'exponent', f'time at {last:,}']
        head += [f'MB at {last:,}', f'ceiling at {last:,}', f'of matmul at {last:,}']
        parts += [f'Speedup over SDPA, {measured_pass}; {format_shape(rows[0])}:', to_table(head, lines)]
    plots = re.search(r'--plots docs/(\S+)', command_of(rows[0])[0])
    if plots:
        parts += [f'![{kind} by the number of tokens]({plots[1]}_{kind}.png)' for kind in ('time', 'memory')]
    return parts


def format_shape(row: dict) -> str:
    """The shape and the precision of a layer."""
    return f'width {row["dim"]}, {row["num_heads"]} heads, batch size {row["batch_size"]}, {row["dtype"]}'


def linear_table(rows: list[dict], sizes: list[int]) -> str:
    """Number of mixers with linear cost that are faster than SDPA, and their median speedup."""
    lines = []
    for measured_pass in LAYER_PASSES:
        cells = []
        for size in sizes:
            speedups = [
                row['ratio']
                for row in rows
                if (row['what'], row['tokens']) == (measured_pass, size) and row['name'] in LINEAR
            ]
            count = sum(speedup > 1 for speedup in speedups)
            cells.append(f'{count} of {len(speedups)}, × {median(speedups):.1f}' if speedups else '–')
        lines.append([measured_pass, *cells])
    return to_table(['', *(f'N = {size:,}' for size in sizes)], lines)


def mixer_line(name: str, known: dict[int, dict], sizes: list[int]) -> list[str]:
    """A mixer's line, with dashes for sizes that exceed the limits of time or memory."""
    power = exponent({size: row['seconds'] for size, row in known.items()})
    start = '' if name == BASELINE else format_crossover({size: row['ratio'] for size, row in known.items()})
    cells = [mark(f'{known[size]["ratio"]:.2f}', known[size]) if size in known else '–' for size in sizes]
    cells += [start, '–' if power is None else f'{power:.2f}']
    last = known.get(max(sizes))
    if last is None:
        return [f'`{name}`', *cells, *['–'] * 4]
    ceiling, share = (
        format_optional(last.get(key), form) for key, form in (('ceiling', '.1f'), ('matmul_share', '.0%'))
    )
    time = mark(format_time(last['seconds']), last)
    return [f'`{name}`', *cells, time, f'{last["peak_mb"]:,.0f}', ceiling, share]


def format_optional(value: float | None, form: str) -> str:
    """A number, or a dash if the row does not have it."""
    return '–' if value is None else format(value, form)


def memory_tables(rows: list[dict]) -> list[str]:
    """Peak memory of every mixer, and its ratio to that of SDPA, with dashes for what an interrupted run left out."""
    peaks = {(row['name'], (row['what'], row['tokens'])): row['peak_mb'] for row in rows}
    kinds = sorted({kind for _, kind in peaks})
    lines = []
    for name in dict.fromkeys(row['name'] for row in rows):
        cells = [f'`{name}`']
        for kind in kinds:
            peak, of_baseline = peaks.get((name, kind)), peaks.get((BASELINE, kind))
            cells.append(format_optional(peak, ',.1f'))
            cells.append(format_optional(peak and of_baseline and peak / of_baseline, '.2f'))
        lines.append(cells)
    head = [heading for what, tokens in kinds for heading in (f'{what}, N = {tokens:,}', 'over SDPA')]
    return [f'Peak memory in MB; {format_shape(rows[0])}:', to_table(['mixer', *head], lines)]


def training_memory_tables(rows: list[dict]) -> list[str]:
    """Peak memory of a training step of every model."""
    lines = [
        [f'`{row["name"]}`', str(row['img_size']), str(row['batch_size']), row['dtype'], f'{row["peak_mb"] / 1e3:.2f}']
        for row in rows
    ]
    return [to_table(['model', 'size', 'batch', 'precision', 'GB'], lines)]


def peer_tables(rows: list[dict]) -> list[str]:
    """Times of ours and theirs, the speedup and its limits."""
    lines = []
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        size = f'{ours["tokens"]:,}' if ours['tokens'] else f'{ours["img_size"]} px'
        times = [*(mark(format_time(row['seconds']), row) for row in (ours, theirs)), f'{ours["ratio"]:.2f}']
        times += [f'{ours["ratio_low"]:.2f} – {ours["ratio_high"]:.2f}', str(ours['rounds'])]
        limits = [format_optional(ours.get(key), form) for key, form in LIMITS.items()]
        lines.append([f'`{ours["name"]}`', ours['against'], size, ours['what'], *times, *limits])
    head = ['ours', 'package', 'tokens', '', 'ours', 'theirs', '×', 'quartiles', 'rounds']
    return [to_table([*head, 'GMACs', 'MB moved', 'of matmul', 'ceiling'], lines)]


def model_tables(rows: list[dict]) -> list[str]:
    """Throughput, time, memory and arithmetic of models, and the speedup if there is a baseline."""
    against = {row['against'] for row in rows if row['against'] != f'{row["name"]} {row["dtype"]}'}
    lines = [
        [
            *(f'`{row["name"]}`', str(row['img_size']), row['dtype'], row['what'], str(row['batch_size'])),
            mark(f'{row["batch_size"] / row["seconds"]:,.1f}', row),
            mark(format_time(row['seconds']), row),
            f'{format_time(row["seconds_low"])} – {format_time(row["seconds_high"])}',
            *(f'{row["gmacs"]:.2f}', f'{row["matmul_share"]:.0%}', f'{row["peak_mb"]:,.0f}'),
            *([f'{row["ratio"]:.2f}'] if against else []),
        ]
        for row in rows
    ]
    head = ['model', 'size', 'precision', '', 'batch', 'images/s', 'time', 'quartiles', 'GMACs', 'of matmul', 'MB']
    if not against:
        return [to_table(head, lines)]
    baseline = against.pop() if len(against) == 1 else 'in float32'
    return [to_table([*head, f'× {baseline}'], lines)]


def startup_tables(rows: list[dict]) -> list[str]:
    """Time to import and to create a model, relative to timm."""
    lines = [
        [row['name'], mark(format_time(row['seconds']), row), f'{1 / row["ratio"]:.2f}', row['against']]
        for row in rows
        if row['name'] != row['against']
    ]
    return [to_table(['', 'time', 'relative', 'to'], lines)]


RENDER = {
    'mixers': mixer_tables,
    'memory': memory_tables,
    'training memory': training_memory_tables,
    'peers': peer_tables,
    'models': model_tables,
    'startup': startup_tables,
}


if __name__ == '__main__':
    main()
