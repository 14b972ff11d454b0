"""The memory that this process may still use: the limits of its cgroup and of those above.

Pages on a tmpfs are charged to the cgroup of the process that first touched them. Beyond the limit
the kernel kills a process, possibly the training. So the limit is checked before memory for the RAM
tier is reserved: `posix_fallocate` does not fail at it.

Both versions of cgroups are supported: https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)
_NO_LIMIT = 1 << 60
TRAINING_SHARE = 10
"""A tenth (1 / TRAINING_SHARE) of a limit is left to the training."""


def memory_left_bytes() -> int | None:
    """Return how many bytes may be reserved; None if no limit applies or is known."""
    rooms = [room for folder in _folders() for room in _rooms(folder)]
    return min(rooms, default=None)


def _folders() -> Iterator[Path]:
    """Yield the folders of this process's memory cgroups, and of those above them."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or not controllers:
            mount = _V1 if controllers else _V2
            # In a container the path may be the host's; the container's own limit is at the mount.
            own = mount / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _rooms(folder: Path) -> Iterator[int]:
    for limit_name, usage_name, cache_names in _FILES:
        limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
        if limit.isdecimal() and usage.isdecimal() and int(limit) < _NO_LIMIT:
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            # The kernel reclaims pages of files before it kills a process.
            cache = sum(int(stat.get(name, 0)) for name in cache_names)
            yield int(limit) - int(limit) // TRAINING_SHARE - int(usage) + cache


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
