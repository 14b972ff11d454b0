"""Measure what checkpoints cost the training: which steps are beside a save, and how long they are.

A step lasts from one call of `save` to the next. Steps during which nothing is being saved are
quiet; the others are beside the save. `policy.step_cost` computes the cost from both.

If only one tier has a budget, only its saves are counted: the other tier may save at every step,
so its cost is part of the duration of a quiet step.
"""

from __future__ import annotations

from holdfast.policy.save_decision_policy import has_budget
from holdfast.policy.step_cost import StepCost
from holdfast.trainer.options import Options
from holdfast.trainer.save.progress import Reach, SavesInFlight


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
        self._cost = StepCost()
        self._last: float | None = None
        self._accepted_count = 0
        self._was_saving = False
        self._has_saved = False

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
        is_quiet = not (has_begun or self._was_saving or saving.is_going_on)
        self._accepted_count, self._was_saving = saving.accepted_count, saving.is_going_on
        self._has_saved |= not is_quiet
        if last is not None and is_quiet:
            self._cost.add_quiet(now - last)
        elif last is not None:
            # A save begins at the start of a step, right after this call.
            until = now if saving.is_going_on else min(max(saving.ended_secs, last), now)
            self._cost.add_beside(now - last, until - last)
        if saving.is_going_on or not self._has_saved:
            return None
        cost_secs = self._cost.end()
        self._has_saved = cost_secs is None
        return cost_secs

    def paused(self) -> None:
        """Record an interruption between two steps, such as a restore; skip the next step."""
        self._last = None
