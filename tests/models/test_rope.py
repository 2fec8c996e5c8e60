"""Rotary positions of our own backbones, `pos_embed='rope'`."""

import pytest
import timm
import torch

from vitzoo.mixers import list_mixers, mixer_class

TINY = dict(img_size=32, patch_size=8, embed_dim=16, num_heads=2, depth=2, num_classes=3, pos_embed='rope')
WITH_ROPE = [mixer for mixer in list_mixers() if mixer_class(mixer).has_rope]


def build(mixer, backbone='deit', **kwargs):
    torch.manual_seed(0)
    name = f'{backbone}_{mixer}_tiny'
    return timm.create_model(name, **{**TINY, **kwargs}).eval()


def images(height, width):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    'mixer, backbone', [(mixer, 'deit') for mixer in WITH_ROPE] + [('softmax', 'aft'), ('ls', 'aft')]
)
def test_a_model_with_rotary_positions_works_at_every_size(mixer, backbone):
    model = build(mixer, backbone)
    assert 'pos_embed' not in model.state_dict() and not any(name.startswith('rope') for name in model.state_dict())
    if mixer_class(mixer).grid_bound:
        model.set_input_size((48, 40))
    final, maps = model.forward_intermediates(images(48, 40))
    assert torch.equal(final, model.forward_features(images(48, 40))) and final.isfinite().all()
    assert maps[0].shape == (2, 16, 6, 5)
    model.train()(images(48, 40)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize('pos_embed, same', [('none', True), ('rope', False)])
def test_the_order_of_patches_matters_only_with_positions(pos_embed, same):
    model, x = build('softmax', 'aft', pos_embed=pos_embed), images(32, 32)
    shuffled = x.unflatten(3, (4, 8))[:, :, :, [1, 3, 0, 2]].flatten(3)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)
        assert torch.allclose(model(x), model(shuffled), rtol=1e-4, atol=1e-5) is same


@pytest.mark.parametrize('grid_size', [(9, 13), (16, 4)])
def test_a_larger_grid_extends_the_positions_of_a_smaller_one(grid_size):
    model = build('softmax')
    small, large = (model.positions(size)[1].embed for size in ((4, 4), grid_size))
    assert torch.equal(large.unflatten(0, grid_size)[:4, :4], small.unflatten(0, (4, 4)))


def test_scores_depend_on_offsets_only_on_a_grid_larger_than_in_training():
    model = build('softmax', embed_dim=32)
    rope = model.positions((9, 11))[1]
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).expand(-1, -1, -1, 99, -1)
    scores = (rope.rotate(q) @ rope.rotate(k).mT).view(9, 11, 9, 11)
    torch.testing.assert_close(scores[2, 3, 4, 1], scores[6, 9, 8, 7])
    assert not torch.isclose(scores[2, 3, 4, 1], scores[2, 3, 1, 4])


def test_gradient_checkpointing_keeps_the_rotation():
    model, gradients = build('ls').train(), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images(32, 32)).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    'mixer, kwargs, message',
    [
        ('pool', {}, "'rope' rotates queries and keys, which pool does not compare; use 'learn' or 'none'"),
        ('softmax', {'embed_dim': 12}, 'multiple of 4, not 6'),
        ('softmax', {'pos_embed': 'rotary'}, "'learn', 'none' or 'rope', not 'rotary'"),
    ],
)
def test_rotary_positions_that_cannot_act_are_refused(mixer, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(mixer, **kwargs)


def test_frequencies_are_those_of_rope_vit():
    rope = build('softmax', embed_dim=32).positions((3, 5))[1]
    x = torch.zeros(1, 1, 15, 16)
    x[..., ::2] = 1
    places = torch.meshgrid(torch.arange(3), torch.arange(5), indexing='ij')
    angles = torch.cat([place.reshape(-1, 1) * 100 ** -(torch.arange(4) / 4) for place in places], dim=1)
    torch.testing.assert_close(rope.rotate(x)[0, 0, :, ::2], angles.cos())
