"""Where a classifier errs: accuracy per class, what is taken for what, and whether its confidence can be trusted."""

from dataclasses import dataclass

import torch
from torch import Tensor


def confusion_matrix(labels: Tensor, predictions: Tensor, num_classes: int) -> Tensor:
    """How many images of each class (row) were taken for each class (column): two (N,) -> (K, K)."""
    return torch.bincount(labels * num_classes + predictions, minlength=num_classes**2).view(num_classes, num_classes)


def recall(matrix: Tensor) -> Tensor:
    """Share of the images of each class that were recognised, its accuracy: (K, K) -> (K,), nan for no images."""
    return matrix.diagonal().double() / matrix.sum(dim=1)


def precision(matrix: Tensor) -> Tensor:
    """Share of the images taken for each class that are of it: (K, K) -> (K,), nan for no images."""
    return matrix.diagonal().double() / matrix.sum(dim=0)


def most_confused(matrix: Tensor, num_pairs: int) -> list[tuple[int, int, int]]:
    """The pairs (class, what it was taken for, how many times) that were confused most often, the first the worst.

    Among pairs of equal number, the one whose class has fewer images comes first. Pairs never confused are left out.
    """
    mistakes = matrix - torch.diag(matrix.diagonal())
    pairs = mistakes.nonzero().tolist()
    sizes = matrix.sum(dim=1)
    pairs.sort(key=lambda pair: (-int(mistakes[tuple(pair)]), int(sizes[pair[0]]), pair))
    return [(i, j, int(mistakes[i, j])) for i, j in pairs[:num_pairs]]


def most_confident(labels: Tensor, predictions: Tensor, confidence: Tensor, pair: tuple[int, int], n: int) -> list[int]:
    """Indices of up to n images of the class pair[0] that were taken for pair[1], the most confident mistakes first."""
    indices = ((labels == pair[0]) & (predictions == pair[1])).nonzero().flatten()
    return indices[confidence[indices].argsort(descending=True, stable=True)][:n].tolist()


@dataclass
class Calibration:
    """Bins of equal width of the confidence, from 0 to 1: images in each, and their mean confidence and accuracy.

    The means of a bin without images are nan.
    """

    counts: Tensor  # (bins,)
    confidence: Tensor  # (bins,)
    accuracy: Tensor  # (bins,)

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance between confidence and accuracy, bins weighed by images.

        Guo et al., equation 3, https://arxiv.org/abs/1706.04599
        """
        gaps = (self.confidence - self.accuracy).abs().nan_to_num() * self.counts
        return (gaps.sum() / self.counts.sum()).item()


def calibrate(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> Calibration:
    """Bin predictions by the probability of the likeliest class (N,), and whether that was right (N,).

    A bin holds its upper bound and not its lower one.
    """
    confidence = confidence.double()
    bounds = torch.arange(1, num_bins, dtype=torch.float64) / num_bins
    bins = torch.bucketize(confidence, bounds)
    counts = torch.bincount(bins, minlength=num_bins)
    sums = (torch.bincount(bins, weights=values, minlength=num_bins) for values in (confidence, correct.double()))
    return Calibration(counts, *(total / counts for total in sums))
