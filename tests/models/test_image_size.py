"""Weights of one image size in models of another."""

import json
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
from helpers import SHALLOW, SMALL, SMALLEST, build_model, mixers_of_ours, one_in, perturb
from safetensors.torch import save_file
from timm.models import save_for_hf

from vitzoo.convert import convert
from vitzoo.convert.official import trace_names
from vitzoo.errors import UserError
from vitzoo.load import create_model, load_model, load_weights
from vitzoo.mixers import mixer_class
from vitzoo.mixers._rel_bias import OffsetBias
from vitzoo.mixers.base import ParameterFreeMixer, _mixers
from vitzoo.models import deit, vil

# mixers with parameters for one grid
BOUND = [mixer for mixer in mixers_of_ours() if mixer_class(mixer).grid_bound] + ['softmax']
NAMES = [
    f'{backbone}_{mixer.removeprefix(backbone + "_")}_{size}' for backbone, size in SMALLEST.items() for mixer in BOUND
] + ['vil_tiny', 'vil_tiny_abs', 'vil_ls_tiny', 'vil_ls_medium', 'cvt_13', 'aft_conv_tiny']
OWN_SIZE = (64, 96)


def trained(name, img_size=OWN_SIZE, **kwargs):
    """A small model with weights that are smooth over no axis, so that a wrong grid shows."""
    return perturb(build_model(name, img_size=img_size, **kwargs))


def weights_file(model, folder):
    """Save weights, and return the entries of a pretrained config for them."""
    path = folder / 'weights.safetensors'
    save_file(model.state_dict(), path)
    size = model.img_size if hasattr(model, 'img_size') else model.patch_embed.img_size
    return dict(file=str(path), input_size=(3, *size), num_classes=5)


def same_weights(model, expected):
    expected = expected.state_dict()
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize('img_size', [96, (128, 64)])
@pytest.mark.parametrize('name', one_in(3, NAMES))
def test_pretrained_weights_are_resampled_as_by_set_input_size(name, img_size, tmp_path):
    model = trained(name)
    overlay = weights_file(model, tmp_path)
    kwargs = {**SMALL[name.split('_')[0]], 'num_classes': 5, 'img_size': img_size}
    loaded = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
    model.set_input_size(img_size)
    assert same_weights(loaded, model)


def registered_names():
    pinned = (Path(__file__).parents[1] / 'model_names.txt').read_text().split()
    # the sizes of a backbone differ in nothing that resampling depends on, so the fastest stands for all
    smallest = {}
    for name in sorted(pinned, key=lambda name: not re.search(r'_nano(?=_|$)', name)):
        smallest.setdefault(re.sub(r'_(tiny|small|base|medium\w*|13|21|w24|nano)(?=_|$)', '', name), name)
    return sorted(smallest.values())


@pytest.mark.parametrize('name', one_in(3, registered_names()))
def test_every_name_has_the_shapes_of_its_new_image_size(name):
    kwargs = SHALLOW[name.split('_')[0]]
    with torch.device('meta'):
        weights = timm.create_model(name, img_size=(160, 96), **kwargs).state_dict()
        model = timm.create_model(name, img_size=(128, 224), **kwargs)
    model.pretrained_cfg['input_size'] = (3, 160, 96)
    resampled = sys.modules[type(model).__module__].checkpoint_filter_fn(weights, model)
    model.load_state_dict(resampled, strict=True)


@pytest.mark.parametrize('name', ['deit_aft_full_tiny', 'vil_linformer_tiny', 'cvt_synthesizer_13'])
def test_a_folder_and_its_checkpoint_load_at_another_size_even_with_as_many_tokens(name, tmp_path):
    model = trained(name, img_size=(64, 256))
    save_for_hf(model, str(tmp_path), safe_serialization=True, data_config=dict(img_size=(64, 256)))
    assert json.loads((tmp_path / 'config.json').read_text())['pretrained_cfg']['input_size'] == [3, 64, 256]
    folder = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, img_size=128)
    file = load_model(str(tmp_path), img_size=(128, 128), checkpoint=str(tmp_path / 'model.safetensors')).model
    model.set_input_size(128)
    assert same_weights(folder, model) and same_weights(file, model)


def test_a_file_is_loaded_at_its_own_size_or_as_for_square_images(tmp_path, caplog):
    model = trained('deit_aft_full_tiny', img_size=64)
    file = weights_file(model, tmp_path)['file']
    for size in (64, 96):
        loaded = build_model('deit_aft_full_tiny', img_size=size)
        load_weights(loaded, file)
        model.set_input_size(size)
        assert same_weights(loaded, model)
    assert 'taken to be for square images of 64 x 64' in caplog.text


