"""The contract of every store: write-once objects under keys, visible whole or not at all.

Keys are relative paths with `/` between segments; no segment is empty, `.`, `..` or starts with a
dot. What a store promises:

- An object is visible after `put` returned, and never before all its bytes are in it. A crash or an
  error during `put` leaves what stood there before.
- After a call returned, its effect survives what the store says it survives: a disk survives the
  loss of power, RAM the death of every process.
- Errors are `StorageError`s. Any call that failed may be repeated; `put` and `delete` are
  idempotent, and `put_if_absent` is not: a repeated call may find its own object.

Every store passes `holdfast.testing.store_suite`. A peer's memory can be read only: that store has
the reading half, and refuses the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from holdfast.errors import InvalidArgumentError
from holdfast.format.buffers import Buffer


class StoredObject(NamedTuple):
    """One object as listed."""

    key: str
    size_bytes: int


class Reader(Protocol):
    """An open object. Its bytes do not change while it is open, whatever happens to its key."""

    @property
    def size_bytes(self) -> int: ...

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `offset_bytes` on.

        Raises:
            StorageError: the object ends before, or cannot be read; `target` holds anything.
        """
        ...

    def view(self) -> memoryview | None:
        """All bytes, as read-only memory that is good for as long as the object is open.

        None where the store's bytes are in no memory that could be shown.

        Raises:
            StorageError: they cannot be shown.
        """
        ...

    def lasting_view(self) -> memoryview | None:
        """All bytes, as read-only memory that stays as it is for as long as the view lives.

        None where the store's bytes are in no memory that could be lent.
        """
        ...


class Store(Protocol):
    """The contract; see the module."""

    tier: str
    """What the tier is called in reports: `ram`, `peer`, `durable`."""

    name: str
    """What tells the store from others that a checkpoint is read from: the tier, or which peer."""

    def put(self, key: str, size_bytes: int, blocks: Iterable[Buffer]) -> None:
        """Writes an object of `size_bytes`, the concatenation of `blocks`; replaces an old one.

        Each block is used before the next one is asked for, and not after.

        Raises:
            OutOfSpaceError: there is no room.
            StorageError: it could not be written. In both cases nothing has changed.
        """
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Writes an object where there is none; of several callers exactly one gets True.

        Whatever it survives, the objects that were shown before it under the same key up to the
        last slash survive too, also those of a process that was killed while it put them.
        """
        ...

    def link(self, source_key: str, key: str) -> None:
        """Shows the object of `source_key` under `key` too; each outlasts the other's deletion.

        It survives what `put` survives. Nothing is replaced: where the same object stands there
        already, that is no error. A store that cannot give one object two names copies it.

        Raises:
            ObjectNotFoundError: there is no object at `source_key`.
            StorageError: another object stands at `key`, or it could not be done.
        """
        ...

    def get(self, key: str) -> bytes:
        """All bytes of a small object.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...

    def open(self, key: str) -> AbstractContextManager[Reader]:
        """Opens an object for ranged reads.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """All objects whose key begins with `prefix` and a slash, in the order of their keys."""
        ...

    def delete(self, *keys: str) -> None:
        """Removes objects; one that is not there is no error.

        Where it is interrupted or fails, any of them may be left; it may be repeated.
        """
        ...

    def discard_unfinished(self, prefix: str) -> None:
        """Removes what interrupted puts left of the object `prefix` and of those below it.

        No put there may be under way, but `put_if_absent` of an object that is there already.
        """
        ...


def check_key(key: str) -> str:
    """`key`, if it is one.

    Raises:
        InvalidArgumentError: it could leave the store's folder, or hide in it.
    """
    segments = key.split("/")
    if any(not s or s.startswith(".") or "\0" in s for s in segments):
        raise InvalidArgumentError(
            f"key {key!r}: expected segments that are not empty and do not start with a dot"
        )
    return key
