"""Connect the agent to the run's other hosts: addresses, server and message sender."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.coordination.inputs import Received
from holdfast.coordination.messages import AnyMessage
from holdfast.errors import HoldfastError
from holdfast.format.names import AttemptId
from holdfast.host.driver.agent_run import AgentRun
from holdfast.observe.events.schema import PeersUnavailable
from holdfast.observe.run_status import HostStatus, encode_status
from holdfast.peers.address import PeerAddress
from holdfast.peers.config import PeerConfig, listen, read_token
from holdfast.peers.directory import PeerDirectory
from holdfast.peers.tls import client_context, server_context
from holdfast.store.ram import RamStore

if TYPE_CHECKING:
    from holdfast.peers.sender import MessageSender
    from holdfast.peers.server import PeerServer
    from holdfast.peers.store import PeerStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedHost:
    """What the agent serves to other hosts, and who takes their messages.

    Attributes:
        store: this host's RAM, for the server's thread alone.
        since: the number of this start of the agent, by which hosts order its addresses.
        submit: takes the messages.
        attempt: returns the newest attempt known here; called in the server's thread.
        status: returns the status of this host.
    """

    store: RamStore
    since: int
    submit: Callable[[Received], None]
    attempt: Callable[[], AttemptId]
    status: Callable[[], HostStatus]


class PeerNetwork:
    """The agent's peer server and message sender; both are absent if no peers are configured.

    If the agent cannot serve peers, it reports that once, and the run continues with this host
    alone in its RAM.

    Attributes:
        peers: the addresses of the other hosts, and their RAM.
        address: where this agent is served; None if it is not.
    """

    def __init__(self, run: AgentRun) -> None:
        self._run = run
        self._config = run.config.peers
        self._token: str | None = None
        self._server: PeerServer | None = None
        self._messenger: MessageSender | None = None
        self.address: PeerAddress | None = None
        if self._config is not None:
            try:
                self._token = read_token(self._config.token_file)
            except HoldfastError as error:
                self._report(error)
        tls = self._config.tls if self._config is not None else None
        self.peers = PeerDirectory(run.config.run_id, run.clock, self._token, tls)

    def open(self, served: ServedHost) -> None:
        """Serve from now on; received messages are submitted to the coordination."""
        if self._config is None or self._token is None:
            return
        try:
            self._open(served, self._config, self._token)
        except HoldfastError as error:
            self._report(error)

    def send(self, host: str, message: AnyMessage) -> None:
        """Send a message to another host once, without waiting for it."""
        if self._messenger is not None:
            self._messenger.send(host, message)

    def update_addresses(self, addresses: Mapping[str, PeerAddress]) -> None:
        """Take reported addresses of other hosts' agents; the newest address of each counts."""
        present = self.peers.addresses()
        for host, address in addresses.items():
            if host not in present or address.since > present[host].since:
                self.reached(host, address)

    def reached(self, host: str, address: PeerAddress) -> None:
        """Take the address of a host's agent, as that agent reports it."""
        if host != self._run.config.host:
            self.peers.update_address(host, address)
            if self._messenger is not None:
                self._messenger.update_address(host, address)

    def restore_address(self, host: str, before: PeerAddress | None) -> None:
        """Replace a host's address by `before`, the one known earlier; None: there was none."""
        if before is not None:
            self.reached(host, before)
            return
        self.peers.forget(host)
        if self._messenger is not None:
            self._messenger.forget(host)

    def stores(self) -> list[PeerStore]:
        """Return the RAM stores of all known hosts."""
        return [self.peers.store_of(host) for host in sorted(self.peers.addresses())]

    def _open(self, served: ServedHost, config: PeerConfig, token: str) -> None:
        # aiohttp is loaded only where peers are served: a third of an agent's start without peers.
        from holdfast.peers.sender import MessageSender, Sender
        from holdfast.peers.server import PeerServer, ServedRun

        run_id = self._run.config.run_id
        loop = asyncio.get_running_loop()

        def received(
            sender: str, address: PeerAddress, message: AnyMessage, others: dict[str, PeerAddress]
        ) -> None:
            # A host's report of its own address is taken as it is; reports about other hosts only
            # where they are newer.
            self.reached(sender, address)
            self.update_addresses(others)
            self.peers.note_message(sender)
            served.submit(Received(sender, message))

        def deliver(
            sender: str, address: PeerAddress, message: AnyMessage, others: dict[str, PeerAddress]
        ) -> None:
            loop.call_soon_threadsafe(received, sender, address, message, others)

        async def encoded() -> bytes:
            return encode_status(served.status())

        def status() -> Awaitable[bytes]:
            # Called in the server's thread; the status reads state that this loop owns.
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(encoded(), loop))

        served_run = ServedRun(
            store=served.store,
            run_id=run_id,
            token=token,
            tls=server_context(config.tls) if config.tls is not None else None,
            deliver=deliver,
            # A host that knows a newer attempt reads nothing here.
            serves=lambda attempt: attempt >= served.attempt(),
            status=status,
        )
        self._server = PeerServer(served_run, listen(config.address, config.port))
        self.address = replace(self._server.address, since=served.since)
        log.info("serves peers at %s", self.address)
        self._messenger = MessageSender(
            Sender(
                host=self._run.config.host,
                address=self.address,
                hosts=self.peers.hosts_text,
                run_id=run_id,
                token=token,
                tls=client_context(config.tls) if config.tls is not None else None,
            )
        )
        self.peers.attempt = served.attempt
        for host, address in self.peers.addresses().items():
            self._messenger.update_address(host, address)

    async def close(self) -> None:
        """End all connections."""
        if self._messenger is not None:
            await self._messenger.close()
        if self._server is not None:
            self._server.close()

    def _report(self, error: HoldfastError) -> None:
        log.warning("cannot serve peers: %s", error)
        self._run.events.write(PeersUnavailable(reason=str(error)))
