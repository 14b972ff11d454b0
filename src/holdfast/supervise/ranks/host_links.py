"""Connect the launchers of a job's hosts with each other.

Each pair of hosts has one TCP connection, which the later one in the list of hosts opens, and opens
again. A message is one line of JSON. A host that sends nothing for `SILENT_SECS` is lost: its
connection is closed, so that each other host is either connected or lost.

Nothing is encrypted, and nobody has to prove who he is, as with the store of PyTorch's ranks: it is
for the private network of a job.

See docs/decisions/0071.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from holdfast.clock import Clock
from holdfast.supervise.ranks.host_messages import Hello, Message, Voted
from holdfast.supervise.ranks.leadership import Vote
from holdfast.supervise.ranks.processes import Handler
from holdfast.trainer.process.rank_link import Lines

BEAT_SECS = 1.0
"""How often each launcher sends its vote, which shows that it lives."""
SILENT_SECS = 5.0
"""After how long without a word a host is lost."""
DIAL_SECS, PAUSE_SECS = 2.0, 0.5
"""How long opening a connection may take, and the pause before the next attempt."""
REFUSED_MAX = 20
"""So many refused connections of a connected host show that two launchers have its place."""
SEND_SECS = 2.0
"""How long a message may wait for room in a connection."""


@dataclass(slots=True)
class _Link:
    """A connection to another launcher, whose host is known by its `Hello`."""

    lines: Lines
    heard_secs: float
    dialled: int | None
    """The host to which this one has opened it; None: the other one has opened it."""
    host: int | None = None


@dataclass(slots=True)
class _Peer:
    """Another host."""

    link: _Link | None = None
    addresses: tuple[str, ...] = ()
    refused_count: int = 0
    """How often the host has called while its connection was there."""
    is_wanted: threading.Event = field(default_factory=threading.Event)
    """Set while this host is to open the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCallbacks:
    """What is called on the launcher's thread.

    Attributes:
        on_message: Takes a host and what it has sent.
        on_lost: Takes a host that was there and is lost.
        on_stranger: Takes the `Hello` of a host whose options are others, once for the same ones.
        on_second: Takes the `Hello` of a second launcher with the place of a connected host.
    """

    on_message: Callable[[int, Message], None]
    on_lost: Callable[[int], None]
    on_stranger: Callable[[Hello], None]
    on_second: Callable[[Hello], None]


