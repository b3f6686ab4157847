"""Statistics that compare two revisions: paired scores with confidence intervals, and a sequential test.

*Paired scores.* Both revisions answer the same questions, so the difference of each question's scores is one
observation. The mean difference has a Student t interval. Scores are between 0 and 1, so an interval is cut to the
possible values.

*Sequential test* (`drop_found`). A canary is compared after every few requests while it runs, so a test for one
comparison would raise a false alarm sooner or later. The mixture sequential probability ratio test is valid at every
comparison. Let d be the difference of two means of n and m outcomes, v its variance, and N(0, tau^2) the prior of the
true difference. If there is no difference, the ratio sqrt(v / (v + tau^2)) * exp(d^2 tau^2 / (2 v (v + tau^2))) is a
martingale. So the probability that it ever exceeds 1 / alpha is at most alpha (Robbins 1970; Johari et al., "Always
valid inference", Operations Research 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import msgspec

CONFIDENCE = 0.95
MAX_FREEDOM = 1000
"""Degrees of freedom beyond which Student's t changes by less than a thousandth."""
MIXTURE = 0.1
"""tau: the size of difference that the sequential test finds fastest; a tenth, as in "ten points worse"."""
MIN_LOOK = 20
"""Minimum number of outcomes of each side before the first comparison. With fewer outcomes, the normal approximation
does not hold.
"""


class Interval(msgspec.Struct, frozen=True):
    """A mean and its 95% confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], lowest: float = 0.0, highest: float = 1.0) -> Interval:
    """Return the mean of independent values with its interval, cut to `lowest` and `highest`.

    One value does not show the spread, so its interval contains all possible values.
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, lowest, highest)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return _interval(mean, deviation, n, lowest, highest)


def interval_of_sums(n: int, total: float, squares: float, lowest: float = 0.0, highest: float = 1.0) -> Interval:
    """Return the same as `mean_interval`, from the number of values (at least 1), their sum and sum of squares."""
    mean = total / n
    if n == 1:
        return Interval(mean, lowest, highest)
    deviation = math.sqrt(max(0.0, squares - n * mean**2) / (n - 1))
    return _interval(mean, deviation, n, lowest, highest)


def _interval(mean: float, deviation: float, n: int, lowest: float, highest: float) -> Interval:
    half = student_t(CONFIDENCE, min(n - 1, MAX_FREEDOM)) * deviation / math.sqrt(n)
    if not deviation:  # equal values: the rule of three bounds the share of unseen other values
        half = (highest - lowest) * min(1.0, 3.0 / n)
    return Interval(mean, max(lowest, mean - half), min(highest, mean + half))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the mean difference of `first` minus `second` on the same questions."""
    return mean_interval([one - other for one, other in zip(first, second, strict=True)], -1.0, 1.0)


def drop_found(good: float, total: int, good_before: float, total_before: int, alpha: float) -> bool:
    """Return whether the rate `good / total` is below the other. All comparisons give at most `alpha` false alarms."""
    if min(total, total_before) < MIN_LOOK:
        return False
    rate, before = good / total, good_before / total_before
    if rate >= before:
        return False
    pooled = (good + good_before + 1) / (total + total_before + 2)
    variance = pooled * (1 - pooled) * (1 / total + 1 / total_before)
    difference, mixed = before - rate, variance + MIXTURE**2
    log_ratio = 0.5 * math.log(variance / mixed) + difference**2 * MIXTURE**2 / (2 * variance * mixed)
    return log_ratio > math.log(1 / alpha)


@cache
def student_t(confidence: float, freedom: int) -> float:
    """Return the quantile of Student's t for a two-sided interval, by bisection of its distribution function."""
    target, low, high = (1 + confidence) / 2, 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_distribution(middle, freedom) < target else (low, middle)
    return (low + high) / 2


def _t_distribution(t: float, freedom: int) -> float:
    """Return the probability below t >= 0, by the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(theta)
    if freedom % 2:
        term, total = cosine, cosine if freedom > 1 else 0.0
        for k in range(3, freedom - 1, 2):
            term *= (k - 1) / k * cosine**2
            total += term
        share = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        term = total = 1.0
        for k in range(2, freedom - 1, 2):
            term *= (k - 1) / k * cosine**2
            total += term
        share = math.sin(theta) * total
    return 0.5 + share / 2
