"""Run the processes of one job on this host, by the orders of the launcher that leads.

The launcher is the command that `holdfast run --nproc` supervises: the processes are in its process
group, so each signal reaches them directly, and its exit code is that of the job on this host. Of
all launchers one leads: see `holdfast.supervise.ranks.leading`. Whatever waits in the store of a
generation fails when that is over.

See docs/decisions/0064 and docs/decisions/0071.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from holdfast.clock import Clock
from holdfast.environment import STANDBY_VARIABLE
from holdfast.supervise.command import CommandNotRunError
from holdfast.supervise.ends import signal_text
from holdfast.supervise.ranks import host_links
from holdfast.supervise.ranks.host_links import HostLinks
from holdfast.supervise.ranks.host_messages import (
    Ended,
    Ending,
    Hello,
    Joining,
    Killed,
    Message,
    Ordered,
    Over,
    Reported,
    Started,
    Voted,
    Welcome,
)
from holdfast.supervise.ranks.leadership import Leadership, Vote
from holdfast.supervise.ranks.leading import Lead, Reach, Store
from holdfast.supervise.ranks.membership import Joined, Membership, Settings, State
from holdfast.supervise.ranks.processes import Handler, Process, Processes, Spawn
from holdfast.trainer.process import rank_link

QUIET = "TORCH_CPP_LOG_LEVEL"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LOOK_SECS = 2.0
"""How often to look whether `holdfast run` lives, at least."""
TICK_SECS = 0.25
"""The shortest pause between two looks at the time."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a job.

    Attributes:
        addresses: Host and port of each host's launcher; the same list on all of them.
        own: The place of this host in the list.
        listener: The socket at its address, which listens.
    """

    addresses: tuple[tuple[str, int], ...]
    own: int
    listener: socket.socket


class JobEnd:
    """How the job ends on one host, and the exit code.

    Attributes:
        is_ending: A signal to end has arrived: no process is replaced any more.
        over: How the job is over; None: it is not.
    """

    def __init__(self) -> None:
        self.is_ending = False
        self.over: Over | None = None
        self._code = 0
        """That of the first process that failed and was not replaced."""
        self._last_code = 0
        """That of the last rank that was lost."""

    @property
    def is_near(self) -> bool:
        """Whether the job is over, or ends because of a signal."""
        return self.is_ending or self.over is not None

    @property
    def exit_code(self) -> int:
        """The exit code, once all processes of this host have ended."""
        if not self.is_near:
            # Other hosts may go on.
            return self._code or self._last_code or 1
        return self._code

    def add_code(self, code: int, *, is_rank: bool, has_trained: bool) -> None:
        """Take the exit code of a process.

        Args:
            code: The exit code; 128 + N if signal N has ended it.
            is_rank: It was a rank.
            has_trained: A process of this host was a rank of any generation.
        """
        if is_rank or not self._code:
            self._last_code = code
        # A spare that a signal has ended takes nothing from a job that has finished.
        counts = is_rank or not has_trained
        if counts if self.is_ending else self.over is not None:
            self._code = self._code or code

    def finish(self, over: Over) -> None:
        """Take the end that the leader has decided."""
        self.over = over
        if over.reason:
            self._code = self._last_code or 1


class Launcher:
    """The processes of one job on one host. Owned by one thread.

    Args:
        spawn: Starts a process with an environment and an inherited descriptor; returns its id.
        settings: The size of the job.
        load_stores: Loads what opens the store of a generation at an address; called once the
            processes are started, which import the same meanwhile.
        clock: The clock.
        note: Shows one line to the user.
        folder: For the standby files of the processes.
        hosts: The hosts of the job; None: this one alone.
    """

    def __init__(
        self,
        spawn: Spawn,
        settings: Settings,
        load_stores: Callable[[], Callable[[str], Store]],
        clock: Clock,
        note: Callable[[str], None],
        folder: Path,
        hosts: Hosts | None = None,
    ) -> None:
        self._settings = settings
        self._load_stores = load_stores
        self._clock = clock
        self._note = note
        self._hosts = hosts
        self._leadership = Leadership(0 if hosts is None else hosts.own)
        self._lead: Lead | None = None
        """The decisions, if this launcher leads."""
        self._links: HostLinks | None = None
        self._selector = selectors.DefaultSelector()
        self._folder = folder
        self._processes = Processes(
            spawn, self._variables(), self._selector, self._on_report, self._on_end
        )
        self._signals: list[int] = []
        """The signals that have arrived since the last look."""
        self._end = JobEnd()
        self._joinings = 0
        """How often this launcher has joined a leader."""
        self._is_welcome = False
        """Whether the leader has answered that; what it has sent before is outdated."""
        self._generation = 0
        """The newest generation that another host knew of, or this one when it led."""
        self._late_secs = math.inf
        """When ranks that did not leave a generation before the last one are killed."""
        self._supervisor = os.getppid()

    def run(self) -> int:
        """Run the job, and return its exit code."""
        for number in ENDING:
            signal.signal(number, self._on_signal)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: None)
        try:
            for member in self._settings.first_members(self._own):
                self._start(member)
            self._open_store = self._load_stores()
            self._begin_leading()
            if self._hosts is not None:
                self._connect(self._hosts)
            while self._processes or self._awaits_start:
                self._wait()
        finally:
            self._end_all()
            if self._links is not None:
                self._links.close()
        return self._end.exit_code

    @property
    def _own(self) -> int:
        """This host, as its place in the list of hosts."""
        return self._leadership.own

    @property
    def _awaits_start(self) -> bool:
        """Whether the leader is about to start processes in place of those that have ended."""
        return self._lead is None and self._settings.replaces and not self._end.is_near

    def _variables(self) -> dict[str, str]:
        """Return the variables that all processes have."""
        variables = {STANDBY_VARIABLE: str(self._folder)}
        if QUIET not in os.environ:
            # Each end of a generation's store would be a warning with C++'s stack, on every rank.
            variables[QUIET] = "ERROR"
        # Gloo takes the address of the host's name, which is often one of loopback.
        interface = None if self._hosts is None else host_links.interface_of(self._address)
        if interface is not None and GLOO_INTERFACE not in os.environ:
            variables[GLOO_INTERFACE] = interface
        return variables

    def _connect(self, hosts: Hosts) -> None:
        hello = Hello(
            host=hosts.own,
            options=self._options(hosts),
            addresses=host_links.addresses_of_host(),
        )
        self._links = HostLinks(
            hello,
            hosts.addresses,
            hosts.listener,
            self._selector,
            self._clock,
            host_links.LinkCallbacks(
                on_message=self._on_message,
                on_lost=self._on_host_lost,
                on_stranger=self._on_stranger,
                on_second=self._on_second,
            ),
        )

    def _options(self, hosts: Hosts) -> str:
        """Return what is the same on all hosts, as the options of `holdfast run`."""
        settings = self._settings
        listed = ",".join(f"{host}:{port}" for host, port in hosts.addresses)
        return (
            f"--nproc {settings.seats} --spares {settings.spares} --min-ranks "
            f"{settings.ranks_min} --leave-secs {settings.leave_secs:g} --spare-hosts "
            f"{settings.spare_hosts} --hosts {listed}"
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _wait(self) -> None:
        """Wait for what happens next, and take it."""
        now_secs = self._clock.monotonic()
        due_secs = math.inf
        if self._lead is not None and (at_secs := self._lead.next_secs) is not None:
            due_secs = max(TICK_SECS, at_secs - now_secs)
        secs = min(LOOK_SECS, due_secs)
        if self._links is not None:
            secs = min(secs, host_links.BEAT_SECS / 2)
        handlers: list[Handler] = [key.data for key, _ in self._selector.select(secs)]
        if self._signals:
            # Before the ends of processes that the same signal has ended.
            self._signals.clear()
            self._end.is_ending = True
            self._report(Ending())
        # What a process has sent before its end counts before its end.
        for _, handle in sorted(handlers, key=lambda handler: handler[0]):
            handle()
        if os.getppid() != self._supervisor:
            # It was killed, and nobody restarts the job.
            self._end_all()
        if self._lead is not None:
            self._lead.tick()
            if not self._end.is_ending:
                self._lead.show_wait()
        if self._links is not None:
            self._links.beat(self._own_vote)
        if self._clock.monotonic() >= self._late_secs:
            self._late_secs = math.inf
            for member, known in self._processes.known().items():
                if known.state is State.TRAINING:
                    self._kill(member)

    # Own processes.

    def _on_report(self, member: int, report: rank_link.Report) -> None:
        self._report(Reported(member, report))

    def _on_end(self, member: int, process: Process, code: int) -> None:
        reason = f"ended by {signal_text(-code)}" if code < 0 else f"exit code {code}"
        code = 128 - code if code < 0 else code
        has_trained = self._processes.generation > 0
        self._end.add_code(code, is_rank=process.is_rank, has_trained=has_trained)
        # A rank that a Ctrl-C has ended has printed that itself.
        is_interrupted = self._end.is_ending and code == 128 + signal.SIGINT
        if process.is_rank and self._end.over is None and not is_interrupted:
            self._note(f"holdfast run: process {process.pid} of a rank: {reason}")
        self._report(Ended(member, reason))

    def _start(self, member: int) -> None:
        try:
            self._processes.start(member)
        except CommandNotRunError as error:
            self._note(f"holdfast run: {error}")
            self._end_all()
            raise SystemExit(error.code) from error

    def _kill(self, member: int) -> None:
        if (pid := self._processes.kill(member)) is not None:
            self._note(
                f"holdfast run: process {pid} did not leave its generation: it is killed, and its "
                "rank is lost too"
            )

    def _finish(self, over: Over) -> None:
        """End the job on this host: release its processes, or end them for a reason."""
        self._end.finish(over)
        if not over.reason:
            self._processes.release(has_finished=over.has_finished)
            self._late_secs = self._clock.monotonic() + self._settings.leave_secs
            return
        self._note(f"holdfast run: the ranks are ended: {over.reason}")
        self._end_all()

    def _end_all(self) -> None:
        """End the processes that are left."""
        self._processes.end_all(self._clock)
        if self._lead is not None:
            self._lead.close()

    # The other hosts.

    def _own_vote(self) -> Vote:
        """Return the vote of this launcher."""
        has_quorum = self._lead is not None and self._lead.has_quorum
        return Vote(
            follows=self._leadership.follows, has_quorum=has_quorum, generation=self._newest
        )

    @property
    def _newest(self) -> int:
        """The newest generation that any host knows of."""
        led = 0 if self._lead is None else self._lead.newest
        return max(self._generation, led)

    def _choose(self) -> None:
        """Choose the leader again, and follow it."""
        if self._end.over is not None or self._links is None:
            return
        before = self._leadership.follows
        leader = self._leadership.choose(has_quorum=self._own_vote().has_quorum)
        if leader != before:
            self._processes.leave()
            if leader == self._own:
                self._begin_leading()
            else:
                self._end_leading()
                self._join()
        self._links.send_changed(self._own_vote())

    def _join(self) -> None:
        """Join the leader, which may be this launcher itself."""
        own = self._processes
        joined = Joined(
            members=own.known(),
            generation=own.generation,
            size=own.size,
            newest=max(self._newest, own.generation),
        )
        self._joinings += 1
        self._is_welcome = False
        self._report(Joining(self._joinings, joined))
        if self._end.is_ending:
            self._report(Ending())

    def _begin_leading(self) -> None:
        """Decide from now on for the hosts that join."""
        awaited = set(range(self._settings.hosts))
        if self._links is not None and self._newest:
            awaited = self._links.connected
        reach = Reach(
            send=self._send,
            open_store=lambda: self._open_store(self._address),
            peers_of=self._peers_of,
            name=self._name,
            note=self._note,
        )
        job = Membership(self._settings, awaited)
        self._lead = Lead(job, self._own, self._newest, reach, self._clock)
        self._join()

    def _end_leading(self) -> None:
        if self._lead is not None:
            self._generation = self._newest
            self._lead.close()
            self._lead = None

    def _on_host_lost(self, host: int) -> None:
        if not self._end.is_near:
            self._note(f"holdfast run: host {self._name(host)} is lost")
        self._leadership.lost(host)
        if self._lead is not None:
            self._lead.leave(host)
            self._lead.await_no_more(host)
        self._choose()

    def _on_stranger(self, hello: Hello) -> None:
        assert self._hosts is not None
        self._note(
            f"holdfast run: another host, of {', '.join(hello.addresses) or LOOPBACK}, was "
            f"started with other options, and stays outside: {hello.options}; here "
            f"{self._options(self._hosts)}; start all hosts with the same"
        )

    def _on_second(self, hello: Hello) -> None:
        self._note(
            f"holdfast run: another host, of {', '.join(hello.addresses) or LOOPBACK}, has the "
            f"place of {self._name(hello.host)} too, and stays outside; see HOLDFAST_HOST and "
            "HOLDFAST_INTERFACE there"
        )

    def _name(self, host: int) -> str:
        return str(host) if self._hosts is None else self._hosts.addresses[host][0]

    def _on_message(self, host: int, message: Message) -> None:
        """Take what another host has sent, which may be outdated."""
        if isinstance(message, Voted):
            self._leadership.heard(host, message.vote)
            self._generation = max(self._generation, message.vote.generation)
            if self._lead is not None and message.vote.follows != self._own:
                self._lead.leave(host)
            self._choose()
        elif self._lead is not None:
            self._lead.take(host, message)
            if isinstance(message, Joining):
                self._choose()
        elif host == self._leadership.follows:
            if isinstance(message, Welcome):
                self._is_welcome = message.number == self._joinings
            if self._is_welcome:
                self._obey(message)

    def _obey(self, message: Message) -> None:
        """Carry out what the leader has sent."""
        match message:
            case Started(member):
                self._start(member)
            case Ordered(member, order):
                self._processes.order(member, order)
            case Killed(member):
                self._kill(member)
            case Over():
                self._finish(message)

    def _send(self, host: int, message: Message) -> None:
        """Send what this launcher has decided to a host, which may be the own one."""
        if host == self._own:
            self._obey(message)
        elif self._links is not None:
            self._links.send(host, message)

    def _report(self, message: Message) -> None:
        """Give the leader, which may be this launcher, what has happened here."""
        if self._lead is not None:
            self._lead.take(self._own, message)
        elif self._end.over is None and self._links is not None:
            self._links.send(self._leadership.follows, message)

    @property
    def _address(self) -> str:
        """The address of this host at which the others reach it."""
        return LOOPBACK if self._hosts is None else self._hosts.listener.getsockname()[0]

    def _peers_of(self, host: int) -> tuple[str, ...]:
        """Return the addresses of the other hosts. A leader is connected with all of them."""
        return () if self._links is None else self._links.addresses_but_of(host)
