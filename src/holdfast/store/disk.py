"""The durable tier on a local or mounted file system.

`put` is: write beside (past the page cache where the file system takes O_DIRECT), cut to size,
fsync, close, rename, fsync the folder. So an object that is visible is whole on the disk, and stays
so when the power is cut, as far as the disk keeps what it acknowledged.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import InvalidArgumentError
from holdfast.format.buffers import Buffer
from holdfast.store import files
from holdfast.store.contract import Reader, StoredObject

DIRECT_ALIGNMENT_BYTES = 4096
STAGING_SIZE_BYTES = 4 * 1024 * 1024


class DiskStore:
    """Objects as files below `root`, durable when a call returns."""

    tier = "durable"

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root = root
        self._clock = clock

    def __repr__(self) -> str:
        return f"DiskStore({self.root})"

    def put(self, key: str, size_bytes: int, blocks: Iterable[Buffer]) -> None:
        path = files.object_path(self.root, key)
        unfinished = files.unfinished_path(path, self._clock.token())
        with files.translated("write", path):
            try:
                fd, is_direct = files.in_folder(
                    path, self.root, lambda: _open_for_writing(unfinished), durable=True
                )
                _write_file(fd, is_direct, size_bytes, blocks)
                files.show(unfinished, path, durable=True)
            finally:
                unfinished.unlink(missing_ok=True)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return files.put_object_if_absent(self.root, key, data, self._clock.token(), durable=True)

    def get(self, key: str) -> bytes:
        return files.read_object(self.root, key)

    def open(self, key: str) -> AbstractContextManager[Reader]:
        return files.open_file(self.root, key)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return files.list_objects(self.root, prefix)

    def delete(self, key: str) -> None:
        files.delete_object(self.root, key, durable=True)

    def discard_unfinished(self, prefix: str) -> None:
        files.discard_unfinished(self.root, prefix)


def _write_file(fd: int, is_direct: bool, size_bytes: int, blocks: Iterable[Buffer]) -> None:
    """Writes and syncs the open file, and closes it."""
    try:
        written = _write_direct(fd, blocks) if is_direct else _write_plain(fd, blocks)
        if written != size_bytes:
            raise InvalidArgumentError(
                f"put: expected blocks of {size_bytes} bytes together, found {written}"
            )
        # A direct write ends on a multiple of its alignment; the file ends where its bytes do.
        os.ftruncate(fd, size_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_for_writing(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Some file systems create the file before they refuse O_DIRECT.
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666), False


def _write_plain(fd: int, blocks: Iterable[Buffer]) -> int:
    written = 0
    for block in blocks:
        view = memoryview(block).cast("B")
        files.write_all(fd, view)
        written += len(view)
    return written


def _write_direct(fd: int, blocks: Iterable[Buffer]) -> int:
    """Writes `blocks` with O_DIRECT; what is not aligned in memory or size goes by way of a buffer.

    Returns how many bytes the blocks had; the file may end up to one alignment later.
    """
    written = staged = 0
    # Not closed by hand: after an error, slices of it live on in the error's frames.
    buffer = memoryview(mmap.mmap(-1, STAGING_SIZE_BYTES))
    for block in blocks:
        rest = memoryview(block).cast("B")
        written += len(rest)
        while len(rest):
            if staged == 0 and _address(rest) % DIRECT_ALIGNMENT_BYTES == 0:
                whole = len(rest) // DIRECT_ALIGNMENT_BYTES * DIRECT_ALIGNMENT_BYTES
                files.write_all(fd, rest[:whole])
                rest = rest[whole:]
            taken = min(len(rest), STAGING_SIZE_BYTES - staged)
            buffer[staged : staged + taken] = rest[:taken]
            rest, staged = rest[taken:], staged + taken
            if staged == STAGING_SIZE_BYTES:
                files.write_all(fd, buffer)
                staged = 0
    if staged:
        padded = -(-staged // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
        files.write_all(fd, buffer[:padded])
    return written


def _address(view: memoryview) -> int:
    # Read-only memory has no ctypes view; it takes the way through the buffer.
    if view.readonly or len(view) == 0:
        return 1
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
