"""AFT: its four forms against each other, and its numerical range."""

import pytest
import torch
from helpers import DIM, GRID, HEADS, assert_near, build, cast, qkv, recorded_call, run_with_gradients, tokens
from torch.nn import functional as F

from vitzoo import create_mixer
from vitzoo.mixers.aft import aft_conv, aft_conv_naive, aft_local, aft_local_naive


def test_a_new_aft_conv_starts_without_positions():
    mixer = create_mixer('aft_conv', DIM, HEADS, grid_size=GRID)
    assert torch.equal(mixer.normalized_kernel(), torch.zeros(HEADS, 11, 11))


def test_aft_local_with_a_window_over_the_whole_grid_is_aft_full():
    local = build('aft_local', (4, 5), num_prefix_tokens=1, window_size=5, bias_dim=6)
    full = build('aft_full', (4, 5), num_prefix_tokens=1, bias_dim=6)
    full.load_state_dict(local.state_dict())
    x = tokens(local)
    torch.testing.assert_close(local(x, GRID), full(x, GRID), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('grid_size, size', [((5, 7), 3), ((4, 9), 11), ((1, 13), 5)], ids=str)
def test_aft_conv_is_a_sum_over_all_tokens_and_a_convolution_with_exp_of_the_kernel_minus_1(grid_size, size):
    q, k, v = qkv(grid_size[0] * grid_size[1], d=4)
    k, kernel = k[..., :1], torch.randn(2, size, size, dtype=torch.float64)

    def sums(x):
        # of (B, heads, N, c), with the filter of a head for all its channels
        filters = (kernel.exp() - 1).repeat_interleave(x.shape[3], dim=0).unsqueeze(1)
        image = x.mT.flatten(1, 2).unflatten(2, grid_size)
        near = F.conv2d(image, filters, padding=size // 2, groups=image.shape[1])
        return near.flatten(2).view_as(x.mT).mT + x.sum(dim=2, keepdim=True)

    expected = q.sigmoid() * sums(k.exp() * v) / sums(k.exp())
    assert_near(aft_conv(q, k, v, kernel, grid_size), expected)


@pytest.mark.parametrize('name', ['aft_conv', 'aft_full', 'aft_local', 'aft_simple'])
def test_aft_is_finite_if_exp_of_the_keys_overflows(name):
    mixer = build(name, dtype=torch.float32)
    q, k, v, *rest = recorded_call(mixer, tokens(mixer, dtype=torch.float32))
    out = mixer.op(q, 100 * k / k.std(), v, *rest)
    assert out.isfinite().all() and out.std() > 0


@pytest.mark.parametrize('sign', [-1, 1], ids=['negative', 'both'])
@pytest.mark.parametrize('grid_size, window_size', [((6, 7), 2), ((4, 5), 5), ((4, 9), 4)], ids=str)
def test_aft_local_is_right_for_biases_of_any_size(grid_size, window_size, sign):
    mixer = build('aft_local', grid_size, num_prefix_tokens=1, window_size=window_size, bias_dim=6)
    q, k, v, u_query, u_key, *rest = recorded_call(mixer, tokens(mixer))
    if sign < 0:
        u_query, u_key = u_query.abs(), -u_key.abs()
    factor = (300 / (u_query @ u_key.T).abs().max()).sqrt()
    u_query, u_key, k = factor * u_query, factor * u_key, 5 * k
    expected = aft_local_naive(q, k, v, u_query, u_key, *rest)
    got = aft_local(*(x.float() for x in (q, k, v, u_query, u_key)), *rest)
    assert expected.isfinite().all()
    # the products of the factors, up to 300, are rounded to float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)


def key_case(key, weight, place):
    """A single large key in the middle of a grid, and a kernel with one tap that differs from 0."""
    (q, _, v), grid_size = qkv(1 + 7 * 9, d=4), (7, 9)
    k = torch.zeros(2, 2, 64, 1, dtype=torch.float64)
    k[:, :, 1 + 3 * 9 + 4] = key
    kernel = torch.zeros(2, 5, 5, dtype=torch.float64)
    kernel[:, place, place] = weight
    return q, k, v, kernel, grid_size


@pytest.mark.parametrize(
    'key, weight, place',
    [
        # the largest key of a window counts for nothing there, so the rest must be as precise as without it
        (30.0, -60.0, 2),
        (60.0, -80.0, 1),
        # with sums over all tokens, and without
        (30.0, -2.9, 2),
        (30.0, -3.1, 2),
        # the largest weight is outside the grid for the tokens at its border
        (0.0, 110.0, 0),
        (20.0, 100.0, 4),
    ],
)
def test_aft_conv_is_right_if_keys_or_weights_are_far_apart(key, weight, place):
    args = key_case(key, weight, place)
    expected, expected_grads = run_with_gradients(aft_conv_naive, args)
    out, grads = run_with_gradients(aft_conv, cast(args, torch.float32))
    for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
