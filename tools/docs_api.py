"""Writes docs/api.md, the public names of vitzoo, from `__all__` and the docstrings. Run by `make docs`."""

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs' / 'api.md'
# the packages with a Python interface; the others are commands, or used by these
PACKAGES = ('vitzoo', 'vitzoo.mixers', 'vitzoo.models', 'vitzoo.data', 'vitzoo.metrics', 'vitzoo.transfer')
WIDTH = 100

INTRO = """
# API

The public names of vitzoo: those in `__all__` of these packages. A release that removes one, or an argument of one,
mentions it in the [changelog](../CHANGELOG.md); everything else may change at any time. `make docs` writes this page
from the docstrings, and a test holds the list. Models are created by `timm.create_model`; `vitzoo <command> --help`
describes a command.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding='utf-8')
    print(f'wrote {PAGE}', file=sys.stderr)


def public_objects() -> dict[str, dict[str, object]]:
    """The public objects by package and name, each in the first package that exports it."""
    seen, found = set(), {}
    for package in PACKAGES:
        module = import_module(package)
        named = {name: getattr(module, name) for name in module.__all__}
        found[package] = {name: value for name, value in named.items() if name not in seen}
        seen |= set(named)
    return found


def render() -> str:
    """The whole page."""
    parts = [INTRO.strip()]
    for package, objects in public_objects().items():
        module = import_module(package)
        parts.append(f'## `{package}`\n\n{first_sentence(module)}')
        parts += [section(name, value) for name, value in objects.items() if not isinstance(value, ModuleType)]
        others = [f'`{name}`' for name in module.__all__ if name not in objects]
        if others:
            parts.append(f'Also here: {", ".join(others)}.')
    return '\n\n'.join(parts) + '\n'


def section(name: str, value: type | object) -> str:
    """A name with its signature, its first sentence and the pages that use it."""
    lines = [f'### `{name}`', f'```python\n{signature(name, value)}\n```', first_sentence(value)]
    pages = pages_with(name)
    return '\n\n'.join([*lines, f'See {", ".join(pages)}.'] if pages else lines)


def first_sentence(value: object) -> str:
    """The first sentence of a docstring, in one line."""
    paragraph = ' '.join((inspect.getdoc(value) or '').split('\n\n')[0].split())
    return re.split(r'(?<=[.])\s+(?=[A-Z`])', paragraph)[0]


def signature(name: str, value: type | object) -> str:
    """The signature as in the source, on one line or with a line for each parameter."""
    function = value.__init__ if isinstance(value, type) else value
    if is_dataclass(value):
        body = parse(value).body
        words, result = [ast.unparse(node) for node in body if isinstance(node, ast.AnnAssign)], ''
    else:
        node = parse(function)
        words = parameters(node.args)[isinstance(value, type) :]
        result = f' -> {ast.unparse(node.returns)}' if node.returns and not isinstance(value, type) else ''
    line = f'{name}({", ".join(words)}){result}'
    return line if len(line) <= WIDTH else f'{name}(\n    ' + ',\n    '.join(words) + f',\n){result}'


def parse(value: object) -> ast.ClassDef | ast.FunctionDef:
    """The syntax tree of a class or a function."""
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def parameters(args: ast.arguments) -> list[str]:
    """The parameters of a function as they are in its source."""
    plain = [*args.posonlyargs, *args.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    words = [parameter(arg, default) for arg, default in zip(plain, [*missing, *args.defaults], strict=True)]
    if args.vararg:
        words.append(f'*{ast.unparse(args.vararg)}')
    elif args.kwonlyargs:
        words.append('*')
    words += [parameter(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [*words, f'**{ast.unparse(args.kwarg)}'] if args.kwarg else words


def parameter(arg: ast.arg, default: ast.expr | None) -> str:
    """A parameter with its annotation and its default."""
    if default is None:
        return ast.unparse(arg)
    return f'{ast.unparse(arg)}{" = " if arg.annotation else "="}{ast.unparse(default)}'


def pages_with(name: str) -> list[str]:
    """Links to the pages with a name in their code."""
    return [link for link, code in read_code().items() if re.search(rf'(?<![\w-]){name}(?![\w-])', code)]


@cache
def read_code() -> dict[str, str]:
    """The Python code and the code spans of the pages, by link."""
    pages = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted(PAGE.parent.glob('*.md'))]
    code = {}
    for page in pages:
        if page != PAGE:
            up = '' if page.parent == PAGE.parent else '../'
            text = page.read_text(encoding='utf-8')
            blocks = re.findall(r'^```python\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
            spans = re.findall(r'`([^`\n]+)`', re.sub(r'^```.*?^```', '', text, flags=re.MULTILINE | re.DOTALL))
            code[f'[{page.stem}]({up}{page.name})'] = '\n'.join([*blocks, *spans])
    return code


if __name__ == '__main__':
    main()
