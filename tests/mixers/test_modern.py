"""Kernel mixers since 2020: equal to recordings of the official classes, and the options that all of them share."""

import pytest
import torch
from helpers import golden
from torch.nn import functional as F

import vitzoo
from vitzoo.mixers import mixer_class
from vitzoo.mixers._kernel import KernelMixer
from vitzoo.mixers.flowformer import flow_attention
from vitzoo.mixers.hedgehog import hedgehog_attention
from vitzoo.mixers.mhla import block_mixing_weights

HEADS = 3
KERNEL_MIXERS = [name for name in vitzoo.list_mixers() if issubclass(mixer_class(name), KernelMixer)]


def layers(recording: dict, **sources: list[str]) -> dict:
    """Linear layers of ours, each the concatenation of the recorded layers named."""
    return {
        f'{ours}.{kind}': torch.cat([recording[f'state.{name}.{kind}'] for name in names]).flatten(
            1 if kind == 'weight' else 0
        )
        for ours, names in sources.items()
        for kind in ('weight', 'bias')
        if f'state.{names[0]}.{kind}' in recording
    }


def split_gate(state: dict) -> dict:
    """Move the last of four parts of `qkv` to `gate`."""
    gates = {f'gate.{kind}': state[f'qkv.{kind}'].chunk(4)[3] for kind in ('weight', 'bias')}
    qkv = {f'qkv.{kind}': torch.cat(state[f'qkv.{kind}'].chunk(4)[:3]) for kind in ('weight', 'bias')}
    return {**state, **gates, **qkv}


def of_heads(x: torch.Tensor) -> torch.Tensor:
    """(1, N, dim) -> (heads, N, d)."""
    return x.squeeze(0).unflatten(1, (HEADS, -1)).transpose(0, 1)


def depthwise(recording: dict, name: str) -> dict:
    return {f'conv.{kind}': recording[f'state.{name}.{kind}'] for kind in ('weight', 'bias')}


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
    recording = golden(f'modern/{name}')
    state = convert(recording)
    mixer = vitzoo.create_mixer(convert.__name__, 48, HEADS, grid_size=(8, 8), **kwargs).eval()
    mixer.load_state_dict(state, strict=True)
    with torch.no_grad():
        assert_recorded(mixer(recording['input'], (8, 8)), recording['output'])


def test_hedgehog_equals_the_recording():
    r = golden('modern/hedgehog_a')
    maps = (r[f'state.feature_map_{name}.mlp.layer'] for name in 'qk')
    assert_recorded(hedgehog_attention(r['q'], r['k'], r['v'], *maps), r['output'])


def test_flow_attention_of_another_number_of_sources_equals_the_recording():
    r = golden('modern/flowformer_core_a')

    def project(x, name):
        return F.linear(x, r[f'state.{name}_projection.weight'], r[f'state.{name}_projection.bias'])

    names = dict(q='query', k='key', v='value')
    q, k, v = (project(r[x], name).unflatten(2, (HEADS, -1)).transpose(1, 2) for x, name in names.items())
    assert_recorded(project(flow_attention(q, k, v).transpose(1, 2).flatten(2), 'out'), r['output'])


def test_the_first_weights_between_blocks_equal_the_recording():
    expected = golden('modern/mhla_a')['extra.piece_attn_init'][:, :, 0, 0]
    torch.testing.assert_close(block_mixing_weights(2, 'linear'), expected)
