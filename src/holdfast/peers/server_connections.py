"""The connections of peers to an agent: how many, how long they may rest, what they hold open.

A connection without a request under way ends after a while, however slowly it sends one. It keeps
open the object that it was last sent bytes of, until it asks for another one or ends. That is what
keeps the object's slot from being filled anew: `sendfile` puts the slot's own pages into the
socket, and what was sent but not yet read by the other end would change with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aiohttp import web

from holdfast.store.ram import SlotReader

Opened = tuple[SlotReader, contextlib.ExitStack]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """What one peer may cost. A piece of an object has to be taken within `piece_secs`."""

    connection_count_max: int = 64
    idle_secs: float = 10.0
    piece_secs: float = 10.0
    handshake_secs: float = 5.0


class PeerConnections:
    """All connections; of the event loop's thread."""

    def __init__(self, limits: PeerLimits) -> None:
        self.limits = limits
        self._made: dict[asyncio.BaseProtocol, ServedConnection] = {}

    def make(self, inner: web.RequestHandler) -> ServedConnection:
        """The protocol of a new connection around the one that speaks HTTP."""
        self._made[inner] = ServedConnection(inner, self.limits)
        return self._made[inner]

    def forget_connection(self, connection: ServedConnection) -> None:
        """Of a connection that ended, or never came to be."""
        self._made.pop(connection.inner, None)

    def connection_of(self, request: web.BaseRequest) -> ServedConnection:
        """The connection on which a request came."""
        return self._made[request.protocol]

    def abort_all(self) -> None:
        """Ends all, at once."""
        for connection in list(self._made.values()):
            connection.close_at_once()


class ServedConnection(asyncio.Protocol):
    """One connection; passes on to `inner` what comes."""

    def __init__(self, inner: web.RequestHandler, limits: PeerLimits) -> None:
        self.inner = inner
        self.ended = asyncio.Event()
        self._limits = limits
        self._transport: asyncio.BaseTransport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._key = ""
        self._held = contextlib.ExitStack()
        self._reader: SlotReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.inner.connection_made(transport)
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wake()
        self.release()
        self._transport = None
        self.ended.set()
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        self.inner.eof_received()
        return None

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While a request is under way; what it waits for has bounds of its own."""
        self._wake()
        try:
            yield
        finally:
            if self._transport is not None:
                self._rest()

    async def hold(
        self, key: str, tag: str | None, open_object: Callable[[], Opened]
    ) -> SlotReader:
        """The object of `key`; one that this connection has open, deleted or not, by its tag."""
        if self._reader is None or self._key != key or object_tag(self._reader) != tag:
            self.release()
            loop = asyncio.get_running_loop()
            opening = loop.run_in_executor(None, open_object)
            try:
                reader, stack = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_close)
                raise
            if self._transport is None:
                stack.close()
                raise ConnectionResetError("the connection ended while an object was opened")
            self._key, self._reader, self._held = key, reader, stack
        return self._reader

    def release(self) -> None:
        """Lets go of what it holds open."""
        self._key, self._reader = "", None
        self._held.close()

    def close_at_once(self) -> None:
        """Ends the connection at once, whatever is still to be sent; not while `sendfile` does."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._limits.idle_secs, self.close_at_once)

    def _wake(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


def object_tag(reader: SlotReader) -> str:
    """Tells an open object from another one that has its key."""
    state = os.fstat(reader.fd)
    return f'"{state.st_ino:x}-{state.st_size:x}"'


def _close(opening: asyncio.Future[Opened]) -> None:
    """Closes what was opened for a request that was given up meanwhile."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()
