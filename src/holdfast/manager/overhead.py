"""Measure what checkpoints cost the training: how much longer its steps are during a save.

A step lasts from one call of `save` to the next. Steps during which nothing is being saved are
quiet, and their median is the duration of a step without a save. The cost of a save is the total
duration of the steps from its acceptance to its end, minus as many median quiet steps. Medians keep
an occasional evaluation, or a step that compiles, from being counted as the cost of a checkpoint.

If only one tier has a budget, only its saves are counted: the other tier may save at every step,
so its cost is part of the duration of a quiet step.
"""

from __future__ import annotations

import statistics
from collections import deque

from holdfast.job.options import Options
from holdfast.manager.progress import Reach, SavesInFlight
from holdfast.policy.save_decision_policy import has_budget

QUIET_COUNT_MIN = 5
"""How many quiet steps a cost needs for comparison."""
QUIET_COUNT_MAX = 64
"""How many of the newest quiet steps are kept."""
COST_COUNT_MAX = 5
"""How many of the newest costs the reported median is taken of."""


def meter_for(options: Options) -> OverheadMeter | None:
    """Return a meter if a policy has a budget, else None, so that no step has to read the clock."""
    of_ram = options.ram.save_decision_policy if options.ram is not None else None
    has_ram = of_ram is not None and has_budget(of_ram)
    if not has_budget(options.save):
        return OverheadMeter(Reach.SEALED) if has_ram else None
    return OverheadMeter(Reach.FINISHED if has_ram else Reach.DURABLE)


class OverheadMeter:
    """Compute the cost of a checkpoint from the durations of steps. Owned by the training thread.

    Args:
        reach: Which saves count, and until which state.
    """

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self._quiet_secs: deque[float] = deque(maxlen=QUIET_COUNT_MAX)
        self._costs_secs: deque[float] = deque(maxlen=COST_COUNT_MAX)
        self._last: float | None = None
        self._accepted_count = 0
        self._was_saving = False
        self._has_saved = False
        self._count = 0
        self._total_secs = 0.0
        self._known_count = 0

    def stepped(self, now: float, saving: SavesInFlight) -> float | None:
        """Record the end of a step.

        Args:
            now: The time of its end, in seconds of a monotonic clock.
            saving: The saves that count. A save may end within the step in which it began.

        Returns:
            The cost of a checkpoint in seconds if this step has updated it, else None.
        """
        last, self._last = self._last, now
        accepted_count, is_saving = saving
        has_begun = accepted_count > self._accepted_count
        is_quiet = not (has_begun or self._was_saving or is_saving)
        self._accepted_count, self._was_saving = saving
        self._has_saved |= not is_quiet
        if last is not None and is_quiet:
            self._quiet_secs.append(now - last)
        elif last is not None:
            self._count += 1
            self._total_secs += now - last
        if is_saving or not self._has_saved or len(self._quiet_secs) < QUIET_COUNT_MIN:
            return None
        own_secs = self._count * statistics.median(self._quiet_secs)
        self._known_count += 1
        if self._known_count == 2:
            # The first checkpoint also created its files and pages, so its cost is discarded once a
            # second one is known.
            self._costs_secs.clear()
        self._costs_secs.append(max(0.0, self._total_secs - own_secs))
        self._count, self._total_secs, self._has_saved = 0, 0.0, False
        return statistics.median(self._costs_secs)

    def paused(self) -> None:
        """Record an interruption between two steps, such as a restore; skip the next step."""
        self._last = None
