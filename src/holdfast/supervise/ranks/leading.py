"""Decide for the ranks of all hosts, on the host whose launcher leads.

What the membership decides is sent to each host, the leader's own included, as messages; the store
of the present generation is here. See docs/decisions/0071.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from holdfast.clock import Clock
from holdfast.quantities import counted
from holdfast.supervise.ranks import membership
from holdfast.supervise.ranks.host_messages import (
    Ended,
    Ending,
    Joining,
    Killed,
    Message,
    Ordered,
    Over,
    Reported,
    Started,
    Welcome,
)
from holdfast.supervise.ranks.membership import Effect, Leave, Membership
from holdfast.trainer.process import rank_link
from holdfast.trainer.process.rank_link import Order, Report

WAIT_SECS, WAIT_ALONE_SECS = 5.0, 30.0
"""After how long a line shows what the job waits for: with several hosts, and on one.

On one host nearly all of it is the import of the program's modules.
"""


class Store(Protocol):
    """The key-value store of one generation."""

    address: str

    def close(self) -> None:
        """End the store. Processes that wait in it fail."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What the leader reaches through its launcher.

    Attributes:
        send: Sends a message to a host, or carries it out if it is the own one.
        open_store: Opens the store of a generation, where all hosts reach it.
        peers_of: Returns the addresses of all hosts but one.
        name: Returns the name of a host.
        note: Shows one line to the user.
    """

    send: Callable[[int, Message], None]
    open_store: Callable[[], Store]
    peers_of: Callable[[int], tuple[str, ...]]
    name: Callable[[int], str]
    note: Callable[[str], None]


class Lead:
    """The decisions of a launcher that leads. Owned by its thread.

    Args:
        job: All processes of the job.
        own: The host of this launcher.
        newest: The newest generation that this host knows of.
        reach: How to reach hosts and the user.
        clock: The clock.
    """

    def __init__(self, job: Membership, own: int, newest: int, reach: Reach, clock: Clock) -> None:
        self._job = job
        self._own = own
        self.newest = newest
        """The newest generation that this host knows of."""
        self._reach = reach
        self._clock = clock
        self._store: Store | None = None
        self._over: Over | None = None
        """How the job is over; None: it is not."""
        self._waits_since_secs: float | None = None
        self._waits_for = ""
        """What was shown last of that."""

    @property
    def has_quorum(self) -> bool:
        """Whether the hosts that follow this one may go on without the others."""
        return self._job.has_quorum

    @property
    def next_secs(self) -> float | None:
        """When to call `tick`, by the clock; None: whenever something has happened."""
        return self._job.next_secs

    def take(self, host: int, message: Message) -> None:
        """Take what a host has sent that follows this one, or the own one."""
        if isinstance(message, Joining):
            self._join(host, message)
        if host not in self._job.hosts:
            return
        match message:
            case Reported(member, report):
                self._take_report(member, report)
            case Ended(member, reason):
                if member in self._job:
                    self._decide(lambda job, now_secs: job.ended(member, reason, now_secs))
            case Ending():
                if host != self._own:
                    self._reach.note(
                        f"holdfast run: host {self._reach.name(host)} has received a signal to end"
                    )
                self._decide(lambda job, now_secs: job.ending(host, now_secs))

    def leave(self, host: int) -> None:
        """A host does not follow this one any more, if it did."""
        if host in self._job.hosts:
            self._decide(lambda job, now_secs: job.host_lost(host, now_secs))

    def await_no_more(self, host: int) -> None:
        """A host is not about to join any more."""
        self._job.awaited.discard(host)

    def tick(self) -> None:
        """Look at the time."""
        self._decide(lambda job, now_secs: job.tick(now_secs))

    def show_wait(self) -> None:
        """Show what the job waits for, after some seconds."""
        hosts = range(self._job.settings.hosts)
        waits_for = self._job.waits_for([self._reach.name(host) for host in hosts])
        if not waits_for:
            self._waits_since_secs, self._waits_for = None, ""
            return
        now_secs = self._clock.monotonic()
        if self._waits_since_secs is None:
            self._waits_since_secs = now_secs
        shown_after_secs = WAIT_SECS if len(hosts) > 1 else WAIT_ALONE_SECS
        if waits_for != self._waits_for and now_secs >= self._waits_since_secs + shown_after_secs:
            self._waits_for = waits_for
            self._reach.note(f"holdfast run: waiting for {waits_for}")

    def close(self) -> None:
        """End the store of the present generation."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _join(self, host: int, joining: Joining) -> None:
        if host != self._own:
            if self._over is not None:
                self._reach.send(host, self._over)
                return
            self.leave(host)
            self._reach.send(host, Welcome(joining.number))
            if self.newest:
                self._reach.note(f"holdfast run: host {self._reach.name(host)} has joined")
        self._decide(lambda job, now_secs: job.join(host, joining.joined, now_secs))

    def _take_report(self, member: int, report: Report) -> None:
        if member not in self._job:
            return
        match report:
            case rank_link.Ready():
                self._decide(lambda job, now_secs: job.ready(member, now_secs))
            case rank_link.Failed(generation=generation, text=text):
                self._decide(lambda job, now_secs: job.failed(member, generation, text, now_secs))
            case rank_link.Left(generation=generation):
                leave = Leave(report.last_step, report.text, report.kept_step)
                self._decide(lambda job, now_secs: job.left(member, generation, leave, now_secs))
            case rank_link.Finished(generation=generation):
                self._decide(lambda job, now_secs: job.finished(member, generation, now_secs))

    def _decide(self, change: Callable[[Membership, float], Iterable[Effect]]) -> None:
        """Change the membership at the present time, and carry out what follows."""
        if self._over is None:
            for effect in change(self._job, self._clock.monotonic()):
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case membership.Start(member):
                self._send(member, Started(member))
            case membership.Begin():
                self._begin(effect)
            case membership.Break(generation, members):
                self.close()
                for member in members:
                    self._order(member, rank_link.Broken(generation))
            case membership.Kill(member):
                self._send(member, Killed(member))
            case membership.Own(member):
                self._order(member, rank_link.Reraise())
            case membership.Release(has_finished):
                self._end(Over("", has_finished))
            case membership.GiveUp(reason):
                self._end(Over(reason, has_finished=False))

    def _begin(self, begin: membership.Begin) -> None:
        self.close()
        self.newest = max(self.newest, begin.generation)
        self._store = self._reach.open_store()
        self._note_generation(begin)
        for seat in begin.seats:
            order = rank_link.Assigned(
                generation=begin.generation,
                rank=seat.rank,
                world_size=len(begin.seats),
                seat=seat.number,
                store=self._store.address,
                peers=self._reach.peers_of(self._host_of(seat.member)),
                lost=begin.lost,
                kept_step=begin.kept_step,
                survivors=begin.survivors,
            )
            self._order(seat.member, order)

    def _note_generation(self, begin: membership.Begin) -> None:
        ranks = counted(len(begin.seats), "rank")
        if begin.kept_step is not None:
            verbs = ("holds", "saves") if len(begin.seats) == 1 else ("hold", "save")
            self._reach.note(
                f"holdfast run: {ranks} {verbs[0]} step {begin.kept_step} unchanged, and "
                f"{verbs[1]} it"
            )
        elif begin.generation > 1:
            lost = ", ".join(map(str, begin.lost)) or "none"
            self._reach.note(
                f"holdfast run: generation {begin.generation}: {ranks}; lost before: {lost}"
            )

    def _end(self, over: Over) -> None:
        self._over = over
        # The own host last: it ends its processes before it does anything else.
        for host in sorted(self._job.hosts - {self._own}):
            self._reach.send(host, over)
        self._reach.send(self._own, over)

    def _order(self, member: int, order: Order) -> None:
        """Give an order to a process of any host."""
        self._send(member, Ordered(member, order))

    def _send(self, member: int, message: Message) -> None:
        self._reach.send(self._host_of(member), message)

    def _host_of(self, member: int) -> int:
        return member % self._job.settings.hosts
