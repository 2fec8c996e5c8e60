"""The command line of `vitzoo train`: every key of a recipe is an option."""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from vitzoo.errors import CommandParser, UserError, did_you_mean, format_flag
from vitzoo.options import parse_yaml
from vitzoo.train.recipe import FIELDS, FIXED_KEYS, Recipe, make_recipe, option_types, read_recipe_file
from vitzoo.train.resume import find_run

_METAVARS = {bool: 'yes|no', int: 'N', float: 'X', str: 'NAME', list: 'LIST', dict: 'YAML'}


def load_recipe(argv: list[str] | None = None) -> Recipe:
    """The recipe of a command line: options take precedence over the --config file, and that over defaults.

    With `--resume` and no `--config`, the file is recipe.yaml of the resumed run.

    Raises:
        UserError: A key does not exist, a value has the wrong type or is out of range, or there is no run to resume.
    """
    given = _parse_options(sys.argv[1:] if argv is None else argv)
    file = given.pop('config', None)
    if file is None and given.get('resume') is not None:
        folder, _ = find_run(given['resume'], given.get('output'))
        saved = folder / 'recipe.yaml'
        file = saved if saved.is_file() else None
    return make_recipe({**(read_recipe_file(file) if file else {}), **given})


class _HelpFormatter(argparse.HelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        # argparse would print '[VALUE ...]' for every option
        return str(action.metavar or '')


def _parse_options(argv: list[str]) -> dict[str, Any]:
    """The options that are given, by key; values are strings, or lists of the words after the option."""
    parser = _build_parser()
    given, unknown = parser.parse_known_args([_hyphenate(word) for word in argv])
    if unknown:
        flag = unknown[0].partition('=')[0]
        raise UserError(f"unknown option '{flag}'{did_you_mean(flag, map(format_flag, FIELDS))}")
    return {name: _join_words(name, words) for name, words in vars(given).items()}


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog='vitzoo train',
        usage='vitzoo train [--config FILE] [--<key> VALUE …]',
        description='Train an image classifier. Options are the keys of a recipe file, and take precedence over it.',
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: _HelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.add_argument('--config', metavar='FILE', help='recipe file (YAML)')
    defaults, groups = asdict(Recipe()), {}
    for name, spec in FIELDS.items():
        title = spec.metadata['group']
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = '' if defaults[name] in (None, {}) else f' [{_format_default(defaults[name])}]'
        fixed = ' (cannot change on resume)' if name in FIXED_KEYS else ''
        text = (spec.metadata['help'] + default + fixed).replace('%', '%%')
        groups[title].add_argument(format_flag(name), dest=name, nargs='*', metavar=_metavar(name), help=text)
    return parser


def _hyphenate(word: str) -> str:
    """Accept --batch_size for --batch-size."""
    flag, equals, value = word.partition('=')
    return flag.replace('_', '-') + equals + value if word.startswith('--') else word


def _format_default(value: Any) -> str:
    return ' '.join(f'{item:.4g}' for item in value) if isinstance(value, list) else str(value)


def _metavar(name: str) -> str:
    choices = FIELDS[name].metadata['choices']
    return '|'.join(map(str, choices)) or '|'.join(_METAVARS[kind] for kind in option_types(name))


def _join_words(name: str, words: list[str] | str) -> Any:
    """The value of the words after an option: `--scale 0.5 1`, `--pretrained`, `--model-kwargs depth=2`."""
    if isinstance(words, str):
        return words
    types = option_types(name)
    if not words and bool in types:
        return True
    if not words:
        raise UserError(f'{format_flag(name)} needs a value')
    if dict in types and all('=' in word and word[0] not in '{[' for word in words):
        return {left: parse_yaml(right) for left, _, right in (word.partition('=') for word in words)}
    if words == ['null'] and getattr(Recipe, name, '') is None:
        # as in a file: otherwise what the file of a resumed run has could not be unset
        return None
    if len(words) == 1:
        return words[0]
    if list not in types:
        raise UserError(f'{format_flag(name)} takes one value, not {len(words)}: {" ".join(words)}')
    return words
