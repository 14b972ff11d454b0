"""Estimate the rate of failures from few of them, with an interval of belief.

The rate has a Gamma posterior: Poisson failures, and a prior of half a failure in twelve hours,
which a day without a failure moves to one in three days. Large jobs fail every few hours (Llama 3:
466 interruptions in 54 days on 16,384 GPUs), small ones every few weeks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PRIOR_COUNT = 0.5
PRIOR_HOURS = 12.0
BELIEF = 0.9
"""The probability that the rate is in the interval."""
_TERMS_MAX = 10_000
_HALVINGS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRate:
    """Failures in an hour: the mean of the posterior, and the bounds of its middle 90 percent."""

    per_hour: float
    low_per_hour: float
    high_per_hour: float


def failure_rate(count: int, hours: float) -> FailureRate:
    """Return the rate of failures, of which `count` were seen in `hours`."""
    shape, scale_hours = count + PRIOR_COUNT, hours + PRIOR_HOURS
    low, high = (
        gamma_quantile(shape, share) / scale_hours for share in ((1 - BELIEF) / 2, (1 + BELIEF) / 2)
    )
    return FailureRate(per_hour=shape / scale_hours, low_per_hour=low, high_per_hour=high)


def gamma_quantile(shape: float, share: float) -> float:
    """Return x so that a Gamma(shape, 1) variable is below it with probability `share`."""
    low, high = 0.0, shape + 1.0
    while gamma_share(shape, high) < share:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if gamma_share(shape, middle) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def gamma_share(shape: float, x: float) -> float:
    """Return the probability that a Gamma(shape, 1) variable is below `x`, by its power series."""
    if x <= 0:
        return 0.0
    term = total = 1 / shape
    for number in range(1, _TERMS_MAX):
        term *= x / (shape + number)
        total += term
        if term < total * 1e-15:
            break
    return min(1.0, total * math.exp(shape * math.log(x) - x - math.lgamma(shape)))
