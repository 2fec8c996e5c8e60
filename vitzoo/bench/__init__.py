"""`vitzoo bench`: speed, measured side by side with what one would use instead.

Examples:
    vitzoo bench loader
"""

import sys
from importlib import import_module

from vitzoo.errors import UserError, did_you_mean, run_command

TABLES = {
    'loader': "training images per second, against torchvision's ImageFolder with the same augmentation",
}


def main(argv: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    run_command(dispatch, sys.argv[1:] if argv is None else argv)


def dispatch(argv: list[str]) -> None:
    """Measure the table that the first argument names.

    Raises:
        UserError: There is no such table.
    """
    if not argv or argv[0] in ('-h', '--help', 'help'):
        lines = [f'  {table:10} {summary}' for table, summary in TABLES.items()]
        print('\n'.join(['usage: vitzoo bench <table> [arguments]', '', *lines]))
        # as argparse ends where it was asked for help
        raise SystemExit(0)
    table, *rest = argv
    if table not in TABLES:
        hint = did_you_mean(table, TABLES) or f'; there are {", ".join(TABLES)}'
        raise UserError(f"unknown table '{table}'{hint}")
    # imported only now, because a table may need what the others do not
    import_module(f'vitzoo.bench.{table}').main(rest)
