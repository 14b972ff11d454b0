"""How an attempt begins: on the host of rank 0, before anybody leads.

It gathers what the hosts of its trainers hold, lists the durable tier, asks the agent that leads
the newest attempt whether its trainers live, chooses what to go on from, and puts the attempt's
record if there is none. The record decides: of two starts at once, one has it, and the other looks
again.

Invariants:
- Where the newest attempt's trainers live, nothing is begun unless a takeover was asked for.
- Every wait has a bound: for hosts, for storage, for the other agent's word.
- The hosts that it asked keep what they hold, for as long as it may still go on from that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from holdfast.engine.agreement.choosing import choose_checkpoint, limits_after, newest_begun
from holdfast.engine.agreement.effects import BeginAttempt, ListDurable
from holdfast.engine.agreement.facts import (
    AttemptBegun,
    AttemptTaken,
    BeginFailed,
    DurableListed,
    ListingFailed,
)
from holdfast.engine.agreement.membership import Group
from holdfast.engine.agreement.messages import (
    REASON_CHARS_MAX,
    Alive,
    HostState,
    Probe,
    Refused,
    Report,
    WhoHolds,
)
from holdfast.engine.agreement.reign import Reign
from holdfast.engine.agreement.runs import count_in
from holdfast.engine.agreement.settings import TRIES_MAX
from holdfast.engine.agreement.turn import Identity, Turn
from holdfast.format.names import STEP_MAX, CheckpointId

TAKEN_MAX = 20
"""How many numbers others may take before a start gives up."""


class _Phase(Enum):
    GATHER = auto()
    LIST = auto()
    PROBE = auto()
    BEGIN = auto()
    DONE = auto()


@dataclass(slots=True)
class Starting:
    """One start. `reign` is there once the attempt has begun, `refusal` where it never will.

    `branch_from` is the attempt whose own ranks go back to `origin`; 0 where trainers start.
    """

    identity: Identity
    group: Group
    since_secs: float
    branch_from: int = 0
    origin: CheckpointId | None = None
    hellos: dict[str, Report] = field(default_factory=dict)
    reign: Reign | None = None
    listed: DurableListed | None = None
    refusal: str = ""
    is_busy: bool = False
    _phase: _Phase = _Phase.GATHER
    _at_secs: float = 0.0
    _is_asking: bool = False
    _failures: int = 0
    _taken: int = 0
    _asked_for: BeginAttempt | None = None
    _own_number: int = 0
    _asked: set[str] = field(default_factory=set)
    _ask_at_secs: float = float("inf")
    _patient_until_secs: float | None = None

    def takes(self, sender: str, group: str) -> bool:
        """Whether a report is for this start: of its trainers' hosts, or of hosts that it asked."""
        return not self.branch_from and (group == self.group.word or sender in self._asked)

    def heard(self, sender: str, report: Report) -> None:
        """Takes what a host holds."""
        known = self.hellos.get(sender)
        stamp = report.incarnation, report.seq
        if known is None or stamp > (known.incarnation, known.seq):
            self.hellos[sender] = report

    def work(self, turn: Turn, living: Group | None) -> None:
        """Does the next step; `living` are the trainers that work on the run on this host."""
        if self._phase is _Phase.GATHER and self._has_gathered(turn):
            self._phase = _Phase.LIST
        if self._phase is _Phase.LIST and not self._is_asking and turn.now_secs >= self._at_secs:
            self._is_asking = True
            turn.act(ListDurable())
        if self._phase is _Phase.PROBE:
            self._probe(turn, living)
        if self._phase is _Phase.BEGIN and not self._is_asking and turn.now_secs >= self._at_secs:
            self._begin(turn)
        if self._phase is not _Phase.DONE and turn.now_secs >= self._ask_at_secs:
            # Storage may be slow to say whether the attempt stands that goes on from it.
            self._ask(turn)

    def next_at_secs(self, now_secs: float) -> float:
        """When it has something to do by itself."""
        if self._phase is _Phase.GATHER:
            return min(self.since_secs + self._patience_secs, now_secs + self._settings_beat)
        if self._phase is _Phase.DONE:
            return float("inf")
        return self._ask_at_secs if self._is_asking else min(self._at_secs, self._ask_at_secs)

    # Outcomes.

    def listed_durable(self, fact: DurableListed) -> None:
        """The durable tier was listed."""
        if self._phase is not _Phase.LIST:
            return
        self._is_asking, self.listed = False, fact
        self._phase, self._at_secs = _Phase.PROBE, float("-inf")
        # A record of this host's whose writing seemed to fail may be this start's own.
        is_own = fact.newest_attempt == self._own_number and fact.leader == self.identity.host
        if self.branch_from and fact.newest_attempt != self.branch_from and not is_own:
            self._refuse(f"attempt {fact.newest_attempt} has taken the run over", is_busy=True)

    def listing_failed(self, turn: Turn, fact: ListingFailed) -> None:
        """It could not be."""
        self._failed(turn, fact.reason)

    def awaits(self, asked: BeginAttempt) -> bool:
        """Whether it has asked for that record, and not heard yet.

        A start before this one may have asked for the same number, for another record.
        """
        return self._phase is _Phase.BEGIN and asked == self._asked_for

    def may_have(self, attempt: int) -> bool:
        """Whether it waits for that attempt's record, which may stand already."""
        is_waiting = self._phase is _Phase.BEGIN and self._is_asking
        return is_waiting and self._asked_for is not None and self._asked_for.attempt == attempt

    def attempt_begun(self, fact: AttemptBegun) -> None:
        """The record stands: this start has the number."""
        if self.awaits(fact.asked):
            self._reign(fact.asked.attempt)

    def attempt_taken(self, fact: AttemptTaken) -> None:
        """Somebody else has the number: whoever that is may live."""
        if not self.awaits(fact.asked):
            return
        self._is_asking = False
        self._taken += 1
        if self._taken >= TAKEN_MAX:
            self._refuse(f"{TAKEN_MAX} numbers in a row were taken by others", is_busy=True)
            return
        self._phase, self._at_secs = _Phase.LIST, float("-inf")

    def begin_failed(self, turn: Turn, fact: BeginFailed) -> None:
        """It is not known whether the record stands; its number is not asked for again."""
        if self.awaits(fact.asked):
            self._phase = _Phase.LIST
            # The record may be this start's own, which is then no other attempt in the way.
            self._own_number = fact.asked.attempt
            self._failed(turn, fact.reason)

    def heard_alive(self, message: Alive) -> None:
        """The agent that leads the newest attempt has answered."""
        if self._phase is _Phase.PROBE and message.group == self.group.word:
            if message.is_living:
                self._refuse(f"attempt {message.attempt} is live on other hosts", is_busy=True)
            else:
                self._phase, self._at_secs = _Phase.BEGIN, float("-inf")

    @property
    def _settings_beat(self) -> float:
        return self.identity.settings.heartbeat_secs

    @property
    def _patience_secs(self) -> float:
        return self.identity.settings.gather_secs

    def _states(self) -> list[HostState]:
        return [report.state for report in self.hellos.values()]

    def _has_gathered(self, turn: Turn) -> bool:
        if self.branch_from or turn.now_secs - self.since_secs >= self._patience_secs:
            return True
        joined = sum(count_in(s.ranks) for s in self._states() if s.group == self.group.word)
        return joined >= self.group.rank_count

    def _probe(self, turn: Turn, living: Group | None) -> None:
        assert self.listed is not None
        leader, newest = self.listed.leader, self.listed.newest_attempt
        is_own = newest in (0, self.branch_from)
        if not is_own and not self.group.takeover and leader == self.identity.host:
            is_same = living is not None and living.attempt == newest
            if living is not None and is_same and living.is_living:
                self._refuse(f"attempt {newest} is live on this host", is_busy=True)
                return
            is_own = True
        if is_own or self.group.takeover:
            self._phase, self._at_secs = _Phase.BEGIN, float("-inf")
        elif self._at_secs == float("-inf"):
            self._at_secs = turn.now_secs + self.identity.settings.probe_secs
            probe = Probe(run=self.identity.run, attempt=newest, group=self.group.word)
            turn.send(leader, probe)
        elif turn.now_secs >= self._at_secs:
            # No word: its host is gone or cut off, and the record will fence it.
            self._phase, self._at_secs = _Phase.BEGIN, float("-inf")

    def _begin(self, turn: Turn) -> None:
        assert self.listed is not None
        if not self.branch_from:
            states = self._states()
            self.origin = choose_checkpoint(states, self.listed)
            begun = newest_begun(states, self.listed)
            is_partly_there = begun is not None and (
                self.origin is None or begun.step > self.origin.step
            )
            if is_partly_there and self._ask_others(turn):
                return
        self._is_asking = True
        number = self.listed.newest_attempt + 1
        self._asked_for = BeginAttempt(number, self.origin, self.group.word)
        turn.act(self._asked_for)

    def _ask_others(self, turn: Turn) -> bool:
        """Asks hosts of the attempt before, which may hold the rest; whether to wait for them."""
        if self._patient_until_secs is None:
            self._patient_until_secs = turn.now_secs + self.identity.settings.probe_secs
        silent = {p for state in self._states() for p in state.peers} - self.hellos.keys()
        if not silent or turn.now_secs >= self._patient_until_secs:
            return False
        self._asked |= silent
        self._ask(turn)
        self._at_secs = min(turn.now_secs + self._settings_beat / 2, self._patient_until_secs)
        return True

    def _ask(self, turn: Turn) -> None:
        """Asks them what they hold; until it has begun, they give nothing up."""
        attempt = self.listed.newest_attempt if self.listed is not None else 0
        for host in sorted(self._asked):
            ask = WhoHolds(run=self.identity.run, attempt=attempt, group=self.group.word)
            turn.send(host, ask)
        self._ask_at_secs = turn.now_secs + self.identity.settings.storage_retry_secs

    def _reign(self, attempt: int) -> None:
        assert self.listed is not None
        self._phase, self._is_asking = _Phase.DONE, False
        self.reign = Reign(
            attempt=attempt,
            group=self.group.word,
            rank_count=self.group.rank_count,
            origin=self.origin,
            limits=limits_after(self.listed.limits, attempt, self.origin, STEP_MAX),
            successors=(self.identity.host,),
        )

    def _failed(self, turn: Turn, reason: str) -> None:
        self._is_asking = False
        self._failures += 1
        self._at_secs = turn.now_secs + self.identity.settings.storage_retry_secs
        if self._failures >= TRIES_MAX:
            self._refuse(reason, is_busy=False)

    def _refuse(self, reason: str, *, is_busy: bool) -> None:
        self._phase, self.refusal, self.is_busy = _Phase.DONE, reason, is_busy


def tell_refused(turn: Turn, starting: Starting) -> None:
    """Tells the hosts of a start's trainers that it does not begin."""
    refused = Refused(
        run=starting.identity.run,
        attempt=starting.listed.newest_attempt if starting.listed else 0,
        group=starting.group.word,
        reason=starting.refusal[:REASON_CHARS_MAX],
        is_busy=starting.is_busy,
    )
    for host in sorted({*starting.hellos, starting.identity.host}):
        turn.send(host, refused)
