"""Fault injection: a file system that fails any operation, at any time, as real storage does.

It wraps a store's file system, and calls its plan before each operation:

    plan = Plan(Fault(errno=errno.ENOSPC), at=3, operations={"write"}, path="*/image-*")
    files = FailingFileSystem(plan)
    store = DiskStore(root, SystemClock(), files)   # RamStore, SlotPool and the agent take it too
    with pytest.raises(OutOfSpaceError):
        store.put(key, data)           # its third write to an image fails
    assert plan.hits and not files.open_descriptors()

To fail each operation of a call in turn, run the call once with `FailurePlan(None)`, which only
counts, then once for each number from 1 to `plan.seen`. A plan may be any function from an
`Operation` to a `Fault` or None, and `files.plan` may be replaced at any time.

Both are thread-safe.
"""

from __future__ import annotations

import errno as error_numbers
import fnmatch
import mmap
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from holdfast.clock import Clock, SystemClock
from holdfast.store.files.file_system import LOCAL, FileSystem

READS = frozenset({"read"})
BYTES = frozenset({"write", "fill", "truncate", "allocate", "sync"})
NAMES = frozenset({"rename", "link", "unlink", "make_folder", "remove_folder"})
CHANGES = BYTES | NAMES
OPERATIONS = READS | CHANGES | {"open", "close"}
"""The names of the methods of `FileSystem`."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call: the method's name, and the path; for a rename or link, the new path."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The failure of one operation; all given effects happen, in this order.

    Attributes:
        stall_secs: the operation is delayed by this time.
        taken_bytes: a read or write transfers at most this many bytes. This is not an error, and
            other operations ignore it.
        errno: the operation raises an OSError with this number.
        is_done: the error is raised after the operation was done, as if an answer was lost. A
            `close` is always done.
    """

    stall_secs: float = 0.0
    taken_bytes: int | None = None
    errno: int | None = None
    is_done: bool = False

    def __post_init__(self) -> None:
        if self.taken_bytes is not None and self.taken_bytes < 1:
            raise ValueError(f"taken_bytes={self.taken_bytes}: expected 1 or more")


class FailurePlan:
    """Fails the matching operations from the `at`-th to the `until`-th (exclusive).

    Args:
        fault: the failure; None: operations are only counted.
        at: the first operation that fails, counted from 1.
        until: the first operation that succeeds again; None: only one fails.
        operations: the names of the operations that match.
        path: an `fnmatch` pattern for the whole path; `*` also matches slashes.

    Attributes:
        fault: the given fault.
        seen: the number of matching operations so far.
        hits: the operations that failed.
    """

    def __init__(
        self,
        fault: Fault | None,
        *,
        at: int = 1,
        until: float | None = None,
        operations: Collection[str] = OPERATIONS,
        path: str = "*",
    ) -> None:
        unknown = set(operations) - OPERATIONS
        if unknown or at < 1:
            raise ValueError(f"at={at}, operations {sorted(unknown)}: expected 1 or more, and none")
        self.seen = 0
        self.hits: list[Operation] = []
        self.fault = fault
        self._at = at
        self._until = at + 1 if until is None else until
        self._operations = operations
        self._path = path
        self._lock = threading.Lock()

    def __call__(self, operation: Operation) -> Fault | None:
        if operation.name not in self._operations:
            return None
        if not fnmatch.fnmatchcase(str(operation.path), self._path):
            return None
        with self._lock:
            self.seen += 1
            if self.fault is None or not self._at <= self.seen < self._until:
                return None
            self.hits.append(operation)
            return self.fault


def nothing(operation: Operation) -> Fault | None:
    """Return None: the plan of storage without faults."""
    return None


