"""What stores in folders share: write beside and rename, listing, reading, and errors' translation.

Objects under way are named `.NAME.TOKEN.unfinished` beside their final name; names that start with
a dot are never objects. `durable=True` adds the syncs that make an effect survive power loss; the
order is always: bytes, then the name that shows them, then the folder that holds the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from holdfast.errors import ObjectNotFoundError, OutOfSpaceError, StorageError
from holdfast.store.contract import StoredObject, check_key

UNFINISHED = ".unfinished"
TRIES_MAX = 100

T = TypeVar("T")


@contextlib.contextmanager
def translated(action: str, path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError that says what failed, on what, and what to do."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ObjectNotFoundError(f"{action} {path}: there is no such object") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpaceError(
                f"{action} {path}: no space left ({error.strerror}); free some, or keep fewer "
                "checkpoints"
            ) from error
        advice = (
            "check its permissions and mount" if error.errno in _DENIED else "check the storage"
        )
        raise StorageError(
            f"{action} {path}: {error.strerror} (errno {error.errno}); {advice}"
        ) from error


_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def in_folder(path: Path, root: Path, make: Callable[[], T], *, durable: bool) -> T:
    """What `make` makes at `path`, whose folder in `root` is made where it is missing.

    A delete elsewhere may remove the folder again while it is still empty; then it is made anew.
    """
    for _ in range(TRIES_MAX):
        with contextlib.suppress(FileNotFoundError):
            _make_folder(path.parent, root, durable=durable)
            return make()
    raise StorageError(f"write {path}: its folder was removed {TRIES_MAX} times while it was made")


def _make_folder(folder: Path, root: Path, *, durable: bool) -> None:
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):
            made.mkdir(mode=0o700 if root == made else 0o777)
        if durable:
            sync_folder(made.parent)


def unfinished_path(path: Path, token: str) -> Path:
    """Where the bytes of `path` are gathered before it is shown."""
    return path.with_name(f".{path.name}.{token}{UNFINISHED}")


def show(unfinished: Path, path: Path, *, durable: bool) -> None:
    """Gives the gathered bytes their name, in one step, over an older object if there is one."""
    unfinished.rename(path)
    if durable:
        sync_folder(path.parent)


def write_all(fd: int, data: memoryview) -> None:
    """Writes all of `data` at the file's position; the system may take it in pieces."""
    while len(data):
        data = data[os.write(fd, data) :]


def object_path(root: Path, key: str) -> Path:
    """Where the object of `key` lies."""
    return root / check_key(key)


def read_object(root: Path, key: str) -> bytes:
    """All bytes of an object."""
    path = object_path(root, key)
    with translated("read", path), path_not_under_object(), open(path, "rb", opener=_open) as file:
        return file.read()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


@contextlib.contextmanager
def path_not_under_object() -> Iterator[None]:
    """For reads: an object is no folder, so nothing is below it."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from error


def put_object_if_absent(root: Path, key: str, data: bytes, token: str, *, durable: bool) -> bool:
    """Writes an object where there is none, by linking a finished file to its name."""
    path = object_path(root, key)
    unfinished = unfinished_path(path, token)
    with translated("write", path):
        try:
            with in_folder(path, root, lambda: unfinished.open("xb"), durable=durable) as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            try:
                os.link(unfinished, path)
            except FileExistsError:
                return False
            if durable:
                sync_folder(path.parent)
            return True
        finally:
            unfinished.unlink(missing_ok=True)


def list_objects(root: Path, prefix: str) -> Iterator[StoredObject]:
    """All objects below `prefix`, by key. Symbolic links are neither followed nor listed."""
    folder = object_path(root, prefix)
    with translated("list", folder):
        yield from _walk(folder, prefix)


def _walk(folder: Path | str, prefix: str) -> Iterator[StoredObject]:
    try:
        with os.scandir(folder) as scan:
            # By keys: what is in a folder is named by the folder and a slash.
            entries = sorted(scan, key=lambda e: e.name + "/" * e.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        key = f"{prefix}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, key)
        elif entry.is_file(follow_symlinks=False):
            # The object may be deleted between the scan and the look at it.
            with contextlib.suppress(FileNotFoundError):
                yield StoredObject(key, entry.stat(follow_symlinks=False).st_size)


def delete_object(root: Path, key: str, *, durable: bool) -> None:
    """Removes an object, and the folders that are empty without it."""
    path = object_path(root, key)
    with translated("delete", path):
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        # Another delete may have removed the folder, and the name with it.
        with contextlib.suppress(FileNotFoundError):
            if durable:
                sync_folder(path.parent)
        _remove_empty(path.parent, root)


def _remove_empty(folder: Path, root: Path) -> None:
    """Removes `folder`, and those above it up to `root`, as far as they are empty."""
    while folder != root:
        try:
            folder.rmdir()
        except OSError:
            # Not empty, or another process was faster: either way it is not ours to remove.
            return
        folder = folder.parent


def discard_unfinished(root: Path, prefix: str) -> None:
    """Removes the files of interrupted writes below `prefix`."""
    folder = object_path(root, prefix)
    with translated("clear", folder):
        if not folder.is_dir():
            return
        for path in sorted(folder.rglob(f".*{UNFINISHED}")):
            path.unlink(missing_ok=True)
            _remove_empty(path.parent, root)


class FileReader:
    """An open file for ranged reads."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self.fd = fd
        self._size_bytes = os.fstat(fd).st_size

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, offset_bytes: int, target: memoryview) -> None:
        stop = offset_bytes + len(target)
        with translated("read", self._path):
            while len(target):
                count = os.preadv(self.fd, [target], offset_bytes)
                if count == 0:
                    raise StorageError(
                        f"read {self._path}: expected bytes up to {stop}, found its end at "
                        f"{os.fstat(self.fd).st_size}; the file is cut off"
                    )
                target = target[count:]
                offset_bytes += count


@contextlib.contextmanager
def open_file(root: Path, key: str) -> Iterator[FileReader]:
    """Opens an object for ranged reads; closes it on leaving."""
    path = object_path(root, key)
    with contextlib.ExitStack() as stack:
        with translated("open", path), path_not_under_object():
            file = stack.enter_context(open(path, "rb", buffering=0, opener=_open))
        yield FileReader(path, file.fileno())
