"""Slots that are mapped for reading, and stay so for as long as they have a name.

Reading a tmpfs file through its descriptor costs a look-up and a copy for every page; reading it
where it stands costs neither, and mapping it anew each time would cost as much as both.
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
    """Threads may share it. A file that is mapped keeps its number, so that tells files apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], _Mapping] = {}

    def view(self, fd: int) -> memoryview | None:
        """All bytes of the open file `fd`, which holds them in memory; None where it is empty.

        Raises:
            OSError: it cannot be mapped.
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
        """Lets go of files that have no name any more, so that their memory is free."""
        with self._lock:
            self._forget(lambda mapping: os.fstat(mapping.fd).st_nlink == 0)

    def close(self) -> None:
        """Lets go of all that nobody reads."""
        with self._lock:
            self._forget(lambda mapping: True)

    def _forget(self, is_due: Callable[[_Mapping], bool]) -> None:
        for key, mapping in list(self._known.items()):
            if is_due(mapping):
                try:
                    mapping.pages.close()
                except BufferError:
                    # Somebody reads it just now; it goes the next time.
                    continue
                del self._known[key]


def _map(fd: int, size_bytes: int) -> _Mapping:
    # An opening of its own: a lock that is held on `fd` must end with `fd`.
    own_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        pages = mmap.mmap(own_fd, size_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        os.close(own_fd)
        raise
    # It goes with the pages, also where nobody closes the store.
    weakref.finalize(pages, os.close, own_fd)
    return _Mapping(own_fd, pages)
