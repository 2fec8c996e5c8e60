"""The distribution vitzoo-models: an sdist, the wheel built from it, and that wheel in an environment of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
from timm.models import save_for_hf

import vitzoo

ROOT = Path(__file__).parents[1]
NOT_SOURCE = shutil.ignore_patterns('.git', '.venv', 'runs', 'build', 'dist', '*.egg-info', '__pycache__')
OFFLINE = """
import socket

def getaddrinfo(host, *args, **kwargs):
    raise AssertionError(f'connection to {host}')

socket.getaddrinfo = getaddrinfo
"""
BUILD_SDIST = 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])'

SHIPPED = 'weights/deit_softmax_nano.vz_test'

pytestmark = pytest.mark.slow


class Built(NamedTuple):
    """Paths of the two files, and their contents."""

    sdist: Path
    wheel: Path
    in_sdist: set[str]
    in_wheel: set[str]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without the paths of this process, and return its output."""
    env = {key: value for key, value in os.environ.items() if key not in ('PYTHONPATH', 'PYTHONHOME')}
    child = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=1800)
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


@pytest.fixture(scope='module')
def built(tmp_path_factory) -> Built:
    """The sdist of this checkout and the wheel of that sdist, built without network."""
    folder = tmp_path_factory.mktemp('dist')
    shutil.copytree(ROOT, folder / 'source', ignore=NOT_SOURCE)
    # also if no weights are shipped
    model = timm.create_model('deit_softmax_nano', num_classes=7)
    save_for_hf(model, folder / 'source' / SHIPPED, safe_serialization=True)
    run(sys.executable, '-c', BUILD_SDIST, folder, cwd=folder / 'source')
    (sdist,) = folder.glob('*.tar.gz')
    pip = [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-index', '--no-build-isolation']
    run(*pip, '--wheel-dir', folder, sdist, cwd=folder)
    (wheel,) = folder.glob('*.whl')
    with tarfile.open(sdist) as tar, zipfile.ZipFile(wheel) as archive:
        in_sdist = {member.name.partition('/')[2] for member in tar if member.isfile()}
        return Built(sdist, wheel, in_sdist, set(archive.namelist()))


@pytest.fixture(scope='module')
def installed(built, tmp_path_factory) -> Path:
    """The scripts folder of an environment with this wheel and the dependencies of the present one."""
    folder = tmp_path_factory.mktemp('environment')
    run(sys.executable, '-m', 'venv', folder, cwd=folder)
    run(folder / 'bin' / 'python', '-m', 'pip', 'install', '--no-deps', '--no-index', built.wheel, cwd=folder)
    (site,) = folder.glob('lib/python*/site-packages')
    # every process of this environment is without network
    (site / 'offline.py').write_text(OFFLINE)
    (site / 'offline.pth').write_text('import offline')
    # the .pth file of an editable vitzoo in that folder is not read
    (site / 'dependencies.pth').write_text(sysconfig.get_path('purelib'))
    return folder / 'bin'


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    files = (path for path in (ROOT / 'vitzoo').rglob('*') if path.is_file() and '__pycache__' not in path.parts)
    code = {name for name in built.in_wheel if '.dist-info/' not in name}
    resources = {name for name in code if name.startswith(('vitzoo/configs/', 'vitzoo/weights/'))}
    assert code - resources == {path.relative_to(ROOT).as_posix() for path in files}
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'weights').glob('*.*/*')}
    shipped |= {path.relative_to(ROOT).as_posix() for path in (ROOT / 'configs').rglob('*.yaml')}
    shipped |= {f'{SHIPPED}/{name}' for name in ('config.json', 'model.safetensors')}
    assert resources == {f'vitzoo/{name}' for name in shipped}


def test_the_sdist_has_the_package_and_the_recipes_and_no_tests(built):
    assert {'pyproject.toml', 'README.md', 'LICENSE', 'configs/quickstart.yaml'} <= built.in_sdist
    code = {name for name in built.in_wheel if '.dist-info/' not in name}
    assert {re.sub('^vitzoo/(configs|weights)/', r'\1/', name) for name in code} <= built.in_sdist
    assert [name for name in built.in_sdist if name.startswith('tests/')] == []


def test_the_distribution_has_its_own_name_and_the_version_of_the_package(built):
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith('.dist-info/METADATA'))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert (metadata['Name'], metadata['Version']) == ('vitzoo-models', vitzoo.__version__)
    assert metadata['License-Expression'] == 'Apache-2.0'


def test_the_installed_command_lists_the_models(installed, tmp_path):
    names = run(installed / 'vitzoo', 'list', cwd=tmp_path).split()
    assert 'cvt_nano' in names and 'vil_ls_small' in names
    origin = run(installed / 'python', '-c', 'import vitzoo; print(vitzoo.__file__)', cwd=tmp_path)
    assert Path(origin.strip()).is_relative_to(installed.parent)


def test_the_installed_package_loads_shipped_weights_by_their_name(installed, tmp_path):
    code = "model = timm.create_model('deit_softmax_nano.vz_test', pretrained=True); print(model.num_classes)"
    assert run(installed / 'python', '-c', f'import timm, vitzoo; {code}', cwd=tmp_path).strip() == '7'


def test_the_installed_command_trains_on_the_sample_and_reports_and_predicts(installed, tmp_path):
    recipe = ['--config', 'quickstart.yaml', '--model', 'cvt_nano', '--epochs', '1', '--output', 'run']
    run(installed / 'vitzoo', 'train', *recipe, cwd=tmp_path)
    run(installed / 'vitzoo', 'report', 'run', '--data-dir', 'sample', '--out', 'report', cwd=tmp_path)
    page = (tmp_path / 'report' / 'index.html').read_text()
    assert '<style>' in page and '<script>' in page and 'cvt_nano' in page
    assert json.loads((tmp_path / 'report' / 'report.json').read_text())
    archive = next(installed.parent.glob('lib/python*/site-packages/vitzoo/data/sample/val.tar'))
    predictions = run(installed / 'vitzoo', 'predict', archive, '--model', 'run', '--top-k', '1', cwd=tmp_path)
    assert len(predictions.splitlines()) >= 500
