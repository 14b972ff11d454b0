"""The contract of every store: write-once objects under keys, visible whole or not at all.

Keys are relative paths with `/` between segments; no segment is empty, `.`, `..` or starts with a
dot. Guarantees of a store:

- An object is visible after `put` returned, and never before all its bytes are written. A crash or
  an error during `put` leaves the previous object, or none, in place.
- The effect of a call that returned is as durable as the store: a disk survives the loss of power,
  RAM survives the death of every process.
- Errors are `StorageError`s. Any failed call may be retried. `put` and `delete` are idempotent;
  `put_if_absent` is not: a retry may find its own object.

Every store passes `holdfast.testing.store_suite`. A store that can only be read, such as the RAM of
a peer, is a `ReadableStore`. What differs between stores is a property, whose default is the most
frequent value. Nothing above depends on the class of a store or on the name of its tier.

See docs/decisions/0048.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from holdfast import waits
from holdfast.errors import HoldfastError, InvalidArgumentError, WaitInterruptedError
from holdfast.format.digests import Buffer

DURABLE = "durable"
REMOTE = "remote"
"""The second durable tier of a run. Read alone, such a place is a run, and its durable tier."""


class StoredObject(NamedTuple):
    """One object in a listing."""

    key: str
    size_bytes: int


class Source(Protocol):
    """The bytes of an object to be put, at random access.

    A store may request any ranges, in any order, several at once from several threads, and a range
    again after a failure.
    """

    @property
    def size_bytes(self) -> int:
        """The size of the object."""
        ...

    @property
    def is_lasting(self) -> bool:
        """Whether blocks keep their bytes until the put ends.

        If not, a block keeps them until the iterator that yielded it is advanced.
        """
        ...

    def blocks(self, start_bytes: int, stop_bytes: int) -> Iterator[Buffer]:
        """Yield the bytes [start, stop) in order, in blocks of any size.

        Every error passes through `put`, which then leaves the key unchanged.
        """
        ...


class InMemory:
    """A `Source` of bytes in memory."""

    is_lasting = True

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def blocks(self, start_bytes: int, stop_bytes: int) -> Iterator[Buffer]:
        yield self._data[start_bytes:stop_bytes]


class Reader(Protocol):
    """An open object. Its bytes do not change while it is open.

    If its key is deleted or replaced, it can still be read, or reads fail; the store says which.
    """

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


class ReadableStore(Protocol):
    """The reading half of a store; see the module for its guarantees."""

    tier: str
    """The tier's name in reports: `ram`, `peer`, `durable`, `remote`."""

    name: str
    """A name unique among the stores that a checkpoint is read from: the tier, or the peer."""

    is_remote: bool = False
    """Whether each read is a request to a service, which waits for a network."""

    is_in_memory: bool = False
    """Whether the objects are in the RAM of a host, which recycles them. Such a store has no
    manifests, and a reused image has one more name in the folder of each checkpoint that reuses it.
    In other stores a reused image is in the folder of its origin alone."""

    is_optional: bool = False
    """Whether a reader continues without the store if it cannot be listed."""

    def get(self, key: str) -> bytes:
        """Return all bytes of a small object.

        Raises:
            ObjectNotFoundError: the key has no object.
        """
        ...

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | HoldfastError]:
        """Return all bytes of small objects, read concurrently, in the order of `keys`.

        In place of an object that cannot be read, the error that `get` would raise is returned.
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


class Store(ReadableStore, Protocol):
    """A write-once object store; see the module for its guarantees."""

    link: Callable[[str, str], None] | None = None
    """Gives the object of the first key the second key too, without a copy; it raises
    `ObjectNotFoundError` if there is none, and `StorageError` if the second key has another object.
    None if each object of the store has one key."""

    def put(self, key: str, source: Source | Buffer) -> None:
        """Write an object of the bytes of `source`; replace an old one.

        Raises:
            OutOfSpaceError: there is no room. The key is unchanged.
            StorageError: the object could not be written. The key is unchanged.
            InvalidArgumentError: the source yielded another number of bytes than requested. The key
                is unchanged.
        """
        ...

    def put_if_absent(self, key: str, data: bytes, after: Sequence[str] = ()) -> bool:
        """Write an object if the key has none; return whether the key has this caller's object.

        Of concurrent callers with different bytes exactly one gets True. A store may return True
        for an object of the same bytes: it may be the caller's, of a try whose answer was lost.

        The object is never more durable than the objects that became visible before it in the same
        folder (the key up to its last slash), and in the folders of the existing objects `after`,
        including objects of a process that was killed during `put`. So a manifest never outlasts
        what it names.
        """
        ...

    def list_some(
        self, prefix: str, *, after: str = "", before: str = "", count_max: int | None = None
    ) -> list[StoredObject]:
        """Return the objects of `list` between two keys, at most the first `count_max`.

        The cost is that of these objects, except for a service that begins each listing at the
        beginning. With `count_max`, no object may be in a folder below `prefix`.

        Args:
            prefix: as for `list`.
            after: keys up to this one, which need not exist, are left out. Its last name
                does not begin with that of a folder beside it: there services differ in order.
            before: this key and those after it are left out; empty: none.
            count_max: the greatest number of objects; None: all.
        """
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


def source_of(source: Source | Buffer) -> Source:
    """Return the source of a call of `put`."""
    return InMemory(source) if isinstance(source, Buffer) else source


def exact_blocks(source: Source, start_bytes: int, stop_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes [start, stop) of a source, and check that it yields as many.

    Raises:
        InvalidArgumentError: it yields more or fewer.
    """
    left_bytes = stop_bytes - start_bytes
    for block in source.blocks(start_bytes, stop_bytes):
        view = memoryview(block).cast("B")
        left_bytes -= len(view)
        if left_bytes < 0:
            break
        yield view
    if left_bytes:
        raise InvalidArgumentError(
            f"put bytes [{start_bytes}, {stop_bytes}): expected a source of as many, it yields "
            f"{'more' if left_bytes < 0 else f'{left_bytes} fewer'}"
        )


def read_each(
    get: Callable[[str], bytes], keys: Sequence[str], at_once: int
) -> Sequence[bytes | HoldfastError]:
    """Call `get` for each key, on up to `at_once` threads; return its results and errors.

    Raises:
        WaitInterruptedError: A signal ends the wait for them.
    """

    def read(key: str) -> bytes | HoldfastError:
        try:
            return get(key)
        except WaitInterruptedError:
            raise
        except HoldfastError as error:
            return error

    thread_count = min(at_once, len(keys))
    if thread_count <= 1:
        return [read(key) for key in keys]
    with waits.thread_pool(thread_count, "holdfast-get") as pool:
        return waits.results(pool, read, keys)


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
