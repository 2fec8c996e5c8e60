"""Error analysis, against numbers that were counted by hand."""

from math import isnan

import pytest
import torch

from vitzoo.metrics.confusion import calibrate, confusion_matrix, most_confident, most_confused, precision, recall

#                       cat x 4     dog x 3  owl x 1; class 3 has no images and no guesses
LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
GUESSES = torch.tensor([0, 1, 1, 2, 1, 0, 1, 0])
CONFIDENCE = torch.tensor([0.9, 0.4, 0.8, 0.5, 0.7, 0.6, 0.3, 1.0])
MATRIX = [[1, 2, 1, 0], [1, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_the_matrix_counts_predictions_by_class():
    matrix = confusion_matrix(LABELS, GUESSES, 4)
    assert matrix.tolist() == MATRIX
    assert matrix.sum() == len(LABELS)


def test_recall_and_precision_are_shares_of_rows_and_columns():
    matrix = torch.tensor(MATRIX)
    assert recall(matrix).tolist()[:3] == pytest.approx([1 / 4, 2 / 3, 0])
    assert precision(matrix).tolist()[:3] == pytest.approx([1 / 3, 2 / 4, 0])
    assert isnan(recall(matrix)[3]) and isnan(precision(matrix)[3])


def test_the_worst_pairs_come_first():
    # of those confused once, owls are the fewest, then dogs
    assert most_confused(torch.tensor(MATRIX), 10) == [(0, 1, 2), (2, 0, 1), (1, 0, 1), (0, 2, 1)]
    assert most_confused(torch.tensor(MATRIX), 1) == [(0, 1, 2)]
    assert most_confused(torch.eye(3, dtype=torch.long), 5) == []


def test_examples_of_a_pair_are_its_most_confident_mistakes():
    assert most_confident(LABELS, GUESSES, CONFIDENCE, (0, 1), 5) == [2, 1]
    assert most_confident(LABELS, GUESSES, CONFIDENCE, (0, 1), 1) == [2]
    assert most_confident(LABELS, GUESSES, CONFIDENCE, (2, 1), 5) == []


def test_calibration_bins_hold_their_upper_bound():
    confidence = torch.tensor([0.2, 0.5, 0.50001, 0.75, 1.0, 1.0])
    correct = torch.tensor([True, False, True, True, True, False])
    found = calibrate(confidence, correct, num_bins=2)
    assert found.counts.tolist() == [2, 4]
    assert found.confidence.tolist() == pytest.approx([0.35, 3.25001 / 4])
    assert found.accuracy.tolist() == pytest.approx([1 / 2, 3 / 4])
    assert found.error == pytest.approx((2 * 0.15 + 4 * 0.0625025) / 6, abs=1e-6)


def test_an_empty_bin_does_not_count():
    found = calibrate(torch.tensor([0.95, 0.95]), torch.tensor([True, False]))
    assert found.counts.tolist() == [0] * 14 + [2]
    assert isnan(found.accuracy[0]) and found.error == pytest.approx(0.45)


def test_honest_confidence_has_no_calibration_error():
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(200_000, generator=generator)
    correct = torch.rand(200_000, generator=generator) < confidence
    assert calibrate(confidence, correct).error < 0.005
    assert calibrate(confidence, ~correct).error == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize('bound', [k / 15 for k in range(1, 15)])
def test_a_confidence_at_a_bound_falls_below_it(bound):
    found = calibrate(torch.tensor([bound], dtype=torch.float64), torch.tensor([True]))
    assert found.counts.nonzero().item() == round(15 * bound) - 1
