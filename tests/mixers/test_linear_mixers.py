"""Linear, low-rank and projection-free mixers: their limits, their geometry and their cost."""

import itertools
import math

import pytest
import torch
from helpers import DIM, GRID, HEADS, assert_near, build, qkv, relative_error, tokens
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from vitzoo import create_mixer
from vitzoo.metrics.macs import count_call_macs
from vitzoo.mixers._qkv import ConvQKV
from vitzoo.mixers.global_memory import global_memory_attention
from vitzoo.mixers.hydra import hydra_attention
from vitzoo.mixers.linear import linear_attention
from vitzoo.mixers.linformer import linformer_attention
from vitzoo.mixers.rfa import rfa
from vitzoo.mixers.softmax import softmax_naive
from vitzoo.mixers.srformer import spatial_reduction
from vitzoo.mixers.xca import xca


def test_linear_attention_is_accurate_if_its_features_underflow():
    q, k, v = qkv(16)
    # elu(x) + 1 = exp(x) far below 0, so a shift of all keys or all queries by a constant cancels
    expected = linear_attention(q - 20, k - 20, v)
    assert_near(linear_attention(q - 2000, k - 3000, v), expected, 1e-6)
    assert linear_attention((q - 200).float(), (k - 200).float(), v.float()).isfinite().all()


def test_linear_attention_of_one_token_is_its_value():
    q, k, v = qkv(1)
    assert_near(linear_attention(q, k, v), v)


def test_hydra_is_linear_attention_with_a_head_per_channel():
    q, k, v = qkv(10)
    tokens_q, tokens_k, tokens_v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    # (B, dim, N, 1)
    q1, k1 = (F.normalize(x, dim=-1).mT.unsqueeze(-1) for x in (tokens_q, tokens_k))
    expected = q1 @ (k1.mT @ tokens_v.mT.unsqueeze(-1))
    assert_near(hydra_attention(q, k, v).transpose(1, 2).flatten(2), expected.squeeze(-1).mT)


def test_hydra_does_not_depend_on_the_number_of_heads():
    one, three = (build('hydra', num_heads=heads) for heads in (1, 3))
    three.load_state_dict(one.state_dict())
    x = tokens(one)
    assert_near(three(x, GRID), one(x, GRID))


def test_xca_is_softmax_attention_with_tokens_and_channels_exchanged():
    q, k, v = qkv(9)
    temperature = torch.tensor([2.0, 0.5], dtype=torch.float64).reshape(2, 1, 1)
    turned = [F.normalize(x, dim=2).mT for x in (q, k)] + [v.mT]
    for head in range(2):
        one = [x[:, head : head + 1] for x in turned]
        expected = softmax_naive(*one, temperature[head].item()).mT
        assert_near(xca(q, k, v, temperature)[:, head : head + 1], expected)


def test_xca_does_not_change_with_the_scale_of_queries_and_keys():
    q, k, v = qkv(9)
    temperature = torch.ones(2, 1, 1, dtype=torch.float64)
    assert_near(xca(1e3 * q, 1e-3 * k, v, temperature), xca(q, k, v, temperature))


@pytest.mark.parametrize(
    'name', ['flowformer', 'global', 'hedgehog', 'hydra', 'linear', 'relu_linear', 'rfa', 'set', 'xca']
)
def test_mixers_without_positions_follow_a_permutation_of_the_tokens(name):
    mixer = build(name)
    x, order = tokens(mixer), torch.randperm(20, generator=torch.Generator().manual_seed(2))
    assert_near(mixer(x[:, order], GRID), mixer(x, GRID)[:, order])


def unit_softmax(q, k, v, sigma):
    return softmax_naive(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, sigma**2)


