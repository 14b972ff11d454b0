"""Release what a forked child inherits from a manager, before the child runs any other code.

A lock on a slot (`flock`) belongs to the open file description, which the child shares: the slot
stays locked until the child has closed it too. Python's mappings hold descriptors that Python code
cannot reach, so /proc lists what is open and what is mapped.

Invariants: the child unlocks nothing that the parent still holds, and acquires no lock of the
parent's threads, which do not exist in the child and would never release it.

See docs/decisions/0022.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_MAP_FIXED = 0x10  # From Linux's <asm-generic/mman-common.h>; Python's mmap does not define it.


def release_inherited(folder: Path, sockets: Collection[int]) -> None:
    """Release, in a forked child, the inherited files of the agent's `folder`, and `sockets`.

    A descriptor is replaced by one of /dev/null, and memory mapped for writing by empty pages, so
    that the Python object that owns it can still close it. Memory mapped for reading stays, because
    restored arrays may use it.
    """
    null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in [*_open_files(folder), *filter(_is_socket, sockets)]:
            os.dup2(null_fd, fd, inheritable=False)
    finally:
        os.close(null_fd)
    for start, size_bytes in list(_written_mappings(folder)):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(start, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)


def _open_files(folder: Path) -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if _is_below(os.readlink(f"/proc/self/fd/{name}"), folder):
                yield int(name)


def _written_mappings(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield start and size in bytes of each writable shared mapping of a file in `folder`."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[1].startswith("rw-s") and _is_below(fields[5], folder):
                start, stop = (int(number, 16) for number in fields[0].split("-"))
                yield start, stop - start


def _is_below(path: str, folder: Path) -> bool:
    return path.startswith(f"{folder}/")


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
