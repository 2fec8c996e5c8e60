"""Measures of the tokens after each block, against values computed by hand."""

import json
from math import isnan, log

import pytest
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vitzoo
from vitzoo.errors import UserError
from vitzoo.metrics import OversmoothingProbe, oversmoothing, token_statistics
from vitzoo.metrics._attention import attention_weights
from vitzoo.metrics.oversmoothing import (
    MEASURES,
    Measure,
    effective_rank,
    head_similarity,
    high_frequency_energy,
    mean_cosine,
    rank_one_residual,
)


def brute_force(tokens: torch.Tensor, absolute: bool = False, include_self: bool = False) -> float:
    pairs = []
    for i, a in enumerate(tokens.double()):
        for j, b in enumerate(tokens.double()):
            cosine = (a @ b / (a.norm() * b.norm())).item()
            pairs += [abs(cosine) if absolute else cosine] if i != j or include_self else []
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize('num_tokens', (4, 49, 196))
def test_random_tokens_are_not_similar(num_tokens):
    cosine = mean_cosine(torch.randn(64, num_tokens, 192, generator=torch.Generator().manual_seed(0)))
    assert cosine.mean().item() == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize('num_tokens', (2, 49, 3136))
def test_identical_tokens_have_cosine_1(num_tokens):
    tokens = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0)).expand(2, num_tokens, 64)
    torch.testing.assert_close(mean_cosine(tokens), torch.ones(2), rtol=0, atol=1e-5)


def test_two_orthogonal_clusters_share_only_their_own_pairs():
    tokens = torch.eye(2).repeat_interleave(torch.tensor([3, 5]), dim=0)[None]
    assert mean_cosine(tokens).item() == pytest.approx((3 * 2 + 5 * 4) / (8 * 7))
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])[None]
    assert mean_cosine(opposite).item() == pytest.approx(-1)
    assert mean_cosine(opposite, absolute=True).item() == pytest.approx(1)


@pytest.mark.parametrize('absolute', (True, False))
@pytest.mark.parametrize('include_self', (True, False))
def test_mean_cosine_equals_brute_force(absolute, include_self):
    tokens = torch.randn(3, 11, 5, generator=torch.Generator().manual_seed(0)) + 0.3
    cosine = mean_cosine(tokens, absolute=absolute, include_self=include_self)
    expected = [brute_force(image, absolute, include_self) for image in tokens]
    assert cosine.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_single_token_has_no_similarity():
    assert mean_cosine(torch.ones(2, 1, 8)).isnan().all()
    assert mean_cosine(torch.ones(2, 1, 8), absolute=True).isnan().all()
    model = timm.create_model('deit_softmax_tiny', img_size=16, depth=1)
    assert isnan(oversmoothing(model, torch.randn(2, 3, 16, 16))[0])


def record_outputs(model: nn.Module, blocks: list[nn.Module], images: torch.Tensor) -> list[torch.Tensor]:
    outputs = []
    hooks = [block.register_forward_hook(lambda block, args, output: outputs.append(output)) for block in blocks]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize('name', ('deit_softmax_tiny', 'deit_tiny_distilled_patch16_224'))
@pytest.mark.parametrize('include_cls', (True, False))
def test_prefix_tokens_count_only_on_request(name, include_cls):
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=48, depth=2).eval()
    images = torch.randn(2, 3, 48, 48)
    outputs = record_outputs(model, list(model.blocks), images)
    first = 0 if include_cls else model.num_prefix_tokens
    expected = [sum(brute_force(image[first:]) for image in output) / 2 for output in outputs]
    assert oversmoothing(model, images, include_cls=include_cls) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize('name', ('cvt_13', 'vil_ls_tiny'))
def test_every_block_of_a_pyramid_has_its_value(name):
    model = timm.create_model(name, img_size=64).eval()
    curve = oversmoothing(model, torch.randn(1, 3, 64, 64))
    assert len(curve) == sum(type(module).__name__ == 'Block' for module in model.modules())
    assert all(-1 <= value <= 1 for value in curve if not isnan(value))


