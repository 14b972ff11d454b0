"""A cache of read mappings of slots, each valid for as long as its file has a name.

Reading a tmpfs file through its descriptor costs a lookup and a copy for every page. Reading mapped
memory costs neither, but mapping on every read would cost as much as both.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Mapping:
    fd: int
    pages: mmap.mmap


class ReadMappings:
    """A thread-safe cache, keyed by inode: a mapped file's inode number is not reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], _Mapping] = {}

    def view(self, fd: int) -> memoryview | None:
        """Return all bytes of the open tmpfs file `fd`; None if it is empty.

        Raises:
            OSError: the file cannot be mapped.
        """
        found = os.fstat(fd)
        if not found.st_size:
            return None
        with self._lock:
            self._forget(lambda mapping: os.fstat(mapping.fd).st_nlink == 0)
            key = found.st_dev, found.st_ino
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _map(fd, found.st_size)
            return memoryview(known.pages)

    def release_deleted(self) -> None:
        """Unmap files that were deleted, so that their memory is freed."""
        with self._lock:
            self._forget(lambda mapping: os.fstat(mapping.fd).st_nlink == 0)

    def close(self) -> None:
        """Unmap all files without readers."""
        with self._lock:
            self._forget(lambda mapping: True)

    def _forget(self, is_due: Callable[[_Mapping], bool]) -> None:
        for key, mapping in list(self._known.items()):
            if is_due(mapping):
                try:
                    mapping.pages.close()
                except BufferError:
                    # A reader holds a view; the next call unmaps it.
                    continue
                del self._known[key]


def _map(fd: int, size_bytes: int) -> _Mapping:
    # A separate open file description: a lock held through `fd` must end when `fd` is closed.
    own_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        pages = mmap.mmap(own_fd, size_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        os.close(own_fd)
        raise
    # The descriptor is closed with the pages, even if the store is never closed.
    weakref.finalize(pages, os.close, own_fd)
    return _Mapping(own_fd, pages)