def directions(num_features, seed, heads=2, d=8):
    return torch.randn(heads, num_features, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize('sigma', [0.5, 1.5])
def test_rfa_error_falls_towards_softmax_of_unit_vectors_as_features_grow(sigma):
    q, k, v = qkv(32)
    expected = unit_softmax(q, k, v, sigma)
    sigmas = torch.full((2, 8), sigma, dtype=torch.float64)
    errors = []
    for num_features in (32, 512, 8192):
        runs = [relative_error(rfa(q, k, v, directions(num_features, s), sigmas), expected) for s in range(4)]
        errors.append(sum(runs) / len(runs))
    # a Monte Carlo error falls with the square root of the number of samples: 16 times more, 4 times less
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2
    assert errors[2] < 0.2


def test_sigma_is_the_temperature_of_each_channel():
    q, k, v = qkv(16)
    sigma = torch.rand(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    q_unit, k_unit = (sigma.unsqueeze(1) * F.normalize(x, dim=-1) for x in (q, k))
    kernel = (-torch.cdist(q_unit, k_unit).square() / 2).exp()
    expected = kernel / kernel.sum(dim=-1, keepdim=True) @ v
    assert relative_error(rfa(q, k, v, directions(20_000, 0), sigma), expected) < 0.05


def test_rfa_normalizer_is_positive_if_the_estimate_is_negative():
    q, k, v = qkv(4)
    k = -q.clone()
    out = rfa(q, k, v, directions(1, 0), torch.full((2, 8), 3.0, dtype=torch.float64))
    # |phi . phi| <= 1 and the normalizer is at least 0.01 per key
    assert out.abs().amax() <= 100 * v.abs().amax()


def test_rfa_has_the_normalizer_of_the_authors_with_their_floor():
    q, k, v = qkv(20)
    # many queries opposite to many keys, so that some normalizers are at the floor
    q[:, :, ::2] = -k[:, :, ::2]
    W = directions(16, 0)
    # random_feature_attention/rfa.py: features of length 0.4, and a normalizer of at least 1
    phi_q, phi_k = (
        0.1 * torch.cat([f(F.normalize(x, dim=-1) @ W.mT) for f in (torch.sin, torch.cos)], -1) for x in (q, k)
    )
    normalizer = (phi_q @ phi_k.sum(dim=2).unsqueeze(-1)).clamp(min=1)
    assert 0 < (normalizer == 1).double().mean() < 1
    sigma = torch.ones(2, 8, dtype=torch.float64)
    assert_near(rfa(q, k, v, W, sigma, floor=100 / 16), phi_q @ (phi_k.mT @ v) / normalizer)
    with pytest.raises(ValueError, match='floor of rfa must be positive, not 0'):
        build('rfa', floor=0)


def test_gates_of_zero_forget_and_gates_of_one_remember():
    q, _, v = qkv(20)
    sigma = torch.ones(2, 8, dtype=torch.float64)

    def gated(logit):
        # keys that are queries: a token's own feature is 1
        return rfa(q, q, v, directions(64, 0), sigma, torch.full((2, 2, 20), logit, dtype=torch.float64))

    # g = 0: the output of a token is its own value; g = 1: all tokens have the same weight
    assert_near(gated(-40.0), v)
    assert_near(gated(20.0), rfa(q, q, v, directions(64, 0), sigma), 1e-6)


def test_a_gate_of_zero_hides_the_tokens_before_it():
    q, k, _ = qkv(12)
    v = torch.zeros(2, 2, 12, 8, dtype=torch.float64)
    v[:, :, 2] = 1
    gate = torch.full((2, 2, 12), 3.0, dtype=torch.float64)
    gate[:, :, 6] = -30
    sigma = torch.full((2, 8), 0.1, dtype=torch.float64)
    # sigma near 0: all kernels are 1 and the output is the share of token 2
    share = rfa(q, k, v, directions(64, 0), sigma, gate)[..., 0].mean(dim=(0, 1))
    assert share[3:6].min() > 0.02
    assert share[6:].abs().max() < 1e-6


def test_gates_have_no_effect_on_prefix_tokens_as_keys():
    mixer = build('rfa', num_prefix_tokens=1, gate=True)
    x = tokens(mixer)
    moved = x.clone()
    moved[:, 0] += 1
    changed = (mixer(moved, GRID) - mixer(x, GRID)).abs().amax(dim=(0, 2))
    assert changed.min() > 1e-4


@pytest.mark.parametrize('num_prefix_tokens', [0, 1])
@pytest.mark.parametrize('share_kv, share_heads', [(False, False), (False, True), (True, False), (True, True)])
def test_linformer_with_a_rank_per_token_and_identity_projections_is_softmax(
    share_kv, share_heads, num_prefix_tokens
):  # fmt: skip
    N = num_prefix_tokens + 20
    mixer = build('linformer', num_prefix_tokens=num_prefix_tokens, rank=N, share_kv=share_kv, share_heads=share_heads)
    with torch.no_grad():
        for name in mixer.projections():
            getattr(mixer, name).copy_(torch.eye(N))
    softmax = build('softmax', num_prefix_tokens=num_prefix_tokens)
    softmax.load_state_dict({k: v for k, v in mixer.state_dict().items() if not k.startswith('proj_')})
    x = tokens(mixer)
    assert_near(mixer(x, GRID), softmax(x, GRID))


def test_linformer_shares_projections_between_keys_and_values_and_between_heads():
    count = {
        (kv, heads): sum(p.numel() for n, p in build('linformer', rank=7, share_kv=kv, share_heads=heads)
                         .named_parameters() if n in ('proj_k', 'proj_v'))
        for kv, heads in itertools.product([False, True], repeat=2)
    }  # fmt: skip
    one = 20 * 7
    assert count == {(True, True): one, (False, True): 2 * one, (True, False): 3 * one, (False, False): 6 * one}


@pytest.mark.parametrize('num_prefix_tokens', [0, 2])
@pytest.mark.parametrize('kwargs', [{}, {'share_kv': True}, {'qkv_bias': False}], ids=str)
def test_linformer_of_summed_tokens_is_that_of_summed_keys(kwargs, num_prefix_tokens):
    mixer = build('linformer', num_prefix_tokens=num_prefix_tokens, rank=5, **kwargs)
    if mixer.qkv.bias is not None:
        torch.nn.init.normal_(mixer.qkv.bias)
    found = []
    for sum_first in (True, False):
        mixer.sum_first = sum_first
        x = tokens(mixer).requires_grad_()
        out = mixer(x, GRID)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()])])
    for fast, papers in zip(*found, strict=True):
        assert_near(fast, papers)