@pytest.mark.parametrize(
    ('name', 'size', 'stages', 'layout'),
    [
        ('test_resnet', 64, ('act1', 'layer1', 'layer2', 'layer3', 'layer4'), 'NCHW'),
        ('swin_tiny_patch4_window7_224', 64, ('layers.0', 'layers.1', 'layers.2', 'layers.3'), 'NHWC'),
        ('cait_xxs24_224', 224, ('blocks.0', 'blocks.23'), 'NLC'),
    ],
)
def test_feature_maps_of_timm_models_are_tokens(name, size, stages, layout):
    torch.manual_seed(0)
    model = timm.create_model(name, **({} if layout == 'NCHW' else dict(img_size=size))).eval()
    images = torch.randn(1, 3, size, size)
    outputs = record_outputs(model, [model.get_submodule(stage) for stage in stages], images)
    tokens = [output.permute(0, 2, 3, 1) if layout == 'NCHW' else output for output in outputs]
    expected = [mean_cosine(token.flatten(1, -2)).item() for token in tokens]
    found = token_statistics(model, images)
    curve = dict(zip(found['blocks'], found['cosine']['mean']))
    assert [curve[stage] for stage in stages] == pytest.approx(expected, abs=1e-6)


def test_tokens_of_hiera_are_in_the_order_of_their_grid():
    torch.manual_seed(0)
    model = timm.create_model('hiera_tiny_224', img_size=(64, 64), embed_dim=24, stages=(1, 2, 2, 2)).eval()
    images = torch.randn(2, 3, 64, 64)
    maps = model.forward_intermediates(images, intermediates_only=True)
    found = token_statistics(model, images, ['high_frequency_energy'])
    assert found['grids'] == [[16, 16], [8, 8], [4, 4], [2, 2]]
    expected = [high_frequency_energy(tokens.movedim(1, -1)).mean().item() for tokens in maps]
    assert found['high_frequency_energy']['mean'] == pytest.approx(expected, rel=1e-5)


def test_a_model_without_blocks_says_so():
    with pytest.raises(UserError, match='cannot read the tokens of Flatten'):
        OversmoothingProbe(nn.Flatten())
    model = timm.create_model('pit_ti_224')
    with pytest.raises(UserError, match='does not return a single feature map'):
        oversmoothing(model, torch.randn(1, 3, 224, 224))


def test_statistics_do_not_depend_on_the_batches_and_leave_no_hooks():
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=2).eval()
    images = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = token_statistics(model, images, MEASURES)
    for batch_size in (1, 2, 5):
        for batches in (images.split(batch_size), DataLoader(TensorDataset(images, torch.arange(5)), batch_size)):
            found = token_statistics(model, batches, MEASURES)
            for measure in MEASURES:
                for key in ('mean', 'std'):
                    assert found[measure][key] == pytest.approx(expected[measure][key], rel=1e-4, abs=1e-5)
    assert not model._forward_pre_hooks and not any(module._forward_hooks for module in model.modules())
    assert json.loads(json.dumps(found)) == found


def test_the_spread_is_that_of_the_images():
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=2).eval()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    alone = torch.tensor([oversmoothing(model, image[None]) for image in images])
    found = token_statistics(model, images)['cosine']
    assert found['mean'] == pytest.approx(alone.mean(dim=0).tolist(), abs=1e-5)
    assert found['std'] == pytest.approx(alone.std(dim=0, correction=0).tolist(), abs=1e-5)


def test_a_probe_keeps_one_number_per_image_and_block():
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=2).eval()
    with torch.no_grad(), OversmoothingProbe(model, measures=MEASURES) as probe:
        for _ in range(3):
            model(torch.randn(2, 3, 32, 32))
        kept = [tensor for values in probe._values.values() for tensor in values]
    assert {tensor.shape for tensor in kept} == {(2,)}
    # a view would keep what it is a view of
    assert all(tensor.untyped_storage().nbytes() <= 64 for tensor in kept)
    assert probe.per_image().shape == (6, len(probe.names)) == (6, 2 * len(MEASURES))


