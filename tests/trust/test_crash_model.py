"""The crashes that are made of a record are those that POSIX allows: tables of what may be left."""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.store.disk import DiskStore
from holdfast.store.files.file_system import LOCAL, FileSystem
from tests.engine.making import memory_folder
from tests.store import recording
from tests.store.crash_states import (
    LOST,
    CrashState,
    at_rest,
    deaths,
    materialise,
    power_losses,
)
from tests.store.recording import Log, Mark, RecordingFileSystem
from tests.trust.crash_scenarios import RecordedHost, places, preservation

Found = dict[str, bytes | None]
"""Path to bytes; None for a folder."""


class Disk:
    """A recorded folder, with calls as short as the tables want them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: FileSystem = RecordingFileSystem({"disk": root})
        self.log: Log = self.files.log  # type: ignore[attr-defined]

    def write(self, name: str, data: bytes, *, sync: bool = False, flags: int = os.O_CREAT) -> None:
        fd = self.files.open(self.root / name, os.O_WRONLY | flags)
        if data:
            assert self.files.write(fd, memoryview(data)) == len(data)
        if sync:
            self.files.sync(fd)
        self.files.close(fd)

    def resize(self, name: str, size_bytes: int, *, allocate: bool = False) -> None:
        fd = self.files.open(self.root / name, os.O_WRONLY)
        (self.files.allocate if allocate else self.files.truncate)(fd, size_bytes)
        self.files.close(fd)

    def sync(self, name: str = ".") -> None:
        fd = self.files.open(self.root / name, os.O_RDONLY)
        self.files.sync(fd)
        self.files.close(fd)

    def move(self, one: str, other: str) -> None:
        self.files.rename(self.root / one, self.root / other)

    def link(self, one: str, other: str) -> None:
        self.files.link(self.root / one, self.root / other)

    def remove(self, name: str) -> None:
        self.files.unlink(self.root / name)

    def folder(self, name: str) -> None:
        self.files.make_folder(self.root / name)

    def no_folder(self, name: str) -> None:
        self.files.remove_folder(self.root / name)


def unsynced(disk: Disk) -> None:
    disk.write("a", b"1234")


def synced_without_its_name(disk: Disk) -> None:
    disk.write("a", b"1234", sync=True)


def named_without_its_bytes(disk: Disk) -> None:
    disk.write("a", b"1234")
    disk.sync()


def all_synced(disk: Disk) -> None:
    disk.write("a", b"1234", sync=True)
    disk.sync()


def put_over_an_old_one(disk: Disk) -> None:
    disk.write("a", b"old", sync=True)
    disk.sync()
    disk.write("t", b"new", sync=True)
    disk.move("t", "a")


def put_and_named(disk: Disk) -> None:
    put_over_an_old_one(disk)
    disk.sync()


def overwritten_in_place(disk: Disk) -> None:
    disk.write("a", b"old!", sync=True)
    disk.sync()
    disk.write("a", b"new?", flags=0)


def two_writes(disk: Disk) -> None:
    disk.write("a", b"", sync=True)
    disk.sync()
    fd = disk.files.open(disk.root / "a", os.O_WRONLY)
    disk.files.write(fd, memoryview(b"1"))
    disk.files.write(fd, memoryview(b"2"))
    disk.files.close(fd)


def removed(disk: Disk) -> None:
    all_synced(disk)
    disk.remove("a")


def removed_and_synced(disk: Disk) -> None:
    removed(disk)
    disk.sync()


def linked(disk: Disk) -> None:
    all_synced(disk)
    disk.link("a", "b")
    disk.remove("a")


def cut_and_extended(disk: Disk) -> None:
    all_synced(disk)
    disk.resize("a", 2)
    disk.resize("a", 3, allocate=True)


def below_a_folder_without_a_name(disk: Disk) -> None:
    disk.folder("f")
    disk.write("f/a", b"1234", sync=True)
    disk.sync("f")


def removed_with_its_folder(disk: Disk) -> None:
    below_a_folder_without_a_name(disk)
    disk.sync()
    disk.remove("f/a")
    disk.no_folder("f")


def moved_between_folders(disk: Disk) -> None:
    disk.folder("f")
    disk.write("a", b"1234", sync=True)
    disk.sync()
    disk.move("a", "f/a")
    disk.sync("f")


WHOLE: Found = {"a": b"1234"}

TABLE: list[tuple[Callable[[Disk], None], list[Found]]] = [
    (unsynced, [{}, {"a": b""}, {"a": b"12"}, WHOLE]),
    (synced_without_its_name, [{}, WHOLE]),
    (named_without_its_bytes, [{"a": b""}, {"a": b"12"}, WHOLE]),
    (all_synced, [WHOLE]),
    # The new name may outlast a loss that the temporary one did not.
    (put_over_an_old_one, [{"a": b"old"}, {"a": b"old", "t": b"new"}, {"a": b"new"}]),
    (put_and_named, [{"a": b"new"}]),
    (overwritten_in_place, [{"a": b"old!"}, {"a": b"ned!"}, {"a": b"new?"}]),
    (two_writes, [{"a": b""}, {"a": b"1"}, {"a": b"\x002"}, {"a": b"12"}]),
    (removed, [WHOLE, {}]),
    (removed_and_synced, [{}]),
    (linked, [WHOLE, {}, {"b": b"1234"}, {"a": b"1234", "b": b"1234"}]),
    (cut_and_extended, [WHOLE, {"a": b"12"}, {"a": b"123"}, {"a": b"12\x00"}]),
    (below_a_folder_without_a_name, [{}, {"f": None, "f/a": b"1234"}]),
    (removed_with_its_folder, [{"f": None, "f/a": b"1234"}, {"f": None}, {}]),
    (
        moved_between_folders,
        [{"f": None, "f/a": b"1234"}, {"a": b"1234", "f": None, "f/a": b"1234"}],
    ),
]


def found_in(root: Path) -> Found:
    """All there is below a folder."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def found_of(state: CrashState) -> Found:
    """What a state is once it is made."""
    with memory_folder() as folder:
        materialise(state.tree, {"disk": Path(folder)})
        return found_in(Path(folder))