@pytest.mark.parametrize(
    'kwargs, is_cheaper',
    [({}, True), ({'share_heads': False}, False), ({'qk_norm': True}, False), ({'rank': 20}, False),
     ({'sum_first': False}, False), ({'qkv_layer': ConvQKV}, False)],
    ids=str,
)  # fmt: skip
def test_linformer_sums_tokens_first_where_that_is_the_same_and_saves_products(kwargs, is_cheaper):
    mixer = build('linformer', **{'rank': 3, **kwargs}).float()
    x = torch.empty(1, 20, DIM, device='meta')
    default = count_call_macs(mixer, x, GRID)
    mixer.sum_first = False
    assert (default < count_call_macs(mixer, x, GRID)) == is_cheaper


def test_linformer_runs_a_layer_that_has_hooks():
    mixer = build('linformer', rank=3)
    x = tokens(mixer)
    expected = mixer(x, GRID)
    seen = []
    handle = mixer.qkv.register_forward_hook(lambda *args: seen.append(1))
    assert_near(mixer(x, GRID), expected)
    handle.remove()
    assert seen == [1]
    # pruning computes the weight in a hook
    prune.l1_unstructured(mixer.qkv, 'weight', amount=0.5)
    with torch.no_grad():
        mixer.qkv.weight_orig.mul_(2)
    pruned = mixer(x, GRID)
    prune.remove(mixer.qkv, 'weight')
    assert_near(mixer(x, GRID), pruned)


@pytest.mark.parametrize('share_heads', [True, False])
def test_a_resampled_linformer_sums_a_smooth_image_to_the_same_keys(share_heads):
    torch.manual_seed(0)
    kwargs = dict(num_prefix_tokens=1, rank=3, share_heads=share_heads, dtype=torch.float64)
    mixer = create_mixer('linformer', DIM, HEADS, grid_size=(4, 4), **kwargs)
    k = torch.randn(1, HEADS, 1, 4, dtype=torch.float64)
    q = torch.randn(1, HEADS, 1, 4, dtype=torch.float64)

    def attended():
        N = 1 + mixer.grid_size[0] * mixer.grid_size[1]
        sums = k.expand(-1, -1, N, -1)
        return linformer_attention(q, sums, sums, mixer.proj_k, mixer.proj_v, 1.0)

    prefix, before = mixer.proj_k[:, :1].clone(), attended()
    mixer.set_input_size((12, 8))
    assert mixer.proj_k.shape[1] == 1 + 12 * 8
    assert torch.equal(mixer.proj_k[:, :1], prefix)
    # bicubic weights near the border do not sum to exactly one per source token
    assert relative_error(attended(), before) < 0.1


