"""One host's machine: the member, and the leader where this host leads.

It does no I/O and waits for nothing. It is told a fact at a time, with the time and the steps that
were published, and hands back what is to be done. `next_at_secs` tells when it wants a `Tick`
though nothing happens. A run on one host is the same machine: its messages stay inside.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.coordination import inputs
from holdfast.coordination.bootstrap import Bootstrap, tell_refused
from holdfast.coordination.effects import Effect, GroupRefused
from holdfast.coordination.follower import Follower
from holdfast.coordination.inputs import Input, Published
from holdfast.coordination.leader import Leader
from holdfast.coordination.leadership import Leadership
from holdfast.coordination.lease import LeaseRenewal
from holdfast.coordination.message_routing import receive
from holdfast.coordination.messages import Refusal, TargetKind
from holdfast.coordination.turn import AgentIdentity, Turn
from holdfast.format.names import CheckpointId

INNER_MAX = 200
"""The messages that the halves of one host exchange in one turn."""

REFUSED_MAX = 8


class Node:
    """The machine of one start of one host's agent. Owned by one thread."""

    def __init__(self, identity: AgentIdentity) -> None:
        self.identity = identity
        self.follower = Follower(identity)
        self.leader: Leader | None = None
        self.bootstrap: Bootstrap | None = None
        self.lease = LeaseRenewal(identity.incarnation)
        self.refused: dict[str, tuple[str, Refusal]] = {}

    def handle(self, item: Input, now_secs: float, published: Published) -> list[Effect]:
        """Take one input.

        Args:
            item: what happened; the first one of a start may be `Found`.
            now_secs: seconds on a clock that never goes backwards.
            published: the steps of the ranks that live here, read just now.

        Returns:
            What is to be done, in this order.
        """
        turn = Turn(self.identity.host, now_secs, published)
        self._take(turn, item)
        for _ in range(INNER_MAX):
            self._work(turn)
            if not turn.inner:
                self.lease.work(turn, self._living_attempt())
                return turn.effects
            while turn.inner:
                receive(self, turn, self.identity.host, turn.inner.popleft())
        raise AssertionError("the halves of one host do not come to rest")

    def next_at_secs(self, now_secs: float) -> float:
        """When a `Tick` is due, if nothing happens before; on the clock of `handle`."""
        times = [self.follower.next_at_secs(now_secs), self.lease.next_at_secs()]
        if self.leader is not None:
            times.append(self.leader.next_at_secs(now_secs))
        if self.bootstrap is not None:
            times.append(self.bootstrap.next_at_secs(now_secs))
        return min(times)

    # What others want to know.

    @property
    def attempt(self) -> int:
        """The newest attempt that is known here; 0 where none is."""
        return self.follower.attempt

    @property
    def is_settled(self) -> bool:
        """Whether this host's RAM is not needed by any checkpoint, as far as its leader knows."""
        return self.follower.is_settled

    def serves(self, attempt: int) -> bool:
        """Whether a host that knows of no newer attempt than `attempt` may read parts here."""
        return attempt >= self.follower.attempt

    @property
    def may_decide(self) -> bool:
        """Whether the policies are to be asked here: where the leader is, while all ranks live."""
        leader = self.leader
        return leader is not None and leader.leadership.is_first and leader.is_whole

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is on its way; for policies, which the leader's agent asks."""
        return self.leader is not None and self.leader.is_saving

    @property
    def is_sealing(self) -> bool:
        """Whether a checkpoint is on its way into RAM; likewise."""
        return self.leader is not None and self.leader.is_sealing

    @property
    def has_copies(self) -> bool:
        """Whether parts are to stand in several failure domains, as far as is known here."""
        return self.leader is not None and self.leader.table.required > 1

    def waits_for(self, now_secs: float) -> str:
        """Return what trainers here whose attempt has not begun wait for; empty: there are none."""
        wanting = next(iter(self.follower.wanting.values()), None)
        if wanting is None:
            return ""
        if self.bootstrap is not None:
            return self.bootstrap.waits_for(now_secs)
        return f"host {wanting.leader}, where rank 0 is, has not begun the attempt"

    def complete_ids(self) -> set[CheckpointId]:
        """The checkpoints whose parts all stand somewhere, as far as is known where it leads."""
        entries = self.leader.table if self.leader is not None else ()
        return {e.id for e in entries if e.is_complete and not e.dropped}

    @property
    def wants_preserved(self) -> bool:
        """Whether the RAM tier's policy is to be asked: until then no RAM is given up."""
        return self.leader is not None and self.leader.wants_preserved

    def once_complete_ids(self) -> set[CheckpointId]:
        """The checkpoints that were complete, where it leads; a silent host may hold them."""
        entries = self.leader.table if self.leader is not None else ()
        return {e.id for e in entries if e.was_complete and not e.dropped}

    @property
    def leads(self) -> bool:
        """Whether this host leads the run's newest attempt, as rank 0's."""
        return self.leader is not None and self.leader.leadership.is_first

    def held_ids(self) -> set[CheckpointId]:
        """The checkpoints of which any part stands in RAM, as far as is known where it leads."""
        entries = self.leader.table if self.leader is not None else ()
        return {e.id for e in entries if any(e.holders.values())}

    def tier_of(self, checkpoint: CheckpointId) -> str:
        """Where it stands, as far as is known where it leads: in "ram", or else "durable"."""
        entry = self.leader.table.entries.get(checkpoint) if self.leader is not None else None
        is_in_ram = entry is not None and all(entry.holders.get(r) for r in range(entry.part_count))
        return "ram" if is_in_ram else "durable"

    def pending_ids(self) -> list[CheckpointId]:
        """The checkpoints on their way to the durable tier, where it leads; the oldest first."""
        entries = self.leader.table if self.leader is not None else ()
        return [e.id for e in entries if e.is_pending]

    def is_target_under_way(self, kind: TargetKind) -> bool:
        """Whether ranks are on their way to a target; a policy need not be asked meanwhile."""
        return self.leader is not None and self.leader.targets.is_under_way(kind)

    def save_cost_secs(self, here: Published) -> float | None:
        """What a checkpoint costs the dearest rank, of all hosts where it leads."""
        found = self.leader.save_cost_secs if self.leader is not None else None
        costs = [cost for cost in (found, here.save_cost_secs) if cost is not None]
        return max(costs, default=None)

    # What changes who leads.

    def fence(self, turn: Turn, attempt: int, reason: str) -> None:
        """A newer attempt has begun; who leads it is asked of those that led before."""
        if attempt > self.follower.attempt:
            self.follower.fence(turn, attempt, reason)
            self.check_leads()

    def check_leads(self) -> None:
        """Leads no attempt that is not the newest."""
        if self.leader is not None and self.leader.leadership.attempt < self.follower.attempt:
            self.leader = None

    def step_down(self) -> None:
        """Another successor leads."""
        self.leader = None

    # How facts are taken.

    def _take(self, turn: Turn, item: Input) -> None:
        follower = self.follower
        match item:
            case inputs.Received():
                receive(self, turn, item.sender, item.message)
            case inputs.Found():
                follower.adopt_state(turn, item)
                if follower.leadership is not None and item.leader == turn.host:
                    self.leader = Leader(self.identity, follower.leadership, is_new=False)
                    # The agent before this one may have left the lease.
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
                if self.leader is not None:
                    self.leader.preserve(item.ids)
            case inputs.Deleted():
                follower.deleted(turn, item.id)
            case inputs.Tick():
                pass
            case _:
                self._take_outcome(turn, item)

    def _take_outcome(self, turn: Turn, item: Input) -> None:
        """Takes what came of an effect on the stores."""
        inventory, leader, bootstrap = self.follower.inventory, self.leader, self.bootstrap
        match item:
            case inputs.ReplicaSealed():
                inventory.replica_sealed(turn, item)
            case inputs.PullFailed():
                inventory.pull_failed(turn, item)
            case inputs.PartsWritten():
                inventory.parts_written(item)
            case inputs.WriteFailed():
                inventory.write_failed(turn, item)
                self.fence(turn, item.newer_attempt, item.reason)
            case inputs.CommitWritten() if leader is not None:
                leader.durability.committed(item.id)
            case inputs.CommitFailed():
                if leader is not None:
                    leader.durability.commit_failed(turn, item)
                self.fence(turn, item.newer_attempt, item.reason)
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
                    # The start that asked for it is gone; the record fences all the same.
                    self.fence(turn, attempt, f"attempt {attempt} has begun")
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
        self.follower.changed()

    def _take_listing(self, turn: Turn, item: inputs.DurableListed) -> None:
        if self.bootstrap is not None:
            self.bootstrap.listed_durable(item)
        if self.leader is not None and item.newest_attempt > self.follower.attempt:
            # A start that goes on meanwhile is told by the record whether it is too late.
            self.fence(turn, item.newest_attempt, f"attempt {item.newest_attempt} has begun")
        elif self.leader is not None:
            self.leader.listed(turn, item)

    def _work(self, turn: Turn) -> None:
        self._start(turn)
        if self.leader is not None:
            self.leader.run_due(turn)
        self.follower.run_due(turn)
        self._succeed(turn)

    def _start(self, turn: Turn) -> None:
        """Begins what trainers want to begin: an attempt, or a branch of theirs."""
        follower, wanting = self.follower, self.follower.begins_here
        if self.bootstrap is not None and not self._is_wanted(self.bootstrap):
            self.bootstrap = None
        if self.bootstrap is None and wanting is not None:
            self.bootstrap = Bootstrap(self.identity, wanting, turn.now_secs)
        if self.bootstrap is None and self.leader is not None and follower.group is not None:
            branch = self.leader.wanted_branch
            if branch is not None:
                self.bootstrap = Bootstrap(
                    self.identity,
                    follower.group,
                    turn.now_secs,
                    branch_from=branch.attempt,
                    origin=branch.origin,
                )
        bootstrap = self.bootstrap
        follower.start_waits_for = ""
        if bootstrap is None:
            return
        # A group that lost a rank, on whichever host, cannot go on and does not stand in the way.
        is_broken = self.leader is not None and self.leader.is_broken
        bootstrap.run_due(turn, None if is_broken else follower.group)
        if bootstrap.leadership is not None:
            self._lead(turn, bootstrap, bootstrap.leadership)
        elif bootstrap.refusal:
            self._refuse(turn, bootstrap)
        elif turn.now_secs >= bootstrap.group.since_secs + self.identity.settings.joining_secs:
            follower.start_waits_for = bootstrap.waits_for(turn.now_secs)

    def _living_attempt(self) -> int:
        """Return the attempt that this host leads as rank 0's while its trainers live; else 0."""
        leader, group = self.leader, self.follower.group
        if leader is None or group is None or not leader.leadership.is_first or leader.is_broken:
            return 0
        is_living = group.word == leader.leadership.group and group.is_living
        return leader.leadership.attempt if is_living else 0

    def _is_wanted(self, bootstrap: Bootstrap) -> bool:
        if bootstrap.branch_from:
            return (
                self.leader is not None and self.leader.leadership.attempt == bootstrap.branch_from
            )
        return bootstrap.group is self.follower.begins_here

    def _lead(self, turn: Turn, bootstrap: Bootstrap, leadership: Leadership) -> None:
        before, self.bootstrap = self.leader, None
        self.leader = Leader(self.identity, leadership, is_new=True)
        for checkpoint in bootstrap.given_up:
            turn.act(checkpoint)
        if bootstrap.branch_from and before is not None:
            self.leader.inherit(turn, before)
        for sender, report in sorted(bootstrap.hellos.items()):
            self.leader.accept_report(turn, sender, report)
        if bootstrap.listed is not None:
            self.leader.listed(turn, bootstrap.listed)

    def _refuse(self, turn: Turn, bootstrap: Bootstrap) -> None:
        self.bootstrap = None
        if bootstrap.branch_from:
            if self.leader is not None:
                self.leader.forget_branch()
            newest = bootstrap.listed.newest_attempt if bootstrap.listed is not None else 0
            turn.act(GroupRefused(bootstrap.group.word, bootstrap.refusal, bootstrap.refusal_kind))
            self.fence(turn, newest, bootstrap.refusal)
            return
        self.refused[bootstrap.group.word] = bootstrap.refusal, bootstrap.refusal_kind
        while len(self.refused) > REFUSED_MAX:
            del self.refused[next(iter(self.refused))]
        tell_refused(turn, bootstrap)

    def _succeed(self, turn: Turn) -> None:
        """Leads in the place of a silent leader, if it is this host's turn."""
        election = self.follower.election
        if election.leader != turn.host or election.incarnation:
            return
        leadership = self.follower.leadership
        if (
            self.leader is not None
            or leadership is None
            or leadership.attempt != self.follower.attempt
        ):
            return
        leadership = replace(
            leadership, successors=election.successors, term=election.term, is_first=False
        )
        self.leader = Leader(self.identity, leadership, is_new=False)
        self.follower.changed()
