"""The seam between the stores and the operating system.

Everything that the stores change on a file system, and every byte that they read from one, passes
through one `FileSystem`. So a test can record what is done and in which order, refuse the n-th
call, or leave a disk as a crash would (`holdfast.testing`). Looks at names, sizes and locks change
nothing and do not pass here; nor does what goes between a socket and a slot's memory.

The methods are the system's own calls: they raise OSError, and mean what POSIX says. A folder is
synced by opening it and syncing that.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol

RELEASE_SIZE_BYTES = 128 * 1024


class FileSystem(Protocol):
    """The calls; see the module."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """A descriptor, closed on exec."""
        ...

    def read(self, fd: int, target: memoryview, offset_bytes: int) -> int:
        """Reads from `offset_bytes` on into `target`; returns how much, 0 at the end."""
        ...

    def write(self, fd: int, data: memoryview) -> int:
        """Writes at the file's position; returns how much of `data` was taken."""
        ...

    def fill(self, fd: int, pages: mmap.mmap, offset_bytes: int, data: memoryview) -> None:
        """Copies `data` into the mapped `pages` of `fd`."""
        ...

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Cuts or extends the file."""
        ...

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Makes the file `size_bytes` long, with room for all of it."""
        ...

    def sync(self, fd: int) -> None:
        """Makes a file's bytes, or a folder's names, survive the loss of power."""
        ...

    def close(self, fd: int) -> None:
        """Closes the descriptor, also where it raises."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file another name, in place of what has that name."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Gives a file one more name, that nothing has yet."""
        ...

    def unlink(self, path: Path) -> None:
        """Takes a name away."""
        ...

    def make_folder(self, path: Path) -> None:
        """Makes a folder in one that exists."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        ...


class LocalFileSystem:
    """The operating system's own."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def read(self, fd: int, target: memoryview, offset_bytes: int) -> int:
        return os.preadv(fd, [target], offset_bytes)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def fill(self, fd: int, pages: mmap.mmap, offset_bytes: int, data: memoryview) -> None:
        if len(data) < RELEASE_SIZE_BYTES:
            pages[offset_bytes : offset_bytes + len(data)] = data
            return
        # Loaded here, so that an agent that has nothing to copy yet starts without it.
        import numpy as np

        # This way other threads run meanwhile.
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

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


LOCAL: FileSystem = LocalFileSystem()
