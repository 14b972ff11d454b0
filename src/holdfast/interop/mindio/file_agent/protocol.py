"""Define the calls of the file agent and the records that it has in RAM.

Each call ends within moments; what takes longer is asked for again.
"""

from __future__ import annotations

import msgspec

LOG = "log"
"""The agent's log, in its folder."""


class FileAgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's own folder, on its command line."""

    folder: str


class Done(msgspec.Struct, frozen=True):
    """A call that has no other answer took effect."""


class FilesAsked(msgspec.Struct, frozen=True):
    """A call without arguments."""


class Configure(msgspec.Struct, frozen=True, kw_only=True):
    """Change settings; None leaves one as it is."""

    capacity_bytes: int | None = None
    thread_count: int | None = None
    linger_secs: float | None = None


class Reserve(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for memory of at least `size_bytes`: of a new file, or more for the one named."""

    size_bytes: int
    name: str | None = None


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """The name of the file in the folder of data, and the size that it has."""

    name: str
    size_bytes: int


class Abandon(msgspec.Struct, frozen=True, kw_only=True):
    """Give up a file that is not sealed, or whose bytes in RAM are damaged."""

    name: str


class WrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file at a path, as `stat` showed it: another one at the path differs."""

    path: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


class FileTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One path that a file is to have.

    Attributes:
        path: absolute, without symbolic links.
        marker: an empty file in the same folder, which the trainer has made: it has the owner and
            the mode that the file will have. The bytes are written into it, and it is renamed.
        before: the file that was at the path before the marker was made, if any.
    """

    path: str
    marker: str
    before: WrittenFile | None = None


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """A file is whole: `digest` is that of its `size_bytes`. Repeating the call is harmless."""

    name: str
    size_bytes: int
    digest: str
    targets: list[FileTarget]


class FilesAt(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the files of these paths."""

    paths: list[str]


class FoundFile(msgspec.Struct, frozen=True, kw_only=True):
    """What RAM has of a path; without a name it has nothing of it."""

    name: str | None = None
    size_bytes: int = 0
    digest: str = ""
    is_pending: bool = False


class PreloadState(msgspec.Struct, frozen=True, kw_only=True):
    """The paths whose files are still being read, and the reasons why others are not in RAM."""

    pending: list[str]
    failed: dict[str, str]


class PendingFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is not at all of its paths yet; `error` is that of the last attempt."""

    name: str
    paths: list[str]
    attempts: int
    error: str


class WriteState(msgspec.Struct, frozen=True, kw_only=True):
    """What is not written yet, and what will not be: `lost` are the last of those."""

    pending: list[PendingFile]
    lost: list[PendingFile]
    written_bytes: int


class FileAgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's process and its memory.

    `user_count` is the number of connections besides the one that asks. The agent ends
    `linger_secs` after the last of them.
    """

    pid: int
    capacity_bytes: int
    used_bytes: int
    file_count: int
    pending_count: int
    user_count: int
    linger_secs: float


class RamFileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed file. Of two that name one path the one with the higher `number` is newer."""

    number: int
    name: str
    size_bytes: int
    digest: str
    pending: list[FileTarget]
    written: list[WrittenFile]
