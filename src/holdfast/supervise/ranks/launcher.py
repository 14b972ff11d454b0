"""Run the processes of one job on this host: start them, hear them, and carry out decisions.

The launcher is the command that `holdfast run --nproc` supervises: the processes are in its process
group, so each signal reaches them directly, and its exit code is that of the job. It holds the
store of each generation. Whatever waits in that store fails when the generation is over.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import msgspec

from holdfast.clock import Clock
from holdfast.environment import MEMBER_VARIABLE, STANDBY_VARIABLE
from holdfast.quantities import counted
from holdfast.supervise.command import CommandNotRunError
from holdfast.supervise.ends import signal_text
from holdfast.supervise.ranks import membership
from holdfast.supervise.ranks.membership import Effect, Leave, Membership, Settings
from holdfast.trainer.process import rank_link
from holdfast.trainer.process.rank_link import Lines

QUIET = "TORCH_CPP_LOG_LEVEL"
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LOOK_SECS = 2.0
"""How often to look whether `holdfast run` lives."""
TICK_SECS = 0.25
"""The shortest pause between two looks at the time."""
END_SECS = 10.0
"""How long processes may take to end after they were released by a signal or given up."""


Spawn = Callable[[Mapping[str, str], int], int]


class Store(Protocol):
    """The key-value store of one generation."""

    address: str

    def close(self) -> None:
        """End the store. Processes that wait in it fail."""
        ...


@dataclass(slots=True)
class _Process:
    """One process, with its link and its end."""

    pid: int
    pidfd: int
    lines: Lines
    is_rank: bool = False

    def send_signal(self, number: int) -> None:
        """Send a signal; the process may have ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Return its exit code; -N if signal N has ended it. It has ended, or ends."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.lines.connection.close()
        return os.waitstatus_to_exitcode(status)


