"""The RAM tier: images in slots on a tmpfs, records as small files beside their names.

The folder has the durable tier's names, so any reader of a run reads the RAM tier too. Its contents
outlive every process, but not the host. A slot is mapped once and filled by copying into existing
pages; it gets the image's name after its last byte is written.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar, cast

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, InvalidArgumentError, StorageError, translated
from holdfast.format.digests import Buffer
from holdfast.store.contract import Source, Store, StoredObject, exact_blocks, read_each, source_of
from holdfast.store.files.file_system import LOCAL, FileSystem
from holdfast.store.files.mappings import ReadMappings
from holdfast.store.object_folder import FileReader, ObjectFolder
from holdfast.store.slots import SLOTS

IMAGE_SUFFIX = ".safetensors"
PAGES_SIZE_BYTES = 8 * 1024 * 1024
"""Pages are populated in pieces of this size: each takes some milliseconds."""
CHECKED_SIZE_BYTES = 1024 * 1024
"""The slot is checked once per this many bytes: a check per small chunk would double its cost."""
_MADV_POPULATE_WRITE = 23  # Linux's <asm-generic/mman-common.h>; Python has no name for it yet.
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
LOCK_SECS = 1.0
LOCK_POLL_SECS = 0.0005


class Pin(Protocol):
    """A registration of a mapped slot's memory with a device that writes to it."""

    @property
    def is_busy(self) -> bool:
        """Whether the device may still write; then the slot stays locked."""
        ...

    def close(self) -> None:
        """Unregister the memory and release all views of it."""
        ...


AnyPin = TypeVar("AnyPin", bound=Pin)


