"""The package as a whole: what importing it does, which way its imports run, and the sample it carries."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.data.readers.reader_image_in_tar import ReaderImageInTar

import vitzoo

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'vitzoo'
README = ROOT / 'README.md'
MODULES = sorted(PACKAGE.rglob('*.py'))
SAMPLE = PACKAGE / 'data' / 'sample'
ARCHIVE = ROOT.parent / 'shared' / 'data' / 'cifar10.tar.xz'


def relative_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


IMPORT_PROBE = """
import json, socket, sys, warnings

connections = []
for name in ('connect', 'connect_ex'):
    setattr(socket.socket, name, lambda self, address, *rest: connections.append(str(address)))
socket.getaddrinfo = lambda host, *rest, **kwargs: connections.append(str(host)) or []

import timm
names, modules = set(timm.list_models()), set(sys.modules)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    import vitzoo
print(json.dumps({
    'new_names': sorted(set(timm.list_models()) - names),
    'lost_names': sorted(names - set(timm.list_models())),
    'new_modules': sorted(set(sys.modules) - modules),
    'connections': connections,
    'warnings': [f'{w.filename}: {w.message}' for w in caught],
}))
"""


@pytest.fixture(scope='module')
def fresh_import() -> dict:
    child = subprocess.run([sys.executable, '-c', IMPORT_PROBE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def test_importing_vitzoo_registers_models_with_timm(fresh_import):
    families = {name.split('_')[0] for name in fresh_import['new_names']}
    assert families == {'aft', 'cvt', 'deit', 'vil'}
    assert not fresh_import['lost_names']


def test_importing_vitzoo_opens_no_connection(fresh_import):
    assert fresh_import['connections'] == []


@pytest.mark.parametrize('heavy', ['albumentations', 'matplotlib', 'accelerate', 'rich'])
def test_importing_vitzoo_leaves_heavy_packages_alone(fresh_import, heavy):
    assert heavy not in fresh_import['new_modules']


def test_importing_vitzoo_warns_of_nothing(fresh_import):
    assert fresh_import['warnings'] == []


# each floor may import from the floors below it, and `errors` and `options` are the ground of all
FLOORS = [
    ['errors'],
    ['kernels', 'launch', 'options'],
    ['mixers'],
    ['models'],
    ['__init__'],
    ['data', 'metrics'],
    ['figures', 'load'],
    ['doctor', 'train', 'validate'],
    ['bench', 'convert', 'explain', 'list', 'predict'],
    ['report'],
    ['cli'],
    ['__main__'],
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """'vitzoo.mixers.ls' is in 'mixers', 'vitzoo' itself in '__init__'."""
    return module.split('.')[1] if '.' in module else '__init__'


def imported_modules(source: str, package: str) -> set[str]:
    """The vitzoo modules that `source`, a file of `package`, imports at any place."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name('.' * node.level + (node.module or ''), package)
            # `from vitzoo import mixers` imports that room, `from vitzoo import list_mixers` the package
            rooms = [f'vitzoo.{alias.name}' for alias in node.names if base == 'vitzoo' and is_room(alias.name)]
            found.update(rooms or [base])
    return {name for name in found if name.split('.')[0] == 'vitzoo'}


def is_room(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f'{name}.py').is_file()


def upward_imports(source: str, path: Path) -> list[str]:
    """The imports of `source`, to be found at `path`, that lead to its own floor in another room, or higher."""
    module = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    room = room_of(module)
    others = [name for name in imported_modules(source, package=module.rpartition('.')[0]) if room_of(name) != room]
    return [name for name in others if FLOOR_OF[room_of(name)] >= FLOOR_OF[room]]


def test_every_room_has_a_floor():
    rooms = {path.name.removesuffix('.py') for path in PACKAGE.iterdir() if path.suffix == '.py' or path.is_dir()}
    assert rooms - {'__pycache__'} == set(FLOOR_OF)


@pytest.mark.parametrize('path', MODULES, ids=relative_id)
def test_imports_run_one_way(path):
    assert upward_imports(path.read_text(), path) == []


@pytest.mark.parametrize(
    ('source', 'path'),
    [
        ('from vitzoo.models.cvt import CvT', 'mixers/ls.py'),
        ('from ..data import open_dataset', 'models/cvt.py'),
        ('from . import softmax\nfrom .. import models', 'mixers/__init__.py'),
        ('def f():\n    import vitzoo.train.loop', 'metrics/macs.py'),
        ('from vitzoo.metrics import count_macs', 'data/dataset.py'),
        ('from vitzoo import list_mixers', 'models/cvt.py'),
        ('from .models import cvt', 'errors.py'),
        ('from vitzoo.report.charts import scatter', 'train/loop.py'),
        ('from vitzoo.validate import main', 'train/loop.py'),
        ('from vitzoo.predict import predict', 'explain.py'),
        ('from vitzoo.train.recipe import Recipe', 'load.py'),
        ('from vitzoo.cli import main', 'bench/mixers.py'),
    ],
)
def test_the_import_check_sees_a_wrong_import(source, path):
    assert len(upward_imports(source, PACKAGE / path)) == 1


