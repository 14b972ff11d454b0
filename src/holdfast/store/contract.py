"""The contract of every store: write-once objects under keys, visible whole or not at all.

Keys are relative paths with `/` between segments; no segment is empty, `.`, `..` or starts with a
dot. Guarantees of a store:

- An object is visible after `put` returned, and never before all its bytes are written. A crash or
  an error during `put` leaves the previous object, or none, in place.
- The effect of a call that returned is as durable as the store: a disk survives the loss of power,
  RAM survives the death of every process.
- Errors are `StorageError`s. Any failed call may be retried. `put` and `delete` are idempotent;
  `put_if_absent` is not: a retry may find its own object.

Every store passes `holdfast.testing.store_suite`. The RAM of a peer is read-only: that store
implements the reading half and refuses the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from holdfast.errors import InvalidArgumentError
from holdfast.format.buffers import Buffer


class StoredObject(NamedTuple):
    """One object in a listing."""

    key: str
    size_bytes: int


class Reader(Protocol):
    """An open object. Its bytes do not change while it is open, even if its key is deleted."""

    @property
    def size_bytes(self) -> int: ...

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset_bytes` on.

        Raises:
            StorageError: the object is too short or cannot be read; `target` is undefined.
        """
        ...

    def view(self) -> memoryview | None:
        """Return all bytes as read-only memory that is valid while the object is open.

        Returns:
            A view of the store's own memory; None where the store's bytes are not in memory.

        Raises:
            StorageError: the memory cannot be mapped.
        """
        ...

    def lasting_view(self) -> memoryview | None:
        """Return all bytes as read-only memory that stays unchanged while the view is referenced.

        Returns:
            A view of the store's own memory; None where the store's bytes are not in memory.
        """
        ...


class Store(Protocol):
    """A write-once object store; see the module for its guarantees."""

    tier: str
    """The tier's name in reports: `ram`, `peer`, `durable`."""

    name: str
    """A name unique among the stores that a checkpoint is read from: the tier, or the peer."""

    def put(self, key: str, size_bytes: int, blocks: Iterable[Buffer]) -> None:
        """Write an object of `size_bytes`, the concatenation of `blocks`; replace an old one.

        Each block is consumed before the next one is requested, so a caller may reuse its buffer.

        Raises:
            OutOfSpaceError: there is no room. The key is unchanged.
            StorageError: the object could not be written. The key is unchanged.
        """
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object if the key has none; of concurrent callers exactly one gets True.

        The object is never more durable than the objects that became visible before it in the same
        folder (the key up to its last slash), including objects of a process that was killed during
        `put`. So a manifest never outlasts what it names.
        """
        ...

    def link(self, source_key: str, key: str) -> None:
        """Give the object of `source_key` the name `key` too; each name outlives the other.

        The new name is as durable as after `put`. An existing object is not replaced; if `key`
        already names the same object, the call succeeds. A store that cannot give one object two
        names copies it.

        Raises:
            ObjectNotFoundError: there is no object at `source_key`.
            StorageError: `key` has another object, or the store failed.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return all bytes of a small object.

        Raises:
            ObjectNotFoundError: the key has no object.
        """
        ...

    def open(self, key: str) -> AbstractContextManager[Reader]:
        """Open an object for ranged reads.

        Raises:
            ObjectNotFoundError: the key has no object.
        """
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield all objects whose key begins with `prefix` and a slash, sorted by key."""
        ...

    def delete(self, *keys: str) -> None:
        """Remove objects; a missing object is not an error.

        After an interruption or a failure any of them may remain; the call may be repeated.
        """
        ...

    def discard_unfinished(self, prefix: str) -> None:
        """Remove leftovers of interrupted puts of the object `prefix` and of objects below it.

        The caller ensures that no put is in progress there, except `put_if_absent` of an object
        that exists already.
        """
        ...


def check_key(key: str) -> str:
    """Return `key` if it is valid.

    Raises:
        InvalidArgumentError: it could lead out of the store's folder, or be hidden in it.
    """
    segments = key.split("/")
    if any(not s or s.startswith(".") or "\0" in s for s in segments):
        raise InvalidArgumentError(
            f"key {key!r}: expected segments that are not empty and do not start with a dot"
        )
    return key
