"""Save decision policies, which decide when to save: the built-in ones, and the user's interface.

A policy is evaluated at a step, and its answer depends on its arguments only. The built-in ones are
frozen data: comparable, hashable, and sent to another process (`save_evaluation`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Protocol, final

from msgspec.structs import force_setattr

from holdfast.policy import arguments, codec
from holdfast.policy.best_interval import budget_interval_secs
from holdfast.policy.contexts import CheckpointInfo, SaveContext

__all__ = [
    "AnySavePolicy",
    "ContinuousCheckpointingPolicy",
    "FixedIntervalPolicy",
    "PreemptionCheckpointingPolicy",
    "SaveContext",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
]

SHOULD_SAVE = "should_save"
AUTO = "auto"


class SaveDecisionPolicy(Protocol):
    """Any object with this method is a policy."""

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Return whether to save the result of `step`.

        Args:
            step: the step to decide about.
            previous_steps: the checkpoints of this timeline, in ascending step order.
            context: the time and the state of the run.
        """
        ...


@final
class ContinuousCheckpointingPolicy(codec.BuiltIn, frozen=True):
    """Saves again as soon as no save is in progress.

    The interval is counted from the time of the last checkpoint, the one of the highest step. If
    that time is further in the future than the interval is long, the clock was set back and the
    elapsed time is unknown: then a save is due. So a wrong clock delays saves for at most twice the
    interval.

    With a budget the cost of checkpoints is measured: how much longer steps take while one is being
    saved in this tier. Checkpoints are spaced so that the cost is at most the given share of the
    training time, a day apart at most. After the first one the next waits until the cost is known,
    which takes a few steps.

    With `goodput="auto"` the interval is the one that wastes least: it follows from the measured
    cost, and from the failures of the run so far. It changes only where the present one wastes more
    than 1.5 times as much, and never spends more than `max_overhead`. Beyond a minute, a checkpoint
    at most doubles it; it is an hour at most, unless the budget demands more. Until the first cost
    is known it behaves as with a budget. See docs/goodput.md.

    Args:
        minimum_interval_secs: the minimum time between checkpoints; None: no minimum.
        max_overhead: the share of the training time that checkpoints may cost; 0.03 is 3 percent.
            None: no limit.
        goodput: `auto` chooses the interval for the best goodput; None: it does not.

    Raises:
        InvalidArgumentError: the interval is not a finite number above 0, the budget is not a
            number above 0 and up to 1, or `goodput` is something else.
    """

    minimum_interval_secs: float | None = None
    max_overhead: float | None = None
    goodput: str | None = None

    def __post_init__(self) -> None:
        if self.goodput not in (None, AUTO):
            raise arguments.refusal(type(self).__name__, "goodput", "'auto' or None", self.goodput)
        if self.max_overhead is not None:
            share = arguments.share(type(self).__name__, "max_overhead", self.max_overhead)
            force_setattr(self, "max_overhead", share)
        if self.minimum_interval_secs is not None:
            secs = arguments.positive_secs(
                type(self).__name__, "minimum_interval_secs", self.minimum_interval_secs
            )
            force_setattr(self, "minimum_interval_secs", secs)

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Return whether nothing is being saved and the interval has passed."""
        if context.is_saving_in_progress:
            return False
        interval_secs = self._interval_secs(context)
        if not previous_steps or interval_secs == 0:
            return True
        if interval_secs is None:
            return False
        last = max(previous_steps, key=lambda checkpoint: checkpoint.step)
        elapsed_secs = (context.now - last.time).total_seconds()
        is_clock_wrong = elapsed_secs < -interval_secs
        return is_clock_wrong or elapsed_secs >= interval_secs

    @property
    def needs_cost(self) -> bool:
        """Whether the cost of checkpoints has to be measured."""
        return self.max_overhead is not None or self.goodput is not None

    def _interval_secs(self, context: SaveContext) -> float | None:
        """Return the minimum time between two checkpoints; None if it is not known yet."""
        least_secs, cost_secs = self.minimum_interval_secs or 0.0, context.save_cost_secs
        if self.goodput is not None:
            advised_secs = context.advised_interval_secs
            return None if advised_secs is None else max(least_secs, advised_secs)
        if self.max_overhead is None:
            return least_secs
        if cost_secs is None:
            return None
        return max(least_secs, budget_interval_secs(cost_secs, self.max_overhead))


@final
class FixedIntervalPolicy(codec.BuiltIn, frozen=True):
    """Saves each step that is a multiple of `interval`, step 0 among them.

    Raises:
        InvalidArgumentError: the interval is not an integer above 0.
    """

    interval: int

    def __post_init__(self) -> None:
        count = arguments.positive_integer(type(self).__name__, "interval", self.interval)
        force_setattr(self, "interval", count)

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Return whether `step` is a multiple of the interval."""
        return step % self.interval == 0


@final
class SpecificStepsPolicy(codec.BuiltIn, frozen=True):
    """Saves the listed steps.

    Args:
        steps: at least one; stored as an ascending tuple without duplicates.

    Raises:
        InvalidArgumentError: a step is negative or no integer, or there is none.
    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        steps = arguments.step_numbers(type(self).__name__, "steps", self.steps)
        force_setattr(self, "steps", steps)

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Return whether `step` is listed."""
        return arguments.is_among(self.steps, step)


@final
class PreemptionCheckpointingPolicy(codec.BuiltIn, frozen=True):
    """Saves once a preemption was announced, even while an earlier save is in progress."""

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Return whether the run was notified that it must stop soon."""
        return context.reached_preemption


@final
class AnySavePolicy(codec.BuiltIn, frozen=True):
    """Saves when at least one of several policies would.

    Args:
        policies: at least one, built-in or a user's own; stored as a tuple in which an
            `AnySavePolicy` is replaced by its members.

    Raises:
        InvalidArgumentError: there is none, or one has no method `should_save`.
    """

    policies: Sequence[SaveDecisionPolicy]

    def __post_init__(self) -> None:
        arguments.policies(type(self).__name__, "policies", self.policies, SHOULD_SAVE)
        nested = [p.policies if type(p) is AnySavePolicy else (p,) for p in self.policies]
        force_setattr(self, "policies", tuple(itertools.chain.from_iterable(nested)))

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Return whether one of the policies would save; later ones are not evaluated then."""
        return any(
            arguments.answer(
                policy, SHOULD_SAVE, policy.should_save(step, previous_steps, context=context)
            )
            for policy in self.policies
        )
