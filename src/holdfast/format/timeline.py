"""The timeline: the chain of attempts that leads to the present one, and what stands on it.

Each attempt names its origin, the checkpoint it went on from. Following the origins back from the
newest attempt gives, for each attempt on the way, the last step of it that still counts. A step
that stands there twice (it was overwritten with `force`) is the newest attempt's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.format.names import STEP_MAX, CheckpointId
from holdfast.format.records import AttemptRecord


def last_steps(attempts: Mapping[int, AttemptRecord]) -> dict[int, int]:
    """For each attempt on the newest attempt's timeline, the last step of it that counts."""
    if not attempts:
        return {}
    current = max(attempts)
    limits = {current: STEP_MAX}
    while (record := attempts.get(current)) is not None and record.origin is not None:
        step, origin = record.origin
        if origin >= current:
            # Origins lead back in time; a record that does not is no record of ours.
            break
        limits[origin] = step
        current = origin
    return limits


def on_timeline(
    checkpoints: Iterable[CheckpointId], attempts: Mapping[int, AttemptRecord]
) -> list[CheckpointId]:
    """Those of `checkpoints` that stand on the present timeline, one a step, by ascending step."""
    limits = last_steps(attempts)
    by_step: dict[int, CheckpointId] = {}
    for checkpoint in sorted(checkpoints):
        if checkpoint.step <= limits.get(checkpoint.attempt, -1):
            by_step[checkpoint.step] = checkpoint
    return [by_step[step] for step in sorted(by_step)]
