"""Objects as files in folders: atomic writes, listing and reading.

The base of the stores on disk and in RAM. Unfinished objects are named `.NAME.TOKEN.unfinished`
beside their final name; names that start with a dot are never objects. A durable folder adds the
syncs that make an effect survive power loss; the order is always: bytes, then the name that makes
them visible, then the folder that holds the name. Symbolic links below the root are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from holdfast.clock import Clock
from holdfast.errors import (
    CheckpointDamagedError,
    ObjectNotFoundError,
    StorageError,
    translated,
)
from holdfast.format.sealed import RECORD_SIZE_MAX_BYTES
from holdfast.store.contract import StoredObject, check_key
from holdfast.store.files.file_system import FileSystem
from holdfast.store.files.free_names import UNFINISHED, take_name
from holdfast.store.files.whole_file import beside, renamed

TRIES_MAX = 100
DEPTH_MAX = 50
SYNCED_COUNT_MAX = 64

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)
_reported_devices: set[int] = set()

log = logging.getLogger(__name__)

T = TypeVar("T")


# Raised for a path below an object, for a symbolic link and for a socket.
_NO_OBJECT = (errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


class FileReader:
    """An open file for ranged reads."""

    def __init__(self, path: Path, fd: int, file_system: FileSystem) -> None:
        self._path = path
        self._file_system = file_system
        self.fd = fd
        self._size_bytes = os.fstat(fd).st_size

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        stop = offset_bytes + len(target)
        with translated("read", self._path):
            while len(target):
                count = self._read(self.fd, target, offset_bytes)
                if count == 0:
                    raise StorageError(
                        f"read {self._path}: expected bytes up to {stop}, found its end at "
                        f"{os.fstat(self.fd).st_size}; the file is truncated"
                    )
                target = target[count:]
                offset_bytes += count

    def _read(self, fd: int, target: memoryview, offset_bytes: int) -> int:
        return self._file_system.read(fd, target, offset_bytes)

    def view(self) -> memoryview | None:
        return None

    def lasting_view(self) -> memoryview | None:
        return None


class ObjectFolder:
    """Objects as files below `root`, a directory that must exist and is never created here.

    Thread-safe. `_synced` holds folders whose own name is known to be durable. A folder that
    another process removed is found missing on use and created again. As other processes remove
    most of these folders, the set is cleared when it is full.
    """

    def __init__(self, root: Path, clock: Clock, files: FileSystem, *, durable: bool) -> None:
        self.root = root
        self.files = files
        self._clock = clock
        self._is_durable = durable
        self._synced: set[Path] = set()

    def path(self, key: str) -> Path:
        """Return the path of the object of `key`."""
        return self.root / check_key(key)

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        """Yield the unfinished path for the bytes of `path`; rename it on success, else remove it.

        The caller creates that file with `create` or `in_folder`, and syncs and closes it.
        """
        with translated("write", path):
            with renamed(path, self._clock.new_token(), self.files) as unfinished:
                yield unfinished
            self._sync_names(path.parent)

    def put_if_absent(self, key: str, data: bytes, after: Sequence[str] = ()) -> bool:
        """Write an object if the key has none, by giving a finished file its name."""
        path = self.path(key)
        folders = {self.path(other).parent for other in after} - {path.parent}
        token = self._clock.new_token()
        with translated("write", path), beside(path, token, self.files) as unfinished:
            fd = self.create_file(unfinished, 0)
            try:
                self.write_all(fd, memoryview(data))
                if self._is_durable:
                    self.files.sync(fd)
            finally:
                self.files.close(fd)
            # Visible names in this folder may be of a process that was killed before its sync,
            # and a manifest must not be more durable than the objects that it names.
            for folder in sorted(folders):
                self._sync_path(folder)
            self._sync_names(path.parent)
            try:
                take_name(self.files, unfinished, path, self._clock)
                is_new = True
            except FileExistsError:
                is_new = False
            except FileNotFoundError:
                # The process that put it may have removed this file as an interrupted put.
                if not path.exists():
                    raise
                is_new = False
            # Another caller's object must be durable too once this call returns.
            self._sync_names(path.parent)
            return is_new

    def link(self, source_key: str, key: str) -> None:
        """Give an object one more name.

        Its bytes are durable already: they were synced before the object became visible. Its name
        may not be, if it was made by a process that was killed before the sync; so an existing name
        is synced as well.
        """
        source, path = self.path(source_key), self.path(key)
        self._check_no_links(source.parent)
        with translated("link", path):
            try:
                self.in_folder(path, lambda: self._link_existing(source, path))
            except FileExistsError:
                if not os.path.samefile(source, path):
                    raise StorageError(
                        f"link {source} as {path}: expected no object there, found another one; "
                        "objects are not replaced, delete it first"
                    ) from None
            self._sync_names(path.parent)

    def _link_existing(self, source: Path, path: Path) -> None:
        try:
            # A folder cannot be linked, and the target of a symbolic link is not an object.
            with path_not_under_object():
                is_object = stat.S_ISREG(os.stat(source, follow_symlinks=False).st_mode)
            if is_object:
                self.files.link(source, path)
                return
        except FileNotFoundError:
            # Either the object or the folder for its new name is missing.
            if source.exists():
                raise
        raise ObjectNotFoundError(f"link {source}: there is no such object")

    def create_file(self, path: Path, flags: int) -> int:
        """Open a new file for writing, creating its folder if missing; return the descriptor."""
        # For writing alone, smbnetfs loses its connection once the file's size is set.
        flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL
        return self.in_folder(path, lambda: self.files.open(path, flags, 0o666))

    def in_folder(self, path: Path, make: Callable[[], T]) -> T:
        """Call `make`, which creates `path`, after creating its folder if missing.

        A concurrent delete may remove the folder while it is still empty; then both are retried, at
        most TRIES_MAX times.

        Returns:
            The result of `make`.
        """
        for _ in range(TRIES_MAX):
            with contextlib.suppress(FileNotFoundError):
                self._make_folder(path.parent)
                return make()
            self._synced.clear()
            if not self.root.is_dir():
                raise StorageError(
                    f"write {path}: there is no directory {self.root}; it was deleted, moved or "
                    "unmounted, and is not created again"
                )
        raise StorageError(
            f"write {path}: its folder was removed {TRIES_MAX} times while it was made"
        )

    def write_all(self, fd: int, data: memoryview) -> None:
        """Write all of `data` at the file's position, in as many calls as needed."""
        while len(data):
            taken = self.files.write(fd, data)
            if taken == 0:
                raise OSError(errno.EIO, "write returned 0 bytes")
            data = data[taken:]

    def read(self, key: str) -> bytes:
        """Return all bytes of an object."""
        with self.opened(key) as reader:
            if reader.size_bytes > RECORD_SIZE_MAX_BYTES:
                raise CheckpointDamagedError(
                    f"read {self.path(key)}: expected at most {RECORD_SIZE_MAX_BYTES} bytes, found "
                    f"{reader.size_bytes}; it was not written by Holdfast"
                )
            data = bytearray(reader.size_bytes)
            reader.read_into(0, memoryview(data))
            return bytes(data)

    @contextlib.contextmanager
    def opened(self, key: str) -> Iterator[FileReader]:
        """Opens an object for ranged reads; closes it on leaving."""
        path = self.path(key)
        self._check_no_links(path.parent)
        with translated("open", path), path_not_under_object():
            # O_NONBLOCK: opening a FIFO, which is not an object, must not block.
            fd = self.files.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            with translated("open", path):
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise IsADirectoryError(path)
            yield FileReader(path, fd, self.files)
        finally:
            # A failed close of a file opened for reading loses nothing.
            with contextlib.suppress(OSError):
                self.files.close(fd)

    def list(
        self, prefix: str, after: str = "", before: str = "", count_max: int | None = None
    ) -> Iterator[StoredObject]:
        """Yield the objects below `prefix`, by key. Symbolic links are not followed or listed.

        Only keys after `after` and, if it is not empty, before `before`; and at most the first
        `count_max`.
        """
        folder = self.path(prefix)
        self._check_no_links(folder)
        with translated("list", folder):
            walk = _walk(folder, prefix, after)
            if before:
                walk = itertools.takewhile(lambda stored: stored.key < before, walk)
            listing = [*itertools.islice(walk, count_max)]
        yield from listing

    def delete(self, *keys: str) -> None:
        """Remove objects, and the folders that become empty; sync each folder once."""
        changed: dict[Path, bool] = {}
        for path in [self.path(key) for key in keys]:
            if path.parent not in changed:
                self._check_no_links(path.parent)
            is_gone = False
            with translated("delete", path):
                try:
                    self.files.unlink(path)
                except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    is_gone = True
            changed[path.parent] = changed.get(path.parent, False) or not is_gone
        for folder, has_changed in changed.items():
            with translated("delete from", folder):
                # Synced even if no name was left: the process that removed them may have been
                # killed before its sync. Another delete may have removed the folder itself.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    self._sync_names(folder)
                if has_changed:
                    self._remove_empty(folder)

    def discard_unfinished(self, prefix: str) -> None:
        """Remove leftovers of interrupted writes and deletes of `prefix` and below it."""
        folder = self.path(prefix)
        self._check_no_links(folder)
        with translated("clean up", folder):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for name in os.listdir(folder.parent):
                    if name.startswith(f".{folder.name}.") and name.endswith(UNFINISHED):
                        self._drop(folder.parent / name)
            for place, _, names in os.walk(folder, topdown=False):
                for name in names:
                    if name.startswith(".") and name.endswith(UNFINISHED):
                        self._drop(Path(place, name))
                self._remove_empty(Path(place))

    def _make_folder(self, folder: Path) -> None:
        if folder in self._synced:
            return
        self._check_no_links(folder)
        self._make_below_root(folder)
        if len(self._synced) >= SYNCED_COUNT_MAX:
            self._synced.clear()
        self._synced.add(folder)

    def _make_below_root(self, folder: Path) -> None:
        """Create `folder` and missing folders between the root and it, never the root itself.

        In a durable store existing names are synced too: the process that created them may have
        been killed before its sync.
        """
        chain = [folder, *folder.parents]
        chain = chain[: chain.index(self.root)]
        if self._is_durable and self.root.is_dir():
            _sync_young(self.files, self.root)
        for level in reversed(chain):
            if not level.is_dir():
                with contextlib.suppress(FileExistsError):
                    self.files.make_folder(level)
            if self._is_durable:
                sync_folder(self.files, level.parent)

    def _check_no_links(self, folder: Path) -> None:
        """Check that no folder between the root and `folder` is a symbolic link."""
        chain = [folder, *folder.parents]
        # From the root down, so that an error names the folder that cannot be searched.
        for level in reversed(chain[: chain.index(self.root)]):
            with translated("search", level.parent):
                is_link = level not in self._synced and level.is_symlink()
            if is_link:
                raise StorageError(
                    f"use {level}: expected a folder, found a symbolic link; none is followed "
                    "inside a run, put the folder itself there"
                )

    def _sync_names(self, folder: Path) -> None:
        if self._is_durable:
            sync_folder(self.files, folder)

    def _sync_path(self, folder: Path) -> None:
        """Make the names in an existing folder durable, and those of the folders down to it."""
        while folder != self.root:
            self._sync_names(folder)
            folder = folder.parent

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(path)

    def _remove_empty(self, folder: Path) -> None:
        """Remove `folder` and the folders above it, up to the root, while they are empty."""
        while folder != self.root:
            try:
                self.files.remove_folder(folder)
            except OSError:
                # Not empty, or another process removed it first.
                return
            self._synced.discard(folder)
            folder = folder.parent


