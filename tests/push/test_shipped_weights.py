"""The folders in weights/: size, contents, and the numbers on their cards."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import timm
import torch
from helpers import one_in
from timm.models import save_for_hf

from vitzoo.data import open_dataset
from vitzoo.push.command import push

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.parent for path in (ROOT / 'weights').glob('*.*/config.json'))
DATA = ROOT.parent / 'shared' / 'data'
# the data of the weights, by the name that they have for it
ARCHIVES = {'cifar10': DATA / 'cifar10.tar.xz', 'imagenette': DATA / 'imagenette_128.tar.xz'}


def test_shipped_weights_take_at_most_60_megabytes():
    assert sum(path.stat().st_size for folder in SHIPPED for path in folder.iterdir()) <= 60_000_000


def test_shipped_weights_are_complete_and_pretrained_models_of_timm():
    for folder in SHIPPED:
        assert {'config.json', 'model.safetensors', 'recipe.yaml', 'README.md'} <= {
            path.name for path in folder.iterdir()
        }
        assert folder.name in timm.list_pretrained()
        assert timm.get_pretrained_cfg(folder.name).license


def test_the_default_weights_of_a_model_are_those_for_the_largest_images():
    assert len(SHIPPED) > 1
    sizes: dict[str, list[int]] = {}
    for folder in SHIPPED:
        config = timm.get_pretrained_cfg(folder.name)
        sizes.setdefault(config.architecture, []).append(config.input_size[-1])
    for model, of_model in sizes.items():
        assert timm.get_pretrained_cfg(model).input_size[-1] == max(of_model)


@pytest.mark.parametrize('name', one_in(4, [folder.name for folder in SHIPPED]))
def test_shipped_weights_are_loaded_at_their_image_size(name):
    size = timm.get_pretrained_cfg(name).input_size[-2:]
    for pretrained in (True, False):
        assert image_size(timm.create_model(name, pretrained=pretrained)) == size
    assert image_size(timm.create_model(name, pretrained=True, img_size=96)) == (96, 96)


def image_size(model: torch.nn.Module) -> tuple[int, int]:
    return model.patch_embed.img_size if hasattr(model, 'patch_embed') else model.img_size


def extract(data: str, folder: Path) -> str | None:
    """The folder of data by its name in a config, None if it is not on this machine."""
    if data == 'sample':
        return data
    if not ARCHIVES[data].exists():
        return None
    if not (folder / data).exists():
        with tarfile.open(ARCHIVES[data]) as tar:
            tar.extractall(folder / data, filter='data')
    return str(folder / data)


def push_nano(checkout: Path) -> Path:
    """Weights of one epoch's size in a copy of this checkout that has no others."""
    torch.manual_seed(0)
    model = timm.create_model('deit_softmax_nano', num_classes=10)
    torch.nn.init.normal_(model.head.weight)
    run = checkout / 'run'
    about = dict(label_names=open_dataset('sample', 'val').class_names, vitzoo=dict(data_dir='sample'))
    save_for_hf(model, run, model_config=about, safe_serialization=True)
    (checkout / 'pyproject.toml').write_text('')
    shutil.copytree(ROOT / 'vitzoo', checkout / 'vitzoo', ignore=shutil.ignore_patterns('__pycache__'))
    target = checkout / 'weights' / 'deit_softmax_nano.vz_test'
    push([str(run), '--to', str(target), '--license', 'mit', '--half', '--workers', '0'])
    return target


@pytest.mark.slow
def test_every_folder_is_validated_by_its_name_to_the_number_on_its_card(tmp_path):
    # Python also imports from the current folder, which must not be the copied checkout
    current = tmp_path / 'current'
    current.mkdir()
    # a temporary folder too, so that this test checks something if no weights are shipped
    for folder in [*SHIPPED, push_nano(tmp_path)]:
        data = json.loads((folder / 'config.json').read_text())['vitzoo']['data_dir']
        data_dir = extract(data, tmp_path / 'data')
        options = ['--no-data'] if data_dir is None else ['--data-dir', data_dir]
        command = [sys.executable, '-m', 'vitzoo', 'validate', folder.name, *options, '--results-file', 'found.json']
        environment = dict(os.environ, PYTHONPATH=str(folder.parents[1]), HF_HUB_OFFLINE='1')
        done = subprocess.run(command, cwd=current, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (record,) = json.loads((current / 'found.json').read_text())
        assert record['model'] == folder.name
        (on_card,) = re.findall(r'Top-1 ([\d.]+) %, 95 % interval', (folder / 'README.md').read_text())
        # without data, no weights are loaded
        if data_dir is not None:
            assert (record['license'], f'{record["top1"]:.2f}') == (timm_license(folder), on_card)


def timm_license(folder: Path) -> str:
    return json.loads((folder / 'config.json').read_text())['pretrained_cfg']['license']
