"""Means and paired differences over seeds, with 95 % confidence intervals of Student's t distribution."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

_LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean of n values; `half_width` of its interval is None for a single value."""

    n: int
    mean: float
    half_width: float | None = None

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.half_width is None else self.mean + self.half_width


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value, and its interval."""
    n = len(values)
    if n == 1:
        return Estimate(1, values[0])
    return Estimate(n, fmean(values), t_quantile(n - 1) * stdev(values) / math.sqrt(n))


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """The mean difference over the seeds that both have, None if there are none.

    Pairs remove the variation that models share with the same seed: order of the images, augmentation, held-out images.
    """
    differences = [value - baseline[seed] for seed, value in values.items() if seed in baseline]
    return estimate(differences) if differences else None


def judge(difference: Estimate | None, sign: int) -> str:
    """'better' or 'worse' if the interval of a paired difference excludes zero, else an empty string.

    Equal differences have an interval of width zero, which says nothing about their spread; they are not judged.

    Args:
        sign: 1 if higher is better, -1 if lower is, 0 if neither.
    """
    if difference is None or sign == 0:
        return ''
    low, high = difference.low, difference.high
    # equal differences of numbers that are not exact have a width of rounding errors
    if low is None or high is None or low <= 0 <= high or math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-9):
        return ''
    return 'better' if difference.mean * sign > 0 else 'worse'


@cache
def t_quantile(freedom: int) -> float:
    """The number that |t| does not exceed with a probability of 95 %, by bisection."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, freedom) < _LEVEL else (low, middle)
    return (low + high) / 2


def _t_probability(t: float, freedom: int) -> float:
    """P(|T| <= t), Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    is_odd = freedom % 2
    power, total = math.cos(angle) if is_odd else 1.0, 0.0
    for k in range(is_odd, freedom - 1, 2):
        total += power
        power *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