class HostLinks:
    """The connections of one launcher. Owned by its thread.

    Args:
        hello: The first message that it sends.
        addresses: Host and port of each host's launcher.
        listener: The socket at its own address, which listens.
        selector: Where the connections are registered, each with a `Handler`.
        clock: The clock.
        callbacks: What is called.
    """

    def __init__(
        self,
        hello: Hello,
        addresses: Sequence[tuple[str, int]],
        listener: socket.socket,
        selector: selectors.BaseSelector,
        clock: Clock,
        callbacks: LinkCallbacks,
    ) -> None:
        self._hello = hello
        self._selector = selector
        self._clock = clock
        self._callbacks = callbacks
        self._links: list[_Link] = []
        self._peers = {i: _Peer() for i in range(len(addresses)) if i != hello.host}
        self._listener = listener
        self._dialled: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._strangers: set[str] = set()
        """The options of hosts that stayed outside."""
        self._is_closed = False
        self._next_beat_secs = 0.0
        self._sent_vote: Vote | None = None
        accepts: Handler = (False, self._accept)
        dialled: Handler = (False, self._take_dialled)
        selector.register(listener, selectors.EVENT_READ, accepts)
        selector.register(self._woken, selectors.EVENT_READ, dialled)
        for host, peer in self._peers.items():
            if host < hello.host:
                peer.is_wanted.set()
                name = f"holdfast-host-{host}"
                target = (host, peer, addresses[host])
                threading.Thread(target=self._dial, args=target, name=name, daemon=True).start()

    @property
    def connected(self) -> set[int]:
        """The other hosts that are there."""
        return {host for host, peer in self._peers.items() if peer.link is not None}

    def addresses_but_of(self, host: int) -> tuple[str, ...]:
        """Return the addresses of all hosts that were ever heard of, without those of one."""
        hosts = {i: peer.addresses for i, peer in self._peers.items()}
        hosts[self._hello.host] = self._hello.addresses
        return tuple(a for i, found in hosts.items() if i != host for a in found)

    def send(self, host: int, message: Message) -> None:
        """Send a message, if the host is there."""
        if (link := self._peers[host].link) is not None:
            link.lines.send(message)

    def send_changed(self, vote: Vote) -> None:
        """Send the vote to all hosts, if it is not the one that was sent last."""
        if vote != self._sent_vote:
            self._send_vote(vote)

    def _send_vote(self, vote: Vote) -> None:
        self._sent_vote = vote
        for host in self._peers:
            self.send(host, Voted(vote))

    def beat(self, vote: Callable[[], Vote]) -> None:
        """Send the vote, if that is due, and drop hosts that are silent.

        Args:
            vote: Returns the vote, which may change as a host is dropped.
        """
        now_secs = self._clock.monotonic()
        for link in [*self._links]:
            if now_secs >= link.heard_secs + SILENT_SECS:
                self._drop(link)
        if now_secs >= self._next_beat_secs:
            self._next_beat_secs = now_secs + BEAT_SECS
            self._send_vote(vote())

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        for link in self._links:
            link.lines.connection.close()
        for each in (self._listener, self._waker, self._woken):
            each.close()
        for peer in self._peers.values():
            peer.is_wanted.set()

    def _dial(self, host: int, peer: _Peer, address: tuple[str, int]) -> None:
        """Open the connection to an earlier host whenever there is none; on a thread of its own."""
        while True:
            peer.is_wanted.wait()
            if self._is_closed:
                return
            try:
                connection = socket.create_connection(address, timeout=DIAL_SECS)
            except OSError:
                self._clock.sleep(PAUSE_SECS)
                continue
            peer.is_wanted.clear()
            self._dialled.put((host, connection))
            with contextlib.suppress(OSError):
                self._waker.send(b"+")
            # The other launcher may close it at once, for other settings than ours.
            self._clock.sleep(PAUSE_SECS)

    def _take_dialled(self) -> None:
        self._woken.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                dialled, connection = self._dialled.get_nowait()
                self._add(connection, dialled)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._add(connection, None)

    def _add(self, connection: socket.socket, dialled: int | None) -> None:
        connection.settimeout(SEND_SECS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(Lines(connection, Message), self._clock.monotonic(), dialled)
        self._links.append(link)
        hears: Handler = (False, lambda: self._hear(link))
        self._selector.register(connection, selectors.EVENT_READ, hears)
        link.lines.send(self._hello)

    def _hear(self, link: _Link) -> None:
        if link not in self._links:
            return
        try:
            messages = [*link.lines.receive()]
        except (EOFError, ValueError, RecursionError):
            # Closed, or no message of ours: a string may be no text, and a list too deep.
            self._drop(link)
            return
        link.heard_secs = self._clock.monotonic()
        for message in messages:
            if link not in self._links:
                return
            if isinstance(message, Hello) and link.host is None:
                self._meet(link, message)
            elif link.host is not None:
                self._callbacks.on_message(link.host, message)  # type: ignore[arg-type]

    def _meet(self, link: _Link, hello: Hello) -> None:
        """Take the first message of a connection."""
        peer = self._peers.get(hello.host)
        is_expected = link.dialled == (hello.host if hello.host < self._hello.host else None)
        if peer is None or not is_expected or hello.options != self._hello.options:
            self._drop(link)
            if hello.options not in self._strangers:
                self._strangers.add(hello.options)
                self._callbacks.on_stranger(hello)
            return
        if peer.link is not None:
            # It may be open at this end alone: then it is silent, and the host calls again.
            self._drop(link)
            peer.refused_count += 1
            if peer.refused_count == REFUSED_MAX:
                self._callbacks.on_second(hello)
            return
        peer.link, peer.addresses, peer.refused_count = link, hello.addresses, 0
        link.host = hello.host
        # The vote is due.
        self._next_beat_secs = 0.0

    def _drop(self, link: _Link) -> None:
        """Close a connection; its host, if it is known, is lost."""
        if link not in self._links:
            return
        self._links.remove(link)
        self._selector.unregister(link.lines.connection)
        link.lines.connection.close()
        if link.host is not None and self._peers[link.host].link is link:
            self._peers[link.host].link = None
            self._callbacks.on_lost(link.host)
        if link.dialled is not None:
            self._peers[link.dialled].is_wanted.set()


def addresses_of_host() -> tuple[str, ...]:
    """Return the addresses of this host's network interfaces, without loopback."""
    found = [each for interface in psutil.net_if_addrs().values() for each in interface]
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {each.address.partition("%")[0] for each in found if each.family in families}
    return tuple(sorted(a for a in addresses if not a.startswith("127.") and a != "::1"))


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None: none has."""
    for name, found in psutil.net_if_addrs().items():
        if address in {each.address for each in found}:
            return name
    return None
