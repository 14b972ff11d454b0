"""Make one HTTP connection to a peer, on which every wait is bounded.

Three bounds hold, whatever the other end does: the time to connect, the time without a byte, and
the deadline of a whole answer. The last one also ends an answer that trickles. Bytes go from the
socket straight into the memory for which they are meant.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from holdfast.clock import Clock
from holdfast.peers.address import PeerAddress

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PIECE_SIZE_BYTES = 1024 * 1024
LARGE_SIZE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBounds:
    """How long a peer may take before it counts as failed.

    An answer of n bytes has to be whole after `stall_secs` and the time for n bytes at
    `rate_min_bytes` per second. For `rest_secs` after a failure the peer is not asked.
    """

    connect_secs: float = 5.0
    stall_secs: float = 10.0
    rate_min_bytes: int = 4 * 1024 * 1024
    rest_secs: float = 30.0


class BadAnswerError(Exception):
    """The answer does not match the request."""


class PeerConnection:
    """A connection, opened on first use; for one thread at a time, except `abort`."""

    def __init__(
        self, address: PeerAddress, bounds: PeerBounds, clock: Clock, tls: ssl.SSLContext | None
    ) -> None:
        self._address = address
        self._bounds = bounds
        self._clock = clock
        self._tls = tls
        self._socket: _BoundedSocket | None = None
        self._http = http.client.HTTPConnection(address.host, address.port)
        self.has_answered = False

    def ask(self, method: str, target: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Send a request, and return the answer once its head has arrived.

        Raises:
            OSError, http.client.HTTPException: there is no answer; close the connection.
        """
        if self._socket is None:
            self._socket = self._connected()
            # The library uses only those methods of a socket that this one has.
            self._http.sock = cast(socket.socket, self._socket)
        self._socket.deadline = self._clock.monotonic() + self._bounds.stall_secs
        self._http.request(method, target, headers=headers)
        answer = self._http.getresponse()
        self.has_answered = True
        return answer

    def receive(self, answer: http.client.HTTPResponse, target: memoryview) -> None:
        """Fill `target` with the answer's body, which has exactly that size.

        Raises:
            OSError, BadAnswerError: it did not arrive, or not in time; the contents of `target` are
                undefined.
        """
        self._expect(len(target))
        done = 0
        while done < len(target):
            # Released at once: an error's traceback may keep the view, and with it a slot's
            # mapping.
            with target[done:] as left:
                count = answer.readinto(left)
            if not count:
                raise BadAnswerError(f"expected {len(target)} bytes, found the end after {done}")
            done += count
        # The library has to see the end of an empty body, too.
        answer.read()

    def receive_bytes(self, answer: http.client.HTTPResponse, size_max_bytes: int) -> bytes:
        """Return the answer's body; memory is allocated only for bytes that have arrived.

        Raises:
            OSError, BadAnswerError: it did not arrive, or is larger than `size_max_bytes`.
        """
        size = answer.length
        if size is None or answer.chunked or size > size_max_bytes:
            body = "a body of unknown size" if size is None else f"one of {size} bytes"
            raise BadAnswerError(f"expected a body of at most {size_max_bytes} bytes, found {body}")
        self._expect(size)
        data = bytearray()
        while len(data) < size:
            piece = answer.read(min(size - len(data), PIECE_SIZE_BYTES))
            if not piece:
                raise BadAnswerError(f"expected {size} bytes, found the end after {len(data)}")
            data += piece
        answer.read()
        return bytes(data)

    def _expect(self, size_bytes: int) -> None:
        assert self._socket is not None
        secs = self._bounds.stall_secs + size_bytes / self._bounds.rate_min_bytes
        self._socket.deadline = self._clock.monotonic() + secs

    def _connected(self) -> _BoundedSocket:
        address = (self._address.host, self._address.port)
        raw = socket.create_connection(address, self._bounds.connect_secs)
        with contextlib.ExitStack() as on_error:
            on_error.callback(raw.close)
            # Each small request waits for its answer; merging packets would only delay it.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                raw = self._tls.wrap_socket(raw, server_hostname=self._address.host)
            on_error.pop_all()
        return _BoundedSocket(raw, self._bounds.stall_secs, self._clock)

    def abort(self) -> None:
        """End a wait on the connection at once; called from another thread."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.raw.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection for good."""
        self._http.close()
        if self._socket is not None:
            self._socket.raw.close()


class _BoundedSocket:
    """A socket whose every wait ends after `stall_secs`, and at `deadline` at the latest."""

    def __init__(self, raw: socket.socket, stall_secs: float, clock: Clock) -> None:
        self.raw = raw
        self.deadline = 0.0
        self._stall_secs = stall_secs
        self._clock = clock
        self._low_water_bytes = 1

    def _bound(self) -> None:
        left_secs = self.deadline - self._clock.monotonic()
        if left_secs <= 0:
            raise TimeoutError("the answer is slower than the least accepted rate")
        self.raw.settimeout(min(left_secs, self._stall_secs))

    def sendall(self, data: bytes) -> None:
        self._bound()
        self.raw.sendall(data)

    def recv_into(self, target: WriteableBuffer) -> int:
        self._bound()
        self._wake_for(memoryview(target).nbytes)
        return self.raw.recv_into(target)

    def _wake_for(self, size_bytes: int) -> None:
        """Wait for large pieces of a large answer at once.

        Waking for every packet triples the context switches. The awaited size is never more than
        the rest of the answer.
        """
        if isinstance(self.raw, ssl.SSLSocket):
            return
        size_wanted_bytes = (
            min(size_bytes, PIECE_SIZE_BYTES) if size_bytes >= LARGE_SIZE_BYTES else 1
        )
        if size_wanted_bytes != self._low_water_bytes:
            self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_wanted_bytes)
            self._low_water_bytes = size_wanted_bytes

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Stream(self))

    def close(self) -> None:
        # The library closes the socket before the body of a connection's last answer was read.
        pass


class _Stream(io.RawIOBase):
    """The raw stream of a bounded socket, which the library buffers."""

    def __init__(self, source: _BoundedSocket) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, target: WriteableBuffer) -> int:
        return self._source.recv_into(target)
