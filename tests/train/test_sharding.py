"""Which layers FSDP shards, and what it refuses; tests of training with it are in test_distributed.py."""

from types import SimpleNamespace

import pytest
import timm
from accelerate.utils import DistributedType

from vitzoo import swap_mixer
from vitzoo.errors import UserError
from vitzoo.train import opening
from vitzoo.train.opening import create_accelerator
from vitzoo.train.recipe import make_recipe
from vitzoo.train.sharding import choose_layers


def accelerator_with(names: list[str] | None = None, version: int = 2) -> SimpleNamespace:
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=names, cpu_ram_efficient_loading=True)
    kind = dict(distributed_type=DistributedType.FSDP, is_fsdp2=version == 2, mixed_precision='no')
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=SimpleNamespace(type='cpu'), **kind)


def swapped(blocks: list[int] | None = None):
    return swap_mixer(timm.create_model('test_vit', img_size=32), 'softmax', blocks=blocks)


def chosen(model, names: list[str] | None = None) -> list[str]:
    accelerator = accelerator_with(names)
    choose_layers(accelerator, model)
    # a model that is built again has the same
    choose_layers(accelerator, model)
    return accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap


@pytest.mark.parametrize('names', [None, ['Block']], ids=str)
def test_the_blocks_with_attention_are_sharded_whatever_their_mixer(names):
    assert chosen(timm.create_model('test_vit'), names) == ['Block']
    assert chosen(swapped(), names) == ['SwappedBlock']
    assert chosen(swapped(blocks=[1]), names) == ['Block', 'SwappedBlock']


def test_layers_that_the_launcher_names_are_sharded():
    assert chosen(timm.create_model('test_vit'), ['Mlp', ' Block']) == ['Block', 'Mlp']
    assert chosen(timm.create_model('test_resnet')) == []
    assert chosen(timm.create_model('test_resnet'), ['BasicBlock']) == ['BasicBlock']


def test_a_class_without_layers_is_a_user_error_that_names_the_blocks():
    with pytest.raises(UserError, match="no layers of the class 'Layer', its blocks with attention being SwappedBlock"):
        chosen(swapped(), ['Layer'])


def test_all_processes_keep_their_weights_until_they_are_sharded(monkeypatch):
    accelerator = accelerator_with()
    monkeypatch.setattr(opening, 'Accelerator', lambda **options: accelerator)
    create_accelerator(make_recipe({}))
    assert not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading


@pytest.mark.parametrize(
    ('values', 'version', 'message'),
    [
        (dict(clip_mode='agc', clip_grad=0.01), 2, 'clip_mode agc does not work with FSDP'),
        ({}, 1, 'FSDP version 1 is not supported'),
    ],
    ids=str,
)
def test_what_cannot_be_sharded_is_refused(monkeypatch, values, version, message):
    monkeypatch.setattr(opening, 'Accelerator', lambda **options: accelerator_with(version=version))
    with pytest.raises(UserError, match=message):
        create_accelerator(make_recipe(values))
