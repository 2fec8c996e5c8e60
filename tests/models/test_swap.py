"""timm's vision transformers with their attention replaced, and what of them must not change by it."""

import copy
import json
import pickle

import numpy as np
import pytest
import timm
import torch
from helpers import assert_initialized_or_refused
from timm.models import save_for_hf
from timm.models._features_fx import create_feature_extractor
from timm.models._manipulate import group_parameters
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.nn.utils import parametrizations, prune

import vitzoo
from vitzoo.mixers import QKVMixer, create_mixer, mixer_class

# each has something that the plain model has not: layer scale, registers, a norm before the blocks, no biases …
VARIANTS = {
    'augreg': ('vit_tiny_patch16_224', {}),
    'average pooling': ('vit_tiny_patch16_224', {'class_token': False, 'global_pool': 'avg'}),
    'clip': ('vit_base_patch16_clip_224', {}),
    'deit3': ('deit3_small_patch16_224', {}),
    'dinov2': ('vit_small_patch14_reg4_dinov2', {'img_size': 56}),
    'distilled': ('deit_tiny_distilled_patch16_224', {}),
    'no biases': ('vit_tiny_patch16_224', {'qkv_bias': False, 'proj_bias': False}),
    'qk_norm': ('vit_tiny_patch16_224', {'qk_norm': True}),
    'rectangular': ('vit_tiny_patch16_224', {'img_size': (64, 96)}),
}
NARROW_KEYS = ['aft_conv']
NORMALISING = [m for m in vitzoo.list_mixers() if issubclass(mixer_class(m), QKVMixer) and m not in NARROW_KEYS]


def in_turn(*variants):
    """Every mixer with one of the variants, and with the others in the slow tests."""
    return [
        pytest.param(variant, mixer, marks=[] if variant == variants[i % len(variants)] else pytest.mark.slow)
        for i, mixer in enumerate(vitzoo.list_mixers())
        for variant in variants
    ]


PAIRS = in_turn('augreg', 'dinov2', 'rectangular')
PAIRS += [('qk_norm', mixer) for mixer in NORMALISING]
PAIRS += [(variant, 'ls') for variant in VARIANTS if variant not in ('augreg', 'dinov2', 'rectangular', 'qk_norm')]


def build(variant='augreg', **kwargs):
    """A small model of a variant, with no parameter left at a special value, in which a mistake could hide."""
    torch.manual_seed(0)
    name, own = VARIANTS[variant]
    small = dict(depth=2, img_size=64, embed_dim=48, num_heads=3, num_classes=5)
    model = timm.create_model(name, **{**small, **own, **kwargs}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images(model, batch_size=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch_size, 3, *model.patch_embed.img_size, generator=generator)


def logits(model, x=None):
    with torch.no_grad():
        return model(images(model) if x is None else x)


@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'unfused'])
@pytest.mark.parametrize('variant', VARIANTS)
def test_softmax_leaves_the_logits_and_the_names_as_they_are(variant, fused):
    timm.layers.set_fused_attn(fused)
    try:
        model = build(variant)
        before, names = logits(model), list(model.state_dict())
        assert vitzoo.swap_mixer(model, 'softmax') is model
        assert {type(block.attn).__name__ for block in model.blocks} == {'Softmax'}
        assert torch.equal(logits(model), before)
        assert list(model.state_dict()) == names
    finally:
        timm.layers.set_fused_attn(True)


@pytest.mark.parametrize('variant, mixer', PAIRS)
def test_every_mixer_inherits_the_weights_and_keeps_timms_api(variant, mixer):
    model = build(variant)
    weights = copy.deepcopy(model.state_dict())
    vitzoo.swap_mixer(model, mixer)
    assert_inherited(model.state_dict(), weights)
    x = images(model)
    features = model.forward_features(x)
    assert features.isfinite().all()
    final, maps = model.forward_intermediates(x)
    assert torch.equal(final, features)
    assert [tuple(m.shape) for m in maps] == [(2, 48, *model.patch_embed.grid_size)] * 2
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), vitzoo.swap_mixer(build(variant), mixer)]
    copies[-1].load_state_dict(model.state_dict(), strict=True)
    assert all(torch.equal(logits(other), logits(model)) for other in copies)
    model.prune_intermediate_layers([0])
    assert len(model.blocks) == 1
    assert torch.equal(model.forward_intermediates(x, intermediates_only=True)[0], maps[0])


