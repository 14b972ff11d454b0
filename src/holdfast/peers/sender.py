"""Send messages to the run's other agents: HTTP POSTs, each sent once and answered without content.

Messages are whole states (`holdfast.coordination.messages`), so only the newest report and the
newest orders wait for a slow host. Nothing is sent again: a lost message costs the time until the
next one. The caller never waits: a host that does not answer costs one task, for at most
`SEND_SECS` per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from holdfast.coordination.messages import AnyMessage, Orders, Report, encode_message
from holdfast.peers.address import PeerAddress
from holdfast.peers.requests import open_session, url_of
from holdfast.peers.wire import ADDRESS_HEADER, HOSTS_HEADER, MESSAGES, target_of

SEND_SECS = 5.0
PAUSE_SECS = 0.2
"""The pause after a failure: a host that refuses at once must not be asked in a busy loop."""
TLS_CLOSE_SECS = 0.25
WAITING_MAX = 64
"""How many messages may wait for one host; beyond that the oldest is dropped."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The sending host, its run and its credentials. `address` is where it receives answers.

    `hosts` returns the addresses of other hosts, which each message passes on.
    """

    host: str
    address: PeerAddress
    run_id: str
    token: str = field(repr=False)
    tls: ssl.SSLContext | None = None
    hosts: Callable[[], str] = lambda: ""


class MessageSender:
    """The queues and tasks of one agent; owned by its event loop."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._addresses: dict[str, PeerAddress] = {}
        self._waiting: dict[str, deque[AnyMessage]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    def update_address(self, host: str, address: PeerAddress) -> None:
        """Set the address of a host's agent."""
        self._addresses[host] = address

    def forget(self, host: str) -> None:
        """Remove the address of a host; its waiting messages are dropped."""
        self._addresses.pop(host, None)
        if host in self._waiting:
            self._waiting[host].clear()

    def addresses(self) -> dict[str, PeerAddress]:
        """Return the address of each known host."""
        return dict(self._addresses)

    @property
    def is_idle(self) -> bool:
        """Whether no message waits or is being delivered."""
        return not self._tasks

    def send(self, host: str, message: AnyMessage) -> None:
        """Queue a message; it may be lost."""
        if host not in self._addresses:
            log.debug("dropped a message to %s: its address is not known", host)
            return
        waiting = self._waiting.setdefault(host, deque(maxlen=WAITING_MAX))
        if isinstance(message, Report | Orders):
            # A newer state replaces the older ones that wait.
            for older in [m for m in waiting if type(m) is type(message)]:
                waiting.remove(older)
        waiting.append(message)
        if host not in self._tasks:
            self._tasks[host] = asyncio.create_task(self._deliver(host, waiting))

    async def close(self) -> None:
        """End all sending; waiting messages are dropped."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            if self._sender.tls is not None:
                # The library's documentation: an encrypted connection needs a moment to close.
                await asyncio.sleep(TLS_CLOSE_SECS)

    async def _deliver(self, host: str, waiting: deque[AnyMessage]) -> None:
        try:
            while waiting:
                message = waiting.popleft()
                address = self._addresses.get(host)
                # The host was forgotten while the message waited.
                if address is None:
                    continue
                try:
                    async with asyncio.timeout(SEND_SECS):
                        await self._post(address, message)
                except (aiohttp.ClientError, OSError) as error:
                    log.debug("lost a message to %s: %s", host, error or "no answer in time")
                    await asyncio.sleep(PAUSE_SECS)
        finally:
            del self._tasks[host]

    async def _post(self, address: PeerAddress, message: AnyMessage) -> None:
        sender = self._sender
        if self._session is None:
            self._session = open_session(sender.token, per_host_max=1)
        target = target_of(sender.run_id, MESSAGES, sender.host)
        url = url_of(address, target, sender.tls)
        headers = {ADDRESS_HEADER: str(sender.address), HOSTS_HEADER: sender.hosts()}
        async with self._session.post(
            url, data=encode_message(message), headers=headers, ssl=sender.tls or True
        ) as answer:
            if answer.status != 204:
                with contextlib.suppress(UnicodeDecodeError):
                    reason = (await answer.content.read(500)).decode()
                    raise aiohttp.ClientResponseError(
                        answer.request_info, (), status=answer.status, message=reason
                    )
