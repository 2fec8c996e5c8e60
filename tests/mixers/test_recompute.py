"""Functions of heads that are recomputed in the backward pass."""

import pytest
import torch
from helpers import build, tokens
from torch.nn import functional as F

from vitzoo.bench._harness import call_peak_megabytes
from vitzoo.mixers import _gated_scan, _recompute, gated_linear
from vitzoo.mixers._recompute import apply_to_heads

MIXERS = ['aft_local', 'bigbird']


@pytest.fixture
def store_little(monkeypatch):
    """Recompute from this many elements on."""
    return lambda num_elements: monkeypatch.setattr(_recompute, '_STORED', num_elements)


def output_and_gradients(mixer, x, grid_size):
    x = x.clone().requires_grad_()
    out = mixer(x, grid_size)
    return out, *torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()])


@pytest.mark.parametrize('stored', [1, 10**5])
@pytest.mark.parametrize('name', MIXERS)
def test_recomputed_heads_give_the_same_outputs_and_gradients(name, stored, store_little):
    mixer = build(name, (5, 7), 1)
    x = tokens(mixer, batch_size=3)
    whole = output_and_gradients(mixer, x, (5, 7))
    store_little(stored)
    for one, other in zip(output_and_gradients(mixer, x, (5, 7)), whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize('size', [1, 2, 3, 5, 6, 12, 13])
def test_all_samples_and_heads_are_computed_once_and_in_order(size, store_little):
    store_little(12 * size)
    seen = []

    def double(x, heads):
        seen.extend(x[..., 0].flatten().tolist())
        return 2 * x * heads

    x = torch.arange(12.0).reshape(4, 3, 1)
    out = apply_to_heads(double, (x, torch.ones(1, 3, 1)), 12)
    assert torch.equal(out, 2 * x)
    assert sorted(seen) == x.flatten().tolist()


def test_dropout_is_the_same_when_it_is_recomputed(store_little):
    store_little(1)
    x = torch.ones(2, 3, 50, requires_grad=True)
    out = apply_to_heads(lambda x: F.dropout(x, 0.5), (x,), 50)
    out.sum().backward()
    assert torch.equal(x.grad, out)
    assert 0 < int((out == 0).sum()) < x.numel()


@pytest.mark.parametrize('name', MIXERS)
def test_memory_of_a_training_step_falls(name, store_little):
    mixer = build(name, (16, 16), dtype=torch.float32)
    x = tokens(mixer, batch_size=4, dtype=torch.float32)
    kept, recomputed = [], []
    for megabytes, stored in ((kept, 2**40), (recomputed, 1)):
        store_little(stored)
        megabytes.append(call_peak_megabytes(lambda _: output_and_gradients(mixer, x, (16, 16)), x.device))
    assert recomputed[0] < 0.5 * kept[0]


def test_a_training_step_of_gated_linear_needs_less_memory_than_its_plain_form(monkeypatch):
    mixer = build('gated_linear', (16, 16), dtype=torch.float32)
    x = tokens(mixer, batch_size=4, dtype=torch.float32)
    # a head at a time
    monkeypatch.setattr(_gated_scan, 'CACHED', 1)
    megabytes = [call_peak_megabytes(lambda _: output_and_gradients(mixer, x, (16, 16)), x.device)]
    monkeypatch.setattr(gated_linear, 'gated_scan', _gated_scan._plain)
    megabytes.append(call_peak_megabytes(lambda _: output_and_gradients(mixer, x, (16, 16)), x.device))
    assert megabytes[0] < 0.5 * megabytes[1]
