"""A name that must be free is taken by one writer where there are no hard links either."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import ObjectNotFoundError, StorageError
from holdfast.store.disk import DiskStore
from holdfast.store.files import free_names
from holdfast.store.files.file_system import LocalFileSystem
from holdfast.store.files.free_names import CLAIM_SECS, WAIT_SECS
from tests.engine.making import memory_folder
from tests.store.crash_states import deaths, materialise, power_losses
from tests.store.recording import RecordingFileSystem
from tests.trust.in_process import StepClock

CLAIM = ".b.claim-{}.unfinished"
ROUNDS = 5


class Linkless(LocalFileSystem):
    """A file system without hard links, whose rename always replaces, as some of FUSE."""

    def __init__(self, number: int = errno.EOPNOTSUPP) -> None:
        self._number = number

    def link(self, source: Path, target: Path) -> None:
        raise OSError(self._number, os.strerror(self._number))

    def rename_to_new(self, source: Path, target: Path) -> None:
        if os.path.lexists(target):
            raise FileExistsError(target)
        os.rename(source, target)


class Meanwhile(Linkless):
    """Lets another process act right after a claim was made."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        if path.name == CLAIM.format(0):
            self._act()
        return fd


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_file_system_without_links_takes_names_and_is_reported_once(
    tmp_path: Path,
    number: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(free_names, "_reported_devices", set())
    store = DiskStore(tmp_path, StepClock(), Linkless(number))
    assert store.put_if_absent("a/b", b"first")
    assert not store.put_if_absent("a/b", b"second")
    assert store.get("a/b") == b"first"
    assert names(tmp_path / "a") == ["b"]
    (record,) = caplog.records
    assert "has no hard links" in record.message


def test_another_error_of_a_link_is_raised(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, StepClock(), Linkless(errno.EIO))
    with pytest.raises(StorageError, match="Input/output error"):
        store.put_if_absent("a/b", b"x")
    assert names(tmp_path / "a") == []


def test_a_claim_of_a_process_that_died_is_replaced(tmp_path: Path) -> None:
    clock = StepClock()
    store = DiskStore(tmp_path, clock, Linkless())
    (tmp_path / "a").mkdir()
    for number in range(2):
        (tmp_path / "a" / CLAIM.format(number)).touch()
    began_secs = clock.secs
    assert store.put_if_absent("a/b", b"x")
    assert clock.secs - began_secs > 2 * CLAIM_SECS
    assert names(tmp_path / "a") == ["b"]


def test_of_several_that_replace_a_claim_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_names, "CLAIM_SECS", 0.1)
    monkeypatch.setattr(free_names, "SETTLE_SECS", 0.1)
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / CLAIM.format(0)).touch()
        barrier = threading.Barrier(4, timeout=240)

        def put(index: int, barrier: threading.Barrier = barrier, key: str = f"{number}/b") -> bool:
            store = DiskStore(tmp_path, SystemClock(), Linkless())
            barrier.wait()
            return store.put_if_absent(key, b"%d" % index)

        with ThreadPoolExecutor(4) as pool:
            won = [*pool.map(put, range(4))]
        assert sum(won) == 1
        assert (folder / "b").read_bytes() == b"%d" % won.index(True)
        assert names(folder) == ["b"]


def test_a_claim_whose_holder_lives_here_is_not_replaced(tmp_path: Path) -> None:
    clock = StepClock()
    store = DiskStore(tmp_path, clock, Linkless())
    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / CLAIM.format(0)).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began_secs = clock.secs
        with pytest.raises(StorageError, match=r"kept the name claimed for 60 s.*stopped process"):
            store.put_if_absent("a/b", b"x")
    assert WAIT_SECS <= clock.secs - began_secs < WAIT_SECS + 1
    assert names(tmp_path / "a") == [CLAIM.format(0)]
    assert store.put_if_absent("a/b", b"x")


def test_a_process_whose_claim_was_replaced_writes_nothing(tmp_path: Path) -> None:
    def replace() -> None:
        (tmp_path / "a" / CLAIM.format(1)).touch()

    store = DiskStore(tmp_path, StepClock(), Meanwhile(replace))
    with pytest.raises(StorageError, match="another one has replaced the claim; try again"):
        store.put_if_absent("a/b", b"x")
    assert names(tmp_path / "a") == [CLAIM.format(0), CLAIM.format(1)]


def test_a_name_that_was_taken_before_the_claim_is_not_replaced(tmp_path: Path) -> None:
    other = DiskStore(tmp_path, StepClock())
    store = DiskStore(
        tmp_path, StepClock(tokens=1000), Meanwhile(lambda: other.put("a/b", b"other"))
    )
    assert not store.put_if_absent("a/b", b"own")
    assert (store.get("a/b"), names(tmp_path / "a")) == (b"other", ["b"])


def test_a_crash_leaves_the_whole_object_or_none_and_the_name_can_be_taken(tmp_path: Path) -> None:
    recorder = RecordingFileSystem({"disk": tmp_path}, Linkless())
    recorder.make_folder(tmp_path / "run")
    store = DiskStore(tmp_path / "run", StepClock(), recorder)
    store.put("a/other", b"x")
    first = len(recorder.log)
    assert store.put_if_absent("a/b", b"first")
    recorder.add_mark("put")
    states = [
        *deaths(recorder.log, first),
        *power_losses(recorder.log, ["disk"], first),
    ]
    with_claim = 0
    for state in {(state.key, state.done_count): state for state in states}.values():
        with memory_folder() as folder:
            materialise(state.tree, {"disk": Path(folder)})
            place = Path(folder) / "run"
            with_claim += (place / "a" / CLAIM.format(0)).exists()
            left = DiskStore(place, StepClock(tokens=1000), Linkless())
            is_put = "put" in recorder.log.marks(state.done_count)
            assert left.put_if_absent("a/b", b"second") is not _has(left, b"first")
            assert not is_put or left.get("a/b") == b"first", state.description
            left.discard_unfinished("a")
            assert names(place / "a") == ["b", "other"], state.description
    assert with_claim


def _has(store: DiskStore, data: bytes) -> bool:
    try:
        return store.get("a/b") == data
    except ObjectNotFoundError:
        return False
