"""What mixers draw at random and keep: it follows from seed, layer and training step, and from nothing else."""

import inspect

import pytest
import timm
import torch
from test_mixers import DIM, GRID, HEADS, SETTINGS
from test_models import SMALL, blocks
from test_models import build as build_model

from vitzoo import create_mixer, list_mixers, swap_mixer
from vitzoo.mixers import mixer_class
from vitzoo.mixers._draw import draw_generator

DRAWING = [name for name in list_mixers() if 'seed' in inspect.signature(mixer_class(name).__init__).parameters]
BACKBONES = {
    'aft_performer_tiny': {'depth': 4},
    'cvt_performer_13': {'depths': (1, 2, 1)},
    'deit_performer_tiny': {'depth': 4},
    'vil_performer_tiny': {'depths': (1, 1, 2, 1)},
}


def build(name, **kwargs):
    kwargs = {**SETTINGS.get(name, [{}])[0], **kwargs}
    return create_mixer(name, DIM, HEADS, grid_size=GRID, num_prefix_tokens=1, dtype=torch.float64, **kwargs)


def kept(mixer):
    """The buffers of a mixer as one vector."""
    return torch.cat([torch.zeros(0), *(buffer.flatten().double() for buffer in mixer.buffers())])


def test_the_mixers_that_draw_are_these():
    assert DRAWING == ['bigbird', 'performer', 'reformer', 'rfa', 'routing']


@pytest.mark.parametrize('name', list_mixers())
def test_no_buffer_depends_on_torchs_own_generator(name):
    torch.manual_seed(1)
    first = build(name)
    torch.manual_seed(2)
    assert torch.equal(kept(build(name)), kept(first))


@pytest.mark.parametrize('name', DRAWING)
def test_draws_differ_from_layer_to_layer_and_from_seed_to_seed(name):
    draws = [kept(build(name, layer=layer, seed=seed)) for layer in range(3) for seed in range(3)]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    assert {name for name, _ in build(name).named_buffers()} <= set(build(name).state_dict())


def test_each_draw_has_a_generator_of_its_own():
    places = [(seed, layer, index) for seed in range(8) for layer in range(8) for index in range(8)]
    draws = {torch.randint(2**62, (), generator=draw_generator(*place)).item() for place in places}
    assert len(draws) == len(places)
    with pytest.raises(ValueError, match='at least 0, not -1, 0 and 0'):
        draw_generator(-1, 0)


@pytest.mark.parametrize('name', BACKBONES)
def test_every_mixer_of_a_backbone_is_told_its_layer(name):
    mixers = [block.attn for block in blocks(build_model(name, **BACKBONES[name]))]
    assert [mixer.layer for mixer in mixers] == list(range(4 + name.startswith('vil')))


def test_a_swapped_mixer_is_told_its_layer():
    model = timm.create_model('vit_tiny_patch16_224', img_size=64, **SMALL['deit'])
    swap_mixer(model, 'rfa')
    first, second = (block.attn for block in model.blocks)
    assert (first.layer, second.layer) == (0, 1)
    assert not torch.equal(first.directions, second.directions)
