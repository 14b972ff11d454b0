"""What checkpoints cost the training: how much longer its steps are while one is being saved.

A step lasts from one call of `save` to the next. The steps while nothing is being saved are quiet;
their median is what a step takes by itself. What the steps from a save's acceptance to its end took
beyond that is the save's cost. Medians, so that an evaluation now and then, or a step that
compiles, does not count as a checkpoint's doing.

Where one tier alone has a budget, its own saves are counted: what the other tier does, perhaps at
every step, is part of what a step takes by itself.
"""

from __future__ import annotations

import statistics
from collections import deque

from holdfast.job.options import Options
from holdfast.manager.progress import Reach, SavesInFlight
from holdfast.policy.save_decision_policy import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    SaveDecisionPolicy,
)

QUIET_COUNT_MIN = 5
QUIET_COUNT_MAX = 64
COST_COUNT_MAX = 5


def meter_for(options: Options) -> OverheadMeter | None:
    """A meter where a policy has a budget; without one no step pays for a look at the clock."""
    has_ram = options.ram is not None and _has_budget(options.ram.save_decision_policy)
    if not _has_budget(options.save):
        return OverheadMeter(Reach.SEALED) if has_ram else None
    return OverheadMeter(Reach.FINISHED if has_ram else Reach.DURABLE)


def _has_budget(policy: SaveDecisionPolicy | None) -> bool:
    members = policy.policies if isinstance(policy, AnySavePolicy) else (policy,)
    return any(
        isinstance(m, ContinuousCheckpointingPolicy) and m.max_overhead is not None for m in members
    )


class OverheadMeter:
    """Owned by the training thread, which tells it of every step.

    Args:
        reach: the saves that count, and until when.
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
        """Notes that a step ended.

        Args:
            now: the time of its end, seconds of a steady clock.
            saving: the saves that count. One may be finished within the step that began with it.

        Returns:
            What a checkpoint costs, in seconds, where that has just become known anew.
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
            # The first checkpoint also made its files and pages: it stood in until now.
            self._costs_secs.clear()
        self._costs_secs.append(max(0.0, self._total_secs - own_secs))
        self._count, self._total_secs, self._has_saved = 0, 0.0, False
        return statistics.median(self._costs_secs)

    def paused(self) -> None:
        """Something that is no step came between: a restore. The next step is not counted."""
        self._last = None
