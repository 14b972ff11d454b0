"""A run in an object store: keys below a prefix of a bucket, without hard links or folders.

`Bucket` is the client of one service. It makes single requests, and each may fail, also after it
has taken effect. `BucketStore` builds the store contract on it, and is the one place that retries:

- A failed request is repeated with growing pauses, at most `TRIES_MAX` times; one that the service
  refuses for now, since it has too many, for `THROTTLED_SECS`. That also slows uploads down.
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

import builtins
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from holdfast import waits
from holdfast.clock import Clock
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    ObjectNotFoundError,
    OutOfSpaceError,
    StorageError,
    StorageRefusedError,
    StorageThrottledError,
)
from holdfast.format.digests import Buffer
from holdfast.format.names import LEASES
from holdfast.format.sealed import RECORD_SIZE_MAX_BYTES, is_sealed
from holdfast.quantities import secs_text
from holdfast.store.bucket.bucket_home import BucketHome, FleetingObjects, removed_after
from holdfast.store.bucket.upload_pace import UploadPace
from holdfast.store.contract import (
    DURABLE,
    REMOTE,
    Reader,
    Source,
    Store,
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
LOGGED_COUNT = 3
"""The failure of a request that is logged as a warning. One or two are usual for a service."""
LOGGED_SECS = 20.0
"""An earlier failure is logged too after this time, as of a service that does not answer."""
THROTTLED_SECS = 900.0
"""The same, for requests that a service refuses since it has too many."""
PAUSE_SECS = 0.2
"""The pause after the first failure; it doubles with each further one."""
PAUSE_MAX_SECS = 20.0
RECORDS = ".json"
"""How the keys of sealed records end."""
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

    def upload(self, key: str, parts: Iterator[memoryview], part_size_bytes: int) -> None:
        """Write an object of `parts`, replacing an old one; all but the last have that size.

        Parts are sent as they are yielded, several at once, and a failed part is repeated. No part
        is referred to once it was sent. The object becomes visible with the last request; an upload
        that fails is discarded as far as it can be.

        Raises:
            ObjectNotFoundError: there is no such upload any more, maybe since it was completed by a
                request whose answer was lost.
        """
        ...

    def read_head(self, key: str) -> Head:
        """Return the properties of an object."""
        ...

    def read_into(self, key: str, version: str, start_bytes: int, target: memoryview) -> None:
        """Fill `target` with bytes from `start_bytes` on of an object of that version.

        After an error `target` is undefined.
        """
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


class CountedBucket:
    """A bucket that counts the requests it passes on, also failed ones. Thread-safe.

    An upload is a request for each part and two more, which begin and complete it. Requests that a
    client repeats by itself are counted once.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        self._count = 0

    def __repr__(self) -> str:
        return repr(self._bucket)

    @property
    def request_count(self) -> int:
        """The requests so far."""
        return self._count

    def _add(self, count: int = 1) -> None:
        with self._lock:
            self._count += count

    def put(self, key: str, blocks: Sequence[Buffer]) -> None:
        self._add()
        self._bucket.put(key, blocks)

    def create(self, key: str, data: bytes) -> bool:
        self._add()
        return self._bucket.create(key, data)

    def upload(self, key: str, parts: Iterator[memoryview], part_size_bytes: int) -> None:
        def counted() -> Generator[memoryview, None, None]:
            for part in parts:
                self._add()
                yield part
                del part  # While something refers to it, the pace counts it as in flight.

        self._add(2)
        with contextlib.closing(counted()) as counted_parts:
            self._bucket.upload(key, counted_parts, part_size_bytes)

    def read_head(self, key: str) -> Head:
        self._add()
        return self._bucket.read_head(key)

    def read_into(self, key: str, version: str, start_bytes: int, target: memoryview) -> None:
        self._add()
        self._bucket.read_into(key, version, start_bytes, target)

    def get(self, key: str, size_max_bytes: int) -> bytes:
        self._add()
        return self._bucket.get(key, size_max_bytes)

    def list_pages(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        self._add()
        for number, page in enumerate(self._bucket.list_pages(prefix, after)):
            if number:
                self._add()
            yield page

    def delete(self, keys: Sequence[str]) -> None:
        self._add()
        self._bucket.delete(keys)


class BucketStore(Store):
    """The objects below `prefix` of a bucket. Thread-safe.

    A reader whose key is deleted or replaced while it is open fails; it returns no other bytes.
    """

    is_remote = True

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        clock: Clock,
        part_size_bytes: int = PART_SIZE_MIN_BYTES,
        home: BucketHome | None = None,
        tier: str = DURABLE,
    ) -> None:
        self.tier = self.name = tier
        self.is_optional = tier == REMOTE
        self.home = home or BucketHome(prefix, Path(os.devnull))
        self.fleeting = FleetingObjects(self, clock)
        self._bucket = CountedBucket(bucket)
        self._prefix = prefix
        self._clock = clock
        self._part_size_bytes = part_size_bytes
        self.pace = UploadPace(clock)
        self._outage = Outage()

    def __repr__(self) -> str:
        return f"BucketStore({self._prefix})"

    @property
    def request_count(self) -> int | None:
        """The requests to the bucket so far."""
        return self._bucket.request_count

    def put(self, key: str, source: Source | Buffer) -> None:
        self._check_not_gone()
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

        def upload() -> None:
            # Closed, because a kept error refers to it, and so to a part that would stay in flight.
            with contextlib.closing(self.pace.paced_parts(source, part_size_bytes)) as parts:
                self._bucket.upload(name, parts, part_size_bytes)

        try:
            self._tried(upload)
        except ObjectNotFoundError:
            # A completion whose answer was lost has ended the upload. An older object of that name
            # has the same bytes: an image's name identifies it.
            if self._tried(lambda: self._bucket.read_head(name)).size_bytes != size_bytes:
                raise

    def put_if_absent(self, key: str, data: bytes, after: Sequence[str] = ()) -> bool:
        """Write an object if the key has none.

        Every object of a bucket is durable once it is visible, so `after` changes nothing.
        """
        self._check_not_gone()
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

        def read() -> bytes:
            return self._tried(lambda: self._bucket.get(name, RECORD_SIZE_MAX_BYTES + 1))

        data = read()
        if key.endswith(RECORDS) and not is_sealed(data):
            # It may have been changed on the way, as a block that is read again.
            data = read()
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
        head = self._tried(lambda: self._bucket.read_head(name))

        def read(start_bytes: int, target: memoryview) -> None:
            self._tried(lambda: self._bucket.read_into(name, head.version, start_bytes, target))

        yield _BucketReader(name, head.size_bytes, read)

    def modified_ns(self, key: str) -> int:
        """Return when an object was written, by the service's clock.

        Raises:
            ObjectNotFoundError: the key has no object.
        """
        name = self._name(key)
        return self._tried(lambda: self._bucket.read_head(name)).modified_ns

    def is_unused(self) -> bool:
        """Return whether nothing is stored below the prefix, except what is renewed or temporary.

        Another process that opens the prefix may be at `prepare_place`.
        """
        return all(key.startswith(f"{LEASES}/") for key in self.all_keys())

    def all_keys(self) -> Iterator[str]:
        """Yield the keys of all objects below the prefix, in the order of the service."""
        return (stored.key for stored in self._listed(self._prefix))

    def has_object(self, key: str) -> bool:
        try:
            self.modified_ns(key)
        except ObjectNotFoundError:
            return False
        return True

    def prepare_place(self) -> None:
        """Check that of several creators of one object, all at once, one wins.

        Attempts are told apart by that alone, and some services ignore the condition.

        Raises:
            StorageRefusedError: several win.
        """
        key = f"{LEASES}/probe-{self._clock.new_token()}.json"
        name = self._name(key)

        def create(number: int) -> bool:
            return self._tried(lambda: self._bucket.create(name, b"%d" % number))

        with removed_after(self, key), waits.thread_pool(CREATORS, "holdfast-probe") as pool:
            winners = sum(waits.results(pool, create, range(CREATORS)))
        if winners > 1:
            raise StorageRefusedError(
                f"open {self.home}: expected a service where one of {CREATORS} concurrent creators "
                f"of an object wins, found that {winners} did. It ignores If-None-Match, so two "
                "attempts could overwrite each other; use another service or a newer version of it"
            )

    def list(self, prefix: str) -> Iterator[StoredObject]:
        # Some services list as a file system does, where a/b/c is before a/b.c.
        return iter(self.list_some(prefix))

    def list_some(
        self, prefix: str, *, after: str = "", before: str = "", count_max: int | None = None
    ) -> builtins.list[StoredObject]:
        name = f"{self._name(prefix)}/"
        last = self._prefix + after if after else ""
        listing = self._listed(name, last)
        if before:
            listing = itertools.takewhile(lambda stored: stored.key < before, listing)
        return sorted(itertools.islice(listing, count_max))

    def _listed(self, name: str, last: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose whole key begins with `name` and is after `last`.

        Yields:
            Their keys in the store and sizes, in the order of the service.
        """
        pages = self._bucket.list_pages(name, last)
        tries = self._tries()
        while True:
            try:
                for page in pages:
                    for key, size_bytes in page:
                        last = key
                        yield StoredObject(key[len(self._prefix) :], size_bytes)
                    tries = self._tries()
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

    def _check_not_gone(self) -> None:
        """Check that the run was not found deleted: what is written there would be left over.

        Raises:
            StorageError: it was.
        """
        reason = self.home.unusable_reason()
        if reason is not None:
            raise StorageError(reason)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _tried(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which is repeated after failures."""
        tries = self._tries()
        while True:
            try:
                result = call()
            except StorageError as error:
                tries.failed(error)
            else:
                self._outage.is_logged = False
                return result

    def _tries(self) -> Tries:
        return Tries(self._clock, self._prefix, self.pace, self._outage)


@dataclass(slots=True)
class Outage:
    """Whether it was logged that requests of a store fail, since one has succeeded last."""

    is_logged: bool = False


class Tries:
    """The tries of one request: with growing pauses, and bounded in number and time."""

    def __init__(self, clock: Clock, what: str, pace: UploadPace, outage: Outage) -> None:
        self._clock = clock
        self._what = what
        self._pace = pace
        self._outage = outage
        self._count = 0
        self._throttled_count = 0
        self._began_secs = clock.monotonic()

    def failed(self, error: StorageError) -> None:
        """Wait until the next try.

        Raises:
            StorageError: `error`, if it is final, or was the last try's.
            WaitInterruptedError: A signal ends the wait.
        """
        secs = self._clock.monotonic() - self._began_secs
        if isinstance(error, StorageThrottledError):
            self._pace.slow_down()
            self._throttled_count += 1
            is_last = secs > THROTTLED_SECS
            pause_secs = PAUSE_SECS * 2 ** min(self._throttled_count - 1, 10)
        else:
            self._count += 1
            is_last = self._count == TRIES_MAX or secs > (
                THROTTLED_SECS if self._throttled_count else TRIES_SECS
            )
            pause_secs = PAUSE_SECS * 2 ** (self._count - 1)
        if isinstance(error, FINAL_ERRORS) or is_last:
            raise error
        if isinstance(error, StorageThrottledError) and self._throttled_count == 1:
            text = "%s: its service has too many requests; this one is repeated for up to %d s: %s"
            log.warning(text, self._what, THROTTLED_SECS, error)
        elif self._is_worth_a_warning(secs) and not self._outage.is_logged:
            self._outage.is_logged = True
            text = "%s: try %d of %d of a request has failed, after %s: %s"
            log.warning(text, self._what, self._count, TRIES_MAX, secs_text(secs), error)
        else:
            log.debug("a request to %s is repeated: %s", self._what, error)
        # Between half of the pause and all of it, so that many hosts do not repeat in step.
        share = 0.5 + int(self._clock.new_token()[:4], 16) / (1 << 17)
        waits.sleep(self._clock, share * min(pause_secs, PAUSE_MAX_SECS))

    def _is_worth_a_warning(self, secs: float) -> bool:
        is_early = 0 < self._count < LOGGED_COUNT
        return self._count == LOGGED_COUNT or (is_early and secs > LOGGED_SECS)


class _BucketReader:
    """An object, open for ranged reads by any thread."""

    def __init__(self, name: str, size_bytes: int, read: Callable[[int, memoryview], None]) -> None:
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
            self._read(offset_bytes, target)

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
