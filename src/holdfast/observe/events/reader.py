"""Read the events of a run: all hosts and attempts together, in the order of time; word each.

Reading takes no lock and writes nothing, so it may be done beside a live run. It never fails for
what it finds: a line that is cut off, an event or a version that this code does not know, a
segment that was removed or that cannot be read is yielded as an `Omission`, with the reason.

Invariant: the events of one series of a host are yielded in the order in which they were written,
also if the host's clock was set back meanwhile.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from itertools import chain, groupby
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.errors import StorageError
from holdfast.format.json_codec import decode
from holdfast.observe.events.schema import (
    EVENTS,
    UNSTAMPED,
    VERSION,
    CheckpointEvent,
    Event,
    event_name,
)
from holdfast.observe.events.segments import Segment, list_segments, open_folder, open_plain
from holdfast.observe.events.uploaded_segments import UploadedSegments, origin_folders, read_origin
from holdfast.store.durable import DurableStore, RunHome
from holdfast.store.location import RunLocation, open_durable
from holdfast.store.run_directory import RunDirectory

LINE_SIZE_MAX_BYTES = 1024 * 1024
"""A longer line is none of ours."""
READ_SIZE_BYTES = 256 * 1024
FOLLOW_SECS = 0.2
REMOTE_REFRESH_SECS = 60.0
"""How often a remote tier is listed: what it has beyond the directory is old."""
SHOWN_CHARS_MAX = 200
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ANY: Any = reduce(or_, EVENTS)

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Omission:
    """What was left out, and why.

    Attributes:
        where: the file, with the position in it.
        reason: why.
        time: the time of the last event before it in that file.
    """

    where: str
    reason: str
    time: datetime


class EventReader:
    """Reads the events of a run; each call of `read` yields what was written since the last one.

    Of a run in a bucket, this host's events are read from its own files, and those of other hosts
    from the bucket. A remote tier has those of directories that were lost since.
    """

    def __init__(
        self,
        run: Path | RunHome,
        *,
        only: tuple[str, str] | None = None,
        remote: DurableStore | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            run: The run's directory or home.
            only: Read only the events of that host and series, of this host's files.
            remote: Read what the run's remote tier has from other directories too.
        """
        self._home: RunHome = RunDirectory(run) if isinstance(run, Path) else run
        self._own = _FolderReader("", only)
        self._others: dict[Path, _FolderReader] = {}
        self._problems: set[tuple[str, str]] = set()
        self._reads_others = only is None
        self._buckets: list[UploadedSegments] = []
        self._directories: list[RunLocation] = []
        clock = SystemClock()
        if only is None and RunLocation(self._home.location_text).is_url:
            store = open_durable(self._home, clock)
            self._buckets.append(UploadedSegments(store, self._home, clock))
        if remote is not None:
            location = RunLocation(remote.home.location_text)
            if location.is_url:
                bucket = UploadedSegments(remote, self._home, clock, REMOTE_REFRESH_SECS)
                self._buckets.append(bucket)
            else:
                self._directories.append(location)

    def read(self, *, is_live: bool = False) -> Iterator[Event | Omission]:
        """Yield the events since the last call, in the order of time.

        Args:
            is_live: A last line without its end is being written: a later call yields it.
        """
        where = self._home.location_text
        series: list[Iterator[Event | Omission]] = []
        with ExitStack() as stack:
            for problem in chain.from_iterable(bucket.fetch() for bucket in self._buckets):
                series.append(iter([Omission(where=where, reason=str(problem), time=UNSTAMPED)]))
            try:
                run = self._home.current_folder()
                folder_fd = stack.enter_context(open_folder(run))
                series += self._own.series(folder_fd, is_live)
            except FileNotFoundError:
                pass
            except OSError as error:
                series.append(iter([Omission(where=where, reason=str(error), time=UNSTAMPED)]))
            seen: set[str] = set()
            for origin, folder in self._other_folders():
                # A bucket and its remote tier both have the segments of one folder.
                if origin in seen:
                    continue
                seen.add(origin)
                reader = self._others.setdefault(folder, _FolderReader(f"{folder.name}/", None))
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    folder_fd = os.open(folder, flags)
                except OSError as error:
                    omission = Omission(where=str(folder), reason=str(error), time=UNSTAMPED)
                    series.append(iter([omission]))
                    continue
                stack.callback(os.close, folder_fd)
                series += reader.series(folder_fd, is_live)
            # Each series is in the order of writing; `_in_order` gives it times that never
            # decrease.
            for _, item in heapq.merge(*map(_in_order, series), key=lambda timed: timed[0]):
                yield item

    def _other_folders(self) -> Iterator[tuple[str, Path]]:
        """Yield the folders with segments that were not written in the run's folder here.

        Each comes with its origin, the place that is nearest to the writer first.
        """
        for bucket in self._buckets:
            yield from ((folder.name, folder) for folder in bucket.folders())
        if not self._reads_others:
            return
        with contextlib.suppress(StorageError):
            run = self._home.current_folder()
            own = read_origin(run)
            folders: list[Path] = []
            for location in self._directories:
                origin = read_origin(location.folder) or str(location.events)
                if location.events.is_dir() and origin != own:
                    yield origin, location.events
                folders += origin_folders(location.events, own)
            folders += origin_folders(RunLocation(run).events, own)
            yield from ((folder.name, folder) for folder in folders)

    def follow(
        self, clock: Clock, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Event | Omission]:
        """Yield all events, and then each new one, until `is_over` returns True."""
        while True:
            is_last = is_over()
            for item in self.read(is_live=not is_last):
                if isinstance(item, Event) or self._is_new(item):
                    yield item
            if is_last:
                return
            clock.sleep(FOLLOW_SECS)

    def _is_new(self, omission: Omission) -> bool:
        """Return whether a problem was not reported before; one that lasts is met at each look."""
        problem = omission.where, omission.reason
        is_new = problem not in self._problems
        self._problems.add(problem)
        return is_new


