"""One host's node: the state machine that coordinates the host with the run's other hosts.

The node does no I/O and never waits. `handle` takes one input at a time, with the time and the
published steps, and returns the effects to carry out. `next_at_secs` returns when it needs a `Tick`
if no other input comes before. A run on one host uses the same node; its messages stay inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast.coordination import inputs
from holdfast.coordination.bootstrap import Bootstrap, send_refused
from holdfast.coordination.checkpoint_entry import CheckpointEntry
from holdfast.coordination.effects import Effect, GroupRefused
from holdfast.coordination.inputs import Input, Published
from holdfast.coordination.leader import Leader
from holdfast.coordination.leadership import Leadership
from holdfast.coordination.lease import LeaseRenewal
from holdfast.coordination.message_dispatch import receive
from holdfast.coordination.messages import CheckpointStatus, Held, TargetKind
from holdfast.coordination.roles import HostRoles
from holdfast.coordination.survivability import Lead, survey
from holdfast.coordination.turn import AgentIdentity, Turn
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId

INNER_MAX = 200
"""The most rounds of messages that the roles of one host exchange in one turn."""

REFUSED_MAX = 8
"""The refused starts that a node remembers, to answer reports of their hosts that come late."""


@dataclass(frozen=True, slots=True)
class HeldOutcome:
    """A checkpoint that this host holds, and its outcome as far as it is known here.

    Attributes:
        held: the parts that this host has.
        status: how far the checkpoint has come, as the leader reported last.
        failure: why it could not be made durable; empty where it could, or may yet.
        is_committed: its manifest is written.
    """

    held: Held
    status: CheckpointStatus
    failure: str
    is_committed: bool


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The copies to the remote tier, as their leader knows them.

    Attributes:
        ids: the checkpoints that are under way or wait.
        target: the one that is under way; None if there is none.
        done_count: how many of its parts are there.
        is_trying: one is under way whose last try has not failed.
    """

    ids: frozenset[CheckpointId]
    target: inputs.MirrorTarget | None
    done_count: int
    is_trying: bool


