"""A cache of read mappings of slots, each valid for as long as its slot exists.

A mapping holds one descriptor, Python's own. Whether its file was deleted is therefore found from
the names in the slots' folder, in one listing for all.

Reading a tmpfs file through its descriptor costs a lookup and a copy for every page. Reading mapped
memory costs neither, but mapping on every read would cost as much as both. See docs/decisions/0006.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Set
from pathlib import Path


class ReadMappings:
    """A thread-safe cache, keyed by inode: a mapped file's inode number is not reused.

    `slots` is the folder of the slots. A file elsewhere is mapped for its readers alone.
    """

    def __init__(self, slots: Path) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        self._known: dict[int, mmap.mmap] = {}
        self._used: set[int] = set()

    def view(self, fd: int) -> memoryview | None:
        """Return all bytes of the open tmpfs file `fd`; None if it is empty.

        Raises:
            OSError: the file cannot be mapped.
        """
        status = os.fstat(fd)
        if not status.st_size:
            return None
        with self._lock:
            pages = self._known.get(status.st_ino)
            if pages is None:
                self._forget_deleted()
                pages = self._known[status.st_ino] = _map(fd, status.st_size)
            self._used.add(status.st_ino)
            return memoryview(pages)

    def release_deleted(self) -> None:
        """Unmap files that were deleted, so that their memory is freed."""
        with self._lock:
            self._forget_deleted()

    def release_idle(self) -> None:
        """Unmap files that were not read since the last call: they would count as memory in use."""
        with self._lock:
            used, self._used = self._used, set()
            self._forget(used)

    def close(self) -> None:
        """Unmap all files without readers."""
        with self._lock:
            self._forget(set())

    def _forget_deleted(self) -> None:
        try:
            with os.scandir(self._slots) as entries:
                self._forget({entry.inode() for entry in entries})
        except FileNotFoundError:
            self._forget(set())

    def _forget(self, kept: Set[int]) -> None:
        for inode in self._known.keys() - kept:
            try:
                self._known[inode].close()
            except BufferError:
                # A reader holds a view; the next call unmaps it.
                continue
            del self._known[inode]


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    # A separate open file description: a lock held through `fd` must end when `fd` is closed.
    own_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(own_fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        # The mapping has a duplicate.
        os.close(own_fd)
