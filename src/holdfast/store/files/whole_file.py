"""Write a file whole: a reader sees the old content or the new one, never half of it.

The content is written beside the path, and then takes that name: in place of a file that has it,
or only if it is free. A process that is killed meanwhile leaves a hidden file beside it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from holdfast.clock import Clock
from holdfast.format.digests import Buffer
from holdfast.store.files.file_system import LOCAL, FileSystem
from holdfast.store.files.free_names import UNFINISHED, take_name

NAME_LENGTH_MAX = 180
"""How much of a file's name is in that of its unfinished file, which has at most 255 bytes."""


@contextlib.contextmanager
def beside(path: Path, token: str, files: FileSystem = LOCAL) -> Iterator[Path]:
    """Yield a hidden name beside `path` for its unfinished file; remove that file at the end.

    Args:
        path: The name that the file will have.
        token: What no other writer has; it may be on another host and have the same process id.
        files: Removes the file.
    """
    unfinished = path.with_name(f".{path.name[:NAME_LENGTH_MAX]}.{token}{UNFINISHED}")
    try:
        yield unfinished
    finally:
        with contextlib.suppress(FileNotFoundError):
            files.unlink(unfinished)


@contextlib.contextmanager
def renamed(path: Path, token: str, files: FileSystem = LOCAL) -> Iterator[Path]:
    """Yield the name for the unfinished file, which the caller makes; rename it on success."""
    with beside(path, token, files) as unfinished:
        yield unfinished
        files.rename(unfinished, path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, readable by this user alone, that replaces the one at `path` at the end.

    Raises:
        OSError: it cannot be written; the file at `path` is as it was.
    """
    with renamed(path, _new_token()) as unfinished, _new_file(unfinished) as file:
        yield file


def replace_file(path: Path, data: Buffer) -> None:
    """Give the file at `path` this content, or create it, readable by this user alone.

    Raises:
        OSError: it cannot be written; the file at `path` is as it was.
    """
    with replacing(path) as file:
        file.write(data)


def create_file(path: Path, data: bytes, clock: Clock) -> None:
    """Create the file at `path` with this content, durable, readable by this user alone.

    Raises:
        FileExistsError: it exists, or another process has created it first.
        OSError: it cannot be written.
    """
    with beside(path, _new_token()) as unfinished:
        with _new_file(unfinished) as file:
            file.write(data)
            sync(file)
        take_name(LOCAL, unfinished, path, clock)


def sync(file: BinaryIO) -> None:
    """Make what was written to a file durable."""
    file.flush()
    os.fsync(file.fileno())


def _new_token() -> str:
    return os.urandom(4).hex()


def _new_file(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "wb")
