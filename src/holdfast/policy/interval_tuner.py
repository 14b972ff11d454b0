"""Choose the interval of a tier's checkpoints while the run goes on: a state machine without I/O.

The best interval follows the measured cost and the failure rate at every step. The chosen one does
not: it is changed only where it wastes more than `FACTOR_MIN` times as much as the best one, or
exceeds the budget, so that noise in a measurement changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.policy.best_interval import FACTOR_MIN, best_interval_secs, waste

LONGEST_SECS = 3600.0
"""No interval is longer, however rare failures are believed to be."""
BUDGET_SLACK = 1.1
"""By how much the measured cost may exceed the budget before the interval is changed."""
RESOLUTION_SHARE = 0.01
"""A cost below this share of a step cannot be told from the noise of steps."""
RESOLUTION_SECS = 0.001
"""The same where the duration of a step is not known."""


def resolution_secs(step_secs: float | None) -> float:
    """Return the cost below which a measured one is noise."""
    return RESOLUTION_SECS if not step_secs else step_secs * RESOLUTION_SHARE


@dataclass(slots=True)
class IntervalTuner:
    """The interval of one tier.

    Attributes:
        interval_secs: The interval in force; None until a cost was measured.
    """

    interval_secs: float | None = None

    def update(
        self,
        *,
        cost_secs: float | None,
        per_sec: float,
        max_overhead: float | None,
        least_secs: float = 0.0,
    ) -> bool:
        """Take the newest measurements; return whether the interval has changed.

        Args:
            cost_secs: By how much a checkpoint lengthens the training, at least `resolution_secs`,
                so that noise cannot make it free; None: not known yet.
            per_sec: The failures a second for which this tier is the nearest one.
            max_overhead: The share of the time that checkpoints may cost; None: no limit.
            least_secs: The time that a checkpoint takes to reach the tier.
        """
        if cost_secs is None:
            return False
        best = min(best_interval_secs(cost_secs, per_sec), LONGEST_SECS)
        if max_overhead is not None:
            best = max(best, cost_secs / max_overhead)
        best = max(best, least_secs)
        present = self.interval_secs
        if present is not None and not self._is_bad(
            present, best, cost_secs, per_sec, max_overhead
        ):
            return False
        self.interval_secs = best
        return best != present

    def _is_bad(
        self,
        present: float,
        best: float,
        cost_secs: float,
        per_sec: float,
        max_overhead: float | None,
    ) -> bool:
        if present <= 0 or best <= 0:
            return present != best
        if max_overhead is not None and cost_secs > present * max_overhead * BUDGET_SLACK:
            return True
        now, least = (waste(secs, cost_secs, 0.0, per_sec) for secs in (present, best))
        return now > FACTOR_MIN * least