def test_a_new_measure_is_one_entry_of_the_table(monkeypatch):
    mean_norm = Measure(lambda tokens: tokens.norm(dim=-1).mean(dim=1), 'Mean norm', 'of the tokens.')
    monkeypatch.setitem(MEASURES, 'mean_norm', mean_norm)
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=1).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    (output,) = record_outputs(model, list(model.blocks), images)
    expected = output[:, 1:].norm(dim=-1).mean().item()
    assert token_statistics(model, images, ['mean_norm'])['mean_norm']['mean'] == pytest.approx([expected])


def test_a_measure_alone_is_a_list_of_one():
    model, images = timm.create_model('test_vit').eval(), torch.randn(2, 3, 160, 160)
    assert token_statistics(model, images, 'cosine') == token_statistics(model, images, ['cosine'])


def test_an_unknown_measure_is_named():
    with pytest.raises(UserError, match="unknown measure 'efective_rank', did you mean effective_rank?"):
        OversmoothingProbe(timm.create_model('test_vit'), measures=['efective_rank'])


@pytest.mark.parametrize(
    ('name', 'stages'),
    [
        ('cvt_13', [0] + [1] * 2 + [2] * 10),
        ('vil_tiny', [0, 1] + [2] * 9 + [3]),
        ('deit_ls_tiny', [0] * 12),
        ('resnet50', [0, 1, 2, 3, 4]),
        ('vit_tiny_patch16_224', [0] * 12),
    ],
)
def test_blocks_belong_to_stages(name, stages):
    with torch.device('meta'):
        model = timm.create_model(name)
    assert OversmoothingProbe(model).blocks.stages == stages


def rank_by_hand(image: torch.Tensor) -> float:
    singular = torch.linalg.eigvalsh(image.double().T @ image.double()).clamp(min=0).sqrt()
    shares = [share for share in (singular / singular.sum()).tolist() if share > 0]
    return torch.tensor(-sum(share * log(share) for share in shares)).exp().item()


def test_effective_rank_counts_directions():
    tokens = torch.randn(3, 11, 5, generator=torch.Generator().manual_seed(0))
    assert effective_rank(tokens).tolist() == pytest.approx([rank_by_hand(image) for image in tokens], rel=1e-4)
    assert effective_rank(torch.ones(1, 9, 4)).item() == pytest.approx(1, abs=1e-4)
    assert effective_rank(torch.eye(6)[None]).item() == pytest.approx(6)
    # two clusters of two tokens each, of equal length and orthogonal
    assert effective_rank(torch.eye(2).repeat_interleave(2, dim=0)[None]).item() == pytest.approx(2)
    assert effective_rank(torch.randn(1, 1, 8)).item() == pytest.approx(1)


def test_residual_is_the_distance_to_equal_tokens():
    tokens = torch.randn(2, 11, 5, generator=torch.Generator().manual_seed(0)) + 1
    expected = []
    for image in tokens:
        mean = sum(image) / 11
        rest = sum((token - mean).square().sum() for token in image)
        expected.append((rest / sum(token.square().sum() for token in image)).sqrt().item())
    assert rank_one_residual(tokens).tolist() == pytest.approx(expected, rel=1e-5)
    assert rank_one_residual(torch.randn(1, 1, 8).expand(1, 9, 8)).item() == pytest.approx(0, abs=1e-6)
    assert rank_one_residual(torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])).item() == pytest.approx(1)
    assert rank_one_residual(torch.eye(2)[None]).item() == pytest.approx(0.5**0.5)


def energy_by_hand(image: torch.Tensor) -> float:
    (H, W, C), high, total = image.shape, 0.0, 0.0
    y, x = torch.arange(H)[:, None], torch.arange(W)
    for u in range(H):
        for v in range(W):
            wave = torch.polar(torch.ones(H, W), -2 * torch.pi * (u * y / H + v * x / W))
            energy = sum((wave * image[..., c]).sum().abs().item() ** 2 for c in range(C))
            total += energy
            # a frequency above one half is a negative one
            high += energy * (max(min(u, H - u) / H, min(v, W - v) / W) > 1 / 4)
    return high / total


