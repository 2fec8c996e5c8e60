"""Long-short attention: its limit, and the relative bias of the published models."""

import pytest
import torch
from helpers import GRID, build, tokens
from torch.nn import functional as F

from vitzoo.mixers.softmax import softmax_naive


@pytest.mark.parametrize('window_size', [5, 9])
def test_long_short_with_one_window_and_rank_0_is_softmax_on_normalized_keys_and_values(window_size):
    mixer = build('ls', (5, 5), window_size=window_size, rank=0)
    x = tokens(mixer)
    q, k, v = mixer.to_qkv(x, (5, 5))
    norm = mixer.norm_full
    k, v = (F.layer_norm(y.transpose(1, 2).flatten(2), (mixer.dim,), norm.weight, norm.bias) for y in (k, v))
    k, v = (y.unflatten(2, (mixer.num_heads, -1)).transpose(1, 2) for y in (k, v))
    expected = mixer.project(softmax_naive(q, k, v, mixer.scale))
    torch.testing.assert_close(mixer(x, (5, 5)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('window_size', [5, 9])
def test_long_short_without_norms_is_softmax_attention(window_size):
    mixer = build('ls', (5, 5), window_size=window_size, rank=0, dual_norm=False)
    x = tokens(mixer)
    expected = mixer.project(softmax_naive(*mixer.to_qkv(x, (5, 5)), mixer.scale))
    torch.testing.assert_close(mixer(x, (5, 5)), expected, rtol=1e-9, atol=1e-9)


def test_published_long_short_bias_shares_rows_and_the_clean_one_does_not():
    for window_size, rows in ((7, 253), (8, 375)):
        published = build('ls', window_size=window_size, rel_bias='nvidia').rel_bias
        clean = build('ls', window_size=window_size, rel_bias='table').rel_bias
        assert published.table.shape[0] == rows
        side = window_size + 2 * (window_size // 2)
        offsets = (window_size + side - 1) ** 2
        assert clean.table.shape[0] == offsets == clean.index.unique().numel()
        assert published.index.unique().numel() < offsets


def test_ls_trains_if_it_is_compiled_without_inductor():
    mixer = build('ls', GRID, 1, window_size=3, rank=2, dtype=torch.float32)
    x = tokens(mixer, dtype=torch.float32).requires_grad_()
    mixer(x, GRID).square().sum().backward()
    expected, x.grad = x.grad, None
    torch.compile(mixer, backend='aot_eager', fullgraph=True)(x, GRID).square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)
