"""The layers that FSDP shards, and recipes that it refuses; tests of training with it are in test_distributed.py."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate.utils import DistributedType
from processes import start_processes
from timm.optim import create_optimizer_v2
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import Optimizer

from vitzoo import swap_mixer
from vitzoo.errors import UserError
from vitzoo.train import opening
from vitzoo.train.opening import create_accelerator
from vitzoo.train.recipe import make_recipe
from vitzoo.train.sharding import SHARDABLE, choose_layers, prepare_optimizer


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
        # it would orthogonalize each shard
        (dict(opt='Muon'), 2, 'opt Muon does not work with FSDP; choose another opt, such as adamw'),
        ({}, 1, 'FSDP version 1 is not supported'),
    ],
    ids=str,
)
def test_what_cannot_be_sharded_is_refused(monkeypatch, values, version, message):
    monkeypatch.setattr(opening, 'Accelerator', lambda **options: accelerator_with(version=version))
    with pytest.raises(UserError, match=message):
        create_accelerator(make_recipe(values))


@pytest.mark.parametrize(
    ('opt', 'version', 'foreach'), [('nadamw', 2, False), ('nadamw', 1, None), ('lion', 2, False), ('adamw', 2, None)]
)
def test_timms_optimizers_update_one_tensor_after_the_other(opt, version, foreach):
    first, second = (create_optimizer_v2(nn.Linear(2, 2), opt=opt, lr=0.1) for _ in range(2))
    prepare_optimizer(accelerator_with(version=version), second)
    assert second.param_groups[0]['foreach'] is foreach
    # also when a run goes on that was not sharded
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]['foreach'] is foreach


def optimize(model: nn.Module, opt: str, foreach: bool | None = None) -> Optimizer:
    """Three steps, the first of which has no momentum yet."""
    optimizer = create_optimizer_v2(model, opt=opt, lr=0.01, weight_decay=0.05, foreach=foreach)
    prepare_optimizer(accelerator_with(), optimizer)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        F.cross_entropy(model(images), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def compare_sharded() -> None:
    """Compare sharded training with that of whole weights, for each optimizer."""
    distributed.init_process_group('gloo')
    options = StateDictOptions(full_state_dict=True)
    for opt in SHARDABLE:
        torch.manual_seed(0)
        start = timm.create_model('test_vit', img_size=32, num_classes=3)
        # torch's optimizers update many tensors at once on a GPU
        is_torchs = type(optimize(deepcopy(start), opt)).__module__.startswith('torch.')
        for foreach in (None, True) if is_torchs else (None,):
            whole, sharded = deepcopy(start), fully_shard(deepcopy(start), mesh=init_device_mesh('cpu', (2,)))
            optimize(whole, opt, foreach)
            # a checkpoint needs it
            get_optimizer_state_dict(sharded, optimize(sharded, opt, foreach), options=options)
            weights = get_model_state_dict(sharded, options=options)
            step = max((weight - start.state_dict()[name]).abs().max() for name, weight in whole.state_dict().items())
            for name, weight in whole.state_dict().items():
                message = f'{opt}, foreach {foreach}: {name}'
                torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-3 * step.item(), msg=message)


@pytest.mark.slow
@pytest.mark.xfail(torch.__version__.startswith('2.6'), reason='torch 2.6 shards on GPUs only')
def test_optimizers_train_sharded_weights_as_whole_ones():
    outcome = start_processes(2, compare_sharded)
    assert outcome.codes == [0, 0], outcome.err
