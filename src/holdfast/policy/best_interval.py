"""Balance what checkpoints cost with what failures cost: the best interval, and the waste of any.

As by Young (1974) and Daly (2006). A cost is the time by which a checkpoint lengthens the training,
and not the time of a call. Pure functions.
"""

from __future__ import annotations

import math

FACTOR_MIN = 1.5
"""A change is worth it beyond this factor of the least waste: half or double the best interval
wastes 1.25 times as much."""
BUDGET_LONGEST_SECS = 86_400.0
"""No interval is longer, whatever a budget demands."""
_HALVINGS = 200


def best_interval_secs(cost_secs: float, per_sec: float) -> float:
    """Return the training time between two checkpoints that wastes least.

    Minimises (exp(rate (T + cost)) - 1) / T, the expected time for T of work (Daly, 2006). For a
    small cost it is Young's sqrt(2 cost / rate).

    Args:
        cost_secs: By how much a checkpoint lengthens the training.
        per_sec: Failures a second; without failures the result is infinite.
    """
    if per_sec <= 0:
        return math.inf
    if cost_secs <= 0:
        return 0.0

    def slope(secs: float) -> float:
        return secs * per_sec - 1 + math.exp(-per_sec * (secs + cost_secs))

    low, high = 0.0, 2 / per_sec
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return (low + high) / 2


def budget_interval_secs(cost_secs: float, max_overhead: float) -> float:
    """Return the interval at which checkpoints cost the share `max_overhead` of the time."""
    return min(cost_secs / max_overhead, BUDGET_LONGEST_SECS)


def waste(interval_secs: float, cost_secs: float, secs: float, per_sec: float) -> float:
    """Return the share of the time that a tier costs: its checkpoints, and the steps lost.

    Args:
        interval_secs: The time from one checkpoint to the next.
        cost_secs: By how much one lengthens the training.
        secs: How long one takes until it can be restored.
        per_sec: The failures for which it is the nearest tier.
    """
    if math.isinf(interval_secs):
        return 0.0
    return cost_secs / interval_secs + per_sec * (interval_secs / 2 + secs)
