"""Messages to the run's other agents: HTTP POSTs, each sent once and answered with nothing.

Agents tell states (`holdfast.coordination.messages`), so of reports and of orders only the
newest one waits for a host that is slow. Nothing is sent again: what is lost costs the time until
the next one is told. Nobody waits here: a host that does not answer costs one task, for as long as
`SEND_SECS`.
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
from holdfast.peers.wire import ADDRESS_HEADER, HOSTS_HEADER, MESSAGES, target_of

SEND_SECS = 5.0
PAUSE_SECS = 0.2
"""After a failure: a host that refuses at once must not be asked without end."""
TLS_CLOSE_SECS = 0.25
CONNECTIONS_MAX = 256
WAITING_MAX = 64
"""The messages that wait for one host; beyond that the oldest is lost."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Who sends, for which run, and what it shows. `address` is where it is answered.

    `hosts` tells where other hosts are reached, which each message tells on.
    """

    host: str
    address: PeerAddress
    run_id: str
    token: str = field(repr=False)
    tls: ssl.SSLContext | None = None
    hosts: Callable[[], str] = lambda: ""


class MessageSender:
    """Owned by the agent's event loop."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._addresses: dict[str, PeerAddress] = {}
        self._waiting: dict[str, deque[AnyMessage]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    def update_address(self, host: str, address: PeerAddress) -> None:
        """That host's agent is reached there, from now on."""
        self._addresses[host] = address

    def forget(self, host: str) -> None:
        """Remove the address of a host; what waits for it is lost."""
        self._addresses.pop(host, None)
        if host in self._waiting:
            self._waiting[host].clear()

    def addresses(self) -> dict[str, PeerAddress]:
        """Where each host that is known is reached."""
        return dict(self._addresses)

    def send(self, host: str, message: AnyMessage) -> None:
        """Sends a message as soon as those before it are sent; it may be lost."""
        if host not in self._addresses:
            log.debug("a message to %s is lost: nobody knows where it is", host)
            return
        waiting = self._waiting.setdefault(host, deque(maxlen=WAITING_MAX))
        if isinstance(message, Report | Orders):
            for older in [m for m in waiting if type(m) is type(message)]:
                waiting.remove(older)
        waiting.append(message)
        if host not in self._tasks:
            self._tasks[host] = asyncio.create_task(self._deliver(host, waiting))

    async def close(self) -> None:
        """Ends all sending; what waits is lost."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            if self._sender.tls is not None:
                # The library's docs: an encrypted connection takes a moment to end.
                await asyncio.sleep(TLS_CLOSE_SECS)

    async def _deliver(self, host: str, waiting: deque[AnyMessage]) -> None:
        try:
            while waiting:
                message = waiting.popleft()
                address = self._addresses.get(host)
                if address is None:
                    continue
                try:
                    async with asyncio.timeout(SEND_SECS):
                        await self._post(address, message)
                except (aiohttp.ClientError, OSError) as error:
                    log.debug("a message to %s is lost: %s", host, error or "no answer in time")
                    await asyncio.sleep(PAUSE_SECS)
        finally:
            del self._tasks[host]

    async def _post(self, address: PeerAddress, message: AnyMessage) -> None:
        sender = self._sender
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX, limit_per_host=1)
            self._session = aiohttp.ClientSession(connector=connector)
        scheme = "https" if sender.tls is not None else "http"
        url = f"{scheme}://{address.authority}{target_of(sender.run_id, MESSAGES, sender.host)}"
        headers = {
            "Authorization": f"Bearer {sender.token}",
            ADDRESS_HEADER: str(sender.address),
            HOSTS_HEADER: sender.hosts(),
        }
        async with self._session.post(
            url, data=encode_message(message), headers=headers, ssl=sender.tls or True
        ) as answer:
            if answer.status != 204:
                with contextlib.suppress(UnicodeDecodeError):
                    told = (await answer.content.read(500)).decode()
                    raise aiohttp.ClientResponseError(
                        answer.request_info, (), status=answer.status, message=told
                    )