def assert_inherited(ours, theirs):
    assert {name for name in theirs if '.attn.' not in name} <= set(ours)
    fitting = [name for name in theirs if name in ours and ours[name].shape == theirs[name].shape]
    assert [name for name in fitting if not torch.equal(ours[name], theirs[name])] == []
    assert sum(theirs[name].numel() for name in fitting) > 0.7 * sum(tensor.numel() for tensor in theirs.values())


@pytest.mark.parametrize('mixer', vitzoo.list_mixers())
def test_gradients_are_the_same_with_checkpointing_and_reach_every_parameter(mixer):
    model = vitzoo.swap_mixer(build(), mixer).train()
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images(model)).square().mean().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize('variant, mixer', in_turn('augreg', 'dinov2', 'distilled'))
def test_mixers_follow_the_image_size(variant, mixer):
    model = vitzoo.swap_mixer(build(variant), mixer)
    height, width = (3 * side for side in model.patch_embed.patch_size)
    with pytest.raises((AssertionError, ValueError)):
        model(torch.zeros(1, 3, height, 2 * width))
    model.set_input_size((height, 2 * width))
    assert [block.attn.grid_size for block in model.blocks] == [(3, 6)] * 2
    assert logits(model).isfinite().all()


def test_positions_of_a_mixer_are_resampled_with_the_image_size():
    model = vitzoo.swap_mixer(build(), 'softmax', rel_bias='table')
    assert model.blocks[0].attn.rel_bias.table.shape == (7 * 7, 3)
    model.set_input_size(96)
    assert model.blocks[0].attn.rel_bias.table.shape == (11 * 11, 3)


@pytest.mark.parametrize('mixer', ['softmax', 'ls'])
def test_a_dynamic_image_of_another_grid_is_refused_even_with_as_many_tokens(mixer):
    model = vitzoo.swap_mixer(build(dynamic_img_size=True), mixer)
    assert logits(model, torch.zeros(1, 3, 64, 64)).isfinite().all()
    for size in ((32, 128), (96, 96)):
        with pytest.raises(ValueError, match='set_input_size'):
            model(torch.zeros(1, 3, *size))


@pytest.mark.parametrize('size', [(64, 64), (60, 50)])
def test_patches_that_are_padded_belong_to_the_grid(size):
    model = build(img_size=size, dynamic_img_size=True, dynamic_img_pad=True)
    expected = logits(model)
    vitzoo.swap_mixer(model, 'softmax')
    torch.testing.assert_close(logits(model), expected)
    vitzoo.swap_mixer(model, 'aft_full')
    model.set_input_size((70, 40))
    assert model.blocks[0].attn.grid_size == (5, 3)
    assert logits(model).isfinite().all()


def test_a_model_of_padded_patches_is_loaded_at_another_size(tmp_path):
    model = vitzoo.swap_mixer(build(img_size=(70, 40), dynamic_img_size=True, dynamic_img_pad=True), 'aft_full')
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, img_size=(64, 64)).eval()
    model.set_input_size((64, 64))
    assert torch.equal(logits(loaded), logits(model))


def test_features_of_a_model_for_images_of_any_size_are_traced():
    model = vitzoo.swap_mixer(build(dynamic_img_size=True), 'ls')
    traced = create_feature_extractor(model, ['blocks.1'])
    with torch.no_grad():
        expected = model.get_intermediate_layers(images(model), [1], return_prefix_tokens=True)[0]
        torch.testing.assert_close(traced(images(model))['blocks.1'][:, 1:], expected[0])


@pytest.mark.parametrize('mixer', vitzoo.list_mixers())
def test_a_swapped_model_from_the_meta_device_is_initialized_or_refuses(mixer):
    name, _ = VARIANTS['augreg']
    with torch.device('meta'):
        model = timm.create_model(name, depth=1, img_size=32, embed_dim=24, num_heads=2, num_classes=3)
        vitzoo.swap_mixer(model, mixer)
    assert_initialized_or_refused(model.to_empty(device='cpu'))


