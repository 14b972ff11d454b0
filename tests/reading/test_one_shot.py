"""`save` and `load`: one state in one directory, whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import holdfast
from holdfast import errors
from holdfast.building import directory as building_directory
from holdfast.clock import SystemClock
from holdfast.store.files import renames
from holdfast.trainer.run import Run
from tests.hosts import Host

SCRIPT = Path(__file__).with_name("crashing_save.py")


class Loader:
    """An object that keeps a state."""

    def __init__(self, position: int) -> None:
        self.position = position

    def get_state(self) -> int:
        return self.position

    def set_state(self, position: int) -> None:
        self.position = position


def test_a_jax_tree_comes_back_in_its_sharding_and_without_jax_as_numpy(tmp_path: Path) -> None:
    tree = {
        "w": jnp.arange(8.0),
        "half": jnp.ones((2, 2), jnp.bfloat16),
        "key": jax.random.key(3),
        "data": Loader(41),
        "n": None,
    }
    holdfast.save(tmp_path / "a", tree, metrics={"loss": 0.5})
    plain = holdfast.load(tmp_path / "a")
    assert type(plain["w"]) is np.ndarray
    assert plain["data"] == 41
    assert plain["half"].dtype == jnp.bfloat16
    like = {**tree, "data": Loader(0)}
    found = holdfast.load(tmp_path / "a", like=like)
    assert isinstance(found["w"], jax.Array)
    assert found["w"].sharding == tree["w"].sharding
    assert jnp.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(tree["key"]))
    assert like["data"].position == 41
    with holdfast.open_run(tmp_path / "a") as run:
        assert run.all_steps() == [0]
        assert run.metadata(0).metrics == {"loss": 0.5}


def test_what_exists_is_replaced_only_where_a_save_made_it(tmp_path: Path, one_host: Host) -> None:
    place = tmp_path / "a"
    holdfast.save(place, {"n": 1})
    before = os.stat(place).st_ino
    with pytest.raises(errors.InvalidArgumentError, match="overwrite=True"):
        holdfast.save(place, {"n": 2})
    assert (os.stat(place).st_ino, holdfast.load(place)) == (before, {"n": 1})
    with pytest.raises(errors.UnsupportedLeafError):
        holdfast.save(place, {"n": object()}, overwrite=True)
    assert holdfast.load(place) == {"n": 1}
    holdfast.save(place, {"n": 2}, overwrite=True)
    assert holdfast.load(place) == {"n": 2}
    holdfast.save(tmp_path / "new", {"n": 3}, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a", "new"]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("x")
    (tmp_path / "link").symlink_to(place)
    with holdfast.CheckpointManager(tmp_path / "run") as training:
        training.save(0, {"n": 0}, force=True)
        training.save(1, {"n": 1}, force=True)
    for other in ("photos", "run", "link"):
        with pytest.raises(errors.InvalidArgumentError, match="is not overwritten"):
            holdfast.save(tmp_path / other, {"n": 2}, overwrite=True)
    with pytest.raises(errors.InvalidArgumentError, match=r"directory .*/no to make it in"):
        holdfast.save(tmp_path / "no" / "a", {"n": 2})
    assert sorted(os.listdir(tmp_path)) == ["a", "link", "new", "photos", "run"]


def test_arguments_of_another_type_are_refused(tmp_path: Path) -> None:
    save: Any = holdfast.save
    for metrics in (3, "x", [("a", 1)], {"a": 10**5000}):
        with pytest.raises(errors.InvalidArgumentError, match=r"^metrics.*: expected"):
            save(tmp_path / "a", {"n": 1}, metrics=metrics)
    with pytest.raises(errors.InvalidArgumentError, match="overwrite='yes': expected True or"):
        save(tmp_path / "a", {"n": 1}, overwrite="yes")
    for call in (lambda: save("a\0b", {"n": 1}), lambda: holdfast.load("a\0b")):
        with pytest.raises(errors.InvalidArgumentError, match="expected a path"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_file_that_no_save_made_is_named_and_kept(tmp_path: Path, one_host: Host) -> None:
    place = tmp_path / "a"
    for notes in ("notes.txt", "checkpoints/000000000.1-00000000/notes.txt"):
        holdfast.save(place, {"n": 1}, overwrite=True)
        (place / notes).write_text("mine")
        with pytest.raises(errors.InvalidArgumentError, match=notes):
            holdfast.save(place, {"n": 2}, overwrite=True)
        assert ((place / notes).read_text(), holdfast.load(place)) == ("mine", {"n": 1})
        (place / notes).unlink()
    with holdfast.CheckpointManager(tmp_path / "run", ram=None) as training:
        training.save(0, {"n": 0}, force=True)
    with pytest.raises(errors.InvalidArgumentError, match="is not overwritten"):
        holdfast.save(tmp_path / "run", {"n": 2}, overwrite=True)


def test_a_training_run_goes_on_from_what_was_saved(tmp_path: Path, one_host: Host) -> None:
    holdfast.save(tmp_path / "a", {"w": np.ones(3)})
    with holdfast.CheckpointManager(tmp_path / "a") as training:
        start, state = training.resume({"w": np.zeros(3)})
        assert (start, state["w"].tolist()) == (1, [1.0] * 3)
        training.save(1, {"w": np.full(3, 2.0)}, force=True)
    assert holdfast.load(tmp_path / "a")["w"].tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", ["once", "over"])
def test_a_crash_at_any_call_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, one_host: Host, mode: str
) -> None:
    process = one_host.start(SCRIPT, tmp_path / "saved", mode, stem="numpy")
    output, errors_text = process.communicate(timeout=100)
    assert process.returncode == 0, errors_text
    *states, last = output.split()
    old = "1" if mode == "over" else "none"
    assert last == "done"
    assert len(states) > 10
    # First only the old state is found, and from the rename on only the new one.
    assert states == [old] * states.count(old) + ["2"] * states.count("2")
    assert states.count(old) > 10
    # The last save has removed what those before it left.
    assert sorted(os.listdir(tmp_path)) == ["saved", "warm"]


def test_a_save_removes_leftovers_but_not_what_a_live_save_builds(tmp_path: Path) -> None:
    saved, other = tmp_path / "saved", tmp_path / ".other.0123456789ab.unfinished"
    clock = SystemClock()
    for left in (tmp_path / ".saved.0123456789ab.unfinished", other):
        (left / "checkpoints").mkdir(parents=True)
    with building_directory.locked_directory(saved, clock) as building:
        holdfast.save(saved, {"w": np.ones(3)})
        assert sorted(os.listdir(tmp_path)) == sorted([building.name, other.name, saved.name])
    assert sorted(os.listdir(tmp_path)) == [other.name, saved.name]


def test_an_old_state_that_a_crash_left_under_a_hidden_name_stays_until_a_new_one_is_there(
    tmp_path: Path,
) -> None:
    saved, hidden = tmp_path / "saved", tmp_path / ".saved.0123456789ab.unfinished"
    holdfast.save(saved, {"w": np.ones(3)})
    saved.rename(hidden)
    with pytest.raises(errors.UnsupportedLeafError):
        holdfast.save(saved, {"w": object()})
    assert os.listdir(tmp_path) == [hidden.name]
    holdfast.save(saved, {"w": np.ones(3)})
    assert os.listdir(tmp_path) == [saved.name]


def test_a_rename_to_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    with pytest.raises(FileExistsError):
        renames.rename_to_new(one, other)
    renames.rename_to_new(one, tmp_path / "third")
    assert sorted(os.listdir(tmp_path)) == ["other", "third"]


def test_two_directories_are_exchanged(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    renames.exchange(tmp_path / "one", tmp_path / "other")
    assert os.listdir(tmp_path / "one") == ["other"]
    assert os.listdir(tmp_path / "other") == ["one"]
    with pytest.raises(FileNotFoundError):
        renames.exchange(tmp_path / "one", tmp_path / "missing")


class Meanwhile:
    """An object whose state is taken while a save is under way: another program acts then."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def get_state(self) -> int:
        self._act()
        return 0

    def set_state(self, state: int) -> None:
        pass


