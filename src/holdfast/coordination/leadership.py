"""The attempt that a leader leads, and its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.format.names import AttemptId, CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """The attempt that a leader leads, and its right to do so.

    Attributes:
        group: the token of the attempt's ranks.
        origin: the checkpoint that the attempt continues from; None if it began from nothing.
        limits: for each attempt on the timeline, the last step that counts.
        successors: the hosts that may lead, in order.
        term: the term in which this leader leads.
        is_first: the leader is rank 0's host, not a successor in its place.
    """

    attempt: AttemptId
    group: str
    rank_count: int
    origin: CheckpointId | None
    limits: Mapping[AttemptId, int]
    successors: tuple[str, ...]
    term: int = 0
    is_first: bool = True


def limits_after(
    limits: Mapping[AttemptId, int], attempt: AttemptId, origin: CheckpointId | None, step_max: int
) -> dict[AttemptId, int]:
    """Return the timeline once `attempt` has begun from `origin`: each attempt's last step."""
    after = {attempt: step_max}
    if origin is not None:
        after.update({a: step for a, step in limits.items() if a < origin.attempt})
        after[origin.attempt] = origin.step
    return after
