"""Write a file that the user has named: a report, a picture, an exported checkpoint.

Invariants:
- A reader of a regular file sees the old content or the new one, and never half of it.
- What is no regular file (a device, a pipe, a terminal) is written into and never replaced.
- A symbolic link stays; the file that it leads to is replaced.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.store.files.whole_file import replacing, sync

NEW_FILE_MODE = 0o644


def check_file_name(path: Path | str, what: str) -> None:
    """Check that a file may be written at `path`, before the work that makes its content.

    Args:
        path: The path, as the user gave it; `Path("")` counts as no name.
        what: The operation, for errors: `write the report`.

    Raises:
        InvalidArgumentError: There is no name, or it is a directory or in none.
    """
    text = str(path)
    if text in ("", ".", "-"):
        name = "no name" if text == "" else repr(text)
        raise InvalidArgumentError(
            f"{what}: expected the name of a file, found {name}; for the output of this command "
            "give /dev/stdout"
        )
    if os.path.isdir(path):
        raise InvalidArgumentError(f"{what} to {path}: it is a directory; name a file in it")
    folder = Path(os.path.realpath(path)).parent
    if not os.path.lexists(path) and not folder.is_dir():
        raise InvalidArgumentError(
            f"{what} to {path}: there is no directory {folder}; make it first"
        )


@contextmanager
def new_content(path: Path, what: str, *, is_synced: bool = False) -> Iterator[BinaryIO]:
    """Yield a file for the new content of `path`, which a regular file gets when the block ends.

    Args:
        path: The path, as the user gave it.
        what: The operation, for errors.
        is_synced: Whether the content is durable at the end.

    Raises:
        InvalidArgumentError: As `check_file_name`.
        StorageError: It cannot be written. A regular file is as it was.
    """
    check_file_name(path, what)
    try:
        with _into_place(path) if _is_replaceable(path) else _into_target(path) as file:
            yield file
            file.flush()
            if is_synced and file.seekable():
                sync(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{what} to {path}: {reason}") from error


def _is_replaceable(path: Path) -> bool:
    """Return whether there is nothing at `path`, or a regular file that is not our own output."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and not _is_output(status)


def _is_output(found: os.stat_result) -> bool:
    try:
        return os.path.samestat(found, os.fstat(1))
    except OSError:
        return False


@contextmanager
def _into_place(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of the regular file at `path`."""
    target = Path(os.path.realpath(path))
    with replacing(target) as file:
        mode = target.stat().st_mode & 0o777 if target.exists() else NEW_FILE_MODE
        os.fchmod(file.fileno(), mode)
        yield file


@contextmanager
def _into_target(path: Path) -> Iterator[BinaryIO]:
    """Yield what is at `path`, for writing; the descriptor of the output, if it is that one."""
    if _is_output(os.stat(path)):
        # Opened again it would have a position of its own, and a socket cannot be opened.
        sys.stdout.flush()
        fd = os.dup(1)
    else:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(fd, "wb") as file:
        yield file
