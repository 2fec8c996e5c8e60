"""Nearest neighbours and linear probes of features."""

import pytest
import torch

from vitzoo.metrics import features
from vitzoo.metrics.features import linear_probe, nearest_neighbors


@pytest.mark.parametrize('cells', [2**26, 100])
def test_neighbours_and_probe_find_separate_clusters(cells, monkeypatch):
    # of 30 queries in one part, or in parts of three
    monkeypatch.setattr(features, '_MAX_CELLS', cells)
    generator = torch.Generator().manual_seed(0)
    centers = 5 * torch.randn(3, 6, generator=generator)
    labels = torch.arange(30) % 3
    bank, queries = (centers[labels] + torch.randn(30, 6, generator=generator) for _ in range(2))
    assert torch.equal(nearest_neighbors(bank, labels, queries), labels)
    assert torch.equal(linear_probe(bank, labels, queries), labels)
