"""The timeline: the chain of attempts that leads to the current one, and its checkpoints.

Each attempt names its origin, the checkpoint it continued from. Following the origins back from the
newest attempt gives, for each attempt on the way, the last of its steps that still counts. Of a
step that occurs twice (it was overwritten with `force`), the newest attempt's counts.

An origin names its attempt by number and token. If the record of that number is another attempt's
(the run was put back to an earlier state and trained on), the origin's attempt has no record.

See docs/decisions/0001.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.format.names import STEP_MAX, AttemptId, CheckpointId
from holdfast.format.records import AttemptRecord


def last_steps(attempts: Mapping[int, AttemptRecord]) -> dict[AttemptId, int]:
    """Return, for each attempt on the newest attempt's timeline, its last step that counts.

    Args:
        attempts: the records by number.
    """
    if not attempts:
        return {}
    record = attempts[max(attempts)]
    limits = {record.attempt: STEP_MAX}
    while (origin := record.origin) is not None and origin.attempt.number < record.attempt.number:
        # Origins lead back in time; any other record was not written by Holdfast.
        limits[origin.attempt] = origin.step
        earlier = attempts.get(origin.attempt.number)
        if earlier is None or earlier.attempt != origin.attempt:
            break
        record = earlier
    return limits


def on_timeline(
    checkpoints: Iterable[CheckpointId], attempts: Mapping[int, AttemptRecord]
) -> list[CheckpointId]:
    """Return the `checkpoints` on the current timeline, one per step, by ascending step."""
    limits = last_steps(attempts)
    by_step: dict[int, CheckpointId] = {}
    for checkpoint in sorted(checkpoints):
        if checkpoint.step <= limits.get(checkpoint.attempt, -1):
            by_step[checkpoint.step] = checkpoint
    return [by_step[step] for step in sorted(by_step)]
