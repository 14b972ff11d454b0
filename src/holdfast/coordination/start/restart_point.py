"""The checkpoint that a new attempt continues from: pure functions.

A checkpoint can be restored if it is committed, or if each of its parts is durable or in some
host's RAM. The newest such checkpoint on the timeline is chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.coordination.effects import GivenUp
from holdfast.coordination.inputs import DurableListed
from holdfast.coordination.messages import COMPLETE_STATUSES, CheckpointStatus, HostState
from holdfast.coordination.rank_runs import ranks_in, ranks_text
from holdfast.format.names import AttemptId, CheckpointId

UNKNOWN_REASON = (
    "the run has no record of that attempt: it was put back to an earlier state, or trained at "
    "another place"
)


@dataclass(slots=True)
class _Availability:
    """The parts of one checkpoint that are in some host's RAM or durable."""

    part_count: int
    ranks: set[int] = field(default_factory=set)
    has_other_count: bool = False

    def add_part(self, part_count: int, ranks: Iterable[int]) -> None:
        # Parts of two plans of one step cannot be combined, so such a checkpoint is not whole.
        self.has_other_count |= part_count != self.part_count
        self.ranks.update(ranks)

    @property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.part_count and not self.has_other_count


def listed_though_deleted(
    states: Iterable[HostState], durable: DurableListed
) -> frozenset[CheckpointId]:
    """Return the checkpoints that the durable tier has, and that a host reports as deleted.

    The listing is older than the delete, or the run was put back to an earlier state since. A
    second listing shows which: a delete is reported after it is done. In the remote tier it is done
    later.
    """
    deleted = {c for state in states for c in state.deleted}
    return (durable.committed - durable.remote_only) & deleted


def unrecorded(durable: DurableListed) -> list[CheckpointId]:
    """Return the newest committed checkpoint of each attempt after the newest that has a record.

    Records are put before checkpoints are committed, and none is removed. So the records were put
    back to an earlier state, or removed, and the checkpoints were not; or the two listings are of
    different ages.
    """
    newest: dict[AttemptId, CheckpointId] = {}
    for checkpoint in sorted(durable.committed):
        if checkpoint.attempt.number > durable.newest_attempt.number:
            newest[checkpoint.attempt] = checkpoint
    return [newest[attempt] for attempt in sorted(newest)]


def choose_checkpoint(
    states: Iterable[HostState],
    durable: DurableListed,
    put_back: Collection[CheckpointId] = frozenset(),
) -> CheckpointId | None:
    """Return the newest checkpoint on the timeline that the hosts and storage have whole.

    Args:
        states: the reports of hosts.
        durable: the listing of the durable tier.
        put_back: the checkpoints that count although they are reported as deleted.
    """
    states = list(states)
    whole = {c for c in durable.committed if _counts(c, durable.limits)}
    whole -= {c for state in states for c in state.deleted if c not in put_back}
    whole |= {c for c, a in _availabilities(states, durable).items() if a.is_whole}
    # If the timeline has a step twice, the newest attempt's counts.
    return max(whole, default=None)


def newest_begun(states: Iterable[HostState], durable: DurableListed) -> CheckpointId | None:
    """Return the newest checkpoint on the timeline of which any part exists, whole or not."""
    return max(_availabilities(states, durable), default=None)


def given_up(
    states: Iterable[HostState],
    durable: DurableListed,
    origin: CheckpointId | None,
    silent: Iterable[str],
) -> tuple[GivenUp, ...]:
    """Return the checkpoints newer than `origin` that were complete, and are not continued from.

    Those on the timeline whose parts are lost, and the newest one of each attempt that storage does
    not know, or has no record of.

    Args:
        states: the reports of hosts.
        durable: the listing of the durable tier.
        origin: the checkpoint that was chosen.
        silent: the hosts that may hold parts and have not reported; named in the reason.
    """
    states, silent = list(states), sorted(silent)
    statuses = {
        held.id: held.status
        for state in states
        for held in state.held
        if held.status in COMPLETE_STATUSES
    }
    checkpoints = []
    for checkpoint, available in sorted(_availabilities(states, durable).items()):
        is_newer = origin is None or checkpoint > origin
        if checkpoint in statuses and is_newer and not available.is_whole:
            missing = ranks_text(set(range(available.part_count)) - available.ranks)
            reason = f"no host that has reported holds the parts of {missing}"
            if silent:
                reason += f"; no report came from {', '.join(silent)}"
            checkpoints.append(GivenUp(checkpoint, statuses[checkpoint], reason))
    for checkpoint in _newest_unknown(states, durable, statuses):
        if origin is None or checkpoint.step > origin.step:
            status = statuses.get(checkpoint, CheckpointStatus.COMPLETE)
            if checkpoint in durable.committed:
                status = CheckpointStatus.COMMITTED
            checkpoints.append(GivenUp(checkpoint, status, UNKNOWN_REASON))
    return tuple(checkpoints)


def _newest_unknown(
    states: Iterable[HostState], durable: DurableListed, complete: Collection[CheckpointId]
) -> list[CheckpointId]:
    """Return the newest checkpoint of each attempt that storage does not know.

    Only checkpoints that are whole, committed, or among the `complete` ones, are considered.
    """
    numbers = {attempt.number for attempt in durable.limits}
    newest: dict[AttemptId, CheckpointId] = {}
    for checkpoint, available in sorted(_all_availabilities(states, durable).items()):
        attempt = checkpoint.attempt
        # An older attempt off the timeline may be an abandoned one, which storage knows.
        may_be_abandoned = (
            attempt.number < durable.newest_attempt.number and attempt.number not in numbers
        )
        is_unknown = attempt not in durable.limits and not may_be_abandoned
        if is_unknown and (available.is_whole or checkpoint in complete):
            newest[attempt] = checkpoint
    for checkpoint in unrecorded(durable):
        newest[checkpoint.attempt] = max(checkpoint, newest.get(checkpoint.attempt, checkpoint))
    return list(newest.values())


def _availabilities(
    states: Iterable[HostState], durable: DurableListed
) -> dict[CheckpointId, _Availability]:
    """Return what there is of each checkpoint on the timeline."""
    availabilities = _all_availabilities(states, durable)
    return {c: available for c, available in availabilities.items() if _counts(c, durable.limits)}


def _all_availabilities(
    states: Iterable[HostState], durable: DurableListed
) -> dict[CheckpointId, _Availability]:
    states = list(states)
    deleted = {c for state in states for c in state.deleted}
    availabilities: dict[CheckpointId, _Availability] = {}
    for checkpoint, part_count, ranks in _found(states, durable):
        if checkpoint not in deleted:
            availability = availabilities.setdefault(checkpoint, _Availability(part_count))
            availability.add_part(part_count, ranks)
    return availabilities


def _found(
    states: Iterable[HostState], durable: DurableListed
) -> Iterator[tuple[CheckpointId, int, Iterable[int]]]:
    for checkpoint, listed in durable.parts.items():
        yield checkpoint, listed.part_count, listed.ranks
    for state in states:
        for held in state.held:
            yield held.id, held.part_count, (*ranks_in(held.own), *ranks_in(held.replicas))


def _counts(checkpoint: CheckpointId, limits: Mapping[AttemptId, int]) -> bool:
    return checkpoint.step <= limits.get(checkpoint.attempt, -1)
