"""Detection of copied runs: a directory is the run in its record, or a copy of it."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt
from holdfast.engine.lifecycle.identity import Finding, find, judge, settle
from holdfast.engine.lifecycle.run import create_run, mend_run, read_run, read_run_record
from holdfast.format.names import RUN_FILE
from holdfast.format.records import RunPlace, RunRecord
from holdfast.store.disk import DiskStore
from holdfast.store.files.mounts import file_system_type, has_lasting_inodes
from tests.attempts import attempt_id
from tests.engine.making import TIME, begin
from tests.store.places import mounted

CLOCK = SystemClock()
COUNT = 8
A, B = RunPlace(inode=7, path="/a"), RunPlace(inode=7, path="/b")
OTHER_A, OTHER_B = RunPlace(inode=8, path="/a"), RunPlace(inode=8, path="/b")
SAME, MOVED, COPY = Finding.SAME, Finding.MOVED, Finding.COPY
DISPLACED = Finding.DISPLACED


class Case(NamedTuple):
    recorded: RunPlace | None
    found: RunPlace
    inodes_last: bool
    other_inode: int | None
    expected: Finding


CASES = {
    "where the record says": Case(A, A, True, None, SAME),
    "a record that does not say where": Case(None, A, True, None, SAME),
    "moved": Case(A, B, True, None, MOVED),
    "copied": Case(A, OTHER_B, True, 7, COPY),
    "copied or moved, and nothing is at the recorded place": Case(
        A, OTHER_B, True, None, DISPLACED
    ),
    "moved, and a copy put in its place": Case(A, B, True, 8, MOVED),
    "put back from a backup, or a copy in its place": Case(A, OTHER_A, True, None, DISPLACED),
    "copied to a mount point of the same number": Case(A, B, True, 7, COPY),
    "inodes change: mounted again": Case(A, OTHER_A, False, None, MOVED),
    "inodes change: moved": Case(A, OTHER_B, False, None, MOVED),
    "inodes change: copied": Case(A, OTHER_B, False, 9, COPY),
    "inodes change: copied, of the same number": Case(A, B, False, 7, COPY),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_where_a_run_is_found_tells_whether_it_is_a_copy(case: Case) -> None:
    found = judge(
        case.recorded, case.found, inodes_last=case.inodes_last, other_inode=case.other_inode
    )
    assert found is case.expected


def made(path: Path) -> Path:
    path.mkdir()
    store = DiskStore(path, CLOCK)
    create_run(store, "run", CLOCK.new_token(), TIME, store.home.recorded_place())
    begin(store, None)
    return path


def opened(path: Path) -> RunRecord:
    store = DiskStore(path, CLOCK)
    record = read_run(store, str(path))
    record = settle(store, record, find(store, record, CLOCK), CLOCK)
    assert read_run_record(store, "") == record
    return record


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def test_a_copy_gets_an_id_of_its_own_and_the_original_keeps_its_own(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    before = (run / RUN_FILE).read_bytes()
    first = opened(run)
    copy = opened(copied(run, tmp_path / "copy"))
    assert copy.run_id != first.run_id == copy.copied_from
    assert copy.place is not None
    assert copy.place.path == str(tmp_path / "copy")
    assert opened(tmp_path / "copy") == copy
    assert (run / RUN_FILE).read_bytes() == before


def test_a_copy_of_a_copy_is_a_third_run(tmp_path: Path) -> None:
    first = opened(made(tmp_path / "run"))
    unopened = copied(tmp_path / "run", tmp_path / "unopened")
    second = opened(copied(unopened, tmp_path / "second"))
    third = opened(copied(tmp_path / "second", tmp_path / "third"))
    assert len({first.run_id, second.run_id, third.run_id}) == 3
    assert third.copied_from == second.run_id
    assert opened(unopened).run_id not in {first.run_id, second.run_id, third.run_id}


def test_a_copy_of_a_run_that_was_deleted_is_a_run_of_its_own(tmp_path: Path) -> None:
    first = opened(made(tmp_path / "run"))
    copied(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    assert opened(tmp_path / "copy").run_id != first.run_id


def test_a_run_that_was_moved_stays_the_same(tmp_path: Path) -> None:
    first = opened(made(tmp_path / "run"))
    moved = opened((tmp_path / "run").rename(tmp_path / "new"))
    assert moved.run_id == first.run_id
    assert moved.place is not None
    assert moved.place.path == str(tmp_path / "new")
    assert moved.copied_from is None


@pytest.mark.parametrize("order", [("new", "run"), ("run", "new")])
def test_a_copy_in_the_place_of_a_run_that_was_moved_is_another_run(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    first = opened(made(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "new")
    copied(tmp_path / "new", tmp_path / "run")
    found = {name: opened(tmp_path / name).run_id for name in order}
    assert found["new"] == first.run_id != found["run"]


def test_a_copy_on_another_mount_point_of_the_same_number_is_another_run(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "one") as one, mounted("tmpfs", tmp_path / "two") as two:
        assert one.stat().st_ino == two.stat().st_ino
        store = DiskStore(one, CLOCK)
        first = create_run(store, "run", CLOCK.new_token(), TIME, store.home.recorded_place())
        shutil.copytree(one, two, dirs_exist_ok=True)
        second = opened(two)
        assert second.run_id != first.run_id
        assert opened(one) == first


def _open(path: Path, barrier: object, found: object) -> None:
    barrier.wait(240)  # type: ignore[attr-defined]
    found.put(opened(path).run_id)  # type: ignore[attr-defined]


def test_of_many_processes_that_open_a_copy_at_once_all_get_one_id(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    # Not by fork: a process of the suite may have loaded JAX, whose threads do not survive it.
    context = multiprocessing.get_context("spawn")
    for number in range(2):
        copy = copied(run, tmp_path / f"copy-{number}")
        barrier, found = context.Barrier(COUNT), context.Queue()
        openers = [context.Process(target=_open, args=(copy, barrier, found)) for _ in range(COUNT)]
        for one in openers:
            one.start()
        ids = {found.get(timeout=240) for _ in openers}
        for one in openers:
            one.join()
        assert ids == {read_run_record(DiskStore(copy, CLOCK), "").run_id}


def test_to_look_at_a_copy_changes_nothing(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    copy = copied(run, tmp_path / "copy")
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    store = DiskStore(copy, CLOCK)
    assert find(store, read_run(store, ""), CLOCK) is COPY
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def test_a_record_that_is_mended_has_the_newest_attempts_id_and_the_place(tmp_path: Path) -> None:
    made(tmp_path / "run")
    own = opened(copied(tmp_path / "run", tmp_path / "copy"))
    store = DiskStore(tmp_path / "copy", CLOCK)
    start = AttemptStart(run_id=own.run_id, origin=None, host="h", pid=1, time=TIME)
    assert begin_attempt(store, attempt_id(2), start)
    (tmp_path / "copy" / RUN_FILE).unlink()
    assert read_run(store, "").run_id == own.run_id
    assert list(mend_run(store, store.home.recorded_place())) == [RUN_FILE]
    mended = read_run_record(store, "")
    assert (mended.run_id, mended.place) == (own.run_id, own.place)


def test_the_file_systems_of_this_machine_are_known(tmp_path: Path) -> None:
    assert file_system_type(Path("/proc/self")) == "proc"
    assert not has_lasting_inodes(Path("/proc/self"))
    with mounted("tmpfs", tmp_path / "there") as there:
        assert file_system_type(there / "x") == "tmpfs"
        assert has_lasting_inodes(there / "x")
