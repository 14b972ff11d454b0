"""A reader of a run whose processes each kept states of objects, such as iterators."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import errors
from holdfast.adapt.numpy_state import NumpyFramework
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.saving.part_writer import write_part
from holdfast.store.disk import DiskStore
from holdfast.trainer.planning import Planner, Taking
from tests.attempts import checkpoint_id

RUN_ID = "0123456789abcdef0123456789abcdef"
TIME = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
ID = checkpoint_id(10)


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def get_state(self) -> int:
        return self.position

    def set_state(self, position: int) -> None:
        self.position = position


def state(rank: int) -> dict[str, Any]:
    return {"w": np.arange(5), "data": [Loader(100 + rank), 7], "eval": Loader(200 + rank)}


def saved_by(count: int, directory: Path) -> Path:
    """A run with one checkpoint of `count` processes."""
    directory.mkdir()
    store = DiskStore(directory, SystemClock())
    create_run(store, str(directory), RUN_ID, TIME)
    start = AttemptStart(run_id=RUN_ID, origin=None, host="h", pid=1, time=TIME)
    begin_attempt(store, ID.attempt, start)
    for rank in range(count):
        snapshot = NumpyFramework().snapshot(state(rank))
        plan = Planner(RUN_ID, rank, count).plan(snapshot, Taking(id=ID, time=TIME, metrics=None))
        write_part(store, plan, snapshot.chunk_bytes)
    commit(store, ID, count)
    return directory


def test_states_of_several_processes_are_left_out_and_can_be_asked_for(tmp_path: Path) -> None:
    with holdfast.open_run(saved_by(3, tmp_path / "run")) as run:
        found = run.restore()
        assert found["w"].tolist() == [0, 1, 2, 3, 4]
        # The item after the one that is left out keeps its index.
        assert found["data"] == [None, 7]
        assert "eval" not in found
        assert run.last_restore is not None
        assert run.last_restore.left_out == ("data/0", "eval")
        assert run.process_values(10) == {"data/0": [100, 101, 102], "eval": [200, 201, 202]}
        assert run.restore(only="data") == {"data": [None, 7]}
        with pytest.raises(
            errors.StructureMismatchError, match=r"each object \(data/0, eval\), .* found 3"
        ):
            run.restore(like=state(0))
        # However many processes there are, what is left out has to be named.
        like = {"w": np.zeros(5, int), "data": [None, 0]}
        with pytest.raises(errors.StructureMismatchError, match="eval: expected nothing") as raised:
            run.restore(like=like)
        assert "data/0: expected None, found object with a state" in str(raised.value)
        assert run.restore(like=like, partial=["data/0", "eval"])["data"] == [None, 7]


def test_objects_that_partial_names_are_kept_with_another_number_of_processes(
    tmp_path: Path,
) -> None:
    with holdfast.open_run(saved_by(3, tmp_path / "run")) as run:
        like = state(-50)
        run.restore(like=like, partial=["data/0", "eval"])
        assert (like["data"][0].position, like["eval"].position) == (50, 150)
        assert run.last_restore is not None
        assert run.last_restore.kept == run.last_restore.left_out == ("data/0", "eval")
        with pytest.raises(
            errors.StructureMismatchError, match=r"1 state of each object \(data/0\)"
        ):
            run.restore(like=like, partial="eval")


def test_an_object_outside_of_only_keeps_its_state(tmp_path: Path) -> None:
    with holdfast.open_run(saved_by(1, tmp_path / "run")) as run:
        like = state(-50)
        run.restore(like=like, only="eval")
        assert (like["data"][0].position, like["eval"].position) == (50, 200)


def test_states_of_one_process_are_restored(tmp_path: Path) -> None:
    with holdfast.open_run(saved_by(1, tmp_path / "run")) as run:
        assert run.restore(only=["data/0", "eval"]) == {"data": {0: 100}, "eval": 200}
        like = state(-50)
        found = run.restore(like=like)
        assert (found["data"][0], found["eval"].position) == (like["data"][0], 200)
        other = {**state(-50), "new": Loader(1)}
        with pytest.raises(errors.StructureMismatchError, match="new: expected object with a stat"):
            run.restore(like=other)
        assert run.restore(like=other, partial="new")["new"].position == 1
        assert other["eval"].position == 200
