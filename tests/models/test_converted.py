"""Converted models that come with vitzoo, by the names of their folders."""

import json

import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.models._registry import _clear_model_entries, _model_entrypoints

import vitzoo
from vitzoo.cite import cite
from vitzoo.classes import class_names
from vitzoo.convert import convert as convert_command
from vitzoo.load import load_model
from vitzoo.models import _shipped, converted

SMALL = dict(depth=2, embed_dim=24, num_heads=2, img_size=32)
NAME = 'deit_softmax_nano_to_linear'


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """A function that ships models by the names of their folders, and registers them."""
    monkeypatch.setattr('vitzoo._resources._PACKAGE', tmp_path / 'vitzoo')
    before = dict(converted.default_cfgs)
    names: set[str] = set()

    def ship(**models):
        for name, model in models.items():
            save_for_hf(model, tmp_path / 'weights' / name.replace('__', '.'), safe_serialization=True)
        names.update(name.partition('__')[0] for name in models)
        _shipped.shipped_folders.cache_clear()
        converted.register_converted()

    yield ship
    for name in names:
        _model_entrypoints.pop(name)
        _clear_model_entries(name)
    converted.default_cfgs.clear()
    converted.default_cfgs.update(before)
    _shipped.shipped_folders.cache_clear()


def convert(mixer='linear', seed=0, **kwargs):
    torch.manual_seed(seed)
    model = timm.create_model('deit_softmax_nano', num_classes=3, **SMALL)
    torch.nn.init.normal_(model.head.weight)
    return vitzoo.swap_mixer(model, mixer, **kwargs).eval()


def images(channels=3, size=32):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def test_a_converted_model_loads_by_the_name_of_its_folder(ship):
    model = convert()
    ship(deit_softmax_nano_to_linear__vz_test=model)
    assert f'{NAME}.vz_test' in timm.list_pretrained('deit_softmax_nano_to_*')
    for name in (NAME, f'{NAME}.vz_test'):
        loaded = timm.create_model(name, pretrained=True).eval()
        assert torch.equal(loaded(images()), model(images()))
    # as of a folder: its classes and size, with random weights
    plain = timm.create_model(NAME).eval()
    assert plain.num_classes == 3 and plain.patch_embed.img_size == (32, 32)
    assert not torch.equal(plain(images()), model(images()))


def test_it_takes_the_arguments_of_other_pretrained_models(ship):
    model = convert()
    ship(deit_softmax_nano_to_linear__vz_test=model)
    resized = timm.create_model(NAME, pretrained=True, num_classes=5, in_chans=1, img_size=48).eval()
    assert resized(images(1, 48)).shape == (2, 5)
    model.set_input_size(48)
    torch.testing.assert_close(resized.pos_embed, model.pos_embed)
    (features,) = timm.create_model(NAME, pretrained=True, features_only=True, out_indices=(1,))(images())
    assert features.shape[1] == 24


def test_what_is_saved_of_it_needs_no_name(ship, tmp_path):
    ship(deit_softmax_nano_to_linear__vz_test=convert())
    for size in ({}, dict(img_size=48)):
        loaded = timm.create_model(NAME, pretrained=True, **size).eval()
        save_for_hf(loaded, tmp_path / 'again', safe_serialization=True)
        assert json.loads((tmp_path / 'again' / 'config.json').read_text())['architecture'] == 'vitzoo_swapped'
        again = timm.create_model(f'local-dir:{tmp_path / "again"}', pretrained=True).eval()
        assert torch.equal(again(images(size=size.get('img_size', 32))), loaded(images(size=size.get('img_size', 32))))


def test_the_tags_of_a_name_may_differ_in_their_mixers(ship):
    first, second = convert(blocks=[0]), convert(seed=1)
    ship(deit_softmax_nano_to_linear__vz_a=first, deit_softmax_nano_to_linear__vz_b=second)
    for tag, model in dict(vz_a=first, vz_b=second).items():
        assert torch.equal(timm.create_model(f'{NAME}.{tag}', pretrained=True).eval()(images()), model(images()))


@pytest.mark.parametrize('name', [NAME, f'{NAME}.vz_test'])
def test_other_weights_do_not_get_the_names_of_its_classes(ship, tmp_path, name):
    model = convert()
    model.pretrained_cfg.update(num_classes=3, label_names=['a', 'b', 'c'])
    ship(deit_softmax_nano_to_linear__vz_test=model)
    assert class_names(load_model(name).model) == ['a', 'b', 'c']
    assert class_names(load_model(name, num_classes=4).model) == ['0', '1', '2', '3']
    for own in ['xyz', 'wxyz']:
        folder = tmp_path / own
        head = timm.create_model(NAME, num_classes=len(own))
        save_for_hf(head, folder, model_config=dict(label_names=list(own)), safe_serialization=True)
        options = dict(checkpoint=str(folder / 'model.safetensors'), num_classes=len(own))
        assert class_names(load_model(name, **options).model) == list(own)
        (folder / 'config.json').unlink()
        assert class_names(load_model(name, **options).model) == [str(label) for label in range(len(own))]


def test_what_inherits_other_weights_has_the_names_of_their_classes(ship, tmp_path):
    model = convert()
    model.pretrained_cfg.update(num_classes=3, label_names=['a', 'b', 'c'])
    ship(deit_softmax_nano_to_linear__vz_test=model)
    save_for_hf(
        convert(seed=1), tmp_path / 'own', model_config=dict(label_names=['x', 'y', 'z']), safe_serialization=True
    )
    words = ['--from', NAME, '--checkpoint', str(tmp_path / 'own' / 'model.safetensors'), '--swap', 'aft_full']
    convert_command([*words, '--out', str(tmp_path / 'out')])
    assert class_names(load_model(str(tmp_path / 'out')).model) == ['x', 'y', 'z']


def test_its_mixers_can_be_swapped_again(ship):
    model = convert()
    ship(deit_softmax_nano_to_linear__vz_test=model)
    again = vitzoo.swap_mixer(timm.create_model(NAME, pretrained=True), 'softmax', blocks=[1]).eval()
    expected = vitzoo.swap_mixer(model, 'softmax', blocks=[1]).eval()
    assert torch.equal(again(images()), expected(images()))


def test_the_papers_of_its_backbone_and_mixer_are_cited(ship, tmp_path):
    ship(deit_softmax_nano_to_linear__vz_test=convert())
    (tmp_path / 'weights' / f'{NAME}.vz_test' / 'recipe.yaml').write_text('data_dir: imagenette\nsteps: 3\n')
    text = cite([NAME])
    assert f'backbone of {NAME}' in text and f'mixer linear of {NAME}' in text and f'training data of {NAME}' in text
