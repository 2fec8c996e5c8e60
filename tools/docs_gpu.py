"""Writes the tables of docs/gpu.md: estimates for a GPU, and measurements from weights/benchmarks.csv.

Run by `make docs`, and by tools/measure_gpu.py after measuring.
"""

import math
import sys
from pathlib import Path

import torch
from docs_mixers import own_mixers
from pages import BENCHMARKS, ROOT, fill, latest, of_newest_gpu, to_table

from vitzoo.bench._gpu import H100, H200, Gpu, GpuEstimate, estimate_mixer
from vitzoo.bench._harness import CUDA_GRAPHS
from vitzoo.bench._options import DEFAULT_TOKENS
from vitzoo.bench._results import read_rows
from vitzoo.bench.mixers import BASELINE, format_crossover
from vitzoo.machine import format_machine
from vitzoo.mixers import create_mixer

PAGE = ROOT / 'docs' / 'gpu.md'
# those of tools/measure_gpu.py
DIM, HEADS, BATCH, DTYPE = 384, 6, 16, 'bfloat16'
SHOWN = (196, 1024, 4096, 16384)
# columns of models, by backend
_BACKENDS = ('eager', 'compile', CUDA_GRAPHS)
# implementations that kernels are compared with, and their titles
_OTHERS = {'pytorch': 'PyTorch', 'compile': 'torch.compile', 'flex': 'flex_attention', 'sdpa': 'full attention'}


def main(results: Path = BENCHMARKS, page: Path = PAGE) -> None:
    """Write the page."""
    rows = shown_rows(latest(read_rows(str(results))) if results.exists() else [])
    found = estimates(gpu=H200 if rows and H200.name in rows[-1]['gpu'] else H100)
    page.write_text(fill(PAGE.read_text(), {'gpu': render(found, rows)}))
    print(f'wrote {page}', file=sys.stderr)


def estimates(tokens: tuple[int, ...] = DEFAULT_TOKENS, gpu: Gpu = H100) -> dict[str, dict[int, GpuEstimate]]:
    """The estimates of every mixer, softmax first, by number of tokens."""
    found = {}
    for name in sorted(own_mixers(), key=lambda name: (name != BASELINE, name)):
        found[name] = {}
        for size in tokens:
            side = math.isqrt(size)
            mixer = create_mixer(name, DIM, HEADS, grid_size=(side, side), device='meta')
            found[name][size] = estimate_mixer(mixer, BATCH, getattr(torch, DTYPE), gpu)
    return found


def render(found: dict[str, dict[int, GpuEstimate]], rows: list[dict]) -> str:
    """The tables of estimates, and those of the measurements on one GPU."""
    machine = 'Not yet measured.'
    if rows:
        dates = ', '.join(sorted({row['run'][:10] for row in rows}))
        machine = f'Measured on {dates}: {format_machine(max(rows, key=lambda row: row["load"] or 0))}.'
    mixers = [row for row in rows if row['table'] == 'mixers']
    return '\n\n'.join(
        [
            'Work of a forward pass per token, kernels, and the share of the time that memory limits:',
            work_table(found),
            'Expected time of a forward pass per token, and speedup over fused softmax attention:',
            estimate_table(found),
            machine,
            'Measured speedups of a forward pass over fused softmax attention, in eager mode and in CUDA graphs (G):',
            speedup_table('forward', mixers, found),
            'Measured speedups of a forward and a backward pass, and the peak memory:',
            speedup_table('forward + backward', mixers),
            kernel_table([row for row in rows if row['table'] == 'kernels']),
            model_table([row for row in rows if row['table'] == 'backends']),
        ]
    )


def is_shown(row: dict) -> bool:
    """Return True for a measurement on a GPU that the page has: of the estimated case, of a kernel or of a backend."""
    case = dict(dtype=DTYPE, dim=DIM, num_heads=HEADS, batch_size=BATCH)
    is_estimated = all(row.get(key) == value for key, value in case.items())
    is_known = row['table'] in ('kernels', 'backends') or (row['table'] == 'mixers' and is_estimated)
    return row['device'] == 'cuda' and is_known


def shown_rows(rows: list[dict]) -> list[dict]:
    """The rows that the page has of the GPU that was measured last, the newest last."""
    return sorted(of_newest_gpu([row for row in rows if is_shown(row)]), key=lambda row: row['run'])


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


