"""The package as a whole: side effects of its import, layers, names, prose, the README and the bundled sample."""

import ast
import importlib.util
import io
import json
import pkgutil
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch
from PIL import Image
from processes import start_processes
from timm.data.readers.reader_image_in_tar import ReaderImageInTar

import vitzoo
from vitzoo.mixers import mixer_class

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
    child = subprocess.run([sys.executable, '-c', IMPORT_PROBE], cwd=ROOT, capture_output=True, text=True, timeout=900)
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


# the parts of a layer may import from earlier layers only
LAYERS = [
    ['_arguments', '_files', '_modes', '_process', '_resources', '_save', 'errors'],
    ['kernels', 'launch', 'options'],
    ['mixers'],
    ['models'],
    ['__init__'],
    ['data', 'metrics'],
    ['about', 'classes', 'figures', 'machine'],
    ['load'],
    ['classifier', 'doctor', 'export', 'train', 'validate'],
    ['bench', 'cite', 'convert', 'explain', 'list', 'predict'],
    ['transfer'],
    ['report'],
    ['study'],
    ['push'],
    ['cli'],
    ['__main__'],
]
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}


def part_of(module: str) -> str:
    """'vitzoo.mixers.ls' belongs to 'mixers', and 'vitzoo' to '__init__'."""
    return module.split('.')[1] if '.' in module else '__init__'


def imported_modules(source: str, package: str) -> set[str]:
    """The vitzoo modules that `source`, a file of `package`, imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name('.' * node.level + (node.module or ''), package)
            # `from vitzoo import mixers` imports that part, `from vitzoo import list_mixers` the package
            parts = [f'vitzoo.{alias.name}' for alias in node.names if base == 'vitzoo' and is_part(alias.name)]
            found.update(parts or [base])
    return {name for name in found if name.split('.')[0] == 'vitzoo'}


def is_part(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f'{name}.py').is_file()


def upward_imports(source: str, path: Path) -> list[str]:
    """The imports of `source`, the file at `path`, from other parts of its own layer or from later layers."""
    module = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    part = part_of(module)
    others = [name for name in imported_modules(source, package=module.rpartition('.')[0]) if part_of(name) != part]
    return [name for name in others if LAYER_OF[part_of(name)] >= LAYER_OF[part]]


def test_every_part_has_a_layer():
    parts = {path.name.removesuffix('.py') for path in PACKAGE.iterdir() if path.suffix == '.py' or path.is_dir()}
    assert parts - {'__pycache__'} == set(LAYER_OF)


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
def test_the_check_of_imports_finds_a_wrong_one(source, path):
    assert len(upward_imports(source, PACKAGE / path)) == 1


@pytest.mark.parametrize('path', [path for path in MODULES if path.stat().st_size], ids=relative_id)
def test_modules_and_their_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), 'the module has no docstring'
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    bare = [node.name for node in definitions if not node.name.startswith('_') and not ast.get_docstring(node)]
    assert bare == []


def incomplete_signatures(source: str) -> list[str]:
    """The functions of which an argument or the result has no annotation."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            named = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
            bare = [arg.arg for arg in named if arg.annotation is None and arg.arg not in ('self', 'cls')]
            if bare or node.returns is None:
                found.append(node.name)
    return found


# arguments of Triton kernels are pointers and numbers, of which only constants have an annotation
@pytest.mark.parametrize('path', [path for path in MODULES if path.parent.name != 'kernels'], ids=relative_id)
def test_signatures_are_complete(path):
    assert incomplete_signatures(path.read_text()) == []


def test_the_check_of_signatures_finds_a_missing_annotation():
    lines = ['def a(x: int): ...', 'def b(self, *args) -> None: ...', 'def c(*, k=0) -> int: ...']
    assert incomplete_signatures('\n'.join([*lines, 'def d(self) -> int: ...'])) == ['a', 'b', 'c']


# names that modules define by convention, and the folder in which they may
PROTOCOL_NAMES = {
    '.': {'main', 'parse_args'},
    'models': {'checkpoint_filter_fn', 'default_cfgs', 'SIZES', 'VARIANTS', 'WEIGHTS'},
    'kernels': {'forward_op', 'backward_op', 'fits'},
}