def test_a_file_that_fits_with_several_grids_is_refused(tmp_path, capsys):
    model = trained('deit_aft_full_tiny', img_size=(112, 448))
    file = weights_file(model, tmp_path)['file']
    loaded = build_model('deit_aft_full_tiny', img_size=(112, 448))
    with pytest.raises(UserError, match='images of 112 x 448 and of 224 x 224; write a folder.*vitzoo convert'):
        load_weights(loaded, file)
    kwargs = [f'{key}={value}' for key, value in SMALL['deit'].items()]
    argv = [file, '--model', 'deit_aft_full_tiny', '--model-kwargs', *kwargs, 'num_classes=5', 'img_size=[112,448]']
    convert([*argv, '--out', str(tmp_path / 'out')])
    assert 'of another' not in capsys.readouterr().out
    loaded = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True)
    assert same_weights(loaded, model)


@pytest.mark.parametrize(
    ('source', 'name'), [('deit_softmax_tiny', 'vit_tiny_patch16_224'), ('deit_aft_full_tiny', 'deit_aft_full_tiny')]
)
@pytest.mark.parametrize(
    ('kwargs', 'end'),
    [([], ', and resampled for 224 x 224; --model-kwargs img_size=64 keeps them'), (['img_size=96'], 'for 96 x 96')],
)
def test_a_conversion_says_once_that_it_resamples(source, name, kwargs, end, tmp_path, capsys, caplog):
    file = weights_file(trained(source, img_size=64), tmp_path)['file']
    kwargs = [*kwargs, *(f'{key}={value}' for key, value in SMALL['deit'].items())]
    convert([file, '--model', name, '--model-kwargs', *kwargs, 'num_classes=5', '--out', str(tmp_path / 'out')])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if 'taken to be' in line)
    assert line.startswith('the weights are taken to be for images of 64 x 64') and line.endswith(end)
    assert not caplog.messages


def test_weights_of_another_patch_size_keep_their_grid(tmp_path):
    model = trained('deit_softmax_tiny', img_size=64)
    model.pretrained_cfg = {**model.pretrained_cfg, 'input_size': (3, 64, 64)}
    loaded = build_model('deit_softmax_tiny', img_size=64, patch_size=8)
    loaded.pretrained_cfg = model.pretrained_cfg
    weights = deit.checkpoint_filter_fn(model.state_dict(), loaded)
    model.set_input_size(64, patch_size=8)
    assert torch.equal(weights['pos_embed'], model.pos_embed)


def test_the_mapping_of_resampled_tensors_names_their_sources():
    weights = trained('vil_linformer_tiny', img_size=64).state_dict()
    model = build_model('vil_linformer_tiny', img_size=96)
    sources = trace_names(vil.checkpoint_filter_fn, weights, model)
    assert sources == {name: [name] for name in weights}


@pytest.mark.parametrize('name', ['deit_aft_full_tiny', 'vil_tiny'])
def test_weights_that_fit_at_no_size_are_one_sentence(name, tmp_path):
    save_for_hf(trained(name), str(tmp_path), safe_serialization=True)
    key = 'embed_dims' if name == 'vil_tiny' else 'embed_dim'
    wider = {key: [16, 24, 24, 64] if name == 'vil_tiny' else 48}
    with pytest.raises(UserError, match='the weights of .* do not fit the model made with img_size=.* more$') as error:
        create_model(str(tmp_path), img_size=96, model_kwargs=wider, pretrained=True)
    assert '\n' not in str(error.value)


def test_a_model_that_timm_builds_for_one_size_refuses_another_with_advice(tmp_path):
    model = timm.create_model('cait_xxs24_224', img_size=32, patch_size=8, depth=1, embed_dim=24, num_heads=2)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    with pytest.raises(UserError, match=r'made with img_size=\(48, 48\): .*; choose the image size of the weights$'):
        create_model(str(tmp_path), img_size=(48, 48), pretrained=True)


def test_a_mixer_of_another_package_is_resampled_by_its_set_input_size(monkeypatch):
    class Positions(ParameterFreeMixer):
        op = op_naive = staticmethod(torch.add)
        grid_bound = True

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.rows = torch.nn.Parameter(torch.zeros(self.grid_size[0], self.dim))

        def set_input_size(self, grid_size):
            super().set_input_size(grid_size)
            rows = torch.nn.functional.interpolate(self.rows.data.T[None], grid_size[0], mode='nearest')
            self.rows = torch.nn.Parameter(rows[0].T.contiguous())

        def forward(self, x, grid_size):
            return x

    monkeypatch.setitem(_mixers, 'positions', Positions)
    model = trained('deit_softmax_tiny', img_size=64, mixer='positions')
    loaded = build_model('deit_softmax_tiny', img_size=128, mixer='positions')
    loaded.pretrained_cfg = {**loaded.pretrained_cfg, 'input_size': (3, 64, 64)}
    loaded.load_state_dict(deit.checkpoint_filter_fn(model.state_dict(), loaded))
    model.set_input_size(128)
    assert same_weights(loaded, model)


def test_relative_biases_are_resampled_bilinearly_as_in_vils_code():
    bias = OffsetBias(1, (2, 2))
    table = torch.arange(9.0).reshape(3, 3)
    bias.table.data = table.reshape(9, 1)
    bias.set_query_size((3, 3))
    expected = torch.nn.functional.interpolate(table[None, None], size=(5, 5), mode='bilinear')
    assert torch.equal(bias.table.flatten(), expected.flatten())