@pytest.mark.parametrize('path', [path for path in MODULES if path.stat().st_size], ids=relative_id)
def test_modules_and_their_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), 'the module has none'
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    bare = [node.name for node in definitions if not node.name.startswith('_') and not ast.get_docstring(node)]
    assert bare == []


EXAMPLE_PROBE = """
import re, pathlib, torch, vitzoo

(example,) = re.findall('```python\\n(.*?)```', pathlib.Path('CONTRIBUTING.md').read_text(), re.DOTALL)
exec(compile(example, 'elu.py', 'exec'), {'__package__': 'vitzoo.mixers', '__name__': 'vitzoo.mixers.elu'})
mixer = vitzoo.create_mixer('elu', 24, 3, grid_size=(5, 3), num_prefix_tokens=1).double()
q, k, v = torch.randn(3, 2, 3, 16, 8, dtype=torch.float64)
torch.testing.assert_close(mixer.op(q, k, v), mixer.op_naive(q, k, v), rtol=1e-9, atol=1e-9)
assert mixer(torch.randn(2, 16, 24).double(), (5, 3)).shape == (2, 16, 24)
print('elu' in vitzoo.list_mixers())
"""


def test_the_mixer_in_the_contributing_guide_works():
    child = subprocess.run([sys.executable, '-c', EXAMPLE_PROBE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert child.stdout.strip() == 'True', child.stderr


def test_the_python_lines_of_the_readme_run():
    example = re.search('```python\\n(.*?)```', README.read_text(), re.DOTALL).group(1)
    child = subprocess.run([sys.executable, '-c', example], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr


def test_every_model_the_readme_names_exists():
    names = set(re.findall(r'`((?:aft|cvt|deit|vil)_\w+)`', README.read_text()))
    assert len(names) > 20
    assert names - {*timm.list_models(), *vitzoo.list_mixers()} == set()


def test_the_readme_states_true_parameter_counts():
    stated = {name: int(n.replace(',', '')) for name, n in re.findall(r'`(\w+)` \| (\d[\d,]+) \|', README.read_text())}
    assert len(stated) > 20
    with torch.device('meta'):
        models = {name: timm.create_model(name) for name in stated}
    assert stated == {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}


def shipped_files() -> list[Path]:
    """What git tracks or would track."""
    listing = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
    git = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip('not a git checkout')
    return [path for name in git.stdout.split('\0') if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_registry_host_or_a_path_of_one_machine():
    # joined here, so that this file does not name them either
    forbidden = ['/'.join(pair).encode() for pair in [('pypi.org', 'simple'), ('opt', 'pypi'), ('', 'work', '')]]
    forbidden += [b'files.' + b'pythonhosted', b'/.' + b'library']
    files = shipped_files()
    assert ROOT / 'pyproject.toml' in files
    guilty = [(relative_id(path), word) for path in files for word in forbidden if word in path.read_bytes()]
    assert guilty == []
    assert [path for path in files if path.suffix == '.lock'] == []


CLASSES = ['airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck']


def test_the_sample_takes_at_most_4_megabytes():
    assert sum(path.stat().st_size for path in SAMPLE.glob('*.tar')) <= 4_000_000


@pytest.mark.parametrize(('split', 'per_class'), [('train', 200), ('val', 50)])
def test_timm_reads_the_sample_as_ten_balanced_classes(split, per_class):
    reader = ReaderImageInTar(str(SAMPLE / f'{split}.tar'))
    assert reader.class_name_to_idx == {name: index for index, name in enumerate(CLASSES)}
    labels = []
    for file, label in reader:
        image = Image.open(file).convert('RGB')
        assert image.size == (32, 32)
        labels.append(label)
    assert labels == [label for label in range(10) for _ in range(per_class)]


def test_no_photograph_of_the_sample_is_in_it_twice():
    photos = []
    for path in SAMPLE.glob('*.tar'):
        with tarfile.open(path) as tar:
            photos += [tar.extractfile(member).read() for member in tar]
    assert len(set(photos)) == len(photos) == 2_500


def test_the_sample_names_no_owner_and_no_date():
    for path in SAMPLE.glob('*.tar'):
        with tarfile.open(path) as tar:
            headers = {(member.mtime, member.uid, member.gid, member.uname, member.gname) for member in tar}
        assert headers == {(0, 0, 0, '', '')}


@pytest.mark.skipif(not ARCHIVE.is_file(), reason='needs the CIFAR-10 archive next to the repository')
def test_the_sample_is_made_again_bit_for_bit(tmp_path):
    spec = importlib.util.spec_from_file_location('make_sample', SAMPLE / 'make_sample.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.make_sample(ARCHIVE, tmp_path)
    for name in ('train.tar', 'val.tar'):
        assert (tmp_path / name).read_bytes() == (SAMPLE / name).read_bytes()
