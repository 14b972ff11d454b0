"""One host's node: the state machine that coordinates the host with the run's other hosts.

The node does no I/O and never waits. `handle` takes one input at a time, with the time and the
published steps. The `Ready` that it returns is the only way out: the effects to carry out, when to
come back, and what to keep. `view` shows what the node knows, and changes nothing. A run on one
host uses the same node; its messages stay inside. See docs/decisions/0014 and docs/decisions/0043.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.coordination import inputs
from holdfast.coordination.effects import Effect, GroupRefused
from holdfast.coordination.inputs import Input, Published
from holdfast.coordination.leader.leader import Leader
from holdfast.coordination.leadership import Leadership
from holdfast.coordination.message_dispatch import receive
from holdfast.coordination.node_view import NodeView, view_of
from holdfast.coordination.roles import HostRoles
from holdfast.coordination.start.bootstrap import Bootstrap, send_refused
from holdfast.coordination.start.lease import LeaseRenewal
from holdfast.coordination.survivability import Lead, survey
from holdfast.coordination.turn import AgentIdentity, Turn
from holdfast.format.names import NO_ATTEMPT, AttemptId

INNER_MAX = 200
"""The most rounds of messages that the roles of one host exchange in one turn."""

REFUSED_MAX = 8
"""The refused starts that a node remembers, to answer reports of their hosts that come late."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What the next agent of the host has to know of the node, and cannot find out otherwise.

    Attributes:
        attempt: the newest attempt known here; `NO_ATTEMPT` where none is.
        ended_attempt: the newest attempt of which a rank has ended on this host, or `NO_ATTEMPT`.
        leadership: what a successor has to know to lead the newest attempt; None if it is unknown.
        successors: the hosts that may lead the newest attempt, rank 0's first.
    """

    attempt: AttemptId = NO_ATTEMPT
    ended_attempt: AttemptId = NO_ATTEMPT
    leadership: Leadership | None = None
    successors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """What follows from one input.

    Attributes:
        effects: what to carry out, in this order.
        next_at_secs: when a `Tick` is due if no other input comes before; on the clock of `handle`.
        record: what to keep for the next agent of the host.
    """

    effects: list[Effect]
    next_at_secs: float
    record: NodeRecord


class Node:
    """The node of one start of one host's agent. Owned by one thread.

    Attributes:
        roles: its state machines, for checks of the protocol.
    """

    def __init__(self, identity: AgentIdentity) -> None:
        self.roles = HostRoles(identity)
        self._identity = identity
        self._lease = LeaseRenewal(identity.incarnation)

    def handle(self, item: Input, now_secs: float, published: Published) -> Ready:
        """Take one input.

        Args:
            item: what happened; the first input of an agent may be `Found`.
            now_secs: seconds on a clock that never goes backwards.
            published: the steps of the ranks that live here, read just before.

        Raises:
            AssertionError: the roles of this host do not stop exchanging messages; a defect.
        """
        turn = Turn(self._identity.host, now_secs, published)
        self._take(turn, item)
        # The roles of this host exchange messages within the turn until none has anything new. The
        # bound finds roles that answer each other without end.
        for _ in range(INNER_MAX):
            self._work(turn)
            if not turn.inner:
                attempt, is_storing = self._leased_attempt()
                self._lease.work(turn, attempt, is_storing=is_storing)
                return Ready(turn.effects, self._next_at_secs(now_secs), self._record())
            while turn.inner:
                receive(self.roles, turn, self._identity.host, turn.inner.popleft())
        raise AssertionError(
            f"coordination on host {self._identity.host}: the roles still exchange messages after "
            f"{INNER_MAX} rounds; this is a defect"
        )

    def view(self, now_secs: float) -> NodeView:
        """Return what the node knows, as the last input left it."""
        return view_of(self.roles, now_secs)

    def survey(self, now_secs: float) -> Lead | None:
        """Return what this host knows of all others as the leader; None: it does not lead."""
        return survey(self.roles.leader, now_secs) if self.roles.leader is not None else None

    def _next_at_secs(self, now_secs: float) -> float:
        times = [self.roles.follower.next_at_secs(now_secs), self._lease.next_at_secs()]
        if self.roles.leader is not None:
            times.append(self.roles.leader.next_at_secs(now_secs))
        if self.roles.bootstrap is not None:
            times.append(self.roles.bootstrap.next_at_secs(now_secs))
        return min(times)

    def _record(self) -> NodeRecord:
        follower = self.roles.follower
        return NodeRecord(
            follower.attempt,
            follower.ended_attempt,
            follower.leadership,
            follower.election.successors,
        )

    # Inputs.

    def _take(self, turn: Turn, item: Input) -> None:
        follower = self.roles.follower
        match item:
            case inputs.Received():
                receive(self.roles, turn, item.sender, item.message)
            case inputs.Found():
                follower.adopt_state(turn, item)
                if follower.leadership is not None and item.leader == turn.host:
                    self.roles.lead(Leader(self._identity, follower.leadership, is_new=False))
                    # The previous agent may have left the lease.
                    self._lease.held = item.attempt
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
                    self._lease.held = self._lease.held or attempt
            case inputs.LeaseWritten():
                self._lease.written()
                if bootstrap is None:
                    # While a start is under way here, the record may be its own.
                    self.roles.fence(turn, item.newer, f"attempt {item.newer} has begun")
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
            case inputs.MirrorFound() if leader is not None:
                leader.mirror.found(item.id)
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
            self.roles.bootstrap = Bootstrap(self._identity, starting, turn.now_secs)
        if (
            self.roles.bootstrap is None
            and self.roles.leader is not None
            and follower.group is not None
        ):
            branch = self.roles.leader.wanted_branch
            if branch is not None:
                self.roles.bootstrap = Bootstrap(
                    self._identity,
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
        elif turn.now_secs >= bootstrap.group.since_secs + self._identity.settings.joining_secs:
            follower.start_waits_for = bootstrap.waits_for(turn.now_secs)

    def _leased_attempt(self) -> tuple[AttemptId, bool]:
        """Return the attempt whose lease to renew, and whether its trainers have ended.

        It is the one that this host leads as rank 0's, while its trainers live, and while what they
        have left is being stored.
        """
        leader, group = self.roles.leader, self.roles.follower.group
        if leader is None or not leader.leadership.is_first:
            return NO_ATTEMPT, False
        is_own = group is not None and group.token == leader.leadership.group
        is_living = is_own and group is not None and group.is_living and not leader.is_broken
        is_storing = not is_living and not leader.durability.is_settled
        attempt = leader.leadership.attempt if is_living or is_storing else NO_ATTEMPT
        return attempt, is_storing

    def _is_wanted(self, bootstrap: Bootstrap) -> bool:
        if bootstrap.branch_from:
            return (
                self.roles.leader is not None
                and self.roles.leader.leadership.attempt == bootstrap.branch_from
            )
        return bootstrap.group is self.roles.follower.begins_here

    def _lead(self, turn: Turn, bootstrap: Bootstrap, leadership: Leadership) -> None:
        before, self.roles.bootstrap = self.roles.leader, None
        leader = Leader(self._identity, leadership, is_new=True)
        self.roles.lead(leader)
        for checkpoint in bootstrap.given_up:
            turn.act(checkpoint)
        if bootstrap.ram_given_up is not None:
            turn.act(bootstrap.ram_given_up)
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
        self.roles.lead(Leader(self._identity, leadership, is_new=False))
        self.roles.follower.changed()
