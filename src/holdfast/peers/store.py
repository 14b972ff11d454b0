"""Read a peer's RAM tier over HTTP: the parts of this run that another host's agent holds.

A peer's memory is read-only here. Bytes are received straight into the target memory, on one
connection per thread. Answers are not trusted: sizes and ranges are compared with the request, and
the engine checks digests.

While a reader is open, its connections keep the object open at the peer. The peer closes it after
some seconds without a request; a later read may then fail because the object is deleted.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
from collections.abc import Iterator, Sequence

import msgspec

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, InvalidArgumentError, StorageError
from holdfast.format.json_codec import decode
from holdfast.format.sealed import RECORD_SIZE_MAX_BYTES
from holdfast.peers.client import Connections, Peer, PeerAccess
from holdfast.peers.connection import BadAnswerError, PeerBounds, PeerConnection
from holdfast.peers.wire import (
    NAMES,
    NAMES_SIZE_MAX_BYTES,
    OBJECTS,
    ObjectNames,
    content_range,
    target_of,
)
from holdfast.store.contract import ReadableStore, Reader, StoredObject, check_key, read_each

RECORDS_AT_ONCE = 8


class PeerStore(ReadableStore):
    """The readable store of a peer's RAM tier; thread-safe.

    Raises:
        InvalidArgumentError: the token cannot be one.
        StorageError: the TLS files are missing or invalid.
    """

    tier = "peer"
    is_in_memory = True
    is_optional = True

    def __init__(self, access: PeerAccess, clock: Clock, bounds: PeerBounds | None = None) -> None:
        self.name = f"peer {access.address.authority}"
        self._run_id = access.run_id
        self._peer = Peer(access, clock, bounds or PeerBounds())
        self._connections = Connections(self._peer)

    def __repr__(self) -> str:
        return f"PeerStore({self.name})"

    def get(self, key: str) -> bytes:
        def use(connection: PeerConnection, answer: http.client.HTTPResponse) -> bytes:
            return connection.receive_bytes(answer, RECORD_SIZE_MAX_BYTES)

        return self._connections.ask("GET", target_of(self._run_id, OBJECTS, key), use)

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | HoldfastError]:
        return read_each(self.get, keys, RECORDS_AT_ONCE)

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        with contextlib.closing(Connections(self._peer)) as connections:
            yield _PeerReader(connections, target_of(self._run_id, OBJECTS, key))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        def use(connection: PeerConnection, answer: http.client.HTTPResponse) -> ObjectNames:
            return _names(connection.receive_bytes(answer, NAMES_SIZE_MAX_BYTES), prefix)

        names = self._connections.ask("GET", target_of(self._run_id, NAMES, prefix), use)
        return (StoredObject(key, size_bytes) for key, size_bytes in names.objects)

    def close(self) -> None:
        """Close the idle connections; readers close their own."""
        self._connections.close()


class _PeerReader:
    """A peer's object, open for ranged reads by any thread."""

    def __init__(self, connections: Connections, target: str) -> None:
        def use(connection: PeerConnection, answer: http.client.HTTPResponse) -> tuple[int, str]:
            size, tag = answer.getheader("Content-Length", ""), answer.getheader("ETag")
            if not (size.isascii() and size.isdecimal()) or tag is None or not tag.isascii():
                raise BadAnswerError(f"expected a size and a tag, found {size!r} and {tag!r}")
            connection.receive(answer, memoryview(b""))
            return int(size), tag

        self._connections = connections
        self._target = target
        self._size_bytes, self._tag = connections.ask("HEAD", target, use)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        with target.cast("B") as view:
            self._read_into(offset_bytes, view)

    def _read_into(self, offset_bytes: int, target: memoryview) -> None:
        stop = offset_bytes + len(target)
        where = f"{self._target} bytes [{offset_bytes}, {stop})"
        if stop > self._size_bytes:
            raise StorageError(
                f"read {self._connections.peer.name}: {where}: the object ends at "
                f"{self._size_bytes}"
            )
        if not len(target):
            return
        expected = (content_range(offset_bytes, stop, self._size_bytes), str(len(target)))

        def use(connection: PeerConnection, answer: http.client.HTTPResponse) -> None:
            headers = answer.getheader("Content-Range"), answer.getheader("Content-Length")
            if headers != expected or answer.chunked:
                raise BadAnswerError(f"expected the range and size {expected}, found {headers}")
            connection.receive(answer, target)

        # The tag makes all ranges of a reader come from one object.
        headers = {"Range": f"bytes={offset_bytes}-{stop - 1}", "If-Match": self._tag}
        self._connections.ask("GET", self._target, use, headers, where)

    def view(self) -> memoryview | None:
        return None

    def lasting_view(self) -> memoryview | None:
        return None


def _names(data: bytes, prefix: str) -> ObjectNames:
    """Return the names in an answer, checked.

    Raises:
        BadAnswerError: they are not names below `prefix`, in their order, each once.
    """
    try:
        names = decode(data, ObjectNames)
        for key, size_bytes in names.objects:
            check_key(key)
            if not key.startswith(f"{prefix}/") or size_bytes < 0:
                raise BadAnswerError(f"{key[:200]!r} of {size_bytes} bytes is not below {prefix}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidArgumentError) as error:
        raise BadAnswerError(f"expected names below {prefix}: {error}") from error
    keys = [key for key, _ in names.objects]
    if any(a >= b for a, b in itertools.pairwise(keys)):
        raise BadAnswerError(f"expected names below {prefix} in their order, each once")
    return names
