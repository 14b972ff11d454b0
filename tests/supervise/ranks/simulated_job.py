"""A job of simulated processes, in simulated time, from one seed.

Each process does what a real one does with the launcher's orders, at its own pace. It may end at
any moment, fail by itself, or be stuck in a collective until it is killed. Hosts lose their power,
the connection to the leader, or the leader. `Job` carries out the membership's effects, and checks
its invariants after each of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from holdfast.supervise.ranks import membership
from holdfast.supervise.ranks.membership import (
    Effect,
    Joined,
    Leave,
    Member,
    Membership,
    Settings,
    State,
)

STEPS = 20


@dataclass
class Process:
    """One process. `generation` is the one that it trains in or has finished; 0: none."""

    is_ready: bool = False
    generation: int = 0
    is_training: bool = False
    is_stuck: bool = False
    asks: bool = False
    has_finished: bool = False
    is_broken: bool = False
    """It was told that its generation is over."""
    seat: int | None = None
    rank: int | None = None
    kept: int | None = None
    """The step that it has reported to hold."""


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
    absent: set[int] = field(default_factory=set)
    """The hosts that have not joined the leader."""
    shift: int = 0
    is_released: bool = False
    gave_up: str = ""
    has_faults: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.membership = Membership(self.settings, set(range(self.settings.hosts)))
        self.absent = set(range(self.settings.hosts))
        for host in range(self.settings.hosts):
            self.processes |= {member: Process() for member in self.settings.first_members(host)}
            if host == 0 or self.random.random() < 0.5:
                self.join(host)

    def run(self, secs: float) -> None:
        """Go on for a time, or until the job is over."""
        end_secs = self.now_secs + secs
        while self.now_secs < end_secs and not (self.is_released or self.gave_up):
            self.now_secs += self.random.expovariate(20.0)
            due_secs = self.membership.next_secs
            if due_secs is not None and due_secs <= self.now_secs:
                self.take(self.membership.tick(self.now_secs))
            if self.absent and self.random.random() < 0.02 and not self.membership.is_over:
                self.join(self.random.choice(sorted(self.absent)))
            if self.processes and not self.membership.is_over:
                self.event(self.random.choice(list(self.processes)))

    def host_of(self, member: int) -> int:
        return member % self.settings.hosts

    def members_of(self, host: int) -> list[int]:
        return [member for member in self.processes if self.host_of(member) == host]

    def join(self, host: int) -> None:
        """Let a host join, which was switched on, or has found the leader."""
        if not self.members_of(host):
            # Real launchers begin with the same numbers again. Here each number is one process.
            self.shift += 1000 * self.settings.hosts
            numbers = self.settings.first_members(host)
            self.processes |= {member + self.shift: Process() for member in numbers}
        self.absent.discard(host)
        known = {member: self.known(self.processes[member]) for member in self.members_of(host)}
        trained = [each for each in self.begun if each.kept_step is None]
        joined = Joined(
            members=known,
            generation=len(self.begun),
            size=len(trained[-1].seats) if trained else 0,
        )
        self.take(self.membership.join(host, joined, self.now_secs))

    def known(self, process: Process) -> Member:
        """Return what a host's launcher knows of a process."""
        state = State.WAITING if process.is_ready else State.STARTING
        if process.is_training:
            state = State.TRAINING
        elif process.has_finished:
            state = State.FINISHED
        return Member(
            state=state,
            seat=process.seat,
            rank=process.rank,
            generation=process.generation,
            kept_step=process.kept,
        )

    def break_host(self, host: int) -> None:
        """Let the launcher of a host tell its ranks that their generation is over."""
        self.absent.add(host)
        for member in self.members_of(host):
            process = self.processes[member]
            process.is_broken = process.is_training

    def lose_host(self, host: int) -> None:
        """Switch a host off."""
        for member in self.members_of(host):
            del self.processes[member]
        self.absent.add(host)
        self.take(self.membership.host_lost(host, self.now_secs))

    def drop_host(self, host: int) -> None:
        """Cut a host off from the leader."""
        self.break_host(host)
        self.take(self.membership.host_lost(host, self.now_secs))

    def change_leader(self) -> None:
        """Let another launcher decide: it knows what the hosts say that join it."""
        for host in range(self.settings.hosts):
            self.break_host(host)
        hosts = range(self.settings.hosts)
        awaited = {host for host in hosts if self.random.random() < 0.5}
        self.membership = Membership(self.settings, awaited)
        self.join(self.random.randrange(self.settings.hosts))

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
            if not self.is_cut_off(member):
                self.take(self.membership.ready(member, self.now_secs))
        elif process.is_stuck or not process.is_training or self.waits_for_host(member):
            return
        elif process.is_broken or self.has_lost(process) or self.is_saving:
            self.leave(member, process)
        elif process.asks:
            return
        elif self.random.random() < 0.5:
            self.step += 1
        elif self.step >= STEPS:
            process.is_training, process.has_finished = False, True
            self.take(self.membership.finished(member, process.generation, self.now_secs))

    @property
    def is_saving(self) -> bool:
        """Whether the generation only saves what its ranks hold."""
        return self.begun[-1].kept_step is not None

    def fault(self, kind: str, member: int, process: Process) -> None:
        host = self.host_of(member)
        if kind == "host":
            self.lose_host(host)
        elif kind == "drop":
            self.drop_host(host)
        elif kind == "leader":
            self.change_leader()
        elif self.is_cut_off(member):
            return
        elif kind == "end":
            self.end(member, "killed")
        elif kind == "stick":
            process.is_stuck = process.is_training
        elif process.is_training and not process.is_stuck and not process.asks:
            process.asks = True
            self.take(self.membership.failed(member, process.generation, "own", self.now_secs))

    def waits_for_host(self, member: int) -> bool:
        return self.is_cut_off(member) and not self.processes[member].is_broken

    def is_cut_off(self, member: int) -> bool:
        return self.host_of(member) in self.absent

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
        is_saving = process.generation == len(self.begun) and self.is_saving
        step = self.step if self.step >= 0 else None
        kept = step if self.random.random() < 0.8 and not is_saving else None
        process.kept = kept
        if self.is_cut_off(member):
            # Its launcher reports it when the host joins.
            return
        report = Leave(step, "lost", kept)
        self.take(self.membership.left(member, process.generation, report, self.now_secs))

    def end(self, member: int, reason: str) -> None:
        del self.processes[member]
        self.take(self.membership.ended(member, reason, self.now_secs))

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not self.is_released
            assert not self.gave_up
            match effect:
                case membership.Start(member):
                    assert member not in self.processes
                    assert not self.is_cut_off(member)
                    self.processes[member] = Process()
                case membership.Begin():
                    self.begin(effect)
                case membership.Break(generation, members):
                    assert generation <= len(self.begun)
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
        joined = set(range(self.settings.hosts)) - self.absent
        assert self.settings.is_quorum(joined)
        assert begin.generation == len(self.begun) + 1
        members = [member for member in self.processes if not self.is_cut_off(member)]
        assert not any(self.processes[member].is_training for member in members)
        seats = begin.seats
        assert {seat.member for seat in seats} <= {*members}
        assert [seat.rank for seat in seats] == [*range(len(seats))]
        places = {(self.host_of(seat.member), seat.number) for seat in seats}
        assert len({seat.member for seat in seats}) == len(places) == len(seats)
        assert max(seat.number for seat in seats) < self.settings.seats
        if begin.kept_step is not None:
            self.begin_saving(begin)
        else:
            self.begin_training(begin)
        for seat in seats:
            process = self.processes[seat.member]
            assert process.is_ready
            process.generation, process.seat = begin.generation, seat.number
            process.is_training, process.is_broken, process.is_stuck = True, False, False
            process.has_finished, process.kept = False, None
            if begin.kept_step is None:
                process.rank = seat.rank
        self.begun.append(begin)

    def begin_saving(self, begin: membership.Begin) -> None:
        """Check that all survivors of a loss have reported the step that they are to save."""
        # The newest generation that a present host knows of: others may have seen later ones.
        (generation,) = {self.processes[seat.member].generation for seat in begin.seats}
        last = self.begun[generation - 1]
        assert last.kept_step is None
        survivors = {
            seat.member: seat.rank
            for seat in last.seats
            if self.is_survivor(seat.member, generation)
        }
        assert {seat.member for seat in begin.seats} == survivors.keys()
        assert begin.survivors == tuple(survivors[seat.member] for seat in begin.seats)
        assert {self.processes[member].kept for member in survivors} == {begin.kept_step}

    def is_survivor(self, member: int, generation: int) -> bool:
        """Return whether a process is here, and was a rank of a generation, its last one."""
        process = self.processes.get(member)
        is_here = process is not None and not self.is_cut_off(member)
        return is_here and process.generation == generation

    def begin_training(self, begin: membership.Begin) -> None:
        seats = begin.seats
        assert self.settings.ranks_min <= len(seats) <= self.settings.ranks
        trained = [each for each in self.begun if each.kept_step is None]
        before = {seat.member: seat for seat in trained[-1].seats} if trained else {}
        survivors = {m for m in before if self.is_survivor(m, len(self.begun))}
        if survivors:
            lost = (before[member].rank for member in before.keys() - survivors)
            assert begin.lost == tuple(sorted(lost))
        for seat in seats:
            if seat.member in survivors:
                assert before[seat.member].number == seat.number
                if len(before) == len(seats):
                    assert before[seat.member].rank == seat.rank
        # Nobody that lived and was a rank is left out.
        assert survivors <= {seat.member for seat in seats}

    def release(self) -> None:
        self.is_released = True
        for seat in self.begun[-1].seats:
            process = self.processes[seat.member]
            assert process.generation == len(self.begun)
            assert not process.is_training
