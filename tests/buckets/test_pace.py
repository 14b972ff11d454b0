"""Uploads that a service slows down: fewer parts at once, growing pauses, and no failed save."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import StorageError, StorageRefusedError, StorageThrottledError
from holdfast.store.bucket import upload_pace
from holdfast.store.bucket.bucket import THROTTLED_SECS, TRIES_MAX, BucketStore, Outage, Tries
from holdfast.store.bucket.object_service import connect
from holdfast.store.bucket.upload_pace import (
    PARTS_AT_ONCE,
    PAUSE_MAX_SECS,
    ROOM_SECS,
    SLOW_FACTOR,
    SLOW_SECS,
    UploadPace,
    longest_delay_secs,
    run_delays,
)
from holdfast.store.contract import InMemory
from holdfast.store.location import RunLocation
from tests.buckets.fault_proxy import FaultProxy, Request, seeded
from tests.buckets.object_server import ObjectServer
from tests.buckets.test_faults import saved_steps
from tests.hosts import Host
from tests.trust.in_process import StepClock

PART = 5 << 20
IMAGES, IMAGE_BYTES = 4, 32 << 20


def send(pace: UploadPace, clock: StepClock, count: int, secs: float) -> None:
    """Send parts one after the other, each of which takes so long."""
    for _ in map(len, pace.paced_parts(InMemory(bytes(count)), 1)):
        clock.sleep(secs)


def test_slow_parts_halve_those_in_flight_and_good_ones_let_them_grow_again() -> None:
    clock = StepClock()
    pace = UploadPace(clock)
    send(pace, clock, 4, 1.0)
    assert pace.parts_at_once == PARTS_AT_ONCE
    send(pace, clock, 1, 10.0)
    assert pace.parts_at_once == PARTS_AT_ONCE // 2
    for _ in range(10):
        clock.sleep(PAUSE_MAX_SECS)
        pace.slow_down()
    assert pace.parts_at_once == 1
    began = clock.monotonic()
    send(pace, clock, 1, 1.0)
    # The pause has grown to its bound, and a part that goes well halves it.
    assert PAUSE_MAX_SECS / 2 <= clock.monotonic() - began - 1.0 <= PAUSE_MAX_SECS
    send(pace, clock, 50, 1.0)
    assert pace.parts_at_once == PARTS_AT_ONCE
    began = clock.monotonic()
    send(pace, clock, 10, 1.0)
    assert clock.monotonic() - began == pytest.approx(10.0)


def test_the_pause_grows_to_no_more_than_the_time_for_which_requests_are_refused() -> None:
    clock = StepClock()
    pace = UploadPace(clock)
    for _ in range(40):
        pace.slow_down()
        clock.sleep(0.1)
    began = clock.monotonic()
    send(pace, clock, 1, 0.0)
    assert clock.monotonic() - began <= 4.0


def test_a_process_that_waits_for_a_processor_slows_nothing_down() -> None:
    clock, delays = StepClock(), {"1": 0, "2": 0}
    pace = UploadPace(clock, lambda: dict(delays))
    send(pace, clock, 4, 1.0)
    for _ in map(len, pace.paced_parts(InMemory(bytes(8)), 1)):
        clock.sleep(30.0)
        delays["1"] += 27_000_000_000
    assert pace.parts_at_once == PARTS_AT_ONCE
    # The service stalls as well.
    for _ in map(len, pace.paced_parts(InMemory(bytes(1)), 1)):
        clock.sleep(30.0)
        delays["2"] += 9_000_000_000
    assert pace.parts_at_once == PARTS_AT_ONCE // 2


@pytest.mark.parametrize(("try_secs", "logged_at"), [(0.1, [3]), (60.0, [1])])
def test_a_request_that_fails_often_or_for_long_is_reported_once(
    caplog: pytest.LogCaptureFixture, try_secs: float, logged_at: list[int]
) -> None:
    clock, error = StepClock(), StorageError("no answer")
    tries = Tries(clock, "s3://bucket/run", UploadPace(clock), Outage())
    reported = []
    for number in range(1, TRIES_MAX):
        clock.sleep(try_secs)
        caplog.clear()
        with contextlib.suppress(StorageError):
            tries.failed(error)
        reported += [number for record in caplog.records if record.levelname == "WARNING"]
    assert reported == logged_at


def test_the_delays_of_threads_that_share_a_processor_are_found() -> None:
    if not run_delays():
        pytest.skip("this kernel does not count them")
    stop = threading.Event()
    (processor, *_) = os.sched_getaffinity(0)
    spinning = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", spinning]) as other:
        found: list[float] = []

        def work() -> None:
            os.sched_setaffinity(0, {processor})
            before = run_delays()
            while not stop.is_set() and not found:
                delay_secs = longest_delay_secs(before, run_delays())
                if delay_secs > 0.05:
                    found.append(delay_secs)

        try:
            os.sched_setaffinity(other.pid, {processor})
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(30)
            stop.set()
            thread.join()
        finally:
            other.kill()
    assert found


def test_a_slow_network_alone_slows_nothing_down_further() -> None:
    clock = StepClock()
    pace = UploadPace(clock)
    send(pace, clock, 100, 60.0)
    assert pace.parts_at_once == PARTS_AT_ONCE


def test_the_short_last_part_of_an_image_makes_no_whole_part_look_slow() -> None:
    clock = StepClock()
    pace = UploadPace(clock)
    for _ in range(10):
        # A link of 10 bytes a second, and images of 85 bytes in parts of 40.
        for size in map(len, pace.paced_parts(InMemory(bytes(85)), 40)):
            clock.sleep(size / 10)
    assert pace.parts_at_once == PARTS_AT_ONCE


def test_parts_of_all_uploads_together_are_bounded() -> None:
    pace, most, lock = UploadPace(SystemClock()), 0, threading.Lock()

    def upload(number: int) -> int:
        nonlocal most
        held: list[memoryview] = []
        count = 0
        for part in pace.paced_parts(InMemory(bytes(20)), 1):
            held.append(part)
            count += 1
            del part
            with lock:
                most = max(most, pace.in_flight)
            if len(held) == 2:
                # As a client that has sent them.
                held.clear()
        return count

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(upload, range(4))] == [20] * 4
    assert 1 < most <= PARTS_AT_ONCE
    assert pace.in_flight == 0


class OneByOne(ObjectServer):
    """A service whose client asks for a part once the one before is sent and dropped."""

    def upload(self, key: str, parts: Iterator[memoryview], part_size_bytes: int) -> None:
        for _ in map(len, parts):
            pass


class LookedAt(StepClock):
    """A clock that moves by a second whenever somebody looks at it."""

    def monotonic(self) -> float:
        self.sleep(1.0)
        return self.secs


def test_an_upload_that_was_slowed_down_to_one_part_does_not_wait_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload_pace, "WAIT_SECS", 0.001)
    clock = LookedAt()
    store = BucketStore(OneByOne(), "run/", clock, part_size_bytes=1000)
    for _ in range(3):
        clock.sleep(PAUSE_MAX_SECS)
        store.pace.slow_down()
    assert store.pace.parts_at_once == 1
    began = clock.secs
    store.put("image", bytes(5000))
    assert clock.secs - began < ROOM_SECS


class Ending(ObjectServer):
    """A service that ends while it receives the first part of an upload."""

    def upload(self, key: str, parts: Iterator[memoryview], part_size_bytes: int) -> None:
        next(parts)
        raise StorageRefusedError(f"upload {key}: the service has ended")


def test_a_failed_upload_whose_error_is_kept_leaves_no_part_in_flight() -> None:
    store = BucketStore(Ending(), "run/", StepClock(), part_size_bytes=1000)
    with pytest.raises(StorageRefusedError) as kept:
        store.put("image", bytes(5000))
    assert store.pace.in_flight == 0, kept


def test_a_part_that_never_ends_holds_others_up_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload_pace, "ROOM_SECS", 0.1)
    monkeypatch.setattr(upload_pace, "WAIT_SECS", 0.02)
    pace = UploadPace(SystemClock())
    kept = [*pace.paced_parts(InMemory(bytes(PARTS_AT_ONCE + 1)), 1)]
    assert len(kept) == PARTS_AT_ONCE + 1


class Throttling(ObjectServer):
    """A service that refuses every request until a time of the clock."""

    def __init__(self, clock: StepClock, until_secs: float) -> None:
        super().__init__(clock, self.refuse)
        self.clock, self.until_secs, self.refused = clock, until_secs, 0

    def refuse(self, request: str, key: str) -> None:
        self.clock.sleep(0.1)
        if self.clock.monotonic() < self.until_secs:
            self.refused += 1
            raise StorageThrottledError(f"{request} {key}: 503 SlowDown")


def test_refusals_are_outlasted_until_the_deadline_and_not_longer() -> None:
    clock = StepClock()
    server = Throttling(clock, clock.monotonic() + THROTTLED_SECS - 30)
    store = BucketStore(server, "run/", clock)
    assert store.put_if_absent("record", b"1")
    # The pauses are bounded, so that the end is noticed soon, and long enough to be of use.
    assert TRIES_MAX < server.refused < 10 + THROTTLED_SECS / (PAUSE_MAX_SECS / 2)
    server.until_secs = clock.monotonic() + 10 * THROTTLED_SECS
    began = clock.monotonic()
    with pytest.raises(StorageThrottledError):
        store.get("record")
    assert THROTTLED_SECS <= clock.monotonic() - began <= THROTTLED_SECS + 2 * PAUSE_MAX_SECS


def test_refused_parts_do_not_begin_the_upload_again_and_fewer_are_sent(
    proxy: FaultProxy, proxied_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What other processes take of the processor would be taken off the time of a part.
    monkeypatch.setattr(upload_pace, "longest_delay_secs", lambda before, after: 0.0)
    bucket, prefix = RunLocation(proxied_url).bucket_and_prefix()
    store = BucketStore(connect(bucket), f"{prefix}/", SystemClock(), part_size_bytes=PART)
    uploads, refused_until, refused = [], float("inf"), 0
    data = os.urandom(4 * PART + 17)
    began = time.monotonic()

    def choose(request: Request) -> str | None:
        nonlocal refused, refused_until
        if "?uploads" in request.path and request.method == "POST":
            uploads.append(request.path)
        # The first parts go well, so that the usual time is known.
        if "partNumber" not in request.path or proxy.counts["PUT"] < 4:
            return None
        if not refused:
            # For twice as long as a part may take on this machine without being a slow one: some
            # of those that are refused begin later.
            usual_secs = time.monotonic() - began
            refused_until = time.monotonic() + 2 * (SLOW_FACTOR * usual_secs + SLOW_SECS)
        if refused > PARTS_AT_ONCE and time.monotonic() > refused_until:
            return None
        refused += 1
        return "slow down"

    proxy.choose = choose
    store.put("image", data * 4)
    assert len(uploads) == 1
    assert store.pace.parts_at_once < PARTS_AT_ONCE
    with store.open("image") as reader:
        found = bytearray(len(data))
        reader.read_into(3 * len(data), memoryview(found))
    assert found == data


@pytest.mark.soak
def test_no_save_fails_while_half_of_the_requests_are_refused(
    one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    proxy.choose = seeded(3, 0.5, ("slow down", "too many"))
    assert saved_steps(proxied_url, range(1, 3)) == [1, 2]
    assert proxy.counts["slow down"] > 10


UPLOADER = """
import mmap, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from tests.buckets.test_pace import anonymous_bytes, put_images
before = anonymous_bytes()
most = before
ended = threading.Event()
def watch():
    global most
    while not ended.wait(0.005):
        most = max(most, anonymous_bytes())
