"""What happened in a run, as JSON lines in its `events/` folder, one file a host and attempt.

Writing never holds the agent up, and a full disk loses lines of the story, nothing else.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from holdfast.clock import Clock
from holdfast.format.names import EVENTS, CheckpointId

log = logging.getLogger(__name__)


class EventLog:
    """Appends events; the attempt of the file is the one that is set when an event comes."""

    def __init__(self, run: Path, host: str, clock: Clock) -> None:
        self._folder = run / EVENTS
        self._host = host
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, "holdfast-events")
        self._has_failed = False
        self.attempt = 0

    def write(self, event: str, checkpoint: CheckpointId | None = None, **data: Any) -> None:
        """Appends one line: the time, the event, the checkpoint it is about, and more."""
        line: dict[str, Any] = {"time": self._clock.now(), "event": event, "host": self._host}
        if checkpoint is not None:
            line |= {"step": checkpoint.step, "attempt": checkpoint.attempt}
        line |= data
        log.info("%s %s", event, {k: v for k, v in line.items() if k not in ("time", "event")})
        path = self._folder / f"{self.attempt:09d}-{self._host}.jsonl"
        self._pool.submit(self._append, path, msgspec.json.encode(line) + b"\n")

    def _append(self, path: Path, line: bytes) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(line)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("events are not written to %s: %s", path, error)
            self._has_failed = True

    def close(self) -> None:
        """Writes what is queued."""
        self._pool.shutdown()
