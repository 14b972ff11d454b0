"""Decide which processes are the ranks of the next generation, and what ends.

Pure: a state machine. Inputs are what happened to processes, with the time; outputs are effects,
which the leading launcher carries out in their order. A *seat* is a place for a rank on a host,
with its device. A process has a number, whose remainder by the count of hosts is its host.
Invariants:

- A generation begins only when no process of the one before trains any more: each has left it,
  has finished it, or has ended.
- A process keeps its seat, and its rank while the number of ranks stays the same.
- A generation begins, and lasts, only while a quorum of the hosts has joined.
- Every wait is bounded: for processes that do not leave a broken generation, for spares that start,
  for hosts, and for progress, without which the job is given up.
- A generation that only saves what the survivors hold of a step consists of all of them, follows a
  loss, and is tried once.
- The training is released only when it has finished on all ranks of one generation.

See docs/decisions/0064 and docs/decisions/0071.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.quantities import counted

FAILED_STARTS_MAX = 3
"""So many processes in a row that end before they are ready give the job up."""
LOSSES_MAX = 5
"""So many generations in a row without a new step give the job up."""
DOUBT_SECS = 5.0
"""How long a failure may be explained by the end of another process, which is noticed later."""
SPARE_SECS = 60.0
"""How long to wait for a process that starts, if the job may go on with fewer ranks."""
SAVE_SECS = 60.0
"""How long the survivors may take to save the state that they hold."""
START_SECS = 60.0
"""How long the first generation waits for all hosts, if it may begin without some of them."""
JOIN_SECS = 6.0
"""How long a new leader waits for hosts that have yet to notice the end of the one before."""
HOST_SECS = 300.0
"""How long to wait for hosts without which the job cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The size of a job.

    Attributes:
        ranks: How many ranks it begins with, on all hosts.
        spares: How many more processes wait on each host.
        ranks_min: With how many it may go on, if there are no processes for the others.
        leave_secs: How long a process may take to leave a broken generation.
        hosts: How many hosts there are.
        spare_hosts: How many of them are there for the ranks of lost hosts.
    """

    ranks: int
    spares: int
    ranks_min: int
    leave_secs: float
    hosts: int = 1
    spare_hosts: int = 0

    @property
    def seats(self) -> int:
        """How many ranks a host has at most."""
        return self.ranks // (self.hosts - self.spare_hosts)

    def first_members(self, host: int) -> range:
        """Return the processes that a host starts before it joins."""
        return range(host, host + self.hosts * (self.seats + self.spares), self.hosts)

    @property
    def replaces(self) -> bool:
        """Whether processes are started in place of lost ones."""
        return self.spares > 0 or self.ranks_min == self.ranks

    def is_quorum(self, hosts: Collection[int]) -> bool:
        """Return whether these hosts may go on without the others, which cannot without them."""
        return 2 * len(hosts) + (0 in hosts) > self.hosts


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process."""

    member: int


@dataclass(frozen=True, slots=True)
class Break:
    """Tell the ranks that their generation is over, and end its store."""

    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank of a generation, and the process that is it."""

    member: int
    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a generation.

    Attributes:
        generation: Its number.
        seats: Its ranks.
        lost: The ranks of the one before that were lost since.
        kept_step: The ranks are to save the state of this step, which they hold, and nothing else.
        survivors: With `kept_step`, the rank that each of them had.
    """

    generation: int
    seats: tuple[Seat, ...]
    lost: tuple[int, ...] = ()
    kept_step: int | None = None
    survivors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """What a process reports when it leaves a generation.

    Attributes:
        last_step: The last step that it has passed to `save`; None: none.
        text: The exception that has ended its training.
        kept_step: The step whose state it holds unchanged; None: none.
    """

    last_step: int | None
    text: str
    kept_step: int | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process: it did not leave a broken generation in time."""

    member: int


@dataclass(frozen=True, slots=True)
class Own:
    """Tell a process that its failure is its own."""

    member: int


@dataclass(frozen=True, slots=True)
class Release:
    """Let all processes go: the training has finished, or a signal ends the job."""

    has_finished: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End all processes; the reason is in words."""

    reason: str


Effect = Start | Break | Begin | Kill | Own | Release | GiveUp


