"""Kernel mixers since 2020: equal to recordings of the official classes, and the options that all of them share."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import (
    DIM,
    GRID,
    assert_near,
    assert_output_and_gradient_of_official_code,
    build,
    golden,
    recorded_call,
    recorded_on_grid,
    tokens,
)
from torch.nn import functional as F

import vitzoo
from vitzoo.mixers import mixer_class
from vitzoo.mixers._kernel_mixer import KernelMixer
from vitzoo.mixers._numerics import at_least
from vitzoo.mixers.agent import _average_cells, _cell_weights
from vitzoo.mixers.flowformer import flow_attention
from vitzoo.mixers.hedgehog import hedgehog_attention
from vitzoo.mixers.mala import _phi as elu_plus_1
from vitzoo.mixers.mhla import block_mixing_weights
from vitzoo.mixers.relu_linear import relu_linear_attention

HEADS = 3
KERNEL_MIXERS = [name for name in vitzoo.list_mixers() if issubclass(mixer_class(name), KernelMixer)]


def recording(name: str) -> dict[str, torch.Tensor]:
    """A recording of tests/golden, or else of ../shared/golden/modern."""
    kept = safetensors.torch.load_file(Path(__file__).parents[1] / 'golden' / 'modern_kernels.safetensors')
    own = {key.removeprefix(f'{name}/'): tensor for key, tensor in kept.items() if key.startswith(f'{name}/')}
    return own or golden(f'modern/{name}')


def layers(r: dict, **sources: list[str]) -> dict:
    """Linear layers of ours, each the concatenation of the recorded layers named."""
    return {
        f'{ours}.{kind}': torch.cat([r[f'state.{name}.{kind}'] for name in names]).flatten(1 if kind == 'weight' else 0)
        for ours, names in sources.items()
        for kind in ('weight', 'bias')
        if f'state.{names[0]}.{kind}' in r
    }


def split_gate(state: dict) -> dict:
    """Move the last of four parts of `qkv` to `gate`."""
    gates = {f'gate.{kind}': state[f'qkv.{kind}'].chunk(4)[3] for kind in ('weight', 'bias')}
    qkv = {f'qkv.{kind}': torch.cat(state[f'qkv.{kind}'].chunk(4)[:3]) for kind in ('weight', 'bias')}
    return {**state, **gates, **qkv}


def of_heads(x: torch.Tensor) -> torch.Tensor:
    """(1, N, dim) -> (heads, N, d)."""
    return x.squeeze(0).unflatten(1, (HEADS, -1)).transpose(0, 1)


def depthwise(r: dict, name: str) -> dict:
    return {f'conv.{kind}': r[f'state.{name}.{kind}'] for kind in ('weight', 'bias')}


def agent(r: dict) -> dict:
    side = r['state.ah_bias'].shape[3]
    state = layers(r, qkv=['qkv'] if 'state.qkv.weight' in r else ['q', 'kv'], proj=['proj']) | depthwise(r, 'dwc')
    state |= {
        'bias_k.map': r['state.an_bias'],
        'bias_k.rows': r['state.ah_bias'].reshape(HEADS, -1, side),
        'bias_k.columns': r['state.aw_bias'].reshape(HEADS, -1, side),
        'bias_q.map': r['state.na_bias'],
        'bias_q.rows': r['state.ha_bias'].reshape(HEADS, side, -1).mT,
        'bias_q.columns': r['state.wa_bias'].reshape(HEADS, side, -1).mT,
    }
    if 'state.ac_bias' in r:
        state |= {'bias_k.prefix': r['state.ac_bias'][0], 'bias_q.prefix': r['state.ca_bias'][0].mT}
    return state


def focused(r: dict) -> dict:
    state = layers(r, qkv=['qkv'] if 'state.qkv.weight' in r else ['q', 'kv'], proj=['proj']) | depthwise(r, 'dwc')
    return state | {'divisor': of_heads(r['state.scale']), 'pos_embed': of_heads(r['state.positional_encoding'])}


def polaformer(r: dict) -> dict:
    state = layers(r, qkv=['qkvg'] if 'state.qkvg.weight' in r else ['qg', 'kv'], proj=['proj']) | depthwise(r, 'dwc')
    if 'state.qg.weight' in r:
        for kind in ('weight', 'bias'):
            q, gate, k, v = state[f'qkv.{kind}'].chunk(4)
            state[f'qkv.{kind}'] = torch.cat([q, k, v, gate])
    state |= {'divisor': of_heads(r['state.scale']), 'pos_embed': of_heads(r['state.positional_encoding'])}
    return split_gate(state) | {'power': r['state.power'][0]}


def inline(r: dict) -> dict:
    state = layers(r, qkv=['qkv'] if 'state.qkv.weight' in r else ['q', 'kv'], proj=['proj'])
    return state | {name[6:]: tensor for name, tensor in r.items() if name.startswith('state.residual')}


def mala(r: dict) -> dict:
    return split_gate(layers(r, qkv=['qkvo'], proj=['proj'])) | depthwise(r, 'lepe')


def mhla(r: dict) -> dict:
    state = layers(r, qkv=['to_qkv'], proj=['to_out.0']) | depthwise(r, 'lepe')
    norms = {name: r[f'state.{name}'] for name in ('q_norm.weight', 'k_norm.weight') if f'state.{name}' in r}
    state |= {name: weight.reshape(HEADS, 1, -1) for name, weight in norms.items()}
    # the official class has a layer norm of its own
    r['input'] = F.layer_norm(r['extra.input_raster'], (48,), r['state.norm.weight'], r['state.norm.bias'])
    r['output'] = r['extra.output_raster']
    return state | {'mixing': r['state.piece_attn.conv.weight'][:, :, 0, 0]}


def relu_linear(r: dict) -> dict:
    def by_kind(x):
        """From q, k and v of the first head, of the second … to all q, all k, all v."""
        return x.unflatten(0, (HEADS, 3, -1)).transpose(0, 1).flatten(0, 2)

    # the batch norm after the projection, in evaluation
    gain = r['state.proj.norm.weight'] / (r['state.proj.norm.running_var'] + 1e-5).sqrt()
    proj = gain[:, None] * r['state.proj.conv.weight'][:, :, 0, 0]
    r['input'], r['output'] = (r[name].flatten(2).mT for name in ('input', 'output'))
    return {
        'qkv.weight': by_kind(r['state.qkv.conv.weight'][:, :, 0, 0]),
        'scales.0.conv.weight': by_kind(r['state.aggreg.0.0.weight']),
        'scales.0.weight': by_kind(r['state.aggreg.0.1.weight'][:, :, 0, 0]).unflatten(0, (3 * HEADS, -1)),
        'proj.weight': proj[:, :48],
        'proj.bias': r['state.proj.norm.bias'] - gain * r['state.proj.norm.running_mean'],
        'proj_scales.weight': proj[:, 48:],
    }


def flowformer(r: dict) -> dict:
    return layers(r, qkv=['qkv'], proj=['proj'])


def cosformer(r: dict) -> dict:
    r['input'], r['output'] = (r[name].transpose(0, 1) for name in ('input', 'output'))
    return layers(r, qkv=['q_proj', 'k_proj', 'v_proj'], proj=['out_proj'])


RECORDINGS = [
    ('agent_a', agent, dict(num_cells=4, num_prefix_tokens=1)),
    ('agent_pvt_a', agent, dict(num_cells=3)),
    ('cosformer_a', cosformer, {}),
    ('flatten_a', focused, dict(pos_embed=True)),
    ('flatten_swin_a', focused, dict(pos_embed=True)),
    ('flowformer_a', flowformer, {}),
    ('inline_a', inline, dict(num_prefix_tokens=1)),
    ('inline_pvt_a', inline, {}),
    ('litemla_a', relu_linear, dict(scales=(5,), qkv_bias=False)),
    ('mala_a', mala, {}),
    ('mhla_a', mhla, dict(num_blocks=2, normalizer='position', rms_norm=True, qkv_bias=False)),
    ('mhla_dit_a', mhla, dict(num_blocks=2, normalizer='position', conv_size=3, qkv_bias=False)),
    ('polaformer_a', polaformer, dict(pos_embed=True)),
    ('polaformer_swin_a', polaformer, dict(pos_embed=True)),
]


def assert_recorded(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 2e-5 * expected.std()


@pytest.mark.parametrize(
    ('name', 'convert', 'kwargs'), RECORDINGS, ids=lambda case: case if isinstance(case, str) else ''
)
def test_a_mixer_equals_the_recording_of_the_official_class(name, convert, kwargs):
    recorded = recording(name)
    state = convert(recorded)
    mixer = vitzoo.create_mixer(convert.__name__, 48, HEADS, grid_size=(8, 8), **kwargs).eval()
    mixer.load_state_dict(state, strict=True)
    with torch.no_grad():
        assert_recorded(mixer(recorded['input'], (8, 8)), recorded['output'])


# the recording with the weights, if their shapes do not depend on the grid
AWKWARD = [
    ('agent_5x5', None, agent, dict(num_cells=4, num_prefix_tokens=1)),
    ('inline_5x5', 'inline_a', inline, dict(num_prefix_tokens=1)),
    ('focused_5x7', None, focused, dict(pos_embed=True)),
    ('polaformer_5x7', None, polaformer, dict(pos_embed=True)),
    ('mala_5x7', 'mala_a', mala, {}),
    ('flowformer_5x7', None, flowformer, {}),
    ('cosformer_5x7', None, cosformer, {}),
]


@pytest.mark.parametrize(('case', 'weights', 'convert', 'kwargs'), AWKWARD, ids=[case for case, *_ in AWKWARD])
def test_output_and_gradient_are_those_of_the_official_class_on_an_awkward_grid(case, weights, convert, kwargs):
    recorded, grid = recorded_on_grid(case)
    mixer = vitzoo.create_mixer(convert.__name__, 48, HEADS, grid_size=grid, **kwargs)
    # a copy, because some of these functions change the shape of the input
    mixer.load_state_dict(convert(dict(recorded) if weights is None else recording(weights)), strict=True)
    assert_output_and_gradient_of_official_code(mixer, recorded, grid)


def test_hedgehog_equals_the_recording():
    r = recording('hedgehog_a')
    maps = (r[f'state.feature_map_{name}.mlp.layer'] for name in 'qk')
    assert_recorded(hedgehog_attention(r['q'], r['k'], r['v'], *maps), r['output'])


def test_flow_attention_of_another_number_of_sources_equals_the_recording():
    r = recording('flowformer_core_a')

    def project(x, name):
        return F.linear(x, r[f'state.{name}_projection.weight'], r[f'state.{name}_projection.bias'])

    names = dict(q='query', k='key', v='value')
    q, k, v = (project(r[x], name).unflatten(2, (HEADS, -1)).transpose(1, 2) for x, name in names.items())
    assert_recorded(project(flow_attention(q, k, v).transpose(1, 2).flatten(2), 'out'), r['output'])


def test_the_first_weights_between_blocks_equal_the_recording():
    expected = recording('mhla_a')['extra.piece_attn_init'][:, :, 0, 0]
    torch.testing.assert_close(block_mixing_weights(2, 'linear'), expected)


@pytest.mark.parametrize('locality', ['linear', 'cos', 'exp', 'local', 'gaussian'])
@pytest.mark.parametrize('num_prefix_tokens', [0, 1])
def test_a_block_starts_nearest_to_itself_and_to_prefix_tokens(locality, num_prefix_tokens):
    weights = block_mixing_weights(3, locality, num_prefix_tokens)
    assert weights.shape == (9 + num_prefix_tokens,) * 2 and weights.min() >= 0
    assert torch.equal(weights.amax(dim=0), weights.diagonal())
    corner = weights[:9, 0]
    assert corner[0] >= corner[1] >= corner[2] >= corner[8] and corner[0] > corner[8]
    if num_prefix_tokens:
        assert torch.equal(weights[9], weights.diagonal())


CONVEX = [
    ('agent', dict(num_cells=2, conv_size=0)),
    ('focused', dict(conv_size=0)),
    ('hedgehog', {}),
    ('inline', dict(residual=False)),
    ('inline', dict(residual=False, mean_scores=False)),
    ('mala', dict(rope=False, gate=False, conv_size=0)),
    ('mhla', dict(num_blocks=2, conv_size=0)),
    ('polaformer', dict(gate=False, conv_size=0)),
]


@pytest.mark.parametrize(('name', 'kwargs'), CONVEX)
def test_weights_that_sum_to_one_keep_a_value_that_all_tokens_share(name, kwargs):
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    q, k, v = mixer.to_qkv(tokens(mixer), GRID)
    v = v[:, :, :1].expand_as(v)
    # a query without a positive channel has almost no weights in some
    q = torch.cat([q[..., :1].abs() + 0.5, q[..., 1:]], dim=-1)
    assert_near(mixer.mix_input(None, q, k, v, GRID), v, 1e-4)


def test_mhla_of_one_block_is_relu_attention():
    mixer = build('mhla', num_blocks=1, conv_size=0)
    q, k, v = mixer.to_qkv(tokens(mixer), GRID)
    mixer.mixing.data.fill_(1)
    q, k = q.abs(), k.abs()
    assert_near(mixer.mix(q, k, v, GRID), relu_linear_attention(q, k, v), 1e-4)


def test_blocks_without_weight_do_not_see_each_other():
    mixer = build('mhla', (6, 4), num_blocks=2, conv_size=0)
    mixer.mixing.data.copy_(torch.eye(4))
    q, k, v = mixer.to_qkv(tokens(mixer), (6, 4))
    moved = v.clone()
    # the second block is at the top right, of 3 x 2 tokens
    moved[:, :, [2, 3, 6, 7, 10, 11]] += 1
    changed = (mixer.mix(q, k, moved, (6, 4)) - mixer.mix(q, k, v, (6, 4))).abs().amax(dim=(0, 1, 3)) > 1e-9
    assert changed.nonzero().flatten().tolist() == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize('op', ['op', 'op_naive'])
def test_mhla_weights_at_and_below_0_count_as_0_and_learn(op):
    mixer = vitzoo.create_mixer('mhla', DIM, HEADS, grid_size=(4, 4), locality='local', dtype=torch.float64)
    x = tokens(mixer)
    mixer.op = getattr(mixer, op)
    at_0 = mixer.mixing == 0

    def output_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        out = mixer(x, (4, 4))
        return out, torch.autograd.grad(out.square().sum(), mixer.mixing)[0]

    out, gradient = output_and_gradient()
    assert at_0.any() and gradient[at_0].all()
    mixer.mixing.data[at_0] = -1
    below, gradient_below = output_and_gradient()
    assert_near(below, out)
    assert_near(gradient_below, gradient)


@pytest.mark.parametrize('grid_size', [(4, 4), (5, 5), (9, 9), (6, 7), (14, 14)])
def test_mhla_divides_a_grid_into_as_many_blocks_as_it_has_weights_for(grid_size):
    mixer = build('mhla', grid_size)
    mixer(tokens(mixer), grid_size).square().sum().backward()
    assert mixer.mixing.grad.all()


@pytest.mark.parametrize('normalizer', ['paper', 'position'])
@pytest.mark.parametrize('grid_size', [(1, 1), (2, 3), (3, 9), (5, 7), (8, 6)])
def test_mhla_equals_its_naive_form_on_grids_that_are_not_divided_evenly(grid_size, normalizer):
    mixer = build('mhla', grid_size, num_prefix_tokens=1, normalizer=normalizer)
    x = tokens(mixer)
    out = mixer(x, grid_size)
    mixer.op = mixer.op_naive
    assert_near(out, mixer(x, grid_size))


def test_cosformer_weights_fall_with_the_distance_in_the_raster():
    mixer = build('cosformer', num_prefix_tokens=1)
    q = k = torch.ones(1, HEADS, 21, 4, dtype=torch.float64)
    weights = mixer.mix(q, k, torch.eye(21, dtype=torch.float64).expand(1, HEADS, 21, 21), GRID)[0, 0]
    assert (weights[1, 2:].diff() < 0).all()
    assert_near(weights[0], torch.full((21,), 1 / 21, dtype=torch.float64))
    assert_near(weights[5, 0], weights[5].max())


@pytest.mark.parametrize('grid', [(5, 7), (9, 30), (3, 2), (14, 14)])
def test_the_product_that_averages_cells_on_a_gpu_is_adaptive_pooling(grid):
    x = torch.randn(2, 3, grid[0] * grid[1], 4, dtype=torch.float64)
    found = _cell_weights(grid, 7, x) @ x
    torch.testing.assert_close(found, _average_cells(x, grid, 7))


def test_a_bias_of_agents_follows_the_grid():
    mixer = build('agent', num_cells=2, num_prefix_tokens=1)
    with pytest.raises(ValueError, match='made for a 4 x 5 grid and got 6 x 3'):
        mixer(torch.randn(1, 19, 12, dtype=torch.float64), (6, 3))
    mixer.set_input_size((6, 3))
    assert mixer(torch.randn(1, 19, 12, dtype=torch.float64), (6, 3)).isfinite().all()
    assert mixer.bias_k.rows.shape == (3, 4, 6) and mixer.bias_q.columns.shape == (3, 4, 3)


def test_mala_has_the_gradient_of_elu_at_0_and_far_below():
    x = torch.tensor([-800.0, -50.0, -1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(elu_plus_1(x).sum(), x)
    torch.testing.assert_close(elu_plus_1(x.detach()), torch.where(x > 0, x + 1, x.exp()).detach(), atol=0, rtol=1e-12)
    torch.testing.assert_close(gradient, x.detach().clamp(max=0).exp(), atol=0, rtol=1e-12)


def test_a_limit_keeps_the_gradient_of_larger_numbers_only():
    x = torch.tensor([-1.0, 0.5, 3.0, float('nan')], requires_grad=True)
    limited = at_least(x, 1.0)
    torch.testing.assert_close(limited, torch.tensor([1.0, 1.0, 3.0, float('nan')]), equal_nan=True)
    (gradient,) = torch.autograd.grad(limited[:3].sum(), x)
    assert gradient.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ('name', 'kwargs', 'message'),
    [
        ('polaformer', dict(num_heads=4), 'splits the channels of a head into halves, and dim 12 with 4 heads has 3'),
        ('mala', dict(num_heads=2), 'a multiple of 4, and dim 12 with 2 heads has 6'),
        ('mala', dict(conv_size=4), 'odd kernel size, not 4'),
        ('mhla', dict(num_blocks=0), 'num_blocks of mhla must be at least 1, not 0'),
        ('mhla', dict(locality='near'), "one of linear, cos, exp, local, gaussian, not 'near'"),
        ('mhla', dict(normalizer='code'), "is 'paper' or 'position', not 'code'"),
        ('mhla', dict(rms_norm=True, qk_norm=True), 'choose one'),
        ('focused', dict(power=0), 'power of focused must be positive, not 0'),
        ('polaformer', dict(alpha=-1), 'alpha of polaformer must be at least 0, not -1'),
        ('hedgehog', dict(num_features=0), 'num_features of hedgehog must be at least 1, not 0'),
        ('agent', dict(num_cells=0), 'num_cells of agent must be at least 1, not 0'),
        ('relu_linear', dict(scales=(2,)), 'odd kernel size, not 2'),
    ],
)
def test_values_that_make_no_sense_are_refused(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        vitzoo.create_mixer(name, 12, kwargs.pop('num_heads', HEADS), grid_size=GRID, **kwargs)


def test_scores_of_mala_are_divided_by_the_number_of_all_tokens():
    mixer = build('mala', num_prefix_tokens=2, num_heads=3)
    assert recorded_call(mixer, tokens(mixer))[-2] == mixer.scale / (2 + GRID[0] * GRID[1])
