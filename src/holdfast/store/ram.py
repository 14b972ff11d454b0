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
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar, cast

from holdfast.clock import Clock
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.format.buffers import Buffer
from holdfast.store.contract import StoredObject
from holdfast.store.file_system import LOCAL, FileSystem
from holdfast.store.mappings import ReadMappings
from holdfast.store.object_folder import FileReader, ObjectFolder, translated
from holdfast.store.slots import SLOTS

IMAGE_SUFFIX = ".safetensors"
PAGES_SIZE_BYTES = 8 * 1024 * 1024
"""So much is mapped in some milliseconds."""
CHECKED_SIZE_BYTES = 1024 * 1024
"""So much is copied after a look at the slot: one for each small chunk would cost as much again."""
_MADV_POPULATE_WRITE = 23  # Linux's <asm-generic/mman-common.h>; Python has no name for it yet.
LOCK_SECS = 1.0
LOCK_POLL_SECS = 0.0005


class Pin(Protocol):
    """What holds on to a slot's memory as long as it is mapped: a device that writes into it."""

    @property
    def is_busy(self) -> bool:
        """Whether it may still write; then the slot is not given back."""
        ...

    def close(self) -> None:
        """Lets go of the memory, and of all views of it."""
        ...


AnyPin = TypeVar("AnyPin", bound=Pin)


class RamStore:
    """Objects below `root`, a folder on a tmpfs; images go into slots that `reserve` names.

    Threads may share it but for `put` and `begin`; a `SlotWriter` may be taken over by another one.
    """

    tier = name = "ram"

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
        self._read = ReadMappings()

    def __repr__(self) -> str:
        return f"RamStore({self.root})"

    def put(self, key: str, size_bytes: int, blocks: Iterable[Buffer]) -> None:
        with self._folder.writing(self._folder.path(key)) as unfinished:
            if key.endswith(IMAGE_SUFFIX) and size_bytes:
                self._fill_slot(unfinished, size_bytes, blocks)
            else:
                self._write_file(unfinished, size_bytes, blocks)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._folder.put_if_absent(key, data)

    def link(self, source_key: str, key: str) -> None:
        self._folder.link(source_key, key)

    def get(self, key: str) -> bytes:
        return self._folder.read(key)

    def open(self, key: str) -> AbstractContextManager[SlotReader]:
        return self._open_pinned(key)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._folder.list(prefix)

    def delete(self, *keys: str) -> None:
        self._folder.delete(*keys)

    def discard_unfinished(self, prefix: str) -> None:
        self._folder.discard_unfinished(prefix)

    def release_deleted(self) -> None:
        """Lets go of slots that were given up, so that their memory is free; any thread may."""
        self._read.release_deleted()

    def close(self) -> None:
        """Lets go of all mappings, but of a slot that is just being filled."""
        self._unmap(lambda slot: True)
        self._read.close()

    def begin(self, size_bytes: int) -> SlotWriter:
        """A slot of that size to fill, by whichever thread has the bytes; to be closed in any case.

        Raises:
            OutOfSpaceError, StorageError: there is none.
        """
        name = self._reserve(size_bytes)
        path = self.root / SLOTS / name
        # Somebody may have removed the slot, or the whole tier, since it was reserved.
        with translated("fill", path):
            slot = self._map(name, size_bytes)
            slot.lock(self._clock)
        return SlotWriter(self._folder, path, slot)

    def _fill_slot(self, unfinished: Path, size_bytes: int, blocks: Iterable[Buffer]) -> None:
        # Unlocked before the name is shown: that is one more name already, so it is not free.
        with contextlib.closing(self.begin(size_bytes)) as filling:
            offset = 0
            for block in blocks:
                view = memoryview(block).cast("B")
                filling.write(offset, view)
                offset += len(view)
            filling.link(unfinished, offset)

    def _write_file(self, unfinished: Path, size_bytes: int, blocks: Iterable[Buffer]) -> None:
        fd = self._folder.create(unfinished, 0)
        written = 0
        try:
            for block in blocks:
                view = memoryview(block).cast("B")
                self._folder.write_all(fd, view)
                written += len(view)
        finally:
            self._folder.files.close(fd)
        if written != size_bytes:
            raise InvalidArgumentError(
                f"write {unfinished}: expected blocks of {size_bytes} bytes together, found "
                f"{written}"
            )

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
            # Between opening and locking it was replaced: that slot may be filled anew. Or somebody
            # looks for free slots, who holds the lock for a moment.
            if self._clock.monotonic() > deadline:
                raise StorageError(f"open {path}: another process has its slot locked")
            self._clock.sleep(LOCK_POLL_SECS)

    def _map(self, name: str, size_bytes: int) -> _MappedSlot:
        known = self._mapped.get(name)
        if known is not None and known.is_current():
            return known
        # Slots that are gone belong to an earlier layout or an earlier agent.
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
        """The open file, to be sent from; it is closed, and unlocked, with the reader."""
        return self._reader.fd

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        self._reader.read_into(offset_bytes, target)

    def view(self) -> memoryview | None:
        # Looked at right before it is read: memory that somebody cut off would kill who reads it.
        found = os.fstat(self._reader.fd)
        memory_bytes = min(found.st_size, found.st_blocks * 512)
        if memory_bytes < self.size_bytes:
            raise StorageError(
                f"read {self._path}: expected {self.size_bytes} bytes of memory, found "
                f"{memory_bytes}; somebody else changes the RAM tier"
            )
        with translated("map", self._path):
            return self._mappings.view(self._reader.fd)

    def lasting_view(self) -> memoryview | None:
        if self._lasting_view is None and self.size_bytes:
            pages = mmap.mmap(self._reader.fd, self.size_bytes, prot=mmap.PROT_READ)
            # A second descriptor of the same opening holds the lock when the first one is closed:
            # while anything views the pages, the slot is not filled anew.
            weakref.finalize(pages, os.close, os.dup(self._reader.fd))
            self._lasting_view = memoryview(pages)
        return self._lasting_view


