"""A job of simulated processes, in simulated time, from one seed.

Each process does what a real one does with the launcher's orders, at its own pace. It may end at
any moment, fail by itself, or be stuck in a collective until it is killed. `Job` carries out the
membership's effects, and checks its invariants after each of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from holdfast.supervise.ranks import membership
from holdfast.supervise.ranks.membership import Effect, Leave, Membership, Settings

STEPS = 20


@dataclass
class Process:
    """One process. `generation` is the one that it trains in or has finished; 0: none."""

    is_ready: bool = False
    generation: int = 0
    is_training: bool = False
    is_stuck: bool = False
    asks: bool = False
    is_broken: bool = False
    """It was told that its generation is over."""
    seat: int | None = None


@dataclass
class Job:
    """The job, and how often each kind of fault happens to it, as shares of the events."""

    seed: int
    settings: Settings
    faults: dict[str, float]
    now_secs: float = 0.0
    processes: dict[int, Process] = field(default_factory=dict)
    step: int = -1
    begun: list[membership.Begin] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)
    """The rank of each process in the last generation that trained."""
    kept: dict[int, int | None] = field(default_factory=dict)
    """The step that each process has reported to hold."""
    is_released: bool = False
    gave_up: str = ""
    has_faults: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.membership = Membership(self.settings)
        self.take(self.membership.begin(self.now_secs))

    def run(self, secs: float) -> None:
        """Go on for a time, or until the job is over."""
        end_secs = self.now_secs + secs
        while self.now_secs < end_secs and not (self.is_released or self.gave_up):
            self.now_secs += self.random.expovariate(20.0)
            due_secs = self.membership.next_secs
            if due_secs is not None and due_secs <= self.now_secs:
                self.take(self.membership.tick(self.now_secs))
            if self.processes and not self.membership.is_over:
                self.event(self.random.choice(list(self.processes)))

    def stop_faults(self) -> None:
        """Let no more faults happen; hangs that no loss explains are not the membership's."""
        self.has_faults = False
        for process in self.processes.values():
            process.is_stuck = process.is_stuck and process.is_broken

    def event(self, member: int) -> None:
        """Let one process do what it does next, or let a fault happen to it."""
        process = self.processes[member]
        fault = self.random.random()
        for kind, share in self.faults.items() if self.has_faults else ():
            if fault < share:
                self.fault(kind, member, process)
                return
            fault -= share
        if not process.is_ready:
            process.is_ready = True
            self.take(self.membership.ready(member, self.now_secs))
        elif process.is_stuck or not process.is_training:
            return
        elif process.is_broken or self.has_lost(process) or self.is_saving:
            self.leave(member, process)
        elif process.asks:
            return
        elif self.random.random() < 0.5:
            self.step += 1
        elif self.step >= STEPS:
            process.is_training = False
            self.take(self.membership.finished(member, process.generation, self.now_secs))

    @property
    def is_saving(self) -> bool:
        """Whether the generation only saves what its ranks hold."""
        return self.begun[-1].kept_step is not None

    def fault(self, kind: str, member: int, process: Process) -> None:
        if kind == "end":
            self.end(member, "killed")
        elif kind == "stick":
            process.is_stuck = process.is_training
        elif process.is_training and not process.is_stuck and not process.asks:
            process.asks = True
            self.take(self.membership.failed(member, process.generation, "own", self.now_secs))

    def has_lost(self, process: Process) -> bool:
        """Return whether collectives of the process's generation fail."""
        peers = [seat.member for seat in self.begun[-1].seats]
        return any(
            m not in self.processes or self.processes[m].generation != process.generation
            for m in peers
        ) or any(self.processes[m].is_broken for m in peers)

    def leave(self, member: int, process: Process) -> None:
        if process.asks and not process.is_broken:
            return
        process.is_training = process.asks = process.is_broken = False
        step = self.step if self.step >= 0 else None
        kept = step if self.random.random() < 0.8 and self.begun[-1].kept_step is None else None
        self.kept[member] = kept
        report = Leave(step, "lost", kept)
        self.take(self.membership.left(member, process.generation, report, self.now_secs))

    def end(self, member: int, reason: str) -> None:
        process = self.processes.pop(member)
        if process.seat is not None and self.begun:
            self.lost.append(self.ranks[member])
        self.take(self.membership.ended(member, reason, self.now_secs))

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not self.is_released
            assert not self.gave_up
            match effect:
                case membership.Start(member):
                    assert member not in self.processes
                    self.processes[member] = Process()
                case membership.Begin():
                    self.begin(effect)
                case membership.Break(generation, members):
                    assert generation == len(self.begun)
                    for member in members:
                        if member in self.processes:
                            self.processes[member].is_broken = True
                case membership.Kill(member):
                    assert self.processes[member].is_training
                    self.end(member, "did not leave")
                case membership.Own(member):
                    assert self.processes[member].asks
                    self.end(member, "its own failure")
                case membership.Release():
                    self.release()
                case membership.GiveUp(reason):
                    self.gave_up = reason

    def begin(self, begin: membership.Begin) -> None:
        """Check a generation that begins: see the invariants of `membership`."""
        assert begin.generation == len(self.begun) + 1
        assert not any(process.is_training for process in self.processes.values())
        seats = begin.seats
        assert [seat.rank for seat in seats] == [*range(len(seats))]
        assert len({seat.member for seat in seats}) == len({s.number for s in seats}) == len(seats)
        if begin.kept_step is not None:
            self.begin_saving(begin)
        else:
            self.begin_training(begin)
        for seat in seats:
            process = self.processes[seat.member]
            assert process.is_ready
            process.generation, process.seat = begin.generation, seat.number
            process.is_training, process.is_broken, process.is_stuck = True, False, False
        self.begun.append(begin)

    def begin_saving(self, begin: membership.Begin) -> None:
        """Check that all survivors of a loss have reported the step that they are to save."""
        before = {seat.member: seat.rank for seat in self.begun[-1].seats}
        survivors = {m: rank for m, rank in before.items() if m in self.processes}
        assert self.begun[-1].kept_step is None
        assert {seat.member for seat in begin.seats} == survivors.keys()
        assert begin.survivors == tuple(survivors[seat.member] for seat in begin.seats)
        assert {self.kept[member] for member in survivors} == {begin.kept_step}
        self.ranks = before

    def begin_training(self, begin: membership.Begin) -> None:
        seats = begin.seats
        assert sorted(begin.lost) == sorted(self.lost)
        assert self.settings.ranks_min <= len(seats) <= self.settings.ranks
        trained = [each for each in self.begun if each.kept_step is None]
        before = {seat.member: seat for seat in trained[-1].seats} if trained else {}
        for seat in seats:
            if seat.member in before:
                assert before[seat.member].number == seat.number
                if len(before) == len(seats):
                    assert before[seat.member].rank == seat.rank
        # Nobody that lived and was a rank is left out.
        assert {m for m in before if m in self.processes} <= {seat.member for seat in seats}
        self.ranks = {seat.member: seat.rank for seat in seats}
        self.lost.clear()
        self.kept.clear()

    def release(self) -> None:
        self.is_released = True
        for seat in self.begun[-1].seats:
            process = self.processes[seat.member]
            assert process.generation == len(self.begun)
            assert not process.is_training
