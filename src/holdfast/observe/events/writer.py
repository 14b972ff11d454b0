"""Write the events of a run as JSON lines, from a thread of its own.

Writing never delays the agent. Storage that fails or hangs loses event lines and nothing else: the
queue is bounded, and the next line that can be written says how many were lost. The total size is
bounded as well: a full segment is followed by the next one, and the oldest ones are removed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from holdfast.clock import Clock
from holdfast.errors import StorageError
from holdfast.observe.events.schema import UNSTAMPED, Event, EventsLost, StepProgress, event_name
from holdfast.observe.events.segments import (
    RUN,
    SAVES,
    SEGMENT_COUNT_MAX,
    SEGMENT_SIZE_BYTES,
    Segment,
    list_segments,
    open_event_file,
    open_folder,
)
from holdfast.observe.events.uploaded_segments import SegmentUploads
from holdfast.store.durable import RunHome
from holdfast.store.location import RunLocation

QUEUE_LINES_MAX = 10_000
CLOSE_SECS = 5.0
"""How long `close` waits for storage, which may hang."""
UPLOADS_CLOSE_SECS = 10.0
"""How long it waits for all uploads, after that."""
STAMPED = ("version", "time", "uptime_secs", "host", "run_attempt")

log = logging.getLogger(__name__)


class EventWriter:
    """Appends events to this host's segments, stamped with `attempt` as set when each is written.

    All methods are called on one thread, which owns `attempt`. On it, `on_event` is called
    with each event.
    """

    def __init__(
        self,
        run: RunHome,
        host: str,
        clock: Clock,
        on_event: Callable[[Event], None] = lambda _: None,
        uploads: SegmentUploads | None = None,
    ) -> None:
        self._host = host
        self._clock = clock
        self._on_event = on_event
        self._uploads = [uploads] if uploads is not None else []
        self._series = {name: SegmentSeries(run, host, name) for name in (RUN, SAVES)}
        self._changed = threading.Condition()
        self._lines: deque[tuple[str, bytes]] = deque()
        self._is_closed = False
        self._lost_count = 0
        self._lost_reason = ""
        self._has_failed = False
        self._thread: threading.Thread | None = None
        self.attempt = 0

    def write(self, event: Event) -> None:
        """Queue one event; its time is now, unless it has one."""
        stamped = self._stamp(event)
        is_frequent = event.is_of_saves or isinstance(event, StepProgress)
        level = logging.DEBUG if is_frequent else logging.INFO
        if log.isEnabledFor(level):
            members = msgspec.structs.asdict(event)
            shown = {k: v for k, v in members.items() if k not in STAMPED}
            log.log(level, "%s %s", event_name(event), shown)
        self._on_event(stamped)
        line = _line(stamped)
        with self._changed:
            if len(self._lines) >= QUEUE_LINES_MAX:
                self._lose(1, "storage was too slow")
                return
            self._lines.append((SAVES if event.is_of_saves else RUN, line))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-events", daemon=True)
            self._thread.start()
            for uploads in self._uploads:
                uploads.start()

    def begin_uploads(self, uploads: SegmentUploads) -> None:
        """Upload the segments to another place too."""
        self._uploads.append(uploads)
        if self._thread is not None:
            uploads.start()

    def end_uploads(self, uploads: SegmentUploads) -> None:
        """Upload to that place what is missing there, and then no more."""
        self._uploads.remove(uploads)
        uploads.end_soon()

    def close(self) -> None:
        """Write the queued lines and end the thread; wait at most `CLOSE_SECS` for storage.

        Then upload what was not uploaded yet, which has a bound of its own.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECS)
        for uploads in self._uploads:
            uploads.end_soon()
        until_secs = self._clock.monotonic() + UPLOADS_CLOSE_SECS
        for uploads in self._uploads:
            uploads.close(until_secs)

    def _stamp(self, event: Event) -> Event:
        return msgspec.structs.replace(
            event,
            time=self._clock.now() if event.time == UNSTAMPED else event.time,
            uptime_secs=max(0.0, round(self._clock.monotonic(), 3)),
            host=self._host,
            run_attempt=self.attempt,
        )

    def _lose(self, count: int, reason: str) -> None:
        self._lost_count += count
        self._lost_reason = reason

    # On the thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                taken = list(self._lines)
                self._lines.clear()
                is_last = self._is_closed
            for name in self._series:
                lines = [line for series, line in taken if series == name]
                if lines:
                    self._append(name, lines)
            self._report_lost()
            if is_last:
                return

    def _append(self, series: str, lines: Sequence[bytes]) -> None:
        written_count, error = self._series[series].append_lines(lines)
        if error is not None:
            # A failure is logged once until a write succeeds: storage may fail for hours.
            if not self._has_failed:
                log.warning("events: cannot write: %s", error)
            with self._changed:
                self._lose(len(lines) - written_count, str(error))
        self._has_failed = error is not None

    def _report_lost(self) -> None:
        with self._changed:
            lost = EventsLost(count=self._lost_count, reason=self._lost_reason)
        if lost.count and not self._has_failed:
            written_count, _ = self._series[RUN].append_lines([_line(self._stamp(lost))])
            with self._changed:
                self._lost_count -= lost.count * written_count


class SegmentSeries:
    """One series of this host's segments; owned by the writer's thread."""

    def __init__(self, run: RunHome, host: str, name: str) -> None:
        self._run = run
        self._segment = Segment(host, name, 0)
        self._is_listed = False

    def append_lines(self, lines: Sequence[bytes]) -> tuple[int, Exception | None]:
        """Append lines; return how many were written, and why the others were not."""
        left = list(lines)
        try:
            while left:
                left = left[self._append_some(left) :]
        except (OSError, StorageError) as error:
            return len(lines) - len(left), error
        return len(lines), None

    def _append_some(self, lines: Sequence[bytes]) -> int:
        """Append lines to the newest segment while it has room; return how many."""
        # The directory may be moved at any time, and the folder be removed.
        run = self._run.current_folder()
        if not self._is_listed:
            RunLocation(run).events.mkdir(exist_ok=True)
            self._segment = self._newest(run) or self._next(run)
            self._is_listed = True
        fd = open_event_file(run, self._segment.name)
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes >= SEGMENT_SIZE_BYTES:
                self._segment = self._next(run)
                return 0
            # A crash or a full disk has cut the last line off.
            is_cut = size_bytes > 0 and os.pread(fd, 1, size_bytes - 1) != b"\n"
            data = bytearray(b"\n" if is_cut else b"")
            count = 0
            for line in lines:
                data += line
                count += 1
                if size_bytes + len(data) >= SEGMENT_SIZE_BYTES:
                    break
            _write_whole(fd, data)
            return count
        finally:
            os.close(fd)

    def _newest(self, run: Path) -> Segment | None:
        own = self._listed(run)
        return own[-1] if own else None

    def _next(self, run: Path) -> Segment:
        """Return the segment after the newest one, and remove those that are too old."""
        own = self._listed(run)
        number = 1 + max(self._segment.number, own[-1].number if own else 0)
        with open_folder(run) as folder_fd:
            for segment in own:
                if segment.number <= number - SEGMENT_COUNT_MAX:
                    os.unlink(segment.name, dir_fd=folder_fd)
        return replace(self._segment, number=number)

    def _listed(self, run: Path) -> list[Segment]:
        with open_folder(run) as folder_fd:
            segments = list_segments(folder_fd)
        host, series = self._segment.host, self._segment.series
        return [segment for segment in segments if (segment.host, segment.series) == (host, series)]


def _line(event: Event) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def _write_whole(fd: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
