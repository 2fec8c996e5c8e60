"""Families of timm models whose attention is replaced: softmax in its place changes nothing, every mixer works."""

import copy

import pytest
import timm
import torch
from helpers import one_in
from test_compile import assert_trains_compiled
from timm.models import save_for_hf

import vitzoo
from vitzoo.metrics.explanation import rollout
from vitzoo.mixers import mixer_class, softmax
from vitzoo.mixers._rope import Rope
from vitzoo.transfer.hybrid import restore_softmax_blocks

# their outputs are not functions of the products of queries with keys
WITHOUT_ROPE = [
    'aft_conv', 'aft_full', 'aft_local', 'aft_simple', 'circulant', 'fourier', 'hydra', 'pool', 'set', 'srformer',
    'synthesizer', 'ttt', 'vssd', 'xca',
]  # fmt: skip
WITH_ROPE = [mixer for mixer in vitzoo.list_mixers() if mixer_class(mixer).has_rope]
TINY = dict(img_size=(64, 96), embed_dim=48, num_heads=4, depth=2, num_classes=5)
# each has something that the others have not
FAMILIES = {
    'dinov3': ('vit_small_patch16_dinov3', {}),
    'dinov3 biases': ('vit_small_patch16_dinov3_qkvb', {}),
    'dinov3 SwiGLU': ('vit_small_plus_patch16_dinov3', {}),
    'eva': ('eva_giant_patch14_224', {'patch_size': 16}),
    'eva02 separate layers': ('eva02_tiny_patch14_224', {'patch_size': 16}),
    'eva02 scale norm': ('eva02_base_patch16_clip_224', {}),
    'eva02 post norm': ('eva02_enormous_patch14_clip_224', {'patch_size': 16}),
    'shared keys': ('vit_base_patch16_sapiens2', {'num_kv_heads': 2}),
    'rope axial': ('vit_medium_patch16_rope_reg1_gap_256', {}),
    'rope mixed': ('vit_small_patch16_rope_mixed_224', {}),
    'rope with positions': ('vit_small_patch16_rope_ape_224', {}),
    'perception encoder': ('vit_pe_core_tiny_patch16_384', {}),
    'scale norm': ('beit3_base_patch16_224', {}),
    'post norm': ('vit_tiny_patch16_224', {'block_fn': timm.models.vision_transformer.ResPostBlock}),
    'parallel': ('vit_small_patch16_18x2_224', {}),
    'relative mlp': ('vit_relpos_small_patch16_224', {}),
    'relative mlp of Swin': ('vit_relpos_small_patch16_224', {'rel_pos_type': 'mlpswin'}),
    'relative mlp with class token': ('vit_relpos_medium_patch16_cls_224', {}),
    'relative mlp shared': ('vit_srelpos_small_patch16_224', {}),
    'relative mlp post norm': ('vit_relpos_small_patch16_rpn_224', {}),
    'relative table': ('vit_relpos_medium_patch16_cls_224', {'rel_pos_type': 'bias'}),
    'beit': ('beit_base_patch16_224', {}),
    'beitv2': ('beitv2_base_patch16_224', {}),
    'cait': ('cait_xxs24_224', {}),
    'sam': ('samvit_base_patch16_224', {'global_attn_indexes': (1,), 'window_size': 3}),
    'naflex': ('naflexvit_base_patch16_map', {'pos_embed_grid_size': (4, 6)}),
    'naflex rope': ('naflexvit_base_patch16_gap', {'pos_embed_grid_size': (4, 6), 'rope_type': 'mixed'}),
}
# timm and vitzoo resample a bias of relative positions each in their own way, and CaiT is made for one size
ONE_SIZE = [family for family in FAMILIES if family.startswith(('relative', 'beit', 'cait'))]

