"""Measure by how much checkpoints lengthen the steps beside them: a pure computation on durations.

A step beside a checkpoint costs what it took beyond the median of quiet steps, those beside which
nothing was saved. A program that is compiled again, an evaluation or input that stalls also makes a
step long. Therefore a step costs at most the part of it in which a checkpoint was being saved, and
a median needs enough quiet steps. See docs/decisions/0045.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

QUIET_COUNT_MIN = 8
"""How many quiet steps a median needs."""
QUIET_COUNT_MAX = 64
"""How many of the newest quiet steps are kept."""
QUIET_SHARE_MAX = 0.01
"""In which share of a quiet step a checkpoint may have been saved: less is within the noise."""
BESIDE_COUNT_MAX = 1000
"""How many steps beside checkpoints are kept until there are enough quiet ones."""

Label = TypeVar("Label", bound=Hashable)


def is_quiet(secs: float, saving_secs: float) -> bool:
    """Return whether a step shows how long steps are beside which nothing is saved."""
    return saving_secs <= QUIET_SHARE_MAX * secs


class StepCost(Generic[Label]):
    """The costs of the steps of one training, added up by a label of the caller."""

    def __init__(self) -> None:
        self._quiet_secs: deque[float] = deque(maxlen=QUIET_COUNT_MAX)
        self._beside: deque[tuple[Label, int, float, float]] = deque(maxlen=BESIDE_COUNT_MAX)

    @property
    def quiet_secs(self) -> float | None:
        """The median duration of the newest quiet steps; None: there are too few."""
        if len(self._quiet_secs) < QUIET_COUNT_MIN:
            return None
        return statistics.median(self._quiet_secs)

    def add_steps(self, label: Label, secs: float, saving_secs: float, steps: int = 1) -> None:
        """Add some steps in a row.

        Args:
            label: What their cost is added to.
            secs: Their duration together.
            saving_secs: In how much of it a checkpoint was being saved.
            steps: How many.
        """
        if is_quiet(secs, saving_secs):
            self._quiet_secs.extend([secs / steps] * min(steps, QUIET_COUNT_MAX))
        if saving_secs > 0:
            self._beside.append((label, steps, secs, saving_secs))

    def take(self) -> dict[Label, float] | None:
        """Take the costs of the steps since the last call.

        Returns:
            By label, seconds; of steps that were shorter than quiet ones by chance, less than 0, so
            that chance cancels out in a sum. None: there are too few quiet steps; the costs are
            returned once there are enough.
        """
        quiet_secs = self.quiet_secs if self._beside else 0.0
        if quiet_secs is None:
            return None
        costs_secs: dict[Label, float] = {}
        for label, steps, secs, saving_secs in self._beside:
            cost_secs = max(-saving_secs, min(secs - steps * quiet_secs, saving_secs))
            costs_secs[label] = costs_secs.get(label, 0.0) + cost_secs
        self._beside.clear()
        return costs_secs
