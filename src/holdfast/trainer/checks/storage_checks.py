"""Check a run's storage before a training, by writing, reading and removing objects of its own.

The objects are in a folder of their own beside the run's, or below a key of their own in its
bucket, and are removed also after an error. The run's objects are only read.
"""

from __future__ import annotations

import errno
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.clock import Clock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.errors import HoldfastError, NotARunError, ObjectNotFoundError
from holdfast.format.names import LEASES
from holdfast.quantities import size_text
from holdfast.store.direct_io import ALIGNMENT_BYTES
from holdfast.store.durable import DurableStore
from holdfast.store.files.mounts import file_system_type, has_lasting_inodes
from holdfast.store.location import RunLocation, open_durable
from holdfast.trainer.checks.check_results import (
    CheckResult,
    Severity,
    failed,
    noted,
    passed,
    warned,
)
from holdfast.trainer.opening.run_access import read_only

SMALL_COUNT = 9
LARGE_SIZE_BYTES = 64 * 1024 * 1024
SLOW_SECS = 0.5
"""A commit takes several small writes, one after the other."""
SLOW_BYTES_PER_SEC = 50e6
SKEW_SECS_MAX = 2.0
CHECKPOINTS_MIN = 3
"""For so many checkpoints there should be room."""


def newest_size_bytes(place: str) -> int | None:
    """Return the size of the run's newest checkpoint; None if there is none that can be listed."""
    try:
        durable = read_only(place).durable
        listings = list_checkpoints(durable)
    except HoldfastError:
        return None
    sizes = [listing.size_bytes for listing in listings.values() if listing.is_committed]
    return sizes[-1] if sizes else None


def check_storage(place: str, clock: Clock) -> Iterator[CheckResult]:
    """Yield the results for the run at `place`, which may not exist yet.

    Raises:
        InvalidArgumentError: it is no path and no URL.
    """
    location = RunLocation.parse(place)
    of_run = _check_run(location)
    yield of_run
    if location.is_url:
        # Some services create a bucket with its first object.
        if of_run.severity is not Severity.PROBLEM:
            yield from _check_bucket(location, clock)
    else:
        yield from _check_directory(location.folder, newest_size_bytes(place))


def _check_run(location: RunLocation) -> CheckResult:
    subject = f"run, {location}"
    try:
        run = read_only(location.text)
        steps = [c.step for c in run.load_view().timeline]
    except NotARunError as error:
        folder = location.folder
        if location.is_url or not folder.exists() or _is_empty_directory(folder):
            return noted(subject, "there is no run yet; a training creates it")
        return failed(subject, str(error))
    except (HoldfastError, OSError) as error:
        advice = "docs/buckets.md has the set-up and the permissions" * location.is_url
        return failed(subject, str(error), advice or "see `holdfast verify`")
    count = "1 checkpoint" if len(steps) == 1 else f"{len(steps):,} checkpoints"
    return passed(subject, f"{count}, to step {steps[-1]}" if steps else "no checkpoints yet")


