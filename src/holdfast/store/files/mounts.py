"""Properties of mounted file systems, as the kernel reports them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")
"""A space, tab, newline or backslash in the name of a mount."""
_WITH_LASTING_INODES = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"),
        *("tmpfs", "ramfs", "overlay"),
        *("nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "gfs2", "ocfs2"),
    )
)


MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mount: its file system, by type and device, and which directory of it is mounted."""

    type: str
    device: str
    root: str


def file_system_type(path: Path) -> str:
    """Return the type of the file system that holds `path`, such as `ext4`; empty if unknown."""
    mount = _mount_of(path, "self")
    return mount.type if mount is not None else ""


def is_hidden_from_first_process(path: Path) -> bool:
    """Return whether the first process of this PID namespace has another file system at `path`.

    Such a mount is in a mount namespace of its own, and is gone once that has no more processes.
    False if the first process cannot be asked.
    """
    own, first = _mount_of(path, "self"), _mount_of(path, "1")
    return None not in (own, first) and own != first


def _mount_of(path: Path, process: str) -> _Mount | None:
    """Return the mount that holds `path` for a process; None if it cannot be read."""
    try:
        text = Path(f"/proc/{process}/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    real = Path(os.path.realpath(path))
    mount, depth = None, -1
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        _, _, device, root, name, *_ = fields.split(" ")
        point = Path(_OCTAL.sub(lambda code: chr(int(code[1], 8)), name))
        # Of several mounts at one point, the last one hides the others.
        if real.is_relative_to(point) and len(point.parts) >= depth:
            mount, depth = _Mount(rest.split(" ")[0], device, root), len(point.parts)
    return mount


def has_lasting_inodes(path: Path) -> bool:
    """Return whether a directory there has the same inode number each time it is mounted.

    FUSE, CIFS and FAT number inodes on access; unknown types are assumed to do so as well.
    """
    return file_system_type(path) in _WITH_LASTING_INODES
