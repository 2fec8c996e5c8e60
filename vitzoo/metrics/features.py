"""Classes of images by their features alone, from those of labelled images: nearest neighbours and a linear probe."""

import torch
from torch import Tensor
from torch.nn import functional as F

_NEIGHBORS = 10
# of the linear probe, relative to the variance of the features
_RIDGE = 1e-2
# similarities, votes or scores of classes in memory at a time, 0.5 GB
_MAX_CELLS = 2**26


def nearest_neighbors(bank: Tensor, labels: Tensor, queries: Tensor, count: int = _NEIGHBORS) -> Tensor:
    """Classes by a vote of the nearest features, weighted by cosine similarity: (M, C), (M,), (N, C) -> (N,)."""
    # autocast would compute a product of float32 in half precision
    bank, queries = (F.normalize(x.double(), dim=1) for x in (bank, queries))
    num_classes, found = int(labels.max()) + 1, []
    for some in queries.split(max(1, _MAX_CELLS // max(len(bank), num_classes))):
        similarity, nearest = (some @ bank.mT).topk(min(count, len(bank)), dim=1)
        votes = similarity.new_zeros(len(some), num_classes)
        found.append(votes.scatter_add_(1, labels[nearest], similarity.clamp(min=0)).argmax(dim=1))
    return torch.cat(found)


def linear_probe(bank: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """Classes by ridge regression of one-hot labels on standardized features: (M, C), (M,), (N, C) -> (N,)."""
    std, mean = torch.std_mean(bank.double(), dim=0, correction=0)
    bank, queries = ((x.double() - mean) / std.clamp(min=1e-6) for x in (bank, queries))
    counts = labels.bincount()
    shares = counts / bank.new_tensor(len(labels))
    # the same as with one-hot labels, a matrix of all images by all classes
    sums = bank.new_zeros(len(counts), bank.shape[1]).index_add_(0, labels, bank)
    gram = bank.mT @ bank + _RIDGE * len(bank) * torch.eye(bank.shape[1], dtype=bank.dtype, device=bank.device)
    weight = torch.linalg.solve(gram, sums.mT - torch.outer(bank.sum(dim=0), shares))
    some = queries.split(max(1, _MAX_CELLS // len(counts)))
    return torch.cat([(part @ weight).add_(shares).argmax(dim=1) for part in some])
