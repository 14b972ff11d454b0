"""Serve an agent's RAM tier over HTTP, read-only, to the run's other agents; take messages.

A request is checked in this order: token, method, target, run; a client without the token learns
nothing of the rest. Only objects of the tier can be named, never the slots and nothing outside
(`holdfast.peers.wire`). Bytes are sent by `sendfile`; TLS has to encrypt them, so there they are
copied.

The server has its own thread and event loop, so that peers never delay the trainers. Everything but
`close` and `address` belongs to that thread. A peer costs no more than `PeerLimits` allows.

See docs/decisions/0009.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from holdfast.coordination.messages import MESSAGE_BYTES_MAX, AnyMessage, decode_message
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.format.names import EXCHANGE, NO_ATTEMPT, AttemptId, parse_attempt_id
from holdfast.peers.address import PeerAddress, parse_address
from holdfast.peers.server_connections import (
    Opened,
    PeerConnections,
    PeerLimits,
    ServedConnection,
    object_tag,
)
from holdfast.peers.wire import (
    ADDRESS_HEADER,
    ATTEMPT_HEADER,
    ERROR_HEADER,
    HOSTS_HEADER,
    MESSAGES,
    NAMES,
    NAMES_SIZE_MAX_BYTES,
    STATUS,
    HttpRefusal,
    ObjectNames,
    check_token,
    content_range,
    parse_hosts,
    parse_range,
    parse_target,
)
from holdfast.store.ram import RamStore, SlotReader
from holdfast.store.slots import SLOTS

PIECE_SIZE_BYTES = 8 * 1024 * 1024
COPIED_SIZE_BYTES = 1024 * 1024
HEADER_SIZE_MAX_BYTES = 8190
ACCEPT_AGAIN_SECS = 0.1
KEEPALIVE_SECS = 3600.0
START_SECS = 10.0
STATUS_SECS = 2.0
SHUTDOWN_SECS = 0.2
CLOSE_SECS = 10.0

log = logging.getLogger(__name__)
http_log = logging.getLogger(f"{__name__}.http")
# Any process can send bytes that are no HTTP; they must not fill the log.
http_log.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)


Deliver = Callable[[str, PeerAddress, AnyMessage, dict[str, PeerAddress]], None]
"""Takes a message: the sending host, that host's address, the message, and the addresses of other
hosts that the sender knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """The run that is served, and the functions that handle its requests.

    Attributes:
        store: the RAM tier; this server alone uses it. It only reads it, but for what one rank
            passes on to another one in a restore (`EXCHANGE`), which it removes once it was sent.
        deliver: takes a message; called in the server's thread, must not block.
        serves: returns whether a client whose newest known attempt is the given one may read here;
            called in the server's thread, must not block.
        status: returns the agent's status as JSON; awaited in the server's thread.
    """

    store: RamStore
    run_id: str
    token: str = field(repr=False)
    tls: ssl.SSLContext | None = None
    deliver: Deliver | None = None
    serves: Callable[[AttemptId], bool] = lambda attempt: True
    status: Callable[[], Awaitable[bytes]] | None = None


