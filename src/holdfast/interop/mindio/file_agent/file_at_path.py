"""Files at their paths: made beside them, durable before they have the name, replaced at once.

`NAME` is written as `.NAME.TIME.unfinished` in the same folder, synced and renamed. So a file with
its name is whole, whatever is killed meanwhile, and every reader of the folder, also on another
host, can see that a file is about to be replaced.

The unfinished file is the *marker* of a save: whoever removes it cancels the save, because it is
never made again. The names of markers order the saves to a path, whichever process writes them: a
new one is later than all that are there, and than the file at the path. A save that is durable at
the path removes the markers of earlier ones, and not before, so that one that fails or is killed
cancels none. Both steps exclude those of other saves in the folder on the same host: an earlier
save never replaces a later one there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from holdfast.clock import Clock
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.interop.mindio.file_agent.protocol import FileTarget, WrittenFile

SUFFIX = ".unfinished"
NAME_LENGTH_MAX = 180
TIME_LENGTH = 16
PIECE_SIZE_BYTES = 8 * 1024 * 1024
LOCK_SECS = 30.0
"""How long to wait for another save to the folder, which keeps the lock for moments."""
POLL_SECS = 0.002


class FileLostError(StorageError):
    """A file in RAM cannot be written: its folder was removed, or its bytes are damaged."""


class FileReplacedError(StorageError):
    """A file is not written, because a later save is at its path already."""


def check_place(path: Path) -> None:
    """Check that a file may be at `path`.

    Raises:
        InvalidArgumentError: `path` is a folder, or its folder is missing.
    """
    if path.is_dir():
        raise InvalidArgumentError(f"save to {path}: expected a path of a file, found a folder")
    if not path.parent.is_dir():
        raise InvalidArgumentError(
            f"save to {path}: expected the folder {path.parent}, found none; make it first"
        )


def make_marker(path: Path, clock: Clock) -> FileTarget:
    """Make the empty file that will become `path`, with this process's owner and umask.

    Raises:
        OSError: no file can be made there.
    """
    target, fd = _open_marker(path, clock)
    os.close(fd)
    return target


def _open_marker(path: Path, clock: Clock) -> tuple[FileTarget, int]:
    path = Path(os.path.realpath(path))
    # Looked at first: what replaces this file later differs from it.
    before = file_at(path)
    moment_ns = max(
        int(clock.now().timestamp() * 1_000_000) * 1_000,
        before.mtime_ns + 1 if before is not None else 0,
        *(_moment_ns(marker) + 1 for marker in _markers(path)),
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        time = f"{moment_ns:0{TIME_LENGTH}x}"
        marker = path.with_name(f".{path.name[:NAME_LENGTH_MAX]}.{time}{SUFFIX}")
        try:
            fd = os.open(marker, flags, 0o666)
        except FileExistsError:
            # Another thread or process saves to the path at the same time.
            moment_ns += 1
        else:
            return FileTarget(path=str(path), marker=str(marker), before=before), fd


def _markers(path: Path) -> list[str]:
    """Return the paths of the markers of all saves to `path`, also of interrupted ones."""
    beginning = path.name[:NAME_LENGTH_MAX]
    names = os.listdir(path.parent)
    return [
        str(path.with_name(name))
        for name in names
        if name.endswith(SUFFIX) and _marked(name) == beginning
    ]


def _moment_ns(marker: str) -> int:
    try:
        return int(marker.removesuffix(SUFFIX)[-TIME_LENGTH:], 16)
    except ValueError:
        # Not made here.
        return 0


def finished_files(folder: Path) -> int:
    """Count the files below `folder` that are whole and not about to be replaced."""
    count = 0
    for _, _, names in os.walk(folder):
        markers = {_marked(name) for name in names if name.endswith(SUFFIX)}
        count += sum(
            not name.endswith(SUFFIX) and name[:NAME_LENGTH_MAX] not in markers for name in names
        )
    return count


def _marked(marker: str) -> str:
    """Return the beginning of the name of the file that a marker will become."""
    return marker.removeprefix(".").removesuffix(SUFFIX)[: -TIME_LENGTH - 1]


@contextlib.contextmanager
def _replacing(target: FileTarget, fd: int, clock: Clock) -> Iterator[None]:
    """Write to `fd`, which is the marker; on leaving, the file is durable at its path.

    After an error the marker is empty, and what was at the path before is still there.
    """
    is_whole = False
    try:
        yield
        os.fsync(fd)
        is_whole = True
    finally:
        if not is_whole:
            # The space may be what is missing.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
        os.close(fd)
    with _cancellable(target):
        _put_at_path(target, clock)


def _put_at_path(target: FileTarget, clock: Clock) -> None:
    """Give the marker its path, and cancel the earlier saves once that is durable."""
    path = Path(target.path)
    with _locked(path.parent, clock):
        earlier = [marker for marker in _markers(path) if marker < target.marker]
        os.rename(target.marker, path)
        sync_folder(path.parent)
        for marker in earlier:
            Path(marker).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path, clock: Clock) -> Iterator[None]:
    """Exclude other threads and processes of this host from the same with the folder.

    Raises:
        StorageError: another process keeps the lock.
        OSError: the folder's file system has no such lock.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = clock.monotonic() + LOCK_SECS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if clock.monotonic() > deadline:
                    raise StorageError(
                        f"write to {folder}: another process has had the folder locked (flock) for "
                        f"{LOCK_SECS:.0f} s; find it with `lslocks`, and continue or end it"
                    ) from error
            clock.sleep(POLL_SECS)
        try:
            yield
        finally:
            # A child that was forked meanwhile has the descriptor: closing here unlocks nothing.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


