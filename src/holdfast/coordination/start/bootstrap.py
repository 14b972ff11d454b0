"""The start of an attempt, on rank 0's host, before the attempt has a leader.

A start gathers the reports of its trainers' hosts, lists the durable tier, and asks the agent that
leads the newest attempt whether its trainers live. If that agent does not answer, or cannot be
asked because it has the name of this host and is not its agent, the start reads the attempt's
lease (`lease`). Then it chooses the checkpoint to continue from and puts the attempt's
record if there is none. The record decides: of two concurrent starts one puts it, and the other
lists storage again.

Invariants:
- While the newest attempt's trainers live, no attempt is begun, unless a takeover was requested.
- A checkpoint is chosen from a listing that was made after the newest attempt's end was known.
- No attempt is begun beside committed checkpoints of newer attempts that have no record, unless a
  takeover was requested; it then gets a number above theirs.
- No checkpoint is chosen before the hosts of all ranks have reported: the attempt cannot train
  without them, and each may hold parts that no other host has.
- Every wait has a bound: for hosts, for storage, for the other agent's answer, for a lease, for
  what another agent stores.
- The hosts that were asked release nothing while the start may still continue from it.

See docs/decisions/0067.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from holdfast.coordination.effects import (
    BeginAttempt,
    GivenUp,
    LeaseAwaited,
    ListDurable,
    RamGivenUp,
    ReadLease,
)
from holdfast.coordination.follower.rank_group import RankGroup
from holdfast.coordination.inputs import (
    AttemptBegun,
    AttemptTaken,
    BeginFailed,
    DurableListed,
    LeaseNotRead,
    LeaseRead,
    ListingFailed,
)
from holdfast.coordination.leadership import Leadership, limits_after
from holdfast.coordination.lease_seen import LeaseSeen
from holdfast.coordination.messages import (
    REASON_CHARS_MAX,
    Alive,
    HostState,
    Probe,
    Refusal,
    Refused,
    Report,
    WhoHolds,
)
from holdfast.coordination.rank_runs import count_in, ranks_in, ranks_text
from holdfast.coordination.settings import LEASE_SECS, STORING_SECS, TRIES_MAX
from holdfast.coordination.start.lease import LeaseVerdict, LeaseWatch
from holdfast.coordination.start.restart_point import (
    choose_checkpoint,
    given_up,
    listed_though_deleted,
    newest_begun,
    unrecorded,
)
from holdfast.coordination.turn import AgentIdentity, Turn
from holdfast.format.names import NO_ATTEMPT, STEP_MAX, AttemptId, CheckpointId

TAKEN_MAX = 20
"""How many numbers in a row other starts may take before a start is refused."""

HOSTS_NAMED_MAX = 10
NAMED_MAX = 3
"""How many attempts without a record a refusal names: the newest ones."""


class _Phase(Enum):
    GATHER = auto()
    LIST = auto()
    PROBE = auto()
    LEASE = auto()
    BEGIN = auto()
    DONE = auto()


@dataclass(slots=True)
class Bootstrap:
    """One start of an attempt.

    Attributes:
        group: the trainers that start.
        branch_from: the attempt whose own ranks go back to `origin`; none if trainers start.
        origin: the checkpoint that the attempt continues from; chosen by a start, given by a
            branch.
        hellos: the last report of each host that has reported to this start.
        leadership: set once the attempt has begun.
        listed: the last listing of the durable tier.
        given_up: the newer checkpoints that were complete and are lost.
        ram_given_up: the host whose agent could not be asked, and may have newer ones.
        refusal, refusal_kind: set once the attempt will never begin.
    """

    identity: AgentIdentity
    group: RankGroup
    since_secs: float
    branch_from: AttemptId = NO_ATTEMPT
    origin: CheckpointId | None = None
    hellos: dict[str, Report] = field(default_factory=dict)
    leadership: Leadership | None = None
    listed: DurableListed | None = None
    given_up: tuple[GivenUp, ...] = ()
    ram_given_up: RamGivenUp | None = None
    refusal: str = ""
    refusal_kind: Refusal = Refusal.BUSY
    _joined_count: int = 0
    """The ranks of this start whose hosts have reported."""
    _phase: _Phase = _Phase.GATHER
    _at_secs: float = 0.0
    _is_asking: bool = False
    _failures: int = 0
    _taken: int = 0
    _asked_for: BeginAttempt | None = None
    # An attempt whose put failed: its record may have been written all the same.
    _unsure: AttemptId = NO_ATTEMPT
    # Hosts of the previous attempt that were asked, and when they are asked again.
    _asked: set[str] = field(default_factory=set)
    _ask_at_secs: float = float("inf")
    _ask_until_secs: float | None = None
    _watch: LeaseWatch | None = None
    # The attempt that has ended, if storage was listed, or is being listed, after that.
    _ended: AttemptId = NO_ATTEMPT
    _lease_asked_at_secs: float = 0.0
    # Checkpoints that were reported as deleted before storage was listed again.
    _listed_again_for: set[CheckpointId] = field(default_factory=set)
    # Until when records are looked for that some storage shows later than the checkpoints.
    _records_until_secs: float | None = None

    @property
    def _is_branch(self) -> bool:
        return bool(self.branch_from)

    def accepts(self, sender: str, group: str) -> bool:
        """Return whether a report of `sender` is for this start.

        It is if it comes from a host of the start's trainers, or from a host that was asked.
        """
        return not self._is_branch and (group == self.group.token or sender in self._asked)

    def accept_report(self, sender: str, report: Report) -> None:
        """Record a host's report, unless a newer one has arrived already."""
        hello = self.hellos.get(sender)
        stamp = report.incarnation, report.seq
        if hello is None or stamp > (hello.incarnation, hello.seq):
            self.hellos[sender] = report
            self._joined_count += self._own_count(report) - self._own_count(hello)

    def _own_count(self, report: Report | None) -> int:
        """Return how many ranks of this start are on the host of a report."""
        if report is None or report.state.group != self.group.token:
            return 0
        return count_in(report.state.ranks)

    def run_due(self, turn: Turn, living: RankGroup | None) -> None:
        """Do the next step; `living` are the trainers here that belong to the present attempt."""
        if self._phase is _Phase.GATHER:
            self._gather(turn)
        if self._phase is _Phase.LIST and not self._is_asking and turn.now_secs >= self._at_secs:
            self._is_asking = True
            turn.act(ListDurable())
        if self._phase is _Phase.PROBE:
            self._probe(turn, living)
        if self._phase is _Phase.LEASE and not self._is_asking and turn.now_secs >= self._at_secs:
            self._request_lease(turn)
        if self._phase is _Phase.BEGIN and not self._is_asking and turn.now_secs >= self._at_secs:
            self._begin(turn)
        if self._phase is not _Phase.DONE and turn.now_secs >= self._ask_at_secs:
            # The asked hosts keep their parts for a limited time only, and storage may take longer
            # to answer whether the record is written. So they are asked again.
            self._ask(turn)

    def next_at_secs(self, now_secs: float) -> float:
        """Return when `run_due` has work to do, if no input comes before."""
        if self._phase is _Phase.GATHER:
            return self.since_secs + self.identity.settings.reporting_secs
        if self._phase is _Phase.DONE:
            return float("inf")
        return self._ask_at_secs if self._is_asking else min(self._at_secs, self._ask_at_secs)

    def waits_for(self, now_secs: float) -> str:
        """Return what the start waits for now, as text for users."""
        match self._phase:
            case _Phase.GATHER:
                return self._missing_text()
            case _Phase.LIST:
                return "storage has not listed the durable tier"
            case _Phase.PROBE | _Phase.LEASE if self.listed is not None:
                attempt = f"attempt {self.listed.newest_attempt} of host {self.listed.leader}"
                if self._watch is None or self._watch.lease is None:
                    return f"it is not yet known whether {attempt} lives"
                left_secs = max(self._watch.over_at_secs - now_secs, 0.0)
                if self._watch.stores_until_secs is not None:
                    left_secs = max(self._watch.stores_until_secs - now_secs, 0.0)
                    return (
                        f"{attempt} has ended, and its agent, which serves its own host alone, "
                        f"still stores its checkpoints; the start waits at most {left_secs:.0f} s "
                        "more"
                    )
                return (
                    f"the agent of {attempt} cannot be asked, and its lease runs out in at most "
                    f"{left_secs:.0f} s"
                )
            case _:
                return "storage has not confirmed the attempt's record"

    # Outcomes.

    def listed_durable(self, item: DurableListed) -> None:
        """Apply a listing of the durable tier."""
        if self._phase is not _Phase.LIST:
            return
        self._is_asking, self.listed = False, item
        self._phase, self._at_secs = _Phase.PROBE, float("-inf")
        is_own = item.newest_attempt == self._unsure
        if self._is_branch and item.newest_attempt != self.branch_from and not is_own:
            self._refuse(f"attempt {item.newest_attempt} has taken the run over", Refusal.BUSY)

    def listing_failed(self, turn: Turn, item: ListingFailed) -> None:
        """Schedule the next try of a failed listing; after some, or a final one, refuse the start.

        A listing that was requested for another purpose may fail while this start waits for
        something else.
        """
        if self._phase is _Phase.LIST:
            self._failed(turn, item)

    def awaits(self, asked: BeginAttempt) -> bool:
        """Return whether this start waits for the result of `asked`.

        A previous start on this host may have requested another record with the same number.
        """
        return self._phase is _Phase.BEGIN and asked == self._asked_for

    def may_have(self, attempt: AttemptId) -> bool:
        """Return whether this start waits for that attempt's record, which may be written."""
        is_waiting = self._phase is _Phase.BEGIN and self._is_asking
        return is_waiting and self._asked_for is not None and self._asked_for.attempt == attempt

    def attempt_begun(self, item: AttemptBegun) -> None:
        """Note that the record is written: the attempt has begun."""
        if self.awaits(item.asked):
            self._begin_leading(item.asked.attempt)

    def attempt_taken(self, item: AttemptTaken) -> None:
        """List storage again: another start has put the record, and its trainers may live."""
        if not self.awaits(item.asked):
            return
        self._is_asking = False
        self._taken += 1
        if self._taken >= TAKEN_MAX:
            self._refuse(f"other starts took {TAKEN_MAX} attempt numbers in a row", Refusal.BUSY)
            return
        self._phase, self._at_secs = _Phase.LIST, float("-inf")

    def begin_failed(self, turn: Turn, item: BeginFailed) -> None:
        """List storage again: the put has failed, and whether the record is written is unknown."""
        if self.awaits(item.asked):
            self._phase = _Phase.LIST
            # If the next listing shows the record, it is this start's own and blocks nothing.
            self._unsure = item.asked.attempt
            self._failed(turn, item)

    def on_alive(self, message: Alive) -> None:
        """Apply the answer of the agent that leads the newest attempt."""
        is_asked = self._phase in (_Phase.PROBE, _Phase.LEASE)
        if is_asked and message.group == self.group.token:
            if message.is_living:
                self._refuse(f"attempt {message.attempt} is live on other hosts", Refusal.BUSY)
            else:
                self._list_again()

    def lease_read(self, turn: Turn, item: LeaseRead) -> None:
        """Judge the lease of the newest attempt."""
        watch, listed = self._watch, self.listed
        if self._phase is not _Phase.LEASE or watch is None or listed is None:
            return
        if item.attempt != listed.newest_attempt:
            return
        self._is_asking = False
        is_first, was_storing = watch.lease is None, watch.stores_until_secs is not None
        match watch.judge(self._lease_asked_at_secs, turn.now_secs, item.lease):
            case LeaseVerdict.DEAD:
                if item.lease is not None:
                    reason = f"its lease was not renewed for {LEASE_SECS:.0f} s"
                    self.ram_given_up = RamGivenUp(item.attempt, listed.leader, reason)
                self._list_again()
            case LeaseVerdict.LIVE if item.lease is not None:
                self._refuse(live_text(item.attempt, item.lease), Refusal.BUSY)
            case LeaseVerdict.LATE:
                reason = f"it has not stored all of them within {STORING_SECS:.0f} s"
                self.ram_given_up = RamGivenUp(item.attempt, listed.leader, reason)
                self._list_again()
            case LeaseVerdict.STORING:
                self._at_secs = watch.next_read_at_secs
                if not was_storing:
                    turn.act(LeaseAwaited(item.attempt, listed.leader, STORING_SECS, True))
            case _:
                self._at_secs = watch.next_read_at_secs
                if is_first:
                    secs = watch.over_at_secs - turn.now_secs
                    turn.act(LeaseAwaited(item.attempt, listed.leader, secs, False))

    def lease_not_read(self, turn: Turn, item: LeaseNotRead) -> None:
        """Try again to read the lease; after some failures, or a final one, refuse the start."""
        if self._phase is _Phase.LEASE:
            self._failed(turn, item)

    def _states(self) -> list[HostState]:
        return [report.state for report in self.hellos.values()]

    def _own_states(self) -> list[HostState]:
        """Return the reported states of the hosts of this start's ranks."""
        return [state for state in self._states() if state.group == self.group.token]

    def _gather(self, turn: Turn) -> None:
        if self._is_branch or self._joined_count >= self.group.rank_count:
            self._phase = _Phase.LIST
        elif turn.now_secs >= self.since_secs + self.identity.settings.reporting_secs:
            secs = self.identity.settings.reporting_secs
            self._refuse(f"{self._missing_text()} within {secs:.0f} s", Refusal.UNREACHED)

    def _missing_text(self) -> str:
        """Return text that names the ranks that have not reported, and their hosts if known."""
        own = self._own_states()
        missing = set(range(self.group.rank_count)).difference(
            rank for state in own for rank in ranks_in(state.ranks)
        )
        reported = {
            host
            for host, report in self.hellos.items()
            if report.state.group == self.group.token and report.state.ranks
        }
        hosts = sorted(set(self.group.hosts) - reported)
        where = f" of {_hosts_text(hosts)}" if hosts else ""
        if not missing:
            return "all ranks have reported"
        have = "has" if len(missing) == 1 else "have"
        return f"{ranks_text(missing)}{where} {have} not reported to host {self.identity.host}"

    def _probe(self, turn: Turn, living: RankGroup | None) -> None:
        assert self.listed is not None
        leader, newest = self.listed.leader, self.listed.newest_attempt
        is_of_this_name = leader == self.identity.host
        if newest in (NO_ATTEMPT, self.branch_from, self._ended) or self.group.takeover:
            self._proceed()
        elif is_of_this_name and living is not None and living.holds(newest):
            self._refuse(f"attempt {newest} is live on this host", Refusal.BUSY)
        elif is_of_this_name and (self.listed.is_begun_here or self.listed.is_over):
            # An attempt of this agent's folder needs no probe: its group is known here.
            self._proceed()
        elif self._at_secs == float("-inf") and not is_of_this_name:
            self._at_secs = turn.now_secs + self.identity.settings.probe_secs
            self._ask_leader(turn)
        elif turn.now_secs < self._at_secs:
            return
        elif any(state.ended_attempt == newest for state in self._own_states()):
            # Without those ranks the attempt cannot continue, even if other ranks of it live.
            self._list_again()
        else:
            # Its host is lost, or cut off, or belongs to a job whose hosts cannot be reached; or an
            # agent of this host's name, not this one, leads it: of another user, folder, container.
            self._phase, self._at_secs = _Phase.LEASE, float("-inf")
            self._watch = LeaseWatch(turn.now_secs)

    def _ask_leader(self, turn: Turn) -> None:
        assert self.listed is not None
        newest, leader = self.listed.newest_attempt, self.listed.leader
        # A message to this host's own name would reach this agent, which does not lead the attempt.
        if leader != self.identity.host:
            turn.send(leader, Probe(run=self.identity.run, attempt=newest, group=self.group.token))

    def _request_lease(self, turn: Turn) -> None:
        assert self.listed is not None
        # The agent is asked again with each read: it may have been stopped, and answer now.
        self._is_asking, self._lease_asked_at_secs = True, turn.now_secs
        turn.act(ReadLease(self.listed.newest_attempt))
        self._ask_leader(turn)

    def _list_again(self) -> None:
        """List once more: what the listing shows may have changed until the attempt's end."""
        assert self.listed is not None
        self._ended = self.listed.newest_attempt
        self._phase, self._at_secs = _Phase.LIST, float("-inf")
        self._is_asking, self._watch = False, None

    def _proceed(self) -> None:
        """Begin: the newest attempt does not block this start."""
        self._phase, self._at_secs = _Phase.BEGIN, float("-inf")
        self._is_asking, self._watch = False, None

    def _begin(self, turn: Turn) -> None:
        assert self.listed is not None
        if not self._is_branch:
            states = self._states()
            put_back = listed_though_deleted(states, self.listed)
            if not put_back <= self._listed_again_for:
                self._listed_again_for |= put_back
                self._list_again()
                return
            if not self.group.takeover and not self._has_records(turn):
                return
            self.origin = choose_checkpoint(states, self.listed, put_back)
            begun = newest_begun(states, self.listed)
            is_partly_there = begun is not None and (
                self.origin is None or begun.step > self.origin.step
            )
            # Hosts without ranks of this start may hold the missing parts.
            if is_partly_there and self._ask_others(turn):
                return
            self.given_up = given_up(states, self.listed, self.origin, self._silent())
        # Two starts may choose the same number; storage lets one of them put the record.
        self._is_asking = True
        lacking = (c.attempt.number for c in unrecorded(self.listed))
        number = max(self.listed.newest_attempt.number, *lacking, 0) + 1
        attempt = AttemptId.of_start(number, self.group.token)
        self._asked_for = BeginAttempt(attempt, self.origin, self.group.token)
        turn.act(self._asked_for)

    def _has_records(self, turn: Turn) -> bool:
        """Return whether no committed checkpoint lacks its attempt's record; else go on with that.

        Storage is listed again for `LEASE_SECS`, and then the start is refused.
        """
        assert self.listed is not None
        lacking = unrecorded(self.listed)
        if not lacking:
            return True
        if self._records_until_secs is None:
            self._records_until_secs = turn.now_secs + LEASE_SECS
        if turn.now_secs < self._records_until_secs:
            self._list_again()
            self._at_secs = turn.now_secs + self.identity.settings.storage_retry_secs
            return False
        named = ", ".join(f"step {c.step} of attempt {c.attempt}" for c in lacking[-NAMED_MAX:])
        newest = self.listed.newest_attempt
        has = f"the newest record is of attempt {newest}" if newest else "there is none"
        chosen = choose_checkpoint(self._states(), self.listed, self._listed_again_for)
        way = f"continues from step {chosen.step}" if chosen is not None else "begins anew"
        self._refuse(
            f"storage has {named} committed and no record of these attempts ({has}): the records "
            "were removed or put back to an earlier state, and the checkpoints were not. Put the "
            f"newer records back (attempts/), or open with takeover=True, which {way}, without the "
            "newer steps",
            Refusal.UNRECORDED,
        )
        return False

    def _ask_others(self, turn: Turn) -> bool:
        """Ask hosts of the previous attempt for missing parts; return whether to wait for them."""
        if self._ask_until_secs is None:
            self._ask_until_secs = turn.now_secs + self.identity.settings.probe_secs
        silent = self._silent()
        if not silent or turn.now_secs >= self._ask_until_secs:
            return False
        self._asked |= silent
        self._ask(turn)
        beat_secs = self.identity.settings.heartbeat_secs
        self._at_secs = min(turn.now_secs + beat_secs / 2, self._ask_until_secs)
        return True

    def _silent(self) -> set[str]:
        """Return the hosts of the previous attempt that may hold parts and have not reported."""
        return {peer for state in self._states() for peer in state.peers} - self.hellos.keys()

    def _ask(self, turn: Turn) -> None:
        """Ask the hosts in `_asked` for reports, which makes them keep what they hold."""
        attempt = self.listed.newest_attempt if self.listed is not None else NO_ATTEMPT
        for host in sorted(self._asked):
            ask = WhoHolds(run=self.identity.run, attempt=attempt, group=self.group.token)
            turn.send(host, ask)
        self._ask_at_secs = turn.now_secs + self.identity.settings.storage_retry_secs

    def _begin_leading(self, attempt: AttemptId) -> None:
        assert self.listed is not None
        self._phase, self._is_asking = _Phase.DONE, False
        self.leadership = Leadership(
            attempt=attempt,
            group=self.group.token,
            rank_count=self.group.rank_count,
            origin=self.origin,
            limits=limits_after(self.listed.limits, attempt, self.origin, STEP_MAX),
            successors=(self.identity.host,),
        )

    def _failed(self, turn: Turn, item: ListingFailed | BeginFailed | LeaseNotRead) -> None:
        self._is_asking = False
        self._failures += 1
        self._at_secs = turn.now_secs + self.identity.settings.storage_retry_secs
        if item.is_final or self._failures >= TRIES_MAX:
            self._refuse(item.reason, Refusal.STORAGE)

    def _refuse(self, reason: str, kind: Refusal) -> None:
        self._phase, self.refusal, self.refusal_kind = _Phase.DONE, reason, kind


