"""Choose the interval of a tier's checkpoints while the run goes on: a state machine without I/O.

The best interval follows the measured cost and the failure rate at every step. The chosen one does
not: it is changed only where it wastes more than `FACTOR_MIN` times as much as the best one, or
exceeds the budget, so that noise in a measurement changes nothing. Beyond `FREE_SECS` it is at most
doubled per checkpoint unless the budget demands more, so that a wrong cost is measured again soon.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.policy.best_interval import (
    FACTOR_MIN,
    best_interval_secs,
    budget_interval_secs,
    waste,
)
from holdfast.policy.contexts import CheckpointInfo

LONGEST_SECS = 3600.0
"""No interval is longer, however rare failures are believed to be, unless the budget demands it."""
FREE_SECS = 60.0
"""Up to this an interval may grow at once."""
GROWTH_MAX = 2.0
"""By how much one checkpoint may lengthen a longer one."""
TOLD_FACTOR = 4.0
"""A change by more than this, since the last one that was reported, is reported."""
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
    _checkpoint: CheckpointInfo | None = None
    """The newest checkpoint so far; `_base_secs` was in force when it was taken."""
    _base_secs: float = 0.0
    _told_secs: float | None = None

    def update(
        self,
        *,
        checkpoint: CheckpointInfo | None,
        cost_secs: float | None,
        per_sec: float,
        max_overhead: float | None,
        least_secs: float = 0.0,
    ) -> bool:
        """Take the newest measurements; return whether the interval has changed.

        Args:
            checkpoint: The newest checkpoint; None: there is none yet.
            cost_secs: By how much a checkpoint lengthens the training, at least `resolution_secs`,
                so that noise cannot make it free; None: not known yet.
            per_sec: The failures a second for which this tier is the nearest one.
            max_overhead: The share of the time that checkpoints may cost; None: no limit.
            least_secs: The time that a checkpoint takes to reach the tier.
        """
        present = self.interval_secs
        if checkpoint != self._checkpoint:
            self._checkpoint, self._base_secs = checkpoint, present or 0.0
        if cost_secs is None:
            return False
        if max_overhead is not None:
            least_secs = max(least_secs, budget_interval_secs(cost_secs, max_overhead))
        best = max(min(best_interval_secs(cost_secs, per_sec), LONGEST_SECS), least_secs)
        if present is not None and not self._is_bad(
            present, best, cost_secs, per_sec, max_overhead
        ):
            return False
        most_secs = max(FREE_SECS, GROWTH_MAX * self._base_secs, least_secs)
        self.interval_secs = min(best, most_secs)
        return self.interval_secs != present

    def take_jump(self) -> float | None:
        """Return the interval reported before, if the present one has to be reported; else None.

        The first interval counts as reported.
        """
        reported_secs, present = self._told_secs, self.interval_secs
        if reported_secs is None or not present:
            self._told_secs = present or reported_secs
            return None
        if max(reported_secs, present) <= TOLD_FACTOR * min(reported_secs, present):
            return None
        self._told_secs = present
        return reported_secs

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
