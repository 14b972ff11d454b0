"""The interface between the stores and the operating system.

All changes that the stores make on a file system, and all bytes that they read from one, pass
through one `FileSystem`. So a test can record the operations and their order, fail the n-th call,
or leave a disk as a crash would (`tests/store`). Lookups of names, sizes and locks change
nothing and bypass it; so do transfers between a socket and a slot's memory.

The methods are the system calls: they raise OSError and have POSIX semantics. A folder is synced by
opening it and syncing the descriptor.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol

from holdfast.store.files.renames import rename_to_new

RELEASE_SIZE_BYTES = 128 * 1024


class FileSystem(Protocol):
    """The calls that change or read files; see the module."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open a file; return its descriptor, which is closed on exec."""
        ...

    def read(self, fd: int, target: memoryview, offset_bytes: int) -> int:
        """Read from `offset_bytes` into `target`; return how many bytes, 0 at the end."""
        ...

    def write(self, fd: int, data: memoryview) -> int:
        """Write at the file's position; return how many bytes of `data` were written."""
        ...

    def fill_pages(self, fd: int, pages: mmap.mmap, offset_bytes: int, data: memoryview) -> None:
        """Copies `data` into the mapped `pages` of `fd`."""
        ...

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Truncate or extend the file."""
        ...

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Extend the file to `size_bytes` and reserve the space."""
        ...

    def sync(self, fd: int) -> None:
        """Make a file's bytes, or a folder's names, durable."""
        ...

    def close(self, fd: int) -> None:
        """Close the descriptor, even if an error is raised."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing an existing target."""
        ...

    def rename_to_new(self, source: Path, target: Path) -> None:
        """Rename a file to a name that must not exist.

        Some file systems check that before the rename, and another process may be in between.
        """
        ...

    def link(self, source: Path, target: Path) -> None:
        """Give a file one more name, which must not exist."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        ...

    def make_folder(self, path: Path) -> None:
        """Make a folder; its parent must exist."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        ...


class LocalFileSystem:
    """The operating system's file system."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def read(self, fd: int, target: memoryview, offset_bytes: int) -> int:
        return os.preadv(fd, [target], offset_bytes)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def fill_pages(self, fd: int, pages: mmap.mmap, offset_bytes: int, data: memoryview) -> None:
        if len(data) < RELEASE_SIZE_BYTES:
            pages[offset_bytes : offset_bytes + len(data)] = data
            return
        # Imported here, so that an agent that has nothing to copy yet starts without it.
        import numpy as np

        # NumPy's copy releases the GIL, so other threads run meanwhile.
        target = np.frombuffer(pages, np.uint8, len(data), offset_bytes)
        np.copyto(target, np.frombuffer(data, np.uint8))

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def allocate(self, fd: int, size_bytes: int) -> None:
        os.posix_fallocate(fd, 0, size_bytes)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def rename_to_new(self, source: Path, target: Path) -> None:
        rename_to_new(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


LOCAL: FileSystem = LocalFileSystem()
