"""Intervals of Student's t distribution, and paired differences."""

import pytest

from vitzoo.study.intervals import Estimate, estimate, judge, paired_difference, t_quantile


@pytest.mark.parametrize(
    ('freedom', 'published'),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (29, 2.045), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_published_table(freedom, published):
    assert t_quantile(freedom) == pytest.approx(published, abs=5e-4)


def test_an_interval_is_the_mean_and_t_standard_errors():
    found = estimate([80.0, 81.0, 83.0])
    # standard deviation 1.527525, standard error 0.881917
    assert (found.n, found.mean) == (3, pytest.approx(81.33333))
    assert found.half_width == pytest.approx(4.30265 * 0.881917, rel=1e-5)
    assert (found.low, found.high) == pytest.approx((77.5387, 85.1279), abs=1e-3)


def test_one_value_has_no_interval():
    found = estimate([80.0])
    assert (found.half_width, found.low, found.high) == (None, None, None)
    assert judge(found, 1) == ''


def test_differences_are_of_pairs_with_the_same_seed():
    found = paired_difference({0: 82.0, 1: 71.0, 5: 99.0}, {1: 70.0, 0: 80.0, 2: 10.0})
    assert (found.n, found.mean) == (2, 1.5)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_equal_differences_of_accuracies_are_not_judged():
    # one image of 500 more with each seed; the subtractions have different errors
    found = paired_difference({0: 19.6, 1: 20.4}, {0: 19.4, 1: 20.2})
    assert 19.6 - 19.4 != 20.4 - 20.2
    assert found.half_width and judge(found, 1) == ''


@pytest.mark.parametrize(
    ('mean', 'half_width', 'sign', 'verdict'),
    [
        (1.0, 0.5, 1, 'better'),
        (-1.0, 0.5, 1, 'worse'),
        (-1.0, 0.5, -1, 'better'),
        (1.0, 0.5, -1, 'worse'),
        (1.0, 0.5, 0, ''),
        (1.0, 1.0, 1, ''),
        (-1.0, 1.5, 1, ''),
        (1.0, None, 1, ''),
        (1.0, 0.0, 1, ''),
    ],
)
def test_a_difference_is_judged_only_if_its_interval_excludes_zero(mean, half_width, sign, verdict):
    assert judge(Estimate(3, mean, half_width), sign) == verdict