def test_a_file_that_is_put_there_during_a_save_is_kept(tmp_path: Path) -> None:
    place = tmp_path / "a"
    holdfast.save(place, {"n": 1})
    late = Meanwhile(lambda: (place / "notes.txt").write_text("mine"))
    with pytest.raises(errors.InvalidArgumentError, match=r"found notes\.txt"):
        holdfast.save(place, {"n": 2, "late": late}, overwrite=True)
    assert (place / "notes.txt").read_text() == "mine"
    assert holdfast.load(place) == {"n": 1}
    assert os.listdir(tmp_path) == ["a"]


def test_a_training_that_begins_there_during_a_save_is_kept(tmp_path: Path, one_host: Host) -> None:
    place = tmp_path / "a"
    holdfast.save(place, {"n": 1})

    def train() -> None:
        with holdfast.CheckpointManager(place) as training:
            start, state = training.resume({"n": 0})
            training.save(start, {"n": state["n"] + 10}, force=True)

    with pytest.raises(errors.InvalidArgumentError, match="is not overwritten"):
        holdfast.save(place, {"n": 2, "late": Meanwhile(train)}, overwrite=True)
    assert holdfast.load(place) == {"n": 11}
    assert os.listdir(tmp_path) == ["a"]


def replaced(place: Path, act: Callable[[Path], object], *, after: int) -> None:
    """Replace what is at `place`; `act` gets its path right after the check of that number."""
    clock, count = SystemClock(), 0

    def check(path: Path) -> None:
        nonlocal count
        building_directory.check_replaceable(path, directory=place, clock=clock)
        count += 1
        if count == after:
            act(path)

    with building_directory.locked_directory(place, clock) as building:
        (building / "new").touch()
        building_directory.put_in_place(building, place, check)


