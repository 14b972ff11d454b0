"""Slots: preallocated, recycled files on a tmpfs, each of which holds one image.

A slot is a file in `slots/`. It is reserved with `posix_fallocate`, so that a full tmpfs is an
error here and never a SIGBUS in the process that fills it, and its pages exist before the first
fill. A sealed image is another name (a hard link) of its slot, with one more name for each later
checkpoint that reuses it. So the file system holds the state of each slot:

- one name, not locked: free;
- one name, locked: being filled (the lock ends with the process, however it dies);
- more names: it holds a sealed image;
- more names, locked shared: the image is being read; if deleted meanwhile, free once unlocked.

A new owner recovers the whole state from the file system. The pool has one owner, the host's agent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import OutOfSpaceError, translated
from holdfast.store.files.file_system import LOCAL, FileSystem
from holdfast.store.files.memory_limit import memory_left_bytes
from holdfast.store.object_folder import make_folder

SLOTS = "slots"
_BLOCK_SIZE_BYTES = 512


class SlotPool:
    """The slots below one folder, at most `limit_bytes` of them together; None: no limit."""

    def __init__(
        self, root: Path, limit_bytes: int | None, clock: Clock, files: FileSystem = LOCAL
    ) -> None:
        self._folder = root / SLOTS
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._files = files
        self.on_evicted: Callable[[], None] = lambda: None
        """Called after an eviction; the owner of mappings of evicted slots releases them."""

    def reserve(
        self, size_bytes: int, taken: Collection[str] = (), in_use_bytes: Collection[int] = ()
    ) -> str:
        """Return the name of a free slot of exactly that size, a recycled one or else a new one.

        The process that fills the slot locks it. Until then the slot looks free, so a caller that
        reserves for several processes passes in `taken` the names that it assigned and that are not
        locked yet. Free slots of a size other than `size_bytes` and `in_use_bytes` are evicted to
        make room.

        Raises:
            OutOfSpaceError: the tmpfs or the limit has no room for one more slot.
            StorageError: the tmpfs fails.
        """
        with translated("reserve RAM in", self._folder):
            self.evict_beyond_limit(taken)
            for path, size in self._free(taken):
                if size == size_bytes:
                    return path.name
            self._evict({size_bytes, *in_use_bytes}, taken)
            return self._create(size_bytes).name

    def spare(
        self,
        size_bytes: int,
        total_max_bytes: int,
        taken: Collection[str] = (),
        in_use_bytes: Collection[int] = (),
    ) -> str | None:
        """Reserve a slot as `reserve` does, or return None if all would exceed `total_max_bytes`.

        Raises:
            OutOfSpaceError, StorageError: as `reserve`.
        """
        with translated("reserve RAM in", self._folder):
            self.evict_beyond_limit(taken)
            for path, size in self._free(taken):
                if size == size_bytes:
                    return path.name
            if self.size_bytes() + size_bytes > total_max_bytes:
                self._evict({size_bytes, *in_use_bytes}, taken)
            if self.size_bytes() + size_bytes > total_max_bytes:
                return None
            return self._create(size_bytes).name

    def evict(self, names: Collection[str]) -> None:
        """Evict those of the slots that are free.

        Raises:
            StorageError: the tmpfs fails.
        """
        with translated("free RAM in", self._folder):
            for path, _ in self._free():
                if path.name in names:
                    with contextlib.suppress(FileNotFoundError):
                        self._files.unlink(path)
            self.on_evicted()

    def evict_beyond_limit(self, taken: Collection[str]) -> None:
        """Evict free slots while all together exceed the limit, which may have been lowered."""
        if self.limit_bytes is None or self.size_bytes() <= self.limit_bytes:
            return
        for path, _ in self._free(taken):
            if self.size_bytes() <= self.limit_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(path)
        self.on_evicted()

    def _evict(self, sizes_bytes: Collection[int], taken: Collection[str]) -> None:
        """Evict the free slots of other sizes: they belong to a layout no longer in use."""
        for path, size in self._free(taken):
            if size not in sizes_bytes:
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(path)
        self.on_evicted()

    def free_slots(self, taken: Collection[str] = ()) -> dict[str, int]:
        """Return the names of all free slots but `taken`, each with its size in bytes."""
        return {path.name: size for path, size in self._free(taken)}

    def size_bytes(self) -> int:
        """Return the bytes of all slots."""
        total = 0
        for path in self._paths():
            # A slot may be evicted between the listing of the folder and this stat.
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def slot_size_bytes(self, name: str) -> int | None:
        """Return the size of one slot in bytes; None if it no longer exists."""
        try:
            return (self._folder / name).stat().st_size
        except OSError:
            return None

    def left_bytes(self) -> int:
        """Return how many more bytes the tmpfs, the pool's limit and the cgroup's limit allow."""
        folder = next(f for f in (self._folder, *self._folder.parents) if f.is_dir())
        tmpfs = os.statvfs(folder)
        rooms = [tmpfs.f_bavail * tmpfs.f_frsize]
        if self.limit_bytes is not None:
            rooms.append(self.limit_bytes - self.size_bytes())
        memory = memory_left_bytes()
        if memory is not None:
            rooms.append(memory)
        return max(0, min(rooms))

    def _paths(self) -> list[Path]:
        # The folder is created with the first slot, and another process may remove it at any time.
        with contextlib.suppress(FileNotFoundError):
            return sorted(self._folder.iterdir())
        return []

    def _free(self, taken: Collection[str] = ()) -> Iterator[tuple[Path, int]]:
        for path in self._paths():
            if path.name in taken:
                continue
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                if state.st_nlink == 1 and not self._is_locked(path):
                    # A slot that another process truncated or punched holes in lacks memory for
                    # some of its bytes, and filling it could raise SIGBUS: report size 0, so that
                    # it is never handed out and is evicted.
                    is_whole = state.st_blocks * _BLOCK_SIZE_BYTES >= state.st_size
                    yield path, state.st_size if is_whole else 0

    def _create(self, size_bytes: int) -> Path:
        used = self.size_bytes()
        if self.limit_bytes is not None and used + size_bytes > self.limit_bytes:
            raise OutOfSpaceError(
                f"reserve {size_bytes} bytes of RAM in {self._folder}: {used} of the limit of "
                f"{self.limit_bytes} bytes are in use; raise RamTier(limit_bytes=...)"
            )
        left = memory_left_bytes()
        if left is not None and size_bytes > left:
            raise OutOfSpaceError(
                f"reserve {size_bytes} bytes of RAM in {self._folder}: the memory limit of this "
                f"process's cgroup leaves {max(left, 0)}; raise the limit, or disable the RAM tier"
            )
        path = self._folder / self._clock.new_token()
        make_folder(self._files, self._folder, self._folder, durable=False)
        fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._files.allocate(fd, size_bytes)
        except OSError:
            self._files.unlink(path)
            raise
        finally:
            self._files.close(fd)
        return path

    def _is_locked(self, path: Path) -> bool:
        fd = self._files.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                return True
            raise
        finally:
            self._files.close(fd)
        return False