def public_names(source: str) -> set[str]:
    """The public functions, classes and constants that a module defines at its top level."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            names = [name for target in node.targets for name in ast.walk(target)]
            found.update(name.id for name in names if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
        elif isinstance(node, ast.AnnAssign):
            found.add(node.target.id)
    return {name for name in found if not name.startswith('_')}


def duplicate_names(package: Path) -> dict[str, list[str]]:
    """Public names that several modules define, with these modules."""
    defined = defaultdict(list)
    for path in sorted(package.rglob('*.py')):
        place = path.relative_to(package)
        allowed = set().union(*(names for folder, names in PROTOCOL_NAMES.items() if Path(folder) in place.parents))
        for name in public_names(path.read_text()) - allowed:
            defined[name].append(place.as_posix())
    return {name: places for name, places in sorted(defined.items()) if len(places) > 1}


def test_no_two_modules_define_the_same_public_name():
    assert duplicate_names(PACKAGE) == {}


def test_the_check_of_names_finds_a_duplicate(tmp_path):
    sources = {
        'train.py': 'LIMIT: int = 1\ndef main(): ...\ndef load(): ...\n_private = 0',
        'models/cvt.py': 'SIZES = {}\ndef load(): ...',
        'models/vil.py': 'from .cvt import load\nSIZES = {}\n_private = 1\nx, LIMIT = 1, 2\nmain = None',
        'data/loader.py': 'class Loader:\n    def load(self): ...\nSIZES = {}',
        'data/shards.py': 'SIZES = {}',
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    assert duplicate_names(tmp_path) == {
        'LIMIT': ['models/vil.py', 'train.py'],
        'SIZES': ['data/loader.py', 'data/shards.py'],
        'load': ['models/cvt.py', 'train.py'],
    }


def missing_names(source: str) -> list[str]:
    """Names that `source` imports from vitzoo, or reads from modules of it, and that do not exist."""
    tree, modules, missing = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split('.')[0] == 'vitzoo':
            for alias in node.names:
                path = f'{node.module}.{alias.name}'
                try:
                    found = pkgutil.resolve_name(path)
                except (ImportError, AttributeError):
                    missing.append(path)
                    continue
                if isinstance(found, ModuleType):
                    modules[alias.asname or alias.name] = found
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    for node in reads:
        module = modules.get(node.value.id) if node.value.id not in assigned else None
        if module and not hasattr(module, node.attr):
            missing.append(f'{module.__name__}.{node.attr}')
    return missing


@pytest.mark.parametrize('folder', ['tests', 'tools'])
def test_the_names_of_vitzoo_in_tests_and_tools_exist(folder):
    # slow tests and tests on a GPU run seldom, so a wrong name would go unnoticed
    missing = {relative_id(path): missing_names(path.read_text()) for path in (ROOT / folder).rglob('*.py')}
    assert len(missing) > 10 and {path: names for path, names in missing.items() if names} == {}


def test_the_check_of_uses_finds_a_missing_name():
    source = """
def f():
    from vitzoo import cite as papers, lost
    from vitzoo.validate import evaluation

    papers.lost(evaluation.lost)
    lost = evaluation
    lost.records = evaluation.measure_throughput
"""
    assert missing_names(source) == ['vitzoo.lost', 'vitzoo.cite.lost', 'vitzoo.validate.evaluation.lost']


# expressions that are wrong or obscure, with a better one
UNCLEAR = {
    r'so many': 'N, or the number of',
    r'anew': 'again, or new',
    r'alike': 'in the same way, or similar',
    r'by turns': 'alternately, or in turn',
    r'lest': 'so that … not',
    r'other ones': 'others',
    r'where there (?:is|are)': 'if there is',
    r'(?<!here\s)is no (?:folder|image|model|square)': 'is not a',
}
# a docstring or a comment that begins with one of these is a clause without a main verb
RELATIVES = re.compile(r'(?:What|Which|How|Whether)\b', re.IGNORECASE)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments with the number of their first line; consecutive lines are one comment."""
    last, start, text = None, 0, ''
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        (line, column), words = token.start, token.string.lstrip('#').strip()
        if last == (line - 1, column):
            text = f'{text} {words}'
        else:
            if text:
                yield start, text
            start, text = line, words
        last = line, column
    if text:
        yield start, text


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, its classes and its functions, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def unclear_prose(path: Path) -> list[str]:
    """Faults of the prose in a Python or Markdown file: 'line: words'."""
    text = path.read_text()
    if path.suffix == '.md':
        # table rows and quoted code keep their lines
        passages, openings = [(1, text)], []
    else:
        tree = ast.parse(text)
        openings = [*docstrings(tree), *comments(text)]
        strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        passages = [*comments(text), *((node.lineno, node.value) for node in strings)]
    faults = {(line, match[0]) for line, words in openings if (match := RELATIVES.match(words))}
    for line, passage in passages:
        for pattern in UNCLEAR:
            for match in re.finditer(rf'(?<![\w-]){pattern}(?![\w-])'.replace(' ', r'\s+'), passage, re.IGNORECASE):
                faults.add((line + passage.count('\n', 0, match.start()), ' '.join(match[0].split())))
    return [f'{line}: {words}' for line, words in sorted(faults)]


