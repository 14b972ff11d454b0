"""An object store in memory that fails as real ones do, and counts its requests.

    server = ObjectServer(StepClock(), troubles(seed=1))
    store = BucketStore(server, "run/", clock)

A request may be slow, may be refused before it has an effect (throttling, an unavailable service),
and may take effect without its answer arriving. `serve` makes one server reachable from several
processes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, TypeVar

from holdfast.clock import Clock, SystemClock
from holdfast.errors import HoldfastError, ObjectNotFoundError, StorageError
from holdfast.format.digests import Buffer
from holdfast.store.bucket.bucket import (
    DELETIONS_MAX,
    TRIES_MAX,
    Bucket,
    BucketStore,
    Head,
)
from holdfast.store.contract import StoredObject

PAGE_COUNT_MAX = 1_000
METHODS = (
    *("put", "create", "upload_all", "read_head", "read_range", "get", "list_all", "delete"),
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trouble:
    """The failure of one request, before or, with `is_done`, after it has taken effect."""

    is_done: bool = False


Plan = Callable[[str, str], Trouble | None]
"""Returns the failure of a request, given its name and its key."""


def no_trouble(request: str, key: str) -> Trouble | None:
    """Return None: no request fails."""
    return None


def troubles(seed: int, share: float = 0.2) -> Plan:
    """Return a plan by which that share of the requests fails, half of them once done."""
    chance, lock = random.Random(seed), threading.Lock()

    def plan(request: str, key: str) -> Trouble | None:
        with lock:
            drawn = chance.random()
        return Trouble(is_done=drawn < share / 2) if drawn < share else None

    return plan


class ObjectServer:
    """A `Bucket` in memory. Thread-safe.

    Attributes:
        objects: the bytes and the version of each object.
        uploads: the parts of each upload that was not completed.
        requests: how often each method was called.
        plan: the failures; may be replaced at any time.
    """

    def __init__(
        self, clock: Clock | None = None, plan: Plan = no_trouble, latency_secs: float = 0.0
    ) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: Counter[str] = Counter()
        self.plan = plan
        self._written_ns: dict[str, int] = {}
        self._keys: list[str] = []
        """The keys of `objects`, sorted."""
        self._clock = clock or SystemClock()
        self._latency_secs = latency_secs
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def put(self, key: str, blocks: Sequence[Buffer]) -> None:
        self._do("put", key, lambda: self._write(key, b"".join(blocks)))

    def create(self, key: str, data: bytes) -> bool:
        def create() -> bool:
            if key in self.objects:
                return False
            self._write(key, bytes(data))
            return True

        return self._do("create", key, create)

    def upload(self, key: str, parts: Iterator[memoryview], part_size_bytes: int) -> None:
        """Upload in parts, each repeated where it fails, as the clients of services do."""
        upload = self._tried("begin_upload", key, self._begin)
        try:
            # `map` refers to no part once it is copied.
            for number, data in enumerate(map(bytes, parts)):
                keep = functools.partial(self._keep, upload, number, data)
                self._tried("upload_part", key, keep)
            self._tried("complete_upload", key, lambda: self._complete(key, upload))
        except HoldfastError:
            with contextlib.suppress(StorageError):
                self._tried("abort_upload", key, lambda: self.uploads.pop(upload, None))
            raise

    def _begin(self) -> str:
        upload = f"upload-{next(self._numbers)}"
        self.uploads[upload] = {}
        return upload

    def _keep(self, upload: str, number: int, data: bytes) -> None:
        self.uploads[upload][number] = data

    def _complete(self, key: str, upload: str) -> None:
        parts = self.uploads.pop(upload, None)
        if parts is None:
            # Services answer this also if a try whose answer was lost has completed it.
            raise ObjectNotFoundError(f"complete {upload} of {key}: there is no such upload")
        self._write(key, b"".join(parts[number] for number in sorted(parts)))

    def _tried(self, request: str, key: str, call: Callable[[], T]) -> T:
        for _ in range(TRIES_MAX - 1):
            try:
                return self._do(request, key, call)
            except ObjectNotFoundError:
                raise
            except StorageError:
                pass
        return self._do(request, key, call)

    def read_head(self, key: str) -> Head:
        def look() -> Head:
            data, version = self._found(key)
            return Head(len(data), version, self._written_ns[key])

        return self._do("head", key, look)

    def read_into(self, key: str, version: str, start_bytes: int, target: memoryview) -> None:
        target[:] = self.read_range(key, version, start_bytes, start_bytes + len(target))

    def read_range(self, key: str, version: str, start_bytes: int, stop_bytes: int) -> bytes:
        """Return the bytes [start, stop), for a client in another process."""

        def read() -> bytes:
            data, found = self._found(key)
            if found != version:
                raise ObjectNotFoundError(f"read {key}: it was replaced")
            return data[start_bytes:stop_bytes]

        return self._do("read_range", key, read)

    def get(self, key: str, size_max_bytes: int) -> bytes:
        return self._do("get", key, lambda: self._found(key)[0][:size_max_bytes])

    def list_pages(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        while True:
            page = self._do("list_page", prefix, functools.partial(self._page, prefix, after))
            yield page
            if len(page) < PAGE_COUNT_MAX:
                return
            after = page[-1].key

    def list_all(self, prefix: str, after: str) -> Sequence[Sequence[StoredObject]]:
        """Return all pages at once, for a client in another process."""
        return [*self.list_pages(prefix, after)]

    def upload_all(self, key: str, parts: Sequence[bytes], part_size_bytes: int) -> None:
        """Upload parts that a client in another process has sent."""
        self.upload(key, map(memoryview, parts), part_size_bytes)

    def _page(self, prefix: str, after: str) -> Sequence[StoredObject]:
        keys = self._keys
        start = bisect_right(keys, after) if after else bisect_left(keys, prefix)
        page = keys[start : start + PAGE_COUNT_MAX]
        return [StoredObject(k, len(self.objects[k][0])) for k in page if k.startswith(prefix)]

    def delete(self, keys: Sequence[str]) -> None:
        if len(keys) > DELETIONS_MAX:
            raise ValueError(f"delete {len(keys)} keys: expected at most {DELETIONS_MAX}")

        def remove() -> None:
            for key in keys:
                if self.objects.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]

        self._do("delete", keys[0], remove)

    def _do(self, request: str, key: str, call: Callable[[], T]) -> T:
        if self._latency_secs:
            self._clock.sleep(self._latency_secs)
        trouble = self.plan(request, key)
        with self._lock:
            self.requests[request] += 1
            if trouble is None:
                return call()
            if trouble.is_done:
                call()
        raise StorageError(f"{request} {key}: 503 on purpose, done: {trouble.is_done}")

    def _write(self, key: str, data: bytes) -> None:
        if key not in self.objects:
            insort(self._keys, key)
        self.objects[key] = data, f"v{next(self._numbers)}"
        self._written_ns[key] = int(self._clock.monotonic() * 1e9)

    def _found(self, key: str) -> tuple[bytes, str]:
        if key not in self.objects:
            raise ObjectNotFoundError(f"read {key}: there is no such object")
        return self.objects[key]


class ServedBucket:
    """A `Bucket` at a server that `serve` runs, maybe in another process. Picklable.

    Each thread has a connection of its own.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._local = threading.local()

    def list_pages(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        # Requested with the first page, as from a service: a failure is the iteration's.
        yield from self._ask("list_all", prefix, after)

    def upload(self, key: str, parts: Iterator[memoryview], part_size_bytes: int) -> None:
        self._ask("upload_all", key, [*map(bytes, parts)], part_size_bytes)

    def read_into(self, key: str, version: str, start_bytes: int, target: memoryview) -> None:
        target[:] = self._ask("read_range", key, version, start_bytes, start_bytes + len(target))

    def __reduce__(self) -> tuple[Any, ...]:
        return ServedBucket, (self._address,)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in METHODS:
            raise AttributeError(name)
        return lambda *arguments: self._ask(name, *map(_plain, arguments))

    def _ask(self, name: str, *arguments: object) -> Any:
        if not hasattr(self._local, "connection"):
            self._local.connection = Client(self._address)
        self._local.connection.send((name, arguments))
        answer = self._local.connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _plain(argument: object) -> object:
    """Return an argument in a form that can be sent to another process."""
    if isinstance(argument, list) and argument and isinstance(argument[0], memoryview):
        return [bytes(block) for block in argument]
    return bytes(argument) if isinstance(argument, memoryview) else argument


@contextlib.contextmanager
def serve(server: ObjectServer) -> Iterator[ServedBucket]:
    """Serve `server` to other processes; yield its client."""
    # The socket is in a private folder. Without a key, clients that die do not disturb `accept`.
    with Listener(family="AF_UNIX", backlog=64) as listener:
        # Daemons: they end with their clients' connections.
        threading.Thread(target=_accept, args=(listener, server), daemon=True).start()
        yield ServedBucket(str(listener.address))


def _accept(listener: Listener, server: ObjectServer) -> None:
    # Ends when the listener is closed.
    with contextlib.suppress(OSError):
        while True:
            arguments = (listener.accept(), server)
            threading.Thread(target=_answer, args=arguments, daemon=True).start()


def _answer(connection: Connection, server: ObjectServer) -> None:
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            name, arguments = connection.recv()
            try:
                answer = getattr(server, name)(*arguments)
            except HoldfastError as error:
                answer = error
            connection.send(answer)


def open_bucket(bucket: Bucket) -> BucketStore:
    """Return a store in `bucket`, whose parts are small, and whose pauses are short."""
    return BucketStore(bucket, "runs/one/", _Hurried(), part_size_bytes=1 << 20)


class _Hurried(SystemClock):
    """A clock that does not wait."""

    def sleep(self, secs: float) -> None:
        pass