class RamStore(Store):
    """Objects below `root`, a folder on a tmpfs; images go into slots that `reserve` names.

    Thread-safe except for `put` and `begin`; a `SlotWriter` may be passed to another thread.
    """

    tier = name = "ram"
    is_in_memory = True

    def __init__(
        self,
        root: Path,
        reserve: Callable[[int], str],
        clock: Clock,
        files: FileSystem = LOCAL,
    ) -> None:
        self.root = root
        self._reserve = reserve
        self._clock = clock
        self._folder = ObjectFolder(root, clock, files, durable=False)
        self._mapped: dict[str, _MappedSlot] = {}
        self._read = ReadMappings(root / SLOTS)

    def __repr__(self) -> str:
        return f"RamStore({self.root})"

    def put(self, key: str, source: Source | Buffer) -> None:
        source = source_of(source)
        with self._folder.writing(self._folder.path(key)) as unfinished:
            if key.endswith(IMAGE_SUFFIX) and source.size_bytes:
                self._fill_slot(unfinished, source)
            else:
                self._write_file(unfinished, source)

    def put_if_absent(self, key: str, data: bytes, after: Sequence[str] = ()) -> bool:
        return self._folder.put_if_absent(key, data, after)

    def link(self, source_key: str, key: str) -> None:
        """Give the image of `source_key` one more name; its slot is in use while it has one.

        An existing object is not replaced; if `key` already names the same one, the call succeeds.

        Raises:
            ObjectNotFoundError: there is no object at `source_key`.
            StorageError: `key` has another object, or the store failed.
        """
        self._folder.link(source_key, key)

    def get(self, key: str) -> bytes:
        return self._folder.read(key)

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | HoldfastError]:
        return read_each(self.get, keys, 1)

    def open(self, key: str) -> AbstractContextManager[SlotReader]:
        return self._open_pinned(key)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._folder.list(prefix)

    def list_some(
        self, prefix: str, *, after: str = "", before: str = "", count_max: int | None = None
    ) -> builtins.list[StoredObject]:
        return [*self._folder.list(prefix, after, before, count_max)]

    def delete(self, *keys: str) -> None:
        self._folder.delete(*keys)

    def discard_unfinished(self, prefix: str) -> None:
        self._folder.discard_unfinished(prefix)

    def release_deleted(self) -> None:
        """Unmap slots that were evicted, so that their memory is freed. Thread-safe."""
        self._read.release_deleted()

    def release_idle(self) -> None:
        """Unmap slots that were not read since the last call. Thread-safe."""
        self._read.release_idle()

    def close(self) -> None:
        """Unmap all slots except those that are being filled."""
        self._unmap(lambda slot: True)
        self._read.close()

    def begin(self, size_bytes: int) -> SlotWriter:
        """Reserve, map and lock a slot of that size for filling; the caller closes it in any case.

        Raises:
            OutOfSpaceError: there is no room for a slot.
            StorageError: the slot cannot be mapped or locked. No lock remains.
        """
        name = self._reserve(size_bytes)
        path = self.root / SLOTS / name
        # Another process may have removed the slot, or the whole tier, since it was reserved.
        with translated("fill", path):
            slot = self._map(name, size_bytes)
            slot.lock(self._clock)
        return SlotWriter(self._folder, path, slot)

    def _fill_slot(self, unfinished: Path, source: Source) -> None:
        # Unlocked before the final name is visible: the unfinished name is a second link already,
        # so the slot does not look free in between.
        with contextlib.closing(self.begin(source.size_bytes)) as filling:
            offset = 0
            for block in exact_blocks(source, 0, source.size_bytes):
                filling.write(offset, block)
                offset += len(block)
            filling.link(unfinished, offset)

    def _write_file(self, unfinished: Path, source: Source) -> None:
        fd = self._folder.create_file(unfinished, 0)
        try:
            for block in exact_blocks(source, 0, source.size_bytes):
                self._folder.write_all(fd, block)
        finally:
            self._folder.files.close(fd)

    @contextlib.contextmanager
    def _open_pinned(self, key: str) -> Iterator[SlotReader]:
        """Opens an object; while it is open its slot is not recycled."""
        path = self._folder.path(key)
        deadline = self._clock.monotonic() + LOCK_SECS
        while True:
            with self._folder.opened(key) as reader:
                if _try_lock(reader.fd, fcntl.LOCK_SH):
                    with translated("open", path):
                        shown = os.stat(path, follow_symlinks=False)
                    if os.path.samestat(shown, os.fstat(reader.fd)):
                        yield SlotReader(reader, path, self._read)
                        return
            # Race: the object was replaced between open and lock, so its slot may be recycled. Or a
            # search for free slots holds the lock for a moment.
            if self._clock.monotonic() > deadline:
                raise StorageError(f"open {path}: another process has its slot locked")
            self._clock.sleep(LOCK_POLL_SECS)

    def _map(self, name: str, size_bytes: int) -> _MappedSlot:
        mapped_slot = self._mapped.get(name)
        if mapped_slot is not None and mapped_slot.is_current():
            return mapped_slot
        # Removed slots belong to an earlier layout or an earlier agent.
        self._unmap(lambda slot: not slot.is_current())
        self._mapped[name] = _MappedSlot(self.root / SLOTS / name, size_bytes, self._folder.files)
        return self._mapped[name]

    def _unmap(self, is_old: Callable[[_MappedSlot], bool]) -> None:
        for name, slot in list(self._mapped.items()):
            if is_old(slot) and not slot.is_filling:
                self._mapped.pop(name).close()


class SlotReader:
    """An open object in RAM, locked shared."""

    def __init__(self, reader: FileReader, path: Path, mappings: ReadMappings) -> None:
        self._reader = reader
        self._path = path
        self._mappings = mappings
        self._lasting_view: memoryview | None = None

    @property
    def size_bytes(self) -> int:
        return self._reader.size_bytes

    @property
    def fd(self) -> int:
        """The open file's descriptor, for `sendfile`; closed, and unlocked, with the reader."""
        return self._reader.fd

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        self._reader.read_into(offset_bytes, target)

    def view(self) -> memoryview | None:
        # Checked right before the read: reading memory that another process truncated is a SIGBUS.
        status = os.fstat(self._reader.fd)
        memory_bytes = min(status.st_size, status.st_blocks * 512)
        if memory_bytes < self.size_bytes:
            raise StorageError(
                f"read {self._path}: expected {self.size_bytes} bytes of memory, found "
                f"{memory_bytes}; another process changes the RAM tier"
            )
        with translated("map", self._path):
            return self._mappings.view(self._reader.fd)

    def lasting_view(self) -> memoryview | None:
        if self._lasting_view is None and self.size_bytes:
            pages = mmap.mmap(self._reader.fd, self.size_bytes, prot=mmap.PROT_READ)
            # A duplicate descriptor retains the lock after the reader is closed, so the slot is not
            # recycled while any view of the pages exists.
            weakref.finalize(pages, os.close, os.dup(self._reader.fd))
            self._lasting_view = memoryview(pages)
        return self._lasting_view