def _hosts_text(hosts: list[str]) -> str:
    """Return the names of hosts as text for users; of many only the first ones."""
    named = ", ".join(hosts[:HOSTS_NAMED_MAX])
    more = f" and {len(hosts) - HOSTS_NAMED_MAX} more" if len(hosts) > HOSTS_NAMED_MAX else ""
    return f"host{'s' if len(hosts) > 1 else ''} {named}{more}"


def live_text(attempt: AttemptId, lease: LeaseSeen) -> str:
    """Return who holds an attempt's lease, and for how long, as text for users."""
    left_secs = min(max(LEASE_SECS - lease.age_secs, 0.0), LEASE_SECS)
    return (
        f"attempt {attempt} is live on {lease.holder}; its lease was renewed and is valid for "
        f"another {left_secs:.0f} s"
    )


def send_refused(turn: Turn, bootstrap: Bootstrap) -> None:
    """Notify the hosts of a start's trainers that the attempt does not begin."""
    refused = Refused(
        run=bootstrap.identity.run,
        attempt=bootstrap.listed.newest_attempt if bootstrap.listed else NO_ATTEMPT,
        group=bootstrap.group.token,
        reason=bootstrap.refusal[:REASON_CHARS_MAX],
        kind=bootstrap.refusal_kind,
    )
    for host in sorted({*bootstrap.hellos, bootstrap.identity.host}):
        turn.send(host, refused)