def test_a_wrong_number_of_tokens_names_the_remedy():
    model = vitzoo.swap_mixer(build(), 'ls')
    with pytest.raises(ValueError, match=r'1 prefix tokens and a 4 x 4 grid, and got 20 tokens.*set_input_size'):
        model.blocks[0](torch.zeros(1, 20, 48))


def test_masks_are_refused():
    model = vitzoo.swap_mixer(build(), 'softmax')
    with pytest.raises(ValueError, match='attn_mask'):
        model.forward_features(images(model), attn_mask=torch.zeros(17, 17))
    with pytest.raises(ValueError, match='causal'):
        model.forward_features(images(model), is_causal=True)


def test_blocks_are_swapped_one_by_one():
    model = build(depth=3)
    vitzoo.swap_mixer(model, 'ls', blocks=[0], window_size=3, rank=2)
    vitzoo.swap_mixer(model, 'performer', blocks=[-1])
    assert [type(block.attn).__name__ for block in model.blocks] == ['LongShort', 'Attention', 'Performer']
    assert (model.blocks[0].attn.window_size, model.blocks[0].attn.rank) == (3, 2)
    assert logits(model).isfinite().all()
    model.set_input_size(96)
    assert logits(model).isfinite().all()


@pytest.mark.parametrize('variant', ['augreg', 'qk_norm', 'no biases'])
def test_softmax_swapped_back_in_gives_the_old_logits(variant):
    model = build(variant)
    before = logits(model)
    vitzoo.swap_mixer(model, 'performer')
    assert not torch.equal(logits(model), before)
    vitzoo.swap_mixer(model, 'softmax')
    assert torch.equal(logits(model), before)


def test_layers_and_weight_decay_know_the_mixers_parameters():
    model = vitzoo.swap_mixer(build(), 'aft_full', blocks=[1])
    assert {'pos_embed', 'cls_token', 'blocks.1.attn.u_query', 'blocks.1.attn.u_key'} <= model.no_weight_decay()
    grouped = group_parameters(model, model.group_matcher())
    assert {name for names in grouped.values() for name in names} == {name for name, _ in model.named_parameters()}
    no_decay, _ = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    assert any(parameter is model.blocks[1].attn.u_key for parameter in no_decay['params'])


def test_the_classifier_is_reset_as_before():
    model = vitzoo.swap_mixer(build(), 'nystrom')
    model.reset_classifier(7, 'avg')
    assert logits(model).shape == (2, 7)


def test_device_dtype_mode_and_dropout_are_those_of_the_attention():
    model = build(proj_drop_rate=0.1, attn_drop_rate=0.2).train().to(torch.float64)
    vitzoo.swap_mixer(model, 'softmax')
    mixer = model.blocks[0].attn
    assert (mixer.proj_drop.p, mixer.attn_drop.p, mixer.training) == (0.1, 0.2, True)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64}
    meta = timm.create_model('vit_tiny_patch16_224', depth=1, device='meta')
    vitzoo.swap_mixer(meta, 'ls', rel_bias='table')
    assert {tensor.device.type for tensor in meta.state_dict().values()} == {'meta'}


@pytest.mark.parametrize(
    'name, kwargs, what',
    [
        ('resnet18', {}, 'ResNet: it has no attention'),
        ('vit_tiny_patch16_224', {'depth': 1, 'features_only': True, 'out_indices': [0]}, 'made without features_only'),
        (
            'swinv2_tiny_window8_256',
            {'depths': (1, 1, 1, 1)},
            'SwinTransformerV2.*directions.*vit_small_patch16_dinov3',
        ),
        ('pvt_v2_b2_li', {}, 'pools the keys'),
        ('vit_tiny_patch16_224', {'depth': 1, 'block_fn': 'ParallelScalingBlock'}, 'ParallelScalingBlock'),
        ('vit_tiny_patch16_224', {'depth': 1, 'attn_layer': 'diff'}, 'DiffAttention'),
        ('vit_tiny_patch16_224', {'depth': 1, 'gated': True}, 'gated'),
        ('vit_tiny_patch16_224', {'depth': 1, 'attn_head_dim': 32}, 'attn_head_dim'),
        ('vit_tiny_patch16_224', {'depth': 1, 'patch_drop_rate': 0.5}, 'patch_drop_rate'),
    ],
)
def test_what_no_mixer_fits_into_is_refused_by_name(name, kwargs, what):
    options = {key: kwargs.pop(key) for key in ('gated', 'attn_head_dim') if key in kwargs}
    if options:
        kwargs['attn_layer'] = attention_with(**options)
    if 'block_fn' in kwargs:
        kwargs['block_fn'] = getattr(timm.models.vision_transformer, kwargs['block_fn'])
    model = timm.create_model(name, device='meta', **kwargs)
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=what):
        vitzoo.swap_mixer(model, 'softmax')
    assert list(model.state_dict()) == names


