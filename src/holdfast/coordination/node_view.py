"""What a host's node knows between two inputs, as frozen data for the agent's other parts.

A view is made when it is asked for, and shows the node as its last input left it. Some of it is
known to the leader alone; where the host does not lead, `NodeView.lead` is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.coordination.inputs import MirrorTarget
from holdfast.coordination.leader.leader import Leader
from holdfast.coordination.messages import COMPLETE_STATUSES, CheckpointStatus, Held, TargetKind
from holdfast.coordination.roles import HostRoles
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId


@dataclass(frozen=True, slots=True)
class HeldOutcome:
    """A checkpoint that this host holds, and its outcome as far as it is known here.

    Attributes:
        held: the parts that this host has.
        status: how far the checkpoint has come, as the leader reported last.
        failure: why it could not be made durable; empty where it could, or may yet.
        is_committed: its manifest is written.
        is_awaited: ranks here wait for its end.
    """

    held: Held
    status: CheckpointStatus
    failure: str
    is_committed: bool
    is_awaited: bool


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The copies to the remote tier, as their leader knows them.

    Attributes:
        newest: the newest checkpoint of the timeline that is there; None: none is known.
        ids: the checkpoints that are under way or wait.
        target: the one that is under way; None if there is none.
        done_count: how many of its parts are there.
        is_trying: one is under way whose last try has not failed.
    """

    newest: CheckpointId | None
    ids: frozenset[CheckpointId]
    target: MirrorTarget | None
    done_count: int
    is_trying: bool


