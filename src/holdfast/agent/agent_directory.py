"""Where the agent of a run lives on this host: its socket, its lock, its words, its RAM tier.

The folder is the user's alone (0700, owned by the user, no symbolic link). It lies on the RAM
tier's root, `HOLDFAST_RAM` or `/dev/shm/holdfast-UID`; where that has no room even for the few
pages of the agent's own files, in the system's folder for temporary files.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import tempfile
from pathlib import Path

from holdfast.errors import StorageError

HOST_VARIABLE = "HOLDFAST_HOST"
RAM_VARIABLE = "HOLDFAST_RAM"

LOCK = "agent.lock"
SOCKET = "agent.sock"
WORDS = "words"
GROUP = "group.json"
RAM = "ram"

_CREDENTIALS = struct.Struct("3i")


def host_name() -> str:
    """This host's identity: `HOLDFAST_HOST`, else the machine's name."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def roots() -> list[Path]:
    """The folders that may hold agents' folders, the preferred one first."""
    own = f"holdfast-{os.geteuid()}"
    chosen = os.environ.get(RAM_VARIABLE)
    ram = Path(chosen) if chosen else Path("/dev/shm") / own
    return [ram, Path(tempfile.gettempdir()) / own]


def agent_folders(run_id: str, host: str) -> list[Path]:
    """Where the agent of a run on `host` may live, the preferred place first."""
    safe_host = re.sub(r"[^A-Za-z0-9_-]", "_", host)[:40]
    return [root / f"{run_id}-{safe_host}" for root in roots()]


def ram_folder(folder: Path) -> Path:
    """The RAM tier's root within an agent's folder."""
    return folder / RAM


def make_private(folder: Path) -> None:
    """Makes `folder` and what is missing above it; it must be the user's alone.

    Raises:
        StorageError: it is somebody else's, or a symbolic link.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    folder.chmod(0o700)


def check_private(folder: Path) -> None:
    """Checks that `folder` is the user's.

    Raises:
        StorageError: it is somebody else's, or a symbolic link.
        OSError: it is not there.
    """
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        raise StorageError(
            f"use {folder}: expected a folder of user {os.geteuid()}, found one of user "
            f"{state.st_uid}; remove it or set {RAM_VARIABLE}"
        )


def socket_address(folder_fd: int) -> str:
    """An address for the socket in an open folder, short enough whatever the folder's path is."""
    return f"/proc/self/fd/{folder_fd}/{SOCKET}"


def peer(connected: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket, as the kernel vouches for it."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
