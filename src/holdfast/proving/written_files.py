"""Find the files in the working directory that change while a program runs, besides its runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.format.names import ATTEMPTS, CHECKPOINTS, EVENTS, LEASES, REMOTE_FILE, RUN_FILE

FILES_MAX = 20_000
"""How many files are looked at."""
OF_RUN = frozenset({RUN_FILE, REMOTE_FILE, ATTEMPTS, CHECKPOINTS, EVENTS, LEASES})
"""The names in a run's directory that are Holdfast's."""


def files_below(root: Path) -> Mapping[str, tuple[int, int]]:
    """Return the files below the working directory, with times and sizes.

    Without `root`; without the files of runs, since those that the program opens are in `root`;
    without those to which this process's own output goes; and without other file systems, such as
    /proc.
    """
    files: dict[str, tuple[int, int]] = {}
    device = os.stat(".").st_dev
    outputs = _outputs()
    for folder, folders, names in os.walk("."):
        if Path(folder).absolute() == root:
            folders.clear()
            continue
        of_run = OF_RUN if RUN_FILE in names else frozenset[str]()
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__pycache__"))
            and name not in of_run
            and _is_on(device, os.path.join(folder, name))
        ]
        for name in names:
            path = os.path.join(folder, name)
            try:
                state = os.lstat(path)
            except OSError:
                continue
            if name in of_run or (state.st_dev, state.st_ino) in outputs:
                continue
            files[os.path.relpath(path)] = state.st_mtime_ns, state.st_size
            if len(files) >= FILES_MAX:
                return files
    return files


def _is_on(device: int, path: str) -> bool:
    """Return whether a folder is on a device."""
    with contextlib.suppress(OSError):
        return os.lstat(path).st_dev == device
    return False


def _outputs() -> set[tuple[int, int]]:
    """Return the devices and inodes of standard output and standard error, where they are open."""
    outputs = set()
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            state = os.fstat(fd)
            outputs.add((state.st_dev, state.st_ino))
    return outputs


def changed(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
) -> tuple[str, ...]:
    """Return the files that are new, or have another time or size, in their order."""
    return tuple(sorted(name for name, state in after.items() if before.get(name) != state))