def put_notes(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def test_a_file_that_came_out_of_the_exchange_undoes_it(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "a", {"n": 1})
    with pytest.raises(errors.InvalidArgumentError, match=r"save to .*/a: .*found notes\.txt"):
        replaced(tmp_path / "a", put_notes, after=1)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert holdfast.load(tmp_path / "a") == {"n": 1}
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_is_put_there_after_the_exchange_is_kept_and_so_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "a"
    holdfast.save(place, {"n": 1})
    replaced(place, put_notes, after=2)
    (kept,) = tmp_path.glob(".a.*")
    assert f"remove {kept}" in caplog.text
    assert "found notes.txt; it is kept" in caplog.text
    assert os.listdir(place) == ["new"]
    # The next save finds it as a leftover.
    (place / "new").rename(tmp_path / "elsewhere")
    place.rmdir()
    holdfast.save(place, {"n": 3})
    assert (kept / "notes.txt").read_text() == "mine"
    assert holdfast.load(kept) == {"n": 1}


@pytest.mark.parametrize("times", [1, 3])
def test_a_load_reads_the_new_state_if_a_save_replaces_the_old_one_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    path, values = tmp_path / "weights", iter(range(1, times + 1))
    holdfast.save(path, {"w": np.full(1000, 0)})
    restore = Run.restore

    def late(run: Run, *arguments: Any, **options: Any) -> Any:
        value = next(values, None)
        if value is not None:
            holdfast.save(path, {"w": np.full(1000, value)}, overwrite=True)
        return restore(run, *arguments, **options)

    monkeypatch.setattr(Run, "restore", late)
    assert set(holdfast.load(path)["w"]) == {times}


def test_a_load_of_what_is_damaged_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tries = tmp_path / "weights", []
    holdfast.save(path, {"w": np.zeros(1000)})
    (manifest,) = (path / "checkpoints" / "manifests").iterdir()
    manifest.write_bytes(b"{}")
    restore = Run.restore
    monkeypatch.setattr(
        Run, "restore", lambda *args, **more: tries.append(1) or restore(*args, **more)
    )
    with pytest.raises(errors.CheckpointDamagedError):
        holdfast.load(path)
    assert tries == [1]


def test_what_another_save_removes_is_left_to_it(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "a", {"n": 1})
    with open_folder(tmp_path / "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        replaced(tmp_path / "a", put_notes, after=3)
        assert os.listdir(tmp_path / "a") == ["new"]
        (left,) = tmp_path.glob(".a.*")
        assert holdfast.load(left) == {"n": 1}


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)
