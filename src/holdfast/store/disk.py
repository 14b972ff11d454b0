"""The durable tier on a local or mounted file system.

`put` is: write to an unfinished file (with O_DIRECT where the file system supports it), truncate to
size, fsync, close, rename, fsync the folder. So a visible object is complete on the disk and
survives power loss, provided that the disk retains acknowledged writes.

The store is bound to its directory, not to the path (`store.run_directory`): a moved directory is
followed, a deleted one is an error, and a write that overlaps a move fails and may be retried.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import (
    HoldfastError,
    NotARunError,
    ObjectNotFoundError,
    StorageError,
    translated,
)
from holdfast.format.digests import Buffer
from holdfast.store.contract import (
    DURABLE,
    REMOTE,
    Reader,
    Source,
    Store,
    StoredObject,
    exact_blocks,
    read_each,
    source_of,
)
from holdfast.store.direct_io import (
    ALIGNMENT_BYTES,
    DIRECT_SIZE_MIN_BYTES,
    DirectReader,
    StagingBuffers,
    address,
    open_directly,
)
from holdfast.store.files.file_system import LOCAL, FileSystem
from holdfast.store.files.free_names import UNFINISHED
from holdfast.store.fleeting_files import FleetingFiles
from holdfast.store.object_folder import ObjectFolder, make_folder
from holdfast.store.run_directory import RunDirectory, check_link

STAGING_SIZE_BYTES = 4 * 1024 * 1024
PIECE_SIZE_BYTES = 32 * 1024 * 1024
FIRST_SIZE_BYTES = 4 * 1024 * 1024
"""The first piece is smaller: nothing is written while the source prepares it."""
LISTINGS_MAX = 3
RECORDS_AT_ONCE = 16
"""More than a local disk needs; each record of a network file system is a round trip."""

log = logging.getLogger(__name__)


class DiskStore(Store):
    """Objects as files below `root`, durable when a call returns. Thread-safe."""

    request_count: int | None = None
    """A directory is no service."""

    def __init__(
        self,
        root: Path | RunDirectory,
        clock: Clock,
        files: FileSystem = LOCAL,
        *,
        reads_directly: bool = False,
        tier: str = DURABLE,
    ) -> None:
        """`reads_directly`: bypass the page cache; no other local process reads the same bytes."""
        self.tier = self.name = tier
        self.is_optional = tier == REMOTE
        if isinstance(root, Path):
            root = RunDirectory(root, is_remote_tier=tier == REMOTE)
        self.home = root
        self.fleeting = FleetingFiles(self.home, clock)
        self._clock = clock
        self._files = files
        self._staging = StagingBuffers() if reads_directly else None
        self._known = self._folder_at(self.home.path)
        self._is_direct_refused = False

    def __repr__(self) -> str:
        return f"DiskStore({self.root})"

    @property
    def root(self) -> Path:
        """The last known path of the directory."""
        return self.home.path

    def _folder_at(self, path: Path) -> ObjectFolder:
        return ObjectFolder(path, self._clock, self._files, durable=True)

    def _folder(self) -> ObjectFolder:
        """Return the objects at the directory's current path."""
        path, folder = self.home.current_folder(), self._known
        if folder.root != path:
            folder = self._known = self._folder_at(path)
        return folder

    @contextlib.contextmanager
    def _reading(self) -> Iterator[ObjectFolder]:
        """Yield the objects; on failure, raise the directory's own error if it is missing."""
        folder = self._folder()
        try:
            yield folder
        except StorageError:
            self.home.current_folder()
            raise

    @contextlib.contextmanager
    def _writing(self) -> Iterator[ObjectFolder]:
        """Yield the objects for writing; fail if the directory was moved during the write.

        A write that overlaps a move may have created its file at the old path.
        """
        with self._reading() as folder:
            yield folder
            if self._folder() is not folder:
                raise StorageError(
                    f"write to {folder.root}: it was moved to {self.root} meanwhile; try again"
                )

    def is_unused(self) -> bool:
        """Return whether the directory is missing, or has nothing that is whole.

        A crash during the creation of a run can leave an unfinished record and nothing else.
        """
        with translated("open", self.root):
            check_link(self.root)
            if not self.root.exists():
                return True
            if not self.root.is_dir():
                raise NotARunError(f"open {self.root}: expected a directory, found a file")
            return all(map(_is_unfinished, self.root.iterdir()))

    def prepare_place(self) -> None:
        """Create the directory."""
        try:
            with translated("create", self.root):
                make_folder(self._files, self.root, self.root.parent, durable=True)
        except ObjectNotFoundError as error:
            raise StorageError(
                f"create {self.root}: the directory cannot be made there ({error.__cause__}); "
                "check the path"
            ) from error

    def has_object(self, key: str) -> bool:
        """Return whether the key has an object."""
        return os.path.isfile(self.root / key)

    def put(self, key: str, source: Source | Buffer) -> None:
        source = source_of(source)
        with self._writing() as folder, folder.writing(folder.path(key)) as unfinished:
            fd, is_direct = _create(folder, unfinished, is_direct=not self._is_direct_refused)
            try:
                self._write(folder, fd, source, _write_direct if is_direct else _write_plain)
                return
            except OSError as error:
                if not is_direct or error.errno != errno.EINVAL:
                    raise
                log.warning(
                    "write to %s: its file system takes O_DIRECT and refuses the write; bytes go "
                    "through the page cache from now on",
                    self.root,
                )
                self._is_direct_refused = True
            self._files.unlink(unfinished)
            fd, _ = _create(folder, unfinished, is_direct=False)
            self._write(folder, fd, source, _write_plain)

    def _write(
        self,
        folder: ObjectFolder,
        fd: int,
        source: Source,
        write: Callable[[ObjectFolder, int, Iterable[memoryview]], None],
    ) -> None:
        """Write `source` to the new file `fd`, make it durable, and close it."""
        try:
            with contextlib.closing(_blocks_ahead(source)) as blocks:
                write(folder, fd, blocks)
            # A direct write is padded to a multiple of the alignment; cut the file to its size.
            self._files.truncate(fd, source.size_bytes)
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def put_if_absent(self, key: str, data: bytes, after: Sequence[str] = ()) -> bool:
        with self._writing() as folder:
            return folder.put_if_absent(key, data, after)

    def get(self, key: str) -> bytes:
        with self._reading() as folder:
            return folder.read(key)

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | HoldfastError]:
        return read_each(self.get, keys, RECORDS_AT_ONCE)

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        with contextlib.ExitStack() as stack:
            with self._reading() as folder:
                reader = stack.enter_context(folder.opened(key))
            is_large = reader.size_bytes >= DIRECT_SIZE_MIN_BYTES
            direct_fd = None
            if self._staging is not None and is_large:
                direct_fd = open_directly(self._files, reader.fd)
            if self._staging is None or direct_fd is None:
                yield reader
                return
            try:
                path = folder.path(key)
                yield DirectReader(path, reader.fd, direct_fd, self._files, self._staging)
            finally:
                with contextlib.suppress(OSError):
                    self._files.close(direct_fd)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return iter(self.list_some(prefix))

    def list_some(
        self, prefix: str, *, after: str = "", before: str = "", count_max: int | None = None
    ) -> builtins.list[StoredObject]:
        for _ in range(LISTINGS_MAX):
            with self._reading() as folder:
                listing = [*folder.list(prefix, after, before, count_max)]
            # A directory that was moved or deleted during the listing would look empty.
            if self._folder() is folder:
                return listing
        raise StorageError(f"list {self.root}: it was moved while it was listed; try again")

    def delete(self, *keys: str) -> None:
        with self._writing() as folder:
            folder.delete(*keys)

    def discard_unfinished(self, prefix: str) -> None:
        with self._writing() as folder:
            folder.discard_unfinished(prefix)


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(UNFINISHED)