class State(enum.StrEnum):
    """What a process does."""

    STARTING = enum.auto()
    WAITING = enum.auto()
    """Ready to be a rank of the next generation."""
    TRAINING = enum.auto()
    IN_DOUBT = enum.auto()
    """It has failed, and asks whether ranks were lost."""
    FINISHED = enum.auto()
    """Its training has returned."""
    LEAVING = enum.auto()
    """It trains in a generation before the present one, which it has been ordered to leave."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One process, as its host's launcher reports it when the host joins, and as it is since then.

    Attributes:
        seat: Its seat on its host, which it keeps if it can; None: it was no rank yet.
        rank: Its rank in its newest generation that trained.
        generation: Its newest generation; 0: none.
        kept_step: The step whose state it holds unchanged.
    """

    state: State = State.STARTING
    seat: int | None = None
    rank: int | None = None
    generation: int = 0
    kept_step: int | None = None
    since_secs: float = 0.0
    is_killed: bool = False


@dataclass(slots=True, kw_only=True)
class Joined:
    """What a host's launcher reports when the host joins.

    Attributes:
        members: Its processes.
        generation: The newest generation of which it had ranks.
        size: The number of ranks of the newest one that trained.
        newest: The newest generation that it knows of.
    """

    members: dict[int, Member]
    generation: int = 0
    size: int = 0
    newest: int = 0


