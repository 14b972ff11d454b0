"""Temporary folders of `holdfast run`: its trainers' reports, and files of its standby process.

Invariants:
- A `holdfast run` holds the lock in its folder while it lives. SIGKILL releases the lock and leaves
  the folder, so one without a holder is nobody's. The next one to make a folder removes it.
- A folder is removed only under its lock.

Trainers that outlive their supervisor find no folder, and report nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.local_agent.place import is_locked, locked_place, remove_place

PREFIX = "holdfast-supervisor-"


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Yield a folder for this process."""
    for folder in abandoned_folders():
        with contextlib.suppress(OSError):
            remove_place(folder)
    with contextlib.ExitStack() as held:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            if held.enter_context(locked_place(folder))():
                break
            # Race: another `holdfast run` has taken it for an abandoned one.
            shutil.rmtree(folder, ignore_errors=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def abandoned_folders() -> Iterator[Path]:
    """Yield the folders that killed `holdfast run` of this user have left."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and not is_locked(folder):
                yield folder
