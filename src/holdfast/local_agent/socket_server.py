"""The server of the agent's Unix socket: connections, their bounds, and how they end.

It serves the processes of its own user alone; the kernel vouches for the user. A connection has one
request at a time. Between requests it may be idle for as long as it likes. Once a request has
begun, its head and its body each have to arrive within a bound. No connection, whatever it sends,
delays another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from holdfast.local_agent.http_format import (
    HEAD_END,
    HEAD_SIZE_MAX_BYTES,
    HttpFormatError,
    RequestHead,
    answer,
    parse_request,
)
from holdfast.local_agent.place import SOCKET, peer, socket_address

BACKLOG = 128
DRAIN_SIZE_BYTES = 64 * 1024

Respond = Callable[[str, bytes, int], Awaitable[tuple[int, bytes]]]
"""Takes the name, the body and the caller's pid; returns the status and the body."""

log = logging.getLogger(__name__)


class SocketServer:
    """Owned by the event loop. `names` are the calls that there are; others are refused unread."""

    def __init__(
        self,
        names: frozenset[str],
        respond: Respond,
        refusal: Callable[[str], bytes],
        body_secs: float,
    ) -> None:
        self._names = names
        self._respond = respond
        self._refusal = refusal
        self._body_secs = body_secs
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def connection_count(self) -> int:
        """How many connections are open, idle ones too."""
        return len(self._connections)

    async def listen_in(self, folder: Path) -> None:
        """Begin to accept connections on a new socket in an agent's folder."""
        (folder / SOCKET).unlink(missing_ok=True)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(socket_address(folder_fd))
        finally:
            os.close(folder_fd)
        (folder / SOCKET).chmod(0o600)
        await self.start(listener)

    async def start(self, listener: socket.socket) -> None:
        """Begin to accept connections on a socket that is bound."""
        self._server = await asyncio.start_unix_server(
            self._accept, sock=listener, limit=HEAD_SIZE_MAX_BYTES, backlog=BACKLOG
        )

    async def close(self, grace_secs: float) -> None:
        """End all connections; calls that are being answered get `grace_secs` to end."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        if self._busy:
            await asyncio.wait(self._busy, timeout=grace_secs)
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            pid, uid = peer(writer.get_extra_info("socket"))
            if uid != os.geteuid():
                reason = f"this agent serves user {os.geteuid()}, not user {uid}"
                await self._refuse(reader, writer, 403, reason)
                return
            while not self._is_closing and await self._exchange(reader, writer, pid, task):
                self._busy.discard(task)
        except (OSError, EOFError):
            # The other end has gone, with or without the rest of its request.
            pass
        finally:
            self._busy.discard(task)
            writer.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pid: int,
        task: asyncio.Task[None],
    ) -> bool:
        """Answer one request; return whether the connection can take another one."""
        try:
            head = await self._read_head(reader)
        except HttpFormatError as error:
            await self._refuse(reader, writer, 400, str(error))
            return False
        if head is None:
            return False
        if head.name not in self._names:
            await self._refuse(reader, writer, 404, f"there is no call {head.name!r}")
            return False
        if head.method != "POST":
            await self._refuse(reader, writer, 405, f"expected POST, found {head.method}")
            return False
        try:
            async with asyncio.timeout(self._body_secs):
                body = await reader.readexactly(head.size_bytes)
        except TimeoutError:
            reason = f"/{head.name}: its body did not arrive within {self._body_secs} s"
            await self._refuse(reader, writer, 400, reason)
            return False
        self._busy.add(task)
        status, data = await self._answered(head, body, pid)
        writer.write(answer(status, data, keeps_open=head.keeps_open))
        await writer.drain()
        return head.keeps_open

    async def _read_head(self, reader: asyncio.StreamReader) -> RequestHead | None:
        """Read the head of a request; None where none comes, or not all of it in time."""
        first = await reader.read(1)
        if not first:
            return None
        try:
            async with asyncio.timeout(self._body_secs):
                head = first + await reader.readuntil(HEAD_END)
        except TimeoutError:
            return None
        except asyncio.LimitOverrunError as error:
            raise HttpFormatError(
                f"expected at most {HEAD_SIZE_MAX_BYTES} bytes of header"
            ) from error
        return parse_request(head.removesuffix(HEAD_END))

    async def _answered(self, head: RequestHead, body: bytes, pid: int) -> tuple[int, bytes]:
        try:
            return await self._respond(head.name, body, pid)
        except Exception:
            # The top of a connection's task: a defect ends this call and not the agent.
            log.exception("call %s of process %d failed", head.name, pid)
            return 500, self._refusal(f"{head.name}: failed; see the agent's log")

    async def _refuse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, reason: str
    ) -> None:
        """Answer a request that is not read whole, which ends the connection."""
        writer.write(answer(status, self._refusal(reason), keeps_open=False))
        # Closing at once would make the other end fail to send, and so not read the answer.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._body_secs):
                await writer.drain()
                writer.write_eof()
                while await reader.read(DRAIN_SIZE_BYTES):
                    pass
