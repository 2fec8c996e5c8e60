"""`vitzoo bench`: speed and memory, measured side by side in one process.

Examples:
    vitzoo bench mixers
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

TABLES = {
    'mixers': 'every token mixer against fused softmax attention, over the number of tokens',
    'models': 'throughput, latency, training step and memory of any timm models',
    'peers': 'ours against the packages that do the same',
    'kernels': 'Triton kernels on a GPU against PyTorch, torch.compile, flex_attention and full attention',
    'loader': "training images per second, against torchvision's ImageFolder with the same augmentation",
    'trainer': 'a training step of vitzoo against a bare loop of timm and PyTorch',
    'startup': 'importing vitzoo and creating a model against timm',
}


def main(argv: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    run_command(dispatch, sys.argv[1:] if argv is None else argv)


def dispatch(argv: list[str]) -> None:
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
        # as argparse ends where it was asked for help
        raise SystemExit(0)
    if table not in TABLES:
        hint = did_you_mean(table, TABLES) or f'; there are {", ".join(TABLES)}'
        raise UserError(f"unknown table '{table}'{hint}")
    # imported only now, because some need packages that others do not
    import_module(f'vitzoo.bench.{table}').main(rest)


def _help() -> str:
    lines = [f'  {table:10} {summary}' for table, summary in TABLES.items()]
    return '\n'.join(
        ['usage: vitzoo bench <table> [arguments]', '', *lines, '', '`vitzoo bench <table> --help` says more.']
    )
