"""Which checkpoints to keep, with the classes and arguments of Orbax.

A policy is any object with `should_preserve(checkpoints, *, context)`: those of this module,
Orbax's own, and a user's. The manager keeps the newest checkpoint whatever they return.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax.checkpoint_managers.save_decision_policy import PolicyCheckpointInfo

Infos = Sequence[PolicyCheckpointInfo]


@dataclasses.dataclass(kw_only=True)
class PreservationContext:
    """The state of the run at a decision; it has no fields."""


class PreservationPolicy(Protocol):
    """Any object with this method is a policy."""

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return for each checkpoint, in ascending order of steps, whether it is kept."""
        ...


@dataclasses.dataclass
class PreserveAll:
    """Keeps all checkpoints."""

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for each."""
        return [True] * len(checkpoints)


@dataclasses.dataclass
class LatestN:
    """Keeps the newest `n` checkpoints; with None, all."""

    n: int | None = None

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for the last `n`."""
        return _last([True] * len(checkpoints), self.n)


@dataclasses.dataclass
class LatestDuration:
    """Keeps the checkpoints that are not older than `duration`."""

    duration: timedelta

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True from the first checkpoint on that is not too old."""
        now = datetime.now(tz=UTC)
        young = [now - checkpoint.time <= self.duration for checkpoint in checkpoints]
        first = young.index(True) if True in young else len(young)
        return [index >= first for index in range(len(young))]


@dataclasses.dataclass
class EveryNSeconds:
    """Keeps the first checkpoint, then each one at least `interval_secs` after the last kept."""

    interval_secs: int

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for each checkpoint that is late enough."""
        return _spaced(
            [checkpoint.time for checkpoint in checkpoints], timedelta(seconds=self.interval_secs)
        )


@dataclasses.dataclass
class EveryNSteps:
    """Keeps multiples of `interval_steps`, or with `exact_interval=False` steps that far apart."""

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        _check_interval(self, self.interval_steps)

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for the steps at the interval, at most the last `max_to_keep` of them."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        if self.exact_interval:
            kept = [step % self.interval_steps == 0 for step in steps]
        else:
            kept = _spaced(steps, self.interval_steps)
        return _last(kept, self.max_to_keep)


@dataclasses.dataclass
class EveryNStepsClosest:
    """Keeps for each multiple of `interval_steps` the step closest to it, and the last step."""

    interval_steps: int
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        _check_interval(self, self.interval_steps)

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for the closest steps; of two equally close ones, the later."""
        closest: dict[int, int] = {}
        steps = [checkpoint.step for checkpoint in checkpoints]
        for index, step in enumerate(steps):
            multiple = round(step / self.interval_steps)
            target = multiple * self.interval_steps
            best = closest.get(multiple)
            if best is None or abs(step - target) <= abs(steps[best] - target):
                closest[multiple] = index
        staying = {*closest.values(), len(steps) - 1}
        return _last([index in staying for index in range(len(steps))], self.max_to_keep)


class CustomSteps:
    """Keeps the listed steps."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = frozenset(steps)

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for the listed steps."""
        return [checkpoint.step in self.steps for checkpoint in checkpoints]


@dataclasses.dataclass(kw_only=True)
class BestN:
    """Keeps the `n` best checkpoints, as a function of the metrics ranks them; NaN ranks lowest.

    Args:
        get_metric_fn: Returns a number for the metrics of a checkpoint.
        reverse: Whether lower numbers are better.
        n: How many to keep. None keeps all.
        keep_checkpoints_without_metrics: Whether checkpoints without metrics stay too.
    """

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for the best."""
        if self.n is None or len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        ranked = ranking(checkpoints, self.get_metric_fn, reverse=self.reverse)
        staying = set(ranked[len(ranked) - min(self.n, len(ranked)) :])
        if self.keep_checkpoints_without_metrics:
            staying |= {i for i, info in enumerate(checkpoints) if info.metrics is None}
        return [index in staying for index in range(len(checkpoints))]


@dataclasses.dataclass
class AnyPreservationPolicy:
    """Keeps each checkpoint that one of the policies keeps."""

    policies: Sequence[PreservationPolicy]

    def should_preserve(
        self, checkpoints: Infos, *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for each checkpoint that one of the policies keeps."""
        answers = [policy.should_preserve(checkpoints, context=context) for policy in self.policies]
        return [any(column) for column in zip(*answers, strict=True)]


def ranking(checkpoints: Infos, metric: Callable[[Any], float], *, reverse: bool) -> list[int]:
    """Return the indices of the checkpoints with metrics, the best last; NaN ranks lowest."""
    values = {
        index: float(metric(info.metrics))
        for index, info in enumerate(checkpoints)
        if info.metrics is not None
    }
    ranked = sorted(
        (i for i in values if not math.isnan(values[i])), key=values.__getitem__, reverse=reverse
    )
    return [i for i in values if math.isnan(values[i])] + ranked


def _last(kept: Sequence[bool], count: int | None) -> list[bool]:
    """Return `kept` with at most the last `count` True values."""
    places = [index for index, is_kept in enumerate(kept) if is_kept]
    staying = set(places if count is None else places[max(0, len(places) - count) :])
    return [index in staying for index in range(len(kept))]


def _spaced(values: Sequence[Any], least: Any) -> list[bool]:
    kept: list[bool] = []
    last = None
    for value in values:
        kept.append(last is None or value - last >= least)
        last = value if kept[-1] else last
    return kept


def _check_interval(policy: object, interval: int) -> None:
    if interval < 1:
        raise InvalidArgumentError(
            f"{type(policy).__name__}(interval_steps=...): expected an int of at least 1, found "
            f"{interval!r}"
        )
