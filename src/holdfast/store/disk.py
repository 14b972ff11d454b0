"""The durable tier on a local or mounted file system.

`put` is: write beside (past the page cache where the file system takes O_DIRECT), cut to size,
fsync, close, rename, fsync the folder. So an object that is visible is whole on the disk, and stays
so when the power is cut, as far as the disk keeps what it acknowledged.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.format.buffers import Buffer
from holdfast.store.contract import Reader, StoredObject
from holdfast.store.direct_reader import (
    ALIGNMENT_BYTES,
    DIRECT_SIZE_MIN_BYTES,
    DirectReader,
    StagingBuffers,
    address,
    open_directly,
)
from holdfast.store.file_system import LOCAL, FileSystem
from holdfast.store.files import ObjectFolder

STAGING_SIZE_BYTES = 4 * 1024 * 1024
# A file system without hard links, one name too many, a mount in between, a file of somebody else.
_CANNOT_LINK = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)

log = logging.getLogger(__name__)


class DiskStore:
    """Objects as files below `root`, durable when a call returns. Threads may share it."""

    tier = name = "durable"

    def __init__(
        self, root: Path, clock: Clock, files: FileSystem = LOCAL, *, reads_directly: bool = False
    ) -> None:
        """`reads_directly`: no other process here reads the same bytes, at about the same time."""
        self.root = root
        self._staging = StagingBuffers() if reads_directly else None
        self._folder = ObjectFolder(root, clock, files, durable=True)
        self._has_told_no_links = False

    def __repr__(self) -> str:
        return f"DiskStore({self.root})"

    def put(self, key: str, size_bytes: int, blocks: Iterable[Buffer]) -> None:
        with self._folder.writing(self._folder.path(key)) as unfinished:
            fd, is_direct = self._create(unfinished)
            try:
                write = self._write_direct if is_direct else self._write_plain
                written = write(fd, blocks)
                if written != size_bytes:
                    raise InvalidArgumentError(
                        f"put {key}: expected blocks of {size_bytes} bytes together, found "
                        f"{written}"
                    )
                # A direct write ends on a multiple of its alignment; the file where its bytes do.
                self._folder.files.truncate(fd, size_bytes)
                self._folder.files.sync(fd)
            finally:
                self._folder.files.close(fd)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._folder.put_if_absent(key, data)

    def link(self, source_key: str, key: str) -> None:
        try:
            self._folder.link(source_key, key)
        except StorageError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _CANNOT_LINK:
                raise
            if not self._has_told_no_links:
                self._has_told_no_links = True
                log.warning("%s; the bytes are copied instead, here and from now on", error)
            self._copy(source_key, key)

    def _copy(self, source_key: str, key: str) -> None:
        """Writes the object of `source_key` once more."""
        with self.open(source_key) as source:
            pages = memoryview(mmap.mmap(-1, STAGING_SIZE_BYTES))

            def pieces() -> Iterator[Buffer]:
                for start in range(0, source.size_bytes, STAGING_SIZE_BYTES):
                    piece = pages[: min(STAGING_SIZE_BYTES, source.size_bytes - start)]
                    source.read_into(start, piece)
                    yield piece

            self.put(key, source.size_bytes, pieces())

    def get(self, key: str) -> bytes:
        return self._folder.read(key)

    def open(self, key: str) -> AbstractContextManager[Reader]:
        if self._staging is None:
            return self._folder.opened(key)
        return self._opened_directly(key, self._staging)

    @contextlib.contextmanager
    def _opened_directly(self, key: str, staging: StagingBuffers) -> Iterator[Reader]:
        files = self._folder.files
        with self._folder.opened(key) as reader:
            is_large = reader.size_bytes >= DIRECT_SIZE_MIN_BYTES
            direct_fd = open_directly(files, reader.fd) if is_large else None
            if direct_fd is None:
                yield reader
                return
            try:
                yield DirectReader(self._folder.path(key), reader.fd, direct_fd, files, staging)
            finally:
                with contextlib.suppress(OSError):
                    files.close(direct_fd)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._folder.list(prefix)

    def delete(self, *keys: str) -> None:
        self._folder.delete(*keys)

    def discard_unfinished(self, prefix: str) -> None:
        self._folder.discard_unfinished(prefix)

    def _create(self, path: Path) -> tuple[int, bool]:
        """An open new file, and whether it is written past the page cache."""
        try:
            return self._folder.create(path, os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # Some file systems create the file before they refuse O_DIRECT.
        with contextlib.suppress(FileNotFoundError):
            self._folder.files.unlink(path)
        return self._folder.create(path, 0), False

    def _write_plain(self, fd: int, blocks: Iterable[Buffer]) -> int:
        written = 0
        for block in blocks:
            view = memoryview(block).cast("B")
            self._folder.write_all(fd, view)
            written += len(view)
        return written

    def _write_direct(self, fd: int, blocks: Iterable[Buffer]) -> int:
        """Writes with O_DIRECT; what is not aligned in memory or size goes by way of a buffer.

        Returns how many bytes the blocks had; the file may end up to one alignment later.
        """
        written = staged = 0
        # Not closed by hand: after an error, slices of it live on in the error's frames.
        buffer = memoryview(mmap.mmap(-1, STAGING_SIZE_BYTES))
        for block in blocks:
            rest = memoryview(block).cast("B")
            written += len(rest)
            while len(rest):
                if staged == 0 and address(rest) % ALIGNMENT_BYTES == 0:
                    whole = len(rest) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
                    self._folder.write_all(fd, rest[:whole])
                    rest = rest[whole:]
                taken = min(len(rest), STAGING_SIZE_BYTES - staged)
                buffer[staged : staged + taken] = rest[:taken]
                rest, staged = rest[taken:], staged + taken
                if staged == STAGING_SIZE_BYTES:
                    self._folder.write_all(fd, buffer)
                    staged = 0
        if staged:
            padded = -(-staged // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._folder.write_all(fd, buffer[:padded])
        return written
