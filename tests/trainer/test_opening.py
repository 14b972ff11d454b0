"""All processes open one run; what one of them cannot open is told on all of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import CheckpointManager, errors
from holdfast.adapt.numpy_state import NumpyFramework
from holdfast.clock import Clock, SystemClock
from holdfast.format.names import RUN_FILE
from holdfast.format.records import RunRecord
from holdfast.format.sealed import seal
from holdfast.store.disk import DiskStore
from holdfast.trainer.opening.opening import OpenRun, open_run
from holdfast.trainer.ranks import rendezvous
from holdfast.trainer.ranks.shared_root import (
    HOSTS_SHOWN_MAX,
    POLL_SECS,
    SHOW_SECS,
    Sighting,
    check_shared,
    look_for,
)
from tests.hosts import host
from tests.ports import free_address
from tests.trainer.ranks import MemoryWords, RankOf, ranks, together
from tests.trainer.test_processes import PROCESS
from tests.trainer.test_restore_votes import line_of
from tests.trust.in_process import StepClock


class Moving(StepClock):
    """Time that only sleeping moves; after `sleeps` of them `act` is done, once."""

    def __init__(self, sleeps: int = 0, act: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.left, self.act = sleeps, act

    def sleep(self, secs: float) -> None:
        super().sleep(secs)
        self.left -= 1
        if self.left == 0:
            self.act()


def open_on_all(
    directories: Sequence[object], clock_of: Callable[[int], Clock] = lambda _: Moving()
) -> list[Any]:
    """What each rank opened, or raised."""
    job = ranks(MemoryWords(), len(directories))
    return together(
        [lambda one=one: open_run(directories[one.rank], one, clock_of(one.rank)) for one in job]
    )


def kinds(told: list[Any]) -> set[type]:
    return {type(each) for each in told}


def test_all_ranks_open_the_run_that_rank_0_makes(tmp_path: Path) -> None:
    other = tmp_path / "mounted" / "elsewhere"
    other.parent.mkdir()
    other.symlink_to(tmp_path / "run")
    opened = open_on_all([tmp_path / "run", tmp_path / "run", other])
    assert kinds(opened) == {OpenRun}
    assert len({(run.run_id, run.group) for run in opened}) == 1
    assert opened[2].location.folder == other


def foreign(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def newer(path: Path) -> None:
    path.mkdir()
    record = RunRecord(format_version=99, run_id="0" * 32, time=StepClock().now())
    (path / RUN_FILE).write_bytes(seal(record))


@pytest.mark.parametrize(
    ("make", "kind", "told"),
    [
        (lambda path: path.write_text(""), errors.NotARunError, "found a file"),
        (foreign, errors.NotARunError, "files but no holdfast.json"),
        (newer, errors.NewerFormatError, "upgrade"),
        (lambda path: path.symlink_to(path), errors.StorageError, "run"),
    ],
)
def test_what_rank_0_cannot_open_is_raised_on_all_ranks_as_that_class(
    tmp_path: Path, make: Callable[[Path], object], kind: type, told: str
) -> None:
    run = tmp_path / "run"
    make(run)
    found = open_on_all([run] * 3)
    assert kinds(found) == {kind}
    assert all(told in str(error) for error in found)


def test_a_path_that_is_none_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    found = open_on_all([tmp_path / "run", None])
    assert kinds(found) == {errors.InvalidArgumentError}
    assert all("expected a path" in str(error) for error in found)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_needs_a_newer_version_says_so_without_waiting(tmp_path: Path) -> None:
    newer(tmp_path / "other")
    clock = Moving()
    found = open_on_all([tmp_path / "run", tmp_path / "other"], lambda _: clock)
    assert kinds(found) == {errors.NewerFormatError}
    assert clock.secs == StepClock.secs


# A root that is not shared.


def test_hosts_that_do_not_share_the_run_are_told_and_left_as_they_were(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    foreign(theirs)
    own = tmp_path / "own"
    open_on_all([own], lambda _: SystemClock())
    before = sorted(map(str, tmp_path.rglob("*")))
    paths = [tmp_path / "run", tmp_path / "missing" / "run", theirs, own, tmp_path / "run"]
    found = open_on_all(paths)
    assert kinds(found) == {errors.NotARunError}
    run_id = json.loads((paths[0] / RUN_FILE).read_text())["run_id"]
    for error in found:
        assert f"{paths[1]} does not exist" in str(error)
        assert f"{theirs} has no holdfast.json" in str(error)
        assert f"{own} is run " in str(error)
        assert f"expected run {run_id}" in str(error)
    made = {*before, str(paths[0]), str(paths[0] / RUN_FILE)}
    assert set(map(str, tmp_path.rglob("*"))) == made


def test_a_run_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    """As on a file system of a network, whose clients remember for a while what is not there."""
    run, late = tmp_path / "run", tmp_path / "late"
    clock = Moving(7, lambda: shutil.copytree(run, late))
    found = open_on_all([run, late], lambda rank: [SystemClock(), clock][rank])
    assert kinds(found) == {OpenRun}
    assert clock.secs == pytest.approx(StepClock.secs + 7 * POLL_SECS)


def test_a_run_that_never_shows_is_waited_for_no_longer_than_the_bound(tmp_path: Path) -> None:
    clock = Moving()
    store = DiskStore(tmp_path / "run", clock)
    assert look_for("0" * 32, store, clock).problem == f"{tmp_path / 'run'} does not exist"
    assert SHOW_SECS <= clock.secs - StepClock.secs <= SHOW_SECS + POLL_SECS


def test_a_few_hosts_are_named_and_the_others_are_counted() -> None:
    seen = [Sighting("h0", "/r", "a" * 32)]
    seen += [Sighting(f"h{i // 8}", "/r", None, "/r does not exist") for i in range(8, 4096)]
    with pytest.raises(errors.NotARunError) as told:
        check_shared("a" * 32, seen)
    text = str(told.value)
    assert text.count("/r does not exist") == HOSTS_SHOWN_MAX
    assert f"and {511 - HOSTS_SHOWN_MAX} more" in text
    assert "of host h0 on all hosts" in text
    check_shared("a" * 32, seen[:1])


def test_one_host_s_storage_error_is_raised_on_all_as_that_class() -> None:
    bad = Sighting("h1", "/r", None, "read /r: input/output error", "StorageError")
    with pytest.raises(errors.StorageError, match="on host h1 read /r: input/output error"):
        check_shared("a" * 32, [Sighting("h0", "/r", "a" * 32), bad])


@pytest.mark.soak
def test_two_hosts_with_a_directory_of_their_own_each_are_told_by_name_at_the_start(
    tmp_path: Path,
) -> None:
    address = free_address()
    runs = [tmp_path / "disk-of-a" / "run", tmp_path / "disk-of-b" / "run"]
    runs[1].parent.mkdir()
    with host("host-a") as one, host("host-b") as other:
        job = [
            each.start(PROCESS, address, 2, rank, runs[rank], json.dumps({"steps": 1}), stem="jax")
            for rank, each in enumerate((one, other))
        ]
        said = [line_of(process, "error") for process in job]
        for each in said:
            assert each["error"] == "NotARunError"
            assert "of host host-a on all hosts of the job" in each["message"]
            assert f"found on host host-b {runs[1]} does not exist" in each["message"]
        assert said[1]["message"] == f"rank 0: {said[0]['message']}"
        # Neither an agent nor a directory is left on the host that has nothing to do with the run.
        assert other.agents() == []
        assert os.listdir(other.folder) == []
        assert os.listdir(runs[1].parent) == []


class OneRank(NumpyFramework):
    """NumPy as one rank of a job of two."""

    def __init__(self, words: MemoryWords, rank: int) -> None:
        super().__init__()
        self._rank = RankOf(rank, 2, words)

    def processes(self) -> RankOf:
        return self._rank


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ({"network": 1}, "expected a HostNetwork"),
        ({"remote": 1}, "remote"),
        ({"save_decision_policy": object()}, "save_decision_policy"),
    ],
    ids=["network", "remote", "policy"],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_argument_that_one_rank_refuses_ends_the_openings_of_the_others(
    failing: int, option: dict[str, Any], found: str, tmp_path: Path
) -> None:
    words = MemoryWords()
    seen = []
    for rank, given in ((failing, option), (1 - failing, {})):
        rendezvous.begin_numbers_anew()  # As in a process of its own.
        with pytest.raises(errors.InvalidArgumentError, match=found) as refused:
            CheckpointManager(tmp_path, framework=OneRank(words, rank), **given)
        seen.append(str(refused.value))
    assert seen[1] == f"rank {failing}: {seen[0]}"
    rendezvous.begin_numbers_anew()
    assert not os.listdir(tmp_path)
