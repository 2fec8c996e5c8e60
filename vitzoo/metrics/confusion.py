"""Error analysis of a classifier: confusion matrix, recall and precision per class, calibration."""

from dataclasses import dataclass

import torch
from torch import Tensor


def confusion_matrix(labels: Tensor, predictions: Tensor, num_classes: int) -> Tensor:
    """Count the images of each class (row) predicted as each class (column): two (N,) -> (K, K)."""
    return torch.bincount(labels * num_classes + predictions, minlength=num_classes**2).view(num_classes, num_classes)


def recall(matrix: Tensor) -> Tensor:
    """Fraction of the images of each class that are predicted as it: (K, K) -> (K,), nan without images."""
    return matrix.diagonal().double() / matrix.sum(dim=1)


def precision(matrix: Tensor) -> Tensor:
    """Fraction of the images predicted as each class that belong to it: (K, K) -> (K,), nan without predictions."""
    return matrix.diagonal().double() / matrix.sum(dim=0)


def most_confused(matrix: Tensor, num_pairs: int) -> list[tuple[int, int, int]]:
    """The most frequent confusions (class, predicted class, count), in descending order.

    Ties are broken in favour of the class with fewer images. Pairs that are never confused are left out.
    """
    # no copy of the matrix, which is large for many classes
    i, j = matrix.nonzero(as_tuple=True)
    columns = (matrix[i, j], matrix.sum(dim=1)[i], i, j)
    counted = zip(*(column[i != j].tolist() for column in columns))
    pairs = sorted(counted, key=lambda row: (-row[0], *row[1:]))
    return [(i, j, count) for count, _, i, j in pairs[:num_pairs]]


def most_confident(labels: Tensor, predictions: Tensor, confidence: Tensor, pair: tuple[int, int], n: int) -> list[int]:
    """Indices of up to n images of class pair[0] predicted as pair[1], the most confident first."""
    indices = ((labels == pair[0]) & (predictions == pair[1])).nonzero().flatten()
    return indices[confidence[indices].argsort(descending=True, stable=True)][:n].tolist()


@dataclass
class Calibration:
    """Number of images, mean confidence and accuracy in bins of confidence of equal width from 0 to 1.

    The means of an empty bin are nan.
    """

    counts: Tensor  # (bins,)
    confidence: Tensor  # (bins,)
    accuracy: Tensor  # (bins,)

    @property
    def error(self) -> float:
        """Expected calibration error: the gap between confidence and accuracy, averaged over images.

        Guo et al., equation 3, https://arxiv.org/abs/1706.04599
        """
        gaps = (self.confidence - self.accuracy).abs().nan_to_num() * self.counts
        return (gaps.sum() / self.counts.sum()).item()


def calibrate(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> Calibration:
    """Bin predictions by the probability of the top class (N,), given whether it is correct (N,).

    A bin includes its upper bound and excludes its lower bound.
    """
    confidence = confidence.double()
    bounds = torch.arange(1, num_bins, dtype=torch.float64) / num_bins
    bins = torch.bucketize(confidence, bounds)
    counts = torch.bincount(bins, minlength=num_bins)
    sums = (torch.bincount(bins, weights=values, minlength=num_bins) for values in (confidence, correct.double()))
    return Calibration(counts, *(total / counts for total in sums))
