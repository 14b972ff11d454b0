"""Keep this host's segments of events in another place too, and read those of others there.

The place is the bucket of a run that has no directory, or the run's remote tier. A segment is one
object, `events/ORIGIN/HOST-run.000000001.jsonl`: the whole lines of the local file of that name. It
is replaced as the file grows, and never changes once the file is full. `ORIGIN` is random text of
one folder of events, so hosts of one name do not replace each other's segments.

- Uploads have a thread of their own, and delay neither the agent nor the writing of events.
- Of each series at most one object a minute and `UPLOAD_BYTES_PER_SEC` are uploaded, and the rest
  when the writer is closed. What a killed agent has not uploaded is in its files; the host's next
  agent uploads it.
- The place has the segments that the host has. Older ones are removed from both.

See docs/decisions/0033.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.names import EVENTS
from holdfast.observe.events.segments import (
    SEGMENT_SIZE_BYTES,
    Segment,
    list_segments,
    open_folder,
    open_plain,
    parse_segment_name,
)
from holdfast.store.contract import ReadableStore, Store
from holdfast.store.durable import DurableStore, RunHome
from holdfast.store.files.whole_file import create_file, replace_file
from holdfast.store.location import RunLocation

UPLOAD_SECS = 60.0
UPLOAD_BYTES_PER_SEC = 8192
REFRESH_SECS = 10.0
"""How often a reader lists the bucket again."""
ORIGIN_FILE = "origin"
ORIGIN_CHARS = 16
_ORIGIN = re.compile(rf"[0-9a-f]{{{ORIGIN_CHARS}}}")

log = logging.getLogger(__name__)


class SegmentUploads:
    """Uploads this host's segments; `start`, `end_soon` and `close` are called on one thread."""

    def __init__(
        self,
        home: RunHome,
        place: Store,
        host: str,
        clock: Clock,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            home: The run, in whose folder here the segments are.
            place: Where they are uploaded.
            host: The host.
            clock: The time.
            check: Called before each upload; raises an error if the place is the run's no more.
        """
        self._home = home
        self._place = place
        self._check = check
        self._host = host
        self._clock = clock
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._origin = ""
        # Owned by the thread: the size of each segment in the place, and when it was uploaded.
        self._sent: dict[Segment, tuple[int, float]] | None = None
        self._has_failed = False

    def start(self) -> None:
        """Start the thread, if it was not started."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="holdfast-uploads", daemon=True)
            self._thread.start()

    def end_soon(self) -> None:
        """Let the thread upload what is missing, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self, until_secs: float) -> None:
        """End the thread as `end_soon`, and wait for that, at most until then by the clock."""
        self.end_soon()
        if self._thread is not None:
            self._thread.join(max(0.0, until_secs - self._clock.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, UPLOAD_SECS)
                is_last = self._is_closed
            try:
                self._upload(is_last=is_last)
                self._has_failed = False
            except (HoldfastError, OSError) as error:
                # Logged once until an upload succeeds: the service may fail for hours.
                if not self._has_failed:
                    log.warning("events are not uploaded: %s", error)
                self._has_failed = True
            if is_last:
                return

    def _upload(self, *, is_last: bool) -> None:
        run = self._home.current_folder()
        with open_folder(run) as folder_fd:
            own = [segment for segment in list_segments(folder_fd) if segment.host == self._host]
            if not own:
                return
            if self._sent is None:
                self._origin = origin_of(run, self._clock)
                self._sent = self._stored()
            for segment in own:
                self._upload_one(folder_fd, segment, is_last=is_last)
        old = [s for s in self._sent if s not in own and _is_before(s, own)]
        if old:
            self._place.delete(*map(self._key, old))
            for segment in old:
                del self._sent[segment]

    def _upload_one(self, folder_fd: int, segment: Segment, *, is_last: bool) -> None:
        assert self._sent is not None
        now_secs = self._clock.monotonic()
        sent_bytes, sent_at_secs = self._sent.get(segment, (0, -UPLOAD_SECS))
        fd = open_plain(folder_fd, segment.name, os.O_RDONLY)
        try:
            size_bytes = os.fstat(fd).st_size
            # A full one is uploaded for the last time.
            least_secs = max(UPLOAD_SECS / 2, size_bytes / UPLOAD_BYTES_PER_SEC)
            is_due = is_last or size_bytes >= SEGMENT_SIZE_BYTES
            is_due |= now_secs - sent_at_secs >= least_secs
            if size_bytes <= sent_bytes or not is_due:
                return
            data = os.pread(fd, size_bytes, 0)
        finally:
            os.close(fd)
        # The last line may be being written.
        data = data[: data.rfind(b"\n") + 1]
        if len(data) > sent_bytes:
            self._check()
            self._place.put(self._key(segment), data)
            self._sent[segment] = len(data), now_secs

    def _stored(self) -> dict[Segment, tuple[int, float]]:
        """Return what earlier agents of this host have uploaded."""
        sizes = {}
        for stored in self._place.list(f"{EVENTS}/{self._origin}"):
            segment = parse_segment_name(stored.key.rpartition("/")[2])
            if segment is not None and segment.host == self._host:
                sizes[segment] = stored.size_bytes, -UPLOAD_SECS
        return sizes

    def _key(self, segment: Segment) -> str:
        return f"{EVENTS}/{self._origin}/{segment.name}"


def uploads_for(durable: DurableStore, host: str, clock: Clock) -> SegmentUploads | None:
    """Return the uploads of a host's events; None for a run in a directory, which has them."""
    is_url = RunLocation(durable.home.location_text).is_url
    return SegmentUploads(durable.home, durable, host, clock) if is_url else None


class UploadedSegments:
    """The segments of other origins in a bucket, as files of a temporary folder."""

    def __init__(
        self,
        store: ReadableStore,
        run: RunHome,
        clock: Clock,
        refresh_secs: float = REFRESH_SECS,
    ) -> None:
        """List nothing yet; the bucket is listed at most every `refresh_secs`."""
        self._store = store
        self._run = run
        self._clock = clock
        self._refresh_secs = refresh_secs
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-events-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._sizes_bytes: dict[str, int] = {}
        self._listed_at_secs = -math.inf

    def fetch(self) -> Iterator[HoldfastError]:
        """Fetch what has changed, if that was not done just now; yield what cannot be read."""
        now_secs = self._clock.monotonic()
        if now_secs - self._listed_at_secs < self._refresh_secs:
            return
        self._listed_at_secs = now_secs
        own = read_origin(self._run.current_folder())
        try:
            listed = {s.key: s.size_bytes for s in self._store.list(EVENTS) if _is_ours(s.key, own)}
        except StorageError as error:
            yield error
            return
        changed = [key for key, size in listed.items() if self._sizes_bytes.get(key) != size]
        for key, data in zip(changed, self._store.get_many(changed), strict=True):
            if isinstance(data, HoldfastError):
                yield data
                continue
            # What was read before is the beginning of this: a segment only grows.
            _, origin, name = key.split("/")
            path = Path(self._folder, origin, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            self._sizes_bytes[key] = listed[key]
        for key in self._sizes_bytes.keys() - listed.keys():
            _, origin, name = key.split("/")
            Path(self._folder, origin, name).unlink(missing_ok=True)
            del self._sizes_bytes[key]

    def folders(self) -> list[Path]:
        """Return the folders with segments, one for each origin."""
        return sorted(self._folder.iterdir())


def origin_of(run: Path, clock: Clock) -> str:
    """Return the random text of this host's folder of the run's events; it is made if missing.

    Raises:
        OSError: it cannot be read or made.
    """
    origin = read_origin(run)
    if origin:
        return origin
    folder = RunLocation(run).events
    token = clock.new_token()[-ORIGIN_CHARS:]
    try:
        create_file(folder / ORIGIN_FILE, token.encode(), clock)
    except FileExistsError:
        # Of another process here, or a torn one.
        if not read_origin(run):
            replace_file(folder / ORIGIN_FILE, token.encode())
    return read_origin(run) or token


def read_origin(run: Path) -> str:
    """Return the random text of this host's folder of the run's events; empty if it has none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (RunLocation(run).events / ORIGIN_FILE).read_text()
        return text if _ORIGIN.fullmatch(text) else ""
    return ""


def origin_folders(events: Path, own_origin: str) -> list[Path]:
    """Return the folders of other origins in a folder of events; none if it cannot be listed."""
    with contextlib.suppress(OSError):
        return sorted(
            path
            for path in events.iterdir()
            if _ORIGIN.fullmatch(path.name)
            and path.name != own_origin
            and path.is_dir()
            and not path.is_symlink()
        )
    return []


def _is_ours(key: str, own_origin: str) -> bool:
    """Return whether the key is one of a segment of another origin."""
    parts = key.split("/")
    if len(parts) != 3 or not _ORIGIN.fullmatch(parts[1]) or parts[1] == own_origin:
        return False
    return parse_segment_name(parts[2]) is not None


def _is_before(segment: Segment, own: list[Segment]) -> bool:
    """Return whether a segment is older than all that the host has of its series."""
    return all(segment < other for other in own if other.series == segment.series)