@contextlib.contextmanager
def new_file(path: Path, clock: Clock) -> Iterator[int]:
    """Yield a descriptor; on leaving without an error, the file is durable at `path`.

    Or a later save is, which has replaced this one meanwhile. Earlier saves to the path that are
    not there yet are cancelled.

    Raises:
        FileLostError: the marker was removed, or the folder.
        OSError: the storage failed.
    """
    target, fd = _open_marker(path, clock)
    try:
        with contextlib.suppress(FileReplacedError), _replacing(target, fd, clock):
            yield fd
    finally:
        Path(target.marker).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(
    data: Path, digest: str, target: FileTarget, progress: Callable[[int], None], clock: Clock
) -> WrittenFile:
    """Write the bytes of a file in RAM to its path, and check them on the way.

    Raises:
        FileReplacedError: a later save is at the path.
        FileLostError: no later attempt can succeed.
        OSError, StorageError: the storage failed; a later attempt may succeed.
    """
    with _cancellable(target):
        source = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A later save for the path makes this file one that may be recycled.
        fcntl.flock(source, fcntl.LOCK_SH)
        flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with _cancellable(target):
            fd = os.open(target.marker, flags)
        with _replacing(target, fd, clock):
            actual = copy_bytes(source, fd, progress)
            if actual != digest:
                raise FileLostError(
                    f"write {target.path}: expected bytes in RAM with digest {digest}, found "
                    f"{actual}: the memory was changed"
                )
            # Some file systems set the time with the last byte that arrives there.
            os.fsync(fd)
            state = os.fstat(fd)
    finally:
        os.close(source)
    return written_file(Path(target.path), state)


@contextlib.contextmanager
def _cancellable(target: FileTarget) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        text = f"write {target.path}: expected {error.filename}, found none"
        if is_replaced(target):
            raise FileReplacedError(f"{text}: a later save is at the path") from error
        raise FileLostError(f"{text}: it was removed, or its folder") from error


def is_replaced(target: FileTarget) -> bool:
    """Return whether a file is at the path that was not there when the save began."""
    present = file_at(Path(target.path))
    return present is not None and present != target.before


def file_at(path: Path) -> WrittenFile | None:
    """Return what identifies the file at a path; None if there is none."""
    try:
        return written_file(path, os.stat(path))
    except FileNotFoundError:
        return None


def written_file(path: Path, state: os.stat_result) -> WrittenFile:
    """Return what identifies a file."""
    return WrittenFile(
        path=str(path),
        device=state.st_dev,
        inode=state.st_ino,
        size_bytes=state.st_size,
        mtime_ns=state.st_mtime_ns,
    )


def copy_bytes(source: int, to: int, progress: Callable[[int], None] = lambda count: None) -> str:
    """Copy all bytes from one descriptor to another; return their digest, XXH3 of 128 bits."""
    buffer = memoryview(bytearray(PIECE_SIZE_BYTES))
    running = xxhash.xxh3_128()
    offset = 0
    while count := os.preadv(source, [buffer], offset):
        running.update(buffer[:count])
        done = 0
        while done < count:
            done += os.write(to, buffer[done:count])
        offset += count
        progress(count)
    return running.hexdigest()