class SlotWriter:
    """A slot that is being filled: locked, so that it is nobody else's, until it is closed.

    Threads may use it one after another; several may fill a `target` of their own at once.
    """

    def __init__(self, folder: ObjectFolder, path: Path, slot: _MappedSlot) -> None:
        self._folder = folder
        self._path = path
        self._slot = slot
        self._is_closed = False

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes."""
        return self._slot.size_bytes

    @property
    def is_current(self) -> bool:
        """Whether the RAM tier still has this slot, and it was not closed."""
        return not self._is_closed and self._slot.is_current()

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Copies `data` to that place.

        Raises:
            StorageError: somebody changed the slot under the run's hands.
        """
        self._slot.write(offset_bytes, data)

    def target(self, start: int, stop: int) -> memoryview:
        """Return the memory of bytes [start, stop), to be filled and read before it is closed.

        Raises:
            StorageError: somebody changed the slot under the run's hands.
        """
        return self._slot.target(start, stop)

    def view(self) -> memoryview:
        """All bytes, to be read before it is closed."""
        return self._slot.view()

    def pinned(self, pin: Callable[[memoryview], AnyPin | None]) -> AnyPin | None:
        """What `pin` makes of the slot's memory; made once, and closed before it is unmapped.

        Whoever writes by it checks afterwards (`check_whole`): it does not pass by the seam of
        `FileSystem`, and nobody looks before each block.
        """
        return self._slot.pinned(pin)

    def check_whole(self) -> None:
        """Checks that what was written is what others will read.

        Raises:
            StorageError: somebody changed the slot under the run's hands.
        """
        self._slot.check_whole()

    def show(self, key: str) -> None:
        """Gives the image its name, in one step; it is not to be written to any more.

        Raises:
            StorageError: nothing shows.
        """
        with self._folder.writing(self._folder.path(key)) as unfinished:
            self.link(unfinished, self.size_bytes)

    def link(self, path: Path, size_bytes: int) -> None:
        """Gives the slot one more name, now that `size_bytes` were written."""
        if size_bytes != self.size_bytes:
            raise InvalidArgumentError(
                f"fill {self._path}: expected {self.size_bytes} bytes, found {size_bytes}"
            )
        link = functools.partial(self._folder.files.link, self._path, path)
        self._folder.in_folder(path, link)

    def close(self) -> None:
        """Releases the slot; where it got no name it is free again. Closing twice does no harm."""
        if not self._is_closed:
            # Closing that was interrupted, or refused by a device, is done by the next call.
            self._slot.unlock()
            self._is_closed = not self._slot.is_filling


