"""Track accepted checkpoints that were dropped, until a newer one replaces them or they fail.

A checkpoint is dropped when it can never become complete: a rank has passed its step without a
part, a host abandoned the part, or an agent's successor does not find it. Ranks that drift apart
regularly drop parts of targets that were set too early, and the next target replaces them. So the
effect of a drop depends on how the save was decided:

- A save decided by the step alone, by the caller or by a preemption promised exactly that step: its
  drop is a failure.
- A save for a target is replaced by a newer checkpoint that is secured: protected, or committed if
  the save was for the durable tier. It is a failure `DROPPED_SECS` after the drop, or when all
  saving ends, if no newer one is secured by then. While a newer one is in progress, which may take
  long on slow storage, the failure is postponed, for at most `POSTPONED_SECS`.
- A rank skips a step that it has no room for, and the part of a rank that did not skip it is
  dropped. That counts as a drop of a save for a target.

Each rank tracks only the saves that it accepted. Not thread-safe: `Progress` holds its lock around
each call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.errors import SaveFailedError
from holdfast.format.names import Age, AttemptId, CheckpointId
from holdfast.host.wire.protocol import SKIPPED

DROPPED_SECS = 30.0
"""How long after a drop a newer checkpoint can replace it."""
POSTPONED_SECS = 600.0
"""How long after a drop a newer checkpoint in progress can still replace it."""
RECHECK_SECS = 5.0
"""How long a failure is postponed at a time."""
GATHER_SECS = 2.0
"""Drops often arrive in groups: one error names all that arrive within this time."""
NAMED_MAX = 10
"""How many steps a message names at each end of a long list."""
MAY_CONTINUE = "Training may continue; "
"""In the messages of failed saves; not in that of `close`, which no step follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drop:
    reason: str
    is_durable: bool
    is_by_step: bool
    at_secs: float
    due_secs: float


class Drops:
    """The dropped saves of one rank that were neither replaced nor raised."""

    def __init__(self) -> None:
        self._drops: dict[Age, _Drop] = {}
        self._protected: Age | None = None
        self._committed: Age | None = None
        self.due_at_secs = math.inf
        """When the first of them becomes a failure; infinite if there is none."""

    def add_drop(
        self,
        checkpoint: CheckpointId,
        reason: str,
        now_secs: float,
        *,
        is_durable: bool,
        is_by_step: bool,
    ) -> None:
        """Add a dropped save; ignore one for a target that is already replaced.

        Args:
            checkpoint: The dropped checkpoint.
            reason: Why it was dropped.
            now_secs: The time of a monotonic clock.
            is_durable: The save was for the durable tier.
            is_by_step: The save was for exactly this step, so no newer one replaces it.
        """
        is_by_step = is_by_step and not reason.endswith(SKIPPED)
        drop = _Drop(
            reason=reason,
            is_durable=is_durable,
            is_by_step=is_by_step,
            at_secs=now_secs,
            due_secs=now_secs + (GATHER_SECS if is_by_step else DROPPED_SECS),
        )
        if not self._is_replaced(checkpoint.age, drop):
            self._drops[checkpoint.age] = drop
            self._count()

    def secured(self, checkpoint: CheckpointId, *, is_committed: bool) -> None:
        """Remove the drops that a checkpoint replaces, which is now protected or committed."""
        age = checkpoint.age
        self._protected = max(age, self._protected or age)
        if is_committed:
            self._committed = max(age, self._committed or age)
        if self._drops:
            self._drops = {a: d for a, d in self._drops.items() if not self._is_replaced(a, d)}
            self._count()

    def is_secured(self, checkpoint: CheckpointId, *, is_durable: bool) -> bool:
        """Return whether a checkpoint, or a later one, is committed, or else protected."""
        secured = self._committed if is_durable else self._protected
        return secured is not None and checkpoint.age <= secured

    def remove_all(self) -> None:
        """Remove all drops."""
        self._drops.clear()
        self._count()

    def take_failure(
        self, now_secs: float, pending: Mapping[CheckpointId, bool], *, is_final: bool
    ) -> SaveFailedError | None:
        """Remove the drops that have become failures and return one error for all of them.

        Args:
            now_secs: The time, on the clock of `add`.
            pending: The saves in progress, each with whether it is for the durable tier.
            is_final: No save is in progress any more that could replace one of them.

        Returns:
            The error, or None if no drop has become a failure.
        """
        if not self._drops or not (is_final or now_secs >= self.due_at_secs):
            return None
        if not is_final:
            self._postpone(now_secs, pending)
        late = {d.is_by_step for d in self._drops.values() if is_final or now_secs >= d.due_secs}
        if not late:
            return None
        failed = {a: d for a, d in self._drops.items() if d.is_by_step in late}
        self._drops = {a: d for a, d in self._drops.items() if d.is_by_step not in late}
        self._count()
        return self._failure(failed)

    def _postpone(self, now_secs: float, pending: Mapping[CheckpointId, bool]) -> None:
        """Postpone the failures that a save in progress may still prevent."""
        newest = {
            is_durable: max(
                (c.age for c, due in pending.items() if due or not is_durable), default=None
            )
            for is_durable in (False, True)
        }
        for age, drop in self._drops.items():
            newer = newest[drop.is_durable]
            can_wait = not drop.is_by_step and now_secs < drop.at_secs + POSTPONED_SECS
            if can_wait and newer is not None and age < newer and now_secs >= drop.due_secs:
                self._drops[age] = replace(drop, due_secs=now_secs + RECHECK_SECS)
        self._count()

    def _failure(self, failed: dict[Age, _Drop]) -> SaveFailedError:
        ages = sorted(failed)
        steps = tuple(step for _, step in ages)
        is_durable = any(drop.is_durable for drop in failed.values())
        plural = "" if len(steps) == 1 else "s"
        return SaveFailedError(
            steps[0],
            f"save step{plural} {_listed(steps)}: accepted and then dropped; reason for the newest "
            f"of them: {failed[ages[-1]].reason}; {self.newest_text(is_durable=is_durable)}. "
            f"{MAY_CONTINUE}`holdfast status` shows whether the agents of all hosts answer",
            steps,
        )

    def newest_text(self, *, is_durable: bool) -> str:
        """Return the newest step that is committed, or else secured, as text for users."""
        level, newest = (
            ("committed", self._committed) if is_durable else ("secured", self._protected)
        )
        after = f"the newest {level} step is {newest[1]}" if newest else f"no step was {level}"
        return f"since this manager was opened, as far as this rank was notified, {after}"

    def newest_secured(self, attempt: AttemptId) -> int | None:
        """Return the newest step that is secured in an attempt; None if there is none."""
        newest = self._protected
        return newest[1] if newest is not None and newest[0] == attempt else None

    def _is_replaced(self, age: Age, drop: _Drop) -> bool:
        secured = self._committed if drop.is_durable else self._protected
        return not drop.is_by_step and secured is not None and age < secured

    def _count(self) -> None:
        self.due_at_secs = min((d.due_secs for d in self._drops.values()), default=math.inf)


def _listed(steps: tuple[int, ...]) -> str:
    """Return the steps as text: all, or the first and last ones and the number of all."""
    if len(steps) <= 2 * NAMED_MAX:
        return ", ".join(map(str, steps))
    first = ", ".join(map(str, steps[:NAMED_MAX]))
    last = ", ".join(map(str, steps[-NAMED_MAX:]))
    return f"{first}, …, {last} ({len(steps)} in all)"