watching = threading.Thread(target=watch)
watching.start()
put_images(sys.argv[1], sys.argv[2])
ended.set()
watching.join()
print(most - before)
"""


def anonymous_bytes() -> int:
    """The memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def put_images(url: str, folder: str) -> None:
    """Upload the images of that many ranks at once, as they lie in RAM."""
    bucket, prefix = RunLocation(url).bucket_and_prefix()
    store = BucketStore(connect(bucket), f"{prefix}/", SystemClock())

    def put(number: int) -> None:
        with open(f"{folder}/image-{number}", "rb") as file:
            store.put(f"image-{number}", mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    with ThreadPoolExecutor(IMAGES) as pool:
        [*pool.map(put, range(IMAGES))]


@pytest.fixture
def images(one_host: Host) -> Path:
    for number in range(IMAGES):
        path = one_host.folder / f"image-{number}"
        path.write_bytes(b"".join(itertools.repeat(os.urandom(1 << 20), IMAGE_BYTES >> 20)))
    return one_host.folder


def test_the_images_of_four_ranks_are_uploaded_without_a_copy(images: Path, url: str) -> None:
    command = [sys.executable, "-c", UPLOADER, url, str(images)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Of eight parts in flight with 128 MiB: the buffers of connections.
    assert int(done.stdout) < 32 << 20, done.stdout
