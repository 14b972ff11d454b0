"""What an agent that has just started finds of the one before it: its RAM, record and trainers."""

from __future__ import annotations

from holdfast.agent import control_block
from holdfast.agent.state import AgentState
from holdfast.agent.storage_worker import StorageWorker
from holdfast.agent.trainer_group import GroupRecord, TrainerGroup
from holdfast.coordination.inputs import Found
from holdfast.engine.lifecycle.attempts import newest_attempt, read_attempt
from holdfast.errors import HoldfastError
from holdfast.format.names import CheckpointId


def group_of(record: GroupRecord) -> TrainerGroup | None:
    """The trainers of a record, where any of them lives."""
    group = TrainerGroup(
        record.group, record.attempt, record.count, record.leader, origin_of(record)
    )
    group.members = {member.rank: member for member in record.members}
    group.lost = {member.rank for member in record.members if not member.is_alive}
    return group if group.present else None


def origin_of(record: GroupRecord) -> CheckpointId | None:
    """What the record's attempt goes on from."""
    return CheckpointId(*record.origin) if record.origin is not None else None


def record_by_storage(state: AgentState, part_count: int) -> GroupRecord | None:
    """A record in the place of one that was lost, of a host that has no peers.

    The newest attempt was this host's then, whoever worked on it; None where there is none.
    """
    try:
        newest = newest_attempt(state.durable)
        if newest == 0:
            return None
        attempt = read_attempt(state.durable, newest)
    except HoldfastError:
        return None
    return GroupRecord(
        group=f"attempt-{newest}",
        attempt=newest,
        count=part_count,
        leader=state.config.host,
        successors=(state.config.host,),
        origin=attempt.origin,
    )


def found_again(
    state: AgentState,
    storage_worker: StorageWorker,
    record: GroupRecord | None,
    group: TrainerGroup | None,
    rank: int | None = None,
) -> Found:
    """What stands here, for a machine that begins; `rank` is of a trainer that is about to join."""
    in_ram = storage_worker.in_ram()
    lost: frozenset[int] = frozenset()
    if group is not None:
        ranks = {m.rank for m in group.present} | ({rank} if rank is not None else set())
        own = set(group.members) | ranks
        successors = record.successors if record is not None else (group.leader,)
        attempt, count, origin = group.attempt, group.count, group.origin
        leader, word, is_broken = group.leader, group.group, group.is_broken
        lost = frozenset(group.lost)
        ended_attempt = attempt if lost else 0
    elif record is not None:
        ranks, own = set(), {member.rank for member in record.members}
        successors = record.successors
        attempt, count, origin = record.attempt, record.count, origin_of(record)
        leader, word, is_broken = record.leader, record.group, record.is_broken
        # Its members have ended; where they had before the record was written, it says so.
        ended_attempt = attempt if record.members else record.ended_attempt
    else:
        return Found(ram=in_ram)
    values = state.control.cells
    targets = {kind: values[index] for kind, index in control_block.CELL_OF.items()}
    return Found(
        ram=in_ram,
        # Who waits for which of them is not known yet: it is told again by the trainers.
        due=frozenset(c for c, listed in in_ram.items() if listed.is_whole),
        replicas={c: frozenset(listed.ranks - own) for c, listed in in_ram.items()},
        attempt=attempt,
        group=word,
        rank_count=count,
        ranks=frozenset(ranks),
        is_broken=is_broken,
        lost=lost,
        leader=leader,
        successors=successors,
        origin=origin,
        targets={k: s for k, s in targets.items() if s != control_block.NEVER} if ranks else {},
        is_confirmed=values[control_block.PREEMPTION_CONFIRMED] != control_block.NEVER,
        ended_attempt=ended_attempt,
    )
