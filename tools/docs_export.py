"""Writes the table of docs/export.md from weights/benchmarks.csv. Run by `make docs`."""

import sys

from docs_performance import format_run
from pages import BENCHMARKS, ROOT, fill, latest, to_table

from vitzoo.bench._results import read_rows

PAGE = ROOT / 'docs' / 'export.md'
MODELS = (
    'deit_softmax_small deit_ls_small deit_performer_small deit_nystrom_small deit_linear_small cvt_13 cvt_ls_13'
    ' cvt_nystrom_13 vil_ls_small vil_performer_small aft_conv_small_h16 aft_simple_small'
)
FORWARD = (
    f'vitzoo bench models {MODELS} --backend eager,compile,onnxruntime,openvino --batch 4 --what forward --seconds 2'
)
TRAINING = (
    'vitzoo bench models deit_softmax_small deit_ls_small cvt_ls_13 vil_ls_small --backend eager,compile --batch 4'
    " --what 'training step' --seconds 2"
)


def main() -> None:
    """Write the page."""
    rows = latest(read_rows(str(BENCHMARKS))) if BENCHMARKS.exists() else []
    PAGE.write_text(fill(PAGE.read_text(), {'backends': render(rows)}))
    print(f'wrote {PAGE}', file=sys.stderr)


def render(rows: list[dict]) -> str:
    """Each command with the table of its latest run."""
    return '\n\n'.join(_render(command, rows) for command in (FORWARD, TRAINING))


def _render(command: str, rows: list[dict]) -> str:
    rows = [row for row in rows if row.get('command') == command and row['device'] == 'cpu']
    if not rows:
        return f'```sh\n{command}\n```\n\nNot yet measured.'
    return f'{format_run(rows)}\n\n{backend_table(rows)}'


def backend_table(rows: list[dict]) -> str:
    """Images per second in eager mode, and the speedup of each other backend with its largest difference of logits."""
    cases = {}
    for row in rows:
        cases.setdefault((row['name'], row['what']), {})[row['backend']] = row
    others = [name for name in dict.fromkeys(row['backend'] for row in rows) if name != 'eager']
    lines = []
    for (name, measured_pass), known in cases.items():
        eager = known['eager']
        cells = [f'`{name}`', measured_pass, f'{eager["batch_size"] / eager["seconds"]:,.1f}']
        for backend in others:
            row = known.get(backend, {})
            cells += [
                f'{row["ratio"]:.2f}' if row else '–',
                f'{row["difference"]:.0e}' if row.get('difference') is not None else '–',
            ]
        lines.append(cells)
    head = ['model', '', 'eager, images/s']
    head += [text for backend in others for text in (f'{backend}, ×', 'difference')]
    return to_table(head, lines)


if __name__ == '__main__':
    main()
