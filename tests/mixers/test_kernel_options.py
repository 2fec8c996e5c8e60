"""Options of all kernel mixers: a depthwise convolution of values or of queries and keys, and centred keys."""

import pytest
import timm
import torch
from helpers import DIM, GRID, SETTINGS, assert_near, build, build_model, images, tokens
from torch.nn import functional as F

import vitzoo
from vitzoo.errors import UserError
from vitzoo.explain import explain
from vitzoo.metrics import health
from vitzoo.metrics._attention import attention_weights
from vitzoo.mixers import mixer_class
from vitzoo.mixers._kernel_mixer import KernelMixer
from vitzoo.mixers._rope import Rope

NAMES = [name for name in vitzoo.list_mixers() if issubclass(mixer_class(name), KernelMixer)]
UNMOVED = [name for name in NAMES if mixer_class(name).ignores_mean_key]


def make(name, **kwargs):
    return build(name, num_prefix_tokens=1, **SETTINGS.get(name, [{}])[0] | kwargs)


def same_weights(mixer, other):
    """`mixer` with the weights of `other` where it has them."""
    mixer.load_state_dict({**mixer.state_dict(), **other.state_dict()})
    return mixer


@pytest.mark.parametrize('name', NAMES)
def test_a_new_convolution_changes_nothing(name):
    plain = make(name)
    x = tokens(plain)
    for dwc, added in (('v', {'dwc_v.weight'}), ('qk', {'dwc_q.weight', 'dwc_k.weight'})):
        mixer = same_weights(make(name, dwc=dwc), plain)
        assert set(mixer.state_dict()) - set(plain.state_dict()) == added
        assert any(mixer.state_dict()[key].any() for key in added)
        for key in added:
            fresh = vitzoo.create_mixer(name, DIM, 3, grid_size=GRID, dwc=dwc).get_parameter(key)
            assert not fresh.any() and fresh.shape == (DIM, 1, 3, 3)
            torch.nn.init.zeros_(mixer.get_parameter(key))
        assert_near(mixer(x, GRID), plain(x, GRID), 1e-12)


def convolved(weight, x):
    """The convolution of (B, heads, 1 + H*W, d), written for all channels at once; 0 for the prefix token."""
    image = x[:, :, 1:].transpose(2, 3).reshape(len(x), DIM, *GRID)
    out = F.conv2d(image, weight, padding=1, groups=DIM).flatten(2).unflatten(1, (3, -1)).mT
    return F.pad(out, (0, 0, 1, 0))


@pytest.mark.parametrize('name', ['linear', 'rfa', 'mala', 'relu_linear'])
def test_the_convolution_of_values_is_added_to_the_mixed_values(name):
    plain = make(name)
    mixer, x = same_weights(make(name, dwc='v'), plain), tokens(plain)
    v = plain.to_qkv(x, GRID)[2]
    local = convolved(mixer.dwc_v.weight, v).transpose(1, 2).flatten(2) @ plain.proj.weight.T
    assert local.abs().max() > 0.1
    assert_near(mixer(x, GRID), plain(x, GRID) + local)


def test_queries_and_keys_are_convolved_and_then_centred():
    plain = make('linear')
    mixer, x = same_weights(make('linear', dwc='qk', center_keys=True), plain), tokens(plain)
    q, k, v = plain.to_qkv(x, GRID)
    q, k = q + convolved(mixer.dwc_q.weight, q), k + convolved(mixer.dwc_k.weight, k)
    assert_near(mixer(x, GRID), plain.project(plain.mix(q, k - k.mean(dim=2, keepdim=True), v, GRID)))


def test_rotary_positions_rotate_convolved_queries_and_keys_before_keys_are_centred():
    plain = make('linear')
    mixer, x = same_weights(make('linear', dwc='qk', center_keys=True), plain), tokens(plain)
    angles = torch.randn(20, 4, dtype=torch.float64)
    rope = Rope(torch.cat([angles.sin(), angles.cos()], dim=-1))
    q, k, v = plain.to_qkv(x, GRID)
    q, k = (rope.rotate(y + convolved(conv.weight, y)) for y, conv in ((q, mixer.dwc_q), (k, mixer.dwc_k)))
    expected = plain.project(plain.mix(q, k - k.mean(dim=2, keepdim=True), v, GRID))
    assert_near(mixer(x, GRID, rope), expected)


