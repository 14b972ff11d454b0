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

Assumes that the service is strongly consistent, and lists keys in the order of their code points.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from holdfast.clock import Clock
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    ObjectNotFoundError,
    OutOfSpaceError,
    StorageError,
)
from holdfast.format.buffers import Buffer
from holdfast.format.sealed import RECORD_SIZE_MAX_BYTES
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
PARTS_AT_ONCE = 8
RECORDS_AT_ONCE = 16
DELETIONS_MAX = 1_000
"""Keys in one request that deletes several."""
TRIES_MAX = 6
PAUSE_SECS = 0.1
"""The pause after the first failure; it doubles with each further one."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class ListedPage(NamedTuple):
    """One page of a listing; `next_after` is the last key of the page, "" on the last page."""

    objects: Sequence[StoredObject]
    next_after: str


class Bucket(Protocol):
    """The requests of an object store, each tried once; keys are whole keys of the bucket.

    Every method raises `StorageError` if the request failed and may be repeated: its effect is then
    unknown. `OutOfSpaceError` and `ObjectNotFoundError` are final.
    """

    def put(self, key: str, blocks: Sequence[Buffer]) -> None:
        """Write an object, the concatenation of `blocks`, replacing an old one."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; return False if there is one, maybe the caller's."""
        ...

    def begin_upload(self, key: str) -> str:
        """Begin an upload in parts and return its id."""
        ...

    def upload_part(self, key: str, upload: str, number: int, blocks: Sequence[Buffer]) -> str:
        """Upload the part of that number, the concatenation of `blocks`; return its tag."""
        ...

    def complete_upload(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """Make the object visible; `tags` are those of all parts in order.

        Raises:
            ObjectNotFoundError: there is no such upload: it was completed or aborted before.
        """
        ...

    def abort_upload(self, key: str, upload: str) -> None:
        """Discard an upload that was not completed."""
        ...

    def head(self, key: str) -> tuple[int, str]:
        """Return an object's size in bytes and its version."""
        ...

    def get_range(self, key: str, version: str, start_bytes: int, stop_bytes: int) -> Buffer:
        """Return the bytes [start, stop) of an object, which must be of that version."""
        ...

    def get(self, key: str, size_max_bytes: int) -> bytes:
        """Return an object's bytes; of a longer object only the first `size_max_bytes`."""
        ...

    def list_page(self, prefix: str, after: str) -> ListedPage:
        """Return the objects whose key begins with `prefix` and is after `after`, in order."""
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
    ) -> None:
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
        blocks = _blocks(source, 0, size_bytes)
        self._tried(lambda: self._bucket.put(name, blocks))

    def _upload(self, name: str, source: Source) -> None:
        """Put an object in parts; on an error, no part of it remains."""
        size_bytes = source.size_bytes
        part_bytes = max(self._part_size_bytes, -(-size_bytes // PART_COUNT_MAX))
        starts = range(0, size_bytes, part_bytes)
        upload = self._tried(lambda: self._bucket.begin_upload(name))

        def send(number: int) -> str:
            start = starts[number - 1]
            # Requested here, so that at most as many parts as threads are held in memory.
            blocks = _blocks(source, start, min(start + part_bytes, size_bytes))
            return self._tried(lambda: self._bucket.upload_part(name, upload, number, blocks))

        with contextlib.ExitStack() as on_error:
            on_error.callback(self._abort, name, upload)
            with ThreadPoolExecutor(min(PARTS_AT_ONCE, len(starts)), "holdfast-upload") as pool:
                sending = [pool.submit(send, number) for number in range(1, len(starts) + 1)]
                try:
                    tags = [part.result() for part in sending]
                finally:
                    pool.shutdown(cancel_futures=True)
            self._complete(name, upload, tags, size_bytes)
            on_error.pop_all()

    def _abort(self, name: str, upload: str) -> None:
        # Once: what remains is not visible, and the bucket's rule ends it.
        with contextlib.suppress(StorageError):
            self._bucket.abort_upload(name, upload)

    def _complete(self, name: str, upload: str, tags: Sequence[str], size_bytes: int) -> None:
        try:
            self._tried(lambda: self._bucket.complete_upload(name, upload, tags))
        except ObjectNotFoundError:
            # A try whose answer was lost has completed it. An older object of that name has the
            # same bytes: an image's name identifies it.
            if self._tried(lambda: self._bucket.head(name))[0] != size_bytes:
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
        size_bytes, version = self._tried(lambda: self._bucket.head(name))

        def read(start_bytes: int, stop_bytes: int) -> Buffer:
            return self._tried(
                lambda: self._bucket.get_range(name, version, start_bytes, stop_bytes)
            )

        yield _BucketReader(name, size_bytes, read)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        name, after = f"{self._name(prefix)}/", ""
        while True:
            page = self._tried(lambda after=after: self._bucket.list_page(name, after))  # type: ignore[misc]
            for key, size_bytes in page.objects:
                yield StoredObject(key[len(self._prefix) :], size_bytes)
            after = page.next_after
            if not after:
                return

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
        for number in range(TRIES_MAX - 1):
            try:
                return call()
            except (ObjectNotFoundError, OutOfSpaceError):
                raise
            except StorageError as error:
                log.debug("a request to %s is repeated: %s", self._prefix, error)
                self._clock.sleep(PAUSE_SECS * 2**number)
        return call()


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


def _blocks(source: Source, start_bytes: int, stop_bytes: int) -> Sequence[Buffer]:
    """Return bytes [start, stop) of a source in memory that lasts for repeated requests."""
    blocks = exact_blocks(source, start_bytes, stop_bytes)
    if source.is_lasting:
        return [*blocks]
    copied = bytearray()
    for block in blocks:
        copied += block
    return [copied]
