"""`vitzoo bench`: speed and memory, measured side by side in one process.

Examples:
    vitzoo bench mixers
    vitzoo bench memory
    vitzoo bench models vil_ls_medium resnet50 --img-size 224 384
    vitzoo bench peers
    vitzoo bench kernels
    vitzoo bench loader
    vitzoo bench trainer
    vitzoo bench startup
"""

import sys
from importlib import import_module

from vitzoo.errors import UserError, did_you_mean, run_command

BENCHMARKS = {
    'mixers': 'every token mixer against fused softmax attention, by number of tokens',
    'memory': 'peak memory of every token mixer, by number of tokens',
    'models': 'throughput, latency, training step and memory of any timm models',
    'peers': 'layers and models of vitzoo against other packages',
    'kernels': 'Triton kernels on a GPU against PyTorch, torch.compile, flex_attention and full attention',
    'loader': 'training images per second, against torchvision and timm with the same augmentation',
    'trainer': 'a training step of vitzoo against a plain loop of timm and PyTorch',
    'startup': 'importing vitzoo and creating a model, against timm',
}


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(run_benchmark, sys.argv[1:] if argv is None else argv)


def run_benchmark(argv: list[str] | None) -> None:
    """Measure the table that the first argument names.

    Raises:
        UserError: There is no such table.
    """
    if not argv:
        print(_help())
        return
    table, *rest = argv
    if table in ('-h', '--help', 'help'):
        print(_help())
        # argparse also exits after printing the help
        raise SystemExit(0)
    if table not in BENCHMARKS:
        hint = did_you_mean(table, BENCHMARKS) or f'; the tables are {", ".join(BENCHMARKS)}'
        raise UserError(f"unknown table '{table}'{hint}")
    # imported here, because some need packages that others do not
    import_module(f'vitzoo.bench.{table}').main(rest)


def _help() -> str:
    lines = [f'  {table:10} {summary}' for table, summary in BENCHMARKS.items()]
    return '\n'.join(
        ['usage: vitzoo bench <table> [arguments]', '', *lines, '', 'Options: `vitzoo bench <table> --help`.']
    )
