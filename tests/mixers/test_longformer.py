"""Vision Longformer attention: which tokens attend which, the random shift and the global projections."""

import pytest
import torch
from helpers import DIM, GRID, build, tokens

from vitzoo.mixers._random_shift import draw_neighbor
from vitzoo.mixers.longformer import longformer_attention
from vitzoo.mixers.softmax import softmax_naive


@pytest.mark.parametrize(
    'kwargs',
    [
        {'window_size': 5},
        {'window_size': 3},
        {'window_size': 5, 'random_shift': True},
        {'window_size': 5, 'exact': True},
        {'window_size': 4, 'exact': True},
    ],
    ids=str,
)
def test_longformer_with_every_token_in_its_window_is_softmax(kwargs):
    mixer = build('longformer', (4, 5), num_prefix_tokens=1, **kwargs)
    x = tokens(mixer)
    q, k, v = mixer.to_qkv(x, GRID)
    expected = mixer.project(softmax_naive(q, k, v, mixer.scale))
    torch.testing.assert_close(mixer(x, GRID), expected, rtol=1e-9, atol=1e-9)


def longformer_reach(grid_size, window_size, **kwargs):
    """Mask of the grid tokens that each grid token attends, (H*W, H*W)."""
    N = grid_size[0] * grid_size[1]
    q, k = torch.randn(2, 1, 1, N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.eye(N, dtype=torch.float64)[None, None]
    return longformer_attention(q, k, weights, grid_size, window_size, 0.5, **kwargs)[0, 0] > 0


@pytest.mark.parametrize('grid_size, window_size', [((9, 8), 2), ((7, 11), 3), ((2, 13), 4), ((5, 5), 1)], ids=str)
def test_exact_windows_hold_the_tokens_within_their_size_of_the_query(grid_size, window_size):
    y, x = (place.flatten() for place in torch.meshgrid(*map(torch.arange, grid_size), indexing='ij'))
    distance = torch.maximum((y[:, None] - y).abs(), (x[:, None] - x).abs())
    assert torch.equal(longformer_reach(grid_size, window_size, exact=True), distance <= window_size)
    # the chunks reach at least as far
    assert longformer_reach(grid_size, window_size)[distance <= window_size].all()


def test_random_shift_attends_the_window_and_the_drawn_neighbour():
    full, seen = longformer_reach((7, 8), 3), torch.zeros(56, 56, dtype=torch.bool)
    row, column = torch.arange(56) // 8 // 3, torch.arange(56) % 8 // 3
    down, right = row - row[:, None], column - column[:, None]
    for neighbour in (0, 1, 2, 3, 5, 6, 7, 8):
        reach = longformer_reach((7, 8), 3, neighbor=torch.tensor(neighbour))
        there = (down == neighbour // 3 - 1) & (right == neighbour % 3 - 1)
        assert torch.equal(reach, there | (down == 0) & (right == 0))
        seen |= reach
    assert torch.equal(seen, full)


def test_all_neighbours_are_equally_likely():
    torch.manual_seed(0)
    counts = torch.stack([draw_neighbor(torch.device('cpu')) for _ in range(1600)]).bincount(minlength=9)
    neighbours = counts[[0, 1, 2, 3, 5, 6, 7, 8]]
    assert neighbours.sum() == 1600
    # binomial with a mean of 200 and a standard deviation of 13
    assert neighbours.min() > 150 and neighbours.max() < 250


def test_random_shift_ends_with_its_steps_and_never_reaches_evaluation():
    mixer = build('longformer', (5, 7), 1, window_size=2, random_shift=True, shift_steps=3)
    full = build('longformer', (5, 7), 1, window_size=2)
    x = tokens(mixer)
    for step in range(5):
        mixer.set_step(step)
        assert torch.equal(mixer.train()(x, (5, 7)), full(x, (5, 7))) == (step >= 3)
        assert torch.equal(mixer.eval()(x, (5, 7)), full(x, (5, 7)))


def test_random_shift_without_an_end_goes_on():
    mixer = build('longformer', (5, 7), window_size=2, random_shift=True)
    mixer.set_step(10**6)
    assert mixer.random_shift


def test_global_projections_that_equal_the_others_change_nothing():
    mixer, shared = (build('longformer', GRID, 2, window_size=2, global_proj=own) for own in (True, False))
    state = {name: value.clone() for name, value in shared.state_dict().items()}
    for kind in ('weight', 'bias'):
        state[f'q_global.{kind}'], state[f'kv_global.{kind}'] = state[f'qkv.{kind}'].split([DIM, 2 * DIM])
        state[f'proj_global.{kind}'] = state[f'proj.{kind}']
    mixer.load_state_dict(state)
    x = tokens(mixer)
    torch.testing.assert_close(mixer(x, GRID), shared(x, GRID), rtol=1e-12, atol=1e-12)
    # they have no effect on grid tokens
    with torch.no_grad():
        for name in ('q_global', 'kv_global', 'proj_global'):
            getattr(mixer, name).weight.add_(1)
    torch.testing.assert_close(mixer(x, GRID)[:, 2:], shared(x, GRID)[:, 2:], rtol=1e-12, atol=1e-12)
    assert (mixer(x, GRID)[:, :2] - shared(x, GRID)[:, :2]).abs().min() > 1e-6


def test_without_prefix_tokens_there_are_no_global_projections():
    assert not [name for name, _ in build('longformer', global_proj=True).named_parameters() if 'global' in name]


@pytest.mark.parametrize(
    'kwargs, message',
    [
        ({'random_shift': True, 'exact': True}, 'choose one'),
        ({'shift_steps': 5}, 'random_shift=True'),
        ({'window_size': 0}, 'at least 1, not 0'),
    ],
)
def test_longformer_refuses_contradictory_settings(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build('longformer', **kwargs)
