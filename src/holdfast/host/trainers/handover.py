"""Find what the previous agent left to one that has just started: RAM, record and trainers."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.coordination.inputs import Found, Listed
from holdfast.engine.lifecycle.attempts import newest_number, read_attempt
from holdfast.errors import HoldfastError
from holdfast.format.names import NO_ATTEMPT, CheckpointId
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import TrainerGroup
from holdfast.host.tiers.storage_worker import StorageWorker
from holdfast.host.wire.control_block import CELL_OF, NEVER, PREEMPTION_CONFIRMED, ControlBlock
from holdfast.host.wire.group_record import GroupRecord


def group_of(record: GroupRecord) -> TrainerGroup | None:
    """Return the group of a record, or None if none of its trainers is alive."""
    group = TrainerGroup(record.group, record.attempt, record.count, record.leader, record.origin)
    group.members = {member.rank: member for member in record.members}
    group.lost = {member.rank for member in record.members if not member.is_alive}
    return group if group.present else None


def record_by_storage(
    run: AgentRun, storage_worker: StorageWorker, part_count: int
) -> GroupRecord | None:
    """Rebuild a lost record from storage, for a host without peers.

    Returns:
        The record, or None if another agent of this host's name may lead the newest attempt, if
        there is none, or if storage cannot be read.
    """
    try:
        newest = newest_number(run.durable)
        if newest == 0:
            return None
        attempt = read_attempt(run.durable, newest)
        is_free = storage_worker.has_begun(attempt.attempt) or storage_worker.has_ended(attempt)
    except HoldfastError:
        return None
    if not is_free:
        return None
    return GroupRecord(
        group=f"attempt-{newest}",
        attempt=attempt.attempt,
        count=part_count,
        leader=run.config.host,
        successors=(run.config.host,),
        origin=attempt.origin,
    )


def found_again(
    control: ControlBlock,
    in_ram: Mapping[CheckpointId, Listed],
    record: GroupRecord | None,
    group: TrainerGroup | None,
    rank: int | None = None,
) -> Found:
    """Return the state on this host, for a node that begins.

    Args:
        control: the cells that an agent of this host has written.
        in_ram: what is in RAM.
        record: the record of the group that an agent of this host has written.
        group: its trainers, of which some live; None if none does.
        rank: the rank of a trainer that is about to join.
    """
    lost_ranks: frozenset[int] = frozenset()
    if group is not None:
        ranks = {m.rank for m in group.present} | ({rank} if rank is not None else set())
        own = set(group.members) | ranks
        successors = record.successors if record is not None else (group.leader,)
        attempt, count, origin = group.attempt, group.count, group.origin
        leader, token, is_broken = group.leader, group.group, group.is_broken
        lost_ranks = frozenset(group.lost)
        ended_attempt = attempt if lost_ranks else NO_ATTEMPT
    elif record is not None:
        ranks, own = set(), {member.rank for member in record.members}
        successors = record.successors
        attempt, count, origin = record.attempt, record.count, record.origin
        leader, token, is_broken = record.leader, record.group, record.is_broken
        # A record without members carries the attempt of those that ended before it was written.
        ended_attempt = attempt if record.members else record.ended_attempt
    else:
        return Found(ram=in_ram)
    values = control.cells
    targets = {kind: values[index] for kind, index in CELL_OF.items()}
    return Found(
        ram=in_ram,
        # It is unknown which of them trainers wait for; the trainers report that again. Every whole
        # checkpoint is therefore due.
        due=frozenset(c for c, listed in in_ram.items() if listed.is_whole),
        replicas={c: frozenset(listed.ranks - own) for c, listed in in_ram.items()},
        attempt=attempt,
        group=token,
        rank_count=count,
        ranks=frozenset(ranks),
        is_broken=is_broken,
        lost=lost_ranks,
        leader=leader,
        successors=successors,
        origin=origin,
        # Without trainers no rank is left that could serve a target.
        targets={k: s for k, s in targets.items() if s != NEVER} if ranks else {},
        is_confirmed=values[PREEMPTION_CONFIRMED] != NEVER,
        ended_attempt=ended_attempt,
    )
