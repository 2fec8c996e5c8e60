"""Tests vitzoo with the lowest versions that pyproject.toml allows, and with the newest. Run by `make test-matrix`.

    python tools/matrix.py                               # the suite, with both
    python tools/matrix.py --cell lowest tests/mixers    # a part of it, with one

Each cell has its own environment in build/matrix, which takes 6 GB. The interpreters python3.10 and python3.13 must be
installed; with pyenv, name them: `PYENV_VERSION=3.10.13:3.13.0 make test-matrix`.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / 'build' / 'matrix'
INTERPRETERS = {'lowest': 'python3.10', 'newest': 'python3.13'}
SHOWN = ('torch', 'torchvision', 'timm', 'accelerate', 'albumentations', 'numpy')


def main() -> None:
    """Run the cells, print their table, and exit with 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--cell', action='append', choices=INTERPRETERS, help='run this cell only')
    args, pytest_args = parser.parse_known_args()
    rows = [run_cell(cell, pytest_args) for cell in args.cell or INTERPRETERS]
    print(f'\n| cell | Python | {" | ".join(SHOWN)} | result |\n|{" --- |" * (len(SHOWN) + 3)}')
    for row in rows:
        print(f'| {" | ".join(row)} |')
    sys.exit(any(not row[-1].endswith(' 0 failed') for row in rows))


def run_cell(cell: str, pytest_args: list[str]) -> list[str]:
    """Install and test a cell; returns its row of the table."""
    python, results = FOLDER / cell / 'bin' / 'python', FOLDER / f'{cell}.xml'
    shutil.rmtree(FOLDER / cell, ignore_errors=True)
    subprocess.run([INTERPRETERS[cell], '-m', 'venv', FOLDER / cell], check=True)
    constraints = FOLDER / f'{cell}.txt'
    constraints.write_text(lowest_versions() if cell == 'lowest' else '')
    pip = [python, '-m', 'pip', 'install', '-qq', '--disable-pip-version-check', '--constraint', constraints]
    if subprocess.run([*pip, '--editable', f'{ROOT}[test]']).returncode:
        return [cell, INTERPRETERS[cell].removeprefix('python'), *('–' for _ in SHOWN), 'the installation failed']
    results.unlink(missing_ok=True)
    subprocess.run([python, '-m', 'pytest', f'--junitxml={results}', *pytest_args], cwd=ROOT)
    code = 'import platform; from importlib.metadata import version; print(platform.python_version())'
    code += f'; [print(version(name)) for name in {SHOWN}]'
    versions = subprocess.run([python, '-c', code], capture_output=True, text=True, check=True).stdout.split()
    return [cell, *versions, summarize(results)]


def lowest_versions() -> str:
    """A constraint for each dependency with a lower bound in pyproject.toml."""
    (block,) = re.findall(r'^dependencies = \[\n(.*?)^\]', (ROOT / 'pyproject.toml').read_text(), re.DOTALL | re.M)
    return ''.join(f'{name}=={version}\n' for name, version in re.findall(r'"([\w-]+)>=([\w.]+)', block))


def summarize(results: Path) -> str:
    """The numbers of passed, skipped and failed tests in a file of results."""
    if not results.is_file():
        return 'pytest did not end'
    suite = ElementTree.parse(results).getroot().find('testsuite')
    total, skipped, *failed = (int(suite.get(key)) for key in ('tests', 'skipped', 'failures', 'errors'))
    return f'{total - skipped - sum(failed)} passed, {skipped} skipped, {sum(failed)} failed'


if __name__ == '__main__':
    main()
