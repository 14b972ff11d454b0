"""Record the events of a run as JSON lines in its `events/` folder, one file per host and attempt.

Writing never delays the agent, and a full disk loses event lines and nothing else. No link is
followed: a user with write access to the run's folder must not choose which other files the agent
writes to.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from holdfast.clock import Clock
from holdfast.errors import StorageError
from holdfast.format.names import EVENTS, CheckpointId
from holdfast.store.run_directory import RunDirectory

log = logging.getLogger(__name__)


def open_event_file(run: Path, name: str) -> int:
    """Return a descriptor that appends to the file `name` in the run's `events/`.

    The folder and the file are created if missing.

    Raises:
        OSError: one of them is a symbolic link or no plain file, or takes no bytes.
    """
    folder = run / EVENTS
    folder.mkdir(exist_ok=True)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder_fd = os.open(folder, flags)
    try:
        # Non-blocking: opening a pipe of that name would wait for a reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(name, flags | os.O_CLOEXEC, 0o666, dir_fd=folder_fd)
    finally:
        os.close(folder_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file", str(folder / name))
    return fd


class EventWriter:
    """Appends events to the file of `attempt`, as set when the event is written."""

    def __init__(self, run: RunDirectory, host: str, clock: Clock) -> None:
        self._run = run
        self._host = host
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, "holdfast-events")
        self._has_failed = False
        self.attempt = 0

    def write(self, event: str, checkpoint: CheckpointId | None = None, **data: Any) -> None:
        """Queue one line: the time, the event, its checkpoint, and `data`."""
        line: dict[str, Any] = {"time": self._clock.now(), "event": event, "host": self._host}
        if checkpoint is not None:
            line |= {"step": checkpoint.step, "attempt": checkpoint.attempt}
        line |= data
        log.info("%s %s", event, {k: v for k, v in line.items() if k not in ("time", "event")})
        name = f"{self.attempt:09d}-{self._host}.jsonl"
        self._pool.submit(self._append, name, msgspec.json.encode(line) + b"\n")

    def _append(self, name: str, line: bytes) -> None:
        # A failure is logged once until a write succeeds: storage may fail for hours.
        try:
            with open(open_event_file(self._run.current(), name), "ab") as file:
                file.write(line)
            self._has_failed = False
        except (OSError, StorageError) as error:
            if not self._has_failed:
                log.warning("events: cannot write to %s in %s: %s", name, self._run.path, error)
            self._has_failed = True

    def close(self) -> None:
        """Write the queued lines, and end the thread."""
        self._pool.shutdown()
