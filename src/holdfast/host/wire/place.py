"""The place of an agent: the lock on its folder, held for the process's whole life.

There is never a second agent in a folder. An agent that exits removes its folder, so that a lock on
a removed file excludes no other agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.host.wire.agent_directory import LOCK, check_private


@contextlib.contextmanager
def locked_place(folder: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function: whether this process has the lock, and its file is still the folder's."""
    try:
        check_private(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(folder / LOCK, flags, 0o600)
    except FileNotFoundError:
        # The process that started this agent made the folder; another agent has removed it since.
        yield lambda: False
        return
    try:
        yield functools.partial(_try_lock, fd, folder / LOCK)
    finally:
        os.close(fd)


def _try_lock(fd: int, path: Path) -> bool:
    try:
        # Succeeds again where this process already holds the lock.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except (BlockingIOError, FileNotFoundError, NotADirectoryError):
        return False