class Node:
    """The node of one start of one host's agent. Owned by one thread."""

    def __init__(self, identity: AgentIdentity) -> None:
        self.identity = identity
        self.roles = HostRoles(identity)
        self.lease = LeaseRenewal(identity.incarnation)

    def handle(self, item: Input, now_secs: float, published: Published) -> list[Effect]:
        """Take one input.

        Args:
            item: what happened; the first input of an agent may be `Found`.
            now_secs: seconds on a clock that never goes backwards.
            published: the steps of the ranks that live here, read just before.

        Returns:
            The effects to carry out, in this order.

        Raises:
            AssertionError: the roles of this host do not stop exchanging messages; a defect.
        """
        turn = Turn(self.identity.host, now_secs, published)
        self._take(turn, item)
        # The roles of this host exchange messages within the turn until none has anything new. The
        # bound finds roles that answer each other without end.
        for _ in range(INNER_MAX):
            self._work(turn)
            if not turn.inner:
                self.lease.work(turn, self._living_attempt())
                return turn.effects
            while turn.inner:
                receive(self.roles, turn, self.identity.host, turn.inner.popleft())
        raise AssertionError(
            f"coordination on host {self.identity.host}: the roles still exchange messages after "
            f"{INNER_MAX} rounds; this is a defect"
        )

    def next_at_secs(self, now_secs: float) -> float:
        """Return when a `Tick` is due if no input comes before; on the clock of `handle`."""
        times = [self.roles.follower.next_at_secs(now_secs), self.lease.next_at_secs()]
        if self.roles.leader is not None:
            times.append(self.roles.leader.next_at_secs(now_secs))
        if self.roles.bootstrap is not None:
            times.append(self.roles.bootstrap.next_at_secs(now_secs))
        return min(times)

    # Queries: read-only, for the agent. Those about other hosts are known to the leader alone, and
    # give their empty answer where this host does not lead.

    @property
    def attempt(self) -> AttemptId:
        """The newest attempt known here; `NO_ATTEMPT` where none is."""
        return self.roles.follower.attempt

    @property
    def ended_attempt(self) -> AttemptId:
        """The newest attempt of which a rank has ended on this host, or `NO_ATTEMPT`."""
        return self.roles.follower.ended_attempt

    @property
    def leader_host(self) -> str | None:
        """The host that this host follows; None where none is known."""
        return self.roles.follower.election.leader

    @property
    def successors(self) -> tuple[str, ...]:
        """The hosts that may lead the newest attempt, rank 0's first; empty where none is known."""
        return self.roles.follower.election.successors

    @property
    def leadership(self) -> Leadership | None:
        """What a successor has to know to lead the newest attempt; None if it is unknown."""
        return self.roles.follower.leadership

    @property
    def is_leading(self) -> bool:
        """Whether this host leads, as rank 0's host or as a successor."""
        return self.roles.leader is not None

    @property
    def is_first_leader(self) -> bool:
        """Whether this host leads the newest attempt as rank 0's host."""
        return self.roles.leader is not None and self.roles.leader.leadership.is_first

    @property
    def is_settled(self) -> bool:
        """Whether no checkpoint needs this host's RAM, as far as its leader knows."""
        return self.roles.follower.is_settled

    @property
    def is_mirroring(self) -> bool:
        """Whether this host has work for the remote tier: parts to write, or copies to lead."""
        leader = self.roles.leader
        is_leader_done = leader is None or leader.mirror.is_settled
        return not (is_leader_done and self.roles.follower.mirror.is_settled)

    @property
    def copies(self) -> CopyProgress | None:
        """The copies to the remote tier, where this host leads; None elsewhere."""
        if self.roles.leader is None:
            return None
        mirror = self.roles.leader.mirror
        return CopyProgress(mirror.ids, mirror.target, len(mirror.done), mirror.is_trying)

    @property
    def is_superseded(self) -> bool:
        """Whether a newer attempt is known than the one that this host took part in or leads.

        Of what is held here, the newer attempt needs nothing that it has not been sent: that
        attempt's record names its origin. Without other hosts nothing here is ever needed again.
        """
        leadership = self.roles.follower.leadership
        known = leadership.attempt if leadership is not None else NO_ATTEMPT
        return self.roles.leader is None and self.attempt > known

    @property
    def is_closed(self) -> bool:
        """Whether all ranks of the newest attempt, on all hosts, have detached: none was lost."""
        return self.roles.follower.is_closed

    def serves(self, attempt: AttemptId) -> bool:
        """Return whether a host that knows no attempt above `attempt` may read parts here."""
        return attempt >= self.roles.follower.attempt

    def holds(self, checkpoint: CheckpointId) -> bool:
        """Return whether this host has any part of `checkpoint` or work on it."""
        return checkpoint in self.roles.follower.inventory

    def held(self) -> tuple[Held, ...]:
        """Return what this host holds, the oldest checkpoint first."""
        return self.roles.follower.inventory.states()

    def held_outcomes(self) -> tuple[HeldOutcome, ...]:
        """Return what this host holds, with its outcome so far; the oldest checkpoint first."""
        leader = self.roles.leader
        found = []
        for held in self.roles.follower.inventory.states():
            status, reason = self.roles.follower.inventory.verdict(held.id)
            entry = leader.table.entries.get(held.id) if leader is not None else None
            failure = entry.failure if entry is not None else held.failure
            if not failure and status is CheckpointStatus.FAILED:
                failure = reason
            is_committed = status is CheckpointStatus.COMMITTED
            is_committed |= entry is not None and entry.is_committed
            found.append(HeldOutcome(held, status, failure, is_committed))
        return tuple(found)

    def pending_count(self, other_than: CheckpointId) -> int:
        """Return how many checkpoints held here, except one, wait for storage or other hosts."""
        return self.roles.follower.inventory.pending_count(other_than)

    @property
    def is_writing(self) -> bool:
        """Whether this host writes parts or a manifest to the durable tier."""
        return self.roles.follower.inventory.is_writing or self._is_committing

    @property
    def is_writing_whole(self) -> bool:
        """Whether it does so for a checkpoint that needs no part any more: an end is in sight."""
        return self.roles.follower.inventory.is_writing_whole or self._is_committing

    @property
    def _is_committing(self) -> bool:
        leader = self.roles.leader
        return leader is not None and leader.durability.committing is not None

    def replicas_offered_by(self, rank: int) -> frozenset[int] | None:
        """Return the ranks whose parts `rank` copies here by itself; None where no group lives."""
        group = self.roles.follower.group
        return group.offers.get(rank, frozenset()) if group is not None else None

    def is_target_confirmed(self, kind: TargetKind) -> bool:
        """Return whether every host has accepted the target of `kind` that is set here."""
        return self.roles.follower.cells.is_confirmed(kind)

    def quiet_hosts(self, now_secs: float) -> tuple[str, ...]:
        """Return hosts of the attempt that have sent nothing for `quiet_secs`; 16 at most."""
        if self.roles.leader is not None:
            return self.roles.leader.quiet
        return self.roles.follower.quiet_hosts(now_secs)

    def waits_for(self, now_secs: float) -> str:
        """Return what trainers here whose attempt has not begun wait for; empty: there are none."""
        waiting = next(iter(self.roles.follower.waiting.values()), None)
        if waiting is None:
            return ""
        if self.roles.bootstrap is not None:
            return self.roles.bootstrap.waits_for(now_secs)
        return f"host {waiting.leader}, where rank 0 is, has not begun the attempt"

    @property
    def may_decide(self) -> bool:
        """Whether to evaluate the policies here: rank 0's host leads, and all ranks live."""
        return self.is_first_leader and self.roles.leader is not None and self.roles.leader.is_whole

    @property
    def wants_preserved(self) -> bool:
        """Whether to evaluate the RAM tier's policy; no RAM is released before `Preserved`."""
        return self.roles.leader is not None and self.roles.leader.wants_preserved

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is on its way into RAM, to its replicas or to the durable tier."""
        return self.roles.leader is not None and self.roles.leader.is_saving

    @property
    def is_sealing(self) -> bool:
        """Whether a checkpoint is on its way into RAM or to its replicas."""
        return self.roles.leader is not None and self.roles.leader.is_sealing

    def is_target_under_way(self, kind: TargetKind) -> bool:
        """Return whether ranks are on their way to a target of `kind`."""
        return self.roles.leader is not None and self.roles.leader.targets.is_under_way(kind)

    @property
    def has_copies(self) -> bool:
        """Whether each part is required in several failure domains."""
        return self.roles.leader is not None and self.roles.leader.table.required > 1

    def complete_ids(self) -> set[CheckpointId]:
        """Return the checkpoints whose parts are all held somewhere, as far as known here."""
        found = {e.id for e in self._entries() if e.is_complete and not e.dropped}
        return found | self.roles.follower.inventory.complete_ids()

    def once_complete_ids(self) -> set[CheckpointId]:
        """Return the checkpoints that were complete once; a silent host may still hold them."""
        return {e.id for e in self._entries() if e.was_complete and not e.dropped}

    def held_ids(self) -> set[CheckpointId]:
        """Return the checkpoints of which any part is in the RAM of any host."""
        return {e.id for e in self._entries() if any(e.holders.values())}

    def pending_ids(self) -> list[CheckpointId]:
        """Return the checkpoints on their way to the durable tier, the oldest first."""
        return [e.id for e in self._entries() if e.is_pending]

    def tier_of(self, checkpoint: CheckpointId) -> str:
        """Return "ram" where every part is in some host's RAM, else "durable"."""
        leader = self.roles.leader
        entry = leader.table.entries.get(checkpoint) if leader is not None else None
        is_in_ram = entry is not None and all(entry.holders.get(r) for r in range(entry.part_count))
        return "ram" if is_in_ram else "durable"

    def save_cost_secs(self, here: Published) -> float | None:
        """Return the training time that a save costs the slowest known rank; None: unknown."""
        found = self.roles.leader.save_cost_secs if self.roles.leader is not None else None
        costs = [cost for cost in (found, here.save_cost_secs) if cost is not None]
        return max(costs, default=None)

    def survey(self, now_secs: float) -> Lead | None:
        """Return what this host knows as the leader, for status queries; None: it does not lead."""
        return survey(self.roles.leader, now_secs) if self.roles.leader is not None else None

    def _entries(self) -> Iterable[CheckpointEntry]:
        return self.roles.leader.table if self.roles.leader is not None else ()

    # Inputs.

    def _take(self, turn: Turn, item: Input) -> None:
        follower = self.roles.follower
        match item:
            case inputs.Received():
                receive(self.roles, turn, item.sender, item.message)
            case inputs.Found():
                follower.adopt_state(turn, item)
                if follower.leadership is not None and item.leader == turn.host:
                    self.roles.lead(Leader(self.identity, follower.leadership, is_new=False))
                    # The previous agent may have left the lease.
                    self.lease.held = item.attempt
            case inputs.RankJoined():
                follower.joined(turn, item)
            case inputs.RankLeft() | inputs.RankLost():
                follower.left(item)
            case inputs.PartBegun():
                follower.note_begun(item)
            case inputs.PartSealed() | inputs.PartAbandoned():
                follower.note_sealed(turn, item)
            case inputs.CopiesOffered():
                follower.offered(item)
            case inputs.Wish():
                follower.wished(item.kind)
            case inputs.BranchWanted():
                follower.branch_wanted(item)
            case inputs.TargetWritten():
                follower.target_written(item)
            case inputs.LeaveWanted():
                follower.leave(turn)
            case inputs.Preserved():
                if self.roles.leader is not None:
                    self.roles.leader.preserve(item.ids)
            case inputs.Deleted():
                follower.deleted(turn, item.id)
            case inputs.Tick():
                pass
            case _:
                self._take_outcome(turn, item)

    def _take_outcome(self, turn: Turn, item: Input) -> None:
        """Take the outcome of an effect on the stores."""
        inventory, leader, bootstrap = (
            self.roles.follower.inventory,
            self.roles.leader,
            self.roles.bootstrap,
        )
        if isinstance(item, inputs.CommitWritten | inputs.CommitFailed):
            self.roles.commit_ended()
        match item:
            case inputs.ReplicaSealed():
                inventory.replica_sealed(turn, item)
            case inputs.PullFailed():
                inventory.pull_failed(turn, item)
            case inputs.PartsWritten():
                inventory.parts_written(item)
            case inputs.WriteFailed():
                inventory.write_failed(turn, item)
                self.roles.fence(turn, item.newer_attempt, item.reason)
            case inputs.CommitWritten() if leader is not None:
                leader.durability.committed(item.id)
            case inputs.CommitFailed():
                if leader is not None:
                    leader.durability.commit_failed(turn, item)
                self.roles.fence(turn, item.newer_attempt, item.reason)
            case inputs.DurableListed():
                self._take_listing(turn, item)
            case inputs.ListingFailed():
                if bootstrap is not None:
                    bootstrap.listing_failed(turn, item)
                if leader is not None:
                    leader.durability.listing_failed(turn)
            case inputs.AttemptBegun():
                attempt = item.asked.attempt
                if bootstrap is not None and bootstrap.awaits(item.asked):
                    bootstrap.attempt_begun(item)
                else:
                    # The start that requested the record no longer exists. The record fences older
                    # attempts all the same, and its lease has to be released.
                    self.roles.fence(turn, attempt, f"attempt {attempt} has begun")
                    self.lease.held = self.lease.held or attempt
            case inputs.LeaseWritten():
                self.lease.written()
            case inputs.LeaseRead() if bootstrap is not None:
                bootstrap.lease_read(turn, item)
            case inputs.LeaseNotRead() if bootstrap is not None:
                bootstrap.lease_not_read(turn, item)
            case inputs.AttemptTaken() if bootstrap is not None:
                bootstrap.attempt_taken(item)
            case inputs.BeginFailed() if bootstrap is not None:
                bootstrap.begin_failed(turn, item)
            case _:
                self._take_of_remote_tier(turn, item)
        self.roles.follower.changed()

    def _take_of_remote_tier(self, turn: Turn, item: Input) -> None:
        """Take a wish for a copy in the remote tier, or the outcome of an effect there."""
        follower, leader = self.roles.follower, self.roles.leader
        if isinstance(item, inputs.MirrorCommitWritten | inputs.MirrorCommitFailed):
            self.roles.copy_commit_ended()
        match item:
            case inputs.MirrorWanted() if leader is not None:
                leader.mirror.want(item.target)
            case inputs.MirrorUnwanted() if leader is not None:
                leader.mirror.forget(item.id)
            case inputs.MirrorPartWritten():
                follower.mirror.part_written(item)
            case inputs.MirrorPartsFailed():
                follower.mirror.parts_failed(item)
                self._fence_by_mirror(turn, item.newer_attempt, item.reason)
            case inputs.MirrorCommitWritten() if leader is not None:
                leader.mirror.committed(turn, item.id)
            case inputs.MirrorCommitFailed():
                if leader is not None:
                    leader.mirror.commit_failed(turn, item)
                self._fence_by_mirror(turn, item.newer_attempt, item.reason)

    def _fence_by_mirror(self, turn: Turn, attempt: AttemptId, reason: str) -> None:
        """Stop working for older attempts: `attempt` has begun in the remote tier.

        A start here puts its record there first. While one is under way, it may be its own.
        """
        if self.roles.bootstrap is None:
            self.roles.fence(turn, attempt, reason)

    def _take_listing(self, turn: Turn, item: inputs.DurableListed) -> None:
        if self.roles.bootstrap is not None:
            self.roles.bootstrap.listed_durable(item)
        if self.roles.leader is not None and item.newest_attempt > self.roles.follower.attempt:
            # A start that is under way here learns from its own put whether it is too late.
            self.roles.fence(turn, item.newest_attempt, f"attempt {item.newest_attempt} has begun")
        elif self.roles.leader is not None:
            self.roles.leader.listed(turn, item)

    def _work(self, turn: Turn) -> None:
        self._start(turn)
        if self.roles.leader is not None:
            self.roles.leader.run_due(turn)
        self.roles.follower.run_due(turn)
        self._lead_as_successor(turn)

    def _start(self, turn: Turn) -> None:
        """Begin or continue a start: of trainers that wait here, or of a branch of the attempt."""
        follower, starting = self.roles.follower, self.roles.follower.begins_here
        if self.roles.bootstrap is not None and not self._is_wanted(self.roles.bootstrap):
            self.roles.bootstrap = None
        if self.roles.bootstrap is None and starting is not None:
            self.roles.bootstrap = Bootstrap(self.identity, starting, turn.now_secs)
        if (
            self.roles.bootstrap is None
            and self.roles.leader is not None
            and follower.group is not None
        ):
            branch = self.roles.leader.wanted_branch
            if branch is not None:
                self.roles.bootstrap = Bootstrap(
                    self.identity,
                    follower.group,
                    turn.now_secs,
                    branch_from=branch.attempt,
                    origin=branch.origin,
                )
        bootstrap = self.roles.bootstrap
        follower.start_waits_for = ""
        if bootstrap is None:
            return
        # A group that lost a rank, on any host, cannot continue, so it does not block a start.
        is_broken = self.roles.leader is not None and self.roles.leader.is_broken
        bootstrap.run_due(turn, None if is_broken else follower.group)
        if bootstrap.leadership is not None:
            self._lead(turn, bootstrap, bootstrap.leadership)
        elif bootstrap.refusal:
            self._refuse(turn, bootstrap)
        elif turn.now_secs >= bootstrap.group.since_secs + self.identity.settings.joining_secs:
            follower.start_waits_for = bootstrap.waits_for(turn.now_secs)

    def _living_attempt(self) -> AttemptId:
        """Return the attempt that this host leads as rank 0's; none if its trainers are gone."""
        leader, group = self.roles.leader, self.roles.follower.group
        if leader is None or group is None or not leader.leadership.is_first or leader.is_broken:
            return NO_ATTEMPT
        is_living = group.token == leader.leadership.group and group.is_living
        return leader.leadership.attempt if is_living else NO_ATTEMPT

    def _is_wanted(self, bootstrap: Bootstrap) -> bool:
        if bootstrap.branch_from:
            return (
                self.roles.leader is not None
                and self.roles.leader.leadership.attempt == bootstrap.branch_from
            )
        return bootstrap.group is self.roles.follower.begins_here

    def _lead(self, turn: Turn, bootstrap: Bootstrap, leadership: Leadership) -> None:
        before, self.roles.bootstrap = self.roles.leader, None
        leader = Leader(self.identity, leadership, is_new=True)
        self.roles.lead(leader)
        for checkpoint in bootstrap.given_up:
            turn.act(checkpoint)
        # The hosts of a branch have not reported to the start; its leader knows them from before.
        if bootstrap.branch_from and before is not None:
            leader.inherit(turn, before)
        for sender, report in sorted(bootstrap.hellos.items()):
            leader.accept_report(turn, sender, report)
        if bootstrap.listed is not None:
            leader.listed(turn, bootstrap.listed)

    def _refuse(self, turn: Turn, bootstrap: Bootstrap) -> None:
        self.roles.bootstrap = None
        if bootstrap.branch_from:
            if self.roles.leader is not None:
                self.roles.leader.forget_branch()
            listed = bootstrap.listed
            newest = listed.newest_attempt if listed is not None else NO_ATTEMPT
            turn.act(GroupRefused(bootstrap.group.token, bootstrap.refusal, bootstrap.refusal_kind))
            self.roles.fence(turn, newest, bootstrap.refusal)
            return
        self.roles.refused[bootstrap.group.token] = bootstrap.refusal, bootstrap.refusal_kind
        while len(self.roles.refused) > REFUSED_MAX:
            del self.roles.refused[next(iter(self.roles.refused))]
        send_refused(turn, bootstrap)

    def _lead_as_successor(self, turn: Turn) -> None:
        """Lead in the place of a silent leader, if the present term is this host's."""
        election = self.roles.follower.election
        if election.leader != turn.host or election.incarnation:
            return
        leadership = self.roles.follower.leadership
        if (
            self.roles.leader is not None
            or leadership is None
            or leadership.attempt != self.roles.follower.attempt
        ):
            return
        leadership = replace(
            leadership, successors=election.successors, term=election.term, is_first=False
        )
        self.roles.lead(Leader(self.identity, leadership, is_new=False))
        self.roles.follower.changed()