class _FolderReader:
    """Reads the segments of one folder from where the last call ended.

    `label` is put before the names of files in messages; `only` selects a host's series.
    """

    def __init__(self, label: str, only: tuple[str, str] | None) -> None:
        self._label = label
        self._only = only
        self._positions: dict[Segment, int] = {}
        self._times: dict[tuple[str, str], datetime] = {}

    def series(self, folder_fd: int, is_live: bool) -> list[Iterator[Event | Omission]]:
        """Return the new events of each series, to be read while the folder is open."""
        segments = [
            segment
            for segment in list_segments(folder_fd)
            if self._only in (None, (segment.host, segment.series))
        ]
        return [
            self._read_series(folder_fd, list(group), is_live)
            for _, group in groupby(segments, key=lambda segment: (segment.host, segment.series))
        ]

    def _read_series(
        self, folder_fd: int, segments: list[Segment], is_live: bool
    ) -> Iterator[Event | Omission]:
        key = segments[0].host, segments[0].series
        predecessors = [other for other in self._positions if (other.host, other.series) == key]
        first = max(predecessors).number + 1 if predecessors else 1
        for segment in segments:
            if segment.number > first:
                removed = f"segments {first} to {segment.number - 1} were removed"
                yield self._omission(segment, f"{removed} before it")
            first = max(first, segment.number + 1)
            if segment.number + 1 == first or segment in self._positions:
                is_last = is_live and segment is segments[-1]
                yield from self._read_segment(folder_fd, segment, is_last)

    def _read_segment(
        self, folder_fd: int, segment: Segment, is_live: bool
    ) -> Iterator[Event | Omission]:
        position = self._positions.setdefault(segment, 0)
        try:
            fd = open_plain(folder_fd, segment.name, os.O_RDONLY)
        except OSError as error:
            yield self._omission(segment, f"it cannot be read: {error}")
            return
        try:
            for line, end in _lines(fd, position):
                is_whole = line.endswith(b"\n")
                if not is_whole and is_live and len(line) < LINE_SIZE_MAX_BYTES:
                    return
                self._positions[segment] = end
                if line.strip():
                    yield self._decoded(segment, position, line, is_whole)
                position = end
        except OSError as error:
            yield self._omission(segment, f"it cannot be read: {error}", position)
        finally:
            os.close(fd)

    def _decoded(
        self, segment: Segment, position: int, line: bytes, is_whole: bool
    ) -> Event | Omission:
        content = decode_event(line)
        if isinstance(content, Event):
            self._times[segment.host, segment.series] = content.time
            return content
        reason = content if is_whole else "the line is cut off"
        return self._omission(segment, reason, position)

    def _omission(self, segment: Segment, reason: str, position: int = 0) -> Omission:
        time = self._times.get((segment.host, segment.series), UNSTAMPED)
        name = f"{self._label}{segment.name}"
        where = f"{name}, byte {position}" if position else name
        return Omission(where=where, reason=reason, time=time)


