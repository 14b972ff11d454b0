"""Accepted checkpoints that were dropped, until newer ones make up for them or they are failures.

A checkpoint is dropped when it can never become whole: a rank has passed it without a part, or its
host gave the part up. Ranks that drift apart drop early parts of targets as a matter of course, and
the target that is set next makes up for them. So a drop is judged by how its save was decided:

- A save that the step alone decided (or the caller, or a preemption) promised that very step: its
  drop is a failure.
- A save for a target is made good by a newer checkpoint that is secured: protected, or committed
  where the save was for the durable tier. It is a failure `DROPPED_SECS` after the drop, or at the
  end of all saving, if no newer one is secured by then.

Each rank judges the saves that it accepted itself. Not thread-safe: `Progress` holds its lock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import SaveFailedError
from holdfast.format.names import CheckpointId

DROPPED_SECS = 30.0
"""A newer checkpoint makes up for a dropped one within this time."""
GATHER_SECS = 2.0
"""Drops often come many at a time: one error names all that come within this time."""
NAMED_MAX = 10
"""The steps that a message names at each end of a long list."""

Age = tuple[int, int]
"""Attempt and step: the order in which checkpoints were taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drop:
    reason: str
    is_durable: bool
    is_by_step: bool
    at_secs: float


class Drops:
    """The dropped saves of one rank that were neither made good nor raised."""

    def __init__(self) -> None:
        self._drops: dict[Age, _Drop] = {}
        self._protected: Age | None = None
        self._committed: Age | None = None
        self.due_at_secs = math.inf
        """When the first of them is a failure; infinite where there is none."""

    def add(
        self,
        checkpoint: CheckpointId,
        reason: str,
        now_secs: float,
        *,
        is_durable: bool,
        is_by_step: bool,
    ) -> None:
        """Add a dropped save; one for a target that is made good already is ignored."""
        drop = _Drop(reason=reason, is_durable=is_durable, is_by_step=is_by_step, at_secs=now_secs)
        if not self._is_made_good(_age(checkpoint), drop):
            self._drops[_age(checkpoint)] = drop
            self._count()

    def secured(self, checkpoint: CheckpointId, *, is_committed: bool) -> None:
        """Remove the drops that this checkpoint, which is protected or committed, makes good."""
        age = _age(checkpoint)
        self._protected = max(age, self._protected or age)
        if is_committed:
            self._committed = max(age, self._committed or age)
        if self._drops:
            self._drops = {a: d for a, d in self._drops.items() if not self._is_made_good(a, d)}
            self._count()

    def clear(self) -> None:
        """Forget all of them."""
        self._drops.clear()
        self._count()

    def take_failure(self, now_secs: float, *, is_final: bool) -> SaveFailedError | None:
        """Remove the drops that count as failed and return one error for all of them.

        Args:
            now_secs: the time, on the clock of `add`.
            is_final: nothing is on its way any more that could make one of them good.

        Returns:
            None where none has failed.
        """
        if not self._drops or not (is_final or now_secs >= self.due_at_secs):
            return None
        late = {d.is_by_step for d in self._drops.values() if is_final or now_secs >= _due_at(d)}
        failed = {a: d for a, d in self._drops.items() if d.is_by_step in late}
        self._drops = {a: d for a, d in self._drops.items() if d.is_by_step not in late}
        self._count()
        return self._failure(failed)

    def _failure(self, failed: dict[Age, _Drop]) -> SaveFailedError:
        ages = sorted(failed)
        steps = tuple(step for _, step in ages)
        is_durable = any(drop.is_durable for drop in failed.values())
        word, newest = (
            ("committed", self._committed) if is_durable else ("secured", self._protected)
        )
        after = f"the newest step that is {word} is {newest[1]}" if newest else f"none is {word}"
        one = len(steps) == 1
        return SaveFailedError(
            steps[0],
            f"save step{'' if one else 's'} {_listed(steps)}: accepted and then dropped; of the "
            f"newest one: {failed[ages[-1]].reason}; since this manager was opened, as far as this "
            f"rank was notified, {after}. Training may go on; `holdfast status` shows whether the "
            "agents of all hosts answer",
            steps,
        )

    def _is_made_good(self, age: Age, drop: _Drop) -> bool:
        secured = self._committed if drop.is_durable else self._protected
        return not drop.is_by_step and secured is not None and age < secured

    def _count(self) -> None:
        self.due_at_secs = min(map(_due_at, self._drops.values()), default=math.inf)


def _due_at(drop: _Drop) -> float:
    return drop.at_secs + (GATHER_SECS if drop.is_by_step else DROPPED_SECS)


def _age(checkpoint: CheckpointId) -> Age:
    return checkpoint.attempt, checkpoint.step


def _listed(steps: tuple[int, ...]) -> str:
    """The steps for a message; of many the first and the last ones, and how many there are."""
    if len(steps) <= 2 * NAMED_MAX:
        return ", ".join(map(str, steps))
    first = ", ".join(map(str, steps[:NAMED_MAX]))
    last = ", ".join(map(str, steps[-NAMED_MAX:]))
    return f"{first}, …, {last} ({len(steps)} in all)"