SMALL = dict(embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 2), num_classes=5)
PYRAMIDS = {
    'pvt': ('pvt_v2_b0', dict(SMALL, sr_ratios=(4, 2))),
    'pvt without reduction': ('pvt_v2_b0', dict(SMALL, sr_ratios=(1, 1))),
    'twins global': ('twins_pcpvt_small', dict(SMALL, sr_ratios=(4, 2))),
    # windows as large as the grids of the stages, and only square ones
    'twins local': ('twins_svt_small', dict(SMALL, sr_ratios=(1, 1), wss=(16, 8))),
    'swin': (
        'swin_tiny_patch4_window7_224',
        dict(img_size=(64, 96), embed_dim=16, depths=(2, 1), num_heads=(2, 2), window_size=(16, 24), num_classes=5),
    ),
}


@pytest.mark.parametrize('family', PYRAMIDS)
def test_convolutions_that_add_nothing_at_first_do_so_in_every_model(family):
    model = vitzoo.swap_mixer(build(family), 'linear', dwc='v')
    weights = [weight for name, weight in model.named_parameters() if '.dwc_v.' in name]
    assert weights and not any(weight.any() for weight in weights)


@pytest.mark.parametrize('family', ['relative table', 'relative mlp', 'beit', 'swin'])
def test_a_table_of_relative_positions_is_lost_to_a_bias_that_depends_on_queries(family):
    model = vitzoo.swap_mixer(build(family), 'softmax', rel_bias='decomposed')
    assert 'rel_bias.table' in next(iter(model.inheritance.values())).lost
    assert all(output.isfinite().all() for output in outputs(model, images()))


@pytest.mark.parametrize('family', ['eva02 separate layers', 'shared keys', 'pvt', 'beit', 'sam', 'scale norm'])
def test_weights_stay_frozen_also_if_biases_are_trained(family):
    model = build(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(('.bias', 'q_bias', 'v_bias')))
    vitzoo.swap_mixer(model, 'softmax')
    inherited = {name for report in model.inheritance.values() for name in (*report.copied, *report.fitted)}
    for path, mixer in model.mixers().items():
        for name, parameter in mixer.named_parameters():
            assert name not in inherited or parameter.requires_grad == name.endswith('.bias'), (path, name)


def build(family, **kwargs):
    """A small model with no parameter left at a special value, in which a mistake could hide."""
    name, own = {**FAMILIES, **PYRAMIDS}[family]
    own = own if family in PYRAMIDS else {**TINY, **own}
    torch.manual_seed(0)
    model = timm.create_model(name, **{**own, **kwargs}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def size_of(family):
    return (64, 64) if family == 'twins local' else (64, 96)


def images(size=(64, 96), batch_size=2):
    return torch.randn(batch_size, 3, *size, generator=torch.Generator().manual_seed(1))


def outputs(model, x):
    with torch.no_grad():
        _, maps = model.forward_intermediates(x)
        return [model(x), *maps]


def assert_equal(ours, theirs, rounding=0.0):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)


@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'unfused'])
@pytest.mark.parametrize('family', FAMILIES)
def test_softmax_leaves_logits_and_features_as_they_are_at_every_size(family, fused):
    # a sigmoid of the table of offsets, as here, and one of the biases of all pairs, as in timm, differ in the last bit
    # on some processors; so do sums of biases of another memory layout within the fused attention
    rounding = 3e-7 if family == 'relative mlp of Swin' or (family == 'sam' and fused) else 0.0
    # the fused attention of torch 2.6 rounds biases of another memory layout in another way
    if fused and torch.__version__.startswith('2.6'):
        rounding = 3e-6
    timm.layers.set_fused_attn(fused)
    try:
        model = build(family)
        before = outputs(model, images())
        vitzoo.swap_mixer(model, 'softmax')
        assert_equal(outputs(model, images()), before, rounding)
        assert all(not report.lost for report in model.inheritance.values())
        if family in ONE_SIZE:
            return
        other = build(family)
        for either in (model, other):
            if hasattr(either, 'set_input_size'):
                either.set_input_size((96, 48))
        assert_equal(outputs(model, images((96, 48))), outputs(other, images((96, 48))), rounding)
    finally:
        timm.layers.set_fused_attn(True)


