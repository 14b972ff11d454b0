"""The agent's log, in the run's folder: a thread writes it, so that no disk holds the agent up.

A disk that is full, or stalls for longer than the queue lasts, loses lines, nothing else.
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

from holdfast.events.writer import open_story
from holdfast.format.names import EVENTS
from holdfast.store.object_folder import translated

QUEUE_LINES_MAX = 10_000
LAST_LINES_SECS = 5.0
_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)


@contextlib.contextmanager
def logging_into(run: Path, host: str) -> Iterator[None]:
    """Logs into `events/agent-HOST.log` of the run; on storage that fails, to standard error.

    Raises:
        StorageError: the file is not one to be written to, as a symbolic link is none.
    """
    handler = logging.StreamHandler(_stream(run, f"agent-{host}.log"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    lines: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE_LINES_MAX)
    listener = logging.handlers.QueueListener(lines, handler)
    logging.getLogger().addHandler(logging.handlers.QueueHandler(lines))
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # Nobody would read what a line that was lost says of itself.
    logging.raiseExceptions = False
    listener.start()
    try:
        yield
    finally:
        # A disk that hangs may keep the last lines for ever; both threads end with the process.
        last = threading.Thread(target=listener.stop, name="holdfast-log", daemon=True)
        last.start()
        last.join(LAST_LINES_SECS)


def _stream(run: Path, name: str) -> TextIO:
    with translated("log into", run / EVENTS / name):
        try:
            return os.fdopen(open_story(run, name), "a", encoding="utf-8")
        except OSError as error:
            if error.errno not in _FAILS:
                raise
            # What stands in RAM is worth an agent without a log.
            return sys.stderr
