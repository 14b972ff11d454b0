"""When to save, with the classes and arguments of Orbax.

A policy is any object with `should_save(step, previous_steps, *, context)`: those of this module,
Orbax's own, and a user's. `step` and `previous_steps` have the attributes `step`, `time` and
`metrics`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class PolicyCheckpointInfo:
    """One checkpoint, as input to policies."""

    step: int
    time: datetime
    metrics: Any = None


@dataclasses.dataclass(kw_only=True)
class DecisionContext:
    """The state of the run at a decision."""

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: Any


class SaveDecisionPolicy(Protocol):
    """Any object with this method is a policy."""

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return whether to save at `step`."""
        ...


@dataclasses.dataclass
class FixedIntervalPolicy:
    """Saves each step that is a multiple of `interval`."""

    interval: int

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return whether `step` is a multiple of the interval."""
        return step.step % self.interval == 0


@dataclasses.dataclass
class SpecificStepsPolicy:
    """Saves the listed steps."""

    steps: Container[int]

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return whether `step` is listed."""
        return step.step in self.steps


@dataclasses.dataclass(kw_only=True)
class ContinuousCheckpointingPolicy:
    """Saves as soon as no save is in progress and the interval has passed."""

    minimum_interval_secs: int | None = None

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return whether nothing is being saved and the interval has passed."""
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        return step.time - previous_steps[-1].time >= timedelta(seconds=self.minimum_interval_secs)


@dataclasses.dataclass
class PreemptionCheckpointingPolicy:
    """Saves when a preemption was announced."""

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return whether a preemption was announced."""
        return context.reached_preemption


@dataclasses.dataclass
class InitialSavePolicy:
    """Saves if there is no checkpoint yet."""

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return whether there is no checkpoint."""
        return not previous_steps


@dataclasses.dataclass
class AnySavePolicy:
    """Saves when at least one of the policies would."""

    policies: Sequence[SaveDecisionPolicy]

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return whether one of the policies would save."""
        return any(
            policy.should_save(step, previous_steps=previous_steps, context=context)
            for policy in self.policies
        )


@dataclasses.dataclass
class ShouldSaveFunction:
    """Asks a function of the step and the newest saved step: the option `should_save_fn`."""

    function: Any

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return what the function returns."""
        newest = previous_steps[-1].step if previous_steps else None
        return bool(self.function(step.step, newest))
