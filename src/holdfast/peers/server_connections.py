"""Track peers' connections to an agent: their number, idle time and open objects.

A connection without a request under way ends after `idle_secs`, however slowly it sends one. It
keeps the object open of which it was last sent bytes, until it asks for another one or ends. The
open object keeps its slot from being reused: `sendfile` puts the slot's own pages into the socket,
and bytes that were sent but not yet read by the other end would change with them.
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
    """The limits of what peers may cost. Each piece of an object is sent within `piece_secs`."""

    connection_count_max: int = 64
    idle_secs: float = 10.0
    piece_secs: float = 10.0
    handshake_secs: float = 5.0


class PeerConnections:
    """All connections; owned by the event loop's thread."""

    def __init__(self, limits: PeerLimits) -> None:
        self.limits = limits
        self._made: dict[asyncio.BaseProtocol, ServedConnection] = {}

    def make(self, inner: web.RequestHandler) -> ServedConnection:
        """Return the protocol of a new connection around the one that handles HTTP."""
        self._made[inner] = ServedConnection(inner, self.limits)
        return self._made[inner]

    def forget_connection(self, connection: ServedConnection) -> None:
        """Remove a connection that has ended, or was never established."""
        self._made.pop(connection.inner, None)

    def connection_of(self, request: web.BaseRequest) -> ServedConnection:
        """Return the connection of a request."""
        return self._made[request.protocol]

    def abort_all(self) -> None:
        """End all connections at once."""
        for connection in list(self._made.values()):
            connection.close_at_once()


class ServedConnection(asyncio.Protocol):
    """One connection; passes received data on to `inner`."""

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
        self._start_idle_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_idle_timer()
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
        """Suspend the idle timer while a request is under way; its waits have their own bounds."""
        self._stop_idle_timer()
        try:
            yield
        finally:
            if self._transport is not None:
                self._start_idle_timer()

    async def open_held(
        self, key: str, tag: str | None, open_object: Callable[[], Opened]
    ) -> SlotReader:
        """Return the object of `key`, and keep it open.

        An object with this tag that the connection has open already is returned even if it was
        deleted.

        Raises:
            ConnectionResetError: the connection ended while the object was opened; it is closed.
        """
        if self._reader is None or self._key != key or object_tag(self._reader) != tag:
            self.release()
            loop = asyncio.get_running_loop()
            opening = loop.run_in_executor(None, open_object)
            # A cancelled request cannot stop the thread: it closes the object once it is open.
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
        """Close the object that is held open."""
        self._key, self._reader = "", None
        self._held.close()

    def close_at_once(self) -> None:
        """End the connection without sending the rest; not called during a `sendfile`."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    def _start_idle_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._limits.idle_secs, self.close_at_once)

    def _stop_idle_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


def object_tag(reader: SlotReader) -> str:
    """Return a tag that distinguishes an open object from a later one of the same key."""
    state = os.fstat(reader.fd)
    return f'"{state.st_ino:x}-{state.st_size:x}"'


def _close(opening: asyncio.Future[Opened]) -> None:
    """Close the object that was opened for a cancelled request."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()