def test_linformer_is_resampled_along_rows_and_columns():
    mixer = build('linformer', (4, 4), rank=1)
    rows = torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 4)
    with torch.no_grad():
        mixer.proj_k.copy_(rows.reshape(1, 16, 1))
    mixer.set_input_size((4, 8))
    got = mixer.proj_k.detach().reshape(4, 8)
    # still constant along a row, and half as large for twice as many tokens
    assert_near(got, rows[:, :1].expand(4, 8) / 2, 1e-5)


@pytest.mark.parametrize(
    'name, kwargs', [('linformer', {}), ('synthesizer', {}), ('synthesizer', {'variant': 'random'})]
)
def test_parameters_of_another_grid_are_refused(name, kwargs):
    mixer = build(name, **kwargs)
    with pytest.raises(ValueError, match='made for a 4 x 5 grid and got 5 x 4'):
        mixer(tokens(mixer), (5, 4))


@pytest.mark.parametrize('norm', ['layer', 'instance'])
def test_srformer_is_the_papers_formula(norm):
    mixer = build('srformer', (4, 6), num_prefix_tokens=1, sr_ratio=2, norm=norm)
    x = tokens(mixer)
    patches = x[:, 1:].reshape(2, 2, 2, 3, 2, DIM).permute(0, 1, 3, 5, 2, 4).reshape(2, 6, DIM * 4)
    reduced = patches @ mixer.sr.weight.reshape(DIM, DIM * 4).T
    if norm == 'layer':
        reduced = F.layer_norm(reduced + mixer.sr.bias, (DIM,), mixer.norm.weight, mixer.norm.bias)
    else:
        reduced = F.instance_norm(reduced.mT).mT
    keys = torch.cat([x[:, :1], reduced], dim=1)
    q = mixer.q(x).reshape(2, 25, HEADS, 4).transpose(1, 2)
    k, v = mixer.kv(keys).reshape(2, 7, 2, HEADS, 4).permute(2, 0, 3, 1, 4)
    expected = mixer.proj(softmax_naive(q, k, v, 0.5).transpose(1, 2).flatten(2))
    assert_near(mixer(x, (4, 6)), expected)


def test_srformer_without_reduction_is_softmax():
    mixer, softmax = build('srformer', sr_ratio=1), build('softmax')
    state = mixer.state_dict()
    merged = {f'qkv.{name}': torch.cat([state[f'q.{name}'], state[f'kv.{name}']]) for name in ('weight', 'bias')}
    softmax.load_state_dict({**merged, 'proj.weight': state['proj.weight'], 'proj.bias': state['proj.bias']})
    x = tokens(mixer)
    assert_near(mixer(x, GRID), softmax(x, GRID))


@pytest.mark.parametrize('norm', ['layer', 'instance'])
@pytest.mark.parametrize('grid_size, num_keys', [((1, 1), 1), ((1, 7), 2), ((2, 2), 1), ((3, 3), 1), ((5, 8), 2)])
def test_srformer_runs_on_grids_its_patches_do_not_fit(grid_size, num_keys, norm):
    mixer = build('srformer', grid_size, sr_ratio=3, norm=norm).train()
    x = tokens(mixer).requires_grad_()
    assert spatial_reduction(x, mixer.sr, mixer.norm, grid_size).shape == (2, num_keys, DIM)
    mixer(x, grid_size).sum().backward()
    assert x.grad.isfinite().all()


def test_random_synthesizer_with_the_scores_of_softmax_is_softmax():
    softmax, mixer = build('softmax'), build('synthesizer', variant='random')
    x = tokens(mixer, batch_size=1)
    q, k, _ = softmax.to_qkv(x, GRID)
    with torch.no_grad():
        mixer.scores.table.copy_(softmax.scale * (q @ k.mT)[0])
        mixer.v.weight.copy_(softmax.qkv.weight[-DIM:])
        mixer.v.bias.copy_(softmax.qkv.bias[-DIM:])
    mixer.proj.load_state_dict(softmax.proj.state_dict())
    assert_near(mixer(x, GRID), softmax(x, GRID))


