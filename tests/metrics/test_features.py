"""Nearest neighbours and linear probes of features."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize('classify', [nearest_neighbors, linear_probe])
def test_scores_of_many_classes_are_computed_of_some_images_at_a_time(classify, monkeypatch):
    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            self.found = max(self.found, made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(5, 3, generator=generator), torch.randn(200, 3, generator=generator)
    labels, largest = torch.tensor([0, 999, 3, 3, 500]), []
    for cells in (2**26, 2000):
        monkeypatch.setattr(features, '_MAX_CELLS', cells)
        with Largest() as mode:
            found = classify(bank, labels, queries)
        largest.append((mode.found, found.tolist()))
    assert largest[0][0] == 200 * 1000 and largest[1][0] <= 3 * 1000
    assert largest[0][1] == largest[1][1]


def test_a_neighbour_votes_with_its_similarity_whatever_the_length_of_its_features():
    bank = torch.tensor([[1.0, 0.1], [30.0, 60.0], [30.0, -60.0], [-1.0, 0.0]])
    assert nearest_neighbors(bank, torch.tensor([0, 1, 1, 2]), torch.tensor([[5.0, 0.0]]), count=3).item() == 0
    assert nearest_neighbors(bank, torch.tensor([0, 1, 1, 2]), torch.tensor([[5.0, 5.0]]), count=3).item() == 1


def test_the_linear_probe_is_a_ridge_regression_with_a_constant():
    generator = torch.Generator().manual_seed(0)
    bank, queries = (torch.randn(count, 4, generator=generator) * torch.tensor([1, 1, 9, 9]) + 5 for count in (24, 200))
    # classes of unequal size that overlap
    labels = (torch.arange(24) % 6).clamp(max=2)
    std, mean = torch.std_mean(bank.double(), dim=0, correction=0)
    x, one_hot = (bank - mean) / std, F.one_hot(labels).double()
    # the penalty as rows of the data
    left = torch.cat([x, (0.01 * 24) ** 0.5 * torch.eye(4)])
    right = torch.cat([one_hot - one_hot.mean(dim=0), torch.zeros(4, 3)])
    expected = (queries - mean) / std @ torch.linalg.lstsq(left, right).solution + one_hot.mean(dim=0)
    assert torch.equal(linear_probe(bank, labels, queries), expected.argmax(dim=1))
