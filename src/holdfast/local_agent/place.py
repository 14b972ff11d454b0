"""The place of an agent on this host: its folder, the lock that makes it the agent, its socket.

The folder belongs to the user alone: mode 0700, owned by the user, no symbolic link. It is on the
RAM tier's root, `HOLDFAST_RAM` or `/dev/shm/holdfast-UID`. If that root has no room for the few
pages of the agent's own files, the folder is in the system's folder for temporary files.

A root that exists keeps its mode, since other programs may use it too (`/dev/shm` itself). It
belongs to the user, or to root with the sticky bit, so that no other user can replace a folder.

The agent holds the lock for its whole life, so there is never a second one in a folder. An agent
that exits removes its folder, so that a lock on a removed file excludes no other agent. It also
holds a shared lock on the folder itself: systemd-tmpfiles, which removes files by their age, skips
a folder that is locked (tmpfiles.d(5)).

What agents keep in their folders is RAM: `memory_left_bytes` returns how much may be reserved,
`is_file_locked` whether a process uses a file, and `replace_file` writes one that is whole whenever
the agent dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import socket
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast import launchers
from holdfast.environment import HOST_VARIABLE, RAM_VARIABLE
from holdfast.errors import StorageError
from holdfast.store.files.file_lock import is_file_locked as is_file_locked
from holdfast.store.files.memory_limit import memory_left_bytes as memory_left_bytes
from holdfast.store.files.whole_file import replace_file as replace_file

LOCK = "agent.lock"
SOCKET = "agent.sock"

_CREDENTIALS = struct.Struct("3i")


def host_name() -> str:
    """Return this host's identity: `HOLDFAST_HOST`, or else the machine's name.

    A launcher's own name of the host is used where it is another one, as for several nodes on one
    machine, or in a container that it has started. The machine's may also have a domain.
    """
    chosen = os.environ.get(HOST_VARIABLE)
    if chosen:
        return chosen
    machine, launched = socket.gethostname(), launchers.launched().host
    is_same = machine.partition(".")[0] == launched.partition(".")[0]
    return machine if is_same or not launched else launched


def roots() -> list[Path]:
    """Return the folders that may hold agents' folders, the preferred one first.

    On a read-only root there may be no folder for temporary files; then there is one fewer.
    """
    own = f"holdfast-{os.geteuid()}"
    chosen = os.environ.get(RAM_VARIABLE)
    # The agent runs in another working directory.
    ram = Path(os.path.abspath(chosen)) if chosen else Path("/dev/shm") / own
    with contextlib.suppress(FileNotFoundError):
        return [ram, Path(tempfile.gettempdir()) / own]
    return [ram]


def safe_name(host: str) -> str:
    """Return a name of a folder for a host, which no other host has."""
    safe_host = re.sub(r"[^A-Za-z0-9_-]", "_", host)[:40]
    if safe_host != host:
        # Two hosts whose names differ in the rest alone have different folders.
        safe_host += f"-{zlib.crc32(host.encode(errors='surrogatepass')):08x}"
    return safe_host


def make_root(root: Path) -> None:
    """Create the root of agents' folders and its missing parents, for the user alone.

    Raises:
        StorageError: it belongs to another user, or is a symbolic link.
        OSError: it cannot be created.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = root.lstat()
    if not (stat.S_ISDIR(state.st_mode) and state.st_uid == 0 and state.st_mode & stat.S_ISVTX):
        check_private(root)


def make_private(folder: Path) -> None:
    """Create `folder` in its parent, which exists, and restrict it to the user.

    Raises:
        StorageError: it belongs to another user, or is a symbolic link.
        OSError: it cannot be created.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    folder.chmod(0o700)


def check_private(folder: Path) -> None:
    """Check that `folder` belongs to the user.

    Raises:
        StorageError: it belongs to another user, or is a symbolic link.
        OSError: it does not exist.
    """
    # Not `stat`: a symbolic link could lead to a folder that another user controls.
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        raise StorageError(
            f"use {folder}: expected a folder of user {os.geteuid()}, found one of user "
            f"{state.st_uid}; remove it or set {RAM_VARIABLE}"
        )


def socket_address(folder_fd: int) -> str:
    """Return an address of the socket in an open folder.

    It is short enough for a Unix socket, whatever the length of the folder's path.
    """
    return f"/proc/self/fd/{folder_fd}/{SOCKET}"


def peer(connected: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at a Unix socket's other end, as the kernel reports it."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the folder as its agent: one that starts, answers or exits."""
    # An agent that starts at this very moment finds the lock taken and exits; it is started again.
    return is_file_locked(folder / LOCK)


@contextlib.contextmanager
def locked_place(folder: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function: whether this process has the lock, and its file is still the folder's."""
    with contextlib.ExitStack() as opened:
        try:
            check_private(folder)
            flags = os.O_NOFOLLOW | os.O_CLOEXEC
            folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | flags)
            opened.callback(os.close, folder_fd)
            fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | flags, 0o600, dir_fd=folder_fd)
            opened.callback(os.close, fd)
        except FileNotFoundError:
            # The process that started this agent made the folder; another agent has removed it.
            yield lambda: False
            return
        yield functools.partial(_try_lock, fd, folder_fd, folder / LOCK)


def remove_place(folder: Path) -> None:
    """Remove a folder in which no process is, under its lock, so that none starts in it.

    Raises:
        OSError: A process is in it, or something of it could not be removed.
    """
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(fd)


def _try_lock(fd: int, folder_fd: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        # A cleaner holds the folder's lock while it looks through the folder.
        fcntl.flock(folder_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        # Succeeds again where this process already holds the lock.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except (BlockingIOError, FileNotFoundError, NotADirectoryError):
        return False
