"""Run the processes of one job on this host, and lead or follow the launchers of the other hosts.

The launcher is the command that `holdfast run --nproc` supervises: the processes are in its process
group, so each signal reaches them directly, and its exit code is that of the job on this host. Of
all launchers one leads: it decides who is a rank, and holds the store of each generation. Whatever
waits in that store fails when the generation is over.

See docs/decisions/0064 and docs/decisions/0071.
"""

from __future__ import annotations

import math
import os
import selectors
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from holdfast.clock import Clock
from holdfast.environment import STANDBY_VARIABLE
from holdfast.quantities import counted
from holdfast.supervise.command import CommandNotRunError
from holdfast.supervise.ends import signal_text
from holdfast.supervise.ranks import host_links, membership
from holdfast.supervise.ranks.host_links import HostLinks
from holdfast.supervise.ranks.leadership import Leadership, Vote
from holdfast.supervise.ranks.membership import (
    Effect,
    Joined,
    Leave,
    Membership,
    Settings,
    State,
)
from holdfast.supervise.ranks.processes import Handler, Process, Processes, Spawn
from holdfast.trainer.process import rank_link

QUIET = "TORCH_CPP_LOG_LEVEL"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LOOK_SECS = 2.0
"""How often to look whether `holdfast run` lives."""
TICK_SECS = 0.25
"""The shortest pause between two looks at the time."""
WAIT_SECS = 5.0
"""After how long a line shows what the job waits for."""
LOOPBACK = "127.0.0.1"


class Store(Protocol):
    """The key-value store of one generation."""

    address: str

    def close(self) -> None:
        """End the store. Processes that wait in it fail."""
        ...


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


