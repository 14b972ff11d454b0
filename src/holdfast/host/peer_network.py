"""Connect the agent to the run's other hosts: server, message sender and addresses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.coordination.inputs import Received
from holdfast.coordination.messages import AnyMessage
from holdfast.errors import HoldfastError
from holdfast.host.control_block import next_incarnation
from holdfast.host.coordinator import Coordinator
from holdfast.host.state import AgentState
from holdfast.observe.events.schema import PeersUnavailable
from holdfast.observe.run_status import HostStatus, encode_status
from holdfast.peers.address import PeerAddress
from holdfast.peers.config import PeerConfig, listen, read_token
from holdfast.peers.directory import PeerDirectory
from holdfast.peers.tls import client_context, server_context
from holdfast.store.file_system import FileSystem
from holdfast.store.ram import RamStore

if TYPE_CHECKING:
    from holdfast.peers.sender import MessageSender
    from holdfast.peers.server import PeerServer

log = logging.getLogger(__name__)


class PeerNetwork:
    """The agent's peer server and message sender; both are absent if no peers are configured.

    If the agent cannot serve peers, it reports that once, and the run continues with this host
    alone in its RAM.
    """

    def __init__(self, state: AgentState, files: FileSystem) -> None:
        self._state = state
        self._files = files
        self._config = state.config.peers
        self._token: str | None = None
        self._server: PeerServer | None = None
        self._messenger: MessageSender | None = None
        if self._config is not None:
            try:
                self._token = read_token(self._config.token_file)
            except HoldfastError as error:
                self._report(error)
        tls = self._config.tls if self._config is not None else None
        self.peers = PeerDirectory(state.config.run_id, state.clock, self._token, tls)

    def open(
        self,
        coordinator: Coordinator,
        own_status: Callable[[], HostStatus],
    ) -> None:
        """Serve from now on; received messages are submitted to the coordination."""
        if self._config is None or self._token is None:
            return
        try:
            self._open(coordinator, own_status, self._config, self._token)
        except HoldfastError as error:
            self._report(error)

    def _open(
        self,
        coordinator: Coordinator,
        own_status: Callable[[], HostStatus],
        config: PeerConfig,
        token: str,
    ) -> None:
        # aiohttp is loaded only where peers are served: a third of an agent's start without peers.
        from holdfast.peers.sender import MessageSender, Sender
        from holdfast.peers.server import PeerServer, ServedRun

        state = self._state
        loop = asyncio.get_running_loop()

        def received(
            sender: str, address: PeerAddress, message: AnyMessage, others: dict[str, PeerAddress]
        ) -> None:
            # A host's report of its own address is taken as it is; reports about other hosts only
            # where they are newer.
            coordinator.reached(sender, address)
            coordinator.update_addresses(others)
            self.peers.note_message(sender)
            coordinator.submit(Received(sender, message))

        def deliver(
            sender: str, address: PeerAddress, message: AnyMessage, others: dict[str, PeerAddress]
        ) -> None:
            loop.call_soon_threadsafe(received, sender, address, message, others)

        async def encoded() -> bytes:
            return encode_status(own_status())

        def status() -> Awaitable[bytes]:
            # Called in the server's thread; the status reads state that this loop owns.
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(encoded(), loop))

        served = ServedRun(
            # A separate store, because the server's thread uses it.
            store=RamStore(state.ram.root, state.pool.reserve, state.clock, self._files),
            run_id=state.config.run_id,
            token=token,
            tls=server_context(config.tls) if config.tls is not None else None,
            deliver=deliver,
            serves=lambda attempt: coordinator.node.serves(attempt),
            status=status,
        )
        self._server = PeerServer(served, listen(config.address, config.port))
        since = next_incarnation(state.control.cells, state.clock.now())
        address = replace(self._server.address, since=since)
        state.peer_address = str(address)
        log.info("serves peers at %s", address)
        self._messenger = MessageSender(
            Sender(
                host=state.config.host,
                address=address,
                hosts=self.peers.hosts_text,
                run_id=state.config.run_id,
                token=token,
                tls=client_context(config.tls) if config.tls is not None else None,
            )
        )
        self.peers.attempt = lambda: coordinator.node.attempt
        coordinator.send_by(self._messenger)

    async def close(self) -> None:
        """End all connections."""
        if self._messenger is not None:
            await self._messenger.close()
        if self._server is not None:
            self._server.close()

    def _report(self, error: HoldfastError) -> None:
        log.warning("cannot serve peers: %s", error)
        self._state.events.write(PeersUnavailable(reason=str(error)))
