"""Look whether a process holds the lock of a file; the kernel frees it when the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def is_file_locked(path: Path, *, is_shared: bool = True) -> bool:
    """Return whether a process holds the lock of the file at `path`; False without a file.

    The lock is taken for a moment, so a process that tries to take it just then does not get it.

    Args:
        path: The file.
        is_shared: Whether holders of a shared lock, such as readers, do not count.

    Raises:
        OSError: The file cannot be opened for another reason.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