class FailingFileSystem:
    """A `FileSystem` that delegates to `inner`, except for the faults of `plan`."""

    def __init__(
        self,
        plan: Callable[[Operation], Fault | None] = nothing,
        inner: FileSystem = LOCAL,
        clock: Clock | None = None,
    ) -> None:
        self.plan = plan
        self._inner = inner
        self._clock = clock or SystemClock()
        # Each entry is set and removed atomically, by the thread that owns the descriptor.
        self._paths: dict[int, Path] = {}

    def open_descriptors(self) -> dict[int, Path]:
        """Return the descriptors that were opened here and not closed."""
        return dict(self._paths)

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fault = self._ask("open", path)
        if fault is not None and fault.errno is not None and not fault.is_done:
            raise _error(fault.errno, path)
        fd = self._inner.open(path, flags, mode)
        if fault is not None and fault.errno is not None:
            self._inner.close(fd)
            raise _error(fault.errno, path)
        self._paths[fd] = path
        return fd

    def read(self, fd: int, target: memoryview, offset_bytes: int) -> int:
        path, fault = self._ask_of("read", fd)
        taken = target[: _taken(fault)]
        return _done(fault, path, lambda: self._inner.read(fd, taken, offset_bytes))

    def write(self, fd: int, data: memoryview) -> int:
        path, fault = self._ask_of("write", fd)
        taken = data[: _taken(fault)]
        return _done(fault, path, lambda: self._inner.write(fd, taken))

    def fill_pages(self, fd: int, pages: mmap.mmap, offset_bytes: int, data: memoryview) -> None:
        path, fault = self._ask_of("fill", fd)
        _done(fault, path, lambda: self._inner.fill_pages(fd, pages, offset_bytes, data))

    def truncate(self, fd: int, size_bytes: int) -> None:
        path, fault = self._ask_of("truncate", fd)
        _done(fault, path, lambda: self._inner.truncate(fd, size_bytes))

    def allocate(self, fd: int, size_bytes: int) -> None:
        path, fault = self._ask_of("allocate", fd)
        _done(fault, path, lambda: self._inner.allocate(fd, size_bytes))

    def sync(self, fd: int) -> None:
        path, fault = self._ask_of("sync", fd)
        _done(fault, path, lambda: self._inner.sync(fd))

    def close(self, fd: int) -> None:
        path, fault = self._ask_of("close", fd)
        # The number may be reused by another thread from here on.
        self._paths.pop(fd, None)
        self._inner.close(fd)
        if fault is not None and fault.errno is not None:
            raise _error(fault.errno, path)

    def rename(self, source: Path, target: Path) -> None:
        fault = self._ask("rename", target)
        _done(fault, target, lambda: self._inner.rename(source, target))

    def rename_to_new(self, source: Path, target: Path) -> None:
        fault = self._ask("rename", target)
        _done(fault, target, lambda: self._inner.rename_to_new(source, target))

    def link(self, source: Path, target: Path) -> None:
        fault = self._ask("link", target)
        _done(fault, target, lambda: self._inner.link(source, target))

    def unlink(self, path: Path) -> None:
        fault = self._ask("unlink", path)
        _done(fault, path, lambda: self._inner.unlink(path))

    def make_folder(self, path: Path) -> None:
        fault = self._ask("make_folder", path)
        _done(fault, path, lambda: self._inner.make_folder(path))

    def remove_folder(self, path: Path) -> None:
        fault = self._ask("remove_folder", path)
        _done(fault, path, lambda: self._inner.remove_folder(path))

    def _ask(self, name: str, path: Path) -> Fault | None:
        fault = self.plan(Operation(name=name, path=path))
        if fault is not None and fault.stall_secs:
            self._clock.sleep(fault.stall_secs)
        return fault

    def _ask_of(self, name: str, fd: int) -> tuple[Path, Fault | None]:
        # A descriptor that was opened elsewhere has no path here.
        path = self._paths.get(fd, Path(f"/proc/self/fd/{fd}"))
        return path, self._ask(name, path)


def _taken(fault: Fault | None) -> int | None:
    return fault.taken_bytes if fault is not None else None


def _done(fault: Fault | None, path: Path, call: Callable[[], T]) -> T:
    """Return the result of `call`, or raise the fault's error instead of it or after it."""
    if fault is None or fault.errno is None:
        return call()
    if fault.is_done:
        call()
    raise _error(fault.errno, path)


def _error(number: int, path: Path) -> OSError:
    name = error_numbers.errorcode.get(number, str(number))
    return OSError(number, f"{os.strerror(number)} [{name} on purpose]", str(path))
