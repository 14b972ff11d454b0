"""The RAM tier: images in slots on a tmpfs, records as small files beside their names.

The folder has the durable tier's names, so any reader of a run reads the RAM tier too. What it
holds outlives every process, and nothing else. A slot is mapped once and filled by copying into
pages that are there already; it takes the image's name after its last byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.format.buffers import Buffer
from holdfast.store import files
from holdfast.store.contract import Reader, StoredObject
from holdfast.store.slots import SLOTS

IMAGE_SUFFIX = ".safetensors"
LOCK_SECS = 1.0
LOCK_POLL_SECS = 0.0005


class RamStore:
    """Objects below `root`, a folder on a tmpfs; images go into slots that `reserve` names.

    Not for several threads at once: the mappings are the calling thread's own.
    """

    tier = "ram"

    def __init__(self, root: Path, reserve: Callable[[int], str], clock: Clock) -> None:
        self.root = root
        self._reserve = reserve
        self._clock = clock
        self._mapped: dict[str, _MappedSlot] = {}

    def __repr__(self) -> str:
        return f"RamStore({self.root})"

    def put(self, key: str, size_bytes: int, blocks: Iterable[Buffer]) -> None:
        path = files.object_path(self.root, key)
        unfinished = files.unfinished_path(path, self._clock.token())
        with files.translated("write", path):
            try:
                if key.endswith(IMAGE_SUFFIX) and size_bytes:
                    self._fill_slot(unfinished, path, size_bytes, blocks)
                else:
                    file = files.in_folder(
                        path, self.root, lambda: unfinished.open("xb", buffering=0), durable=False
                    )
                    with file:
                        _write_file(unfinished, file.fileno(), size_bytes, blocks)
                    files.show(unfinished, path, durable=False)
            finally:
                unfinished.unlink(missing_ok=True)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        token = self._clock.token()
        return files.put_object_if_absent(self.root, key, data, token, durable=False)

    def get(self, key: str) -> bytes:
        return files.read_object(self.root, key)

    def open(self, key: str) -> AbstractContextManager[Reader]:
        return _open_pinned(self.root, key)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return files.list_objects(self.root, prefix)

    def delete(self, key: str) -> None:
        files.delete_object(self.root, key, durable=False)

    def discard_unfinished(self, prefix: str) -> None:
        files.discard_unfinished(self.root, prefix)

    def close(self) -> None:
        """Lets go of all mappings."""
        for slot in self._mapped.values():
            slot.close()
        self._mapped.clear()

    def _fill_slot(
        self, unfinished: Path, path: Path, size_bytes: int, blocks: Iterable[Buffer]
    ) -> None:
        name = self._reserve(size_bytes)
        slot = self._map(name, size_bytes)
        with slot.locked(self._clock):
            slot.fill(blocks)
            link = functools.partial(os.link, self.root / SLOTS / name, unfinished)
            files.in_folder(path, self.root, link, durable=False)
            files.show(unfinished, path, durable=False)

    def _map(self, name: str, size_bytes: int) -> _MappedSlot:
        known = self._mapped.get(name)
        if known is not None and known.is_current():
            return known
        # Slots that are gone belong to an earlier layout or an earlier agent.
        for old in [n for n, slot in self._mapped.items() if not slot.is_current()]:
            self._mapped.pop(old).close()
        self._mapped[name] = _MappedSlot(self.root / SLOTS / name, size_bytes)
        return self._mapped[name]


class _MappedSlot:
    """A slot, open and mapped for writing."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, self._fd)
            found = os.fstat(self._fd).st_size
            if found != size_bytes:
                # Writing past a file's end through a mapping would kill the process.
                raise StorageError(f"map {path}: expected {size_bytes} bytes, found {found}")
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(self._fd, size_bytes, flags=flags)
            on_error.pop_all()

    def is_current(self) -> bool:
        """Whether the slot's name still leads to what is mapped."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def locked(self, clock: Clock) -> Iterator[None]:
        deadline = clock.monotonic() + LOCK_SECS
        while not self._try_lock():
            # Whoever looks for free slots holds the lock for a moment; a reader or filler, longer.
            if clock.monotonic() > deadline:
                raise StorageError(f"fill {self._path}: another process uses this slot")
            clock.sleep(LOCK_POLL_SECS)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def fill(self, blocks: Iterable[Buffer]) -> None:
        offset = 0
        for block in blocks:
            view = memoryview(block).cast("B")
            if offset + len(view) > len(self._map):
                raise InvalidArgumentError(f"fill {self._path}: more than {len(self._map)} bytes")
            self._map[offset : offset + len(view)] = view
            offset += len(view)
        if offset != len(self._map):
            raise InvalidArgumentError(
                f"fill {self._path}: expected {len(self._map)} bytes, found {offset}"
            )

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


def _write_file(path: Path, fd: int, size_bytes: int, blocks: Iterable[Buffer]) -> None:
    written = 0
    for block in blocks:
        view = memoryview(block).cast("B")
        files.write_all(fd, view)
        written += len(view)
    if written != size_bytes:
        raise InvalidArgumentError(
            f"write {path}: expected blocks of {size_bytes} bytes together, found {written}"
        )


@contextlib.contextmanager
def _open_pinned(root: Path, key: str) -> Iterator[Reader]:
    """Opens an object; while it is open its slot is not recycled."""
    path = files.object_path(root, key)
    while True:
        with files.open_file(root, key) as reader:
            fcntl.flock(reader.fd, fcntl.LOCK_SH)
            with files.translated("open", path):
                shown = os.stat(path, follow_symlinks=False)
            if os.path.samestat(shown, os.fstat(reader.fd)):
                yield reader
                return
        # Between opening and locking it was replaced: that slot may be filled anew.
