"""Retention: which committed checkpoints the durable tier keeps. A pure function.

On the timeline the policy decides, and the newest checkpoint is always kept. Checkpoints of
abandoned branches are judged by the policy on their own, and kept at most until the timeline has
reached their step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from holdfast.format.names import CheckpointId
from holdfast.format.records import AttemptRecord
from holdfast.format.timeline import on_timeline
from holdfast.policy.contexts import CheckpointInfo, PreservationContext
from holdfast.policy.preservation_evaluation import kept
from holdfast.policy.preservation_policy import PreservationPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """Committed checkpoints: those on the current timeline, and the abandoned ones."""

    timeline: tuple[CheckpointId, ...]
    abandoned: tuple[CheckpointId, ...]


def branches(committed: Sequence[CheckpointId], attempts: Mapping[int, AttemptRecord]) -> Branches:
    """Split checkpoints into the current timeline and abandoned branches, by ascending step."""
    timeline = on_timeline(committed, attempts)
    present = set(timeline)
    return Branches(
        timeline=tuple(timeline), abandoned=tuple(c for c in sorted(committed) if c not in present)
    )


def to_drop(
    found: Branches,
    policy: PreservationPolicy,
    info: Callable[[CheckpointId], CheckpointInfo],
    now: datetime,
) -> list[CheckpointId]:
    """Return the checkpoints that `policy` does not keep, oldest first.

    Raises:
        InvalidArgumentError: the policy did not return one bool per checkpoint.
    """
    if not found.timeline:
        return []
    context = PreservationContext(now)
    keep = kept(policy, [info(c) for c in found.timeline], context=context)
    drop = [c for c, is_kept in zip(found.timeline, keep, strict=True) if not is_kept]
    newest = found.timeline[-1]
    # By number: an attempt with the number of the newest one, and another token, is abandoned too.
    number = newest.attempt.number
    passed = [c for c in found.abandoned if c.step <= newest.step and c.attempt.number <= number]
    beside = [c for c in found.abandoned if c not in set(passed)]
    by_step = {c.step: c for c in beside}
    verdict = kept(policy, [info(c) for c in by_step.values()], context=context)
    keep_beside = {c for c, is_kept in zip(by_step.values(), verdict, strict=True) if is_kept}
    return sorted([*drop, *passed, *(c for c in beside if c not in keep_beside)])
