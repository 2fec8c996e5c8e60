"""Swapped models as models of timm: saved, loaded, at other sizes, with other heads, and from the command line."""

import copy
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import to_2tuple
from timm.models import _hub as timm_hub
from timm.models import push_to_hf_hub, resolve_model_input_args, save_for_hf

import vitzoo
from vitzoo.about import describe_architecture
from vitzoo.data import resolve_data_config
from vitzoo.errors import UserError
from vitzoo.load import create_model, find_model, load_weights, swap_in
from vitzoo.models._swap_record import describe_swaps, parse_swaps

SMALL = dict(depth=3, img_size=64, embed_dim=48, num_heads=3, num_classes=5)
SWAPS = [
    dict(mixer='ls', blocks=[0, 1], window_size=3),
    dict(mixer='aft_full', blocks=[1]),
    dict(mixer='softmax', blocks=[2], rel_bias='table'),
]


def perturb(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def build(name='vit_tiny_patch16_224', swaps=SWAPS, **kwargs):
    """A small swapped model, with no parameter left at a special value, in which a mistake could hide."""
    model = timm.create_model(name, **{**SMALL, **kwargs})
    for swap in swaps:
        vitzoo.swap_mixer(model, **swap)
    return perturb(model)


def save(model, folder, **kwargs):
    save_for_hf(model, str(folder), safe_serialization=True, **kwargs)
    return f'local-dir:{folder}'


STAGES = dict(embed_dims=(16, 32), depths=(1, 2), num_heads=(2, 2), num_classes=5)
FAMILIES = {
    'vit_small_patch16_dinov3': SMALL,
    'vit_small_patch16_rope_mixed_224': SMALL,
    'beit_base_patch16_224': SMALL,
    'vit_relpos_small_patch16_224': SMALL,
    'cait_xxs24_224': SMALL,
    'pvt_v2_b0': dict(STAGES, sr_ratios=(4, 2)),
    'twins_svt_small': dict(STAGES, img_size=64, sr_ratios=(4, 2), wss=(4, 4)),
    'swin_tiny_patch4_window7_224': dict(img_size=64, embed_dim=16, depths=(1, 2), num_heads=(2, 2), num_classes=5),
    'samvit_base_patch16_224': dict(SMALL, global_attn_indexes=(0, 2), window_size=3),
    'naflexvit_base_patch16_gap': {key: value for key, value in SMALL.items() if key != 'img_size'},
}


def load(source, **kwargs):
    return timm.create_model(source, pretrained=True, **kwargs).eval()


def images(height=64, width=None, channels=3):
    return torch.randn(2, channels, height, width or height, generator=torch.Generator().manual_seed(2))


def outputs(model, x):
    with torch.no_grad():
        return model(x)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A swapped model and its folder; tests must not change it."""
    model = build()
    return model, save(model, tmp_path_factory.mktemp('saved'), model_config=dict(label_names=list('abcde')))


@pytest.mark.parametrize(
    'name, kwargs',
    [
        ('vit_tiny_patch16_224', {}),
        ('vit_tiny_patch16_224.augreg_in21k', dict(img_size=(64, 96), class_token=False, global_pool='avg')),
        ('deit_tiny_distilled_patch16_224', {}),
        ('deit3_small_patch16_224', dict(dynamic_img_size=True)),
        ('vit_small_patch14_reg4_dinov2', dict(img_size=56, num_classes=0)),
    ],
)
def test_a_folder_loads_by_timm_with_the_same_logits_and_weights(name, kwargs, tmp_path):
    model = build(name, **kwargs)
    loaded = load(save(model, tmp_path))
    x = images(*model.patch_embed.img_size)
    assert torch.equal(outputs(loaded, x), outputs(model, x))
    assert type(loaded) is type(model) and list(loaded.state_dict()) == list(model.state_dict())
    configs = [resolve_data_config(each) for each in (model, loaded)]
    assert [tuple(configs[1][key]) for key in ('mean', 'std')] == [configs[0][key] for key in ('mean', 'std')]
    assert configs[1]['input_size'] == configs[0]['input_size'] == (3, *model.patch_embed.img_size)


@pytest.mark.parametrize(
    'kwargs', [dict(patch_size=8), dict(patch_size=(8, 32), img_size=(64, 96)), dict(patch_size=32)]
)
def test_a_folder_loads_at_another_patch_size(saved, kwargs):
    model, source = saved
    expected = copy.deepcopy(model)
    expected.set_input_size(**kwargs)
    x = images(*to_2tuple(kwargs.get('img_size', 64)))
    assert torch.equal(outputs(load(source, **kwargs), x), outputs(expected, x))


def test_the_config_has_the_base_and_its_data_config(saved):
    _, source = saved
    config = read_config(source)
    base = timm.get_pretrained_cfg('vit_tiny_patch16_224')
    assert config['architecture'] == 'vitzoo_swapped' and config['model_args']['base_model'] == base.architecture
    assert config['model_args']['swap_mixer'] == SWAPS
    assert tuple(config['pretrained_cfg']['mean']) == base.mean and config['pretrained_cfg']['tag'] == base.tag
    assert load(source).pretrained_cfg['label_names'] == list('abcde')
    assert describe_architecture(config) == (
        'vit_tiny_patch16_224 with ls in block 0, aft_full in block 1, softmax in block 2'
    )


@pytest.mark.parametrize('name', FAMILIES)
def test_every_family_loads_with_the_same_logits_also_at_another_size(name, tmp_path):
    model = timm.create_model(name, **FAMILIES[name])
    vitzoo.swap_mixer(model, ['linformer', 'softmax'], blocks=[0, 2])
    size = resolve_data_config(model)['input_size'][1:]
    loaded = load(save(perturb(model), tmp_path))
    assert torch.equal(outputs(loaded, images(*size)), outputs(model, images(*size)))
    assert type(loaded) is type(model) and resolve_data_config(loaded)['input_size'][1:] == size
    model.set_input_size((48, 80))
    if not name.startswith('swin'):
        # timm builds Swin with the same windows at every size, and its set_input_size scales them
        other = load(f'local-dir:{tmp_path}', img_size=(48, 80))
        assert torch.equal(outputs(other, images(48, 80)), outputs(model, images(48, 80)))
    back = load(save(model, tmp_path / 'other'))
    assert torch.equal(outputs(back, images(48, 80)), outputs(model, images(48, 80)))
    assert resolve_data_config(back)['input_size'][1:] == (48, 80)


def read_config(source):
    return json.loads((Path(source.removeprefix('local-dir:')) / 'config.json').read_text())


def test_loading_does_not_warn_of_weights_that_mixers_lose(saved, caplog):
    with caplog.at_level(logging.WARNING):
        loaded = load(saved[1])
    assert caplog.text == '' and not hasattr(loaded, 'inheritance')
    with caplog.at_level(logging.WARNING):
        vitzoo.swap_mixer(loaded, 'pool')
    assert 'does not inherit' in caplog.text


def test_the_name_is_not_listed_but_builds_a_model():
    assert 'vitzoo_swapped' not in timm.list_models() and timm.is_model('vitzoo_swapped')
    swaps = [dict(mixer='ls', blocks=[0]), dict(mixer='pool', blocks=[1, 2])]
    model = timm.create_model('vitzoo_swapped', base_model='vit_tiny_patch16_224', swap_mixer=swaps, **SMALL)
    assert [type(block.attn).__name__ for block in model.blocks] == ['LongShort', 'Pool', 'Pool']
    assert model.pretrained_cfg['mean'] == (0.5, 0.5, 0.5)


def test_pretrained_by_name_starts_from_the_weights_of_the_base(tmp_path, monkeypatch):
    base = perturb(timm.create_model('vit_tiny_patch16_224', **SMALL))
    save(base, tmp_path)
    monkeypatch.setattr(
        'timm.models._builder.load_state_dict_from_hf',
        lambda *args, **kwargs: load_file(tmp_path / 'model.safetensors'),
    )
    swaps = [dict(mixer='softmax', blocks=[0, 1])]
    overlay = dict(num_classes=5, input_size=(3, 64, 64))
    model = load(
        'vitzoo_swapped', base_model='vit_tiny_patch16_224', swap_mixer=swaps, pretrained_cfg_overlay=overlay, **SMALL
    )
    assert torch.equal(outputs(model, images()), outputs(base, images()))


def test_timms_scripts_pass_on_the_image_size():
    swaps = [dict(mixer='ls')]
    args = resolve_model_input_args(
        'vitzoo_swapped', dict(img_size=96), base_model='vit_tiny_patch16_224', swap_mixer=swaps, depth=1
    )
    model = timm.create_model(**args)
    assert model.patch_embed.img_size == (96, 96) and model.pretrained_cfg['mean'] == (0.5, 0.5, 0.5)


def test_another_image_size_is_that_of_set_input_size(saved, tmp_path):
    model = load(saved[1])
    model.set_input_size((48, 80))
    loaded = load(saved[1], img_size=(48, 80))
    assert torch.equal(outputs(loaded, images(48, 80)), outputs(model, images(48, 80)))
    # saved at this size, and loaded at the first
    back = load(save(model, tmp_path), img_size=64)
    model.set_input_size(64)
    assert torch.equal(outputs(back, images()), outputs(model, images()))


def test_features_other_heads_and_other_channels(saved):
    model, source = saved
    headless = load(source, num_classes=0)
    assert torch.equal(outputs(headless, images()), outputs(model.forward_features, images())[:, 0])
    assert load(source, num_classes=7)(images()).shape == (2, 7)
    features = load(source, features_only=True, out_indices=[0, 2])
    expected = outputs(lambda x: model.forward_intermediates(x, [0, 2], intermediates_only=True), images())
    assert all(torch.equal(a, b) for a, b in zip(outputs(features, images()), expected, strict=True))
    assert [tuple(maps.shape) for maps in load(source, features_only=True)(images())] == [(2, 48, 4, 4)] * 3
    grey = load(source, in_chans=1)
    torch.testing.assert_close(grey.patch_embed.proj.weight, model.patch_embed.proj.weight.sum(dim=1, keepdim=True))
    # channels and heads of a loaded model are those of its next folder
    assert grey(images(channels=1)).shape == (2, 5)


@pytest.mark.parametrize('name', ['swin_tiny_patch4_window7_224', 'twins_svt_small'])
def test_features_have_the_layout_of_those_of_the_base_model(name, tmp_path):
    model = timm.create_model(name, **FAMILIES[name])
    expected = timm.create_model(name, **FAMILIES[name], features_only=True, out_indices=(0, 1))
    features = load(save(vitzoo.swap_mixer(model, 'linear'), tmp_path), features_only=True)
    assert features.output_fmt == expected.output_fmt
    assert features.feature_info.channels() == expected.feature_info.channels()
    maps = outputs(features, images())
    assert [x.shape for x in maps] == [x.shape for x in outputs(expected, images())]
    intermediates = outputs(lambda x: model.eval().forward_intermediates(x, intermediates_only=True), images())
    same = [x.permute(0, 3, 1, 2) if name.startswith('swin') else x for x in maps]
    assert all(torch.equal(a, b) for a, b in zip(same, intermediates, strict=True))


def test_a_loaded_model_is_changed_and_saved_again(saved, tmp_path):
    model = load(saved[1], in_chans=1)
    vitzoo.swap_mixer(model, 'nystrom', blocks=[-1], num_landmarks=4)
    model.reset_classifier(7, 'avg')
    loaded = load(save(perturb(model), tmp_path))
    assert torch.equal(outputs(loaded, images(channels=1)), outputs(model, images(channels=1)))
    assert [swap['mixer'] for swap in loaded._model_args['swap_mixer']] == ['ls', 'aft_full', 'softmax', 'nystrom']


def test_the_hub_round_trips(saved, tmp_path, monkeypatch):
    model, _ = saved
    hub = tmp_path / 'hub'

    class Api:
        def __init__(self, **kwargs):
            pass

        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=f'me/{repo_id}')

        def file_exists(self, **kwargs):
            return False

        def upload_folder(self, folder_path, **kwargs):
            shutil.copytree(folder_path, hub)

    monkeypatch.setattr(timm_hub, 'HfApi', Api)
    monkeypatch.setattr(timm_hub, 'hf_hub_download', lambda repo_id, filename, **kwargs: str(hub / filename))
    push_to_hf_hub(model, 'vit_ls', safe_serialization=True)
    assert torch.equal(outputs(load('hf-hub:me/vit_ls'), images()), outputs(model, images()))


def test_a_bare_checkpoint_of_another_size_is_resampled(saved, tmp_path):
    model, source = saved
    at_96 = create_model(source, img_size=96).eval()
    load_weights(at_96, f'{source.removeprefix("local-dir:")}/model.safetensors')
    model = load(source)
    model.set_input_size(96)
    assert torch.equal(outputs(at_96, images(96)), outputs(model, images(96)))


@pytest.mark.parametrize(
    'kwargs, message',
    [
        ({}, 'needs base_model, the name of a timm model, and swap_mixer'),
        (dict(base_model='vit_tinny', swap_mixer=[dict(mixer='ls')]), "no timm model 'vit_tinny'"),
        (dict(base_model='vitzoo_swapped', swap_mixer=[dict(mixer='ls')]), 'no timm model'),
        (dict(base_model='vit_tiny_patch16_224', swap_mixer='ls'), "a list of swaps .*not 'ls'"),
        (dict(base_model='vit_tiny_patch16_224', swap_mixer=[dict(blocks=[1])]), 'a list of swaps'),
        (dict(base_model='resnet18', swap_mixer=[dict(mixer='ls')]), 'does not support ResNet'),
    ],
)
def test_wrong_arguments_of_the_entrypoint_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('vitzoo_swapped', device='meta', **kwargs)


@pytest.mark.parametrize(
    'kwargs, message',
    [
        ({}, 'cannot be made: vitzoo_swapped needs base_model'),
        (dict(base_model='test_vit', swap_mixer=[dict(mixer='ls')], dept=2), "no argument 'dept', did you mean depth"),
        (dict(base_model='test_vit', swap_mixer=[dict(mixer='ls', blocks=[9])]), 'There is no block 9'),
    ],
)
def test_the_commands_refuse_wrong_arguments_of_the_name(kwargs, message):
    with pytest.raises(UserError, match=message):
        create_model(find_model('vitzoo_swapped'), model_kwargs=kwargs)


def test_a_folder_with_an_unknown_mixer_is_one_sentence(saved, tmp_path):
    shutil.copytree(saved[1].removeprefix('local-dir:'), tmp_path / 'model')
    config = tmp_path / 'model' / 'config.json'
    config.write_text(config.read_text().replace('aft_full', 'of_my_package'))
    with pytest.raises(UserError, match=r'cannot be made: Unknown mixer .of_my_package'):
        create_model(str(tmp_path / 'model'), pretrained=True)


@pytest.mark.parametrize(
    'text, blocks, expected',
    [
        ('ls', None, [dict(mixer='ls', blocks=None)]),
        ('ls', '2,3,5-7', [dict(mixer='ls', blocks=[2, 3, 5, 6, 7])]),
        ('ls:0-2,softmax:3,4', None, [dict(mixer='ls', blocks=[0, 1, 2]), dict(mixer='softmax', blocks=[3, 4])]),
        ('ls: 0, softmax:1,ls:2 - 3', None, [dict(mixer='ls', blocks=[0, 2, 3]), dict(mixer='softmax', blocks=[1])]),
    ],
)
def test_mixers_and_blocks_are_read(text, blocks, expected):
    assert parse_swaps(text, blocks) == expected


@pytest.mark.parametrize(
    'text, blocks, message',
    [
        ('ls:0-3,softmax:3', None, "block 3 has two mixers in 'ls:0-3,softmax:3', ls and softmax"),
        ('ls:0-3,2', None, "block 2 is in '0-3,2' twice"),
        ('ls:3-1', None, "'3-1' in the blocks '3-1'"),
        ('ls:-1', None, "'-1' in the blocks"),
        ('ls:all', None, "'all' in the blocks"),
        ('ls:', None, "'ls:' in 'ls:' is not a mixer with its blocks"),
        ('ls,softmax:1', None, 'has no blocks for ls'),
        ('ls,2', None, "'2' in 'ls,2' is not a mixer"),
        ('', None, 'is not a mixer'),
        ('ls:1', '2', "already has the blocks .*leave out the blocks '2'"),
        ('ls', '', 'is not a number or a range'),
    ],
)
def test_wrong_mixers_and_blocks_are_refused(text, blocks, message):
    with pytest.raises(ValueError, match=message):
        parse_swaps(text, blocks)


def test_arguments_of_several_mixers_are_given_by_mixer():
    swaps = parse_swaps('ls:0,nystrom:1', mixer_kwargs=dict(ls=dict(rank=2)))
    assert swaps == [dict(mixer='ls', blocks=[0], rank=2), dict(mixer='nystrom', blocks=[1])]
    with pytest.raises(ValueError, match="'blocks' is not an argument of the mixer ls"):
        parse_swaps('ls:0', mixer_kwargs=dict(blocks=[1]))
    for wrong in (dict(rank=2), dict(pool=dict(kernel_size=3))):
        with pytest.raises(ValueError, match='must be those of one of them'):
            parse_swaps('ls:0,nystrom:1', mixer_kwargs=wrong)


@pytest.mark.parametrize(
    'swaps, text',
    [
        ([dict(mixer='ls')], 'ls in all blocks'),
        ([dict(mixer='ls'), dict(mixer='softmax', blocks=[10, 11])], 'ls in all other blocks, softmax in blocks 10-11'),
        (
            [dict(mixer='ls', blocks=[0, 1, 2, 4]), dict(mixer='pool', blocks=[1])],
            'ls in blocks 0,2,4, pool in block 1',
        ),
        ([dict(mixer=['ls', 'ls', 'pool'], blocks=[0, 1, 2])], 'ls in blocks 0-1, pool in block 2'),
    ],
)
def test_the_last_mixer_of_each_block_is_described(swaps, text):
    assert describe_swaps(swaps) == text


@pytest.mark.parametrize(
    'name, mixer, kwargs, message',
    [
        ('vit_tiny_patch16_224', 'lss', {}, 'did you mean ls'),
        ('vit_tiny_patch16_224', 'ls:1-2', {}, 'no block 2: the model has 2'),
        ('vit_tiny_patch16_224', 'ls', dict(ranc=3), 'ranc'),
        ('deit_performer_tiny', 'ls:2', {}, 'no block 2: the model has 2'),
    ],
)
def test_a_command_refuses_a_swap_with_the_name_of_the_model(name, mixer, kwargs, message):
    model = timm.create_model(name, depth=2, device='meta')
    with pytest.raises(UserError, match=f'{name}.*{message}'):
        swap_in(name, model, mixer, kwargs)


def layer_model(mixer, **kwargs):
    kwargs = dict(SMALL, img_size=(64, 96), reg_tokens=2, **kwargs)
    layer = vitzoo.attn_layer(mixer, img_size=(64, 96), num_prefix_tokens=3)
    return timm.create_model('vit_tiny_patch16_224', attn_layer=layer, **kwargs).eval(), kwargs


@pytest.mark.parametrize('mixer', vitzoo.list_mixers())
@pytest.mark.filterwarnings('ignore:nystrom with num_landmarks')
def test_a_mixer_in_timms_slot_is_the_swapped_one(mixer):
    model, kwargs = layer_model(mixer, qkv_bias=False, proj_bias=False)
    swapped = vitzoo.swap_mixer(timm.create_model('vit_tiny_patch16_224', **kwargs), mixer).eval()
    swapped.load_state_dict(perturb(model).state_dict(), strict=True)
    assert torch.equal(outputs(swapped, images(64, 96)), outputs(model, images(64, 96)))
    model.train()(images(64, 96)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_timms_slot_says_what_it_cannot_do(tmp_path):
    model, _ = layer_model('ls')
    model.set_input_size(64)
    with pytest.raises(ValueError, match='3 prefix tokens and a 4 x 6 grid, and got 19 tokens: pass img_size'):
        model(images())
    with pytest.raises(ValueError, match='attn_mask'):
        model.blocks[0](torch.zeros(1, 27, 48), attn_mask=torch.zeros(27, 27))
    with pytest.raises(ValueError, match='attn_layer.*not serializable'):
        save(model, tmp_path)
    with pytest.raises(ValueError, match='smaller than a patch'):
        vitzoo.attn_layer('ls', img_size=8)
    with pytest.raises(ValueError, match='does not take scale_attn_norm; leave it out, or use vitzoo.swap_mixer'):
        layer_model('ls', scale_attn_norm=True)
    with pytest.raises(ValueError, match="window_size of ls must be a whole number, not '7'"):
        vitzoo.attn_layer('ls', window_size='7')
    with pytest.raises(ValueError, match='shared_qk is a part of the definition of ls'):
        vitzoo.attn_layer('ls', shared_qk=True)


def test_timms_slot_normalizes_queries_and_keys():
    model, _ = layer_model('softmax', qk_norm=True)
    assert isinstance(model.blocks[0].attn.q_norm, torch.nn.LayerNorm)
    assert isinstance(layer_model('pool', qk_norm=True)[0].blocks[0].attn, vitzoo.mixers.TokenMixer)
