"""Writes the tables of docs/gpu.md: estimates for an H100, and measurements from weights/benchmarks.csv.

Run by `make docs`, and by tools/measure_gpu.py after measuring.
"""

import math
import sys
from pathlib import Path

import torch
from docs_mixers import own_mixers
from pages import BENCHMARKS, ROOT, fill, latest, to_table

from vitzoo.bench._gpu import GpuEstimate, estimate_mixer
from vitzoo.bench._options import DEFAULT_TOKENS
from vitzoo.bench._results import read_rows
from vitzoo.bench.mixers import BASELINE, format_crossover
from vitzoo.machine import format_machine
from vitzoo.mixers import create_mixer

PAGE = ROOT / 'docs' / 'gpu.md'
# those of tools/measure_gpu.py
DIM, HEADS, BATCH, DTYPE = 384, 6, 16, 'bfloat16'
SHOWN = (196, 1024, 4096, 16384)
# implementations that kernels are compared with, and their titles
_OTHERS = {'pytorch': 'PyTorch', 'compile': 'torch.compile', 'flex': 'flex_attention', 'sdpa': 'full attention'}


def main(results: Path = BENCHMARKS, page: Path = PAGE) -> None:
    """Write the page."""
    rows = latest(read_rows(str(results))) if results.exists() else []
    page.write_text(fill(PAGE.read_text(), {'gpu': render(estimates(), rows)}))
    print(f'wrote {page}', file=sys.stderr)


def estimates(tokens: tuple[int, ...] = DEFAULT_TOKENS) -> dict[str, dict[int, GpuEstimate]]:
    """The estimates of every mixer, softmax first, by number of tokens."""
    found = {}
    for name in sorted(own_mixers(), key=lambda name: (name != BASELINE, name)):
        found[name] = {}
        for size in tokens:
            side = math.isqrt(size)
            mixer = create_mixer(name, DIM, HEADS, grid_size=(side, side), device='meta')
            found[name][size] = estimate_mixer(mixer, BATCH, getattr(torch, DTYPE))
    return found


def render(found: dict[str, dict[int, GpuEstimate]], rows: list[dict]) -> str:
    """The tables of work and time, and a line on the measurements."""
    rows = of_newest_gpu([row for row in rows if is_comparable(row) or is_of_kernels(row)])
    machine = 'Not yet measured.'
    if rows:
        dates = ', '.join(dict.fromkeys(row['run'][:10] for row in rows))
        machine = f'Measured on {dates}: {format_machine(max(rows, key=lambda row: row["load"] or 0))}.'
    return '\n\n'.join(
        [
            'Work of a forward pass per token, kernels, and the share of the time that memory limits:',
            work_table(found),
            'Time of a forward pass per token, and the speedup over fused softmax attention:',
            time_table(found, [row for row in rows if is_comparable(row)]),
            machine,
            kernel_table([row for row in rows if is_of_kernels(row)]),
        ]
    )


def is_comparable(row: dict) -> bool:
    """Return True for a measurement of the case that is estimated."""
    case = dict(table='mixers', what='forward', device='cuda', dtype=DTYPE, dim=DIM, num_heads=HEADS, batch_size=BATCH)
    return all(row.get(key) == value for key, value in case.items())


def is_of_kernels(row: dict) -> bool:
    """Return True for the time of a kernel on a GPU, or of what it is compared with."""
    return row['table'] == 'kernels' and row['device'] == 'cuda'


def of_newest_gpu(rows: list[dict]) -> list[dict]:
    """The rows of the GPU that was measured last, the newest last."""
    rows = sorted(rows, key=lambda row: row['run'])
    return [row for row in rows if row['gpu'] == rows[-1]['gpu']]


def work_table(found: dict[str, dict[int, GpuEstimate]]) -> str:
    """FLOPs, bytes, their ratio, kernels and bound of every mixer."""
    lines = []
    for name, by_size in found.items():
        flops = [f'{by_size[size].flops / (BATCH * size) / 1e6:,.2f}' for size in SHOWN]
        moved = [f'{by_size[size].bytes / (BATCH * size) / 1e3:,.1f}' for size in SHOWN]
        last = by_size[SHOWN[-1]]
        bound = [f'{by_size[size].memory_seconds / by_size[size].seconds:.0%}' for size in (SHOWN[0], SHOWN[-1])]
        lines.append([f'`{name}`', *flops, *moved, f'{last.flops / last.bytes:,.0f}', str(last.kernels), *bound])
    sizes = [f'{size:,}' for size in SHOWN]
    head = ['mixer', *(f'MFLOP, {size}' for size in sizes), *(f'kB, {size}' for size in sizes)]
    head += [f'FLOP/B, {sizes[-1]}', f'kernels, {sizes[-1]}', f'memory, {sizes[0]}', f'memory, {sizes[-1]}']
    return to_table(head, lines)


def time_table(found: dict[str, dict[int, GpuEstimate]], measured: list[dict]) -> str:
    """Expected times, speedups and crossover of every mixer, and the measured speedups and crossover."""
    lines = []
    for name, by_size in found.items():
        times = [f'{1e9 * by_size[size].seconds / (BATCH * size):,.2f}' for size in SHOWN]
        ratio = {size: found[BASELINE][size].seconds / estimate.seconds for size, estimate in by_size.items()}
        known = {row['tokens']: row['ratio'] for row in measured if row['name'] == name}
        speedups = [f'{ratio[size]:.2f}' for size in SHOWN]
        theirs = [f'{known[size]:.2f}' if size in known else '–' for size in SHOWN]
        starts = ['' if name == BASELINE else format_crossover(each) if each else '–' for each in (ratio, known)]
        lines.append([f'`{name}`', *times, *speedups, starts[0], *theirs, starts[1]])
    sizes = [f'{size:,}' for size in SHOWN]
    head = ['mixer', *(f'ns, {size}' for size in sizes), *(f'×, {size}' for size in sizes), 'crossover']
    return to_table([*head, *(f'measured ×, {size}' for size in sizes), 'measured crossover'], lines)


def kernel_table(rows: list[dict]) -> str:
    """Times of the Triton kernels, and their speedups over other implementations of the same or of full attention."""
    if not rows:
        return 'No kernel was timed.'
    cases = list(dict.fromkeys((row['name'], row['num_heads'], row['what'], row['tokens']) for row in rows))
    lines = []
    for name, heads, what, tokens in sorted(cases, key=lambda case: (*case[:2], case[3], case[2])):
        of_case = {
            row['against']: row
            for row in rows
            if (row['name'], row['num_heads'], row['what'], row['tokens']) == (name, heads, what, tokens)
        }
        speedups = [f'{of_case[other]["ratio"]:.2f}' if other in of_case else '–' for other in _OTHERS]
        milliseconds = f'{1e3 * of_case["kernel"]["seconds"]:.2f}'
        lines.append([f'`{name}`', str(heads), what, f'{tokens:,}', milliseconds, *speedups])
    head = ['kernel', 'heads', 'pass', 'tokens', 'ms', *(f'× {title}' for title in _OTHERS.values())]
    return 'Triton kernels, and their speedups over other implementations:\n\n' + to_table(head, lines)


if __name__ == '__main__':
    main()