def test_high_frequencies_are_those_of_short_waves():
    image = torch.randn(1, 6, 5, 3, generator=torch.Generator().manual_seed(0))
    assert high_frequency_energy(image).item() == pytest.approx(energy_by_hand(image[0]), rel=1e-4)
    assert high_frequency_energy(torch.ones(1, 8, 8, 3)).item() == pytest.approx(0, abs=1e-6)
    chequers = (torch.arange(8)[:, None] + torch.arange(8)).remainder(2).float()[None, :, :, None]
    assert high_frequency_energy(2 * chequers - 1).item() == pytest.approx(1)
    slow = torch.cos(2 * torch.pi * torch.arange(8) / 8).expand(8, 8)[None, :, :, None]
    assert high_frequency_energy(slow).item() == pytest.approx(0, abs=1e-6)
    noise = torch.randn(16, 32, 32, 8, generator=torch.Generator().manual_seed(0))
    # 17 of 32 frequencies are low in each direction
    assert high_frequency_energy(noise).mean().item() == pytest.approx(1 - (17 / 32) ** 2, abs=0.005)


MAPPED = [name for name in vitzoo.list_mixers() if vitzoo.mixers.mixer_class(name).token_weights]


@pytest.mark.parametrize('mixer', MAPPED)
@pytest.mark.parametrize(('grid', 'P'), [((5, 7), 1), ((4, 4), 0)])
def test_attention_weights_are_those_the_mixer_applies(mixer, grid, P):
    torch.manual_seed(0)
    N = P + grid[0] * grid[1]
    attn = vitzoo.create_mixer(mixer, 24, 3, grid_size=grid, num_prefix_tokens=P).eval().double()
    x = torch.randn(2, N, 24, dtype=torch.float64)
    weights = attention_weights(attn, x, grid)
    A = weights.dense()
    assert A.shape == (2, 3, N, N)
    torch.testing.assert_close(attn.project(A @ weights.values), attn(x, grid), rtol=1e-9, atol=1e-9)
    rows = A.sum(dim=-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=0.01 if mixer == 'nystrom' else 1e-9)
    row = torch.rand(2, N, dtype=torch.float64)
    torch.testing.assert_close(weights.pull_back(row), torch.einsum('bn,bhnm->bm', row, A) / 3)


def test_other_values_than_those_that_are_mixed_have_no_weights():
    attn = vitzoo.create_mixer('longformer', 24, 3, grid_size=(4, 4), num_prefix_tokens=1, global_proj=True)
    assert attention_weights(attn, torch.randn(1, 17, 24), (4, 4)) is None


def test_attention_weights_of_timm_are_those_of_the_same_mixer():
    torch.manual_seed(0)
    theirs = timm.layers.Attention(24, 3, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm).eval()
    ours = vitzoo.create_mixer('softmax', 24, 3, grid_size=(4, 4), qk_norm=True).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 16, 24)
    expected = attention_weights(ours, x, (4, 4))
    found = attention_weights(theirs, x, None)
    torch.testing.assert_close(found.dense(), expected.dense())
    row = torch.rand(2, 16)
    torch.testing.assert_close(found.pull_back(row), expected.pull_back(row))


def test_heads_with_equal_maps_are_similar():
    torch.manual_seed(0)
    attn = vitzoo.create_mixer('softmax', 24, 3, grid_size=(3, 3))
    x = torch.randn(2, 9, 24)
    A = attention_weights(attn, x, (3, 3)).dense()
    expected = [brute_force(image.flatten(1)) for image in A]
    assert head_similarity(attn, x, (3, 3)).tolist() == pytest.approx(expected, abs=1e-6)
    # with keys of no length every head attends everything
    attn.qkv.weight.data[24:48] = attn.qkv.bias.data[24:48] = 0
    assert head_similarity(attn, x, (3, 3)).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize('mixer', ['fourier', 'aft_conv', 'xca', 'ls'])
def test_a_mixer_without_a_map_has_no_similar_heads(mixer):
    model = timm.create_model(f'deit_{mixer}_tiny', img_size=32, depth=1).eval()
    assert isnan(token_statistics(model, torch.randn(1, 3, 32, 32), ['head_similarity'])['head_similarity']['mean'][0])