def test_further_heads_of_other_scales_have_no_convolution_of_their_own():
    mixer = make('relu_linear', scales=(3,), dwc='v')
    assert mixer.dwc_v.weight.shape == (DIM, 1, 3, 3)
    assert mixer(tokens(mixer), GRID).shape == (2, 21, DIM)


@pytest.mark.parametrize('name', NAMES)
def test_with_centred_keys_a_constant_in_all_keys_changes_nothing(name):
    mixer = make(name, **({} if name in UNMOVED else {'center_keys': True}))
    x = tokens(mixer)
    before = mixer(x, GRID)
    with torch.no_grad():
        mixer.qkv.bias[DIM : 2 * DIM] += 3 * torch.randn(DIM, dtype=torch.float64)
    assert_near(mixer(x, GRID), before)


@pytest.mark.parametrize('name', UNMOVED)
def test_centring_is_refused_by_mixers_that_it_does_not_change(name):
    with pytest.raises(ValueError, match='center_keys has no effect'):
        vitzoo.create_mixer(name, DIM, 3, grid_size=GRID, center_keys=True)


def test_an_unknown_convolution_is_refused():
    with pytest.raises(ValueError, match="dwc of Linear is 'none', 'v' or 'qk', not 'k'"):
        vitzoo.create_mixer('linear', DIM, 3, grid_size=GRID, dwc='k')


PLAIN = [('performer', {}), ('inline', {'residual': False}), ('agent', {'conv_size': 0})]


@pytest.mark.parametrize('dwc', ['none', 'qk', 'v'])
@pytest.mark.parametrize('name, kwargs', PLAIN)
def test_attention_weights_are_those_applied_or_there_are_none(name, kwargs, dwc):
    mixer = make(name, dwc=dwc, **kwargs)
    x = tokens(mixer)
    weights = attention_weights(mixer, x, GRID)
    if dwc == 'v':
        assert weights is None
        return
    attn = weights.dense()
    assert_near(mixer.project(attn @ weights.values), mixer(x, GRID))
    assert_near(attn.sum(dim=-1), torch.ones(2, 3, 21, dtype=torch.float64))


@pytest.mark.parametrize('name', ['agent', 'inline'])
def test_mixers_that_convolve_values_by_themselves_have_no_attention_weights(name):
    mixer = make(name)
    assert attention_weights(mixer, tokens(mixer), GRID) is None


def test_rollout_is_refused_if_values_are_convolved():
    model = build_model('deit_linear_tiny', mixer_kwargs={'dwc': 'v'})
    with pytest.raises(UserError, match='no attention weights'):
        explain(model, images(), 'rollout')


def test_centred_keys_leave_the_softmax_that_is_approximated_as_it_is():
    signs = []
    for center_keys in (False, True):
        mixer = make('performer', center_keys=center_keys, num_features=64)
        q, k, v = mixer.to_qkv(tokens(mixer), GRID)
        signs.append(mixer.softmax_target(q, k, v))
    assert_near(*signs)
    assert set(health(build_model('deit_performer_tiny', mixer_kwargs={'center_keys': True}), images()))


def test_a_swap_keeps_the_convolution_at_its_start():
    def swapped(**kwargs):
        torch.manual_seed(0)
        small = dict(img_size=64, embed_dim=24, num_heads=2, depth=2, num_classes=5)
        return vitzoo.swap_mixer(timm.create_model('vit_tiny_patch16_224', **small).eval(), 'linear', **kwargs)

    model = swapped(dwc='v')
    assert torch.equal(model(images()), swapped()(images()))
    model(images()).square().sum().backward()
    assert model.blocks[0].attn.dwc_v.weight.grad.any()


@pytest.mark.parametrize('name, dwc', [('aft_rfa_tiny', 'v'), ('deit_linear_tiny', 'qk')])
def test_models_with_the_options_train_at_half_precision_and_export(name, dwc):
    model = build_model(name, depth=1, mixer_kwargs={'dwc': dwc, 'center_keys': True}).train()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        model(images()).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    exported = torch.export.export(model.eval(), (images(),)).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(images()), model(images()))
