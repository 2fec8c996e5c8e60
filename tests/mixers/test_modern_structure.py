"""Structural mixers of 2021 to 2026, against the authors' classes and implementations of others."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import (
    DIM,
    GRID,
    HEADS,
    assert_near,
    assert_output_and_gradient_of_official_code,
    build,
    golden,
    recorded_on_grid,
    relative_error,
    tokens,
)
from timm.models.swin_transformer import SwinTransformerBlock
from torch import nn

from vitzoo import create_mixer
from vitzoo.mixers import _gated_scan
from vitzoo.mixers._wide_layers import WideLayerNorm
from vitzoo.mixers.gated_linear import gated_linear_attention, gated_linear_naive
from vitzoo.mixers.monarch import monarch_attention


@pytest.mark.parametrize('layer', [0, 1])
@pytest.mark.parametrize(('grid', 'window_size'), [((8, 12), 4), ((6, 12), 3), ((4, 8), 4), ((5, 14), 7)])
def test_swin_is_timms_block_on_a_grid_of_whole_windows(grid, window_size, layer):
    torch.manual_seed(0)
    shift = window_size // 2 * layer
    # timm's windows take the size of a smaller grid
    sizes = tuple(min(side, window_size) for side in grid)
    block = SwinTransformerBlock(DIM, grid, HEADS, window_size=window_size, shift_size=shift).double()
    block.norm1 = nn.Identity()
    mixer = create_mixer('swin', DIM, HEADS, grid_size=grid, layer=layer, window_size=window_size).double()
    weights = block.attn.state_dict()
    table = mixer.rel_bias.table.data.unflatten(0, (2 * window_size - 1, -1))
    rows, columns = (slice(window_size - size, window_size + size - 1) for size in sizes)
    new = torch.randn_like(table[rows, columns])
    table[rows, columns] = new
    weights['relative_position_bias_table'] = new.flatten(0, 1)
    block.attn.load_state_dict(weights)
    mixer.load_state_dict({key: weights[key] for key in weights if not key.startswith('rel')}, strict=False)
    x = torch.randn(2, grid[0] * grid[1], DIM, dtype=torch.float64)
    expected = block._attn(x.unflatten(1, grid)).flatten(1, 2)
    assert_near(mixer(x, grid), expected)


def test_swin_in_one_window_without_bias_is_softmax():
    mixer = build('swin', num_prefix_tokens=1, window_size=5, rel_bias='none', shift=True)
    softmax = build('softmax', num_prefix_tokens=1)
    softmax.load_state_dict(mixer.state_dict())
    assert_near(mixer(tokens(mixer), GRID), softmax(tokens(mixer), GRID))


@pytest.mark.parametrize(
    ('size', 'kernel_size', 'dilation', 'position', 'expected'),
    [
        (9, 3, 1, 4, [3, 4, 5]),
        (9, 3, 1, 0, [0, 1, 2]),
        (9, 3, 1, 8, [6, 7, 8]),
        (9, 4, 1, 4, [2, 3, 4, 5]),
        (9, 4, 1, 7, [5, 6, 7, 8]),
        (9, 3, 2, 1, [1, 3, 5]),
        (9, 3, 2, 7, [3, 5, 7]),
        (9, 3, 2, 8, [4, 6, 8]),
        (10, 5, 3, 8, [2, 5, 8]),
    ],
)
def test_neighborhood_attends_the_positions_that_natten_documents(size, kernel_size, dilation, position, expected):
    # along a grid of one row, with equal scores: the weights of one-hot values
    options = dict(kernel_size=kernel_size, dilation=dilation, rel_bias='none')
    mixer = create_mixer('neighborhood', DIM, HEADS, grid_size=(1, size), **options)
    zeros, values = torch.zeros(1, HEADS, size, 4), torch.eye(size).expand(1, HEADS, -1, -1)
    weights = mixer.mix(zeros, zeros, values, (1, size))[0, 0, position]
    assert weights.nonzero().flatten().tolist() == expected


@pytest.mark.parametrize(('grid', 'num_prefix_tokens'), [((20, 1), 0), ((20, 1), 2), ((1, 20), 0)])
def test_monarch_of_one_row_or_column_is_softmax(grid, num_prefix_tokens):
    mixer = build('monarch', grid, num_prefix_tokens)
    softmax = build('softmax', grid, num_prefix_tokens)
    softmax.load_state_dict(mixer.state_dict())
    assert_near(mixer(tokens(mixer), grid), softmax(tokens(mixer), grid))


def test_each_step_of_monarch_brings_its_weights_closer_to_the_maximum_of_softmax():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 20, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    scores = q @ k.mT
    objectives = []
    for num_steps in (1, 2, 4, 16):
        weights = monarch_attention(q, k, torch.eye(20, dtype=torch.float64)[None, None], GRID, num_steps, 1.0)
        assert_near(weights.sum(dim=-1), torch.ones(1, 1, 20, dtype=torch.float64))
        objectives.append(((scores - weights.log()) * weights).sum().item())
    assert objectives == sorted(objectives)
    assert objectives[0] < objectives[-1] < scores.logsumexp(dim=-1).sum().item()


def test_monarch_is_softmax_if_its_weights_are_a_product_of_the_two_factors():
    generator = torch.Generator().manual_seed(0)
    (H, W), d = GRID, 4

    def draw(*shape):
        return torch.randn(1, 2, *shape, d, generator=generator, dtype=torch.float64)

    # scores are a sum of one that depends on the row of the key only, and one without the row of the query
    q = torch.cat([draw(H, W), draw(1, W).expand(-1, -1, H, -1, -1)], dim=-1).flatten(2, 3)
    k = torch.cat([draw(H, 1).expand(-1, -1, -1, W, -1), draw(H, W)], dim=-1).flatten(2, 3)
    v = draw(H * W)
    for num_steps in (1, 3):
        assert_near(monarch_attention(q, k, v, GRID, num_steps, 0.7), (0.7 * q @ k.mT).softmax(dim=-1) @ v)


def test_each_update_of_monarch_is_the_maximum_of_its_objective_over_one_factor():
    generator = torch.Generator().manual_seed(0)
    (H, W), P = GRID, 1
    q, k = (torch.randn(1, 1, P + H * W, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    one_hot = torch.eye(P + H * W, dtype=torch.float64)[None, None]
    scores = (q @ k.mT)[0, 0, P:]
    to_prefix, scores = scores[:, :P].unflatten(0, GRID), scores[:, P:].unflatten(1, GRID).unflatten(0, GRID)
    left = torch.eye(H, dtype=torch.float64)[:, None].expand(H, W, H)  # (y, x, y')
    prefix = torch.zeros(H, W, P, dtype=torch.float64)
    for num_steps in (1, 2, 3):
        weights = monarch_attention(q, k, one_hot, GRID, num_steps, 1.0)[0, 0, P:]
        dense = weights[:, P:].unflatten(1, GRID).unflatten(0, GRID)  # (y, x, y', x')
        old_left, old_prefix = left, prefix
        left, prefix = dense.sum(dim=3), weights[:, :P].unflatten(0, GRID)
        right = (dense / left.unsqueeze(3))[0]  # (x, y', x'), the same for every y

        def objective(rows, right):
            of_prefix, to_rows = rows.split([P, H], dim=2)
            # the entropy of a product is that of its rows, and of the columns in them
            within = right * scores + torch.special.entr(right)
            of_grid = (to_rows.unsqueeze(3) * within).sum()
            return of_grid + (of_prefix * to_prefix).sum() + torch.special.entr(rows).sum()

        # concave in each factor, and 0 at a maximum over rows that sum to 1
        logits = right.log().requires_grad_()
        old_rows, rows = torch.cat([old_prefix, old_left], dim=2), torch.cat([prefix, left], dim=2)
        (gradient,) = torch.autograd.grad(objective(old_rows, logits.softmax(dim=2)), logits)
        assert gradient.abs().max() < 1e-12
        logits = rows.log().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(logits.softmax(dim=2), right), logits)
        assert gradient.abs().max() < 1e-12


def test_monarch_converges_to_a_stationary_point_of_its_objective():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 20, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = monarch_attention(q, k, torch.eye(20, dtype=torch.float64)[None, None], GRID, 500, 1.0)
    dense = weights[0, 0].unflatten(1, GRID).unflatten(0, GRID)  # (y, x, y', x')
    left = dense.sum(dim=3, keepdim=True)
    right = (dense.sum(dim=0, keepdim=True) / left.sum(dim=0, keepdim=True)).detach()  # (1, x, y', x')
    logits = [factor.log().requires_grad_() for factor in (left.detach(), right)]
    product = logits[0].softmax(dim=2) * logits[1].softmax(dim=3)
    assert_near(product, dense)
    scores = (q @ k.mT)[0, 0].reshape(product.shape)
    gradients = torch.autograd.grad(((scores - product.log()) * product).sum(), logits)
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients)


@pytest.mark.parametrize('cached', [1, 1500, 10**6])
@pytest.mark.parametrize('num_tokens', [1, 15, 16, 17, 32, 33, 64, 75, 150])
def test_gated_linear_is_its_recurrence_for_any_number_of_chunks_and_heads_at_once(num_tokens, cached, monkeypatch):
    monkeypatch.setattr(_gated_scan, 'CACHED', cached)
    generator = torch.Generator().manual_seed(0)
    # one prefix token; decays from 0 to 1
    q, k, v, gate = (torch.randn(3, 2, num_tokens + 1, 4, generator=generator).double() for _ in range(4))
    decays = [20 * torch.randn(3, 2, num_tokens, 4, generator=generator).double() for _ in range(2)]
    args, norm = [x.requires_grad_() for x in (q, k, v, *decays, gate)], WideLayerNorm(4).double()
    fast, naive = gated_linear_attention(*args, norm, 0.7), gated_linear_naive(*args, norm, 0.7)
    assert_near(fast, naive)
    args += norm.parameters()
    expected = torch.autograd.grad(naive.square().sum(), args)
    for create_graph in (False, True):
        grads = torch.autograd.grad(fast.square().sum(), args, create_graph=create_graph, retain_graph=True)
        for one, other in zip(grads, expected, strict=True):
            assert_near(one, other)


# 1 / limit ** (1 / 3) is near exp(-236): products of 16 factors in and out of range, and without chunks of any size
@pytest.mark.parametrize(('shift', 'chunks'), [(220, (32, 16)), (260, (32, 16)), (440, (32, 16)), (140, ())])
@pytest.mark.parametrize('num_tokens', [33, 128, 150])
def test_gated_linear_is_its_recurrence_if_decays_are_near_or_out_of_range(num_tokens, shift, chunks, monkeypatch):
    monkeypatch.setattr(_gated_scan, '_CHUNKS', chunks)
    # a head at a time
    monkeypatch.setattr(_gated_scan, 'CACHED', 1)
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(2, 2, num_tokens, 4, generator=generator).double() for _ in range(4))
    decay, decay_back = (torch.randn(2, 2, num_tokens, 4, generator=generator).double() for _ in range(2))
    # in one head of one sample
    decay_back[1, 1, :, 2] -= shift
    args, norm = [x.requires_grad_() for x in (q, k, v, decay, decay_back, gate)], WideLayerNorm(4).double()
    fast, naive = gated_linear_attention(*args, norm, 0.7), gated_linear_naive(*args, norm, 0.7)
    assert_near(fast, naive)
    args += norm.parameters()
    grads = [torch.autograd.grad(out.square().sum(), args) for out in (fast, naive)]
    for one, other in zip(*grads, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize('logit', [-1e4, 1e4])
def test_gated_linear_stays_finite_if_it_forgets_or_remembers_everything(logit):
    q, k, v, gate = (torch.randn(1, 2, 40, 4, generator=torch.Generator().manual_seed(i)) for i in range(4))
    q.requires_grad_()
    decay = torch.full_like(q, logit).requires_grad_()
    out = gated_linear_attention(q, k, v, decay, decay, gate, WideLayerNorm(4), 1.0)
    out.sum().backward()
    assert out.isfinite().all() and q.grad.isfinite().all() and decay.grad.isfinite().all()
    # one token, or the sum over all of them
    y = (q * k).sum(dim=-1, keepdim=True) * v if logit < 0 else q @ (k.mT @ v)
    expected = torch.nn.functional.layer_norm(y, (4,)) * torch.nn.functional.silu(gate)
    torch.testing.assert_close(out, expected, rtol=0, atol=0.02)


def state(recording, renames):
    """The recorded parameters under our names; official layers of one name are concatenated, in the order of names."""
    parts = {}
    for layer, own in renames.items():
        for kind in ('', '.weight', '.bias'):
            if f'state.{layer}{kind}' in recording:
                parts.setdefault(own + kind, []).append(recording[f'state.{layer}{kind}'])
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


RMT_NAMES = {f'attn.{part}_proj': 'qkv' for part in 'qkv'} | {'attn.lepe.conv': 'lepe', 'attn.out_proj': 'proj'}
# mixer, its options, and our names of the official parameters
RECORDINGS = {
    'rmt_decomposed_a': ('rmt', {}, RMT_NAMES),
    'rmt_whole_a': ('rmt', dict(decomposed=False), RMT_NAMES),
    'vittt_a': ('ttt', {}, {name: name for name in ('qkv', 'proj', 'w1', 'w2', 'w3')}),
    'vittt_rope_d': ('ttt', dict(rope=True), {name: name for name in ('qkv', 'proj', 'w1', 'w2', 'w3')}),
    'circulant_a': ('circulant', dict(qkv_bias=False), {'qkv': 'qkv', 'gate.0': 'gate', 'proj': 'proj'}),
    'vssd_a': (
        'vssd',
        dict(d_state=16, qkv_bias=False),
        {'in_proj': 'in_proj', 'conv2d': 'conv', 'A_log': 'log_a', 'D': 'skip', 'dt_bias': 'dt_bias', 'norm': 'norm'}
        | {'out_proj': 'proj'},
    ),
    'biformer_a': ('biformer', dict(num_windows=4), {'qkv.qkv': 'qkv', 'lepe': 'lepe', 'wo': 'proj'}),
    'biformer_nchw_a': (
        'biformer',
        dict(num_windows=4),
        {'qkv_linear': 'qkv', 'lepe': 'lepe', 'output_linear': 'proj'},
    ),
    'soft_a': (
        'soft',
        dict(ratio=2),
        {'W_q': 'qkv', 'W_v': 'qkv', 'attn.Qlandmark_op': 'landmarks', 'attn.Qnorm_act.0': 'norm'}
        | {'attn.conv': 'conv', 'ff': 'proj'},
    ),
}


def divide_ttt(official):
    """The parts of the official layers that belong to f and to the convolution, with w1 and w2 without their batch."""
    own = {name: official[name].squeeze(0) for name in ('w1', 'w2')} | {'w3': official['w3']}
    for kind in ('weight', 'bias'):
        own[f'qkv.{kind}'], own[f'qkv_conv.{kind}'] = official[f'qkv.{kind}'].split([144, 48])
    own['proj.weight'], own['proj_conv.weight'] = official['proj.weight'].split([48, 16], dim=1)
    return own | {'proj.bias': official['proj.bias']}


def recording(name):
    """A recording of tests/golden, or else of ../shared/golden/modern; sources are in the metadata of the files."""
    kept = Path(__file__).parents[1] / 'golden' / 'modern_structure.safetensors'
    tensors = safetensors.torch.load_file(kept) if kept.exists() else {}
    own = {key.removeprefix(f'{name}.'): tensor for key, tensor in tensors.items() if key.startswith(f'{name}.')}
    return own or golden(f'modern/{name}')


def to_tokens(x):
    """(B, 64, 48) from tokens, from (B, 8, 8, 48), or from (B, 48, 8, 8)."""
    return x.flatten(2).mT if x.ndim == 4 and x.shape[1] == 48 else x.reshape(-1, 64, 48)


def create_recorded(name, recorded, grid):
    """The mixer of RECORDINGS with the recorded weights."""
    mixer_name, options, renames = RECORDINGS[name]
    mixer = create_mixer(mixer_name, 48, 3, grid_size=grid, **options).eval()
    official = state(recorded, renames)
    if mixer_name == 'ttt':
        official = divide_ttt(official)
    # the official output projection of vssd has no bias
    official.setdefault('proj.bias', torch.zeros(48))
    own = mixer.state_dict()
    mixer.load_state_dict({key: tensor.reshape(own[key].shape) for key, tensor in official.items()})
    return mixer


@pytest.mark.parametrize('name', RECORDINGS)
def test_a_mixer_reproduces_the_authors_class(name):
    recorded = recording(name)
    mixer = create_recorded(name, recorded, (8, 8))
    x, expected = (to_tokens(recorded[key]) for key in ('input', 'output'))
    with torch.no_grad():
        assert relative_error(mixer(x, (8, 8)), expected) < 2e-5


# the recording with the weights
AWKWARD = {
    'rmt_decomposed_5x7': 'rmt_decomposed_a',
    'rmt_whole_5x7': 'rmt_decomposed_a',
    'ttt_5x7': 'vittt_a',
    'circulant_5x5': 'circulant_a',
    'circulant_6x6': 'circulant_a',
    'vssd_5x7': 'vssd_a',
    'biformer_4x12': 'biformer_a',
}


@pytest.mark.parametrize('case', AWKWARD)
def test_output_and_gradient_are_those_of_the_authors_class_on_an_awkward_grid(case):
    name = 'rmt_whole_a' if case.startswith('rmt_whole') else AWKWARD[case]
    recorded, grid = recorded_on_grid(case)
    mixer = create_recorded(name, recording(AWKWARD[case]), grid)
    assert_output_and_gradient_of_official_code(mixer, recorded, grid)


@pytest.mark.parametrize(
    ('case', 'heads', 'options', 'renames'),
    [
        ('xca_5x7', 3, {}, {'temperature': 'temperature'}),
        ('nystrom_5x7', 1, dict(num_landmarks=8, conv_kernel_size=3), {'conv': 'conv'}),
        ('srformer_5x7', 3, dict(sr_ratio=2), {name: name for name in ('q', 'kv', 'sr', 'norm')}),
        (
            'ls_6x6',
            3,
            dict(window_size=3, rank=5, rel_bias='nvidia', num_prefix_tokens=1),
            {'to_dynamic_projection': 'dynamic_proj', 'dual_ln_full': 'norm_full', 'dual_ln_dp': 'norm_landmarks'}
            | {'local_relative_position_bias_table': 'rel_bias.table'},
        ),
    ],
)
def test_earlier_mixers_are_the_authors_classes_on_an_awkward_grid(case, heads, options, renames):
    recorded, grid = recorded_on_grid(case)
    mixer = create_mixer(case.rpartition('_')[0], 48, heads, grid_size=grid, **options)
    mixer.load_state_dict(state(recorded, {'qkv': 'qkv', 'proj': 'proj'} | renames))
    assert_output_and_gradient_of_official_code(mixer, recorded, grid)


def test_vssd_starts_with_the_steps_and_decays_of_mamba_2():
    torch.manual_seed(0)
    mixer = create_mixer('vssd', 512, 256, grid_size=GRID)
    steps, decays = nn.functional.softplus(mixer.dt_bias), mixer.log_a.exp()
    for values, low, high in ((steps, 1e-3, 0.1), (decays, 1, 16)):
        assert low <= values.min() < 1.2 * low and 0.9 * high < values.max() <= high