def test_a_subclass_of_a_model_is_refused_because_it_may_compute_something_else():
    class MyViT(VisionTransformer):
        pass

    with pytest.raises(ValueError, match='MyViT: it is a subclass of VisionTransformer'):
        vitzoo.swap_mixer(MyViT(depth=1, embed_dim=24, num_heads=2), 'ls')


def attention_with(**options):
    """A class for timm's `attn_layer`: plain attention with these options."""

    class Layer(timm.layers.Attention):
        def __new__(cls, *args, **kwargs):
            return timm.layers.Attention(*args, **kwargs, **options)

    return Layer


def test_wrong_arguments_leave_the_model_as_it_is():
    model = build()
    for kwargs, error, message in [
        (dict(mixer='softmx'), ValueError, 'did you mean'),
        (dict(mixer='ls', no_such_option=1), TypeError, 'no_such_option'),
        (dict(mixer='ls', blocks=[0, 2]), ValueError, 'no block 2: the model has 2'),
        (dict(mixer='ls', blocks=[1], window_size=0), ValueError, 'window_size'),
    ]:
        with pytest.raises(error, match=message):
            vitzoo.swap_mixer(model, **kwargs)
    for kwargs in [dict(blocks=0), dict(blocks=True), dict(blocks=['0']), dict(blocks='01'), dict(blocks=[0.5])]:
        with pytest.raises(ValueError, match=r'blocks is a list of numbers of blocks, .*, not '):
            vitzoo.swap_mixer(model, 'ls', **kwargs)
    for mixer in (None, 5, ['ls', None]):
        with pytest.raises(ValueError, match="mixer is a name such as 'ls', or a list of names, not "):
            vitzoo.swap_mixer(model, mixer)
    for key, value in dict(
        dim=3, grid_size=(1, 1), num_prefix_tokens=0, layer=3, dtype=torch.half, device='cpu'
    ).items():
        with pytest.raises(ValueError, match=f'The {key} of a mixer is that of the model; leave {key}='):
            vitzoo.swap_mixer(model, 'ls', **{key: value})
    assert type(model) is timm.models.VisionTransformer
    assert {type(block.attn) for block in model.blocks} == {timm.layers.Attention}


@pytest.mark.parametrize(
    'change',
    [
        lambda layer: parametrizations.weight_norm(layer),
        lambda layer: prune.l1_unstructured(layer, 'weight', 0.5),
        lambda layer: nn.utils.weight_norm(layer),
    ],
    ids=['parametrization', 'pruning', 'weight norm'],
)
@pytest.mark.filterwarnings('ignore:.*weight_norm:FutureWarning')
@pytest.mark.parametrize('is_swapped', [False, True])
def test_weights_that_are_computed_are_not_taken_for_missing(change, is_swapped):
    model = vitzoo.swap_mixer(build(), 'softmax') if is_swapped else build()
    change(model.blocks[1].attn.qkv)
    before = logits(model)
    with pytest.raises(ValueError, match='of block 1: its weights are parametrized or pruned'):
        vitzoo.swap_mixer(model, 'ls')
    assert torch.equal(logits(model), before)
    vitzoo.swap_mixer(model, 'ls', [0])


class Adapter(nn.Module):
    """A linear layer as packages for fine-tuning wrap it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer


class LowRank(nn.Linear):
    """A linear layer that adds another product, as some packages for fine-tuning do."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features)

    def forward(self, x):
        return super().forward(x) + x.sum()


@pytest.mark.parametrize('layer', ['qkv', 'proj'])
@pytest.mark.parametrize('wrap', [Adapter, LowRank])
def test_a_wrapped_layer_is_named(layer, wrap):
    model = build()
    setattr(model.blocks[1].attn, layer, wrap(getattr(model.blocks[1].attn, layer)))
    name = rf'test_swap\.{wrap.__name__}'
    with pytest.raises(ValueError, match=f'of block 1: its {layer} is a {name}; merge it into a linear layer first'):
        vitzoo.swap_mixer(model, 'ls')


