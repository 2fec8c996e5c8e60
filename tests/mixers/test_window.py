"""Window attention by rows of tiles, as on a CPU, against all tiles at once, as elsewhere, and the naive form; rows."""

import pytest
import torch
from timm.layers import set_exportable

from vitzoo.mixers import _recompute, _window_cpu
from vitzoo.mixers._window import take_rows, window_attention, window_attention_naive

HEADS = 3
NAMES = ('q', 'k', 'v', 'k_shared', 'v_shared', 'bias', 'bias_shared')
CASES = {
    'whole': ((6, 6), 3, 1, 2, True, True),
    'ragged': ((7, 11), 3, 1, 2, True, True),
    'row': ((1, 23), 5, 5, 0, False, False),
    'wide_halo': ((5, 9), 2, 5, 1, True, False),
    'no_halo': ((5, 8), 4, 0, 1, False, True),
    'one_tile': ((4, 5), 7, 3, 3, True, False),
}


def make_inputs(grid_size, window_size, halo, num_shared, has_bias, has_shared_bias, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, HEADS, grid_size[0] * grid_size[1], 4)] * 3 + [(2, HEADS, num_shared, 4)] * 2
    sizes.append((HEADS, window_size**2, (window_size + 2 * halo) ** 2) if has_bias else None)
    sizes.append((HEADS, num_shared) if has_shared_bias else None)
    return [size and torch.randn(size, generator=generator, dtype=dtype).requires_grad_() for size in sizes]


def run(op, inputs, grid_size, window_size, halo):
    """The output and the gradient of every input."""
    *tensors, bias, bias_shared = inputs
    out = op(*tensors, grid_size, window_size, halo, 0.7, bias, bias_shared)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    present = [x for x in inputs if x is not None]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), present)]


@pytest.mark.parametrize('stored', [0, 2**20])
@pytest.mark.parametrize('num_scores', [1, 2**10, 2**20])
@pytest.mark.parametrize('case', CASES)
def test_rows_of_tiles_all_tiles_and_the_naive_form_agree(case, num_scores, stored, monkeypatch):
    # from one sample and head at a time to all at once
    monkeypatch.setattr(_window_cpu, '_NUM_SCORES', num_scores)
    # weights that are computed again in the backward pass, and those that are kept
    monkeypatch.setattr(_recompute, '_STORED_SAMPLE', stored)
    grid_size, window_size, halo, *_ = CASES[case]
    inputs = make_inputs(*CASES[case])
    rows = run(window_attention, inputs, grid_size, window_size, halo)
    with set_exportable(True):
        tiles = run(window_attention, inputs, grid_size, window_size, halo)
    naive = run(window_attention_naive, inputs, grid_size, window_size, halo)
    for a, b, c in zip(rows, tiles, naive, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(b, c, rtol=1e-9, atol=1e-9)


def test_one_bias_serves_all_heads():
    inputs = make_inputs((7, 11), 3, 1, 2, True, True)
    inputs[5] = inputs[5].detach()[:1].requires_grad_()
    for a, b in zip(
        *(run(op, inputs, (7, 11), 3, 1) for op in (window_attention, window_attention_naive)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_no_scores_of_a_long_sequence_are_saved_for_the_backward_pass(monkeypatch):
    # any sequence is long
    monkeypatch.setattr(_recompute, '_STORED_SAMPLE', 0)
    inputs = make_inputs((12, 12), 3, 1, 2, True, True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        *tensors, bias, bias_shared = inputs
        window_attention(*tensors, (12, 12), 3, 1, 0.7, bias, bias_shared)
    # q, k, v, out, shared keys and values, lse, and the bias at most twice
    tokens, head_dim = inputs[0].numel(), 4
    small = 2 * inputs[3].numel() + tokens // head_dim + 2 * (bias.numel() + HEADS * 9 * 2)
    assert sum(kept) <= 4 * tokens + small


@pytest.mark.parametrize('index_shape', [(1, 1), (1, 3), (2, 3)])
def test_rows_are_those_of_an_index_and_so_are_their_gradients(index_shape):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 4, 2, dtype=torch.float64).transpose(1, 2).requires_grad_()  # (B, heads, N, 4, 2)
    index = torch.randint(5, (*index_shape, 7))
    expected = torch.stack(
        [
            torch.stack([head[rows] for head, rows in zip(sample, of_heads)])
            for sample, of_heads in zip(x, index.expand(2, 3, 7))
        ]
    )
    rows = take_rows(x, index)
    assert torch.equal(rows, expected)
    grad = torch.randn_like(rows)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (rows, expected)))
