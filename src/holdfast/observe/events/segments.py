"""Name the files of a run's events, and open them safely.

Each host has two series of numbered segments in the run's `events/` folder: `run` and `saves`. A
segment that is full is never written again. No link is followed: a user with write access to the
run's folder must not choose which other files are written or read.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.store.location import RunLocation

SEGMENT_SIZE_BYTES = 4 * 1024 * 1024
"""The size at which the next segment is begun."""
SEGMENT_COUNT_MAX = 8
"""How many segments of each series a host keeps."""
RUN, SAVES = "run", "saves"

_NAME = re.compile(r"(?P<host>.+)-(?P<series>run|saves)\.(?P<number>[0-9]{9})\.jsonl")


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One segment of a host's series; numbers begin at 1."""

    host: str
    series: str
    number: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.host}-{self.series}.{self.number:09d}.jsonl"


def list_segments(folder_fd: int) -> list[Segment]:
    """Return the segments in a folder of events, by host, series and number."""
    names = map(parse_segment_name, os.listdir(folder_fd))
    return sorted(segment for segment in names if segment is not None)


def parse_segment_name(name: str) -> Segment | None:
    """Return the segment of a file's name, or None for another name."""
    match = _NAME.fullmatch(name)
    return Segment(match["host"], match["series"], int(match["number"])) if match else None


@contextmanager
def open_folder(run: Path) -> Iterator[int]:
    """Open the run's `events/` folder.

    Raises:
        OSError: there is none, or it is a symbolic link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder_fd = os.open(RunLocation(run).events, flags)
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


def open_plain(folder_fd: int, name: str, flags: int) -> int:
    """Open a plain file in a folder.

    Raises:
        OSError: it is a symbolic link or no plain file, or cannot be opened.
    """
    # Non-blocking: opening a pipe of that name would wait for its other end.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, 0o666, dir_fd=folder_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file", name)
    return fd


def open_event_file(run: Path, name: str) -> int:
    """Return a descriptor that appends to the file `name` in the run's `events/`.

    The folder and the file are created if missing.

    Raises:
        OSError: one of them is a symbolic link or no plain file, or takes no bytes.
    """
    RunLocation(run).events.mkdir(exist_ok=True)
    with open_folder(run) as folder_fd:
        return open_plain(folder_fd, name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
