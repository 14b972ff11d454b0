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
from holdfast.coordination.inputs import Fact, Published
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
        self.member = Follower(identity)
        self.leader: Leader | None = None
        self.starting: Bootstrap | None = None
        self.lease = LeaseRenewal(identity.incarnation)
        self.refused: dict[str, tuple[str, Refusal]] = {}

    def handle(self, fact: Fact, now_secs: float, published: Published) -> list[Effect]:
        """Takes one fact.

        Args:
            fact: what happened; the first one of a start may be `Found`.
            now_secs: seconds on a clock that never goes backwards.
            published: the steps of the ranks that live here, read just now.

        Returns:
            What is to be done, in this order.
        """
        turn = Turn(self.identity.host, now_secs, published)
        self._take(turn, fact)
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
        times = [self.member.next_at_secs(now_secs), self.lease.next_at_secs()]
        if self.leader is not None:
            times.append(self.leader.next_at_secs(now_secs))
        if self.starting is not None:
            times.append(self.starting.next_at_secs(now_secs))
        return min(times)

    # What others want to know.

    @property
    def attempt(self) -> int:
        """The newest attempt that is known here; 0 where none is."""
        return self.member.attempt

    @property
    def is_settled(self) -> bool:
        """Whether this host's RAM is not needed by any checkpoint, as far as its leader knows."""
        return self.member.is_settled

    def serves(self, attempt: int) -> bool:
        """Whether a host that knows of no newer attempt than `attempt` may read parts here."""
        return attempt >= self.member.attempt

    @property
    def may_decide(self) -> bool:
        """Whether the policies are to be asked here: where the leader is, while all ranks live."""
        leader = self.leader
        return leader is not None and leader.reign.is_first and leader.is_whole

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
        return self.leader is not None and self.leader.ledger.required > 1

    def waits_for(self, now_secs: float) -> str:
        """Return what trainers here whose attempt has not begun wait for; empty: there are none."""
        wanting = next(iter(self.member.wanting.values()), None)
        if wanting is None:
            return ""
        if self.starting is not None:
            return self.starting.waits_for(now_secs)
        return f"host {wanting.leader}, where rank 0 is, has not begun the attempt"

    def complete_ids(self) -> set[CheckpointId]:
        """The checkpoints whose parts all stand somewhere, as far as is known where it leads."""
        entries = self.leader.ledger if self.leader is not None else ()
        return {e.id for e in entries if e.is_complete and not e.dropped}

    @property
    def wants_preserved(self) -> bool:
        """Whether the RAM tier's policy is to be asked: until then no RAM is given up."""
        return self.leader is not None and self.leader.wants_preserved

    def once_complete_ids(self) -> set[CheckpointId]:
        """The checkpoints that were complete, where it leads; a silent host may hold them."""
        entries = self.leader.ledger if self.leader is not None else ()
        return {e.id for e in entries if e.was_complete and not e.dropped}

    @property
    def leads(self) -> bool:
        """Whether this host leads the run's newest attempt, as rank 0's."""
        return self.leader is not None and self.leader.reign.is_first

    def held_ids(self) -> set[CheckpointId]:
        """The checkpoints of which any part stands in RAM, as far as is known where it leads."""
        entries = self.leader.ledger if self.leader is not None else ()
        return {e.id for e in entries if any(e.holders.values())}

    def tier_of(self, checkpoint: CheckpointId) -> str:
        """Where it stands, as far as is known where it leads: in "ram", or else "durable"."""
        entry = self.leader.ledger.entries.get(checkpoint) if self.leader is not None else None
        is_in_ram = entry is not None and all(entry.holders.get(r) for r in range(entry.part_count))
        return "ram" if is_in_ram else "durable"

    def pending_ids(self) -> list[CheckpointId]:
        """The checkpoints on their way to the durable tier, where it leads; the oldest first."""
        entries = self.leader.ledger if self.leader is not None else ()
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
        if attempt > self.member.attempt:
            self.member.fence(turn, attempt, reason)
            self.check_leads()

    def check_leads(self) -> None:
        """Leads no attempt that is not the newest."""
        if self.leader is not None and self.leader.reign.attempt < self.member.attempt:
            self.leader = None

    def step_down(self) -> None:
        """Another successor leads."""
        self.leader = None

    # How facts are taken.

    def _take(self, turn: Turn, fact: Fact) -> None:
        member = self.member
        match fact:
            case inputs.Received():
                receive(self, turn, fact.sender, fact.message)
            case inputs.Found():
                member.adopt_state(turn, fact)
                if member.reign is not None and fact.leader == turn.host:
                    self.leader = Leader(self.identity, member.reign, is_new=False)
                    # The agent before this one may have left the lease.
                    self.lease.held = fact.attempt
            case inputs.RankJoined():
                member.joined(turn, fact)
            case inputs.RankLeft() | inputs.RankLost():
                member.left(fact)
            case inputs.PartBegun():
                member.note_begun(fact)
            case inputs.PartSealed() | inputs.PartAbandoned():
                member.note_sealed(turn, fact)
            case inputs.CopiesOffered():
                member.offered(fact)
            case inputs.Wish():
                member.wished(fact.kind)
            case inputs.BranchWanted():
                member.branch_wanted(fact)
            case inputs.TargetWritten():
                member.target_written(fact)
            case inputs.LeaveWanted():
                member.leave(turn)
            case inputs.Preserved():
                if self.leader is not None:
                    self.leader.preserve(fact.ids)
            case inputs.Deleted():
                member.deleted(turn, fact.id)
            case inputs.Tick():
                pass
            case _:
                self._take_outcome(turn, fact)

    def _take_outcome(self, turn: Turn, fact: Fact) -> None:
        """Takes what came of an effect on the stores."""
        holdings, leader, starting = self.member.holdings, self.leader, self.starting
        match fact:
            case inputs.ReplicaSealed():
                holdings.replica_sealed(turn, fact)
            case inputs.PullFailed():
                holdings.pull_failed(turn, fact)
            case inputs.PartsWritten():
                holdings.parts_written(fact)
            case inputs.WriteFailed():
                holdings.write_failed(turn, fact)
                self.fence(turn, fact.newer_attempt, fact.reason)
            case inputs.CommitWritten() if leader is not None:
                leader.durability.committed(fact.id)
            case inputs.CommitFailed():
                if leader is not None:
                    leader.durability.commit_failed(turn, fact)
                self.fence(turn, fact.newer_attempt, fact.reason)
            case inputs.DurableListed():
                self._take_listing(turn, fact)
            case inputs.ListingFailed():
                if starting is not None:
                    starting.listing_failed(turn, fact)
                if leader is not None:
                    leader.durability.listing_failed(turn)
            case inputs.AttemptBegun():
                attempt = fact.asked.attempt
                if starting is not None and starting.awaits(fact.asked):
                    starting.attempt_begun(fact)
                else:
                    # The start that asked for it is gone; the record fences all the same.
                    self.fence(turn, attempt, f"attempt {attempt} has begun")
                    self.lease.held = self.lease.held or attempt
            case inputs.LeaseWritten():
                self.lease.written()
            case inputs.LeaseRead() if starting is not None:
                starting.lease_read(turn, fact)
            case inputs.LeaseNotRead() if starting is not None:
                starting.lease_not_read(turn, fact)
            case inputs.AttemptTaken() if starting is not None:
                starting.attempt_taken(fact)
            case inputs.BeginFailed() if starting is not None:
                starting.begin_failed(turn, fact)
        self.member.changed()

    def _take_listing(self, turn: Turn, fact: inputs.DurableListed) -> None:
        if self.starting is not None:
            self.starting.listed_durable(fact)
        if self.leader is not None and fact.newest_attempt > self.member.attempt:
            # A start that goes on meanwhile is told by the record whether it is too late.
            self.fence(turn, fact.newest_attempt, f"attempt {fact.newest_attempt} has begun")
        elif self.leader is not None:
            self.leader.listed(turn, fact)

    def _work(self, turn: Turn) -> None:
        self._start(turn)
        if self.leader is not None:
            self.leader.run_due(turn)
        self.member.run_due(turn)
        self._succeed(turn)

    def _start(self, turn: Turn) -> None:
        """Begins what trainers want to begin: an attempt, or a branch of theirs."""
        member, wanting = self.member, self.member.begins_here
        if self.starting is not None and not self._is_wanted(self.starting):
            self.starting = None
        if self.starting is None and wanting is not None:
            self.starting = Bootstrap(self.identity, wanting, turn.now_secs)
        if self.starting is None and self.leader is not None and member.group is not None:
            branch = self.leader.wanted_branch
            if branch is not None:
                self.starting = Bootstrap(
                    self.identity,
                    member.group,
                    turn.now_secs,
                    branch_from=branch.attempt,
                    origin=branch.origin,
                )
        starting = self.starting
        member.start_waits_for = ""
        if starting is None:
            return
        # A group that lost a rank, on whichever host, cannot go on and does not stand in the way.
        is_broken = self.leader is not None and self.leader.is_broken
        starting.run_due(turn, None if is_broken else member.group)
        if starting.reign is not None:
            self._lead(turn, starting, starting.reign)
        elif starting.refusal:
            self._refuse(turn, starting)
        elif turn.now_secs >= starting.group.since_secs + self.identity.settings.joining_secs:
            member.start_waits_for = starting.waits_for(turn.now_secs)

    def _living_attempt(self) -> int:
        """Return the attempt that this host leads as rank 0's while its trainers live; else 0."""
        leader, group = self.leader, self.member.group
        if leader is None or group is None or not leader.reign.is_first or leader.is_broken:
            return 0
        is_living = group.word == leader.reign.group and group.is_living
        return leader.reign.attempt if is_living else 0

    def _is_wanted(self, starting: Bootstrap) -> bool:
        if starting.branch_from:
            return self.leader is not None and self.leader.reign.attempt == starting.branch_from
        return starting.group is self.member.begins_here

    def _lead(self, turn: Turn, starting: Bootstrap, reign: Leadership) -> None:
        before, self.starting = self.leader, None
        self.leader = Leader(self.identity, reign, is_new=True)
        for checkpoint in starting.given_up:
            turn.act(checkpoint)
        if starting.branch_from and before is not None:
            self.leader.inherit(turn, before)
        for sender, report in sorted(starting.hellos.items()):
            self.leader.accept_report(turn, sender, report)
        if starting.listed is not None:
            self.leader.listed(turn, starting.listed)

    def _refuse(self, turn: Turn, starting: Bootstrap) -> None:
        self.starting = None
        if starting.branch_from:
            if self.leader is not None:
                self.leader.forget_branch()
            newest = starting.listed.newest_attempt if starting.listed is not None else 0
            turn.act(GroupRefused(starting.group.word, starting.refusal, starting.refusal_kind))
            self.fence(turn, newest, starting.refusal)
            return
        self.refused[starting.group.word] = starting.refusal, starting.refusal_kind
        while len(self.refused) > REFUSED_MAX:
            del self.refused[next(iter(self.refused))]
        tell_refused(turn, starting)

    def _succeed(self, turn: Turn) -> None:
        """Leads in the place of a silent leader, if it is this host's turn."""
        following = self.member.following
        if following.leader != turn.host or following.incarnation:
            return
        reign = self.member.reign
        if self.leader is not None or reign is None or reign.attempt != self.member.attempt:
            return
        reign = replace(reign, successors=following.successors, term=following.term, is_first=False)
        self.leader = Leader(self.identity, reign, is_new=False)
        self.member.changed()
