"""Memory limits of the kernel's, version 1 or 2, for processes that a test starts."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
SWAP = "memory.swappiness", "memory.swap.max"
"""The files, of version 1 and 2, by which a cgroup uses no swap."""


@dataclass(frozen=True)
class MemoryGroup:
    """One cgroup; `limit` is the name of its limit's file."""

    folder: Path
    limit: str

    def set_limit(self, size_bytes: int) -> None:
        (self.folder / self.limit).write_text(str(size_bytes))

    def add(self, pid: int) -> None:
        """Moves a process in; what it starts from then on is in it as well."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def usage_bytes(self) -> int:
        name = "memory.usage_in_bytes" if self.folder.parent == V1 else "memory.current"
        return int((self.folder / name).read_text())

    def kills(self) -> int:
        """How many processes the kernel has killed for this limit."""
        name = "memory.oom_control" if self.folder.parent == V1 else "memory.events"
        for line in (self.folder / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0


@contextlib.contextmanager
def memory_cgroup() -> Iterator[MemoryGroup]:
    """A cgroup of the test's own, or a skipped test where none can be made."""
    name = f"holdfast-test-{secrets.token_hex(8)}"
    if (V1 / "memory.limit_in_bytes").exists():
        made = MemoryGroup(V1 / name, "memory.limit_in_bytes")
    elif "memory" in _read(V2 / "cgroup.subtree_control").split():
        made = MemoryGroup(V2 / name, "memory.max")
    else:
        pytest.skip("no memory cgroups here")
    try:
        made.folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        # A machine with swap would page out what is above the limit, and kill nothing.
        for name in SWAP:
            if (made.folder / name).exists():
                (made.folder / name).write_text("0")
        yield made
    finally:
        # What is still in it goes on without a limit; the last one may be on its way out.
        for pid in (made.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (made.folder.parent / "cgroup.procs").write_text(pid)
        for _ in range(500):
            try:
                made.folder.rmdir()
                break
            except OSError:
                time.sleep(0.01)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
