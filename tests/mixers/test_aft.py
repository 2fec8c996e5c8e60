"""AFT: its four forms against each other, and its numerical range."""

import pytest
import torch
from helpers import DIM, GRID, HEADS, build, recorded_call, tokens

from vitzoo import create_mixer


def test_a_new_aft_conv_starts_without_positions():
    mixer = create_mixer('aft_conv', DIM, HEADS, grid_size=GRID)
    assert torch.equal(mixer.normalized_kernel(), torch.zeros(HEADS, 11, 11))


def test_aft_local_with_a_window_over_the_whole_grid_is_aft_full():
    local = build('aft_local', (4, 5), num_prefix_tokens=1, window_size=5, bias_dim=6)
    full = build('aft_full', (4, 5), num_prefix_tokens=1, bias_dim=6)
    full.load_state_dict(local.state_dict())
    x = tokens(local)
    torch.testing.assert_close(local(x, GRID), full(x, GRID), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', ['aft_conv', 'aft_full', 'aft_local', 'aft_simple'])
def test_aft_is_finite_if_exp_of_the_keys_overflows(name):
    mixer = build(name, dtype=torch.float32)
    q, k, v, *rest = recorded_call(mixer, tokens(mixer, dtype=torch.float32))
    out = mixer.op(q, 100 * k / k.std(), v, *rest)
    assert out.isfinite().all() and out.std() > 0
