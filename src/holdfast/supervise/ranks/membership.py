"""Decide which processes are the ranks of the next generation, and what ends.

Pure: a state machine. Inputs are what happened to processes, with the time; outputs are effects,
which the launcher carries out in their order. A *seat* is a place for a rank on this host, with its
device. Invariants:

- A generation begins only when no process of the one before trains any more: each has left it,
  has finished it, or has ended.
- A process keeps its seat, and its rank while the number of ranks stays the same.
- Every wait is bounded: for processes that do not leave a broken generation, for spares that start,
  and for progress, without which the job is given up.
- A generation that only saves what the survivors hold of a step consists of all of them, follows a
  loss, and is tried once.
- The training is released only when it has finished on all ranks of one generation.

See docs/decisions/0064.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The size of a job.

    Attributes:
        ranks: How many ranks it begins with.
        spares: How many more processes wait.
        ranks_min: With how many it may go on, if there are no processes for the others.
        leave_secs: How long a process may take to leave a broken generation.
    """

    ranks: int
    spares: int
    ranks_min: int
    leave_secs: float

    @property
    def replaces(self) -> bool:
        """Whether processes are started in place of lost ones."""
        return self.spares > 0 or self.ranks_min == self.ranks


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
    """Let all processes go: the training is over."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End all processes; the reason is in words."""

    reason: str


Effect = Start | Break | Begin | Kill | Own | Release | GiveUp


class _State(enum.Enum):
    STARTING = enum.auto()
    WAITING = enum.auto()
    """Ready to be a rank of the next generation."""
    TRAINING = enum.auto()
    IN_DOUBT = enum.auto()
    """It has failed, and asks whether ranks were lost."""
    FINISHED = enum.auto()
    """Its training has returned."""


@dataclass(slots=True)
class _Member:
    state: _State = _State.STARTING
    seat: int | None = None
    rank: int | None = None
    since_secs: float = 0.0
    is_killed: bool = False
    kept_step: int | None = None