@dataclass(frozen=True, slots=True)
class TrackedCheckpoint:
    """A checkpoint as its leader knows it.

    Attributes:
        is_complete: all its parts are somewhere now, and it was not dropped.
        was_complete: they were once, and it was not dropped; a silent host may still hold it.
        is_held: any part is in the RAM of any host.
        is_in_ram: every part is.
        is_pending: it is on its way to the durable tier.
    """

    id: CheckpointId
    is_complete: bool
    was_complete: bool
    is_held: bool
    is_in_ram: bool
    is_pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderView:
    """What a leader alone knows.

    Attributes:
        is_first: it leads as rank 0's host.
        may_decide: it evaluates the policies: it is rank 0's host, and all ranks live.
        wants_preserved: it evaluates the RAM tier's policy; no RAM is released before `Preserved`.
        is_saving: a checkpoint is on its way into RAM, to its replicas or to the durable tier.
        is_sealing: a checkpoint is on its way into RAM or to its replicas.
        targets: the kinds of the targets that ranks are on their way to.
        has_copies: each part is required in several failure domains.
        save_cost_secs: the training time that a save costs the slowest rank; None: unknown.
        copies: the copies to the remote tier; None where this host does not lead.
        checkpoints: all that it tracks, the oldest first.
    """

    is_first: bool = False
    may_decide: bool = False
    wants_preserved: bool = False
    is_saving: bool = False
    is_sealing: bool = False
    targets: frozenset[TargetKind] = frozenset()
    has_copies: bool = False
    save_cost_secs: float | None = None
    copies: CopyProgress | None = None
    checkpoints: tuple[TrackedCheckpoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What this host knows.

    Attributes:
        attempt: the newest attempt known here; `NO_ATTEMPT` where none is.
        leader_host: the host that this host follows; None where none is known.
        successors: the hosts that may lead the newest attempt, rank 0's first.
        is_leading: this host leads, as rank 0's host or as a successor.
        is_settled: no checkpoint needs this host's RAM, as far as its leader knows.
        is_closed: all ranks of the newest attempt, on all hosts, have detached: none was lost.
        is_superseded: a newer attempt is known than the one that this host took part in or leads.
            Of what is held here, the newer attempt needs nothing that it has not been sent: that
            attempt's record names its origin. Without other hosts nothing here is ever needed.
        is_mirroring: this host has work for the remote tier: parts to write, or copies to lead.
        mirrored: the newest checkpoint of the timeline that the remote tier has, by the leader's
            orders; None: none is known.
        is_writing: it writes parts or a manifest to the durable tier.
        is_writing_whole: it does so for a checkpoint that needs no part any more: an end is near.
        is_preemption_confirmed: every host has accepted the preemption target that is set here.
        offers: for each rank here, the ranks whose parts it copies by itself; None without a group.
        quiet_hosts: hosts of the attempt that have sent nothing for `quiet_secs`; 16 at most.
        waits_for: what trainers here whose attempt has not begun wait for; empty: there are none.
        held: what this host holds, the oldest checkpoint first.
        lead: what the leader knows.
    """

    attempt: AttemptId
    leader_host: str | None
    successors: tuple[str, ...]
    is_leading: bool
    is_settled: bool
    is_closed: bool
    is_superseded: bool
    is_mirroring: bool
    mirrored: CheckpointId | None
    is_writing: bool
    is_writing_whole: bool
    is_preemption_confirmed: bool
    offers: Mapping[int, frozenset[int]] | None
    quiet_hosts: tuple[str, ...]
    waits_for: str
    held: tuple[HeldOutcome, ...]
    lead: LeaderView = field(default_factory=LeaderView)

    def holds(self, checkpoint: CheckpointId) -> bool:
        """Return whether this host has any part of `checkpoint` or work on it."""
        return any(outcome.held.id == checkpoint for outcome in self.held)

    def waiting_count(self, other_than: CheckpointId) -> int:
        """Return how many checkpoints here, except one, wait for storage or for other hosts.

        Those that are due in the durable tier wait until they are there. Others, of the same
        attempt as `other_than`, wait until they are protected.
        """
        waiting = (o.held for o in self.held if o.is_awaited and o.held.id != other_than)
        return sum(held.is_due or held.id.attempt == other_than.attempt for held in waiting)

    def complete_ids(self) -> set[CheckpointId]:
        """Return the checkpoints whose parts are all held somewhere, as far as known here."""
        here = {o.held.id for o in self.held if o.status in COMPLETE_STATUSES}
        return here | {c.id for c in self.lead.checkpoints if c.is_complete}

    def pending_ids(self) -> list[CheckpointId]:
        """Return the checkpoints on their way to the durable tier, the oldest first."""
        return [c.id for c in self.lead.checkpoints if c.is_pending]


def view_of(roles: HostRoles, now_secs: float) -> NodeView:
    """Return what the state machines of a host know at `now_secs`."""
    follower, leader = roles.follower, roles.leader
    inventory, election, group = follower.inventory, follower.election, follower.group
    leadership = follower.leadership
    own_attempt = leadership.attempt if leadership is not None else NO_ATTEMPT
    is_committing = leader is not None and leader.durability.committing is not None
    is_copying = leader is not None and not leader.mirror.is_settled
    return NodeView(
        attempt=follower.attempt,
        leader_host=election.leader,
        successors=election.successors,
        is_leading=leader is not None,
        is_settled=follower.is_settled,
        is_closed=follower.is_closed,
        is_superseded=leader is None and follower.attempt > own_attempt,
        is_mirroring=is_copying or not follower.mirror.is_settled,
        mirrored=follower.mirror.newest,
        is_writing=inventory.is_writing or is_committing,
        is_writing_whole=inventory.is_writing_whole or is_committing,
        is_preemption_confirmed=follower.cells.is_confirmed(TargetKind.PREEMPTION),
        offers=dict(group.offers) if group is not None else None,
        quiet_hosts=leader.quiet if leader is not None else follower.quiet_hosts(now_secs),
        waits_for=_waits_for(roles, now_secs),
        held=_held(roles),
        lead=_leader_view(leader) if leader is not None else LeaderView(),
    )


def _waits_for(roles: HostRoles, now_secs: float) -> str:
    waiting = next(iter(roles.follower.waiting.values()), None)
    if waiting is None:
        return ""
    if roles.bootstrap is not None:
        return roles.bootstrap.waits_for(now_secs)
    return f"host {waiting.leader}, where rank 0 is, has not begun the attempt"


def _held(roles: HostRoles) -> tuple[HeldOutcome, ...]:
    inventory = roles.follower.inventory
    entries = roles.leader.table.entries if roles.leader is not None else {}
    outcomes = []
    for held in inventory.states():
        status, reason = inventory.verdict(held.id)
        entry = entries.get(held.id)
        failure = entry.failure if entry is not None else held.failure
        if not failure and status is CheckpointStatus.FAILED:
            failure = reason
        is_committed = status is CheckpointStatus.COMMITTED
        is_committed |= entry is not None and entry.is_committed
        is_awaited = inventory.is_awaited(held.id)
        outcomes.append(HeldOutcome(held, status, failure, is_committed, is_awaited))
    return tuple(outcomes)


def _leader_view(leader: Leader) -> LeaderView:
    mirror, is_first = leader.mirror, leader.leadership.is_first
    return LeaderView(
        is_first=is_first,
        may_decide=is_first and leader.is_whole,
        wants_preserved=leader.wants_preserved,
        is_saving=leader.is_saving,
        is_sealing=leader.is_sealing,
        targets=frozenset(kind for kind in TargetKind if leader.targets.is_under_way(kind)),
        has_copies=leader.table.required > 1,
        save_cost_secs=leader.save_cost_secs,
        copies=CopyProgress(
            mirror.newest, mirror.ids, mirror.target, len(mirror.done), mirror.is_trying
        ),
        checkpoints=tuple(
            TrackedCheckpoint(
                entry.id,
                is_complete=entry.is_complete and not entry.dropped,
                was_complete=entry.was_complete and not entry.dropped,
                is_held=any(entry.holders.values()),
                is_in_ram=all(entry.holders.get(rank) for rank in range(entry.part_count)),
                is_pending=entry.is_pending,
            )
            for entry in leader.table
        ),
    )
