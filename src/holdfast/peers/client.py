"""Ask a peer over a pool of connections, and share its failures between all waiting threads.

A call ends with a whole answer, or with an error that names the peer and the failure. The first
failure ends every other wait for that peer and blocks new requests for `rest_secs`. A dead peer
thus costs one bounded wait, not one for each thread or block. See docs/decisions/0009.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from holdfast.clock import Clock
from holdfast.errors import ObjectNotFoundError, StorageError
from holdfast.format.json_codec import decode
from holdfast.format.names import NO_ATTEMPT, AttemptId
from holdfast.peers.address import PeerAddress
from holdfast.peers.connection import BadAnswerError, PeerBounds, PeerConnection
from holdfast.peers.tls import PeerTls, client_context
from holdfast.peers.wire import ATTEMPT_HEADER, ERROR_HEADER, HttpRefusal, check_token

IDLE_COUNT_MAX = 8
REFUSAL_SIZE_MAX_BYTES = 64 * 1024

T = TypeVar("T")
Use = Callable[[PeerConnection, http.client.HTTPResponse], T]
"""A function of an answer whose head has arrived; it reads all of the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """The address of one peer, and the credentials for it.

    `attempt` returns the newest attempt that the asking process knows: a peer that knows a newer
    one refuses to serve it.
    """

    address: PeerAddress
    run_id: str
    token: str = field(repr=False)
    tls: PeerTls | None = None
    attempt: Callable[[], AttemptId] = lambda: NO_ATTEMPT


class Connections:
    """Idle connections to one peer; thread-safe."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._idle: list[PeerConnection] = []

    def ask(
        self,
        method: str,
        target: str,
        use: Use[T],
        headers: Mapping[str, str] | None = None,
        where: str = "",
    ) -> T:
        """Send a request, and return the result of `use` for its answer.

        `use` reads all of the body; `where` describes the request in messages.

        Raises:
            ObjectNotFoundError: the peer has no such object.
            StorageError: the peer failed, or is not asked for a while after an earlier failure.
        """
        for _ in range(2):
            connection = self._take()
            # The peer may have closed an idle connection; only the failure of a new one counts.
            is_old = connection.has_answered
            try:
                answer = connection.ask(method, target, {**self.peer.headers, **(headers or {})})
            except ConnectionError as error:
                self.peer.drop_connection(connection)
                if not is_old:
                    raise self.peer.failed(where or target, error) from error
                # The peer closes idle connections; the others have timed out as well. A new one is
                # tried once.
                self.close()
            except (OSError, http.client.HTTPException) as error:
                self.peer.drop_connection(connection)
                raise self.peer.failed(where or target, error) from error
            else:
                return self._use(connection, answer, use, where or target)
        raise self.peer.failed(where or target, ConnectionError("its connections end at once"))

    def _use(
        self,
        connection: PeerConnection,
        answer: http.client.HTTPResponse,
        use: Use[T],
        where: str,
    ) -> T:
        # A connection whose answer was not read to its end cannot be used again.
        is_good = False
        try:
            if answer.status not in (200, 206):
                raise self.peer.refused(connection, answer, where)
            result = use(connection, answer)
            is_good = not answer.will_close
        except (OSError, http.client.HTTPException, BadAnswerError) as error:
            raise self.peer.failed(where, error) from error
        except ObjectNotFoundError:
            is_good = not answer.will_close
            raise
        finally:
            if is_good and len(self._idle) < IDLE_COUNT_MAX:
                self._idle.append(connection)
            else:
                self.peer.drop_connection(connection)
        return result

    def _take(self) -> PeerConnection:
        try:
            return self._idle.pop()
        except IndexError:
            return self.peer.connect()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self.peer.drop_connection(self._idle.pop())


class Peer:
    """One peer: its address, its live connections, and its last failure."""

    def __init__(self, access: PeerAccess, clock: Clock, bounds: PeerBounds) -> None:
        check_token(access.token, f"reach peer {access.address.authority}")
        self.name = f"peer {access.address.authority}"
        self._access = access
        self._address = access.address
        self._tls = client_context(access.tls) if access.tls is not None else None
        self._clock = clock
        self._bounds = bounds
        self._lock = threading.Lock()
        self._live: set[PeerConnection] = set()
        self._retry_at_secs = 0.0
        self._reason = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        return {
            "Authorization": f"Bearer {self._access.token}",
            ATTEMPT_HEADER: self._access.attempt().name,
        }

    def connect(self) -> PeerConnection:
        """Return a new connection; the caller ends it with `drop_connection`.

        Raises:
            StorageError: the peer failed less than `rest_secs` ago.
        """
        with self._lock:
            left_secs = self._retry_at_secs - self._clock.monotonic()
            if left_secs > 0:
                raise StorageError(
                    f"ask {self.name}: no request for {left_secs:.0f} s more, because it "
                    f"failed: {self._reason}"
                )
            connection = PeerConnection(self._address, self._bounds, self._clock, self._tls)
            self._live.add(connection)
            return connection

    def drop_connection(self, connection: PeerConnection) -> None:
        """Close a connection."""
        with self._lock:
            self._live.discard(connection)
        connection.close()

    def failed(self, where: str, error: Exception) -> StorageError:
        """Block the peer for `rest_secs`, end all other waits for it, and return the error."""
        what = str(error) or "no answer"
        with self._lock:
            now = self._clock.monotonic()
            if self._retry_at_secs > now:
                # Another thread's failure ended this connection; the first reason is reported.
                what = f"aborted because of {self._reason}"
            else:
                self._retry_at_secs = now + self._bounds.rest_secs
                self._reason = f"{where}: {what}"
                for connection in self._live:
                    connection.abort()
        return StorageError(
            f"read {self.name}: {where}: {type(error).__name__}: {what}; check that its agent "
            "runs, and the network between"
        )

    def refused(
        self, connection: PeerConnection, answer: http.client.HTTPResponse, where: str
    ) -> StorageError:
        """Return the error of a refusal; one that a retry cannot change blocks the peer."""
        data = connection.receive_bytes(answer, REFUSAL_SIZE_MAX_BYTES)
        try:
            message = decode(data, HttpRefusal).message
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = f"{data[:200]!r}"
        error = answer.getheader(ERROR_HEADER, "no error class")
        description = f"status {answer.status}: {error[:100]}: {message[:500]}"
        if answer.status == 404 and error == ObjectNotFoundError.__name__:
            return ObjectNotFoundError(f"read {self.name}: {where}: {description}")
        # Another object has the key now, or the store failed: other requests may succeed.
        if answer.status in (412, 503):
            return StorageError(f"read {self.name}: {where}: {description}")
        return self.failed(where, BadAnswerError(description))
