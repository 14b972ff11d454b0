"""Write the agent's log in the run's folder from a thread, so that no disk delays the agent.

A disk that is full, or stalls for longer than the queue lasts, loses log lines and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import logging.handlers
import os
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from holdfast.errors import StorageError, translated
from holdfast.observe.events.segments import open_event_file, open_folder
from holdfast.store.location import RunLocation

QUEUE_LINES_MAX = 10_000
LAST_LINES_SECS = 5.0
LOG_SIZE_BYTES = 8 * 1024 * 1024
_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)


@contextlib.contextmanager
def logging_into(run: Path, host: str) -> Iterator[None]:
    """Log into `events/agent-HOST.log` of the run; on failing storage, to standard error.

    Raises:
        StorageError: the file must not be written to, for example because it is a symbolic link.
    """
    handler = BoundedHandler(run, RunLocation(run).agent_log(host).name)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    # Bounded: a full queue drops lines, since no thread of the agent may wait for a disk.
    lines: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE_LINES_MAX)
    listener = logging.handlers.QueueListener(lines, handler)
    logging.getLogger().addHandler(logging.handlers.QueueHandler(lines))
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # A lost line's own traceback has no reader.
    logging.raiseExceptions = False
    listener.start()
    try:
        yield
    finally:
        # A disk that hangs may block the last lines for ever, so the wait is bounded; both threads
        # end with the process.
        last = threading.Thread(target=listener.stop, name="holdfast-log", daemon=True)
        last.start()
        last.join(LAST_LINES_SECS)


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes to the log; a full one becomes `NAME.1`, in place of an earlier one of that name.

    Called on the listener's thread only.
    """

    def __init__(self, run: Path, name: str) -> None:
        self._run = run
        self._file_name = name
        super().__init__(_stream(run, name))

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            if self.stream is sys.stderr or self.stream.tell() < LOG_SIZE_BYTES:
                return
            with open_folder(self._run) as folder_fd:
                earlier = f"{self._file_name}.1"
                os.replace(self._file_name, earlier, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            full = self.setStream(_stream(self._run, self._file_name))
            if full is not None:
                full.close()
        except (OSError, ValueError, StorageError):
            # The run's directory may be gone or full: what is open is written to.
            return


def _stream(run: Path, name: str) -> TextIO:
    with translated("log into", RunLocation(run).events / name):
        try:
            return os.fdopen(open_event_file(run, name), "a", encoding="utf-8")
        except OSError as error:
            if error.errno not in _FAILS:
                raise
            # The checkpoints in RAM are worth an agent without a log.
            return sys.stderr
