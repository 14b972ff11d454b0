"""Wrappers of stores: one that dies at a chosen point, one that records reads."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError
from holdfast.format.digests import Buffer
from holdfast.store.contract import Reader, Source, Store, StoredObject, source_of
from holdfast.store.ram import RamStore
from holdfast.store.slots import SlotPool

POINTS = ("before", "midway", "after")


def ram(root: Path) -> RamStore:
    """A RAM store in `root` with a pool of its own."""
    root.mkdir(parents=True, exist_ok=True)
    return RamStore(root, SlotPool(root, None, SystemClock()).reserve, SystemClock())


class DiedError(Exception):
    """Simulates the death of the process: nothing after it takes effect."""


class DyingStore:
    """Performs `calls_left` more changing calls; dies before, midway in or after the next one.

    Midway, a put has written some of its bytes, and any other call is done but has not returned.
    A delete of several objects counts as so many calls.
    """

    def __init__(self, inner: Store, calls_left: int, point: str) -> None:
        self.tier = inner.tier
        self.is_remote = inner.is_remote
        self.is_in_memory = inner.is_in_memory
        self.is_optional = inner.is_optional
        self.name = inner.name
        self.has_died = False
        self._inner = inner
        self._calls_left = calls_left
        self._point = point

    def put(self, key: str, source: Source | Buffer) -> None:
        if self._calls_left == 0 and self._point == "midway":
            source = _DyingSource(source_of(source), self._die)
        self._change(lambda: self._inner.put(key, source))

    def put_if_absent(self, key: str, data: bytes, after: Sequence[str] = ()) -> bool:
        return self._change(lambda: self._inner.put_if_absent(key, data, after))

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._change(functools.partial(self._inner.delete, key))

    def discard_unfinished(self, prefix: str) -> None:
        self._change(lambda: self._inner.discard_unfinished(prefix))

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | HoldfastError]:
        return self._inner.get_many(keys)

    def open(self, key: str) -> AbstractContextManager[Reader]:
        return self._inner.open(key)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._inner.list(prefix)

    def list_some(self, prefix: str, **bounds: Any) -> Any:
        return self._inner.list_some(prefix, **bounds)

    def _change(self, call: Callable[[], Any]) -> Any:
        assert not self.has_died
        self._calls_left -= 1
        if self._calls_left >= 0:
            return call()
        if self._point != "before":
            call()
        self._die()
        raise AssertionError

    def _die(self) -> None:
        self.has_died = True
        raise DiedError


class _DyingSource:
    """A source whose store dies once it has written the first block of a range."""

    def __init__(self, inner: Source, die: Callable[[], None]) -> None:
        self.is_lasting = False
        self.size_bytes = inner.size_bytes
        self._inner = inner
        self._die = die

    def blocks(self, start_bytes: int, stop_bytes: int) -> Iterator[Buffer]:
        for block in self._inner.blocks(start_bytes, stop_bytes):
            yield block
            self._die()


class WatchingStore:
    """Records every range read, and reads of closed objects; can delay reads."""

    def __init__(self, inner: Store) -> None:
        self.tier = inner.tier
        self.is_remote = inner.is_remote
        self.is_in_memory = inner.is_in_memory
        self.is_optional = inner.is_optional
        self.name = inner.name
        self.reads: list[tuple[str, int, int]] = []
        self.opened: list[str] = []
        self.closed_during_reads = 0
        self.before_read: Callable[[int], None] = lambda offset: None
        self.on_memory: Callable[[memoryview], None] = lambda memory: None
        self.closing = threading.Event()
        self._inner = inner

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        self.opened.append(key)
        with self._inner.open(key) as reader:
            watching = _WatchingReader(self, key, reader)
            try:
                yield watching
            finally:
                self.closing.set()
                self.closed_during_reads += watching.under_way

    def put(self, key: str, source: Source | Buffer) -> None:
        self._inner.put(key, source)

    def put_if_absent(self, key: str, data: bytes, after: Sequence[str] = ()) -> bool:
        return self._inner.put_if_absent(key, data, after)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | HoldfastError]:
        return self._inner.get_many(keys)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._inner.list(prefix)

    def list_some(self, prefix: str, **bounds: Any) -> Any:
        return self._inner.list_some(prefix, **bounds)

    def delete(self, *keys: str) -> None:
        self._inner.delete(*keys)

    def discard_unfinished(self, prefix: str) -> None:
        self._inner.discard_unfinished(prefix)


class _WatchingReader:
    def __init__(self, store: WatchingStore, key: str, inner: Reader) -> None:
        self._store = store
        self._key = key
        self._inner = inner
        self.under_way = 0

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def view(self) -> memoryview | None:
        """Reads that bypass this method are not recorded."""
        return None

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        self.under_way += 1
        try:
            self._store.reads.append((self._key, offset_bytes, offset_bytes + len(target)))
            self._store.before_read(offset_bytes)
            self._store.on_memory(target)
            self._inner.read_into(offset_bytes, target)
        finally:
            self.under_way -= 1
