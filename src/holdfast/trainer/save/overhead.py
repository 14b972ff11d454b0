"""Measure what a checkpoint costs the training, from the durations of its steps.

A step lasts from one call of `save` to the next. `policy.step_cost` computes the cost of those
beside a save. The median of the newest checkpoints counts, and the least until there are enough,
because a stall may be within the save.

If only one tier has a budget, only its saves are counted: the other tier may save at every step,
so its cost is part of the duration of a quiet step. See docs/decisions/0045.
"""

from __future__ import annotations

import statistics
from collections import deque

from holdfast.policy.save_evaluation import has_budget
from holdfast.policy.step_cost import StepCost
from holdfast.trainer.opening.agent_place import AgentPlace
from holdfast.trainer.options import Options
from holdfast.trainer.save.progress import Progress, Reach, SavesInFlight

COST_COUNT_MIN = 3
"""How many costs a median needs, without the first one."""
COST_COUNT_MAX = 5
"""How many of the newest costs the median is taken of."""


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
        self._steps = StepCost[int]()
        """Labelled by the number of the checkpoint."""
        self._costs_secs: deque[float] = deque(maxlen=COST_COUNT_MAX)
        self._cost_count = 0
        self._number = 0
        self._last: float | None = None
        self._accepted_count = 0
        self._was_saving = False

    def publish_step(self, progress: Progress, place: AgentPlace, now_secs: float) -> None:
        """Record the end of a step, and publish the cost of a checkpoint if that has changed."""
        cost_secs = self.stepped(now_secs, progress.saving(self.reach))
        if cost_secs is not None:
            place.control.cells[place.cost_cell] = int(cost_secs * 1e9)

    def stepped(self, now: float, saving: SavesInFlight) -> float | None:
        """Record the end of a step.

        Args:
            now: The time of its end, in seconds of a monotonic clock.
            saving: The saves that count. A save may end within the step in which it began.

        Returns:
            The cost of a checkpoint in seconds if this step has updated it, else None.
        """
        last, self._last = self._last, now
        has_begun = saving.accepted_count > self._accepted_count
        is_beside = has_begun or self._was_saving or saving.is_going_on
        self._accepted_count, self._was_saving = saving.accepted_count, saving.is_going_on
        if last is not None:
            # A save begins at the start of a step, right after this call.
            until = now if saving.is_going_on else min(max(saving.ended_secs, last), now)
            self._steps.add_steps(self._number, now - last, until - last if is_beside else 0.0)
        if saving.is_going_on:
            return None
        self._number += is_beside
        return self._updated(self._steps.take())

    def _updated(self, costs_secs: dict[int, float] | None) -> float | None:
        """Take the costs of checkpoints that have ended; return the cost of one."""
        if not costs_secs:
            return None
        for cost_secs in costs_secs.values():
            self._cost_count += 1
            if self._cost_count == COST_COUNT_MIN + 1:
                # The first checkpoint also created its files and pages.
                self._costs_secs.popleft()
            self._costs_secs.append(max(0.0, cost_secs))
        is_few = self._cost_count <= COST_COUNT_MIN
        return min(self._costs_secs) if is_few else statistics.median(self._costs_secs)

    def paused(self) -> None:
        """Record an interruption between two steps, such as a restore; skip the next step."""
        self._last = None