def test_one_head_has_none_to_be_similar_to():
    attn = vitzoo.create_mixer('softmax', 24, 1, grid_size=(3, 3))
    assert head_similarity(attn, torch.randn(2, 9, 24), (3, 3)).isnan().all()


@pytest.mark.parametrize('mixer', ['softmax', 'performer'])
def test_heads_of_a_model_with_rotary_positions_are_compared(mixer):
    model = timm.create_model(f'deit_{mixer}_nano', pos_embed='rope', img_size=32, depth=1).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    (found,) = token_statistics(model, images, ['head_similarity'])['head_similarity']['mean']
    seen = []
    model.blocks[0].attn.register_forward_hook(lambda attn, args, output: seen.append(args))
    with torch.no_grad():
        model(images)
        (x, grid_size, rope) = seen[0]
        maps = [attention_weights(model.blocks[0].attn, image, grid_size, rope).dense()[0] for image in x.split(1)]
    assert found == pytest.approx(sum(brute_force(heads.flatten(1)) for heads in maps) / 2, abs=1e-5)


def test_heads_within_windows_are_not_compared():
    sizes = dict(img_size=64, embed_dim=48, num_heads=4, depth=2, window_size=3, global_attn_indexes=(1,))
    model = vitzoo.swap_mixer(timm.create_model('samvit_base_patch16', **sizes).eval(), 'softmax')
    found = token_statistics(model, torch.randn(2, 3, 64, 64), ['cosine', 'head_similarity'])
    assert [isnan(value) for value in found['head_similarity']['mean']] == [True, False]
    assert not any(isnan(value) for value in found['cosine']['mean'])


@pytest.mark.parametrize('name', ('cvt_13', 'vil_ls_tiny', 'aft_conv_tiny', 'test_resnet', 'vit_tiny_patch16_224'))
def test_every_measure_is_taken_of_every_block(name):
    small = {'aft': dict(depth=2), 'vit': dict(depth=2)}.get(name.partition('_')[0], {})
    model = timm.create_model(name, **(small if 'resnet' in name else dict(img_size=64, **small))).eval()
    found = token_statistics(model, torch.randn(2, 3, 64, 64), MEASURES)
    for measure in list(MEASURES)[:-1]:
        assert len(found[measure]['mean']) == len(found['blocks']) == len(found['stages'])
        assert not any(isnan(value) for value in found[measure]['mean'][:-1])
        assert all(value >= 0 for value in found[measure]['std'][:-1])


@pytest.mark.parametrize('include_cls', (True, False))
def test_a_single_token_of_a_stage_has_no_measure(include_cls):
    model = timm.create_model('cvt_13', img_size=16).eval()
    found = token_statistics(model, torch.randn(2, 3, 16, 16), MEASURES, include_cls=include_cls)
    assert found['grids'][0] == [4, 4] and found['grids'][-1] == [1, 1]
    # the class token of the last stage is a token, but has no place on the grid
    has_two = {'cosine', 'effective_rank', 'rank_one_residual'} if include_cls else set()
    for measure in list(MEASURES)[:-1]:
        assert isnan(found[measure]['mean'][-1]) == (measure not in has_two)
        assert not isnan(found[measure]['mean'][0])


def test_the_way_of_counting_is_on_record():
    model, images = timm.create_model('deit_softmax_tiny', img_size=32, depth=1).eval(), torch.randn(1, 3, 32, 32)
    assert token_statistics(model, images)['options'] == []
    found = token_statistics(model, images, include_self=True, absolute=True, include_cls=True)
    assert found['options'] == ['absolute', 'include_self', 'include_cls']


def test_frequencies_need_a_grid():
    class Dropping(nn.Module):
        feature_info = [{'module': 'drop', 'num_chs': 3, 'reduction': 1}]

        def __init__(self):
            super().__init__()
            self.drop = nn.Identity()

        def forward(self, x):
            return self.drop(x.flatten(2).mT[:, :-3])

    with pytest.raises(UserError, match='13 patch tokens of drop of Dropping do not lie on a grid'):
        token_statistics(Dropping(), torch.randn(1, 3, 4, 4), ['high_frequency_energy'])
    assert len(oversmoothing(Dropping(), torch.randn(1, 3, 4, 4))) == 1