def estimate_table(found: dict[str, dict[int, GpuEstimate]]) -> str:
    """Expected times, speedups and crossover of every mixer."""
    lines = []
    for name, by_size in found.items():
        times = [f'{1e9 * by_size[size].seconds / (BATCH * size):,.2f}' for size in SHOWN]
        ratio = {size: found[BASELINE][size].seconds / estimate.seconds for size, estimate in by_size.items()}
        speedups = [f'{ratio[size]:.2f}' for size in SHOWN]
        lines.append([f'`{name}`', *times, *speedups, format_start(name, ratio)])
    sizes = [f'{size:,}' for size in SHOWN]
    return to_table(
        ['mixer', *(f'ns, {size}' for size in sizes), *(f'×, {size}' for size in sizes), 'crossover'], lines
    )


def speedup_table(measured_pass: str, rows: list[dict], found: dict[str, dict[int, GpuEstimate]] | None = None) -> str:
    """Measured speedups and crossovers of a pass, and its time over the estimate if there is one, else its memory."""
    lines, last = [], SHOWN[-1]
    for name in sorted({row['name'] for row in rows}, key=lambda name: (not name.startswith(BASELINE), name)):
        of_mixer = [row for row in rows if (row['name'], row['what']) == (name, measured_pass)]
        eager, graphs = (
            {row['tokens']: row for row in of_mixer if row.get('backend') == backend} for backend in (None, CUDA_GRAPHS)
        )
        line = [f'`{name}`']
        for known in (eager, graphs):
            ratio = {size: row['ratio'] for size, row in known.items()}
            line += [f'{ratio[size]:.2f}' if size in ratio else '–' for size in SHOWN]
            line.append(format_start(name, ratio))
        if found is None:
            line.append(f'{eager[last]["peak_mb"]:,.0f}' if last in eager else '–')
        else:
            line.append(
                f'{graphs[last]["seconds"] / found[name][last].seconds:.1f}'
                if last in graphs and name in found
                else '–'
            )
        lines.append(line)
    sizes = [f'{size:,}' for size in SHOWN]
    head = ['mixer', *(f'×, {size}' for size in sizes), 'crossover', *(f'G ×, {size}' for size in sizes), 'G crossover']
    return to_table([*head, f'MB, {last:,}' if found is None else f'G time / expected, {last:,}'], lines)


def format_start(name: str, ratio: dict[int, float]) -> str:
    """The crossover of a mixer, empty for the baseline."""
    return '' if name == BASELINE else format_crossover(ratio) if ratio else '–'


def kernel_table(rows: list[dict]) -> str:
    """Times of the Triton kernels, and their speedups over other implementations of the same or of full attention."""
    if not rows:
        return 'No kernel was timed.'
    keys = ('name', 'dtype', 'num_heads', 'tokens', 'what')
    lines = []
    for case in sorted({tuple(row[key] for key in keys) for row in rows}):
        name, dtype, heads, tokens, what = case
        of_case = {row['against']: row for row in rows if tuple(row[key] for key in keys) == case}
        speedups = [f'{of_case[other]["ratio"]:.2f}' if other in of_case else '–' for other in _OTHERS]
        milliseconds = f'{1e3 * of_case["kernel"]["seconds"]:.2f}'
        lines.append([f'`{name}`', dtype, str(heads), what, f'{tokens:,}', milliseconds, *speedups])
    head = ['kernel', 'precision', 'heads', 'pass', 'tokens', 'ms', *(f'× {title}' for title in _OTHERS.values())]
    return 'Triton kernels, and their speedups over other implementations:\n\n' + to_table(head, lines)


def model_table(rows: list[dict]) -> str:
    """Images per second of models by backend, and the difference of the logits of the last."""
    if not rows:
        return 'No model was timed.'
    lines = []
    for name, what, batch_size in dict.fromkeys((row['name'], row['what'], row['batch_size']) for row in rows):
        of_case = {row['backend']: row for row in rows if (row['name'], row['what']) == (name, what)}
        speeds = [f'{batch_size / of_case[key]["seconds"]:,.0f}' if key in of_case else '–' for key in _BACKENDS]
        gains = [f'{of_case[key]["ratio"]:.2f}' if key in of_case else '–' for key in _BACKENDS[1:]]
        difference = of_case.get(_BACKENDS[-1], {}).get('difference')
        known = '–' if difference is None else f'{difference:.0e}'
        lines.append([f'`{name}`', what, str(batch_size), *speeds, *gains, known])
    head = ['model', 'pass', 'batch size', *(f'images/s, {key}' for key in _BACKENDS)]
    head += [*(f'× {key}' for key in _BACKENDS[1:]), 'difference of logits']
    return 'Whole models in images/s by backend, and the speedup over eager mode:\n\n' + to_table(head, lines)


if __name__ == '__main__':
    main()
