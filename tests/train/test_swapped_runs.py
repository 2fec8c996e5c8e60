"""Training with --mixer: a timm model whose attention is replaced before the first step."""

import json
from shlex import split

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

import vitzoo
from vitzoo.errors import UserError
from vitzoo.report.command import make_report
from vitzoo.train.loop import train
from vitzoo.train.model import build_model
from vitzoo.train.recipe import FIXED_KEYS, make_recipe
from vitzoo.train.resume import changed_keys
from vitzoo.validate.command import validate

SMALL = dict(depth=2, embed_dim=24, num_heads=2, patch_size=8)
VIT = dict(model='vit_tiny_patch16_224', img_size=32, model_kwargs=SMALL)


def build(**values):
    torch.manual_seed(0)
    return build_model(make_recipe({**VIT, **values}), 3).eval()


def mixers(model):
    return [type(block.attn).__name__ for block in model.blocks]


def test_the_attention_is_replaced_after_the_weights_are_loaded(tmp_path, capsys):
    base = build()
    with torch.no_grad():
        base.pos_embed.add_(1)
    save_file(base.state_dict(), tmp_path / 'vit.safetensors')
    model = build(
        mixer='ls:0,softmax:1', mixer_kwargs='{ls: {rank: 2}}', initial_checkpoint=str(tmp_path / 'vit.safetensors')
    )
    assert mixers(model) == ['LongShort', 'Softmax'] and model.blocks[0].attn.rank == 2
    own = model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in base.state_dict().items())
    assert 'is replaced: ls in block 0, softmax in block 1' in capsys.readouterr().out


def test_mixers_in_a_model_for_images_of_any_size_have_the_image_size_of_the_run():
    sizes = dict(embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 2), sr_ratios=(4, 2))
    model = build(model='pvt_v2_b0', img_size=(64, 96), model_kwargs=sizes, mixer='aft_full')
    assert [mixer.grid_size for mixer in model.mixers().values()] == [(16, 24), (8, 12)]
    assert model(torch.rand(1, 3, 64, 96)).isfinite().all()


def test_the_mixer_cannot_change_on_resume():
    assert {'mixer', 'mixer_kwargs'} <= set(FIXED_KEYS)
    recipe = make_recipe(dict(VIT, mixer='ls'))
    # a recipe from before there was such a key had no mixer
    assert changed_keys(recipe, VIT) == {'mixer': (None, 'ls')}


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        (dict(mixer='lss'), 'Unknown mixer .lss., did you mean ls'),
        (dict(mixer='ls:0-2'), 'no block 2: the model has 2'),
        (dict(mixer='ls:0,softmax:0-1'), 'block 0 has two mixers'),
        (dict(mixer=''), 'is not a mixer'),
        (dict(mixer_kwargs=dict(rank=2)), 'need a mixer; add --mixer NAME'),
        (dict(model='test_resnet', mixer='ls', model_kwargs={}), 'does not support ResNet'),
    ],
)
def test_wrong_mixers_are_one_sentence(values, message):
    with pytest.raises(UserError, match=message):
        build(**values)


@pytest.mark.slow
@pytest.mark.usefixtures('fresh_accelerate')
def test_dinov3_by_its_name_is_saved_loaded_and_trained(tmp_path):
    name, folder, run = 'vit_small_patch16_dinov3', tmp_path / 'model', tmp_path / 'run'
    meta = vitzoo.swap_mixer(timm.create_model(name, device='meta'), 'ls')
    assert {tensor.device.type for tensor in meta.state_dict().values()} == {'meta'}
    model = vitzoo.swap_mixer(timm.create_model(name, num_classes=3), 'ls').eval()
    assert model.state_dict().keys() - {'head.weight', 'head.bias'} == meta.state_dict().keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_for_hf(model, str(folder), safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    x = torch.randn(1, 3, *model.patch_embed.img_size)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    kwargs = ['--model-kwargs', json.dumps(SMALL), '--img-size', '32', '--workers', '0', '--batch-size', '256']
    scores = train(['--model', name, '--mixer', 'ls', *kwargs, '--epochs', '1', '--output', str(run)])
    (record,) = validate([str(run), '--data-dir', 'sample', '--workers', '0'])
    assert record['top1'] == scores['top1']


@pytest.mark.slow
@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'deit_softmax_tiny'])
@pytest.mark.usefixtures('fresh_accelerate', 'quick_timing')
def test_a_swapped_run_lives_as_any_other(name, tmp_path, capsys):
    base, run, head, out = (tmp_path / name for name in ('base', 'run', 'head', 'report'))
    short = split('--img-size 32 --workers 0 --batch-size 256 --lr 1e-3 --warmup-epochs 0 --epochs 1')
    kwargs = ['--model-kwargs', json.dumps(SMALL)]
    train(['--model', name, *kwargs, *short, '--output', str(base)])
    # the teacher is the model before the swap
    swap = split('--mixer ls:0,performer:1 --model-ema --model-ema-decay 0.5')
    scores = train(['--model', str(base), *short, *swap, '--kd-model-name', str(base), '--output', str(run)])
    (record,) = validate([str(run), '--data-dir', 'sample', '--workers', '0'])
    assert record['top1'] == scores['top1'] and record['loss'] == pytest.approx(scores['loss'], rel=1e-5)
    with pytest.raises(UserError, match='its mixer is ls:0,performer:1, not ls; leave out --mixer'):
        train(['--resume', str(run), '--epochs', '2', '--mixer', 'ls'])
    assert train(['--resume', str(run), '--epochs', '2'])['n'] == scores['n']
    exported = timm.create_model(f'local-dir:{run}', pretrained=True)
    assert mixers(exported) == ['LongShort', 'Performer'] and exported.pretrained_cfg['label_names'][0] == 'airplane'
    # a run that starts from the swapped one, at another size and with a frozen backbone, and is swapped again
    again = [*short, '--img-size', '48', '--mixer', 'softmax:1', '--freeze', 'backbone']
    train(['--model', str(run), *again, '--output', str(head)])
    assert mixers(timm.create_model(f'local-dir:{head}')) == ['LongShort', 'Softmax']
    (record,) = validate([str(head), '--data-dir', 'sample', '--workers', '0', '--img-size', '64'])
    assert record['n'] == scores['n']
    make_report([str(run), '--data-dir', 'sample', '--workers', '0', '--out', str(out)])
    text = (out / 'index.html').read_text()
    assert f'{name} with ls in block 0, performer in block 1' in text
