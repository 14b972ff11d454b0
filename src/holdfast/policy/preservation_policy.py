"""Preservation policies, which decide what to keep: the built-in ones, and the user's interface.

A policy receives all checkpoints and returns for each whether it is kept. The built-in ones are
frozen data: comparable, hashable, and sent to another process (`preservation_evaluation`).

Invariant: built-in policies are idempotent: applied to the checkpoints that it kept, a policy keeps
all of them. So the engine may evaluate it any number of times, and stop between two deletions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Literal, Protocol, final

from msgspec.structs import force_setattr

from holdfast.policy import arguments, codec
from holdfast.policy.contexts import CheckpointInfo, PreservationContext

__all__ = [
    "AnyPreservationPolicy",
    "BestN",
    "CustomSteps",
    "EveryNSeconds",
    "EveryNSteps",
    "LatestN",
    "PreservationContext",
    "PreservationPolicy",
]

SHOULD_PRESERVE = "should_preserve"


class PreservationPolicy(Protocol):
    """Any object with this method is a policy."""

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return, for each checkpoint, whether it is kept.

        Args:
            checkpoints: all checkpoints, in ascending step order.
            context: the time.

        Returns:
            One bool per checkpoint, in the same order.
        """
        ...


class _Counted(codec.BuiltIn, frozen=True):
    """The field `n`, separate from `BestN`'s other fields because only it is positional."""

    n: int

    def __post_init__(self) -> None:
        force_setattr(self, "n", arguments.positive_integer(type(self).__name__, "n", self.n))


@final
class LatestN(codec.BuiltIn, frozen=True):
    """Keeps the `n` checkpoints of the highest steps; with None, all checkpoints.

    Raises:
        InvalidArgumentError: `n` is neither None nor an integer above 0.
    """

    n: int | None

    def __post_init__(self) -> None:
        if self.n is not None:
            force_setattr(self, "n", arguments.positive_integer(type(self).__name__, "n", self.n))

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for the last `n`."""
        count = len(checkpoints)
        return [self.n is None or i >= count - self.n for i in range(count)]


@final
class EveryNSeconds(codec.BuiltIn, frozen=True):
    """Keeps the first checkpoint, then each one at least `secs` after the last kept one.

    After the clock was set back, a checkpoint at least `secs` before the last kept one is kept too,
    so that a wrong clock does not suspend the policy until that time is reached again.

    Raises:
        InvalidArgumentError: `secs` is not a finite number above 0.
    """

    secs: float

    def __post_init__(self) -> None:
        force_setattr(self, "secs", arguments.positive_secs(type(self).__name__, "secs", self.secs))

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for each checkpoint at least `secs` from the last kept one."""
        answers = []
        last = None
        for time in (checkpoint.time for checkpoint in checkpoints):
            answers.append(last is None or abs((time - last).total_seconds()) >= self.secs)
            last = time if answers[-1] else last
        return answers


@final
class EveryNSteps(_Counted, frozen=True):
    """Keeps each checkpoint whose step is a multiple of `n`, step 0 among them.

    Raises:
        InvalidArgumentError: `n` is not an integer above 0.
    """

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for multiples of `n`."""
        return [checkpoint.step % self.n == 0 for checkpoint in checkpoints]


@final
class BestN(_Counted, frozen=True, kw_only=True):
    """Keeps the `n` checkpoints with the best values of a metric.

    Every number, including infinities, ranks above NaN, and NaN above a checkpoint without the
    metric. Of equal values the later step ranks higher. Checkpoints that rank low are kept until
    there are `n` better ones.

    Args:
        n: the number of checkpoints to keep.
        metric: the name of the metric in the metrics passed to `save`.
        mode: whether the least (`"min"`) or the greatest (`"max"`) value is best.

    Raises:
        InvalidArgumentError: `n` is not an integer above 0, `metric` is no name, or `mode` is
            neither of the two.
    """

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.text(type(self).__name__, "metric", self.metric)
        if self.mode not in ("min", "max"):
            raise arguments.refusal(type(self).__name__, "mode", "'min' or 'max'", self.mode)

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for the `n` best."""
        ranks = [(*self._rank(checkpoint), i) for i, checkpoint in enumerate(checkpoints)]
        best = set(sorted(ranks, reverse=True)[: self.n])
        return [rank in best for rank in ranks]

    def _rank(self, checkpoint: CheckpointInfo) -> tuple[int, float]:
        """Return a sort key; a greater one is better."""
        value = (checkpoint.metrics or {}).get(self.metric)
        if value is None:
            return 0, 0.0
        if math.isnan(value):  # compares as false with everything, so it must not enter a sort
            return 1, 0.0
        return 2, -value if self.mode == "min" else value


@final
class CustomSteps(codec.BuiltIn, frozen=True):
    """Keeps the listed steps.

    Args:
        steps: at least one; stored as an ascending tuple without duplicates.

    Raises:
        InvalidArgumentError: a step is negative or no integer, or there is none.
    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        steps = arguments.step_numbers(type(self).__name__, "steps", self.steps)
        force_setattr(self, "steps", steps)

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for the listed steps."""
        return [arguments.is_among(self.steps, checkpoint.step) for checkpoint in checkpoints]


@final
class AnyPreservationPolicy(codec.BuiltIn, frozen=True):
    """Keeps each checkpoint that at least one of several policies keeps.

    Args:
        policies: at least one, built-in or a user's own; stored as a tuple in which an
            `AnyPreservationPolicy` is replaced by its members.

    Raises:
        InvalidArgumentError: there is none, or one has no method `should_preserve`.
    """

    policies: Sequence[PreservationPolicy]

    def __post_init__(self) -> None:
        arguments.policies(type(self).__name__, "policies", self.policies, SHOULD_PRESERVE)
        nested = [p.policies if type(p) is AnyPreservationPolicy else (p,) for p in self.policies]
        force_setattr(self, "policies", tuple(itertools.chain.from_iterable(nested)))

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for each checkpoint that one of the policies keeps."""
        count, ordered = len(checkpoints), tuple(checkpoints)
        rows = []
        for policy in self.policies:
            answer = policy.should_preserve(ordered, context=context)
            rows.append(arguments.answers(policy, SHOULD_PRESERVE, answer, count))
        return [any(column) for column in zip(*rows, strict=True)]