@pytest.mark.parametrize('mixer', vitzoo.list_mixers())
def test_every_mixer_takes_the_place_of_attention_with_rotary_positions(mixer):
    model = vitzoo.swap_mixer(build('dinov3'), mixer)
    x = images()
    logits = outputs(model, x)[0]
    torch.testing.assert_close(outputs(model, x[:1])[0], logits[:1], rtol=1e-4, atol=1e-5)
    model.train()(x).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.eval().set_input_size((48, 80))
    assert all(output.isfinite().all() for output in outputs(model, images((48, 80))))


def test_every_mixer_that_compares_queries_with_keys_has_rotary_positions():
    assert sorted(set(vitzoo.list_mixers()) - set(WITH_ROPE)) == WITHOUT_ROPE


@pytest.mark.parametrize('mixer', WITH_ROPE)
def test_rotary_positions_act_on_the_grid_and_not_on_prefix_tokens(mixer):
    torch.manual_seed(0)
    layer = vitzoo.create_mixer(mixer, 16, 2, grid_size=(4, 5), num_prefix_tokens=2).eval()
    x, angles = torch.randn(2, 22, 16), torch.randn(20, 8)
    q, k, _ = layer.to_qkv(x, (4, 5))
    rotated_q, rotated_k, _ = layer.to_qkv(x, (4, 5), Rope(torch.cat([angles.sin(), angles.cos()], dim=-1)))
    P = q.shape[2] - 20
    assert torch.equal(rotated_q[:, :, :P], q[:, :, :P]) and torch.equal(rotated_k[:, :, :P], k[:, :, :P])
    assert not torch.isclose(rotated_q[:, :, P:], q[:, :, P:]).all(dim=-1).any()
    assert not torch.equal(layer(x, (4, 5)), layer(x, (4, 5), Rope(torch.cat([angles.sin(), angles.cos()], dim=-1))))


@pytest.mark.parametrize('mixer, lost', [('pool', True), ('aft_simple', True), ('linear', False), ('ls', False)])
@pytest.mark.parametrize('family', ['dinov3', 'rope with positions'])
def test_a_warning_says_that_rotary_positions_are_lost(family, mixer, lost, caplog):
    vitzoo.swap_mixer(build(family), mixer)
    assert ('rotary positions of the model are lost in 2 blocks' in caplog.text) is lost
    assert ('it keeps a position embedding' in caplog.text) is (lost and family != 'dinov3')


@pytest.mark.parametrize('checkpointing', [False, True])
@pytest.mark.parametrize('family', ['dinov3', 'rope mixed'])
def test_gradients_are_those_of_timm_with_its_random_rotary_positions(family, checkpointing):
    gradients = []
    for swap in (False, True):
        model = build(family, rope_jitter_coords=2.0, rope_shift_coords=0.3)
        if swap:
            vitzoo.swap_mixer(model, 'softmax')
        model.train().set_grad_checkpointing(checkpointing)
        torch.manual_seed(7)
        model(images()).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_equal(*gradients)


def test_softmax_under_autocast_gives_the_logits_of_timm(monkeypatch):
    # by the kernel that timm takes
    monkeypatch.setattr(softmax, 'is_faster_than_fused', lambda *qkv: False)
    model = build('dinov3 biases')
    with torch.autocast('cpu', dtype=torch.bfloat16):
        before = outputs(model, images())
        assert_equal(outputs(vitzoo.swap_mixer(model, 'softmax'), images()), before)


def test_attention_maps_of_a_mixer_have_its_rotary_positions():
    model = vitzoo.swap_mixer(build('dinov3', depth=1, global_pool='token'), 'softmax')
    attn, inputs = model.blocks[0].attn, {}
    attn.register_forward_pre_hook(lambda attn, args: inputs.update(args=args))
    with torch.no_grad():
        shares = rollout(model, images())
        q, k, _ = attn.to_qkv(*inputs['args'])
        row = (q[:, :, :1] @ k.mT * attn.scale).softmax(dim=-1).mean(dim=1)[:, 0, model.num_prefix_tokens :]
    torch.testing.assert_close(shares.flatten(1), row / 2)


def test_learned_rotary_positions_have_a_gradient_only_if_a_mixer_has_them():
    model = vitzoo.swap_mixer(build('rope mixed'), 'pool', blocks=[0])
    assert model.rope.freqs.requires_grad
    vitzoo.swap_mixer(model, 'aft_simple', blocks=[1])
    assert not model.rope.freqs.requires_grad
    vitzoo.swap_mixer(model, 'linear', blocks=[1])
    assert model.rope.freqs.requires_grad