class SlotWriter:
    """A slot that is being filled: exclusively locked until it is closed.

    Threads may use it one after another; several may each fill a `target` of their own at once.
    """

    def __init__(self, folder: ObjectFolder, path: Path, slot: _MappedSlot) -> None:
        self._folder = folder
        self._path = path
        self._slot = slot
        self._is_closed = False
        self._unchecked_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The size of the image in bytes."""
        return len(self._slot.pages)

    @property
    def is_current(self) -> bool:
        """Whether the RAM tier still has this slot, and it was not closed."""
        return not self._is_closed and self._slot.is_current()

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Copy `data` to `offset_bytes`.

        Raises:
            StorageError: another process changed the slot.
        """
        slot = self._slot
        if offset_bytes + len(data) > len(slot.pages):
            raise InvalidArgumentError(f"fill {self._path}: more than {len(slot.pages)} bytes")
        if self._unchecked_bytes <= 0:
            self.check_whole()
            self._unchecked_bytes = CHECKED_SIZE_BYTES
        self._unchecked_bytes -= len(data)
        self._folder.files.fill_pages(slot.fd, slot.pages, offset_bytes, data)

    def target(self, start: int, stop: int) -> memoryview:
        """Return the memory of bytes [start, stop), to be filled and read before it is closed.

        Raises:
            StorageError: another process changed the slot.
        """
        if not 0 <= start <= stop <= self.size_bytes:
            raise InvalidArgumentError(
                f"fill {self._path}: expected a range within {self.size_bytes} bytes, found "
                f"[{start}, {stop})"
            )
        self.check_whole()
        return memoryview(self._slot.pages)[start:stop]

    def view(self) -> memoryview:
        """Return all bytes, for reading until the slot is closed."""
        self.check_whole()
        return memoryview(self._slot.pages).toreadonly()

    def pinned(self, pin: Callable[[memoryview], AnyPin | None]) -> AnyPin | None:
        """Return the result of `pin` for the slot's memory; created once, closed before unmapping.

        A device's writes bypass `FileSystem` and the check before each block, so the caller calls
        `check_whole` after them.
        """
        if self._slot.pin is None:
            self._slot.pin = pin(memoryview(self._slot.pages))
        # A process uses a single kind of pin, so the type matches.
        return cast("AnyPin | None", self._slot.pin)

    def check_whole(self) -> None:
        """Check that the slot still has memory for all bytes, so that readers see what was written.

        Called before each MiB copied, and after a device's copies.

        Raises:
            StorageError: another process truncated the slot or punched holes in it.
        """
        status = os.fstat(self._slot.fd)
        memory_bytes = min(status.st_size, status.st_blocks * 512)
        if memory_bytes < self.size_bytes:
            raise StorageError(
                f"fill {self._path}: expected {self.size_bytes} bytes of memory, found "
                f"{memory_bytes}; another process changes the RAM tier"
            )

    def show(self, key: str) -> None:
        """Give the image its name atomically; it must not be written to afterwards.

        Raises:
            StorageError: the name could not be created; nothing is visible.
        """
        with self._folder.writing(self._folder.path(key)) as unfinished:
            self.link(unfinished, self.size_bytes)

    def link(self, path: Path, size_bytes: int) -> None:
        """Give the slot one more name, after `size_bytes` were written."""
        if size_bytes != self.size_bytes:
            raise InvalidArgumentError(
                f"fill {self._path}: expected {self.size_bytes} bytes, found {size_bytes}"
            )
        link = functools.partial(self._folder.files.link, self._path, path)
        self._folder.in_folder(path, link)

    def close(self) -> None:
        """Release the slot; without a name it is free again. Idempotent."""
        if not self._is_closed:
            # After an interruption, or while a device is busy, the next call completes the release.
            self._slot.unlock()
            self._is_closed = not self._slot.is_filling


