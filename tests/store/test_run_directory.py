"""A run's directory by its identity: followed when it is moved, missed when it is gone."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import StorageError
from holdfast.store.contract import REMOTE
from holdfast.store.disk import DiskStore
from holdfast.store.files.file_system import LocalFileSystem
from holdfast.store.run_directory import RunDirectory
from tests.store.places import mounted

CALLS: dict[str, Callable[[DiskStore], object]] = {
    "put": lambda store: store.put("a/x", b"x"),
    "put if absent": lambda store: store.put_if_absent("a/x", b"x"),
    "get": lambda store: store.get("a/y"),
    "open": lambda store: store.open("a/y").__enter__(),
    "list": lambda store: list(store.list("a")),
    "delete": lambda store: store.delete("a/y"),
    "discard unfinished": lambda store: store.discard_unfinished("a"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def store(run: Path) -> DiskStore:
    made = DiskStore(run, SystemClock())
    made.put("a/y", b"y")
    return made


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_store_follows_its_directory(
    store: DiskStore, run: Path, call: Callable[[DiskStore], object]
) -> None:
    new = run.rename(run.with_name("new"))
    call(store)
    assert store.root == new
    assert not run.exists()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_store_never_uses_another_directory_at_its_path(
    store: DiskStore, run: Path, call: Callable[[DiskStore], object]
) -> None:
    run.rename(run.with_name("new"))
    run.mkdir()
    call(store)
    assert not any(run.iterdir())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_store_whose_directory_was_deleted_says_so_and_does_not_make_it(
    store: DiskStore, run: Path, call: Callable[[DiskStore], object]
) -> None:
    shutil.rmtree(run)
    with pytest.raises(StorageError, match=f"the run's directory {run}: it was deleted, or moved"):
        call(store)
    assert not run.exists()
    run.mkdir()
    with pytest.raises(StorageError, match=r"it was deleted, .*; another one is there;"):
        call(store)
    assert not any(run.iterdir())


def test_a_remote_tier_that_is_gone_does_not_end_the_training(run: Path) -> None:
    store = DiskStore(run, SystemClock(), tier=REMOTE)
    store.put("a", b"1")
    shutil.rmtree(run)
    with pytest.raises(StorageError) as caught:
        store.get("a")
    text = str(caught.value)
    assert f"use the run's remote tier {run}: it was deleted" in text
    assert "training goes on in the run's directory; for copies, start it again" in text
    assert "stop this process" not in text


def test_a_store_makes_no_root(run: Path) -> None:
    store = DiskStore(run.with_name("missing"), SystemClock())
    assert list(store.list("a")) == []
    for name in ("put", "put if absent"):
        with pytest.raises(StorageError, match=r"missing; it was deleted, moved or unmounted"):
            CALLS[name](store)
    assert not run.with_name("missing").exists()


def test_a_directory_below_a_folder_that_was_moved_is_followed(tmp_path: Path) -> None:
    (tmp_path / "old" / "run").mkdir(parents=True)
    directory = RunDirectory(tmp_path / "old" / "run")
    assert directory.identity is not None
    (tmp_path / "old").rename(tmp_path / "new")
    assert directory.current_folder() == tmp_path / "new" / "run"
    assert not directory.is_gone()


def test_a_link_that_leads_elsewhere_now_does_not_change_the_directory(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("one")
    directory = RunDirectory(link)
    assert directory.current_folder() == link
    link.unlink()
    link.symlink_to("two")
    assert directory.current_folder() == tmp_path / "one"


def test_an_unmounted_directory_is_no_deleted_one(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "there") as there:
        directory = RunDirectory(there)
        assert directory.current_folder() == there
    with pytest.raises(StorageError, match=r"mounted or unmounted there"):
        directory.current_folder()
    assert not directory.is_gone()


def test_a_write_that_overlaps_a_move_fails_and_may_be_repeated(run: Path) -> None:
    class Moving(LocalFileSystem):
        """Moves the run, and puts a copy in its place, while a file is synced."""

        def sync(self, fd: int) -> None:
            super().sync(fd)
            if not run.with_name("new").exists():
                run.rename(run.with_name("new"))
                shutil.copytree(run.with_name("new"), run)

    store = DiskStore(run, SystemClock(), Moving())
    with pytest.raises(StorageError, match=r"was moved to .*/new meanwhile; try again"):
        store.put("a/x", b"x")
    store.put("a/x", b"x")
    assert store.get("a/x") == b"x"
    assert (run.with_name("new") / "a" / "x").exists()


def test_no_descriptor_outlives_its_directory(run: Path) -> None:
    def opened() -> list[str]:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            if os.path.lexists(f"/proc/self/fd/{fd}"):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [link for link in links if link == str(run)]

    directory = RunDirectory(run)
    assert directory.current_folder() == run
    assert opened() == [str(run)]
    del directory
    assert opened() == []


def test_a_released_directory_holds_no_descriptor_and_is_bound_again_when_used(
    tmp_path: Path,
) -> None:
    def open_here() -> list[str]:
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        return [link for link in links if link == str(tmp_path)]

    directory = RunDirectory(tmp_path)
    assert directory.current_folder() == tmp_path
    assert len(open_here()) == 1
    directory.release()
    directory.release()
    assert not open_here()
    assert directory.current_folder() == tmp_path
