"""Memory of files on a tmpfs: what is recycled, what stays, and what the next owner finds."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import InvalidArgumentError, ObjectNotFoundError, OutOfSpaceError
from holdfast.format.digests import digest
from holdfast.interop.mindio.file_agent.file_at_path import (
    FileReplacedError,
    finished_files,
    is_replaced,
    make_marker,
    write_file,
)
from holdfast.interop.mindio.file_agent.protocol import FileTarget, Seal
from holdfast.interop.mindio.file_agent.ram_files import (
    LOCK_SECS,
    RamFile,
    RamFiles,
    data_path,
    is_current,
)
from tests.engine.making import memory_folder
from tests.trust.in_process import StepClock

SIZE = 64 * 1024


class Rig:
    """Files in RAM of three slots, and a folder that they are written to."""

    def __init__(self, folder: Path, paths: Path) -> None:
        self.folder, self.paths = folder, paths
        self.clock = StepClock()
        self.files = RamFiles(folder, 3 * SIZE, self.clock)

    def filled(self, data: bytes) -> str:
        name = self.files.reserve_file(len(data)).name
        self.files.allocate_file(name)
        with data_path(self.folder, name).open("r+b") as file:
            file.write(data)
            file.truncate()
        return name

    def sealed(self, name: str, *, fill: int = 0) -> RamFile:
        data = bytes([fill]) * SIZE
        filled = self.filled(data)
        target = make_marker(self.paths / name, self.clock)
        return self.files.seal_file(
            Seal(name=filled, size_bytes=SIZE, digest=digest(data), targets=[target])
        )

    def written(self, name: str, *, fill: int = 0) -> RamFile:
        one = self.sealed(name, fill=fill)
        (target,) = one.pending.values()
        data = data_path(self.folder, one.name)
        self.files.mark_written(
            one, write_file(data, one.digest, target, lambda count: None, self.clock)
        )
        self.clock.sleep(1.0)
        return one

    def has(self, name: str) -> str | None:
        path = str(self.paths / name)
        held = self.files.held_at(path)
        if held is not None and not is_current(held):
            is_later = isinstance(held, FileTarget) and is_replaced(held)
            self.files.forget_outdated(path, held, is_replaced=is_later)
        return self.files.find_file(path).name


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with memory_folder() as folder:
        yield Rig(Path(folder), tmp_path)


def test_the_least_used_file_is_recycled_with_its_pages(rig: Rig) -> None:
    made = [rig.written(name) for name in "abc"]
    rig.clock.sleep(1.0)
    assert rig.has("a") == made[0].name  # used, so that b is the oldest now
    inode = data_path(rig.folder, made[1].name).stat().st_ino
    name = rig.files.reserve_file(SIZE).name
    assert data_path(rig.folder, name).stat().st_ino == inode
    assert (rig.has("a"), rig.has("b"), rig.has("c")) == (made[0].name, None, made[2].name)
    assert (rig.paths / "b").read_bytes() == bytes(SIZE)


def test_a_file_whose_path_was_saved_again_is_recycled_first(rig: Rig) -> None:
    older = rig.written("a")
    inode = data_path(rig.folder, older.name).stat().st_ino
    newer = rig.written("a", fill=1)
    assert rig.has("a") == newer.name
    # There is room for a third one, and its pages would be fresh.
    assert data_path(rig.folder, rig.files.reserve_file(SIZE).name).stat().st_ino == inode


def test_what_is_not_written_or_is_being_read_is_not_recycled(rig: Rig) -> None:
    for name in "ab":
        rig.sealed(name)
    one = rig.written("c")
    fd = os.open(data_path(rig.folder, one.name), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    with pytest.raises(
        OutOfSpaceError, match=f"where {2 * SIZE} are not written yet: .*raise memfs"
    ):
        rig.files.reserve_file(1)
    os.close(fd)
    assert rig.files.reserve_file(1).name
    assert rig.files.used_bytes <= 3 * SIZE


def test_memory_of_a_trainer_that_died_is_given_up_after_a_while(rig: Rig) -> None:
    abandoned = rig.filled(bytes(3 * SIZE))
    with pytest.raises(OutOfSpaceError):
        rig.files.reserve_file(SIZE)
    fd = os.open(data_path(rig.folder, abandoned), os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    rig.clock.sleep(LOCK_SECS + 1)
    with pytest.raises(OutOfSpaceError):
        rig.files.reserve_file(SIZE)  # its trainer lives
    os.close(fd)
    rig.files.reserve_file(SIZE)
    for call in (
        lambda: rig.files.extend(abandoned, 1),
        lambda: rig.files.seal_file(Seal(name=abandoned, size_bytes=0, digest="", targets=[])),
    ):
        with pytest.raises(ObjectNotFoundError, match="save again"):
            call()


def test_a_reservation_grows_within_the_limit(rig: Rig) -> None:
    rig.written("a")
    name = rig.files.reserve_file(SIZE).name
    assert rig.files.extend(name, 2 * SIZE).size_bytes == 2 * SIZE
    assert rig.has("a") is not None
    assert rig.files.extend(name, 3 * SIZE).size_bytes == 3 * SIZE
    assert rig.has("a") is None
    with pytest.raises(OutOfSpaceError):
        rig.files.extend(name, 3 * SIZE + 1)


def test_the_next_owner_finds_all_that_was_sealed(rig: Rig) -> None:
    written, pending = rig.written("a"), rig.sealed("b", fill=1)
    newer = rig.sealed("a", fill=2)
    filling = rig.filled(bytes(10))
    records = rig.folder / "records"
    (records / "torn").write_bytes(b"{")
    # Its writer was killed before it gave it the name of the record that it would have replaced.
    left = records / f".{pending.name}.0.unfinished"
    left.write_bytes((records / pending.name).read_bytes())
    rig.files = RamFiles(rig.folder, 4 * SIZE, rig.clock)
    rig.files.adopt_files()
    assert [one.name for one in rig.files.pending_files()] == [pending.name, newer.name]
    assert (rig.has("a"), rig.has("b")) == (newer.name, pending.name)
    assert rig.files.extend(filling, 20).name == filling
    assert {path.name for path in records.iterdir()} == {pending.name, newer.name}
    rig.files.remove_file(written.name)
    assert not data_path(rig.folder, written.name).exists()
    rig.files.remove_file(newer.name)  # pending: it stays
    assert rig.has("a") == newer.name


def test_what_another_program_has_put_at_the_path_is_not_taken_from_ram(rig: Rig) -> None:
    rig.written("a")
    (rig.paths / "other").write_bytes(b"other")
    (rig.paths / "other").rename(rig.paths / "a")
    assert rig.has("a") is None
    one = rig.sealed("b")
    (target,) = one.pending.values()
    Path(target.marker).unlink()  # a save without the agent
    assert rig.has("b") is None
    assert not one.pending


def test_the_earlier_of_two_that_wait_for_a_path_stays_until_the_later_one_is_there(
    rig: Rig,
) -> None:
    first, second = rig.sealed("a"), rig.sealed("a", fill=1)
    assert rig.has("a") == second.name
    rig.files = RamFiles(rig.folder, 3 * SIZE, rig.clock)
    rig.files.adopt_files()
    first, second = rig.files.pending_files()
    assert rig.has("a") == second.name
    rig.files.drop_target(second, str(rig.paths / "a"))
    assert rig.has("a") == first.name
    third = rig.written("a", fill=2)
    assert not first.pending
    assert rig.has("a") == third.name
    assert (rig.paths / "a").read_bytes() == bytes([2]) * SIZE
    assert os.listdir(rig.paths) == ["a"]


def test_the_earlier_of_two_that_wait_for_a_path_is_given_up_if_room_is_needed(rig: Rig) -> None:
    for fill in range(3):
        one = rig.sealed("a", fill=fill)
    name = rig.files.reserve_file(2 * SIZE).name
    assert rig.files.pending_files() == [one]
    assert len(os.listdir(rig.paths)) == 1
    with pytest.raises(OutOfSpaceError):
        rig.files.extend(name, 2 * SIZE + 1)


def test_a_later_save_is_later_after_the_clock_went_back(rig: Rig) -> None:
    before = rig.sealed("a")
    rig.clock.sleep(-500.0)
    after = rig.sealed("a", fill=1)
    assert rig.has("a") == after.name
    for one in (after, before):
        (target,) = one.pending.values()
        data = data_path(rig.folder, one.name)
        if one is after:
            write_file(data, one.digest, target, lambda count: None, rig.clock)
        else:
            with pytest.raises(FileReplacedError):
                write_file(data, one.digest, target, lambda count: None, rig.clock)
    (target,) = rig.sealed("a").pending.values()
    assert int(target.marker[-27:-11], 16) > (rig.paths / "a").stat().st_mtime_ns


def test_a_file_of_another_size_is_not_sealed(rig: Rig) -> None:
    name = rig.filled(bytes(10))
    with pytest.raises(InvalidArgumentError, match="expected 11 bytes, found 10"):
        rig.files.seal_file(Seal(name=name, size_bytes=11, digest="", targets=[]))


def test_files_that_are_to_be_replaced_are_not_finished(rig: Rig, tmp_path: Path) -> None:
    below = tmp_path / "rank"
    below.mkdir()
    for name in ("a", "a.txt", "b" * 250):
        (below / name).write_text("x")
    assert finished_files(tmp_path) == 3
    markers = [make_marker(below / name, StepClock()).marker for name in ("a", "b" * 250, "new")]
    assert finished_files(tmp_path) == 1
    for marker in markers:
        Path(marker).unlink()
    assert finished_files(tmp_path) == 3
    assert finished_files(tmp_path / "gone") == 0
