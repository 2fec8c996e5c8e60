"""Performer: how its random features approximate softmax attention."""

import pytest
import torch
from helpers import build, qkv, relative_error

from vitzoo.mixers.performer import orthogonal_features, performer_attention
from vitzoo.mixers.softmax import softmax_naive


def test_performer_error_falls_towards_softmax_as_features_grow():
    q, k, v = qkv(32, std=0.5)
    expected = softmax_naive(q, k, v, 8**-0.5)
    errors = []
    for num_features in (32, 512, 8192):
        runs = []
        for seed in range(4):
            features = orthogonal_features(num_features, 8, torch.Generator().manual_seed(seed)).double()
            runs.append(relative_error(performer_attention(q, k, v, features, 8**-0.5), expected))
        errors.append(sum(runs) / len(runs))
    # a Monte Carlo error falls with the square root of the number of samples: 16 times more, 4 times less
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2
    assert errors[2] < 0.05


def test_performer_features_are_orthogonal():
    features = orthogonal_features(20, 8, torch.Generator().manual_seed(0))
    block = torch.nn.functional.normalize(features[:8], dim=1)
    torch.testing.assert_close(block @ block.T, torch.eye(8), rtol=0, atol=1e-5)
    assert features.shape == (20, 8)


@pytest.mark.parametrize('std', [4, 8])
def test_performer_does_not_collapse_to_the_mean(std):
    q, k, v = qkv(64, std=std)
    features = orthogonal_features(64, 8, torch.Generator().manual_seed(0)).double()
    out = performer_attention(q, k, v, features, 8**-0.5)
    assert out.std(dim=2).mean() > 0.1 * v.std()


def test_the_published_eps_is_no_different_for_small_queries_and_gives_the_mean_for_large_ones():
    features = orthogonal_features(64, 8, torch.Generator().manual_seed(0)).double()
    for std, without, close_to_mean in ((0.1, 1e-4, False), (8, None, True)):
        q, k, v = qkv(64, std=std)
        out = performer_attention(q, k, v, features, 8**-0.5, eps=1e-4)
        if without:
            assert relative_error(out, performer_attention(q, k, v, features, 8**-0.5)) < without
        mean = v.mean(dim=2, keepdim=True).expand_as(out)
        assert (relative_error(out, mean) < 1e-3) == close_to_mean


@pytest.mark.parametrize('kernel, eps, least', [('softmax', -1e-4, 'at least 0'), ('relu', 0.0, 'above 0')])
def test_an_eps_that_could_divide_by_zero_is_refused(kernel, eps, least):
    with pytest.raises(ValueError, match=f'{kernel}.* must be {least}, not {eps}'):
        build('performer', kernel=kernel, eps=eps)
    assert build('performer').eps == 0 and build('performer', kernel='relu').eps == 1e-3