class _MappedSlot:
    """A slot, open and mapped for writing; it is filled by one `SlotWriter` after another."""

    def __init__(self, path: Path, size_bytes: int, files: FileSystem) -> None:
        self._path = path
        self._files = files
        self.fd = files.open(path, os.O_RDWR | os.O_NOFOLLOW)
        with contextlib.ExitStack() as on_error:
            on_error.callback(files.close, self.fd)
            file_bytes = os.fstat(self.fd).st_size
            if file_bytes != size_bytes:
                # Writing past a file's end through a mapping would kill the process.
                raise StorageError(f"map {path}: expected {size_bytes} bytes, found {file_bytes}")
            self.pages = mmap.mmap(self.fd, size_bytes)
            _populate(self.pages)
            on_error.pop_all()
        self.is_filling = False
        self.pin: Pin | None = None

    def is_current(self) -> bool:
        """Return whether the slot's name still refers to the mapped file, at its full size."""
        try:
            shown = os.stat(self._path)
        except OSError:
            return False
        return os.path.samestat(shown, os.fstat(self.fd)) and shown.st_size == len(self.pages)

    def lock(self, clock: Clock) -> None:
        """Locks it for filling.

        Raises:
            StorageError: another process uses the slot, or sealed an image in it. It is not locked.
        """
        deadline = clock.monotonic() + LOCK_SECS
        while not _try_lock(self.fd, fcntl.LOCK_EX):
            # A search for free slots holds the lock for a moment; readers and writers, longer.
            if clock.monotonic() > deadline:
                raise StorageError(f"fill {self._path}: another process uses this slot")
            clock.sleep(LOCK_POLL_SECS)
        try:
            self._check_free()
        except StorageError:
            self.unlock()
            raise
        self.is_filling = True

    def unlock(self) -> None:
        """Unlock the slot; without an image it is free again.

        If a device may still write into it, it stays locked until this process ends.
        """
        if self.pin is not None and self.pin.is_busy:
            return
        self.is_filling = False
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def _check_free(self) -> None:
        """Check, under the lock, that no image was sealed in the slot.

        An agent that restarted, or that passed the run to another group, has no record of the slots
        that it assigned before, so a slot may have been assigned twice.

        Raises:
            StorageError: an image was sealed in it; nothing was written.
        """
        if os.fstat(self.fd).st_nlink != 1:
            raise StorageError(f"fill {self._path}: this slot was given to another process since")

    def close(self) -> None:
        if self.pin is not None:
            self.pin.close()
        # Frames of a stored exception may hold views; the memory is unmapped when they are freed.
        with contextlib.suppress(BufferError):
            self.pages.close()
        self._files.close(self.fd)


def _populate(pages: mmap.mmap) -> None:
    """Populate the page table of a slot's mapping, so that the first fill takes no page faults.

    Not by `mmap.madvise`, which holds the GIL: a training step of a thousand small operations then
    waits until all is populated, 1.3 s for 2 GB. In pieces, because a call holds the lock on the
    process's mappings, which large allocations need. Errors are ignored (a kernel before 5.14, a
    slot truncated just now): the first fill faults pages in.
    """
    view = ctypes.c_char.from_buffer(pages)
    address = ctypes.addressof(view)
    for start in range(0, len(pages), PAGES_SIZE_BYTES):
        size_bytes = min(PAGES_SIZE_BYTES, len(pages) - start)
        if _libc.madvise(address + start, size_bytes, _MADV_POPULATE_WRITE):
            return


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