class _MappedSlot:
    """A slot, open and mapped for writing."""

    def __init__(self, path: Path, size_bytes: int, files: FileSystem) -> None:
        self._path = path
        self._files = files
        self._fd = files.open(path, os.O_RDWR | os.O_NOFOLLOW)
        with contextlib.ExitStack() as on_error:
            on_error.callback(files.close, self._fd)
            found = os.fstat(self._fd).st_size
            if found != size_bytes:
                # Writing past a file's end through a mapping would kill the process.
                raise StorageError(f"map {path}: expected {size_bytes} bytes, found {found}")
            self._map = mmap.mmap(self._fd, size_bytes)
            _populate(self._map)
            on_error.pop_all()
        self.is_filling = False
        self._unchecked_bytes = 0
        self._pin: Pin | None = None

    def is_current(self) -> bool:
        """Return whether the slot's name still leads to what is mapped, all of it."""
        try:
            shown = os.stat(self._path)
        except OSError:
            return False
        return os.path.samestat(shown, os.fstat(self._fd)) and shown.st_size == len(self._map)

    def lock(self, clock: Clock) -> None:
        """Locks it for filling.

        Raises:
            StorageError: another process uses it, or sealed an image in it.
        """
        deadline = clock.monotonic() + LOCK_SECS
        while not _try_lock(self._fd, fcntl.LOCK_EX):
            # Whoever looks for free slots holds the lock for a moment; a reader or filler, longer.
            if clock.monotonic() > deadline:
                raise StorageError(f"fill {self._path}: another process uses this slot")
            clock.sleep(LOCK_POLL_SECS)
        try:
            self._check_free()
        except StorageError:
            self.unlock()
            raise
        self.is_filling = True
        self._unchecked_bytes = 0

    def unlock(self) -> None:
        """Unlocks it; without an image it is free again.

        Unless a device may still write into it: then it stays locked, until this process ends.
        """
        if self._pin is not None and self._pin.is_busy:
            return
        self.is_filling = False
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _check_free(self) -> None:
        """Checks, under the lock, that nobody sealed an image in it.

        An agent that was killed, or that gave the run to another group, forgot whom it gave a slot.

        Raises:
            StorageError: somebody did; nothing was written.
        """
        if os.fstat(self._fd).st_nlink != 1:
            raise StorageError(f"fill {self._path}: this slot was given to another process since")

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Copies `data` into the slot's memory."""
        if offset_bytes + len(data) > len(self._map):
            raise InvalidArgumentError(f"fill {self._path}: more than {len(self._map)} bytes")
        if self._unchecked_bytes <= 0:
            self.check_whole()
            self._unchecked_bytes = CHECKED_SIZE_BYTES
        self._unchecked_bytes -= len(data)
        self._files.fill(self._fd, self._map, offset_bytes, data)

    def target(self, start: int, stop: int) -> memoryview:
        """A piece of its memory, to write to."""
        if not 0 <= start <= stop <= len(self._map):
            raise InvalidArgumentError(
                f"fill {self._path}: expected a range within {len(self._map)} bytes, found "
                f"[{start}, {stop})"
            )
        self.check_whole()
        return memoryview(self._map)[start:stop]

    def view(self) -> memoryview:
        """Its memory, to read from."""
        self.check_whole()
        return memoryview(self._map).toreadonly()

    @property
    def size_bytes(self) -> int:
        return len(self._map)

    def check_whole(self) -> None:
        """Checks, before each MiB that is copied and after a device's copies, that it has memory.

        Raises:
            StorageError: somebody cut the slot off, or made holes in it.
        """
        found = os.fstat(self._fd)
        if found.st_size < len(self._map) or found.st_blocks * 512 < len(self._map):
            raise StorageError(
                f"fill {self._path}: expected {len(self._map)} bytes of memory, found "
                f"{min(found.st_size, found.st_blocks * 512)}; somebody else changes the RAM tier"
            )

    def pinned(self, pin: Callable[[memoryview], AnyPin | None]) -> AnyPin | None:
        """What `pin` makes of its memory."""
        if self._pin is None:
            self._pin = pin(memoryview(self._map))
        # One process has one way to pin.
        return cast("AnyPin | None", self._pin)

    def close(self) -> None:
        if self._pin is not None:
            self._pin.close()
        # The frames of an exception that somebody keeps may view it; it is unmapped after them.
        with contextlib.suppress(BufferError):
            self._map.close()
        self._files.close(self._fd)


def _populate(pages: mmap.mmap) -> None:
    """Brings all pages of a slot into the mapping, so that no first fill has to.

    By pieces: Python lets no other thread run meanwhile, and the training is one. An error leaves
    the rest to the first fill: a kernel before 5.14, or a slot that somebody has just cut off.
    """
    with contextlib.suppress(OSError):
        for start in range(0, len(pages), PAGES_SIZE_BYTES):
            size_bytes = min(PAGES_SIZE_BYTES, len(pages) - start)
            pages.madvise(_MADV_POPULATE_WRITE, start, size_bytes)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
