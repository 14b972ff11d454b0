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
from holdfast.format.buffers import Buffer
from holdfast.store.file_system import LOCAL
from holdfast.store.free_names import UNFINISHED, take_name


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, readable by this user alone, that replaces the one at `path` at the end.

    Raises:
        OSError: it cannot be written; the file at `path` is as it was.
    """
    with _beside(path) as (unfinished, file):
        yield file
        file.close()
        os.rename(unfinished, path)


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
    with _beside(path) as (unfinished, file):
        file.write(data)
        sync(file)
        file.close()
        take_name(LOCAL, unfinished, path, clock)


def sync(file: BinaryIO) -> None:
    """Make what was written to a file durable."""
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new file beside `path`, and its path; it is removed unless it is renamed."""
    # Random, since writers on several hosts may have one process id.
    unfinished = path.with_name(f".{path.name[:100]}.{os.urandom(4).hex()}{UNFINISHED}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(unfinished, flags, 0o600), "wb") as file:
        try:
            yield unfinished, file
        finally:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
