"""Properties of mounted file systems, as the kernel reports them."""

from __future__ import annotations

import os
from pathlib import Path

_WITH_LASTING_INODES = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"),
        *("tmpfs", "ramfs", "overlay"),
        *("nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "gfs2", "ocfs2"),
    )
)


def file_system_type(path: Path) -> str:
    """Return the type of the file system that holds `path`, such as `ext4`; empty if unknown."""
    import psutil

    real = Path(os.path.realpath(path))
    file_system, depth = "", -1
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        # Of several mounts at one point, the last one hides the others.
        if real.is_relative_to(point) and len(point.parts) >= depth:
            file_system, depth = mount.fstype, len(point.parts)
    return file_system


def has_lasting_inodes(path: Path) -> bool:
    """Return whether a directory there has the same inode number each time it is mounted.

    FUSE, CIFS and FAT number inodes on access; unknown types are assumed to do so as well.
    """
    return file_system_type(path) in _WITH_LASTING_INODES
