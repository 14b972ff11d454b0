"""The run's other hosts, as this agent knows them: where each is reached, and its RAM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.clock import Clock
from holdfast.errors import StorageError
from holdfast.peers.address import PeerAddress
from holdfast.peers.tls import PeerTls
from holdfast.peers.wire import hosts_text

if TYPE_CHECKING:
    from holdfast.peers.store import PeerStore


class PeerDirectory:
    """Any thread may ask. Without a `token` this host has no peers.

    `leaders` are the hosts that lead or would: what all hosts need stands with them.
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
        self._told = -1, ""
        self._heard_at_secs: dict[str, float] = {}
        self.version = 0
        """Grows with each address that is another one than before."""
        self.leaders: tuple[str, ...] = ()
        self.attempt: Callable[[], int] = lambda: 0
        """The newest attempt that is known here: who knows of a newer one serves nobody older."""

    def update_address(self, host: str, address: PeerAddress) -> None:
        """That host's agent is reached there, from now on."""
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
        """Where the known hosts are reached, as messages tell it on."""
        with self._lock:
            if self._told[0] != self.version:
                self._told = self.version, hosts_text(self._addresses)
            return self._told[1]

    def note_heard(self, host: str) -> None:
        """A word of that host came just now."""
        with self._lock:
            self._heard_at_secs[host] = self._clock.monotonic()

    def silent_secs(self) -> dict[str, float]:
        """How long ago the last word came of each host that said any here."""
        with self._lock:
            now_secs = self._clock.monotonic()
            return {host: now_secs - at_secs for host, at_secs in self._heard_at_secs.items()}

    def addresses(self) -> dict[str, PeerAddress]:
        """Where each known host is reached."""
        with self._lock:
            return dict(self._addresses)

    def store_of(self, host: str) -> PeerStore:
        """A host's RAM.

        Raises:
            StorageError: nobody knows where it is.
        """
        # Loaded with the first peer: a host alone needs no HTTP client.
        from holdfast.peers.client import PeerAccess
        from holdfast.peers.store import PeerStore

        with self._lock:
            found, address = self._stores.get(host), self._addresses.get(host)
            if found is None:
                if address is None or self.token is None:
                    raise StorageError(f"read the memory of host {host}: where it is is not known")
                access = PeerAccess(
                    address=address,
                    run_id=self.run_id,
                    token=self.token,
                    tls=self.tls,
                    attempt=lambda: self.attempt(),
                )
                found = self._stores[host] = PeerStore(access, self._clock)
            return found

    def leading_stores(self) -> Iterator[PeerStore]:
        """The memory of the hosts that lead, the first one first; those that are known."""
        known = self.addresses()
        for host in self.leaders:
            if host in known:
                yield self.store_of(host)

    def close(self) -> None:
        """Closes the connections that nobody uses."""
        with self._lock:
            stores = list(self._stores.values())
            self._stores.clear()
        for store in stores:
            store.close()