@pytest.mark.parametrize('family', ['dinov3', 'rope mixed', 'naflex rope'])
def test_other_heads_than_those_of_the_rotary_positions_are_refused(family):
    model = build(family)
    with pytest.raises(ValueError, match=r'for heads of width 12, not for num_heads=2; use num_heads=4\.'):
        vitzoo.swap_mixer(model, 'linear', num_heads=2)
    # a mixer without rotary positions may have any, and the next one does not take them over
    vitzoo.swap_mixer(model, 'aft_conv', num_heads=2)
    with pytest.raises(ValueError, match='use num_heads=4'):
        vitzoo.swap_mixer(model, 'softmax')
    assert outputs(vitzoo.swap_mixer(model, 'softmax', num_heads=4), images())[0].isfinite().all()


def test_rotary_positions_that_were_frozen_stay_frozen():
    model = build('rope mixed')
    model.rope.requires_grad_(False)
    vitzoo.swap_mixer(vitzoo.swap_mixer(model, 'pool'), 'softmax')
    assert not model.rope.freqs.requires_grad


def test_blocks_that_are_given_back_train_rotary_positions_again():
    teacher = build('rope mixed')
    student = vitzoo.swap_mixer(copy.deepcopy(teacher), 'pool')
    restore_softmax_blocks(teacher, student, ['blocks.1.attn'])
    assert student.rope.freqs.requires_grad


@pytest.mark.parametrize('family, kwargs', [('dinov3', {}), ('beit', {}), ('relative mlp', {'fix_init': True})])
def test_initialization_names_a_mixer_without_the_layer_that_timm_scales(family, kwargs):
    model = vitzoo.swap_mixer(build(family, **kwargs), 'pool', blocks=[1])
    with pytest.raises(RuntimeError, match=r'blocks\.1\.attn has no layer proj'):
        model.init_weights(needs_reset=False)
    vitzoo.swap_mixer(model, 'linear').init_weights(needs_reset=False)


@pytest.mark.parametrize('window_size', [3, 4])
def test_swin_has_the_windows_and_the_bias_of_swin(window_size):
    model = build('swin', img_size=96, depths=(2, 2), window_size=window_size)
    x = torch.randn(2, 3, 96, 96)
    expected = model(x)
    vitzoo.swap_mixer(model, 'swin', window_size=window_size)
    assert not any(report.lost for report in model.inheritance.values())
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_dropout_of_attention_weights_that_a_mixer_does_not_have_names_the_argument_to_leave_out():
    model = build('dinov3', attn_drop_rate=0.1)
    with pytest.raises(ValueError, match='performer never forms .* attn_drop_rate=0.1 of the model.*pass attn_drop=0'):
        vitzoo.swap_mixer(model, 'performer')
    vitzoo.swap_mixer(model, 'performer', attn_drop=0.0)


def test_a_bias_of_windows_that_are_not_square_is_kept():
    model = build('swin', window_size=(4, 6))
    table = model.layers[0].blocks[0].attn.relative_position_bias_table.detach().clone()
    report = vitzoo.swap_mixer(model, 'longformer', window_size=6).inheritance[0]
    assert 'rel_bias.table' in report.fitted and not report.lost
    attn = model.layers[0].blocks[0].attn
    side = attn.window_size + attn.rel_bias.halo - 1
    for dy, dx in ((0, 0), (3, -5), (-2, 4)):
        ours = attn.rel_bias.table[(dy + side) * (2 * side + 1) + dx + side]
        assert torch.equal(ours, table[(dy + 3) * 11 + dx + 5])