class Launcher:
    """The processes of one job. Owned by one thread.

    Args:
        spawn: Starts a process with an environment and an inherited descriptor; returns its id.
        settings: The size of the job.
        load_stores: Loads what opens the store of a generation; called once the processes are
            started, which import the same meanwhile.
        clock: The clock.
        note: Shows one line to the user.
    """

    def __init__(
        self,
        spawn: Spawn,
        settings: Settings,
        load_stores: Callable[[], Callable[[], Store]],
        clock: Clock,
        note: Callable[[str], None],
    ) -> None:
        self._spawn = spawn
        self._load_stores = load_stores
        self._clock = clock
        self._note = note
        self._membership = Membership(settings)
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._folder = tempfile.mkdtemp(prefix="holdfast-ranks-")
        self._store: Store | None = None
        self._code = 0
        """The exit code: that of the first process that failed and was not replaced."""
        self._last_code = 0
        """The exit code of the last rank that was lost."""
        self._signals: list[int] = []
        """The signals that have arrived since the last look."""
        self._is_ending = False
        """Whether one has arrived: no process is replaced any more."""
        self._supervisor = os.getppid()

    def run(self) -> int:
        """Run the job, and return its exit code."""
        for number in ENDING:
            signal.signal(number, self._on_signal)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: None)
        try:
            self._carry_out(self._membership.begin(self._clock.monotonic()))
            self._open_store = self._load_stores()
            while self._processes:
                self._wait()
        finally:
            self._end_all()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _wait(self) -> None:
        """Wait for what happens next, and take it."""
        now_secs = self._clock.monotonic()
        due_secs = self._membership.next_secs
        secs = LOOK_SECS if due_secs is None else max(TICK_SECS, due_secs - now_secs)
        events = [key.data for key, _ in self._selector.select(secs)]
        if self._signals:
            # Before the ends of processes that the same signal has ended.
            self._signals.clear()
            self._is_ending = True
            self._carry_out(self._membership.ending(self._clock.monotonic()))
        # What a process has sent before its end counts before its end. Each event may end the job.
        for member in [m for m, is_end in events if not is_end]:
            if member in self._processes:
                self._hear(member)
        for member in [m for m, is_end in events if is_end]:
            if member in self._processes:
                self._reap(member)
        now_secs = self._clock.monotonic()
        if os.getppid() != self._supervisor:
            # It was killed, and nobody restarts the job.
            self._end_all()
        self._carry_out(self._membership.tick(now_secs))

    def _hear(self, member: int) -> None:
        """Take what a process has sent."""
        process = self._processes[member]
        now_secs = self._clock.monotonic()
        try:
            messages = [*process.lines.receive()]
        except (EOFError, msgspec.DecodeError):
            # It has ended, or ends: its pidfd shows that.
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.lines.connection)
            return
        for message in messages:
            match message:
                case rank_link.Ready():
                    self._carry_out(self._membership.ready(member, now_secs))
                case rank_link.Failed(generation=generation, text=text):
                    self._carry_out(self._membership.failed(member, generation, text, now_secs))
                case rank_link.Left(generation=generation):
                    leave = Leave(message.last_step, message.text, message.kept_step)
                    self._carry_out(self._membership.left(member, generation, leave, now_secs))
                case rank_link.Finished(generation=generation):
                    self._carry_out(self._membership.finished(member, generation, now_secs))

    def _reap(self, member: int) -> None:
        """Take the end of a process."""
        self._hear(member)
        process = self._processes.pop(member)
        self._selector.unregister(process.pidfd)
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.lines.connection)
        code = process.reap()
        reason = f"ended by {signal_text(-code)}" if code < 0 else f"exit code {code}"
        code = 128 - code if code < 0 else code
        if process.is_rank or not self._code:
            self._last_code = code
        is_over = self._membership.is_over
        # A spare that a signal has ended takes nothing from a job that has finished.
        if process.is_rank if self._is_ending else is_over:
            self._code = self._code or code
        # A rank that a Ctrl-C has ended has said so itself.
        is_interrupted = self._is_ending and code == 128 + signal.SIGINT
        if process.is_rank and not is_over and not is_interrupted:
            self._note(f"holdfast run: process {process.pid} of a rank: {reason}")
        self._carry_out(self._membership.ended(member, reason, self._clock.monotonic()))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case membership.Start(member):
                    self._start(member)
                case membership.Begin():
                    self._begin(effect)
                case membership.Break(generation, members):
                    self._close_store()
                    for member in members:
                        self._send(member, rank_link.Broken(generation))
                case membership.Kill(member):
                    process = self._processes[member]
                    self._note(
                        f"holdfast run: process {process.pid} did not leave its generation: "
                        "it is killed, and its rank is lost too"
                    )
                    process.send_signal(signal.SIGKILL)
                case membership.Own(member):
                    self._send(member, rank_link.Reraise())
                case membership.Release():
                    self._release()
                case membership.GiveUp(reason):
                    self._note(f"holdfast run: the ranks are ended: {reason}")
                    self._code = self._last_code or 1
                    self._end_all()

    def _start(self, member: int) -> None:
        ours, theirs = socket.socketpair()
        own = {MEMBER_VARIABLE: str(theirs.fileno()), STANDBY_VARIABLE: self._folder}
        if QUIET not in os.environ:
            # Each end of a generation's store would be a warning with C++'s stack, on every rank.
            own[QUIET] = "ERROR"
        with theirs:
            try:
                pid = self._spawn(own, theirs.fileno())
            except CommandNotRunError as error:
                self._note(f"holdfast run: {error}")
                ours.close()
                self._end_all()
                raise SystemExit(error.code) from error
        process = _Process(pid, os.pidfd_open(pid), Lines(ours, rank_link.Report))
        self._processes[member] = process
        self._selector.register(process.pidfd, selectors.EVENT_READ, (member, True))
        self._selector.register(ours, selectors.EVENT_READ, (member, False))

    def _begin(self, begin: membership.Begin) -> None:
        self._close_store()
        self._store = self._open_store()
        if begin.kept_step is not None:
            verbs = ("holds", "saves") if len(begin.seats) == 1 else ("hold", "save")
            self._note(
                f"holdfast run: {counted(len(begin.seats), 'rank')} {verbs[0]} step "
                f"{begin.kept_step} unchanged, and {verbs[1]} it"
            )
        elif begin.generation > 1:
            lost = ", ".join(map(str, begin.lost)) or "none"
            self._note(
                f"holdfast run: generation {begin.generation}: "
                f"{counted(len(begin.seats), 'rank')}; lost before: {lost}"
            )
        for seat in begin.seats:
            self._processes[seat.member].is_rank = True
            self._send(
                seat.member,
                rank_link.Assigned(
                    generation=begin.generation,
                    rank=seat.rank,
                    world_size=len(begin.seats),
                    seat=seat.number,
                    store=self._store.address,
                    pids=tuple(self._processes[each.member].pid for each in begin.seats),
                    lost=begin.lost,
                    kept_step=begin.kept_step,
                    survivors=begin.survivors,
                ),
            )

    def _release(self) -> None:
        for member in self._processes:
            self._send(member, rank_link.Released())

    def _send(self, member: int, order: rank_link.Order) -> None:
        process = self._processes.get(member)
        if process is not None:
            process.lines.send(order)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _end_all(self) -> None:
        """End the processes that are left: SIGTERM, and SIGKILL after `END_SECS`."""
        deadline_secs = self._clock.monotonic() + END_SECS
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        for process in self._processes.values():
            secs = max(0.0, deadline_secs - self._clock.monotonic())
            if not select.select([process.pidfd], [], [], secs)[0]:
                process.send_signal(signal.SIGKILL)
            process.reap()
        self._close_store()
        self._processes.clear()
