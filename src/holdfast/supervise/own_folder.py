"""Temporary folders of commands: a supervisor's reports and standby files, and a proof's runs.

Invariants:
- A command holds the lock in its folder while it lives. SIGKILL releases the lock and leaves the
  folder, so one without a holder is nobody's. The next `holdfast run` removes those of its kind;
  those of proofs, in which a program may still train, stay until `holdfast clean`.
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

OF_SUPERVISOR = "holdfast-supervisor-"
OF_PROOF = "holdfast-proof-"


@contextlib.contextmanager
def own_folder(prefix: str = OF_SUPERVISOR) -> Iterator[Path]:
    """Yield a folder for this process, whose name begins with `prefix`."""
    for folder in abandoned_folders(OF_SUPERVISOR):
        with contextlib.suppress(OSError):
            remove_place(folder)
    with contextlib.ExitStack() as held:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=prefix))
            if held.enter_context(locked_place(folder))():
                break
            # Race: another `holdfast run` has taken it for an abandoned one.
            shutil.rmtree(folder, ignore_errors=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def abandoned_folders(prefix: str) -> Iterator[Path]:
    """Yield the folders of that kind that killed commands of this user have left."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*")):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and not is_locked(folder):
                yield folder