def prose_files() -> list[Path]:
    """Everything that is written for readers, except this file, which quotes the faults."""
    code = [path for folder in ('vitzoo', 'tools', 'tests') for path in sorted((ROOT / folder).rglob('*.py'))]
    pages = [*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md'), *(ROOT / 'weights').glob('*.md'), SAMPLE / 'README.md']
    return [path for path in [*code, *pages] if path != Path(__file__)]


@pytest.mark.parametrize('path', prose_files(), ids=relative_id)
def test_the_prose_is_plain(path):
    assert unclear_prose(path) == []


PLANTED = '''"""What a module does."""

def f(so_many, x):
    """Return the pair, whether or not it exists, the least of all.

    It is made so
    many times anew.
    """
    # which is
    # why
    print('which of these?')  # there is no image
    return f'{x} is no image; the blest are unlike alike-within'  # alike
'''


def test_the_check_of_prose_finds_planted_faults_only(tmp_path):
    path = tmp_path / 'module.py'
    path.write_text(PLANTED)
    assert unclear_prose(path) == ['1: What', '6: so many', '7: anew', '9: which', '12: alike', '12: is no image']
    path = tmp_path / 'page.md'
    path.write_text('# How it works\n\nWhat is new: lines\nby\nturns, where there are some.\n')
    assert unclear_prose(path) == ['4: by turns', '5: where there are']


def identifiers(source: str) -> set[str]:
    """The names that a file defines or uses."""
    nodes = list(ast.walk(ast.parse(source)))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return (
        defined
        | {node.id for node in nodes if isinstance(node, ast.Name)}
        | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        | {node.arg for node in nodes if isinstance(node, ast.arg)}
    )


# PyTorch's spelling, and no function that 'says' something
BAD_IDENTIFIER = re.compile(r'normalis|synchronis|factoris|initialis|optimis|colour|^_?say(?:_|$)', re.IGNORECASE)


@pytest.mark.parametrize('path', MODULES, ids=relative_id)
def test_identifiers_have_the_spelling_of_pytorch(path):
    assert [name for name in sorted(identifiers(path.read_text())) if BAD_IDENTIFIER.search(name)] == []


def run_the_example_of_the_contributing_guide() -> None:
    (example,) = re.findall('```python\n(.*?)```', (ROOT / 'CONTRIBUTING.md').read_text(), re.DOTALL)
    exec(compile(example, 'elu.py', 'exec'), {'__package__': 'vitzoo.mixers', '__name__': 'vitzoo.mixers.elu'})
    assert 'elu' in vitzoo.list_mixers()
    mixer = vitzoo.create_mixer('elu', 24, 3, grid_size=(5, 3), num_prefix_tokens=1).double()
    q, k, v = torch.randn(3, 2, 3, 16, 8, dtype=torch.float64)
    torch.testing.assert_close(mixer.op(q, k, v), mixer.op_naive(q, k, v), rtol=1e-9, atol=1e-9)
    assert mixer(torch.randn(2, 16, 24).double(), (5, 3)).shape == (2, 16, 24)


def test_the_mixer_in_the_contributing_guide_works():
    # in a process of its own, because it registers the mixer
    outcome = start_processes(1, run_the_example_of_the_contributing_guide)
    assert outcome.codes == [0], outcome.err


def test_the_python_lines_of_the_readme_run():
    example = re.search('```python\\n(.*?)```', README.read_text(), re.DOTALL).group(1)
    child = subprocess.run([sys.executable, '-c', example], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert child.returncode == 0, child.stderr


def test_the_readme_counts_and_names_every_mixer():
    mixers = [name for name in vitzoo.list_mixers() if mixer_class(name).__module__.startswith('vitzoo.')]
    text = README.read_text()
    assert f'{len(mixers)} token mixers' in text
    assert [name for name in mixers if f'`{name}`' not in text] == []


PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', ROOT / 'weights' / 'README.md', *(ROOT / 'docs').glob('*.md')]


@pytest.mark.parametrize('page', PAGES, ids=relative_id)
def test_the_models_and_files_that_a_page_names_exist(page):
    text = page.read_text()
    names = set(re.findall(r'`((?:aft|cvt|deit|vil)_\w+)`', text))
    assert names - {*timm.list_models(), *vitzoo.list_mixers()} == set()
    links = re.findall(r'\]\((?!https://|#)([^)#]+)', text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_pages_of_the_documentation_are_linked_from_the_readme():
    links = set(re.findall(r'\]\((docs/\w+\.md)\)', README.read_text()))
    assert links == {relative_id(page) for page in (ROOT / 'docs').glob('*.md')}


def test_the_page_of_models_states_true_parameter_counts():
    text = (ROOT / 'docs' / 'models.md').read_text()
    stated = {name: int(n.replace(',', '')) for name, n in re.findall(r'`(\w+)` \| (\d[\d,]+) \|', text)}
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


@pytest.mark.slow
@pytest.mark.skipif(not ARCHIVE.is_file(), reason='needs the CIFAR-10 archive next to the repository')
def test_the_sample_is_made_again_bit_for_bit(tmp_path):
    spec = importlib.util.spec_from_file_location('make_sample', SAMPLE / 'make_sample.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.make_sample(ARCHIVE, tmp_path)
    for name in ('train.tar', 'val.tar'):
        assert (tmp_path / name).read_bytes() == (SAMPLE / name).read_bytes()