def test_a_random_synthesizer_is_resampled_in_queries_and_in_keys():
    mixer = build('synthesizer', (3, 3), num_prefix_tokens=1, variant='random')
    y, x = torch.arange(3.0).repeat_interleave(3), torch.arange(3.0).repeat(3)
    with torch.no_grad():
        # the score is the query's row minus ten times the key's column
        mixer.scores.table[:, 1:, 1:] = y[:, None].double() - 10 * x.double()
    prefix = mixer.scores.table[:, 0, 0].clone()
    mixer.set_input_size((3, 6))
    table = mixer.scores.table.detach()
    assert table.shape == (HEADS, 19, 19) and torch.equal(table[:, 0, 0], prefix)
    grid = table[0, 1:, 1:].reshape(3, 6, 3, 6)
    # rows are unchanged and columns are resampled: no score depends on the query's column or the key's row
    assert_near(grid.std(dim=1), torch.zeros(3, 3, 6, dtype=torch.float64), 1e-5)
    assert_near(grid.std(dim=2), torch.zeros(3, 6, 6, dtype=torch.float64), 1e-5)
    assert (grid[0, 0, 0].diff() < 0).all()


@pytest.mark.parametrize('variant', ['factorized_dense', 'factorized_random'])
def test_saved_configs_with_the_british_spelling_of_a_synthesizer_still_load(variant):
    mixer, old = (build('synthesizer', variant=name) for name in (variant, variant.replace('z', 's')))
    assert type(old.scores) is type(mixer.scores)


def test_only_the_low_rank_synthesizer_has_a_rank():
    with pytest.raises(ValueError, match='factorized_random'):
        build('synthesizer', variant='dense', rank=4)
    with pytest.raises(ValueError, match='variant of synthesizer is one of dense, random'):
        build('synthesizer', variant='sparse')


def test_one_inducing_point_gives_every_token_the_same():
    mixer = build('set', num_inducing=1)
    out = mixer(tokens(mixer), GRID)
    assert_near(out, out[:, :1].expand_as(out))


def test_inducing_points_start_as_in_the_set_transformer():
    # its parameter has the shape (1, m, dim), whose last dimension xavier_uniform_ takes for that of a convolution
    m, dim = 64, 96
    points = create_mixer('set', dim, 3, grid_size=GRID, num_inducing=m).inducing
    bound = math.sqrt(6 / (dim * (m + 1)))
    assert 0.99 * bound < points.abs().max() <= bound


def test_the_order_of_inducing_points_does_not_matter():
    mixer = build('set', num_inducing=5)
    x = tokens(mixer)
    before = mixer(x, GRID)
    with torch.no_grad():
        mixer.inducing.copy_(mixer.inducing[torch.tensor([3, 0, 4, 1, 2])])
    assert_near(mixer(x, GRID), before)


def test_global_attention_without_memory_tokens_is_masked_softmax_with_global_prefix_tokens():
    P = 2
    mixer = build('global', num_prefix_tokens=P, num_global=0)
    x = tokens(mixer)
    q, k, v = mixer.to_qkv(x, GRID)
    scores = mixer.scale * q @ k.mT
    is_global = torch.arange(P + 20) < P
    scores = scores.masked_fill(~(is_global[:, None] | is_global), -torch.inf)
    expected = mixer.project(scores.softmax(dim=-1) @ v)
    assert_near(mixer(x, GRID), expected)


def test_global_attention_with_only_global_tokens_is_softmax():
    q, k, v = qkv(9)
    assert_near(global_memory_attention(q, k, v, 0, 9, 0.3), softmax_naive(q, k, v, 0.3))


def test_memory_tokens_connect_all_grid_tokens_in_one_layer():
    mixer = build('global', num_global=2)
    x = tokens(mixer)
    moved = x.clone()
    moved[:, 0] += 1
    changed = (mixer(moved, GRID) - mixer(x, GRID)).abs().amax(dim=(0, 2))
    assert changed.min() > 1e-5


def test_global_attention_without_any_memory_is_refused():
    with pytest.raises(ValueError, match='num_global of at least 1 with 0 prefix tokens'):
        build('global', num_global=0)


