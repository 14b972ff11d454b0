"""Files at their paths: made beside them, durable before they have the name, replaced at once.

`NAME` is written as `.NAME.TIME.unfinished` in the same folder, synced and renamed. So a file with
its name is whole, whatever is killed meanwhile, and every reader of the folder, also on another
host, can see that a file is about to be replaced.

The unfinished file is the *marker* of a save: whoever removes it cancels the save, because it is
never made again. A save removes the markers of earlier ones for the same path, by their times. So
an older save cannot replace a newer one, whichever process writes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.file_agent.protocol import FileTarget, WrittenFile
from holdfast.format.digests import BLOCK_SIZE_BYTES, RunningDigest

SUFFIX = ".unfinished"
NAME_LENGTH_MAX = 180
TIME_LENGTH = 16


class FileLostError(StorageError):
    """A file in RAM cannot be written: its folder was removed, or its bytes are damaged."""


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
    path = Path(os.path.realpath(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    moment_ns = int(clock.now().timestamp() * 1_000_000) * 1_000
    while True:
        time = f"{moment_ns:0{TIME_LENGTH}x}"
        marker = path.with_name(f".{path.name[:NAME_LENGTH_MAX]}.{time}{SUFFIX}")
        try:
            os.close(os.open(marker, flags, 0o666))
        except FileExistsError:
            # Another thread or process saves to the path at the same time.
            moment_ns += 1
        else:
            return FileTarget(path=str(path), marker=str(marker))


def remove_earlier_markers(target: FileTarget) -> None:
    """Cancel earlier saves to a path, also those that were interrupted."""
    path = Path(target.path)
    for name in os.listdir(path.parent):
        if name.endswith(SUFFIX) and _marked(name) == path.name[:NAME_LENGTH_MAX]:
            other = path.with_name(name)
            if str(other) < target.marker:
                other.unlink(missing_ok=True)


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
def replacing(target: FileTarget) -> Iterator[int]:
    """Yield a descriptor of the marker; on leaving, the file is durable at its path.

    After an error the marker is empty, and what was at the path before is still there.
    """
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(target.marker, flags)
    is_whole = False
    try:
        yield fd
        os.fsync(fd)
        is_whole = True
    finally:
        if not is_whole:
            # The space may be what is missing.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
        os.close(fd)
    os.rename(target.marker, target.path)
    sync_folder(Path(target.path).parent)


@contextlib.contextmanager
def new_file(path: Path, clock: Clock) -> Iterator[int]:
    """Yield a descriptor; on leaving without an error, the file is durable at `path`.

    Earlier saves to the path that are not there yet are cancelled.

    Raises:
        FileLostError: a later save has cancelled this one, or the folder was removed.
        OSError: the storage failed.
    """
    target = make_marker(path, clock)
    try:
        with _cancellable(target), replacing(target) as fd:
            yield fd
            remove_earlier_markers(target)
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
    data: Path, digest: str, target: FileTarget, progress: Callable[[int], None]
) -> WrittenFile:
    """Write the bytes of a file in RAM to its path, and check them on the way.

    Raises:
        FileLostError: no later attempt can succeed.
        OSError: the storage failed; a later attempt may succeed.
    """
    with _cancellable(target):
        return _written(data, digest, target, progress)


@contextlib.contextmanager
def _cancellable(target: FileTarget) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FileLostError(
            f"write {target.path}: expected {error.filename}, found none: a later save to the path "
            "has cancelled this one, or the folder was removed"
        ) from error


def _written(
    data: Path, digest: str, target: FileTarget, progress: Callable[[int], None]
) -> WrittenFile:
    source = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A later save for the path makes this file one that may be recycled.
        fcntl.flock(source, fcntl.LOCK_SH)
        with replacing(target) as fd:
            found = copy_bytes(source, fd, progress)
            if found != digest:
                raise FileLostError(
                    f"write {target.path}: expected bytes in RAM with digest {digest}, found "
                    f"{found}: the memory was changed"
                )
            # Some file systems set the time with the last byte that arrives there.
            os.fsync(fd)
            state = os.fstat(fd)
    finally:
        os.close(source)
    return written_file(Path(target.path), state)


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
    """Copy all bytes from one descriptor to another; return their digest."""
    buffer = memoryview(bytearray(BLOCK_SIZE_BYTES))
    running = RunningDigest()
    offset = 0
    while count := os.preadv(source, [buffer], offset):
        running.update(buffer[:count])
        done = 0
        while done < count:
            done += os.write(to, buffer[done:count])
        offset += count
        progress(count)
    return running.hexdigest()
