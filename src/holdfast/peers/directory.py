"""Keep the addresses of the run's other hosts as this agent knows them, and their RAM stores."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.clock import Clock
from holdfast.errors import StorageError
from holdfast.format.names import NO_ATTEMPT, AttemptId
from holdfast.peers.address import PeerAddress
from holdfast.peers.tls import PeerTls
from holdfast.peers.wire import hosts_text

if TYPE_CHECKING:
    from holdfast.peers.store import PeerStore


class PeerDirectory:
    """The known hosts; thread-safe. Without a `token` this host has no peers.

    `leaders` are the hosts that lead or would lead: their stores have the records that all hosts
    need.
    """

    def __init__(
        self, run_id: str, clock: Clock, token: str | None = None, tls: PeerTls | None = None
    ) -> None:
        self.run_id = run_id
        self._clock = clock
        self.token = token
        self.tls = tls
        self._lock = threading.Lock()
        self._addresses: dict[str, PeerAddress] = {}
        self._stores: dict[str, PeerStore] = {}
        self._cached_text = -1, ""
        self._last_message_secs: dict[str, float] = {}
        self.version = 0
        """Grows with each address that changes."""
        self.leaders: tuple[str, ...] = ()
        self.silence_secs = math.inf
        """How long a host may send nothing before it is no longer asked for records."""
        self.attempt: Callable[[], AttemptId] = lambda: NO_ATTEMPT
        """The newest attempt known here: a host that knows a newer one does not serve this one."""

    def update_address(self, host: str, address: PeerAddress) -> None:
        """Set the address of a host's agent."""
        with self._lock:
            if self._addresses.get(host) == address:
                return
            self._addresses[host] = address
            self.version += 1
            old = self._stores.pop(host, None)
        if old is not None:
            old.close()

    def forget(self, host: str) -> None:
        """Remove the address of a host."""
        with self._lock:
            if self._addresses.pop(host, None) is not None:
                self.version += 1
            old = self._stores.pop(host, None)
        if old is not None:
            old.close()

    def hosts_text(self) -> str:
        """Return the addresses of the known hosts as the header of a message."""
        with self._lock:
            if self._cached_text[0] != self.version:
                self._cached_text = self.version, hosts_text(self._addresses)
            return self._cached_text[1]

    def note_message(self, host: str) -> None:
        """Record that a message of that host has just arrived."""
        with self._lock:
            self._last_message_secs[host] = self._clock.monotonic()

    def silent_secs(self) -> dict[str, float]:
        """Return the time since the last message of each host, of those that have sent any."""
        with self._lock:
            now_secs = self._clock.monotonic()
            return {host: now_secs - at_secs for host, at_secs in self._last_message_secs.items()}

    def addresses(self) -> dict[str, PeerAddress]:
        """Return the address of each known host."""
        with self._lock:
            return dict(self._addresses)

    def store_of(self, host: str) -> PeerStore:
        """Return the store of a host's RAM.

        Raises:
            StorageError: the host's address is not known, or this host has no peers.
        """
        # Loaded with the first peer: a host alone needs no HTTP client.
        from holdfast.peers.client import PeerAccess
        from holdfast.peers.store import PeerStore

        with self._lock:
            store, address = self._stores.get(host), self._addresses.get(host)
            if store is None:
                if address is None or self.token is None:
                    raise StorageError(f"read the memory of host {host}: its address is not known")
                access = PeerAccess(
                    address=address,
                    run_id=self.run_id,
                    token=self.token,
                    tls=self.tls,
                    # Looked up at each request, because `attempt` is set after the construction.
                    attempt=lambda: self.attempt(),
                )
                store = self._stores[host] = PeerStore(access, self._clock)
            return store

    def is_leader_silent(self) -> bool:
        """Return whether the host of rank 0 has sent messages, and none for `silence_secs`."""
        silent = self.silent_secs()
        return bool(self.leaders) and silent.get(self.leaders[0], 0.0) >= self.silence_secs

    def leading_stores(self) -> Iterator[PeerStore]:
        """Yield the stores of the known hosts that lead or would, rank 0's first.

        While rank 0's host is silent, only hosts whose messages arrive are asked: a request to a
        host that cannot be reached takes seconds.
        """
        addresses, silent, asks_all = (
            self.addresses(),
            self.silent_secs(),
            not self.is_leader_silent(),
        )
        for host in self.leaders:
            if host in addresses and (asks_all or silent.get(host, math.inf) < self.silence_secs):
                yield self.store_of(host)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            stores = list(self._stores.values())
            self._stores.clear()
        for store in stores:
            store.close()
