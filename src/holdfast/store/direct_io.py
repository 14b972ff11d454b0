"""Reads that bypass the page cache, for bytes that only one process reads.

The page cache would copy every byte once more, on the processor that also digests it, and keep
pages that are never read again. A range that is not aligned in the file or in memory is read by way
of a small aligned buffer. See docs/decisions/0017.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import translated
from holdfast.store.files.file_system import FileSystem
from holdfast.store.object_folder import FileReader

ALIGNMENT_BYTES = 4096
DIRECT_SIZE_MIN_BYTES = 1024 * 1024
"""Smaller ranges go through the page cache, whose readahead has the next range ready."""
STAGING_SIZE_BYTES = 1024 * 1024


class StagingBuffers:
    """A pool of buffers aligned for direct reads. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def acquire(self) -> memoryview:
        """Return a buffer of STAGING_SIZE_BYTES; the caller releases it."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, STAGING_SIZE_BYTES))

    def release(self, buffer: memoryview) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)


class DirectReader(FileReader):
    """An open file for ranged reads; large reads bypass the page cache where possible."""

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
        """Fill the beginning of `target`; return how many bytes were read."""
        is_aligned = not (offset_bytes | address(target)) % ALIGNMENT_BYTES
        fill: Callable[[int, memoryview], int] = self._in_place if is_aligned else self._staged
        try:
            return fill(offset_bytes, target)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This file system needs a larger alignment than any known one: use the page cache.
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

        buffer = self._staging.acquire()
        try:
            done = 0
            while done < len(target):
                before = (offset_bytes + done) % ALIGNMENT_BYTES
                length = -(-(before + len(target) - done) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                start = offset_bytes + done - before
                count = self._read(self._direct_fd, buffer[:length], start)
                taken = min(count - before, len(target) - done)
                if taken <= 0:
                    break
                # NumPy's copy releases the GIL, so other threads run meanwhile.
                piece = np.frombuffer(buffer[before : before + taken], np.uint8)
                np.copyto(np.frombuffer(target[done : done + taken], np.uint8), piece)
                done += taken
            return done
        finally:
            self._staging.release(buffer)


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of Python's C interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address(view: memoryview) -> int:
    """Return the address of the first byte; of an empty view it may be 0."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    try:
        return found.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))


def open_directly(files: FileSystem, fd: int) -> int | None:
    """Return a second descriptor of the open file `fd` for direct reads; None if unsupported."""
    try:
        return files.open(Path(f"/proc/self/fd/{fd}"), os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