class PeerServer:
    """A server that runs from its construction until `close`; it owns `listener`.

    Raises:
        InvalidArgumentError: the token cannot be one.
    """

    def __init__(
        self, served: ServedRun, listener: socket.socket, limits: PeerLimits | None = None
    ) -> None:
        check_token(served.token, "serve peers")
        self._served = served
        self._listener = listener
        self._connections = PeerConnections(limits or PeerLimits())
        self.address = PeerAddress(*listener.getsockname()[:2])
        self._started: Future[asyncio.Event] = Future()
        self._thread = threading.Thread(target=self._run, name="holdfast-peers", daemon=True)
        self._thread.start()
        self._stop = self._started.result(START_SECS)

    def close(self) -> None:
        """End all connections and the thread; wait for it."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_SECS)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        self._http_server = web.Server(
            self._respond,
            access_log=None,
            logger=http_log,
            auto_decompress=False,
            # A connection's own bound (`idle_secs`) is shorter, and also holds for slow requests.
            keepalive_timeout=KEEPALIVE_SECS,
            lingering_time=0.0,
            max_line_size=HEADER_SIZE_MAX_BYTES,
            max_field_size=HEADER_SIZE_MAX_BYTES,
        )
        self._accepted: set[asyncio.Task[None]] = set()
        accepting = asyncio.create_task(self._accept())
        self._started.set_result(stop)
        try:
            await stop.wait()
        finally:
            accepting.cancel()
            self._listener.close()
            # The requests under way end first: a connection must not be closed under a `sendfile`.
            await self._http_server.shutdown(SHUTDOWN_SECS)
            self._connections.abort_all()
            if self._accepted:
                await asyncio.wait(self._accepted, timeout=SHUTDOWN_SECS)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # The client has closed the connection already, or this process has no free
                # descriptor.
                log.warning("cannot accept a peer's connection: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_SECS)
                continue
            # Closed at once: connections that wait would need descriptors as well.
            if len(self._accepted) >= self._connections.limits.connection_count_max:
                accepted.close()
                continue
            task = asyncio.create_task(self._serve_connection(accepted))
            self._accepted.add(task)
            task.add_done_callback(self._accepted.discard)

    async def _serve_connection(self, accepted: socket.socket) -> None:
        """Make a connection, do its handshake, and wait for its end."""
        loop = asyncio.get_running_loop()
        connection = self._connections.make(self._http_server())
        secs = self._connections.limits.handshake_secs if self._served.tls else None
        try:
            await loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._served.tls, ssl_handshake_timeout=secs
            )
            await connection.ended.wait()
        except OSError as error:
            accepted.close()
            log.debug("refused a peer's connection: %s", error)
        finally:
            self._connections.forget_connection(connection)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = self._connections.connection_of(request)
        with connection.busy():
            try:
                return await self._answer(request, connection)
            except ObjectNotFoundError as error:
                return _refusal(404, error)
            except InvalidArgumentError as error:
                return _refusal(400, error)
            except HoldfastError as error:
                return _refusal(503, error)

    async def _answer(
        self, request: web.BaseRequest, connection: ServedConnection
    ) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        # In constant time, so that the token cannot be guessed byte by byte.
        if not hmac.compare_digest(shown, f"Bearer {self._served.token}".encode()):
            error = InvalidArgumentError("expected this run's token, found another one or none")
            return _refusal(401, error, {"WWW-Authenticate": "Bearer"})
        is_read = request.method in ("GET", "HEAD") and not request.body_exists
        if not is_read and (request.method != "POST" or self._served.deliver is None):
            error = InvalidArgumentError(
                f"{request.method}: this memory is read-only; expected GET or HEAD without a body"
            )
            return _refusal(405, error, {"Allow": "GET, HEAD"})
        run_id, kind, key = parse_target(request.raw_path)
        if run_id != self._served.run_id:
            error = InvalidArgumentError(
                f"this agent serves run {self._served.run_id}, not {run_id[:64]!r}"
            )
            return _refusal(404, error)
        is_posted = kind == MESSAGES
        if is_read == is_posted:
            error = InvalidArgumentError(
                f"{request.method}: POST sends messages, GET reads the rest"
            )
            return _refusal(405, error, {"Allow": "POST" if is_posted else "GET, HEAD"})
        if kind == MESSAGES:
            return await self._receive_message(request, key)
        if kind == STATUS:
            return await self._send_status()
        attempt = parse_attempt_id(request.headers.get(ATTEMPT_HEADER, "")) or NO_ATTEMPT
        if not self._served.serves(attempt):
            error = InvalidArgumentError(
                f"attempt {attempt} is not served any more: another one has taken the run over; "
                "stop this process"
            )
            return _refusal(403, error)
        if key.split("/")[0] == SLOTS:
            raise ObjectNotFoundError(f"{key[:200]}: slots are not served")
        if kind == NAMES:
            loop = asyncio.get_running_loop()
            return _json(200, await loop.run_in_executor(None, self._names, key))
        return await self._send_object(request, connection, key)

    async def _receive_message(self, request: web.BaseRequest, sender: str) -> web.StreamResponse:
        assert self._served.deliver is not None
        address = parse_address(request.headers.get(ADDRESS_HEADER, ""))
        others = parse_hosts(request.headers.get(HOSTS_HEADER, ""))
        message = decode_message(await self._read_body(request))
        self._served.deliver(sender, address, message, others)
        return web.Response(status=204)

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        data = bytearray()
        try:
            async with asyncio.timeout(self._connections.limits.piece_secs):
                async for piece in request.content.iter_chunked(COPIED_SIZE_BYTES):
                    data += piece
                    if len(data) > MESSAGE_BYTES_MAX:
                        break
        except TimeoutError as error:
            raise InvalidArgumentError("a message did not arrive in time") from error
        return bytes(data)

    async def _send_status(self) -> web.StreamResponse:
        if self._served.status is None:
            raise ObjectNotFoundError("this agent reports no status")
        return await self._in_time(self._served.status())

    async def _in_time(self, answer: Awaitable[bytes]) -> web.StreamResponse:
        try:
            async with asyncio.timeout(STATUS_SECS):
                return _json(200, await answer)
        except TimeoutError as error:
            raise StorageError(f"the agent is busy for more than {STATUS_SECS:.0f} s") from error

    async def _send_object(
        self, request: web.BaseRequest, connection: ServedConnection, key: str
    ) -> web.StreamResponse:
        tag = request.headers.get("If-Match")
        reader = await connection.open_held(key, tag, functools.partial(self._open, key))
        size = reader.size_bytes
        headers = {"Accept-Ranges": "bytes", "ETag": object_tag(reader)}
        # The client's reader was opened on an earlier object of this key.
        if tag not in (None, headers["ETag"]):
            connection.release()
            return _refusal(412, InvalidArgumentError(f"{key}: another object has this key now"))
        start, stop, status = 0, size, 200
        range_header = request.headers.get("Range")
        if range_header is not None and request.method == "GET":
            span = parse_range(range_header, size)
            if span is None:
                error = InvalidArgumentError(
                    f"{key}: it has {size} bytes; {range_header} is not in it"
                )
                return _refusal(416, error, {"Content-Range": f"bytes */{size}"})
            (start, stop), status = span, 206
            headers["Content-Range"] = content_range(start, stop, size)
        response = web.StreamResponse(status=status, headers=headers)
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        await response.prepare(request)
        if request.method == "GET":
            if not await self._send(response, reader, request, (start, stop)):
                connection.close_at_once()
            elif key.startswith(f"{EXCHANGE}/") and (start, stop) == (0, size):
                # What a rank passes on to one rank of another host is needed once.
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(None, self._remove, key)
        return response

    async def _send(
        self,
        response: web.StreamResponse,
        reader: SlotReader,
        request: web.BaseRequest,
        span: tuple[int, int],
    ) -> bool:
        """Send bytes [start, stop) of an object; return whether all were taken in time."""
        loop = asyncio.get_running_loop()
        secs = self._connections.limits.piece_secs
        try:
            with open(reader.fd, "rb", buffering=0, closefd=False) as file:  # noqa: ASYNC230
                for start in range(*span, PIECE_SIZE_BYTES):
                    count = min(PIECE_SIZE_BYTES, span[1] - start)
                    async with asyncio.timeout(secs):
                        if self._served.tls is not None:
                            await self._copy(response, reader, start, start + count)
                            continue
                        if request.transport is None:
                            return False
                        sent = await loop.sendfile(
                            request.transport, file, start, count, fallback=False
                        )
                        if sent != count:
                            return False
        except (OSError, RuntimeError) as error:
            # The loop raises RuntimeError where the connection ended before the first byte.
            log.info("a peer read less than it requested: %s", error or "it stopped reading")
            return False
        return True

    async def _copy(
        self, response: web.StreamResponse, reader: SlotReader, start: int, stop: int
    ) -> None:
        data = bytearray(COPIED_SIZE_BYTES)
        for at in range(start, stop, COPIED_SIZE_BYTES):
            piece = memoryview(data)[: stop - at]
            reader.read_into(at, piece)
            await response.write(bytes(piece))

    def _open(self, key: str) -> Opened:
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(self._served.store.open(key))
            return reader, stack.pop_all()

    def _remove(self, key: str) -> None:
        try:
            self._served.store.delete(key)
        except StorageError as error:
            log.warning("what was passed on stays in RAM until the restore ends: %s", error)

    def _names(self, prefix: str) -> bytes:
        objects = tuple((s.key, s.size_bytes) for s in self._served.store.list(prefix))
        try:
            data = msgspec.json.encode(ObjectNames(objects))
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{prefix}: a name in it is not UTF-8") from error
        if len(data) > NAMES_SIZE_MAX_BYTES:
            raise InvalidArgumentError(f"{prefix}: its names take {len(data)} bytes; ask for fewer")
        return data


def _refusal(
    status: int, error: HoldfastError, headers: dict[str, str] | None = None
) -> web.Response:
    headers = {ERROR_HEADER: type(error).__name__, **(headers or {})}
    return _json(status, msgspec.json.encode(HttpRefusal(str(error))), headers)


def _json(status: int, data: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=data, headers=headers, content_type="application/json")
