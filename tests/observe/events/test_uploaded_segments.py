"""Uploads of events: how many requests they take, and what they leave out."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.observe.events.segments import SEGMENT_COUNT_MAX, SEGMENT_SIZE_BYTES, Segment
from holdfast.observe.events.uploaded_segments import (
    UPLOAD_BYTES_PER_SEC,
    UPLOAD_SECS,
    SegmentUploads,
    UploadedSegments,
    origin_of,
    uploads_for,
)
from holdfast.store.bucket.bucket import BucketStore
from holdfast.store.bucket.bucket_home import BucketHome
from holdfast.store.location import RunLocation, open_durable
from tests.buckets.object_server import ObjectServer, Trouble
from tests.trust.in_process import StepClock

LINE = b'{"line":"%05d"}\n'
PREFIX = "run/"


class Place:
    """One host's folder of a run's events, and the bucket."""

    def __init__(self, folder: Path, server: ObjectServer, clock: StepClock) -> None:
        self.folder, self.server, self.clock = folder, server, clock
        self.home = BucketHome("s3://bucket/run", folder)
        self.store = BucketStore(server, PREFIX, clock, home=self.home)
        self.events = RunLocation(folder).events
        self.events.mkdir(parents=True)
        self.uploads = self.new_agent()

    def new_agent(self) -> SegmentUploads:
        self.uploads = SegmentUploads(self.home, self.store, "h", self.clock)
        return self.uploads

    def write(self, number: int, data: bytes, series: str = "run") -> None:
        with (self.events / Segment("h", series, number).name).open("ab") as file:
            file.write(data)

    def pass_time(self, secs: float, *, is_last: bool = False) -> Counter[str]:
        """Let time pass and the uploads act once; return their requests."""
        before = Counter(self.server.requests)
        self.clock.secs += secs
        self.uploads._upload(is_last=is_last)
        return self.server.requests - before


@pytest.fixture
def place(tmp_path: Path) -> Place:
    clock = StepClock()
    return Place(tmp_path / "a", ObjectServer(clock), clock)


def stored(server: ObjectServer) -> dict[str, bytes]:
    return {key.rpartition("/")[2]: data for key, (data, _) in server.objects.items()}


def test_a_series_takes_one_request_a_minute_at_most_and_none_without_events(place: Place) -> None:
    place.write(1, LINE % 1)
    assert place.pass_time(0) == {"list_page": 1, "put": 1}
    total: Counter[str] = Counter()
    for number in range(60):
        place.write(1, LINE % number)
        total += place.pass_time(UPLOAD_SECS / 10)
    assert total["put"] <= 60 / 10 * 2
    assert total.keys() == {"put"}
    assert place.pass_time(UPLOAD_SECS)["put"] <= 1
    assert place.pass_time(UPLOAD_SECS) == {}
    assert place.pass_time(0, is_last=True) == {}


def test_a_large_segment_is_uploaded_less_often(place: Place) -> None:
    size = SEGMENT_SIZE_BYTES // 2
    line = b"x" * 1023 + b"\n"
    place.write(1, line * (size // 1024))
    assert place.pass_time(0)["put"] == 1
    place.write(1, line)
    assert place.pass_time(size / UPLOAD_BYTES_PER_SEC - 1) == {}
    assert place.pass_time(2) == {"put": 1}
    # A full one is uploaded at once, and never again.
    place.write(1, line * (size // 1024))
    assert place.pass_time(0) == {"put": 1}
    assert place.pass_time(10_000, is_last=True) == {}


def test_the_end_of_the_agent_uploads_the_rest_and_a_line_that_is_cut_stays_out(
    place: Place,
) -> None:
    place.write(1, LINE % 1)
    place.pass_time(0)
    place.write(1, LINE % 2 + b'{"cut')
    assert place.pass_time(1) == {}
    assert place.pass_time(0, is_last=True) == {"put": 1}
    assert stored(place.server) == {"h-run.000000001.jsonl": LINE % 1 + LINE % 2}


def test_the_next_agent_uploads_what_a_killed_one_has_not(place: Place) -> None:
    place.write(1, LINE % 1)
    place.pass_time(0)
    place.write(1, LINE % 2)
    place.write(1, LINE % 3, "saves")
    place.new_agent()
    assert place.pass_time(0) == {"list_page": 1, "put": 2}
    assert len(stored(place.server)["h-run.000000001.jsonl"]) == 2 * len(LINE % 1)


def test_the_bucket_has_as_many_segments_as_the_host(place: Place) -> None:
    for number in range(1, SEGMENT_COUNT_MAX + 1):
        place.write(number, LINE % number)
        assert place.pass_time(UPLOAD_SECS)["put"] == 1
    place.write(SEGMENT_COUNT_MAX + 1, LINE % 0)
    (place.events / Segment("h", "run", 1).name).unlink()
    assert place.pass_time(UPLOAD_SECS) == {"put": 1, "delete": 1}
    local = {path.name for path in place.events.glob("*.jsonl")}
    assert stored(place.server).keys() == local
    assert len(local) == SEGMENT_COUNT_MAX


def test_hosts_of_one_name_keep_their_own_and_a_reader_gets_both(
    place: Place, tmp_path: Path
) -> None:
    other = Place(tmp_path / "b", place.server, place.clock)
    for number, one in enumerate((place, other)):
        one.write(1, LINE % number)
        one.pass_time(0, is_last=True)
    assert origin_of(place.folder, place.clock) != origin_of(other.folder, other.clock)
    reader = BucketHome("s3://bucket/run", tmp_path / "reader")
    segments = UploadedSegments(place.store, reader, place.clock)
    before = Counter(place.server.requests)
    assert list(segments.fetch()) == []
    assert list(segments.fetch()) == [], "not listed again within a moment"
    assert place.server.requests - before == {"list_page": 1, "get": 2}
    files = [path for folder in segments.folders() for path in folder.iterdir()]
    assert {path.read_bytes() for path in files} == {LINE % 0, LINE % 1}
    # A host reads its own from its folder.
    own = UploadedSegments(place.store, place.home, place.clock)
    assert list(own.fetch()) == []
    assert len(own.folders()) == 1


def test_strange_keys_among_the_events_are_left_out(place: Place, tmp_path: Path) -> None:
    for key in (
        "events/h-run.000000001.jsonl",
        "events/0123456789abcdef/other.txt",
        "events/0123456789abcdef/deeper/h-run.000000001.jsonl",
        "events/not-an-origin/h-run.000000001.jsonl",
    ):
        place.store.put(key, LINE % 1)
    segments = UploadedSegments(place.store, BucketHome("s3://b/run", tmp_path), place.clock)
    assert list(segments.fetch()) == []
    assert segments.folders() == []


def test_a_service_that_fails_delays_no_close_and_is_reported_to_readers(
    place: Place, tmp_path: Path
) -> None:
    place.server.plan = lambda request, key: Trouble()
    place.write(1, LINE % 1)
    place.uploads.start()
    began = time.monotonic()
    place.uploads.close(place.clock.monotonic() + 10)
    assert time.monotonic() - began < 10
    assert stored(place.server) == {}
    segments = UploadedSegments(place.store, BucketHome("s3://b/run", tmp_path), place.clock)
    (problem,) = segments.fetch()
    assert isinstance(problem, HoldfastError)


def test_a_run_in_a_directory_uploads_nothing(tmp_path: Path) -> None:
    clock = StepClock()
    assert uploads_for(open_durable(str(tmp_path), clock), "h", clock) is None