def _is_empty_directory(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except OSError:
        # A file, or a directory that may not be read.
        return False


def _check_directory(folder: Path, newest_bytes: int | None) -> Iterator[CheckResult]:
    there = next(f for f in (folder, *folder.parents) if f.exists())
    subject = f"storage, {there}"
    try:
        probe = Path(tempfile.mkdtemp(prefix=".holdfast-doctor-", dir=there))
    except OSError as error:
        yield failed(subject, f"it cannot be written: {error.strerror}")
        return
    try:
        yield passed(subject, f"file system {file_system_type(there) or 'unknown'}")
        if not has_lasting_inodes(there):
            yield noted(
                subject,
                "its inodes may change with each mount",
                "copies of a run are told from moved ones by their path",
            )
        yield _check_space(subject, there, newest_bytes)
        yield from _check_writes(subject, probe)
    except OSError as error:
        yield failed(subject, f"{error.strerror}: {error.filename or probe}")
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _check_space(subject: str, folder: Path, newest_bytes: int | None) -> CheckResult:
    space = os.statvfs(folder)
    free_bytes = space.f_bavail * space.f_frsize
    text = f"{size_text(free_bytes)} free"
    if newest_bytes is not None and free_bytes < CHECKPOINTS_MIN * newest_bytes:
        problem = f"{text}; a checkpoint has {size_text(newest_bytes)}"
        return warned(
            subject, problem, f"make room for {CHECKPOINTS_MIN} checkpoints, or keep fewer"
        )
    return passed(subject, text)


def _check_writes(subject: str, probe: Path) -> Iterator[CheckResult]:
    def write_small(number: int) -> None:
        path = probe / f"{number}.new"
        _write_synced(path, bytes(1000))
        # Over an object that is there, as records are replaced.
        path.replace(probe / "small")

    yield _latency(subject, [_timed(lambda n=n: write_small(n)) for n in range(SMALL_COUNT)])  # type: ignore[misc]
    data = os.urandom(1 << 20) * (LARGE_SIZE_BYTES >> 20)
    yield _rate(subject, len(data), _timed(lambda: _write_synced(probe / "large", data)))
    try:
        fd = os.open(probe, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        yield noted(subject, f"folders cannot be synced ({error.strerror}); files are")
    yield _check_direct(subject, probe / "large")
    skew_secs = _file_time(probe) - time.time()
    yield _skew(subject, skew_secs)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _file_time(probe: Path) -> float:
    path = probe / "time"
    path.write_bytes(b"")
    return path.stat().st_mtime


def _check_direct(subject: str, path: Path) -> CheckResult:
    import mmap

    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
                os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return noted(subject, "no direct reads and writes; they go through the page cache")
    return passed(subject, "direct reads and writes")


def _check_bucket(location: RunLocation, clock: Clock) -> Iterator[CheckResult]:
    subject = f"bucket, {location}"
    try:
        store = open_durable(location.text, clock)
        store.prepare_place()
        yield passed(subject, "of several creators of an object one wins")
        yield from _check_requests(subject, store, clock)
    except HoldfastError as error:
        yield failed(subject, str(error), "docs/buckets.md has the set-up and the permissions")


def _check_requests(subject: str, store: DurableStore, clock: Clock) -> Iterator[CheckResult]:
    token = clock.new_token()
    small, large = f"{LEASES}/doctor-{token}.json", f"{LEASES}/doctor-{token}.large"
    try:
        yield _latency(subject, [_timed(lambda: store.put(small, b"{}")) for _ in range(5)])
        data = os.urandom(1 << 20) * (LARGE_SIZE_BYTES >> 20)
        yield _rate(subject, len(data), _timed(lambda: store.put(large, data)))
        began = time.time()
        file = store.fleeting.read_timed(small)
        if file is None or not any(entry.key == small for entry in store.list(LEASES)):
            yield failed(subject, "an object that was written is not found or not listed")
        else:
            # Of the service's time whole seconds are known.
            yield _skew(subject, file.now_ns / 1e9 - began)
    finally:
        store.delete(small, large)
    try:
        store.get(small)
        yield failed(subject, "an object that was deleted is still read")
    except ObjectNotFoundError:
        yield passed(subject, "objects can be written, read, listed and deleted")


def _latency(subject: str, secs: list[float]) -> CheckResult:
    middle = statistics.median(secs)
    text = f"a small durable write takes {middle * 1e3:.1f} ms"
    if middle > SLOW_SECS:
        advice = "a commit takes several; save less often, or use storage that is nearer"
        return warned(subject, text, advice)
    return passed(subject, text)


def _rate(subject: str, size_bytes: int, secs: float) -> CheckResult:
    text = (
        f"{size_text(size_bytes)} are durable in {secs:.2f} s, {size_bytes / secs / 1e6:.0f} MB/s"
    )
    if size_bytes / secs < SLOW_BYTES_PER_SEC:
        advice = "durable checkpoints will be rare; `holdfast report` has their interval"
        return warned(subject, text, advice)
    return passed(subject, text)


def _skew(subject: str, secs: float) -> CheckResult:
    if abs(secs) > SKEW_SECS_MAX:
        problem = f"its clock differs from this host's by {secs:+.1f} s"
        return warned(subject, problem, "synchronise the clocks (NTP); times in reports are wrong")
    return passed(subject, f"its clock and this host's agree to {SKEW_SECS_MAX:g} s")


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
