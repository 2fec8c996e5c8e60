"""Nystrom attention: its landmarks, its pseudo-inverse and its limit."""

import warnings
from itertools import pairwise

import pytest
import torch
from helpers import GRID, build, qkv, relative_error

from vitzoo.metrics._attention import attention_weights
from vitzoo.mixers.nystrom import grid_means, iterative_pinv, landmark_grid, nystrom_attention, segment_means
from vitzoo.mixers.softmax import softmax_naive


@pytest.mark.parametrize('num_landmarks, grid_size', [(24, None), (99, None), (24, (4, 6)), (20, (4, 5)), (99, (1, 9))])
def test_nystrom_with_a_landmark_per_token_is_softmax(num_landmarks, grid_size):
    q, k, v = qkv(24)
    got = nystrom_attention(q, k, v, num_landmarks, num_iterations=30, scale=8**-0.5, grid_size=grid_size)
    torch.testing.assert_close(got, softmax_naive(q, k, v, 8**-0.5), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('N', [49, 50, 196, 197, 257])
def test_nystrom_segments_are_even_and_cover_all_tokens(N):
    x = torch.randn(1, 1, N, 3, dtype=torch.float64)
    sizes = torch.tensor([(N + i) // 16 for i in range(16)], dtype=torch.float64)
    total = (segment_means(x, 16) * sizes[:, None]).sum(dim=2)
    torch.testing.assert_close(total, x.sum(dim=2))


@pytest.mark.parametrize('N, num_landmarks', [(196, 64), (197, 64), (10, 4), (12, 4), (5, 5)])
def test_the_shorter_nystrom_segments_come_first_as_in_the_authors_vision_code(N, num_landmarks):
    # token_nystromformer.py: the first `num_landmarks - N % num_landmarks` segments have N // num_landmarks tokens
    x, size = torch.randn(1, 1, N, 3, dtype=torch.float64), N // num_landmarks
    starts = [0]
    for i in range(num_landmarks):
        starts.append(starts[-1] + size + (i >= num_landmarks - N % num_landmarks))
    assert starts[-1] == N
    expected = torch.stack([x[0, 0, a:b].mean(dim=0) for a, b in pairwise(starts)])
    torch.testing.assert_close(segment_means(x, num_landmarks)[0, 0], expected)


def test_nystrom_landmarks_on_the_grid_are_means_of_cells():
    grid, prefix = torch.arange(7.0 * 5).reshape(7, 5), torch.tensor([-1.0, -2.0])
    # 7 rows in 3 and 5 columns in 2, the shorter ones first; prefix tokens are unchanged
    cells = [cell.mean() for rows in grid.split([2, 2, 3]) for cell in rows.split([2, 3], dim=1)]
    got = grid_means(torch.cat([prefix, grid.flatten()])[None, None, :, None], (7, 5), 6)
    torch.testing.assert_close(got.flatten(), torch.tensor([*prefix, *cells]))


@pytest.mark.parametrize(
    'grid_size, num_landmarks, expected',
    [
        ((14, 14), 64, (8, 8)),
        ((14, 14), 65, (8, 8)),
        ((14, 14), 50, (7, 7)),
        ((56, 28), 32, (8, 4)),
        ((28, 56), 32, (4, 8)),
        ((7, 7), 64, (7, 7)),
        ((3, 100), 10, (1, 10)),
        ((13, 17), 1, (1, 1)),
    ],
)
def test_nystrom_cuts_the_grid_into_cells_that_are_nearly_square(grid_size, num_landmarks, expected):
    assert landmark_grid(grid_size, num_landmarks) == expected


def test_nystrom_landmarks_on_the_grid_preserve_two_dimensional_regions():
    # two constant halves of an image: cells separate left from right, strips as wide as the image do not
    left = torch.arange(8).expand(8, 8).flatten() < 4
    q = torch.where(left[:, None], 3.0, -3.0)[None, None].double()
    v = left[None, None, :, None].double()
    expected = softmax_naive(q, q, v, 1.0)
    on_grid, segments = (nystrom_attention(q, q, v, 4, 6, 1.0, grid_size) for grid_size in ((8, 8), None))
    assert relative_error(on_grid, expected) < 1e-3
    assert relative_error(segments, expected) > 0.2


@pytest.mark.parametrize('kwargs, most', [({}, 21), ({'landmarks': 'grid'}, 20)], ids=str)
def test_nystrom_warns_if_every_token_is_a_landmark(kwargs, most):
    with pytest.warns(UserWarning, match=f'num_landmarks={most} makes each of {most} tokens a landmark'):
        build('nystrom', GRID, 1, num_landmarks=most, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        build('nystrom', GRID, 1, num_landmarks=most - 1, **kwargs)


def test_an_unknown_kind_of_nystrom_landmarks_is_refused():
    with pytest.raises(ValueError, match="'segment' or 'grid', not 'pool'"):
        build('nystrom', landmarks='pool')


def test_iterative_pseudo_inverse_inverts():
    q, k, _ = qkv(16)
    a = (q @ k.mT).softmax(dim=-1)
    z = iterative_pinv(a, 30)
    torch.testing.assert_close(a @ z @ a, a, rtol=0, atol=1e-9)


@pytest.mark.parametrize('landmarks', ['segment', 'grid'])
def test_the_convolution_of_nystrom_runs_over_prefix_and_grid_as_one_sequence(landmarks):
    mixer = build('nystrom', GRID, 1, num_landmarks=5, landmarks=landmarks, conv_kernel_size=3)
    q, k, v = torch.randn(3, 1, mixer.num_heads, 1 + GRID[0] * GRID[1], 4, dtype=torch.float64)
    with torch.no_grad():
        added = mixer.mix(q, k, v, GRID)
        mixer.conv = None
        added -= mixer.mix(q, k, v, GRID)
        mixer.conv = build('nystrom', GRID, 1, num_landmarks=5, conv_kernel_size=3).conv
    before, own, after = mixer.conv.weight.detach().view(mixer.num_heads, 3, 1).unbind(dim=1)
    # the class token is next to the first patch, and the last patch of a row next to the first of the row below
    last = GRID[1]
    expected = before[:, None] * v[0, :, last - 1 : last] + own[:, None] * v[0, :, last : last + 1]
    torch.testing.assert_close(added[0, :, last], (expected + after[:, None] * v[0, :, last + 1 : last + 2])[:, 0])
    torch.testing.assert_close(added[0, :, 0], own * v[0, :, 0] + after * v[0, :, 1])


@pytest.mark.parametrize('size', [0, 4, -3])
def test_a_nystrom_convolution_of_even_size_is_refused(size):
    with pytest.raises(ValueError, match=f'must be odd and at least 1, or None, not {size}'):
        build('nystrom', num_landmarks=5, conv_kernel_size=size)


def test_nystrom_with_a_convolution_has_no_attention_maps_and_is_compared_with_its_own_limit():
    mixer = build('nystrom', GRID, num_landmarks=19, num_iterations=40, conv_kernel_size=5)
    mixer.num_landmarks = 20
    x = torch.randn(2, 20, mixer.dim, dtype=torch.float64)
    assert attention_weights(mixer, x, GRID) is None
    with torch.no_grad():
        assert mixer.health(*mixer.to_qkv(x, GRID), GRID)['softmax_error'].max() < 1e-6