@dataclass(slots=True)
class Membership:
    """The processes of one job. Owned by the launcher's thread."""

    settings: Settings
    generation: int = 0
    is_over: bool = False
    """Whether all processes were released or given up."""
    _members: dict[int, _Member] = field(default_factory=dict)
    _next: int = 0
    _lost: list[int] = field(default_factory=list)
    """The ranks that were lost since the generation began."""
    _size: int = 0
    """The number of ranks of the present generation."""
    _broken_secs: float | None = None
    """Since when no generation is whole; None: one is."""
    _is_saving: bool = False
    """Whether the present generation only saves what its ranks hold."""
    _saving_secs: float = 0.0
    _is_ending: bool = False
    _failed_starts: int = 0
    _losses: int = 0
    _best_step: int = -1
    _last_reason: str = ""

    def begin(self, now_secs: float) -> list[Effect]:
        """Start the job's processes."""
        self._size, self._broken_secs = self.settings.ranks, now_secs
        return self._start(self.settings.ranks + self.settings.spares)

    def ready(self, member: int, now_secs: float) -> list[Effect]:
        """A process waits to become a rank for the first time."""
        self._failed_starts = 0
        self._members[member].state = _State.WAITING
        return self._next_effects(now_secs)

    def failed(self, member: int, generation: int, text: str, now_secs: float) -> list[Effect]:
        """A process asks whether its failure follows from a lost rank."""
        own = self._members[member]
        if generation != self.generation or own.state is not _State.TRAINING:
            return []
        self._last_reason = text
        own.state, own.since_secs = _State.IN_DOUBT, now_secs
        return self._next_effects(now_secs)

    def left(self, member: int, generation: int, leave: Leave, now_secs: float) -> list[Effect]:
        """A process has left a generation in which ranks were lost, or has saved what it held."""
        if generation != self.generation:
            return []
        self._last_reason = self._last_reason or leave.text
        own = self._members[member]
        own.state, own.kept_step = _State.WAITING, leave.kept_step
        step = leave.last_step
        if step is not None and step > self._best_step:
            self._best_step, self._losses = step, 0
        effects = [] if self._is_saving else self._break(now_secs)
        return [*effects, *self._next_effects(now_secs)]

    def finished(self, member: int, generation: int, now_secs: float) -> list[Effect]:
        """The training of a process has returned."""
        if generation == self.generation:
            self._members[member].state = _State.FINISHED
        return self._next_effects(now_secs)

    def ended(self, member: int, reason: str, now_secs: float) -> list[Effect]:
        """A process has ended."""
        own = self._members.pop(member)
        if self.is_over:
            return []
        self._last_reason = reason
        effects: list[Effect] = []
        if own.rank is not None:
            self._lost.append(own.rank)
            effects += self._break(now_secs)
        elif own.state is _State.STARTING:
            self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS_MAX and not self._is_ending:
            return [*effects, *self._give_up("processes end before they call surviving")]
        return [*effects, *self._next_effects(now_secs)]

    def ending(self, now_secs: float) -> list[Effect]:
        """The job was told to end: no process is replaced any more."""
        self._is_ending = True
        return self._next_effects(now_secs)

    def tick(self, now_secs: float) -> list[Effect]:
        """Look at the time; call it at `next_secs`."""
        return self._next_effects(now_secs)

    @property
    def next_secs(self) -> float | None:
        """When `tick` is due; None: no wait is under way."""
        if self.is_over:
            return None
        times = [
            own.since_secs + DOUBT_SECS
            for own in self._members.values()
            if own.state is _State.IN_DOUBT
        ]
        if self._is_saving:
            times.append(self._saving_secs + SAVE_SECS)
        if self._broken_secs is not None:
            times += [self._broken_secs + self.settings.leave_secs] * bool(self._trainers())
            times += [self._broken_secs + SPARE_SECS] * (not self._trainers())
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
        elif all(own.state is _State.FINISHED for own in self._ranked()):
            self.is_over = True
            return [Release()]
        else:
            effects += self._settle_doubts(now_secs)
        if not self.is_over and self.settings.replaces and not self._is_ending:
            wanted = self._size + self.settings.spares - len(self._members)
            effects += self._start(wanted)
        return effects

    def _settle_doubts(self, now_secs: float) -> list[Effect]:
        """Let processes end by failures of their own, once no end of another explains them."""
        effects: list[Effect] = []
        for member, own in self._members.items():
            if own.state is _State.IN_DOUBT and now_secs >= own.since_secs + DOUBT_SECS:
                own.state = _State.TRAINING
                effects.append(Own(member))
        return effects

    def _recover(self, now_secs: float, broken_secs: float) -> list[Effect]:
        """Begin the next generation once everything is there that it needs."""
        trainers = self._trainers()
        if trainers:
            return self._hurry(trainers, is_late=now_secs >= broken_secs + self.settings.leave_secs)
        if self._is_ending:
            self.is_over = True
            return [Release()]
        if self._losses >= LOSSES_MAX:
            return self._give_up(f"{LOSSES_MAX} generations in a row made no new step")
        if (kept := self._kept()) is not None:
            return [self._begun_saving(kept, now_secs)]
        return self._seat(is_patient=now_secs < broken_secs + SPARE_SECS)

    def _seat(self, *, is_patient: bool) -> list[Effect]:
        """Give all seats to processes, and begin the next generation."""
        taken = {own.seat: m for m, own in self._members.items() if own.seat is not None}
        free = [seat for seat in range(self.settings.ranks) if seat not in taken]
        waiting = sorted(
            m
            for m, own in self._members.items()
            if own.seat is None and own.state is _State.WAITING
        )
        taken |= dict(zip(free[: self._size - len(taken)], waiting, strict=False))
        if len(taken) < self._size:
            starting = any(own.state is _State.STARTING for own in self._members.values())
            may_wait = starting or self.settings.replaces
            is_enough = len(taken) >= self.settings.ranks_min
            if may_wait and (is_patient or not is_enough):
                return []
            if not is_enough:
                return self._give_up(
                    f"{len(taken)} processes are left, fewer than {self.settings.ranks_min}"
                )
        return [self._begun(taken)]

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
        for _, member, _ in ranked:
            self._members[member].state = _State.TRAINING
        self.generation += 1
        self._broken_secs, self._is_saving, self._saving_secs = None, True, now_secs
        seats = tuple(Seat(member, i, seat) for i, (_, member, seat) in enumerate(ranked))
        survivors = tuple(rank for rank, _, _ in ranked)
        return Begin(self.generation, seats, (), step, survivors)

    def _begun(self, taken: dict[int, int]) -> Begin:
        seats = tuple(Seat(taken[seat], rank, seat) for rank, seat in enumerate(sorted(taken)))
        for each in seats:
            own = self._members[each.member]
            own.seat, own.rank, own.state = each.number, each.rank, _State.TRAINING
        self.generation += 1
        self._size, self._broken_secs, self._last_reason = len(seats), None, ""
        lost, self._lost = tuple(sorted(self._lost)), []
        return Begin(self.generation, seats, lost)

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

    def _start(self, count: int) -> list[Effect]:
        members = range(self._next, self._next + max(0, count))
        self._next += len(members)
        self._members |= {member: _Member() for member in members}
        return [*map(Start, members)]

    def _ranked(self) -> Iterable[_Member]:
        return (own for own in self._members.values() if own.rank is not None)

    def _trainers(self) -> list[int]:
        """Return the processes that have not left the present generation."""
        states = (_State.TRAINING, _State.IN_DOUBT)
        return [m for m, own in self._members.items() if own.state in states]
