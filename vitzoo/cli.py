"""The command line `vitzoo <command>`, which runs the module of that name."""

import sys
from importlib import import_module
from importlib.metadata import version
from platform import python_version

import vitzoo
from vitzoo.errors import UserError, did_you_mean, run_command

COMMANDS = {
    'train': 'train a model on a folder of images',
    'validate': 'measure the accuracy, size, speed and oversmoothing of models',
    'report': 'write the results of models to an HTML page',
    'doctor': 'find problems in a folder of images, and how to fix them',
    'predict': 'predict the classes of images',
    'explain': 'draw the image regions that predictions are based on',
    'transfer': 'replace the attention of a pretrained ViT by efficient mixers, without labels',
    'study': 'train, convert and compare models with several seeds, and write tables with intervals',
    'push': 'upload a trained model with its model card, or write it to weights/',
    'export': 'write a model to a file of ONNX, OpenVINO or torch.export, and check it',
    'convert': 'convert an official checkpoint, or weights of another model, to a folder that timm loads',
    'bench': 'benchmark speed and memory against other implementations',
    'list': 'list the models and the token mixers',
    'cite': 'print BibTeX of the papers behind a model',
}


def main(argv: list[str] | None = None) -> None:
    """Run `vitzoo` and exit with its exit code."""
    run_command(_dispatch, sys.argv[1:] if argv is None else argv)


def _dispatch(argv: list[str] | None) -> None:
    if not argv or argv[0] in ('-h', '--help', 'help'):
        print(_help())
        return
    if argv[0] == '--version':
        print(_versions())
        return
    command, *rest = argv
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS) or f'; the commands are {", ".join(COMMANDS)}'
        raise UserError(f"unknown command '{command}'{hint}")
    # imported late: a command may need packages that the others do not
    import_module(f'vitzoo.{command}').main(rest)


def _versions() -> str:
    """The versions to name in a report of a problem."""
    others = [f'{name} {version(name)}' for name in ('torch', 'timm', 'accelerate')]
    return ', '.join([f'vitzoo {vitzoo.__version__}', *others, f'Python {python_version()}'])


def _help() -> str:
    lines = [f'  {command:10} {summary}' for command, summary in COMMANDS.items()]
    notes = ['`vitzoo <command> --help` describes its arguments.', '`vitzoo --version` prints the versions.']
    return '\n'.join(['usage: vitzoo <command> [arguments]', '', *lines, '', *notes])
