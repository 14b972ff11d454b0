"""Asking a peer: its connections, and what its failing means for all who ask it.

A call ends with a whole answer or with an error that says which peer failed and how. The first
failure ends every other wait for that peer, and lets it rest, so that a dead one costs one bounded
wait and not one for each thread or block.
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
from holdfast.peers.address import PeerAddress
from holdfast.peers.connection import BadAnswerError, PeerBounds, PeerConnection
from holdfast.peers.tls import PeerTls, asking_context
from holdfast.peers.wire import ATTEMPT_HEADER, ERROR_HEADER, HttpRefusal, check_token

IDLE_COUNT_MAX = 8
REFUSAL_SIZE_MAX_BYTES = 64 * 1024

T = TypeVar("T")
Use = Callable[[PeerConnection, http.client.HTTPResponse], T]
"""What is made of an answer whose head is there; it reads all of the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """How one peer is reached: where, for which run, and with what it is shown.

    `attempt` tells the newest attempt that the asking process knows of: a peer that knows of a
    newer one serves it nothing.
    """

    address: PeerAddress
    run_id: str
    token: str = field(repr=False)
    tls: PeerTls | None = None
    attempt: Callable[[], int] = lambda: 0


class Connections:
    """Connections to one peer that wait for a thread that needs one; threads may share it."""

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
        """What `use` makes of the answer; it reads all of the body. `where` is for messages.

        Raises:
            ObjectNotFoundError: the peer has no such object.
            StorageError: the peer failed, or rests after an earlier failure.
        """
        for _ in range(2):
            connection = self._take()
            is_old = connection.has_answered
            try:
                answer = connection.ask(method, target, {**self.peer.headers, **(headers or {})})
            except ConnectionError as error:
                self.peer.drop_connection(connection)
                if not is_old:
                    raise self.peer.failed(where or target, error) from error
                # The peer closes what nobody used for a while; so are the others then.
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
        """Closes those that wait."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self.peer.drop_connection(self._idle.pop())


class Peer:
    """The other end: how it is reached, what is connected to it, and whether it rests."""

    def __init__(self, access: PeerAccess, clock: Clock, bounds: PeerBounds) -> None:
        check_token(access.token, f"reach peer {access.address.authority}")
        self.name = f"peer {access.address.authority}"
        self._access = access
        self._address = access.address
        self._tls = asking_context(access.tls) if access.tls is not None else None
        self._clock = clock
        self._bounds = bounds
        self._lock = threading.Lock()
        self._live: set[PeerConnection] = set()
        self._rests_until = 0.0
        self._reason = ""

    @property
    def headers(self) -> dict[str, str]:
        """What each request shows."""
        return {
            "Authorization": f"Bearer {self._access.token}",
            ATTEMPT_HEADER: str(self._access.attempt()),
        }

    def connect(self) -> PeerConnection:
        """A new connection, to be dropped.

        Raises:
            StorageError: the peer failed a moment ago.
        """
        with self._lock:
            left_secs = self._rests_until - self._clock.monotonic()
            if left_secs > 0:
                raise StorageError(
                    f"ask {self.name}: it is not asked for {left_secs:.0f} s more, because it "
                    f"failed: {self._reason}"
                )
            connection = PeerConnection(self._address, self._bounds, self._clock, self._tls)
            self._live.add(connection)
            return connection

    def drop_connection(self, connection: PeerConnection) -> None:
        """Closes a connection."""
        with self._lock:
            self._live.discard(connection)
        connection.close()

    def failed(self, where: str, error: Exception) -> StorageError:
        """Lets the peer rest, and ends every other wait for it; the error to raise."""
        what = str(error) or "no answer"
        with self._lock:
            now = self._clock.monotonic()
            if self._rests_until > now:
                # Its connections were ended when it failed.
                what = f"given up because of {self._reason}"
            else:
                self._rests_until = now + self._bounds.rest_secs
                self._reason = f"{where}: {what}"
                for connection in self._live:
                    connection.abort()
        return StorageError(
            f"read {self.name}: {where}: {type(error).__name__}: {what}; see whether its agent "
            "lives, and the network between"
        )

    def refused(
        self, connection: PeerConnection, answer: http.client.HTTPResponse, where: str
    ) -> StorageError:
        """The error of an answer that is a refusal; one that will not change lets the peer rest."""
        data = connection.receive_bytes(answer, REFUSAL_SIZE_MAX_BYTES)
        try:
            message = decode(data, HttpRefusal).message
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = f"{data[:200]!r}"
        error = answer.getheader(ERROR_HEADER, "no error of a peer's")
        told = f"status {answer.status}: {error[:100]}: {message[:500]}"
        if answer.status == 404 and error == ObjectNotFoundError.__name__:
            return ObjectNotFoundError(f"read {self.name}: {where}: {told}")
        if answer.status in (412, 503):
            return StorageError(f"read {self.name}: {where}: {told}")
        return self.failed(where, BadAnswerError(told))
