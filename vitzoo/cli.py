"""`vitzoo <command>`: finds the command's module and hands it the rest of the command line."""

import sys
from importlib import import_module

from vitzoo.errors import UserError, did_you_mean, run_command

COMMANDS = {
    'train': 'train a model on a folder of images',
    'validate': 'measure accuracy, size, speed and oversmoothing of models',
    'report': 'write what was found of models as one HTML page',
    'doctor': 'find what is wrong with a folder of images, and how to put it right',
    'predict': 'name the most likely classes of images',
    'convert': "turn an official checkpoint, or another model's weights, into a folder that timm loads",
    'bench': 'measure speed and memory, side by side with others',
    'list': 'list the models and the token mixers',
}


def main(argv: list[str] | None = None) -> None:
    """Run `vitzoo` and end the process with its exit code."""
    run_command(dispatch, sys.argv[1:] if argv is None else argv)


def dispatch(argv: list[str]) -> None:
    """Run the command that the first argument names.

    Raises:
        UserError: There is no such command.
    """
    if not argv or argv[0] in ('-h', '--help', 'help'):
        print(_help())
        return
    command, *rest = argv
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS) or f'; the commands are {", ".join(COMMANDS)}'
        raise UserError(f"unknown command '{command}'{hint}")
    # imported only now, because a command may need what the others do not
    import_module(f'vitzoo.{command}').main(rest)


def _help() -> str:
    lines = [f'  {command:10} {summary}' for command, summary in COMMANDS.items()]
    return '\n'.join(['usage: vitzoo <command> [arguments]', '', *lines, '', '`vitzoo <command> --help` says more.'])
