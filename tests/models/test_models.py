"""Every backbone with every mixer, at small sizes, as timm's users use them."""

import copy
from pathlib import Path

import pytest
import timm
import torch
from helpers import COMBINATIONS, assert_initialized_or_refused, blocks, images, mixers_of_ours, one_in
from helpers import build_model as build
from timm.models._manipulate import group_parameters
from torch import nn

import vitzoo
from vitzoo.mixers import TokenMixer
from vitzoo.models import aft, cvt, deit, vil
from vitzoo.models._quick_gelu import quick_gelu


def is_bound_to_the_grid(model):
    """Return True if any parameter of the model belongs to one place of one grid."""
    mixers = [block.attn for block in blocks(model)]
    softmax_bias = any(type(m).__name__ == 'Softmax' and m.rel_bias is not None for m in mixers)
    return softmax_bias or any(m.grid_bound for m in mixers) or getattr(model, 'pos_embed', None) is not None


def mixers_in(args):
    mixers = args.get('mixer', ())
    return {mixers} if isinstance(mixers, str) else set(mixers)


def test_the_registered_names_are_these():
    pinned = (Path(__file__).parents[1] / 'model_names.txt').read_text().split()
    variants = {name: args for module in (aft, cvt, deit, vil) for name, args in module.VARIANTS.items()}
    plugins = set(vitzoo.list_mixers()) - set(mixers_of_ours())
    registered = [name for name, args in variants.items() if not plugins & mixers_in(args)]
    assert sorted(registered) == pinned
    assert set(registered) <= set(timm.list_models())


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', COMBINATIONS)
def test_forward_and_backward_are_finite_and_reach_every_parameter(name, dtype):
    model = build(name).train()
    with torch.autocast('cpu', dtype=dtype, enabled=dtype != torch.float32):
        logits = model(images())
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()
    logits.float().square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('std', [None, 3.0])
@pytest.mark.parametrize('name', COMBINATIONS)
def test_an_image_does_not_depend_on_its_batch(name, std):
    model = build(name)
    x = images(batch_size=5) * torch.tensor([1.0, 0.1, 3.0, 0.5, 2.0])[:, None, None, None]
    if std is not None:
        for block in blocks(model):
            if hasattr(block.attn, 'qkv'):
                block.attn.qkv.register_forward_hook(ScaleQK(std))
    with torch.no_grad():
        # the first pass fixes the scales
        model(x)
        batched = model(x)
        alone = torch.cat([model(x[i : i + 1]) for i in range(5)])
    assert ((batched - alone).norm() / batched.norm()).item() < 1e-4


@pytest.mark.parametrize('name', COMBINATIONS)
def test_one_image_trains_as_the_same_image_twice(name):
    # batch norm sees the same statistics, so that each image gives the same gradient; the rest draws no noise
    model = build(name).double()
    for module in model.modules():
        module.training = isinstance(module, torch.nn.BatchNorm2d)
    gradients = []
    for times in (1, 2):
        model(images(batch_size=1).double().repeat(times, 1, 1, 1)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]) / times)
        model.zero_grad()
    assert ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item() < 1e-6


class ScaleQK:
    """Scales q and k, as larger weights would, to the given standard deviation on the first batch seen."""

    def __init__(self, std):
        self.std = std
        self.factors = None

    def __call__(self, module, args, output):
        # a linear layer returns them in one tensor
        q, k, v = output.split(module.sizes, dim=-1) if isinstance(output, torch.Tensor) else output
        self.factors = self.factors or (self.std / q.std(), self.std / k.std())
        scaled = q * self.factors[0], k * self.factors[1], v
        return torch.cat(scaled, dim=-1) if isinstance(output, torch.Tensor) else scaled