@pytest.mark.parametrize('include_self', [False, True])
def test_absolute_cosines_are_float32_under_autocast(include_self):
    tokens = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0))
    expected = mean_cosine(tokens, absolute=True, include_self=include_self)
    with torch.autocast('cpu', torch.bfloat16):
        found = mean_cosine(tokens, absolute=True, include_self=include_self)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ('name', 'img_size', 'grid_size', 'options'),
    [
        ('vit_tiny_patch16_224', (100, 120), [6, 7], {}),
        ('vit_tiny_patch16_224', (100, 120), [7, 8], dict(dynamic_img_size=True, dynamic_img_pad=True)),
        ('vit_tiny_patch16_224', (16, 79), [1, 4], {}),
        ('vit_small_patch14_reg4_dinov2', (60, 90), [4, 6], {}),
        ('deit_tiny_distilled_patch16_224', (70, 70), [4, 4], {}),
        ('vit_so400m_patch14_siglip_384', None, [27, 27], dict(embed_dim=48, num_heads=3)),
        ('vit_so400m_patch14_siglip_gap_384', None, [27, 27], dict(embed_dim=48, num_heads=3)),
        ('vit_small_r26_s32_224', (96, 80), [3, 3], {}),
        ('eva02_tiny_patch14_224', (60, 90), [4, 6], {}),
        ('vit_small_patch16_dinov3', (96, 112), [6, 7], {}),
        ('beit_base_patch16_224', (100, 120), [6, 7], dict(embed_dim=48, num_heads=3)),
        ('cait_xxs24_224', (100, 120), [6, 7], {}),
    ],
    ids=str,
)
def test_prefix_tokens_are_not_counted_if_patches_do_not_divide_the_image(name, img_size, grid_size, options):
    torch.manual_seed(0)
    size = {} if img_size is None else dict(img_size=img_size)
    model = timm.create_model(name, depth=2, **size, **options).eval()
    images = torch.randn(2, 3, *(img_size or (384, 384)))
    outputs = []
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    found = token_statistics(model, images, ['cosine', 'effective_rank', 'high_frequency_energy'])
    # the patches are the last tokens
    patches = outputs[0][:, -grid_size[0] * grid_size[1] :]
    assert found['grids'][-1] == grid_size
    assert found['cosine']['mean'][-1] == pytest.approx(mean_cosine(patches).mean().item(), abs=1e-6)
    assert found['effective_rank']['mean'][-1] == pytest.approx(effective_rank(patches).mean().item(), rel=1e-5)
    energy = high_frequency_energy(patches.unflatten(1, grid_size)).mean().item()
    assert found['high_frequency_energy']['mean'][-1] == pytest.approx(energy, rel=1e-4)


def test_prefix_tokens_that_cannot_be_found_are_not_counted_as_patches():
    model = timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2).eval()
    # a block that merges tokens, as in ToMe
    model.blocks[0].register_forward_hook(lambda module, inputs, output: output[:, :-3])
    with pytest.raises(UserError, match='cannot tell the 1 prefix tokens of VisionTransformer from its patches'):
        oversmoothing(model, torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize('name', ['resnet10t', 'test_efficientnet'])
def test_blocks_that_gradient_checkpointing_does_not_call_are_an_error(name):
    model, images = timm.create_model(name).eval(), torch.randn(2, 3, 64, 64)
    expected = oversmoothing(model, images)
    model.set_grad_checkpointing()
    with pytest.raises(UserError, match='does not call its blocks .*; if gradient checkpointing is on'):
        oversmoothing(model, images)
    model.set_grad_checkpointing(False)
    torch.testing.assert_close(oversmoothing(model, images), expected, equal_nan=True)


def test_a_probe_that_saw_no_images_has_no_rows():
    with OversmoothingProbe(timm.create_model('test_vit')) as probe:
        assert probe.per_image().shape[0] == 0