def read_events(run: Path, *kinds: type[Kind]) -> list[Kind]:
    """Return the events of the given kinds, in the order of time; omissions are ignored."""
    return [event for event in EventReader(run).read() if isinstance(event, kinds)]


def decode_event(line: bytes) -> Event | str:
    """Return the event in a line, or why there is none."""
    try:
        event: Event = decode(line, _ANY)
    except UNDECODABLE as error:
        return _reason(line, str(error))
    return event if event.version == VERSION else _of_version(event.version)


def _reason(line: bytes, problem: str) -> str:
    """Return why a line was not decoded, by its version and name if it has them."""
    try:
        head = decode(line, _LineHead)
    except UNDECODABLE:
        return f"no event: {problem}"[:SHOWN_CHARS_MAX]
    if head.version != VERSION:
        return _of_version(head.version)
    if head.event not in set(map(event_name, EVENTS)):
        return f"unknown event {head.event!r}"[:SHOWN_CHARS_MAX]
    return f"{head.event}: {problem}"[:SHOWN_CHARS_MAX]


def _of_version(version: int) -> str:
    return f"version {version} of the schema, this Holdfast reads version {VERSION}"


class _LineHead(msgspec.Struct, frozen=True):
    event: str
    version: int


def _in_order(
    items: Iterable[Event | Omission],
) -> Iterator[tuple[datetime, Event | Omission]]:
    """Yield items with the newest time so far, since a clock may have been set back."""
    newest = UNSTAMPED
    for item in items:
        newest = max(newest, item.time)
        yield newest, item


def _lines(fd: int, position: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines from `position`, each with the position after it.

    The last one may lack its end. A line of more than `LINE_SIZE_MAX_BYTES` is yielded in pieces.
    """
    rest = b""
    while data := os.pread(fd, READ_SIZE_BYTES, position + len(rest)):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            position += len(line) + 1
            yield line + b"\n", position
        if len(rest) > LINE_SIZE_MAX_BYTES:
            position += len(rest)
            yield rest, position
            rest = b""
    if rest:
        yield rest, position + len(rest)


_STAMP = {field.name for field in msgspec.structs.fields(Event)}


def line_of(event: Event) -> str:
    """Return an event as one readable line."""
    members = {
        name: value
        for name, value in msgspec.structs.asdict(event).items()
        if name not in _STAMP and value not in (None, (), {})
    }
    about = f"attempt {event.run_attempt}"
    if isinstance(event, CheckpointEvent):
        about = f"step {members.pop('step')} of attempt {members.pop('attempt')}"
    says = ", ".join(f"{name} {_text(value)}" for name, value in members.items())
    time = event.time.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    line = f"{time}  {event.host}  {event_name(event)}  {about}" + (f": {says}" if says else "")
    # A name or a reason may hold anything; a line stays a line.
    return "".join(char if char.isprintable() else " " for char in line)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