def make_folder(files: FileSystem, folder: Path, root: Path, *, durable: bool) -> None:
    """Create `folder`, of a new run, and missing folders above it.

    If `durable`, each name from below `root` down to `folder` is synced even if it exists: the
    process that created it may have been killed before its sync.
    """
    chain = [folder]
    while chain[-1] != root and chain[-1].parent != chain[-1]:
        chain.append(chain[-1].parent)
    while not chain[-1].parent.is_dir():
        chain.append(chain[-1].parent)
    if durable:
        _sync_young(files, chain[-1] if chain[-1].is_dir() else chain[-1].parent)
    for level in reversed(chain):
        is_made = False
        if not level.is_dir():
            with contextlib.suppress(FileExistsError):
                files.make_folder(level)
                is_made = True
        if durable and (is_made or level != root):
            sync_folder(files, level.parent)


def _sync_young(files: FileSystem, folder: Path) -> None:
    """Sync the names of `folder` and of the folders above it that have at most one entry.

    Such folders may be new: the process that created them may have been killed before its sync.
    """
    with contextlib.suppress(PermissionError):
        while folder.parent != folder and len(os.listdir(folder)) <= 1:
            try:
                sync_folder(files, folder.parent)
            except OSError as error:
                # A file system above the run may not support syncing folders.
                if error.errno not in (errno.EINVAL, errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
            folder = folder.parent


def sync_folder(files: FileSystem, folder: Path) -> None:
    """Make the names in `folder` durable.

    Some file systems (FUSE, SMB) refuse it, and write names in their own order. That is reported
    once for each: names may be lost there when the storage loses power.
    """
    fd = files.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.sync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        device = os.fstat(fd).st_dev
        if device not in _reported_devices:
            _reported_devices.add(device)
            log.warning(
                "sync the folder %s: its file system refuses that (%s); a checkpoint that was "
                "just committed may be missing after a loss of power",
                folder,
                error.strerror,
            )
    finally:
        files.close(fd)


@contextlib.contextmanager
def path_not_under_object() -> Iterator[None]:
    """Report a path below an object, which reads cannot resolve, as a missing file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_OBJECT:
            raise
        raise FileNotFoundError(*error.args) from error


def _walk(folder: Path | str, prefix: str, after: str, depth: int = 0) -> Iterator[StoredObject]:
    """Yield the objects below `folder` whose key is after `after`, sorted by key."""
    try:
        with os.scandir(folder) as scan:
            # Sort folders with a trailing slash, so that the order is that of the keys.
            entries = sorted(
                (f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name, entry)
                for entry in scan
                if not entry.name.startswith(".")
            )
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, entry in entries:
        key = f"{prefix}/{name}"
        if name.endswith("/"):
            may_hold_later = key > after or after.startswith(key)
            # No key of the format is this deep; folders of other programs may nest endlessly.
            if may_hold_later and depth < DEPTH_MAX:
                yield from _walk(entry.path, f"{prefix}/{entry.name}", after, depth + 1)
        elif key > after and entry.is_file(follow_symlinks=False):
            try:
                size_bytes = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                # Deleted between the scan and the stat.
                continue
            yield StoredObject(key, size_bytes)
