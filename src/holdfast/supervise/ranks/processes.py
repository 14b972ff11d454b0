"""The processes of one host: start them, hear them, send them orders, and end them.

What a process does is known here from its reports and orders, so that the host can join a leader
that knows nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from holdfast.clock import Clock
from holdfast.environment import MEMBER_VARIABLE
from holdfast.supervise.command import CommandNotRunError
from holdfast.supervise.ranks.membership import Member, State
from holdfast.trainer.process import rank_link
from holdfast.trainer.process.rank_link import Lines, Order, Report

END_SECS = 10.0
"""How long processes may take to end after they were released by a signal or given up."""

Spawn = Callable[[Mapping[str, str], int], int]
Handler = tuple[bool, Callable[[], None]]
"""What is called when a descriptor is ready, and whether it takes the end of a process."""


@dataclass(slots=True)
class Process:
    """One process, with its link and its end."""

    pid: int
    pidfd: int
    lines: Lines
    known: Member = field(default_factory=Member)
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


class Processes:
    """The processes of one host, by their numbers. Owned by the launcher's thread.

    Args:
        spawn: Starts a process with an environment and an inherited descriptor; returns its id.
        variables: The variables that each process has beside its own.
        selector: Where their descriptors are registered, each with a `Handler`.
        on_report: Called with a process's number and what it has sent.
        on_end: Called with the number, the process, and its exit code.
    """

    def __init__(
        self,
        spawn: Spawn,
        variables: Mapping[str, str],
        selector: selectors.BaseSelector,
        on_report: Callable[[int, Report], None],
        on_end: Callable[[int, Process, int], None],
    ) -> None:
        self._spawn = spawn
        self._variables = variables
        self._selector = selector
        self._on_report = on_report
        self._on_end = on_end
        self._processes: dict[int, Process] = {}
        self.generation = 0
        """The newest generation of which a process here was a rank."""
        self.size = 0
        """The number of ranks of the newest one that trained."""

    def __bool__(self) -> bool:
        return bool(self._processes)

    def known(self) -> dict[int, Member]:
        """Return what each process does."""
        return {member: replace(process.known) for member, process in self._processes.items()}

    def start(self, member: int) -> None:
        """Start a process.

        Raises:
            CommandNotRunError: The command cannot be run.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                variables = {**self._variables, MEMBER_VARIABLE: str(theirs.fileno())}
                pid = self._spawn(variables, theirs.fileno())
            except CommandNotRunError:
                ours.close()
                raise
        process = Process(pid, os.pidfd_open(pid), Lines(ours, Report))
        self._processes[member] = process
        ends: Handler = (True, lambda: self._reap(member, process))
        hears: Handler = (False, lambda: self._hear(member, process))
        self._selector.register(process.pidfd, selectors.EVENT_READ, ends)
        self._selector.register(ours, selectors.EVENT_READ, hears)

    def order(self, member: int, order: Order) -> None:
        """Send an order; the process may have ended."""
        process = self._processes.get(member)
        if process is None:
            return
        known = process.known
        if isinstance(order, rank_link.Assigned):
            pids = tuple(each.pid for each in self._processes.values())
            order = msgspec.structs.replace(order, pids=pids)
            known.state, known.generation, known.kept_step = State.TRAINING, order.generation, None
            self.generation = max(self.generation, order.generation)
            process.is_rank = True
            if order.kept_step is None:
                known.rank, known.seat, self.size = order.rank, order.seat, order.world_size
        process.lines.send(order)

    def release(self, *, has_finished: bool) -> None:
        """Tell all that the training is over."""
        for member in self._processes:
            self.order(member, rank_link.Released(has_finished))

    def leave(self) -> None:
        """Tell the ranks that their generation is over."""
        for member, process in self._processes.items():
            if process.known.state in (State.TRAINING, State.FINISHED):
                self.order(member, rank_link.Broken(process.known.generation))

    def kill(self, member: int) -> int | None:
        """Kill a process, and return its id; None: it has ended."""
        process = self._processes.get(member)
        if process is None:
            return None
        process.send_signal(signal.SIGKILL)
        return process.pid

    def end_all(self, clock: Clock) -> None:
        """End the processes that are left: SIGTERM, and SIGKILL after `END_SECS`."""
        deadline_secs = clock.monotonic() + END_SECS
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        for process in self._processes.values():
            secs = max(0.0, deadline_secs - clock.monotonic())
            if not select.select([process.pidfd], [], [], secs)[0]:
                process.send_signal(signal.SIGKILL)
            self._unregister(process)
            process.reap()
        self._processes.clear()

    def _hear(self, member: int, process: Process) -> None:
        """Take what a process has sent. Each message may end the job, and this process."""
        if self._processes.get(member) is not process:
            return
        try:
            reports = [*process.lines.receive()]
        except (EOFError, msgspec.DecodeError):
            # It has ended, or ends: its pidfd shows that.
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.lines.connection)
            return
        for report in reports:
            match report:
                case rank_link.Ready():
                    process.known.state = State.WAITING
                case rank_link.Left(kept_step=step):
                    process.known.state, process.known.kept_step = State.WAITING, step
                case rank_link.Finished():
                    process.known.state = State.FINISHED
            self._on_report(member, report)  # type: ignore[arg-type]

    def _reap(self, member: int, process: Process) -> None:
        """Take the end of a process."""
        self._hear(member, process)
        if self._processes.get(member) is process:
            del self._processes[member]
            self._unregister(process)
            self._on_end(member, process, process.reap())

    def _unregister(self, process: Process) -> None:
        for descriptor in (process.pidfd, process.lines.connection):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(descriptor)
