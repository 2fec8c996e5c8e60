"""AFT: its four forms against each other, and its numerical range."""

import pytest
import torch
from helpers import DIM, GRID, HEADS, build, recorded_call, tokens

from vitzoo import create_mixer
from vitzoo.mixers.aft import aft_conv, aft_full_naive


@pytest.mark.parametrize('num_prefix_tokens', [0, 1])
def test_aft_conv_is_aft_full_with_the_dense_bias_of_its_kernel(num_prefix_tokens):
    mixer = build('aft_conv', (4, 5), num_prefix_tokens, kernel_size=5)
    q, k, v, kernel, _ = recorded_call(mixer, tokens(mixer))
    P, (H, W) = num_prefix_tokens, GRID
    bias = torch.zeros(HEADS, P + H * W, P + H * W, dtype=torch.float64)
    for i in range(H * W):
        for j in range(H * W):
            dy, dx = j // W - i // W + 2, j % W - i % W + 2
            if 0 <= dy < 5 and 0 <= dx < 5:
                bias[:, P + i, P + j] = kernel[:, dy, dx]
    expected = aft_full_naive(q, k, v, bias)
    torch.testing.assert_close(aft_conv(q, k, v, kernel, GRID), expected, rtol=1e-9, atol=1e-9)


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