def test_pool_is_the_mean_of_the_neighbourhood_inside_the_grid_minus_the_token():
    mixer = build('pool', num_prefix_tokens=1)
    x = tokens(mixer)
    image = x[:, 1:].unflatten(1, GRID)
    out = mixer(x, GRID)
    grid = out[:, 1:].unflatten(1, GRID)
    assert_near(grid[:, 1, 2], image[:, 0:3, 1:4].mean(dim=(1, 2)) - image[:, 1, 2])
    # positions outside the grid do not count
    assert_near(grid[:, 0, 2], image[:, 0:2, 1:4].mean(dim=(1, 2)) - image[:, 0, 2])
    assert_near(grid[:, 3, 4], image[:, 2:4, 3:5].mean(dim=(1, 2)) - image[:, 3, 4])
    assert_near(out[:, 0], x.mean(dim=1) - x[:, 0])


def test_pool_of_equal_tokens_is_zero():
    x = torch.full((1, 20, DIM), 3.0, dtype=torch.float64)
    assert_near(build('pool', pool_size=5)(x, GRID), torch.zeros_like(x))


def test_fourier_is_the_real_part_of_a_transform_of_rows_columns_and_channels():
    mixer = build('fourier')
    x = tokens(mixer)
    image = x.unflatten(1, GRID)
    spectrum = torch.fft.fft(torch.fft.fft2(image, dim=(1, 2)), dim=3)
    assert_near(mixer(x, GRID), (spectrum.real / math.sqrt(20 * DIM)).flatten(1, 2))


def test_fourier_on_one_row_is_fnets_transform_of_the_sequence():
    mixer = build('fourier', (1, 9))
    x = tokens(mixer)
    assert_near(mixer(x, (1, 9)), torch.fft.fft2(x).real / math.sqrt(9 * DIM))


def test_a_prefix_token_gets_the_zero_frequency_as_fnets_class_token_does():
    mixer = build('fourier', (1, 9), num_prefix_tokens=1)
    x = tokens(mixer)
    fnet = torch.fft.fft2(x).real / math.sqrt(10 * DIM)
    assert_near(mixer(x, (1, 9))[:, 0], fnet[:, 0])


def test_the_fourier_transform_keeps_the_scale_of_the_tokens():
    mixer = build('fourier', (16, 16), dim=48)
    x = tokens(mixer)
    out = mixer(x, (16, 16))
    # the real part has half of the energy, which the transform keeps
    assert out.square().mean() / x.square().mean() == pytest.approx(0.5, rel=0.1)


def macs(name, side, **kwargs):
    grid_size = (side, side)
    mixer = create_mixer(name, 48, 3, grid_size=grid_size, num_prefix_tokens=1, device='meta', **kwargs)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer(torch.empty(1, 1 + side * side, 48, device='meta'), grid_size)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    'name, kwargs',
    [
        *((name, {}) for name in ('agent', 'cosformer', 'flowformer', 'focused', 'hedgehog', 'inline', 'mala', 'mhla')),
        ('polaformer', {}),
        ('relu_linear', {'scales': (5,)}),
        ('linear', {'dwc': 'qk', 'center_keys': True}),
        ('global', {}),
        ('hydra', {}),
        ('linear', {}),
        ('linformer', {}),
        ('nystrom', {}),
        ('nystrom', {'landmarks': 'grid'}),
        ('performer', {}),
        ('rfa', {}),
        ('rfa', {'gate': True}),
        ('set', {}),
        ('xca', {}),
    ],
)
def test_the_cost_of_linear_mixers_grows_with_the_number_of_tokens(name, kwargs):
    assert macs(name, 56, **kwargs) / macs(name, 28, **kwargs) <= 4.3


@pytest.mark.parametrize('variant', ['dense', 'random', 'factorized_dense', 'factorized_random'])
def test_the_cost_of_synthesizers_is_quadratic(variant):
    assert 8 < macs('synthesizer', 56, variant=variant) / macs('synthesizer', 28, variant=variant) <= 16.1


def test_the_cost_of_spatial_reduction_falls_with_its_ratio():
    costs = [macs('softmax', 56)] + [macs('srformer', 56, sr_ratio=r) for r in (2, 4, 8)]
    assert costs == sorted(costs, reverse=True)
    assert costs[3] < costs[0] / 5


def test_fourier_has_a_formula_for_its_cost():
    n = 28 * 28 * 48
    transform_of_prefix = 5 * 48 * math.log2(48) / 2
    assert macs('fourier', 28) == pytest.approx(5 * n * math.log2(n) / 2 + transform_of_prefix, rel=1e-3)