def test_a_list_has_a_mixer_for_each_block():
    model = vitzoo.swap_mixer(build('dinov3', depth=3), ['softmax', 'ls', 'pool'])
    assert [type(block.attn).__name__ for block in model.blocks] == ['Softmax', 'LongShort', 'Pool']
    vitzoo.swap_mixer(model, ['nystrom', 'linear'], blocks=[1, 0])
    assert [type(block.attn).__name__ for block in model.blocks] == ['Linear', 'Nystrom', 'Pool']
    again = build('dinov3', depth=3)
    for record in model._model_args['swap_mixer']:
        vitzoo.swap_mixer(again, **record)
    again.load_state_dict(model.state_dict())
    assert_equal(outputs(again, images()), outputs(model, images()))


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(mixer=['ls']), 'list of 1 mixers does not fit 2 blocks'),
        (dict(mixer=['ls', 'softmax'], window_size=3), 'unclear to which of several mixers window_size belongs'),
        (dict(mixer=['ls', 'sofmax']), 'did you mean'),
        (dict(mixer=['ls', 'softmax'], blocks=[1, -1]), 'two mixers'),
    ],
)
def test_a_list_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        vitzoo.swap_mixer(build('dinov3'), **arguments)


def test_each_parallel_branch_has_its_mixer_and_its_layer():
    model = vitzoo.swap_mixer(build('parallel'), 'linear')
    assert [branch.attn.layer for block in model.blocks for branch in block.attns] == [0, 1, 2, 3]
    assert 'attns.1.attn.qkv.weight' in model.inheritance[1].copied
    assert vitzoo.swap_mixer(build('parallel'), 'pool').inheritance[0].lost[0] == 'attns.0.attn.qkv.weight'


def test_a_different_grid_is_refused_if_the_image_size_is_not_set():
    model = vitzoo.swap_mixer(build('dinov3'), 'softmax')
    with pytest.raises(ValueError, match='set_input_size'):
        model(images((96, 64)))


@pytest.mark.parametrize('family', [family for family in ONE_SIZE if family != 'cait'])
def test_a_bias_of_relative_positions_follows_the_image_size(family):
    model = vitzoo.swap_mixer(build(family), 'softmax')
    model.set_input_size((96, 48))
    assert model.blocks[0].attn.rel_bias.table.shape == (11 * 5, 4)
    assert all(output.isfinite().all() for output in outputs(model, images((96, 48))))


@pytest.mark.parametrize('fused, own', [(True, True), (False, False)])
def test_a_shared_bias_becomes_part_of_every_block(fused, own):
    timm.layers.set_fused_attn(fused)
    try:
        model = build('beit', use_rel_pos_bias=own, use_shared_rel_pos_bias=True)
        before = outputs(model, images())
        vitzoo.swap_mixer(model, 'softmax', blocks=[0])
        assert model.rel_pos_bias is not None
        assert_equal(outputs(model, images()), before)
        vitzoo.swap_mixer(model, 'softmax', blocks=[1])
        assert model.rel_pos_bias is None
        assert_equal(outputs(model, images()), before)
    finally:
        timm.layers.set_fused_attn(True)


@pytest.mark.parametrize(
    'mixer, lost', [('ls', ['prefix_bias.']), ('longformer', []), ('linear', ['prefix_bias.', 'rel_bias.'])]
)
def test_a_bias_of_relative_positions_is_kept_or_reported(mixer, lost):
    model = build('beit')
    table = model.blocks[0].attn.relative_position_bias_table.detach().clone()
    attn = vitzoo.swap_mixer(model, mixer).blocks[0].attn
    assert sorted({name.split('.')[0] + '.' for name in model.inheritance[0].lost}) == lost
    if attn.has_rel_bias:
        # offset (1, -2) of the 4 x 6 grid, and of the window with its halo
        side = attn.window_size + attn.rel_bias.halo - 1
        ours = attn.rel_bias.table[(1 + side) * (2 * side + 1) - 2 + side]
        assert torch.equal(ours, table[(1 + 3) * 11 - 2 + 5])


@pytest.mark.parametrize('family', one_in(2, ['beit', 'relative mlp shared', 'cait', 'naflex rope']))
def test_every_mixer_takes_the_place_of_attention_in_other_families(family):
    for mixer in vitzoo.list_mixers():
        model = vitzoo.swap_mixer(build(family), mixer)
        logits = outputs(model, images())[0]
        torch.testing.assert_close(outputs(model, images()[:1])[0], logits[:1], rtol=1e-4, atol=1e-5)
        model.train()(images()).square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.requires_grad)


