"""`holdfast.building`: a checkpoint in parts, which is at its place whole or not at all."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.building import STEP, CheckpointBuilder, NewArray, PartTask, WrittenPart, forms_grid
from holdfast.errors import InvalidArgumentError, ObjectNotFoundError, UnsupportedLeafError
from holdfast.reading import Region, open_checkpoint

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)
LEFT, RIGHT = ((0, 0), (4, 3)), ((0, 3), (4, 6))
NOTE = NewArray(path=("notes", "of 1"), shape=(3,), dtype="uint8", writers={((0,), (3,)): 1})
WEIGHTS = NewArray(path=("model", "w"), shape=(4, 6), dtype="float32", writers={LEFT: 1, RIGHT: 0})


def region_bytes(path: tuple[str | int, ...], region: Region) -> memoryview:
    if path == NOTE.path:
        return memoryview(b"abc")
    (top, left), (bottom, right) = region
    return np.ascontiguousarray(WEIGHT[top:bottom, left:right]).reshape(-1).view(np.uint8).data


def written(task: PartTask) -> WrittenPart:
    """Write a part as the process of its rank does, to which the task was sent."""
    sent: PartTask = pickle.loads(pickle.dumps(task))
    return sent.write(region_bytes, [NOTE] if sent.rank == 1 else [])


def test_parts_of_two_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "one"
    for number in (1, 2):  # the second one replaces the first
        builder = CheckpointBuilder(place, [WEIGHTS], 2)
        parts = [written(task) for task in builder.tasks]
        builder.commit(parts[0], own=[NOTE], values={("count",): number})
        builder.close()
    assert os.listdir(tmp_path) == ["one"]
    state = holdfast.load(place, framework="numpy")
    np.testing.assert_array_equal(state["model"]["w"], WEIGHT)
    assert (bytes(state["notes"]["of 1"]), state["count"]) == (b"abc", 2)
    assert [*open_checkpoint(place, STEP).arrays] == [WEIGHTS.path, NOTE.path]


def test_without_all_parts_nothing_is_at_the_place(tmp_path: Path) -> None:
    builder = CheckpointBuilder(tmp_path / "one", [WEIGHTS], 2)
    first = written(builder.tasks[0])
    with pytest.raises(ObjectNotFoundError):
        builder.commit(first)
    builder.close()
    assert os.listdir(tmp_path) == []


def test_a_part_of_another_rank_is_no_first_one(tmp_path: Path) -> None:
    builder = CheckpointBuilder(tmp_path / "one", [WEIGHTS], 2)
    with pytest.raises(InvalidArgumentError, match="found that of rank 1"):
        builder.commit(written(builder.tasks[1]))
    builder.close()


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "mine").touch()
    with pytest.raises(InvalidArgumentError, match="is not overwritten"):
        CheckpointBuilder(tmp_path / "one", [WEIGHTS], 1)
    assert os.listdir(tmp_path) == ["one"]


def test_arrays_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    regions = {((0,), (3,)): 0, ((3,), (4,)): 0, ((5,), (9,)): 0}
    assert not forms_grid((9,), regions)
    for array, error in [
        (NewArray(path=("a",), shape=(9,), dtype="int8", writers=regions), InvalidArgumentError),
        (
            NewArray(path=("a",), shape=(3,), dtype="text", writers=NOTE.writers),
            UnsupportedLeafError,
        ),
    ]:
        with pytest.raises(error):
            CheckpointBuilder(tmp_path / "one", [array], 1)
    assert os.listdir(tmp_path) == []