def _create(folder: ObjectFolder, path: Path, *, is_direct: bool) -> tuple[int, bool]:
    """Return the descriptor of a new file, and whether it bypasses the page cache."""
    if not is_direct:
        return folder.create_file(path, 0), False
    try:
        return folder.create_file(path, os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Some file systems create the file before they refuse O_DIRECT.
    with contextlib.suppress(FileNotFoundError):
        folder.files.unlink(path)
    return folder.create_file(path, 0), False


def _blocks_ahead(source: Source) -> Generator[memoryview]:
    """Yield the bytes of `source`; a thread requests each piece while the one before is written."""
    starts = (0, *range(FIRST_SIZE_BYTES, source.size_bytes, PIECE_SIZE_BYTES))
    pieces = [*pairwise((*starts, source.size_bytes))]
    if len(pieces) == 1 or not source.is_lasting:
        for start, stop in pieces:
            yield from exact_blocks(source, start, stop)
        return
    with ThreadPoolExecutor(1, "holdfast-put") as pool:
        ahead: list[memoryview] = []
        for start, stop in pieces:
            reading = pool.submit(list, exact_blocks(source, start, stop))
            yield from ahead
            ahead = reading.result()
        yield from ahead


def _write_plain(folder: ObjectFolder, fd: int, blocks: Iterable[memoryview]) -> None:
    for block in blocks:
        folder.write_all(fd, block)


def _write_direct(folder: ObjectFolder, fd: int, blocks: Iterable[memoryview]) -> None:
    """Write with O_DIRECT; data that is not aligned in memory or size is staged in a buffer.

    Afterwards the file may be too long, by less than one alignment.
    """
    staged = 0
    # Freed by reference count, not closed: after an error, the frames hold slices of it.
    buffer = memoryview(mmap.mmap(-1, STAGING_SIZE_BYTES))
    for rest in blocks:
        while len(rest):
            # A block of less than one alignment never goes directly; most records are such blocks.
            is_long = len(rest) >= ALIGNMENT_BYTES
            if staged == 0 and is_long and address(rest) % ALIGNMENT_BYTES == 0:
                whole = len(rest) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
                folder.write_all(fd, rest[:whole])
                rest = rest[whole:]
            taken = min(len(rest), STAGING_SIZE_BYTES - staged)
            buffer[staged : staged + taken] = rest[:taken]
            rest, staged = rest[taken:], staged + taken
            if staged == STAGING_SIZE_BYTES:
                folder.write_all(fd, buffer)
                staged = 0
    if staged:
        padded = -(-staged // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        folder.write_all(fd, buffer[:padded])
