"""A run in an object store: keys below a prefix of a bucket, without hard links or folders.

`Bucket` is the client of one service. It makes single requests, and each may fail, also after it
has taken effect. `BucketStore` builds the store contract on it, and is the one place that retries:

- A failed request is repeated with growing pauses, at most `TRIES_MAX` times.
- Objects are uploaded in parts, several at once, straight from the source's memory where it lasts.
  An object becomes visible when its upload is completed, so an interrupted put leaves nothing.
- A conditional put that reports an existing object reads it: it may be this caller's own, of a try
  whose answer was lost. Equal bytes count as written. So concurrent callers must write different
  bytes to learn which of them was first; every record that is put so names its writer, or follows
  from the objects that it names.

Assumes that the service is strongly consistent, and that it continues a listing after a key in the
order in which it lists.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from holdfast.clock import Clock
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    ObjectNotFoundError,
    OutOfSpaceError,
    StorageError,
    StorageRefusedError,
)
from holdfast.format.buffers import Buffer
from holdfast.format.names import LEASES
from holdfast.format.sealed import RECORD_SIZE_MAX_BYTES
from holdfast.store.bucket_home import BucketHome, FleetingObjects
from holdfast.store.contract import (
    Reader,
    Source,
    StoredObject,
    check_key,
    exact_blocks,
    read_each,
    source_of,
)

PART_SIZE_MIN_BYTES = 16 * 1024 * 1024
PART_COUNT_MAX = 9_000
"""Below the 10,000 parts that S3 allows."""
RECORDS_AT_ONCE = 16
CREATORS = 4
DELETIONS_MAX = 1_000
"""Keys in one request that deletes several."""
TRIES_MAX = 6
TRIES_SECS = 300.0
"""After this time no further try begins."""
PAUSE_SECS = 0.2
"""The pause after the first failure; it doubles with each further one."""
FINAL_ERRORS = (ObjectNotFoundError, OutOfSpaceError, StorageRefusedError)
"""Errors after which a request is not repeated."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class Head(NamedTuple):
    """The properties of an object; its version is text that another object of the key lacks."""

    size_bytes: int
    version: str
    modified_ns: int


