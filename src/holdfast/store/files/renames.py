"""Renames of whole directories: to a name that must be free, and an exchange of two.

Linux does both in one step (`renameat2`), on local file systems. Elsewhere (NFS, FUSE) there is a
fallback that is not atomic against other writers, as each function describes.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
# The file system, the kernel or the C library does not have the call.
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)


def rename_to_new(source: Path, target: Path) -> None:
    """Rename `source` to `target`, which must not exist.

    In the fallback an empty directory that another process makes meanwhile is replaced.

    Raises:
        FileExistsError: `target` exists.
        OSError: it cannot be renamed.
    """
    if _renamed(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories, which are siblings.

    In the fallback there is a moment when `other` does not exist: its former content is then at
    `one` with `.old` added, and stays there where this process is killed.

    Raises:
        OSError: it cannot be done; both are where they were.
    """
    if _renamed(one, other, _EXCHANGE):
        return
    aside = one.with_name(one.name + ".old")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)


def _renamed(source: Path, target: Path, flag: int) -> bool:
    """Call renameat2; return False where it is not supported.

    Raises:
        OSError: it failed for another reason.
    """
    # Imported here, so that an agent starts without it.
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(target))
