"""`vitzoo list`: list the names of models or token mixers, one per line.

Examples:
    vitzoo list
    vitzoo list 'cvt_*'
    vitzoo list --pretrained
    vitzoo list --mixers
"""

import argparse
import fnmatch

import timm

import vitzoo
from vitzoo.errors import CommandParser, UserError, did_you_mean, run_command


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(list_names, argv)


def list_names(argv: list[str] | None = None) -> None:
    """Print the names that match the command line.

    Raises:
        UserError: The pattern matches nothing, or an option is not for mixers.
    """
    parser = CommandParser('vitzoo list', description=__doc__.partition('\n')[0])
    parser.add_argument('pattern', nargs='?', default='*', help='wildcard in quotes, such as "cvt_*"')
    parser.add_argument('--all', action='store_true', help="include timm's own models")
    parser.add_argument('--pretrained', action='store_true', help='list the trained weights of models, as model.tag')
    parser.add_argument(
        '--mixers', action='store_true', help='list token mixers instead of models, those that match the pattern'
    )
    args = parser.parse_args(argv)
    print('\n'.join(_find_mixers(args) if args.mixers else _find_models(args)))


def _find_mixers(args: argparse.Namespace) -> list[str]:
    if args.pretrained or args.all:
        raise UserError('--mixers lists all mixers, which have no weights; leave out --pretrained and --all')
    names = fnmatch.filter(vitzoo.list_mixers(), args.pattern)
    if not names:
        raise UserError(f"no mixer matches '{args.pattern}'{did_you_mean(args.pattern, vitzoo.list_mixers())}")
    return names


def _find_models(args: argparse.Namespace) -> list[str]:
    # to timm, an empty pattern is none
    names = _list_models(args, args.pattern) if args.pattern else []
    if not names:
        kind = 'model with trained weights' if args.pretrained else 'model'
        others = _list_models(args, '*')
        # a name of weights is longer by its tag than that of its model, which may be all that was mistyped
        others = dict.fromkeys([*others, *(name.partition('.')[0] for name in others)])
        raise UserError(f"no {kind} matches '{args.pattern}'{did_you_mean(args.pattern, others)}")
    return names


def _list_models(args: argparse.Namespace, pattern: str) -> list[str]:
    if args.pretrained:
        # a model of several trainings is also listed under its name alone
        names = [name for name in timm.list_pretrained(pattern) if '.' in name]
    else:
        names = timm.list_models(pattern)
    return names if args.all else [name for name in names if _is_of_vitzoo(name)]


def _is_of_vitzoo(name: str) -> bool:
    model, _, _ = name.partition('.')
    return timm.model_entrypoint(model).__module__.startswith('vitzoo.')


if __name__ == '__main__':
    main()