class Bucket(Protocol):
    """The requests of an object store, each tried once; keys are whole keys of the bucket.

    Every method raises `StorageError` if the request failed and may be repeated: its effect is then
    unknown. Errors of `FINAL_ERRORS` are final. A client may repeat requests by itself.
    """

    def put(self, key: str, blocks: Sequence[Buffer]) -> None:
        """Write an object, the concatenation of `blocks`, replacing an old one."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; return False if there is one, maybe the caller's."""
        ...

    def upload(self, key: str, source: Source, part_size_bytes: int) -> None:
        """Write an object of the bytes of `source`, in parts, replacing an old one.

        Several parts are sent at once, and a failed part is repeated. The object becomes visible
        with the last request; an upload that fails is discarded as far as it can be.

        Raises:
            ObjectNotFoundError: there is no such upload any more, maybe since it was completed by a
                request whose answer was lost.
        """
        ...

    def head(self, key: str) -> Head:
        """Return the properties of an object."""
        ...

    def get_range(self, key: str, version: str, start_bytes: int, stop_bytes: int) -> Buffer:
        """Return the bytes [start, stop) of an object, which must be of that version."""
        ...

    def get(self, key: str, size_max_bytes: int) -> bytes:
        """Return an object's bytes; of a longer object only the first `size_max_bytes`."""
        ...

    def list_pages(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        """Yield pages of the objects whose key begins with `prefix` and is after `after`, in order.

        `prefix` ends with a slash; `after` is empty or a key that begins with `prefix`. Each page
        is a request.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete at most `DELETIONS_MAX` objects; missing ones are no error."""
        ...


class BucketStore:
    """The objects below `prefix` of a bucket. Thread-safe.

    A reader whose key is deleted or replaced while it is open fails; it returns no other bytes.
    """

    tier = name = "durable"

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        clock: Clock,
        part_size_bytes: int = PART_SIZE_MIN_BYTES,
        home: BucketHome | None = None,
    ) -> None:
        self.home = home or BucketHome(prefix, Path(os.devnull))
        self.fleeting = FleetingObjects(self, clock)
        self._bucket = bucket
        self._prefix = prefix
        self._clock = clock
        self._part_size_bytes = part_size_bytes

    def __repr__(self) -> str:
        return f"BucketStore({self._prefix})"

    def put(self, key: str, source: Source | Buffer) -> None:
        name, source = self._name(key), source_of(source)
        size_bytes = source.size_bytes
        if size_bytes > self._part_size_bytes:
            self._upload(name, source)
            return
        blocks = lasting_blocks(source, 0, size_bytes)
        self._tried(lambda: self._bucket.put(name, blocks))

    def _upload(self, name: str, source: Source) -> None:
        size_bytes = source.size_bytes
        part_size_bytes = max(self._part_size_bytes, -(-size_bytes // PART_COUNT_MAX))
        try:
            self._tried(lambda: self._bucket.upload(name, source, part_size_bytes))
        except ObjectNotFoundError:
            # A completion whose answer was lost has ended the upload. An older object of that name
            # has the same bytes: an image's name identifies it.
            if self._tried(lambda: self._bucket.head(name)).size_bytes != size_bytes:
                raise

    def put_if_absent(self, key: str, data: bytes, after: Sequence[str] = ()) -> bool:
        """Write an object if the key has none.

        Every object of a bucket is durable once it is visible, so `after` changes nothing.
        """
        name = self._name(key)

        def put() -> bool:
            if self._bucket.create(name, data):
                return True
            try:
                return self.get(key) == data
            except ObjectNotFoundError as error:
                # Services answer "exists" also to the loser of two puts that both failed.
                raise StorageError(f"put {key}: it exists, and cannot be found") from error

        return self._tried(put)

    def get(self, key: str) -> bytes:
        name = self._name(key)
        data = self._tried(lambda: self._bucket.get(name, RECORD_SIZE_MAX_BYTES + 1))
        if len(data) > RECORD_SIZE_MAX_BYTES:
            raise CheckpointDamagedError(
                f"read {name}: expected at most {RECORD_SIZE_MAX_BYTES} bytes, found more; it was "
                "not written by Holdfast"
            )
        return data

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | HoldfastError]:
        return read_each(self.get, keys, RECORDS_AT_ONCE)

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        name = self._name(key)
        head = self._tried(lambda: self._bucket.head(name))

        def read(start_bytes: int, stop_bytes: int) -> Buffer:
            return self._tried(
                lambda: self._bucket.get_range(name, head.version, start_bytes, stop_bytes)
            )

        yield _BucketReader(name, head.size_bytes, read)

    def modified_ns(self, key: str) -> int:
        """Return when an object was written, by the service's clock.

        Raises:
            ObjectNotFoundError: the key has no object.
        """
        name = self._name(key)
        return self._tried(lambda: self._bucket.head(name)).modified_ns

    def has_objects(self) -> bool:
        """Return whether anything is stored below the prefix."""
        return next(self._listed(self._prefix), None) is not None

    def has_object(self, key: str) -> bool:
        """Return whether the key has an object."""
        try:
            self.modified_ns(key)
        except ObjectNotFoundError:
            return False
        return True

    def check_creation(self) -> None:
        """Check that of several creators of one object, all at once, one wins.

        Attempts are told apart by that alone, and some services ignore the condition.

        Raises:
            StorageRefusedError: several win.
        """
        key = f"{LEASES}/probe-{self._clock.new_token()}.json"
        name = self._name(key)

        def create(number: int) -> bool:
            return self._tried(lambda: self._bucket.create(name, b"%d" % number))

        try:
            with ThreadPoolExecutor(CREATORS, "holdfast-probe") as pool:
                winners = sum(pool.map(create, range(CREATORS)))
        finally:
            self.delete(key)
        if winners > 1:
            raise StorageRefusedError(
                f"open {self.home}: expected a service where one of {CREATORS} concurrent creators "
                f"of an object wins, found that {winners} did. It ignores If-None-Match, so two "
                "attempts could overwrite each other; use another service or a newer version of it"
            )

    def list(self, prefix: str) -> Iterator[StoredObject]:
        # Some services list as a file system does, where a/b/c is before a/b.c.
        return iter(sorted(self._listed(f"{self._name(prefix)}/")))

    def _listed(self, name: str) -> Iterator[StoredObject]:
        """Yield the objects whose whole key begins with `name`, by their keys in the store."""
        last, pages = "", self._bucket.list_pages(name, "")
        tries = Tries(self._clock, self._prefix)
        while True:
            try:
                for page in pages:
                    for key, size_bytes in page:
                        last = key
                        yield StoredObject(key[len(self._prefix) :], size_bytes)
                    tries = Tries(self._clock, self._prefix)
                return
            except StorageError as error:
                tries.failed(error)
                pages = self._bucket.list_pages(name, last)

    def delete(self, *keys: str) -> None:
        names = [self._name(key) for key in keys]
        for start in range(0, len(names), DELETIONS_MAX):
            some = names[start : start + DELETIONS_MAX]
            self._tried(lambda some=some: self._bucket.delete(some))  # type: ignore[misc]

    def discard_unfinished(self, prefix: str) -> None:
        """Do nothing: an upload of a killed process is not visible, and the bucket's rule ends it.

        Its id is lost with the process, and services list uploads at the cost of a request.
        """
        check_key(prefix)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _tried(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which is repeated after failures."""
        tries = Tries(self._clock, self._prefix)
        while True:
            try:
                return call()
            except StorageError as error:
                tries.failed(error)


class Tries:
    """The tries of one request: with growing pauses, and bounded in number and time."""

    def __init__(self, clock: Clock, what: str) -> None:
        self._clock = clock
        self._what = what
        self._count = 0
        self._deadline_secs = clock.monotonic() + TRIES_SECS

    def failed(self, error: StorageError) -> None:
        """Wait until the next try.

        Raises:
            StorageError: `error`, if it is final, or was the last try's.
        """
        self._count += 1
        is_last = self._count == TRIES_MAX or self._clock.monotonic() > self._deadline_secs
        if isinstance(error, FINAL_ERRORS) or is_last:
            raise error
        log.info("a request to %s is repeated: %s", self._what, error)
        # Between half of the pause and all of it, so that many hosts do not repeat in step.
        share = 0.5 + int(self._clock.new_token()[:4], 16) / (1 << 17)
        self._clock.sleep(share * PAUSE_SECS * 2 ** (self._count - 1))


class _BucketReader:
    """An object, open for ranged reads by any thread."""

    def __init__(self, name: str, size_bytes: int, read: Callable[[int, int], Buffer]) -> None:
        self._name = name
        self._read = read
        self.size_bytes = size_bytes

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        stop_bytes = offset_bytes + len(target)
        if stop_bytes > self.size_bytes:
            raise StorageError(
                f"read {self._name}: expected bytes up to {stop_bytes}, found its end at "
                f"{self.size_bytes}"
            )
        if len(target):
            target[:] = memoryview(self._read(offset_bytes, stop_bytes)).cast("B")

    def view(self) -> memoryview | None:
        return None

    def lasting_view(self) -> memoryview | None:
        return None


def lasting_blocks(source: Source, start_bytes: int, stop_bytes: int) -> Sequence[Buffer]:
    """Return bytes [start, stop) of a source in memory that lasts for repeated requests."""
    blocks = exact_blocks(source, start_bytes, stop_bytes)
    if source.is_lasting:
        return [*blocks]
    copied = bytearray()
    for block in blocks:
        copied += block
    return [copied]
