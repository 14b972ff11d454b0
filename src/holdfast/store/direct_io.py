"""Reads past the page cache, of bytes that one process alone wants.

By way of the page cache every byte is copied once more, by the processor that also digests it, and
pages of it stay that nobody asks for again. What does not lie as the file system wants it, in the
file or in memory, goes by way of a small buffer.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from holdfast.store.file_system import FileSystem
from holdfast.store.object_folder import FileReader, translated

ALIGNMENT_BYTES = 4096
DIRECT_SIZE_MIN_BYTES = 1024 * 1024
"""Of smaller ranges the system reads some ahead, and has the next one when it is asked for."""
STAGING_SIZE_BYTES = 1024 * 1024


class StagingBuffers:
    """Buffers that lie in memory as direct reads want it. Threads share them."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def lend(self) -> memoryview:
        """A buffer of STAGING_SIZE_BYTES, to be given back."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, STAGING_SIZE_BYTES))

    def give_back(self, buffer: memoryview) -> None:
        """Takes back what was lent."""
        self._free.append(buffer)


class DirectReader(FileReader):
    """An open file for ranged reads; large ones go past the page cache, where that can be done."""

    def __init__(
        self, path: Path, fd: int, direct_fd: int, files: FileSystem, staging: StagingBuffers
    ) -> None:
        super().__init__(path, fd, files)
        self._direct_fd = direct_fd
        self._staging = staging
        self._is_refused = False

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        done = 0
        if len(target) >= DIRECT_SIZE_MIN_BYTES and not self._is_refused:
            with translated("read", self._path):
                done = self._read_directly(offset_bytes, target)
        if done < len(target):
            super().read_into(offset_bytes + done, target[done:])

    def _read_directly(self, offset_bytes: int, target: memoryview) -> int:
        """Fills the beginning of `target`; returns how much of it."""
        is_aligned = not (offset_bytes | address(target)) % ALIGNMENT_BYTES
        fill: Callable[[int, memoryview], int] = self._in_place if is_aligned else self._staged
        try:
            return fill(offset_bytes, target)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This file system wants more than any that is known to.
            self._is_refused = True
            return 0

    def _in_place(self, offset_bytes: int, target: memoryview) -> int:
        whole = len(target) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        done = 0
        while done < whole:
            count = self._read(self._direct_fd, target[done:whole], offset_bytes + done)
            done += count
            if not count or count % ALIGNMENT_BYTES:
                break
        return done

    def _staged(self, offset_bytes: int, target: memoryview) -> int:
        import numpy as np

        buffer = self._staging.lend()
        try:
            done = 0
            while done < len(target):
                before = (offset_bytes + done) % ALIGNMENT_BYTES
                wanted = -(-(before + len(target) - done) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                start = offset_bytes + done - before
                count = self._read(self._direct_fd, buffer[:wanted], start)
                taken = min(count - before, len(target) - done)
                if taken <= 0:
                    break
                # This way other threads run meanwhile.
                piece = np.frombuffer(buffer[before : before + taken], np.uint8)
                np.copyto(np.frombuffer(target[done : done + taken], np.uint8), piece)
                done += taken
            return done
        finally:
            self._staging.give_back(buffer)


def address(view: memoryview) -> int:
    """Where it begins in memory."""
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def open_directly(files: FileSystem, fd: int) -> int | None:
    """A second descriptor of the open file `fd`, for direct reads; None where there is none."""
    try:
        return files.open(Path(f"/proc/self/fd/{fd}"), os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
