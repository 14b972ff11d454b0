"""Leases: their age comes from the file system, and a failure is logged once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.leases import Lease, Leases, LeaseWriter, newest_lease
from holdfast.errors import StorageError
from holdfast.format.names import lease_key
from holdfast.store.durable import TimedObject
from holdfast.store.fleeting_files import FleetingFiles
from holdfast.store.run_directory import RunDirectory
from tests.attempts import attempt_id

RUN_ID = "run"


def leases(run: Path) -> Leases:
    return Leases(FleetingFiles(RunDirectory(run), SystemClock()), RUN_ID)


def lease(attempt: int = 1, counter: int = 1) -> Lease:
    return Lease(
        run_id=RUN_ID,
        attempt=attempt_id(attempt),
        host="host-a",
        pid=7,
        user="alice",
        incarnation=5,
        counter=counter,
    )


def test_the_age_is_the_difference_of_two_times_of_the_file_system(tmp_path: Path) -> None:
    here = leases(tmp_path)
    here.write(lease())
    path = tmp_path / lease_key(1)
    written_ns = path.stat().st_mtime_ns
    fresh = here.read(1)
    assert fresh is not None
    assert fresh.holder == "host host-a (process 7 of user alice)"
    assert 0 <= fresh.age_secs < 40
    os.utime(path, ns=(written_ns, written_ns - 40 * 10**9))
    old = here.read(1)
    assert old is not None
    assert 40 <= old.age_secs < 80
    assert os.listdir(path.parent) == [path.name]


def test_each_renewal_changes_the_stamp_also_within_one_tick_of_the_file_systems_clock(
    tmp_path: Path,
) -> None:
    here, path = leases(tmp_path), tmp_path / lease_key(1)
    stamps = set()
    for counter in range(3):
        here.write(lease(counter=counter))
        os.utime(path, ns=(10**18, 10**18))
        seen = here.read(1)
        assert seen is not None
        stamps.add(seen.stamp)
    assert len(stamps) == 3


def test_an_attempt_without_a_lease_has_none_and_older_ones_are_removed(tmp_path: Path) -> None:
    here = leases(tmp_path)
    assert here.read(1) is None
    for attempt in (1, 2, 3):
        here.write(lease(attempt))
    here.remove_before(3)
    assert [here.read(attempt) is not None for attempt in (1, 2, 3)] == [False, False, True]
    here.remove(3)
    here.remove(3)
    assert here.read(3) is None


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[1]", b'{"attempt": "x"}', b"[" * 5000])
def test_of_a_file_that_is_no_lease_the_time_counts(tmp_path: Path, data: bytes) -> None:
    here, path = leases(tmp_path), tmp_path / lease_key(1)
    here.write(lease())
    path.write_bytes(data)
    first = here.read(1)
    os.utime(path, ns=(10**18, 10**18))
    second = here.read(1)
    assert first is not None
    assert second is not None
    assert first.stamp != second.stamp


def test_a_lease_that_cannot_be_written_is_logged_once_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "leases").write_text("in the way")
    writer = LeaseWriter(leases(tmp_path))
    with caplog.at_level(logging.WARNING):
        for counter in range(3):
            writer.write(lease(counter=counter))
    (record,) = caplog.records
    assert "the lease of attempt 1 is not written" in record.getMessage()
    with pytest.raises(StorageError):
        leases(tmp_path).read(1)
    (tmp_path / "leases").unlink()
    writer.write(lease(counter=9))
    found = msgspec.json.decode((tmp_path / lease_key(1)).read_bytes(), type=Lease)
    assert found.counter == 9


def test_a_lease_that_came_with_a_copy_of_the_directory_is_none_of_the_copys(
    tmp_path: Path,
) -> None:
    leases(tmp_path).write(lease())
    assert Leases(FleetingFiles(RunDirectory(tmp_path), SystemClock()), "the copy").read(1) is None


class Drifting(FleetingFiles):
    """A tier whose clock is read `ahead_secs` too late, as a service's in whole seconds is."""

    ahead_secs = 0

    def read_timed(self, key: str) -> TimedObject | None:
        read = super().read_timed(key)
        return read and read._replace(now_ns=read.now_ns + self.ahead_secs * 10**9)


def test_an_attempt_with_two_tiers_is_renewed_only_if_the_lease_in_one_of_them_is(
    tmp_path: Path,
) -> None:
    """Reads that take different times make now one and now the other lease the younger one."""
    stores = []
    for place in (tmp_path / "directory", tmp_path / "remote"):
        place.mkdir()
        stores.append(Drifting(RunDirectory(place), SystemClock()))
    tiers = [Leases(store, RUN_ID) for store in stores]
    for tier in tiers:
        tier.write(lease())
    stamps = set()
    for later in stores:
        for store in stores:
            store.ahead_secs = 9 if store is later else 3
        seen = newest_lease(tiers, 1)
        assert seen is not None
        assert 3 <= seen.age_secs < 9
        stamps.add(seen.stamp)
    (stamp,) = stamps
    tiers[1].write(lease(counter=2))
    renewed = newest_lease(tiers, 1)
    assert renewed is not None
    assert renewed.stamp != stamp
    assert newest_lease(tiers, 2) is None


def test_leases_follow_a_directory_that_is_moved(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    here = leases(tmp_path / "old")
    here.write(lease())
    (tmp_path / "old").rename(tmp_path / "new")
    here.write(lease(counter=2))
    assert not (tmp_path / "old").exists()
    assert leases(tmp_path / "new").read(1) is not None