@dataclass(slots=True)
class Membership:
    """The processes of one job. Owned by the leading launcher's thread.

    Attributes:
        awaited: The hosts that may join soon. The first generation of this leader waits for them.
    """

    settings: Settings
    awaited: set[int] = field(default_factory=set)
    generation: int = 0
    is_over: bool = False
    """Whether all processes were released or given up."""
    hosts: set[int] = field(default_factory=set)
    """The hosts that have joined."""
    _members: dict[int, Member] = field(default_factory=dict)
    _newest: int = 0
    """The newest generation that any host knows of."""
    _sized: int = 0
    """The newest generation whose size is known."""
    _next: int = 0
    """The number of the next process, divided by the count of hosts."""
    _gathers_until_secs: float = 0.0
    """Until when to wait for hosts without which a generation could begin."""
    _size: int = 0
    """The number of ranks of the present generation."""
    _broken_secs: float | None = None
    """Since when no generation is whole; None: one is."""
    _is_saving: bool = False
    """Whether the present generation only saves what its ranks hold."""
    _saving_secs: float = 0.0
    _ending: set[int] = field(default_factory=set)
    """The hosts that have received a signal to end: no process is started there any more."""
    _failed_starts: int = 0
    _losses: int = 0
    _best_step: int = -1
    _last_reason: str = ""

    def __contains__(self, member: int) -> bool:
        return member in self._members

    @property
    def has_quorum(self) -> bool:
        """Whether the hosts that have joined may go on without the others."""
        return self.settings.is_quorum(self.hosts)

    def waits_for(self, names: Sequence[str]) -> str:
        """Return what the next generation waits for, in words; empty: for nothing.

        Args:
            names: The names of the hosts.
        """
        if self._broken_secs is None or self.is_over:
            return ""
        texts = []
        if trainers := self._trainers():
            texts.append(f"{counted(len(trainers), 'rank')} to leave generation {self.generation}")
        if starting := [m for m in self._members if self._may_be_ready_soon(m)]:
            texts.append(f"{counted(len(starting), 'process', 'processes')} to start")
        absent = [names[host] for host in range(self.settings.hosts) if host not in self.hosts]
        if absent:
            texts.append(f"{'host' if len(absent) == 1 else 'hosts'} {', '.join(absent)}")
        return ", ".join(texts) or "processes"

    @property
    def size(self) -> int:
        """The number of ranks of the present generation."""
        return self._size

    def join(self, host: int, joined: Joined, now_secs: float) -> list[Effect]:
        """A host is there, with its processes."""
        if not self.hosts and self._broken_secs is None:
            self._size, self._broken_secs = self.settings.ranks, now_secs
            self._gathers_until_secs = now_secs + START_SECS
        if max(joined.newest, joined.generation) > 0:
            # The job has begun before, so that no other host is about to start.
            self._gathers_until_secs = min(self._gathers_until_secs, now_secs + JOIN_SECS)
        self.hosts.add(host)
        if joined.generation > self._sized and self._broken_secs is not None:
            self._size, self._sized = joined.size, joined.generation
        self._newest = max(self._newest, joined.generation, joined.newest)
        ranked = [own for own in joined.members.values() if own.rank is not None]
        generation = max((own.generation for own in ranked), default=0)
        if self._broken_secs is not None and generation > self.generation:
            self._demote(self._ranked())
            self.generation = generation
        ranks = {own.rank for own in self._ranked()}
        is_whole = self._broken_secs is None
        self._demote(
            own
            for own in ranked
            if is_whole or own.generation != self.generation or own.rank in ranks
        )
        for own in ranked:
            own.since_secs = now_secs
        self._members |= joined.members
        if joined.members:
            self._next = max(self._next, max(joined.members) // self.settings.hosts + 1)
        return self._next_effects(now_secs)

    def host_lost(self, host: int, now_secs: float) -> list[Effect]:
        """A host is gone, with its processes, if it had joined."""
        self.awaited.discard(host)
        self._ending.discard(host)
        self.hosts.discard(host)
        gone = [m for m in self._members if m % self.settings.hosts == host]
        ranks = [self._members.pop(member).rank for member in gone]
        had_ranks = any(rank is not None for rank in ranks)
        if self.is_over:
            return []
        self._last_reason = f"lost host {host}"
        effects = [] if self.has_quorum and not had_ranks else self._break(now_secs)
        return [*effects, *self._next_effects(now_secs)]

    def ready(self, member: int, now_secs: float) -> list[Effect]:
        """A process waits to become a rank for the first time."""
        self._failed_starts = 0
        self._members[member].state = State.WAITING
        return self._next_effects(now_secs)

    def failed(self, member: int, generation: int, text: str, now_secs: float) -> list[Effect]:
        """A process asks whether its failure follows from a lost rank."""
        own = self._members[member]
        if generation != self.generation or own.state is not State.TRAINING:
            return []
        self._last_reason = text
        own.state, own.since_secs = State.IN_DOUBT, now_secs
        return self._next_effects(now_secs)

    def left(self, member: int, generation: int, leave: Leave, now_secs: float) -> list[Effect]:
        """A process has left a generation in which ranks were lost, or has saved what it held."""
        own = self._members[member]
        if own.state is State.LEAVING:
            own.state = State.WAITING
            return self._next_effects(now_secs)
        if generation != self.generation:
            return []
        self._last_reason = self._last_reason or leave.text
        own.state, own.kept_step = State.WAITING, leave.kept_step
        step = leave.last_step
        if step is not None and step > self._best_step:
            self._best_step, self._losses = step, 0
        effects = [] if self._is_saving else self._break(now_secs)
        return [*effects, *self._next_effects(now_secs)]

    def finished(self, member: int, generation: int, now_secs: float) -> list[Effect]:
        """The training of a process has returned."""
        if generation == self.generation:
            self._members[member].state = State.FINISHED
        return self._next_effects(now_secs)

    def ended(self, member: int, reason: str, now_secs: float) -> list[Effect]:
        """A process has ended."""
        own = self._members.pop(member)
        if self.is_over:
            return []
        self._last_reason = reason
        effects: list[Effect] = []
        if own.rank is not None:
            effects += self._break(now_secs)
        elif own.state is State.STARTING:
            self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS_MAX and not self._ending:
            return [*effects, *self._give_up("processes end before they call surviving")]
        return [*effects, *self._next_effects(now_secs)]

    def ending(self, host: int, now_secs: float) -> list[Effect]:
        """A host has received a signal to end: no process is replaced there any more."""
        self._ending.add(host)
        return self._next_effects(now_secs)

    def tick(self, now_secs: float) -> list[Effect]:
        """Look at the time; call it at `next_secs`."""
        return self._next_effects(now_secs)

    @property
    def next_secs(self) -> float | None:
        """When `tick` is due; None: no wait is under way."""
        if self.is_over:
            return None
        waits = {State.IN_DOUBT: DOUBT_SECS, State.LEAVING: self.settings.leave_secs}
        times = [
            own.since_secs + waits[own.state]
            for own in self._members.values()
            if own.state in waits and not own.is_killed
        ]
        if self._is_saving:
            times.append(self._saving_secs + SAVE_SECS)
        if self._broken_secs is not None:
            trainers = self._trainers()
            secs = self.settings.leave_secs if trainers else SPARE_SECS
            times.append(self._broken_secs + secs)
            if not trainers and self.settings.hosts > 1:
                times += [self._gathers_until_secs, self._broken_secs + HOST_SECS]
        return min(times, default=None)

    def _break(self, now_secs: float) -> list[Effect]:
        """End the present generation, if it is whole."""
        if self._broken_secs is not None or self.is_over:
            return []
        self._broken_secs = now_secs
        self._losses += not self._is_saving
        self._is_saving = False
        ranks = tuple(m for m, own in self._members.items() if own.rank is not None)
        return [Break(self.generation, ranks)]

    def _next_effects(self, now_secs: float) -> list[Effect]:
        if self.is_over:
            return []
        effects: list[Effect] = []
        if self._is_saving and not self._trainers():
            self._is_saving, self._broken_secs = False, now_secs
        if self._broken_secs is not None:
            effects += self._recover(now_secs, self._broken_secs)
        elif self._is_saving:
            is_late = now_secs >= self._saving_secs + SAVE_SECS
            effects += self._hurry(self._trainers(), is_late=is_late)
        elif all(own.state is State.FINISHED for own in self._ranked()):
            self.is_over = True
            return [Release(has_finished=True)]
        else:
            leaving = [m for m, own in self._members.items() if own.state is State.LEAVING]
            for member in leaving:
                since_secs = self._members[member].since_secs
                is_late = now_secs >= since_secs + self.settings.leave_secs
                effects += self._hurry([member], is_late=is_late)
            effects += self._settle_doubts(now_secs)
        if not self.is_over and self.settings.replaces:
            for host in sorted(self.hosts - self._ending):
                wanted = min(self.settings.seats, self._size) + self.settings.spares
                effects += self._start(host, wanted - len(self._members_of(host)))
        return effects

    def _settle_doubts(self, now_secs: float) -> list[Effect]:
        """Let processes end by failures of their own, once no end of another explains them."""
        effects: list[Effect] = []
        for member, own in self._members.items():
            if own.state is State.IN_DOUBT and now_secs >= own.since_secs + DOUBT_SECS:
                own.state = State.TRAINING
                effects.append(Own(member))
        return effects

    def _recover(self, now_secs: float, broken_secs: float) -> list[Effect]:
        """Begin the next generation once everything is there that it needs."""
        trainers = self._trainers()
        if trainers:
            return self._hurry(trainers, is_late=now_secs >= broken_secs + self.settings.leave_secs)
        if self._ending and self.hosts <= self._ending:
            self.is_over = True
            return [Release(has_finished=False)]
        if self._losses >= LOSSES_MAX:
            return self._give_up(f"{LOSSES_MAX} generations in a row made no new step")
        if self._is_gathering and now_secs < self._gathers_until_secs:
            return []
        if not self.has_quorum:
            if now_secs < broken_secs + HOST_SECS:
                return []
            return self._give_up(
                f"{len(self.hosts)} of {self.settings.hosts} hosts are here, which is no majority"
            )
        if (kept := self._kept()) is not None:
            return [self._begun_saving(kept, now_secs)]
        return self._seat(now_secs - broken_secs)

    def _seat(self, waited_secs: float) -> list[Effect]:
        """Give all seats to processes, and begin the next generation."""
        hosts = self.settings.hosts
        taken = {
            (m % hosts, own.seat): m
            for m, own in self._members.items()
            if own.rank is not None and own.seat is not None
        }
        free = self._fill(taken, is_patient=waited_secs < SPARE_SECS)
        if len(taken) < self._size:
            is_starting = any(own.state is State.STARTING for own in self._members.values())
            may_come = is_starting or (self.settings.replaces and free)
            if len(taken) >= self.settings.ranks_min:
                is_worth_waiting = may_come and waited_secs < SPARE_SECS
            else:
                may_return = self._are_hosts_missing and waited_secs < HOST_SECS
                is_worth_waiting = may_come or may_return
            if is_worth_waiting:
                return []
            if len(taken) < self.settings.ranks_min:
                return self._give_up(
                    f"{counted(len(taken), 'process', 'processes')} are left, fewer than "
                    f"{self.settings.ranks_min}"
                )
        return [self._begun(taken)]

    def _fill(self, taken: dict[tuple[int, int], int], *, is_patient: bool) -> bool:
        """Give free seats to waiting processes of their hosts; return whether seats are left.

        Hosts with more ranks come first, so that a spare host is taken as a whole. With patience
        seats of a host with ranks are kept for the processes that start there.
        """
        counts = Counter(host for host, _ in taken)
        has_free = False
        kept = 0
        hosts = self.hosts - self._ending
        for host in sorted(hosts, key=lambda host: (-counts[host], host)):
            free = [n for n in range(self.settings.seats) if (host, n) not in taken]
            waiting = [m for m in self._members_of(host) if self._may_be_seated(m)]
            # A process that had a seat has memory on its device.
            for member in sorted(waiting, key=lambda m: (self._members[m].seat is None, m)):
                if free and len(taken) + kept < self._size:
                    seat = self._members[member].seat
                    number = seat if seat in free else free[0]
                    free.remove(number)
                    taken[host, number] = member
            has_free |= bool(free) and len(taken) < self._size
            starting = [m for m in self._members_of(host) if self._may_be_ready_soon(m)]
            if counts[host] and is_patient:
                kept += len(free) if self.settings.replaces else min(len(free), len(starting))
        return has_free

    def _may_be_ready_soon(self, member: int) -> bool:
        return self._members[member].state in (State.STARTING, State.LEAVING)

    def _may_be_seated(self, member: int) -> bool:
        own = self._members[member]
        return own.rank is None and own.state is State.WAITING

    def _kept(self) -> int | None:
        """Return the step whose state all survivors hold, and that was not saved; None: none."""
        steps = {own.kept_step for own in self._ranked()}
        for own in self._ranked():
            own.kept_step = None
        return steps.pop() if len(steps) == 1 else None

    def _begun_saving(self, step: int, now_secs: float) -> Begin:
        """Begin a generation of the survivors, who save the state that they hold."""
        ranked = sorted(
            (own.rank, member, own.seat)
            for member, own in self._members.items()
            if own.rank is not None and own.seat is not None
        )
        self.generation = self._newest = self._newest + 1
        for _, member, _ in ranked:
            own = self._members[member]
            own.state, own.generation = State.TRAINING, self.generation
        self._broken_secs, self._is_saving, self._saving_secs = None, True, now_secs
        seats = tuple(Seat(member, i, seat) for i, (_, member, seat) in enumerate(ranked))
        survivors = tuple(rank for rank, _, _ in ranked)
        return Begin(self.generation, seats, (), step, survivors)

    def _begun(self, taken: dict[tuple[int, int], int]) -> Begin:
        """Begin a generation; the lost ranks of the same number go to the new processes."""
        ranks = {own.rank for own in self._ranked()}
        lost = tuple(rank for rank in range(self._size) if rank not in ranks)
        newcomers = iter(lost)
        # Ranks of an older generation, which some hosts alone know of, may be others.
        is_same_size = (
            self._newest > 0 and len(taken) == self._size and ranks <= {*range(self._size)}
        )
        seats: list[Seat] = []
        for i, (place, member) in enumerate(sorted(taken.items())):
            own = self._members[member]
            rank = i
            if is_same_size:
                rank = own.rank if own.rank is not None else next(newcomers)
            seats.append(Seat(member, rank, place[1]))
        is_first = self._newest == 0
        self.generation = self._newest = self._newest + 1
        for each in seats:
            own = self._members[each.member]
            own.seat, own.rank, own.state = each.number, each.rank, State.TRAINING
            own.generation = self.generation
        self._size, self._broken_secs, self._last_reason = len(seats), None, ""
        self._gathers_until_secs, self._sized = 0.0, self.generation
        seats.sort(key=lambda seat: seat.rank)
        return Begin(self.generation, tuple(seats), () if is_first else lost)

    def _hurry(self, trainers: list[int], *, is_late: bool) -> list[Effect]:
        """Kill the processes that did not leave a broken generation in time."""
        late = [m for m in trainers if is_late and not self._members[m].is_killed]
        for member in late:
            self._members[member].is_killed = True
        return [*map(Kill, late)]

    def _give_up(self, reason: str) -> list[Effect]:
        self.is_over = True
        last = f" ({self._last_reason})" if self._last_reason else ""
        return [GiveUp(f"{reason}{last}")]

    def _start(self, host: int, count: int) -> list[Effect]:
        numbers = range(self._next, self._next + max(0, count))
        self._next += len(numbers)
        members = [number * self.settings.hosts + host for number in numbers]
        self._members |= {member: Member() for member in members}
        return [*map(Start, members)]

    @property
    def _is_gathering(self) -> bool:
        """Whether hosts or processes come that would be seated before others."""
        is_first = self._newest == 0 and self.settings.hosts > 1
        states = {own.state for own in self._members.values()}
        return bool(self.awaited - self.hosts) or (is_first and State.STARTING in states)

    @property
    def _are_hosts_missing(self) -> bool:
        return len(self.hosts) < self.settings.hosts

    def _members_of(self, host: int) -> list[int]:
        return [m for m in self._members if m % self.settings.hosts == host]

    def _ranked(self) -> list[Member]:
        return [own for own in self._members.values() if own.rank is not None]

    @staticmethod
    def _demote(members: Iterable[Member]) -> None:
        """Make ranks of a generation that is no more the present one into waiting processes."""
        for own in [*members]:
            own.rank = own.kept_step = None
            is_waiting = own.state in (State.WAITING, State.FINISHED)
            own.state = State.WAITING if is_waiting else State.LEAVING

    def _trainers(self) -> list[int]:
        """Return the processes that have not left the present generation."""
        states = (State.TRAINING, State.IN_DOUBT, State.LEAVING)
        return [m for m, own in self._members.items() if own.state in states]