@pytest.mark.parametrize('name', one_in(3, COMBINATIONS))
def test_any_image_size_runs(name):
    # the smallest, grids that do not halve evenly, an incomplete patch, a large and a small rectangle
    sizes = [(32, 32), (96, 96), (112, 112), (222, 222), (224, 288), (160, 96)]
    resized = build(name, img_size=64)
    direct = None if is_bound_to_the_grid(resized) else build(name, img_size=64)
    with torch.no_grad():
        for size in sizes:
            x = images(*size, batch_size=1)
            assert build(name, img_size=size)(x).isfinite().all(), size
            resized.set_input_size(size)
            assert resized(x).isfinite().all(), size
            if direct is not None:
                torch.testing.assert_close(direct(x), resized(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'name', ['cvt_ls_13', 'cvt_13', 'cvt_aft_conv_13', 'aft_conv_tiny', 'aft_ls_tiny', 'aft_nystrom_tiny']
)
def test_models_without_positions_are_not_bound_to_a_size(name):
    assert not is_bound_to_the_grid(build(name))


@pytest.mark.parametrize('name', ['vil_tiny', 'vil_tiny_abs', 'cvt_aft_full_13', 'deit_ls_tiny'])
def test_a_size_the_positions_are_not_made_for_is_refused(name):
    model = build(name)
    with pytest.raises((ValueError, AssertionError), match=r'made for|doesn.t match'):
        model(images(96, 96))


@pytest.mark.parametrize(
    'name, size', [('cvt_ls_13', 2), ('vil_ls_tiny', 31), ('deit_ls_tiny', 15), ('aft_conv_tiny', (224, 8))]
)
def test_an_image_too_small_for_the_backbone_is_refused(name, size):
    with pytest.raises(ValueError, match=r'too small|smaller than a patch'):
        build(name, img_size=size)


@pytest.mark.parametrize('name', ['deit_softmax_nano', 'vil_nano', 'cvt_nano', 'aft_conv_nano'])
def test_a_nano_model_has_256_tokens_at_128_pixels_and_takes_64_to_160(name):
    model = timm.create_model(name, num_classes=10).eval()
    assert 1e6 < sum(p.numel() for p in timm.create_model(name).parameters()) < 2e6
    assert model.default_cfg['input_size'] == (3, 128, 128)
    assert blocks(model)[0].attn.grid_size == (16, 16)
    for size in (64, 96, 160):
        model.set_input_size(size)
        assert blocks(model)[0].attn.grid_size == (size // 8, size // 8)
        assert model(images(size, size)).isfinite().all()


@pytest.mark.parametrize('size', ['tiny', 'small', 'base'])
def test_deit_with_softmax_gives_timms_logits(size):
    torch.manual_seed(0)
    theirs = timm.create_model(f'deit_{size}_patch16_224', depth=2).eval()
    ours = timm.create_model(f'deit_softmax_{size}', depth=2).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(224, 224)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize('mixer', ['aft_simple', 'local', 'longformer', 'nystrom', 'sinkhorn', 'softmax', 'sparse'])
def test_a_timm_checkpoint_loads_strictly_where_the_mixer_adds_no_parameter(mixer):
    weights = timm.create_model('deit_tiny_patch16_224', depth=2).state_dict()
    timm.create_model(f'deit_{mixer}_tiny', depth=2).load_state_dict(weights, strict=True)


@pytest.mark.parametrize('name', COMBINATIONS)
def test_timms_usual_arguments_work(name):
    model = build(name, in_chans=1, num_classes=0, drop_rate=0.1, drop_path_rate=0.2)
    assert model(images(in_chans=1)).shape == (2, model.num_features)
    assert model.head_drop.p == 0.1
    rates = [getattr(block.drop_path1, 'drop_prob', 0.0) for block in blocks(model)]
    # CvT's recipe drops paths in the last stage only, which has one block here and so starts at 0
    assert rates[-1] == pytest.approx(0.0 if name.startswith('cvt') else 0.2)
    model.reset_classifier(7)
    assert model(images(in_chans=1)).shape == (2, 7)


@pytest.mark.parametrize('name', ['cvt_13', 'vil_tiny', 'deit_softmax_tiny', 'aft_softmax_tiny'])
def test_every_rate_of_dropout_has_its_place(name):
    rates = dict(drop_rate=0.1, pos_drop_rate=0.2, proj_drop_rate=0.3, attn_drop_rate=0.4)
    model = build(name, **rates)
    found = {path.rpartition('.')[2]: m.p for path, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert found == dict(head_drop=0.1, pos_drop=0.2, proj_drop=0.3, drop1=0.3, drop2=0.3, attn_drop=0.4)


@pytest.mark.parametrize(('name', 'rates'), [('cvt_13', [0, 0, 0, 0.1, 0.2]), ('vil_tiny', [0, 0.05, 0.1, 0.15, 0.2])])
def test_paths_are_dropped_at_rates_that_rise_to_the_last_block(name, rates):
    depths = (1, 1, 3) if name == 'cvt_13' else (1, 1, 2, 1)
    model = build(name, depths=depths, drop_path_rate=0.2)
    found = [getattr(block.drop_path1, 'drop_prob', 0.0) for block in blocks(model)]
    assert found == pytest.approx(rates)
    assert found == [getattr(block.drop_path2, 'drop_prob', 0.0) for block in blocks(model)]


def test_the_mixer_of_any_name_can_be_overridden():
    model = build('cvt_ls_13', mixer='performer', mixer_kwargs={'num_features': 8})
    assert {type(block.attn).__name__ for block in blocks(model)} == {'Performer'}
    model = build('vil_tiny', mixer=('nystrom', 'ls', 'aft_conv', 'softmax'))
    assert [type(block.attn).__name__ for block in blocks(model)] == ['Nystrom', 'LongShort', 'AFTConv', 'Softmax']


def test_a_mixer_whose_name_a_backbones_own_mixer_has_goes_in_by_keyword():
    assert type(blocks(build('aft_local_tiny'))[0].attn).__name__ == 'AFTLocal'
    assert type(blocks(build('aft_local_tiny', mixer='local'))[0].attn).__name__ == 'Local'


def test_keywords_add_to_those_of_the_name_and_go_with_another_mixer():
    published = build('vil_ls_medium_384', mixer_kwargs={'rank': 3})
    first = blocks(published)[0].attn
    assert (first.window_size, first.rank, first.rel_bias.row_stride) == (8, 3, 16)
    other = build('vil_ls_medium_384', mixer='nystrom')
    assert type(blocks(other)[0].attn).__name__ == 'Nystrom'


@pytest.mark.parametrize('sequence', [tuple, list])
def test_windows_of_a_name_stay_if_its_own_mixers_are_named(sequence):
    published = build('vil_ls_medium_384', mixer=sequence(['ls', 'ls', 'softmax', 'softmax']))
    first = blocks(published)[0].attn
    assert (first.window_size, first.rel_bias.row_stride) == (8, 16)
    kwargs = dict(mixer=sequence(['longformer', 'longformer', 'softmax', 'softmax']))
    for chosen in (
        kwargs,
        dict(mixer_kwargs={'random_shift': True}),
        dict(mixer_kwargs=[{}, {'random_shift': True}, {}, {}]),
    ):
        stages = build('vil_medium_wide_abs_384', **chosen).stages
        assert [stage.blocks[0].attn.window_size for stage in stages[:2]] == [8, 12]
        assert stages[1].blocks[0].attn.random_shift == ('mixer' not in chosen)
    wider = build('vil_medium_wide_abs_384', mixer_kwargs=({'window_size': 6}, {}, {}, {})).stages
    assert [stage.blocks[0].attn.window_size for stage in wider[:2]] == [6, 12]


def test_a_mixer_that_the_name_does_not_have_gets_none_of_its_keywords():
    other = build('vil_ls_medium_384', mixer='nystrom')
    assert type(blocks(other)[0].attn).__name__ == 'Nystrom'


@pytest.mark.parametrize('name', ['cvt_ls_13', 'vil_tiny', 'deit_performer_tiny', 'aft_conv_tiny'])
def test_a_wrong_mixer_argument_says_so(name):
    with pytest.raises(TypeError, match='no_such_option'):
        build(name, mixer_kwargs={'no_such_option': 1})
    with pytest.raises(ValueError, match='did you mean'):
        build(name, mixer='softmx')
    for key, value in dict(num_heads=2, grid_size=(4, 4), attn_drop=0.1).items():
        with pytest.raises(ValueError, match=f'The {key} of a mixer is that of the model; leave {key} out'):
            build(name, mixer_kwargs={key: value})


@pytest.mark.parametrize('kwargs', [dict(mixer=['ls', 'softmax']), dict(mixer=('ls',)), dict(mixer_kwargs=[{}, {}])])
@pytest.mark.parametrize('name', ['deit_softmax_tiny', 'aft_conv_tiny'])
def test_several_mixers_of_one_stage_are_refused(name, kwargs):
    with pytest.raises(ValueError, match='all blocks are of one stage; .*swap_mixer'):
        build(name, **kwargs)


@pytest.mark.parametrize(
    ('name', 'kwargs', 'message'),
    [
        ('vil_tiny_abs', dict(embed_dims=(17, 24, 24, 32), num_heads=(1, 2, 2, 2)), 'dim must be even, not 17'),
        ('cvt_13', dict(stride_kv=0), 'stride_kv must be at least 1, not 0'),
    ],
)
def test_sizes_that_cannot_work_are_refused_when_the_model_is_built(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(name, **kwargs)


def test_a_wrong_pooling_leaves_the_classifier_as_it_is():
    model = build('cvt_ls_13')
    num_classes = model.num_classes
    with pytest.raises(ValueError, match='global_pool is'):
        model.reset_classifier(9, 'bad')
    assert (model.num_classes, model.head.out_features) == (num_classes, num_classes)


def test_cvt_thins_out_keys_only_where_the_mixer_allows_it():
    strides = {
        name: [block.attn.qkv.conv_k.conv.stride[0] for block in blocks(build(name))]
        for name in ('cvt_13', 'cvt_ls_13', 'cvt_performer_13', 'cvt_aft_conv_13')
    }
    assert strides.pop('cvt_13') == [2, 2, 2]
    assert all(stride == [1, 1, 1] for stride in strides.values())


def test_long_short_in_cvt_sees_the_class_token_in_the_last_stage_as_global():
    assert [block.attn.num_prefix_tokens for block in blocks(build('cvt_ls_13'))] == [0, 0, 1]


@pytest.mark.parametrize('name', COMBINATIONS)
def test_intermediates_are_the_features_of_the_forward_pass(name):
    model = build(name)
    x = images()
    with torch.no_grad():
        final, maps = model.forward_intermediates(x)
        torch.testing.assert_close(final, model.forward_features(x))
    assert len(maps) == len(model.feature_info)
    for image, info in zip(maps, model.feature_info):
        assert image.shape == (2, info['num_chs'], 64 // info['reduction'], 64 // info['reduction'])


@pytest.mark.parametrize('name', ['deit_softmax_small', 'aft_conv_small', 'cvt_13', 'vil_small'])
def test_intermediates_are_also_a_dict_with_the_keys_of_timm(name):
    model, x = build(name), images()
    has_prefixes = hasattr(model, 'blocks') and model.num_prefix_tokens > 0
    options = dict(indices=1, return_prefix_tokens=True) if has_prefixes else dict(indices=1)
    with torch.no_grad():
        final, maps = model.forward_intermediates(x, **options)
        found = model.forward_intermediates(x, **options, output_dict=True)
        partial = model.forward_intermediates(x, **options, output_dict=True, intermediates_only=True)
    expected = {'image_features': final, 'image_intermediates': maps}
    if has_prefixes:
        grids, prefixes = zip(*maps)
        expected |= {'image_intermediates': [*grids], 'image_intermediates_prefix': [*prefixes]}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert partial.keys() == expected.keys() - {'image_features'}


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_cvts_activation_is_timms_and_keeps_its_input_alone(dtype):
    x = (4 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours = quick_gelu(x)
    theirs = timm.layers.QuickGELU()(x)
    torch.testing.assert_close(ours, theirs)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)))


@pytest.mark.parametrize('rate', [-0.1, 2])
@pytest.mark.parametrize('name', ['cvt_13', 'vil_tiny', 'deit_ls_tiny', 'aft_conv_tiny'])
def test_a_rate_of_stochastic_depth_that_is_none_is_refused(name, rate):
    with pytest.raises(ValueError, match=f'drop_path_rate must be between 0 and 1, not {rate}'):
        build(name, drop_path_rate=rate)


def test_cvts_activation_has_a_second_derivative():
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(quick_gelu, x)


@pytest.mark.parametrize('name', COMBINATIONS)
def test_gradient_checkpointing_changes_nothing(name):
    model = build(name).train()
    state = copy.deepcopy(model.state_dict())
    losses, grads = [], []
    for enable in (False, True):
        # the same random draws, and what mixers keep of the batches they have seen
        torch.manual_seed(2)
        model.load_state_dict(state)
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        loss = model(images()).square().mean()
        loss.backward()
        losses.append(loss.detach())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize('name', ['cvt_13', 'vil_tiny_abs'])
def test_the_embedding_of_a_stage_is_in_the_layer_of_its_first_block(name):
    model = build(name, depths=(1, 2, 2) if name == 'cvt_13' else (1, 2, 2, 1))
    groups = group_parameters(model, model.group_matcher())
    layer_of = {parameter: layer for layer, parameters in groups.items() for parameter in parameters}
    blocks_of = [layer_of[f'stages.{stage}.blocks.0.norm1.weight'] for stage in range(len(model.stages))]
    embeddings = [layer_of[f'stages.{stage}.embed.proj.weight'] for stage in range(len(model.stages))]
    assert embeddings == [0, *blocks_of[1:]] and sorted({0, *blocks_of}) == [0, *blocks_of]
    assert layer_of['norm.weight'] >= blocks_of[-1] < layer_of['head.weight']


@pytest.mark.parametrize('name', ['cvt_13', 'vil_tiny', 'vil_tiny_abs', 'deit_softmax_tiny', 'aft_conv_tiny'])
def test_linear_layers_and_positions_start_near_zero(name):
    model = build(name)
    tensors = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    positions = ('pos_embed', 'table', 'row', 'column')
    tensors += [p for n, p in model.named_parameters() if n.rpartition('.')[2] in positions]
    assert {round(tensor.std().item(), 2) for tensor in tensors if tensor.numel() > 300} == {0.02}


@pytest.mark.parametrize('name', [*COMBINATIONS, 'vil_tiny_abs'])
def test_every_parameter_has_a_layer_and_no_weight_decay_names_exist(name):
    model = build(name)
    names = {name for name, _ in model.named_parameters()}
    grouped = group_parameters(model, model.group_matcher())
    assert {name for group in grouped.values() for name in group} == names
    assert len(grouped) >= len(blocks(model)) + 2
    assert {n for n in model.no_weight_decay() if n.count('.') > 0} <= names
    positions = {n for n in names if n.endswith(('cls_token', 'pos_embed')) or '.pos_embed.' in n}
    mixers = {path: module for path, module in model.named_modules() if isinstance(module, TokenMixer)}
    of_mixers = {f'{path}.{n}' for path, mixer in mixers.items() for n in mixer.no_weight_decay()}
    assert positions | of_mixers <= model.no_weight_decay()


def test_images_too_small_or_positions_of_another_grid_name_the_remedy():
    with pytest.raises(ValueError, match='set_input_size'):
        build('vil_tiny')(images(96, 96))


@pytest.mark.parametrize('name', ['cvt_13', 'cvt_softmax_13', 'cvt_ls_13', 'cvt_routing_13'])
def test_recomputed_activations_update_buffers_once(name):
    kept, recomputed = (build(name).train() for _ in range(2))
    recomputed.load_state_dict(kept.state_dict())
    recomputed.set_grad_checkpointing()
    for model in (kept, recomputed):
        for seed in (1, 2):
            torch.manual_seed(seed)
            model(images(64, 64, batch_size=3)).square().sum().backward()
    assert any('num_batches_tracked' in key for key, _ in kept.named_buffers())
    for (key, buffer), other in zip(kept.named_buffers(), recomputed.buffers()):
        assert torch.equal(buffer, other), key
    for parameter, other in zip(kept.parameters(), recomputed.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'name', ['aft_ls_nano', 'aft_rmt_nano', 'cvt_swin_nano', 'deit_reformer_nano', 'vil_nano', 'vil_ls_nano']
)
def test_a_model_is_built_on_the_default_device(name):
    with torch.device('meta'):
        model = timm.create_model(name)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model(torch.empty(2, 3, 128, 128, device='meta')).sum().backward()


@pytest.mark.parametrize('mixer', vitzoo.list_mixers())
def test_a_model_from_the_meta_device_is_initialized_or_refuses(mixer):
    kwargs = dict(img_size=32, patch_size=8, embed_dim=24, num_heads=2, depth=2, num_classes=3)
    model = timm.create_model(f'deit_{mixer}_tiny', device='meta', **kwargs).to_empty(device='cpu')
    if assert_initialized_or_refused(model):
        assert model(images(32, 32)).isfinite().all()