@pytest.mark.parametrize('is_swapped', [False, True])
def test_a_quantized_weight_is_not_copied_as_its_numbers(is_swapped):
    model = vitzoo.swap_mixer(build(), 'softmax') if is_swapped else build()
    layer = model.blocks[1].attn.qkv
    layer.weight = nn.Parameter((1000 * layer.weight).to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match='of block 1: the weight of its qkv is quantized to torch.int8; convert'):
        vitzoo.swap_mixer(model, 'ls')


@pytest.mark.parametrize('wrap, part', [(torch.compile, '_orig_mod'), (nn.DataParallel, 'module')])
def test_a_model_in_a_wrapper_is_asked_for(wrap, part):
    wrapped = wrap(build())
    with pytest.raises(ValueError, match=rf'is around a model: swap the mixers of its \.{part}, and wrap that'):
        vitzoo.swap_mixer(wrapped, 'ls')
    vitzoo.swap_mixer(getattr(wrapped, part), 'ls')


@pytest.mark.parametrize('mixer', ['ls', 'linformer', 'xca'])
def test_layers_of_a_mixer_are_wrapped_as_those_of_timm(mixer):
    model = vitzoo.swap_mixer(build(), mixer)
    before = logits(model)
    for block in model.blocks:
        # as LoRA does
        block.attn.qkv, block.attn.proj = nn.Sequential(block.attn.qkv), nn.Sequential(block.attn.proj)
    torch.testing.assert_close(logits(model), before)


def test_numbers_of_other_libraries_are_saved_as_pythons():
    model = vitzoo.swap_mixer(build(), 'ls', blocks=np.arange(2), window_size=np.int64(3), proj_drop=np.float32(0.5))
    swap = dict(mixer='ls', blocks=[0, 1], window_size=3, proj_drop=0.5)
    assert json.loads(json.dumps(model._model_args['swap_mixer'])) == [swap]


def test_other_heads_than_those_of_the_norms_are_refused():
    model = build(qk_norm=True)
    with pytest.raises(ValueError, match='normalizes queries and keys of .* heads, .*; leave num_heads out'):
        vitzoo.swap_mixer(model, 'ls', num_heads=1)


@pytest.mark.parametrize('frozen', ['', 'qkv.weight', 'attn', '.'])
def test_what_a_mixer_inherits_from_frozen_weights_stays_frozen(frozen):
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    vitzoo.swap_mixer(model, 'ls')
    new = ('dynamic_proj', 'norm_full', 'norm_landmarks')
    for name, parameter in model.named_parameters():
        is_frozen = bool(frozen) and frozen in name and not any(part in name for part in new)
        assert parameter.requires_grad != is_frozen, name


# mixers whose layers have other names than those of the attention, and what is in each that has no frozen parent
OTHER_LAYERS = {'srformer': ('sr', 'norm'), 'synthesizer': ('scores',), 'longformer': ('rel_bias',), 'softmax': ()}


@pytest.mark.parametrize('mixer', OTHER_LAYERS)
def test_layers_made_of_frozen_ones_of_another_name_stay_frozen(mixer):
    model = build()
    for block in model.blocks:
        block.attn.qkv.requires_grad_(False)
    kwargs = dict(global_proj=True) if mixer == 'longformer' else {}
    vitzoo.swap_mixer(model, mixer, **kwargs)
    for name, parameter in model.blocks[0].attn.named_parameters():
        part = name.partition('.')[0]
        assert parameter.requires_grad == (part in ('proj', 'proj_global', *OTHER_LAYERS[mixer])), name


def test_a_scale_of_its_own_gives_way_to_that_of_the_inherited_queries():
    model = build()
    expected = logits(model)
    vitzoo.swap_mixer(model, 'biformer', num_windows=1, topk=1)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.lepe.weight)
        torch.nn.init.zeros_(block.attn.lepe.bias)
    torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize('mixer', NARROW_KEYS)
def test_a_mixer_that_cannot_normalize_its_keys_says_so(mixer):
    with pytest.raises(ValueError, match='qk_norm'):
        vitzoo.swap_mixer(build('qk_norm'), mixer)