def in_order(found: list[Found]) -> list[list[tuple[str, bytes | None]]]:
    """Each once, in an order that is the same for the same."""
    return sorted({tuple(sorted(one.items(), key=str)) for one in found}, key=str)  # type: ignore[return-value]


@pytest.mark.parametrize(("act", "left"), TABLE, ids=lambda x: getattr(x, "__name__", ""))
def test_the_loss_of_power_leaves_what_may_be_left_and_nothing_else(
    act: Callable[[Disk], None], left: list[Found], tmp_path: Path
) -> None:
    disk = Disk(tmp_path)
    act(disk)
    states = power_losses(disk.log, ["disk"], len(disk.log))
    assert in_order([found_of(state) for state in states]) == in_order(left)


@pytest.mark.parametrize("act", [act for act, _ in TABLE], ids=lambda x: x.__name__)
def test_deaths_leave_all_that_was_done(act: Callable[[Disk], None], tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    act(disk)
    *_, last = deaths(disk.log)
    assert found_of(last) == found_in(tmp_path)
    assert [s.done_count for s in deaths(disk.log) if s.description == "killed"] == list(
        range(len(disk.log) + 1)
    )


def test_a_death_within_a_write_leaves_half_of_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    unsynced(disk)
    found = [found_of(state) for state in deaths(disk.log)]
    assert found == [{}, {"a": b""}, {"a": b"12"}, WHOLE]


def test_a_state_at_rest_loses_nothing_more(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    below_a_folder_without_a_name(disk)
    disk.log.operations.append(Mark("promised"))
    disk.link("f/a", "b")
    for state in power_losses(disk.log, ["disk"]):
        rest = at_rest(state, disk.log)
        (one,) = power_losses(rest, ["disk"], len(rest))
        assert one.key == state.key
        assert rest.marks() == disk.log.marks(state.done_count)


def test_too_many_combinations_are_sampled_with_every_single_loss_among_them(
    tmp_path: Path,
) -> None:
    disk = Disk(tmp_path)
    names = [f"{number:02d}" for number in range(20)]
    for name in names:
        disk.write(name, b"")
    options = {"all_max": 100, "sample_count": 10, "seed": 5}
    states = list(power_losses(disk.log, ["disk"], len(disk.log), **options))
    again = list(power_losses(disk.log, ["disk"], len(disk.log), **options))
    assert [s.key for s in states] == [s.key for s in again]
    kept = {tuple(sorted(s.tree.folders[s.tree.roots["disk"]])) for s in states}
    assert {(), tuple(names)} <= kept
    assert {(name,) for name in names} <= kept
    assert {tuple(n for n in names if n != name) for name in names} <= kept
    assert {tuple(names[:count]) for count in range(21)} <= kept
    assert LOST == 0
    assert len(kept) > 60


def test_hard_links_are_made_as_such(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    all_synced(disk)
    disk.link("a", "b")
    *_, state = deaths(disk.log)
    with memory_folder() as folder:
        materialise(state.tree, {"disk": Path(folder)})
        assert os.path.samefile(f"{folder}/a", f"{folder}/b")


def test_what_would_escape_the_record_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside").write_bytes(b"x")
    disk = Disk(inside)
    with pytest.raises(ValueError, match="it is in none of"):
        disk.write(str(tmp_path / "outside"), b"y")
    (inside / "past").write_bytes(b"")
    with pytest.raises(ValueError, match="created without the recording file system"):
        disk.write("past", b"y", flags=0)
    assert len(disk.log) == 0
    with pytest.raises(FileNotFoundError):
        disk.move("never", "a")


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    example = textwrap.dedent(
        recording.__doc__.partition(".FileSystem`:\n")[2].partition("Assumes")[0]
    )
    checked: list[str] = []

    class MyStore(DiskStore):
        def __init__(self, root: Path, files: FileSystem = LOCAL) -> None:
            super().__init__(root, SystemClock(), files)

        def get(self, key: str) -> bytes:
            checked.append(key)
            return super().get(key)

    names = {
        "RecordingFileSystem": RecordingFileSystem,
        "power_losses": power_losses,
        "materialise": materialise,
        "tempfile": tempfile,
        "Path": Path,
        "MyStore": MyStore,
        "root": tmp_path,
    }
    exec(example, names)
    assert checked == ["a"]


def test_the_record_of_the_stores_makes_what_the_stores_made(tmp_path: Path) -> None:
    host = RecordedHost(tmp_path)
    try:
        preservation(host)
    finally:
        host.close()
    *_, last = deaths(host.recorder.log)
    with memory_folder() as folder:
        made = places(Path(folder))
        for place in made.values():
            place.mkdir()
        materialise(last.tree, made)
        recorded = {k: v for k, v in found_in(Path(folder)).items() if v is not None}
    real = {k: v for k, v in found_in(tmp_path).items() if v is not None}
    # The agent's own files do not pass through the stores.
    own = (
        "disk/runs/one/events/",
        "disk/runs/one/leases/",
        "shm/agent/words",
        "shm/agent/group.json",
        "shm/agent/attempt-",
        "shm/agent/place",
    )
    assert recorded == {k: v for k, v in real.items() if not k.startswith(own)}
    assert len(recorded) > 10
