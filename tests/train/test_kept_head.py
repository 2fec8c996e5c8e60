"""Notes about weights: a head trained on other classes, a checkpoint without one, and greyscale images."""

import json
import shutil

import pytest
import timm
import torch
from classifiers import save_classifier
from safetensors.torch import save_file
from tiny import make_model

from vitzoo.errors import UserError
from vitzoo.train.model import build_model
from vitzoo.train.recipe import Recipe


def notes(capsys, folder, names):
    build_model(Recipe(model=str(folder)), len(names), names)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith('note')]


def test_a_head_for_other_classes_is_kept_with_a_note(tmp_path, capsys):
    folder = save_classifier(tmp_path / 'run')
    (note,) = notes(capsys, folder, ['cat', 'dog', 'cow'])
    assert f'the head of {folder} is kept for other classes: row 0 was blue, is now cat, row 1 was green' in note
    (note,) = notes(capsys, folder, ['blue', 'green', 'zebra'])
    assert note.endswith(': row 2 was red, is now zebra')
    assert notes(capsys, folder, ['blue', 'green', 'red']) == []
    # of a checkpoint, the names are those of its run
    other = Recipe(
        model=str(folder), initial_checkpoint=f'{shutil.copytree(folder, tmp_path / "other")}/model.safetensors'
    )
    config = json.loads((tmp_path / 'other' / 'config.json').read_text())
    (tmp_path / 'other' / 'config.json').write_text(json.dumps({**config, 'label_names': ['cat', 'dog', 'cow']}))
    build_model(other, 3, ['cat', 'dog', 'cow'])
    assert 'note' not in capsys.readouterr().out
    build_model(other, 3, ['blue', 'green', 'red'])
    assert 'is kept for other classes: row 0 was cat, is now blue' in capsys.readouterr().out


def test_only_the_first_of_many_renamed_classes_are_named(tmp_path, capsys):
    names = [f'n{number}' for number in range(9)]
    folder = save_classifier(tmp_path / 'run', tuple(names))
    (note,) = notes(capsys, folder, [*names[:4], *(name.upper() for name in names[4:])])
    assert note.endswith('row 4 was n4, is now N4, row 5 was n5, is now N5, row 6 was n6, is now N6, and 2 more')


def test_weights_for_greyscale_images_become_those_of_rgb_with_a_note(tmp_path, capsys):
    folder = str(make_model('vit', ('blue', 'green', 'red'), 1, False, tmp_path))
    (note,) = notes(capsys, folder, ['blue', 'green', 'red'])
    assert note.endswith(
        f'{folder} takes images of 1 channel, and its weights are spread over 3; add --in-chans 1 to keep it'
    )
    assert build_model(Recipe(model=folder, in_chans=1), 3).patch_embed.proj.in_channels == 1
    # other weights, which do not begin with those of the folder
    build_model(Recipe(model='test_vit'), 3)
    assert 'note' not in capsys.readouterr().out


@pytest.mark.parametrize('name', ['deit_softmax_nano', 'deit_tiny_distilled_patch16_224', 'cvt_nano', 'resnet18'])
def test_a_checkpoint_without_a_head_gets_a_new_one_with_a_note(name, tmp_path, capsys):
    path = str(tmp_path / 'backbone.safetensors')
    backbone = timm.create_model(name, num_classes=0)
    save_file(backbone.state_dict(), path)
    model = build_model(Recipe(model=name, initial_checkpoint=path), 3)
    assert f'{path} has no head; using a new head for 3 classes' in capsys.readouterr().out
    weights = model.state_dict()
    assert [key for key, tensor in backbone.state_dict().items() if not torch.equal(weights[key], tensor)] == []
    heads = model.get_classifier() if isinstance(model.get_classifier(), tuple) else [model.get_classifier()]
    assert {head.out_features for head in heads} == {3}


def test_a_checkpoint_in_the_official_layout_of_other_classes_gets_a_new_head(tmp_path, capsys):
    name, kwargs = 'swin_tiny_patch4_window7_224', dict(depths=[1, 1], num_heads=[1, 2], embed_dim=24)
    path = str(tmp_path / 'official.safetensors')
    official = timm.create_model(name, num_classes=4, **kwargs).state_dict()
    names = {key: key.replace('head.fc.', 'head.').replace('layers.1.down', 'layers.0.down') for key in official}
    save_file({names[key]: value for key, value in official.items()}, path)
    model = build_model(Recipe(model=name, model_kwargs=kwargs, initial_checkpoint=path), 3)
    assert f'{path} has a head for 4 classes; using a new head for 3 classes' in capsys.readouterr().out
    assert torch.equal(model.norm.weight, official['norm.weight']) and model.head.fc.out_features == 3


def test_a_checkpoint_that_lacks_more_than_the_head_is_refused(tmp_path):
    path = str(tmp_path / 'part.safetensors')
    state = timm.create_model('deit_softmax_nano', num_classes=0).state_dict()
    del state['blocks.0.norm1.weight']
    save_file(state, path)
    with pytest.raises(UserError, match=r'does not fit .*blocks\.0\.norm1\.weight'):
        build_model(Recipe(model='deit_softmax_nano', initial_checkpoint=path), 3)


def test_a_checkpoint_without_a_head_is_resampled_to_another_image_size(tmp_path):
    path = str(tmp_path / 'backbone.safetensors')
    backbone = timm.create_model('deit_softmax_nano', num_classes=0)
    save_file(backbone.state_dict(), path)
    model = build_model(Recipe(model='deit_softmax_nano', initial_checkpoint=path, img_size=(96, 64)), 3)
    backbone.set_input_size((96, 64))
    assert torch.equal(model.pos_embed, backbone.pos_embed)