def outputs_as_queries_and_keys_grow(mixer, qk_norm):
    """Outputs of a mixer before and after its queries and keys, already large, are multiplied by four."""
    x = torch.randn(2, 17, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    layer = create_mixer(
        mixer, 12, 3, grid_size=(4, 4), num_prefix_tokens=1, qk_norm=qk_norm, qkv_bias=False, dtype=torch.float64
    ).eval()
    outputs = []
    for factor in (100, 4):
        with torch.no_grad():
            layer.qkv.weight[:-12] *= factor
            outputs.append(layer(x, (4, 4)))
    return outputs


@pytest.mark.parametrize('mixer', NORMALISING)
def test_with_qk_norm_the_scale_of_queries_and_keys_does_not_matter(mixer):
    torch.testing.assert_close(*outputs_as_queries_and_keys_grow(mixer, qk_norm=True), rtol=1e-3, atol=1e-4)


def test_without_qk_norm_the_scale_of_queries_and_keys_matters():
    assert not torch.allclose(*outputs_as_queries_and_keys_grow('linear', qk_norm=False), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('mixer', NORMALISING)
def test_qk_norm_runs_in_half_precision(mixer):
    model = vitzoo.swap_mixer(build('qk_norm'), mixer)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert logits(model).isfinite().all()


@pytest.mark.parametrize('variant', ['augreg', 'no biases', 'qk_norm'])
def test_srformer_without_reduction_gives_the_old_logits(variant):
    model = build(variant)
    before = logits(model)
    vitzoo.swap_mixer(model, 'srformer', sr_ratio=1)
    assert torch.equal(logits(model), before)
    assert all(report.share == 1 and not report.lost for report in model.inheritance.values())


def test_synthesizer_inherits_the_values_and_the_rest_is_named(caplog):
    model = build()
    values = [block.attn.qkv.weight[-48:].clone() for block in model.blocks]
    vitzoo.swap_mixer(model, 'synthesizer')
    assert all(torch.equal(block.attn.v.weight, v) for block, v in zip(model.blocks, values, strict=True))
    assert model.inheritance[0].lost == ['qkv.weight', 'qkv.bias']
    assert 'synthesizer does not inherit all weights of the attention, in blocks.*.attn.qkv.weight (2)' in caplog.text


@pytest.mark.parametrize('mixer, lost', [('performer', False), ('aft_conv', True), ('pool', True), ('fourier', True)])
def test_a_warning_names_the_weights_that_a_mixer_loses(mixer, lost, caplog):
    vitzoo.swap_mixer(build(), mixer)
    assert ('does not inherit all weights' in caplog.text) is lost


def test_one_process_of_several_warns(caplog, monkeypatch):
    monkeypatch.setenv('RANK', '1')
    model = vitzoo.swap_mixer(build(), 'pool')
    assert model.inheritance[0].lost and caplog.text == ''


@pytest.mark.parametrize('mixer', ['performer', 'rfa', 'reformer', 'routing', 'bigbird'])
def test_a_second_swap_draws_with_its_own_seed(mixer):
    twice = vitzoo.swap_mixer(vitzoo.swap_mixer(build(), mixer, seed=0), mixer, seed=7)
    once = vitzoo.swap_mixer(build(), mixer, seed=7)
    assert all(torch.equal(tensor, once.state_dict()[name]) for name, tensor in twice.state_dict().items())


@pytest.mark.parametrize('mixer', ['fourier', 'pool', 'srformer', 'synthesizer'])
def test_other_mixers_take_the_place_of_attention_with_qk_norm(mixer):
    assert logits(vitzoo.swap_mixer(build('qk_norm'), mixer)).isfinite().all()


def test_prefix_tokens_of_longformer_start_with_copies_of_the_local_projections():
    model = build()
    attn = copy.deepcopy(model.blocks[0].attn)
    mixer = vitzoo.swap_mixer(model, 'longformer', global_proj=True).blocks[0].attn
    assert torch.equal(torch.cat([mixer.q_global.weight, mixer.kv_global.weight]), attn.qkv.weight)
    assert torch.equal(mixer.proj_global.bias, attn.proj.bias)
    assert model.inheritance[0].share == 1
