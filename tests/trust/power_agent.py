"""An agent whose stores do not sync: the control of the power cuts. It does its work otherwise.

Arguments: what is not synced (`files`, `folders` or `everything`), and the agent's config as JSON.
"""

from __future__ import annotations

import os
import stat
import sys

from holdfast.host import process
from holdfast.store.files.file_system import LocalFileSystem


class NotSynced(LocalFileSystem):
    """The system's own calls, but for some syncs that do nothing."""

    def __init__(self, what: str) -> None:
        self._what = what

    def sync(self, fd: int) -> None:
        kind = "folders" if stat.S_ISDIR(os.fstat(fd).st_mode) else "files"
        if self._what not in (kind, "everything"):
            super().sync(fd)


if __name__ == "__main__":
    sys.exit(process.main(sys.argv[2], lambda code: None, NotSynced(sys.argv[1])))
