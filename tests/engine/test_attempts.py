"""Attempts and the run's own record."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.engine.lifecycle.attempts import (
    AttemptStart,
    attempt_numbers,
    begin_attempt,
    mend_attempts,
    newest_attempt,
    newest_number,
    read_attempt,
    read_attempts,
)
from holdfast.engine.lifecycle.run import create_run, mend_run, read_run
from holdfast.errors import (
    CheckpointDamagedError,
    NewerFormatError,
    NotARunError,
    ObjectNotFoundError,
)
from holdfast.format.names import NO_ATTEMPT, RUN_FILE, STEP_MAX, AttemptId, attempt_keys
from holdfast.format.records import AttemptRecord, RunRecord
from holdfast.format.sealed import seal
from holdfast.format.timeline import last_steps
from holdfast.store.disk import DiskStore
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import RUN_ID, TIME, begin, disk, flip_bit

START = AttemptStart(run_id=RUN_ID, origin=checkpoint_id(7), host="h", pid=3, time=TIME)


def test_attempts_are_numbered_from_1_and_say_where_they_began(durable: DiskStore) -> None:
    assert newest_number(durable) == 0
    assert newest_attempt(durable) == NO_ATTEMPT
    begin(durable, None)
    second = begin_attempt(durable, attempt_id(2), START)
    assert second is not None
    assert (second.attempt, second.origin) == (attempt_id(2), checkpoint_id(7))
    assert (second.host, second.pid) == ("h", 3)
    assert newest_attempt(durable) == attempt_id(2)
    assert attempt_numbers(durable) == [1, 2]
    assert read_attempt(durable, 2) == second
    origins = {number: record.origin for number, record in read_attempts(durable).items()}
    assert origins == {1: None, 2: checkpoint_id(7)}


def test_no_two_starts_get_one_number(durable: DiskStore) -> None:
    barrier = threading.Barrier(8, timeout=240)
    begun = []

    def start(token: str) -> None:
        store = disk(durable.root)
        barrier.wait()
        begun.extend(begin_attempt(store, AttemptId.of_start(n, token), START) for n in (1, 2, 3))

    threads = [threading.Thread(target=start, args=(f"{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.attempt.number for one in begun if one is not None) == [1, 2, 3]


def test_other_files_beside_the_attempts_are_ignored(durable: DiskStore) -> None:
    begin(durable, None)
    for name in ("2.json", "000000002.json.bak", "000000000.json", "notes.txt", "a/000000003.json"):
        durable.put(f"attempts/{name}", b"x")
    assert attempt_numbers(durable) == [1]


def test_a_damaged_attempt_is_reported_and_not_guessed(durable: DiskStore) -> None:
    begin(durable, None, (7, 1))
    for key in attempt_keys(1):
        flip_bit(durable.root / key, 99)
    with pytest.raises(CheckpointDamagedError, match=r"attempts/000000001\.json") as caught:
        read_attempts(durable)
    assert str(durable.root) in str(caught.value)
    assert f"remove {' and '.join(attempt_keys(1))}" in str(caught.value)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("harm", [lambda path: flip_bit(path, 99), Path.unlink])
def test_one_bad_file_does_not_lose_the_timeline_and_is_mended(
    durable: DiskStore, which: int, harm: Callable[[Path], None]
) -> None:
    begin(durable, None, (7, 1), (9, 2))
    right = read_attempts(durable)
    files = {key: durable.get(key) for n in (1, 2, 3) for key in attempt_keys(n)}
    for number in (1, 2, 3):
        harm(durable.root / attempt_keys(number)[which])
    assert attempt_numbers(durable) == [1, 2, 3]
    assert read_attempts(durable) == right
    numbers = (1, 2, 3)
    assert list(mend_attempts(durable, numbers, {})) == [attempt_keys(n)[which] for n in numbers]
    assert {key: durable.get(key) for key in files} == files
    known: dict[int, AttemptRecord] = {}
    assert list(mend_attempts(durable, numbers, known)) == []
    assert known == right


def test_only_the_newest_attempt_may_lack_its_copy(durable: DiskStore) -> None:
    begin(durable, None)
    durable.delete(attempt_keys(1)[1])
    begin(durable, (7, 1))
    assert durable.get(attempt_keys(1)[1]) == durable.get(attempt_keys(1)[0])


def test_a_damaged_record_of_an_abandoned_attempt_does_no_harm(durable: DiskStore) -> None:
    begin(durable, None, (7, 1), (5, 1))
    for key in attempt_keys(2):
        flip_bit(durable.root / key, 99)
    assert [*last_steps(read_attempts(durable))] == [attempt_id(3), attempt_id(1)]


def test_a_timeline_ends_where_an_attempt_has_no_record(durable: DiskStore) -> None:
    begin(durable, None, (7, 1), (9, 2))
    for key in attempt_keys(2):
        durable.delete(key)
    assert last_steps(read_attempts(durable)) == {attempt_id(3): STEP_MAX, attempt_id(2): 9}


def test_a_record_under_another_attempts_name_is_damaged(durable: DiskStore) -> None:
    begin(durable, None, (7, 1))
    data = durable.get(attempt_keys(1)[0])
    for key in attempt_keys(2):
        durable.put(key, data)
    with pytest.raises(CheckpointDamagedError, match=r"attempts/000000002\.json"):
        read_attempts(durable)


def test_an_attempt_that_is_not_there_is_not_found(durable: DiskStore) -> None:
    with pytest.raises(ObjectNotFoundError):
        read_attempt(durable, 1)


def test_of_many_who_create_a_run_all_get_the_same(durable: DiskStore) -> None:
    barrier = threading.Barrier(4, timeout=240)
    found = []

    def create(number: int) -> None:
        barrier.wait()
        found.append(create_run(disk(durable.root), "here", f"{number}", TIME).run_id)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({*found}) == 1


def test_a_folder_without_the_runs_record_is_no_run(durable: DiskStore) -> None:
    durable.put("checkpoints/a", b"x")
    with pytest.raises(NotARunError, match=r"^open here: expected a run.*; check the path"):
        read_run(durable, "here")


def test_a_damaged_record_is_no_runs(durable: DiskStore) -> None:
    create_run(durable, "here", RUN_ID, TIME)
    flip_bit(durable.root / RUN_FILE, 100)
    with pytest.raises(NotARunError, match="digest"):
        read_run(durable, "here")


@pytest.mark.parametrize("harm", [lambda path: flip_bit(path, 100), Path.unlink])
def test_the_attempts_tell_the_run_whose_record_is_bad(
    durable: DiskStore, harm: Callable[[Path], None]
) -> None:
    create_run(durable, "here", RUN_ID, TIME)
    data = durable.get(RUN_FILE)
    begin(durable, None)
    harm(durable.root / RUN_FILE)
    assert read_run(durable, "here").run_id == RUN_ID
    assert list(mend_run(durable)) == [RUN_FILE]
    assert durable.get(RUN_FILE) == data
    assert list(mend_run(durable)) == []


def test_a_newer_runs_record_is_told_as_newer(durable: DiskStore) -> None:
    data = seal(RunRecord(format_version=2, run_id=RUN_ID, time=TIME))
    durable.put(RUN_FILE, data)
    with pytest.raises(NewerFormatError, match="upgrade"):
        read_run(durable, "here")
