"""The licences of the packages that vitzoo needs, and of the weights that it loads by name."""

import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import timm
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from timm.models import save_for_hf
from tiny import CVT

from vitzoo.convert import convert
from vitzoo.train.model import build_model
from vitzoo.train.recipe import make_recipe
from vitzoo.validate.results import format_weights

ROOT = Path(__file__).parents[1]
# MPL-2.0 is that of tqdm and certifi, which the hub's client needs and which nothing here changes
ALLOWED = re.compile(
    r'(?<![A-Za-z])(?:Apache|0?BSD|BSL-1\.0|CC0|HPND|ISC|LLVM-exception|MIT|MPL-2\.0|Mozilla Public License 2\.0|PSF'
    r'|Python Software Foundation|Unlicense|Zlib)'
)
# the CUDA libraries that torch's wheel for Linux requires are NVIDIA's own
OF_CUDA = ('nvidia-', 'cuda-')


def needed_packages() -> list[str]:
    """The installed packages that vitzoo needs without extras, directly or not."""
    (block,) = re.findall(
        r'^dependencies = \[\n(.*?)^\]', (ROOT / 'pyproject.toml').read_text(), re.MULTILINE | re.DOTALL
    )
    todo = re.findall(r'"(.+?)"', block)
    found = set()
    while todo:
        needed = Requirement(todo.pop())
        name = canonicalize_name(needed.name)
        is_needed = needed.marker is None or needed.marker.evaluate({'extra': ''})
        if is_needed and name not in found and not name.startswith(OF_CUDA):
            found.add(name)
            todo += requirements(name)
    return sorted(found)


def requirements(name: str) -> list[str]:
    """The requirements of a package, none if it is not installed."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def licences(name: str) -> Iterator[str]:
    """The licences in the metadata of a package: of its expression, else its classifiers, else its text."""
    about = metadata.metadata(name)
    classifiers = [line.rpartition(' :: ')[2] for line in about.get_all('Classifier', []) if 'License ::' in line]
    text = about['License-Expression'] or ' AND '.join(classifiers) or about['License'] or 'none'
    yield from re.split(r' AND | OR | WITH ', text.replace('(MPL 2.0)', ''))


@pytest.mark.parametrize('name', needed_packages())
def test_a_needed_package_has_a_permissive_licence(name):
    assert [licence for licence in licences(name) if not ALLOWED.search(licence)] == []


@pytest.mark.parametrize(
    'licence', ['GPL-3.0', 'AGPL-3.0-only', 'LGPL-2.1', 'LIMITED', 'Other/Proprietary License', 'none']
)
def test_other_licences_are_refused(licence):
    assert not ALLOWED.search(licence)


def test_the_packages_include_those_that_others_need():
    assert {'torch', 'timm', 'rich', 'numpy', 'huggingface-hub'} <= set(needed_packages())


def test_the_weights_of_models_of_vitzoo_have_a_licence():
    names = [
        name
        for name in timm.list_pretrained()
        if timm.model_entrypoint(name.partition('.')[0]).__module__.startswith('vitzoo.')
    ]
    assert len(names) > 15
    assert [name for name in names if not timm.get_pretrained_cfg(name).license] == []


@pytest.fixture
def licensed(tmp_path) -> str:
    """The folder of a model that began with weights under a licence."""
    model = timm.create_model('test_vit', num_classes=2)
    model.pretrained_cfg['license'] = 'cc-by-nc-4.0'
    save_for_hf(model, str(tmp_path / 'licensed'), safe_serialization=True)
    return str(tmp_path / 'licensed')


def test_training_keeps_the_licence_of_the_weights_that_it_begins_with(licensed):
    model = build_model(make_recipe({'model': licensed}), 3)
    assert model.pretrained_cfg['license'] == 'cc-by-nc-4.0'
    recipe = {'model': licensed, 'initial_checkpoint': f'{licensed}/model.safetensors'}
    assert 'license' not in build_model(make_recipe(recipe), 2).pretrained_cfg


def test_training_from_random_weights_has_no_licence():
    assert timm.get_pretrained_cfg('cvt_13').license
    recipe = make_recipe({'model': 'cvt_13', 'img_size': 32, 'model_kwargs': CVT})
    assert 'license' not in build_model(recipe, 2).pretrained_cfg


@pytest.mark.parametrize('path', ['licensed', './licensed', 'licensed.v2'])
def test_other_weights_for_the_model_of_a_folder_do_not_have_its_licence(path, licensed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model('test_vit', num_classes=2).state_dict(), 'others.pth')
    Path(licensed).rename(path)
    convert(['others.pth', '--model', path, '--out', 'out'])
    assert 'license' not in json.loads(Path('out/config.json').read_text())['pretrained_cfg']


@pytest.mark.parametrize(('option', 'licence'), [([], 'cc-by-nc-4.0'), (['--checkpoint'], None)])
@pytest.mark.parametrize('child', [['--swap', 'linear'], ['--to', 'test_vit']])
def test_a_converted_model_has_the_licence_of_its_parent(child, option, licence, licensed, tmp_path):
    option = [*option, f'{licensed}/model.safetensors'] if option else []
    convert(['--from', licensed, *option, *child, '--out', str(tmp_path / 'out')])
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert config['pretrained_cfg'].get('license') == licence


@pytest.mark.parametrize(
    ('record', 'text'),
    [
        ({'weights': 'published', 'license': 'mit'}, 'published, mit'),
        ({'weights': 'trained', 'license': None}, 'trained'),
        ({'weights': 'trained', 'license': 'cc-by-nc-4.0'}, 'trained, cc-by-nc-4.0'),
        # of a report without this column
        ({'weights': 'published'}, 'published'),
    ],
)
def test_the_licence_is_shown_with_the_weights(record, text):
    assert format_weights(record) == text
