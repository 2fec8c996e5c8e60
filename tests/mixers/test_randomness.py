"""Random values that mixers keep: they depend on seed, layer and training step, and on nothing else."""

import copy
import inspect
import warnings
from itertools import pairwise

import pytest
import timm
import torch
from helpers import DIM, GRID, HEADS, SETTINGS, SMALL, blocks, build_model, images, tokens
from timm.utils import ModelEmaV3
from torch._dynamo.testing import CompileCounter

from vitzoo import create_mixer, list_mixers, set_step, swap_mixer
from vitzoo.mixers import mixer_class
from vitzoo.mixers._random import draw_generator


def takes_a_seed(name):
    return any('seed' in inspect.signature(cls.__init__).parameters for cls in mixer_class(name).__mro__)


DRAWING = [name for name in list_mixers() if takes_a_seed(name)]
REDRAWING = ['performer', 'rfa']
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


def test_each_draw_has_its_own_generator():
    places = [(seed, layer, index) for seed in range(8) for layer in range(8) for index in range(8)]
    draws = {torch.randint(2**62, (), generator=draw_generator(*place)).item() for place in places}
    assert len(draws) == len(places)
    with pytest.raises(ValueError, match='at least 0, not -1, 0 and 0'):
        draw_generator(-1, 0)


@pytest.mark.parametrize('name', BACKBONES)
def test_every_mixer_of_a_backbone_gets_its_layer(name):
    mixers = [block.attn for block in blocks(build_model(name, **BACKBONES[name]))]
    assert [mixer.layer for mixer in mixers] == list(range(4 + name.startswith('vil')))


def test_a_swapped_mixer_gets_its_layer():
    model = timm.create_model('vit_tiny_patch16_224', img_size=64, **SMALL['deit'])
    swap_mixer(model, 'rfa')
    first, second = (block.attn for block in model.blocks)
    assert (first.layer, second.layer) == (0, 1)
    assert not torch.equal(first.directions, second.directions)


@pytest.mark.parametrize('name', REDRAWING)
def test_redrawn_features_depend_on_the_step_alone(name):
    torch.manual_seed(1)
    first = build(name, redraw_every=3)
    torch.manual_seed(2)
    second, late = build(name, redraw_every=3), build(name, redraw_every=3)
    history = []
    for step in range(9):
        first.set_step(step)
        torch.randn(step + 1)
        second.set_step(step)
        assert torch.equal(kept(first), kept(second))
        history.append(kept(first))
    assert [torch.equal(a, b) for a, b in pairwise(history)] == [step % 3 != 0 for step in range(1, 9)]
    assert torch.equal(history[0], kept(build(name)))
    assert not torch.equal(history[0], history[6])
    late.set_step(8)
    assert torch.equal(kept(late), history[8])
    first.set_step(0)
    assert torch.equal(kept(first), history[0])


@pytest.mark.parametrize('name', REDRAWING)
def test_features_are_never_redrawn_unless_asked_for(name):
    mixer = build(name)
    before = kept(mixer)
    mixer.set_step(1000)
    assert torch.equal(kept(mixer), before)
    with pytest.raises(ValueError, match='redraw_every must be a number of optimizer steps, or 0 for never, not -1'):
        build(name, redraw_every=-1)


@pytest.mark.parametrize('name', list_mixers())
def test_only_the_step_redraws_and_forward_passes_do_not(name):
    mixer = build(name, **({'redraw_every': 1} if name in REDRAWING else {}))
    before, x = kept(mixer), tokens(mixer)
    for _ in range(2):
        mixer(x, GRID)
    assert torch.equal(kept(mixer), before)
    mixer.eval()
    mixer.set_step(5)
    assert torch.equal(mixer(x, GRID), mixer(x, GRID))
    assert torch.equal(kept(mixer), before) == (name not in REDRAWING)


@pytest.mark.parametrize(
    'name, kwargs',
    [*((name, {'redraw_every': 2}) for name in REDRAWING), ('longformer', {'random_shift': True, 'shift_steps': 2})],
)
def test_a_training_loop_that_never_sets_the_step_is_warned_once(name, kwargs):
    mixer, set_before = (create_mixer(name, DIM, HEADS, grid_size=GRID, **kwargs) for _ in range(2))
    x, option = torch.randn(1, GRID[0] * GRID[1], DIM), list(kwargs)[-1]
    set_step(set_before, 0)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        set_before(x, GRID)
        mixer.eval()(x, GRID)
        with torch.no_grad():
            mixer.train()(x, GRID)
        create_mixer(name, DIM, HEADS, grid_size=GRID)(x, GRID)
    with pytest.warns(UserWarning, match=rf'{option}=2 of .* call vitzoo.set_step\(model, step\)'):
        mixer(x, GRID)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        mixer(x, GRID)


@pytest.mark.parametrize('name', REDRAWING)
def test_an_interrupted_run_continues_with_the_same_features(name):
    through, resumed = (build(name, redraw_every=2, seed=3) for _ in range(2))
    for step in range(8):
        through.set_step(step)
        if step == 4:
            resumed.load_state_dict(copy.deepcopy(through.state_dict()))
        if step > 4:
            resumed.set_step(step)
        assert torch.equal(kept(resumed), kept(through)) == (step < 2 or step >= 4)


@pytest.mark.parametrize('name', REDRAWING)
@pytest.mark.parametrize('last_step', [None, 0, 1])
def test_loaded_features_stay_until_the_step_is_set(name, last_step):
    earlier, mixer, expected = (build(name, redraw_every=2, seed=3) for _ in range(3))
    earlier.set_step(4)
    if last_step is not None:
        mixer.set_step(last_step)
    mixer.load_state_dict(earlier.state_dict())
    mixer.eval()(tokens(mixer), GRID)
    assert torch.equal(kept(mixer), kept(earlier))
    mixer.set_step(1)
    expected.set_step(1)
    assert torch.equal(kept(mixer), kept(expected))


def redrawing_model(name):
    kwargs = {'num_features': 8, 'redraw_every': 2}
    return build_model(f'deit_{name}_tiny', mixer_kwargs=kwargs).train()


@pytest.mark.parametrize('name', REDRAWING)
def test_a_model_redraws_every_layer_on_its_own_and_its_average_follows(name):
    model = redrawing_model(name)
    ema = ModelEmaV3(model, decay=0.9, exclude_buffers=True)
    before = [kept(block.attn) for block in blocks(model)]
    set_step(model, 2)
    after = [kept(block.attn) for block in blocks(model)]
    assert not any(torch.equal(a, b) for i, a in enumerate(before + after) for b in (before + after)[:i])
    ema.update(model, step=2)
    assert all(torch.equal(kept(block.attn), live) for block, live in zip(blocks(ema.module), after, strict=True))


@pytest.mark.parametrize('name', REDRAWING)
def test_recomputed_forward_passes_use_the_features_of_their_step(name):
    runs = []
    for recompute in (False, True):
        model = redrawing_model(name)
        model.set_grad_checkpointing(recompute)
        for step in range(4):
            set_step(model, step)
            # two batches are accumulated for one step
            for batch in images(batch_size=4).split(2):
                model(batch).square().mean().backward()
        runs.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*runs, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


@pytest.mark.parametrize('name', REDRAWING)
def test_a_compiled_model_is_not_compiled_again_by_a_redraw(name):
    torch._dynamo.reset()
    counter, model = CompileCounter(), redrawing_model(name).eval()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        before = compiled(images())
        set_step(compiled, 2)
        after = compiled(images())
        torch.testing.assert_close(after, model(images()))
    assert not torch.equal(before, after)
    assert counter.frame_count == 1