def test_naflex_refuses_patches_and_images_of_another_size():
    model = vitzoo.swap_mixer(build('naflex'), 'linear')
    with pytest.raises(ValueError, match='set_input_size'):
        model(images((96, 64)))
    with pytest.raises(ValueError, match='need images of one size'):
        patches = dict(
            patches=torch.zeros(1, 24, 768), patch_coord=torch.zeros(1, 24, 2), patch_valid=torch.ones(1, 24)
        )
        model(patches)


@pytest.mark.parametrize('family', PYRAMIDS)
def test_the_attention_of_a_pyramid_is_replaced_over_whole_stages(family):
    # torch's fused kernels round in another way for timm's windows, and timm does not fuse Swin's by default
    timm.layers.set_fused_attn(family not in ('swin', 'twins local'))
    try:
        model = build(family)
        before = outputs(model, images(size_of(family)))
        vitzoo.swap_mixer(model, 'srformer' if family in ('pvt', 'twins global') else 'softmax')
        assert_equal(outputs(model, images(size_of(family))), before)
        assert all(not report.lost for report in model.inheritance.values())
    finally:
        timm.layers.set_fused_attn(True)


@pytest.mark.slow
@pytest.mark.parametrize('family', ['beit', 'relative mlp shared', 'cait', 'sam', 'naflex rope', *PYRAMIDS])
def test_every_mixer_takes_the_place_of_attention_at_another_size(family):
    x = images((96, 64))
    for mixer in vitzoo.list_mixers():
        model = vitzoo.swap_mixer(build(family), mixer)
        model.set_input_size((96, 64))
        logits = outputs(model, x)[0]
        torch.testing.assert_close(outputs(model, x[:1])[0], logits[:1], rtol=1e-4, atol=1e-5)
        model.train()(x).square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.requires_grad)


def test_blocks_of_a_pyramid_are_counted_through_its_stages():
    model = vitzoo.swap_mixer(build('swin', window_size=16), 'linear', blocks=[1, -1])
    kinds = [type(block.attn).__name__ for layer in model.layers for block in layer.blocks]
    assert kinds == ['WindowAttention', 'Linear', 'Linear']
    model.set_input_size((96, 64))
    assert [mixer.grid_size for mixer in model.mixers().values()] == [(24, 16), (12, 8)]
    assert outputs(model, images((96, 64)))[0].isfinite().all()


# timm cannot write the class of a block into a config
@pytest.mark.parametrize('family', [family for family in [*FAMILIES, *PYRAMIDS] if family != 'post norm'])
def test_a_swapped_model_is_saved_and_loaded_by_timm(family, tmp_path):
    model = vitzoo.swap_mixer(build(family), 'linear')
    vitzoo.swap_mixer(model, ['softmax'], blocks=[1])
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    x = images(size_of(family))
    assert_equal(outputs(loaded, x), outputs(model, x))


@pytest.mark.slow
@pytest.mark.parametrize('family', ['dinov3', 'cait', 'sam', 'swin'])
def test_a_swapped_model_is_exported(family):
    model = vitzoo.swap_mixer(build(family), ['softmax'], blocks=[1])
    x = images(size_of(family))
    logits = outputs(model, x)[0]
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()(x)
    torch.testing.assert_close(exported, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('family', ['dinov3', 'rope mixed', 'beit', 'relative table', 'cait', 'naflex', *PYRAMIDS])
def test_a_swapped_model_trains_compiled(family):
    model = vitzoo.swap_mixer(build(family), ['linear'], blocks=[0])
    assert_trains_compiled(model, size_of(family))


def test_a_second_swap_keeps_the_scale_of_the_first():
    model = vitzoo.swap_mixer(build('dinov3'), 'softmax', scale=0.7)
    before = outputs(model, images())
    vitzoo.swap_mixer(vitzoo.swap_mixer(model, 'nystrom', num_landmarks=4), 'softmax')
    assert model.blocks[0].attn.scale == 0.7
    assert_equal(outputs(model, images()), before)
