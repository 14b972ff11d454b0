"""Measure by how much a checkpoint lengthens the steps beside it: a pure computation on durations.

The cost of a checkpoint is what the steps beside it took beyond the median of quiet steps, those
beside which nothing was saved. Two rules keep anything else that makes a step long (a program that
is compiled again, an evaluation, input that stalls) from being taken for it:

- A step costs at most the part of it in which the checkpoint was being saved.
- Several checkpoints count: the median of the newest ones, and the least until there are enough.
"""

from __future__ import annotations

import statistics
from collections import deque

QUIET_COUNT_MIN = 5
"""How many quiet steps a cost needs for comparison."""
QUIET_COUNT_MAX = 64
"""How many of the newest quiet steps are kept."""
COST_COUNT_MIN = 3
"""How many costs a median needs, without the first one."""
COST_COUNT_MAX = 5
"""How many of the newest costs the median is taken of."""


class StepCost:
    """The cost of a checkpoint, from the steps of one training."""

    def __init__(self) -> None:
        self._quiet_secs: deque[float] = deque(maxlen=QUIET_COUNT_MAX)
        self._costs_secs: deque[float] = deque(maxlen=COST_COUNT_MAX)
        self._cost_count = 0
        self._beside: list[tuple[float, float]] = []

    def add_quiet(self, secs: float) -> None:
        """Add a step during which nothing was saved."""
        self._quiet_secs.append(secs)

    def add_beside(self, secs: float, saving_secs: float) -> None:
        """Add a step beside a checkpoint, `saving_secs` of which it was being saved."""
        self._beside.append((secs, saving_secs))

    def end(self) -> float | None:
        """End a checkpoint with the steps added for it.

        Returns:
            The cost of a checkpoint in seconds. None: too few quiet steps are known; the steps stay
            those of this checkpoint.
        """
        if len(self._quiet_secs) < QUIET_COUNT_MIN:
            return None
        quiet_secs = statistics.median(self._quiet_secs)
        cost_secs = sum(min(secs - quiet_secs, saving) for secs, saving in self._beside)
        self._beside.clear()
        self._cost_count += 1
        if self._cost_count == COST_COUNT_MIN + 1:
            # The first checkpoint also created its files and pages.
            self._costs_secs.popleft()
        self._costs_secs.append(max(0.0, cost_secs))
        is_few = self._cost_count <= COST_COUNT_MIN
        return min(self._costs_secs) if is_few else statistics.median(self._costs_secs)