class Launcher:
    """The processes of one job on one host. Owned by one thread.

    Args:
        spawn: Starts a process with an environment and an inherited descriptor; returns its id.
        settings: The size of the job.
        load_stores: Loads what opens the store of a generation at an address; called once the
            processes are started, which import the same meanwhile.
        clock: The clock.
        note: Shows one line to the user.
        hosts: The hosts of the job; None: this one alone.
    """

    def __init__(
        self,
        spawn: Spawn,
        settings: Settings,
        load_stores: Callable[[], Callable[[str], Store]],
        clock: Clock,
        note: Callable[[str], None],
        hosts: Hosts | None = None,
    ) -> None:
        self._settings = settings
        self._load_stores = load_stores
        self._clock = clock
        self._note = note
        self._hosts = hosts
        self._own = 0 if hosts is None else hosts.own
        self._leadership = Leadership(self._own)
        self._vote = Vote(follows=self._own, has_quorum=False)
        """The vote that was sent last."""
        self._membership: Membership | None = None
        """All processes of the job, if this launcher leads."""
        self._links: HostLinks | None = None
        self._selector = selectors.DefaultSelector()
        self._folder = tempfile.mkdtemp(prefix="holdfast-ranks-")
        self._processes = Processes(
            spawn, self._variables(), self._selector, self._on_report, self._on_end
        )
        self._store: Store | None = None
        self._code = 0
        """The exit code: that of the first process that failed and was not replaced."""
        self._last_code = 0
        """The exit code of the last rank that was lost."""
        self._signals: list[int] = []
        """The signals that have arrived since the last look."""
        self._is_ending = False
        """Whether one has arrived: no process is replaced any more."""
        self._over: host_links.Over | None = None
        """How the job is over; None: it is not."""
        self._joinings = 0
        """How often this launcher has joined a leader."""
        self._is_welcome = False
        """Whether the leader has answered that; what it has sent before is outdated."""
        self._generation = 0
        """The newest generation that any host knows of."""
        self._strangers: set[str] = set()
        """The options of other hosts that the user knows of."""
        self._late_secs = math.inf
        """When ranks that did not leave a generation before the last one are killed."""
        self._waits_since_secs: float | None = None
        self._waits_for = ""
        """What was shown last of that."""
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
            self._lead()
            if self._hosts is not None:
                self._connect(self._hosts)
            while self._processes or self._awaits_start:
                self._wait()
        finally:
            self._end_all()
            if self._links is not None:
                self._links.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._over is None and not self._is_ending:
            # All processes of this host have ended, and other hosts may go on.
            return self._code or self._last_code or 1
        return self._code

    @property
    def _awaits_start(self) -> bool:
        """Whether the leader is about to start processes in place of those that have ended."""
        follows = self._membership is None and self._settings.replaces
        return follows and self._over is None and not self._is_ending

    def _variables(self) -> dict[str, str]:
        """Return the variables that all processes have."""
        variables = {STANDBY_VARIABLE: self._folder}
        if QUIET not in os.environ:
            # Each end of a generation's store would be a warning with C++'s stack, on every rank.
            variables[QUIET] = "ERROR"
        if self._hosts is not None and GLOO_INTERFACE not in os.environ:
            # Gloo takes the address of the host's name, which is often one of loopback.
            address = self._hosts.listener.getsockname()[0]
            if (interface := host_links.interface_of(address)) is not None:
                variables[GLOO_INTERFACE] = interface
        return variables

    def _connect(self, hosts: Hosts) -> None:
        hello = host_links.Hello(
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
        due_secs = None if self._membership is None else self._membership.next_secs
        secs = LOOK_SECS if due_secs is None else max(TICK_SECS, due_secs - now_secs)
        if self._links is not None:
            secs = min(secs, host_links.BEAT_SECS / 2)
        handlers: list[Handler] = [key.data for key, _ in self._selector.select(secs)]
        if self._signals:
            # Before the ends of processes that the same signal has ended.
            self._signals.clear()
            self._is_ending = True
            self._send_leader(host_links.Ending())
            self._decide(lambda job: job.ending(self._own, self._clock.monotonic()))
        # What a process has sent before its end counts before its end.
        for _, handle in sorted(handlers, key=lambda handler: handler[0]):
            handle()
        if os.getppid() != self._supervisor:
            # It was killed, and nobody restarts the job.
            self._end_all()
        self._decide(lambda job: job.tick(self._clock.monotonic()))
        if self._links is not None:
            self._links.beat(self._own_vote)
            self._show_wait()
        if self._clock.monotonic() >= self._late_secs:
            self._late_secs = math.inf
            for member, known in self._processes.known().items():
                if known.state is State.TRAINING:
                    self._kill(member)

    def _show_wait(self) -> None:
        """Show what the job waits for, after some seconds."""
        names = [self._name(host) for host in range(self._settings.hosts)]
        waits_for = "" if self._membership is None else self._membership.waits_for(names)
        now_secs = self._clock.monotonic()
        if not waits_for or self._is_ending or self._over is not None:
            self._waits_since_secs, self._waits_for = None, ""
            return
        if self._waits_since_secs is None:
            self._waits_since_secs = now_secs
        if waits_for != self._waits_for and now_secs >= self._waits_since_secs + WAIT_SECS:
            self._waits_for = waits_for
            self._note(f"holdfast run: waiting for {waits_for}")

    # Own processes.

    def _on_report(self, member: int, report: rank_link.Report) -> None:
        self._send_leader(host_links.Reported(member, report))
        self._take_report(member, report)

    def _on_end(self, member: int, process: Process, code: int) -> None:
        reason = f"ended by {signal_text(-code)}" if code < 0 else f"exit code {code}"
        code = 128 - code if code < 0 else code
        if process.is_rank or not self._code:
            self._last_code = code
        # A spare that a signal has ended takes nothing from a job that has finished.
        counts = process.is_rank or not self._processes.generation
        if counts if self._is_ending else self._over is not None:
            self._code = self._code or code
        # A rank that a Ctrl-C has ended has printed that itself.
        is_interrupted = self._is_ending and code == 128 + signal.SIGINT
        if process.is_rank and self._over is None and not is_interrupted:
            self._note(f"holdfast run: process {process.pid} of a rank: {reason}")
        self._send_leader(host_links.Ended(member, reason))
        self._take_end(member, reason)

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

    def _order(self, member: int, order: rank_link.Order) -> None:
        self._processes.order(member, order)

    def _finish(self, over: host_links.Over) -> None:
        """End the job on this host: release its processes, or end them for a reason."""
        self._over = over
        if not over.reason:
            self._processes.release(has_finished=over.has_finished)
            self._late_secs = self._clock.monotonic() + self._settings.leave_secs
            return
        self._note(f"holdfast run: the ranks are ended: {over.reason}")
        self._code = self._last_code or 1
        self._end_all()

    def _end_all(self) -> None:
        """End the processes that are left."""
        self._processes.end_all(self._clock)
        self._close_store()

    # The other hosts.

    def _own_vote(self) -> Vote:
        """Return the vote of this launcher."""
        has_quorum = self._membership is not None and self._membership.has_quorum
        return Vote(
            follows=self._leadership.follows, has_quorum=has_quorum, generation=self._generation
        )

    def _choose(self) -> None:
        """Choose the leader again, and follow it."""
        if self._over is not None or self._links is None:
            return
        before = self._leadership.follows
        leader = self._leadership.choose(has_quorum=self._own_vote().has_quorum)
        if leader != before:
            self._processes.leave()
            if leader == self._own:
                self._lead()
            else:
                self._membership = None
                self._close_store()
                self._joinings += 1
                self._is_welcome = False
                joining = host_links.Joining(self._joinings, self._joined())
                self._links.send(leader, joining)
                if self._is_ending:
                    self._links.send(leader, host_links.Ending())
        if (vote := self._own_vote()) != self._vote:
            self._vote = vote
            self._links.send_vote(vote)

    def _joined(self) -> Joined:
        own = self._processes
        return Joined(
            members=own.known(),
            generation=own.generation,
            size=own.size,
            newest=max(self._generation, own.generation),
        )

    def _lead(self) -> None:
        """Decide from now on for the hosts that join."""
        awaited = set(range(self._settings.hosts))
        if self._links is not None and self._generation:
            awaited = self._links.connected
        self._membership = Membership(self._settings, awaited)
        self._decide(lambda job: job.join(self._own, self._joined(), self._clock.monotonic()))
        if self._is_ending:
            self._decide(lambda job: job.ending(self._own, self._clock.monotonic()))

    def _on_host_lost(self, host: int) -> None:
        if self._over is None and not self._is_ending:
            self._note(f"holdfast run: host {self._name(host)} is lost")
        self._leadership.lost(host)
        self._leave(host)
        if self._membership is not None:
            self._membership.awaited.discard(host)
        self._choose()

    def _leave(self, host: int) -> None:
        """A host does not follow this one any more, if it did."""
        if self._membership is not None and host in self._membership.hosts:
            self._decide(lambda job: job.host_lost(host, self._clock.monotonic()))

    def _on_stranger(self, hello: host_links.Hello) -> None:
        if hello.options not in self._strangers and self._hosts is not None:
            self._strangers.add(hello.options)
            self._note(
                f"holdfast run: another host, of {', '.join(hello.addresses) or LOOPBACK}, was "
                f"started with other options, and stays outside: {hello.options}; here "
                f"{self._options(self._hosts)}; start all hosts with the same"
            )

    def _on_second(self, hello: host_links.Hello) -> None:
        self._note(
            f"holdfast run: another host, of {', '.join(hello.addresses) or LOOPBACK}, has the "
            f"place of {self._name(hello.host)} too, and stays outside; see HOLDFAST_HOST and "
            "HOLDFAST_INTERFACE there"
        )

    def _name(self, host: int) -> str:
        return str(host) if self._hosts is None else self._hosts.addresses[host][0]

    def _on_message(self, host: int, message: host_links.Message) -> None:
        """Take what another host has sent, which may be outdated."""
        if isinstance(message, host_links.Voted):
            self._leadership.heard(host, message.vote)
            self._generation = max(self._generation, message.vote.generation)
            if message.vote.follows != self._own:
                self._leave(host)
            self._choose()
        elif self._membership is not None:
            self._take_of_host(host, message)
        elif host == self._leadership.follows:
            self._obey(message)

    def _take_of_host(self, host: int, message: host_links.Message) -> None:
        """Take what a host that follows this one has sent."""
        assert self._membership is not None
        if isinstance(message, host_links.Joining):
            if self._over is not None:
                self._send(host, self._over)
                return
            self._leave(host)
            self._send(host, host_links.Welcome(message.number))
            now_secs = self._clock.monotonic()
            if self._generation:
                self._note(f"holdfast run: host {self._name(host)} has joined")
            self._decide(lambda job: job.join(host, message.joined, now_secs))
            self._choose()
        if host not in self._membership.hosts:
            return
        match message:
            case host_links.Reported(member, report):
                self._take_report(member, report)
            case host_links.Ended(member, reason):
                self._take_end(member, reason)
            case host_links.Ending():
                self._note(f"holdfast run: host {self._name(host)} has received a signal to end")
                self._decide(lambda job: job.ending(host, self._clock.monotonic()))

    def _obey(self, message: host_links.Message) -> None:
        """Carry out what the leader has sent."""
        if isinstance(message, host_links.Welcome):
            self._is_welcome = message.number == self._joinings
        if not self._is_welcome:
            return
        match message:
            case host_links.Started(member):
                self._start(member)
            case host_links.Ordered(member, order):
                self._order(member, order)
            case host_links.Killed(member):
                self._kill(member)
            case host_links.Over():
                self._finish(message)

    def _send(self, host: int, message: host_links.Message) -> None:
        if self._links is not None:
            self._links.send(host, message)

    def _send_leader(self, message: host_links.Message) -> None:
        if self._membership is None and self._over is None:
            self._send(self._leadership.follows, message)

    # What a leader decides.

    def _decide(self, change: Callable[[Membership], Iterable[Effect]]) -> None:
        """Tell the membership of something, if this launcher leads, and do what follows."""
        if self._membership is not None and self._over is None:
            self._carry_out(self._membership, change(self._membership))

    def _take_report(self, member: int, report: rank_link.Report) -> None:
        if self._membership is None or member not in self._membership:
            return
        now_secs = self._clock.monotonic()
        match report:
            case rank_link.Ready():
                self._decide(lambda job: job.ready(member, now_secs))
            case rank_link.Failed(generation=generation, text=text):
                self._decide(lambda job: job.failed(member, generation, text, now_secs))
            case rank_link.Left(generation=generation):
                leave = Leave(report.last_step, report.text, report.kept_step)
                self._decide(lambda job: job.left(member, generation, leave, now_secs))
            case rank_link.Finished(generation=generation):
                self._decide(lambda job: job.finished(member, generation, now_secs))

    def _take_end(self, member: int, reason: str) -> None:
        if self._membership is not None and member in self._membership:
            self._decide(lambda job: job.ended(member, reason, self._clock.monotonic()))

    def _carry_out(self, job: Membership, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case membership.Start(member):
                    self._at(member, self._start, host_links.Started(member))
                case membership.Begin():
                    self._begin(effect)
                case membership.Break(generation, members):
                    self._close_store()
                    for member in members:
                        self._give(member, rank_link.Broken(generation))
                case membership.Kill(member):
                    self._at(member, self._kill, host_links.Killed(member))
                case membership.Own(member):
                    self._give(member, rank_link.Reraise())
                case membership.Release(has_finished):
                    self._end_job(job, host_links.Over("", has_finished))
                case membership.GiveUp(reason):
                    self._end_job(job, host_links.Over(reason, has_finished=False))

    def _end_job(self, job: Membership, over: host_links.Over) -> None:
        for host in job.hosts - {self._own}:
            self._send(host, over)
        self._finish(over)

    def _at(self, member: int, act: Callable[[int], None], message: host_links.Message) -> None:
        """Let the host of a process do something."""
        host = member % self._settings.hosts
        if host == self._own:
            act(member)
        else:
            self._send(host, message)

    def _give(self, member: int, order: rank_link.Order) -> None:
        """Give an order to a process of any host."""
        self._at(member, lambda m: self._order(m, order), host_links.Ordered(member, order))

    def _begin(self, begin: membership.Begin) -> None:
        self._close_store()
        self._generation = max(self._generation, begin.generation)
        address = LOOPBACK
        if self._hosts is not None:
            address = self._hosts.listener.getsockname()[0]
        self._store = self._open_store(address)
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
            order = rank_link.Assigned(
                generation=begin.generation,
                rank=seat.rank,
                world_size=len(begin.seats),
                seat=seat.number,
                store=self._store.address,
                peers=self._peers_of(seat.member % self._settings.hosts),
                lost=begin.lost,
                kept_step=begin.kept_step,
                survivors=begin.survivors,
            )
            self._give(seat.member, order)

    def _peers_of(self, host: int) -> tuple[str, ...]:
        """Return the addresses of the other hosts. A leader is connected with all of them."""
        return () if self._links is None else self._links.addresses_but_of(host)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
