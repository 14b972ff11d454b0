"""Reading a checkpoint whose arrays and values have other names by now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.errors import InvalidArgumentError, StructureMismatchError
from tests.hosts import Host

STATE: dict[str, Any] = {
    "model": {"module.layer.weight": np.arange(6.0), "module.bias": np.ones(2)},
    "opt": [{"mu": np.full(3, 2.0)}, {"mu": np.full(3, 3.0)}],
    "empty": {},
    "epoch": 7,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    holdfast.save(tmp_path / "saved", STATE)
    return tmp_path / "saved"


def test_a_beginning_of_names_is_replaced(saved: Path) -> None:
    state = holdfast.load(saved, rename={"model/module.": "model/"})
    assert [*state["model"]] == ["bias", "layer.weight"]
    np.testing.assert_array_equal(state["model"]["layer.weight"], np.arange(6.0))
    assert state["epoch"] == 7
    assert state["empty"] == {}


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_arrays_of_each_framework_get_new_names(framework: str, tmp_path: Path) -> None:
    module = pytest.importorskip(framework, reason=f"{framework} cannot be had here")
    kind = {"numpy": "ndarray", "jax": "Array", "torch": "Tensor"}[framework]
    holdfast.save(tmp_path / "saved", {"module.w": np.arange(6, dtype=np.float32)})
    rename = {"module.": ""}
    state = holdfast.load(tmp_path / "saved", rename=rename, framework=framework)
    assert isinstance(state["w"], getattr(module, kind))
    like = {"w": state["w"] * 0}
    for filled in (state, holdfast.load(tmp_path / "saved", like=like, rename=rename)):
        np.testing.assert_array_equal(np.asarray(filled["w"]), np.arange(6))


def test_like_only_and_partial_mean_the_new_names(saved: Path) -> None:
    like = {"net": {"layer.weight": np.zeros(6), "new": np.zeros(1)}, "epoch": 0}
    rename = {"model/module.": "net/"}
    state = holdfast.load(saved, like=like, rename=rename, partial=["net/new", "net/bias", "opt"])
    np.testing.assert_array_equal(state["net"]["layer.weight"], np.arange(6.0))
    assert (state["net"]["new"], state["epoch"]) == (np.zeros(1), 7)
    assert holdfast.load(saved, only="net/bias", rename=rename).keys() == {"net"}


def test_a_function_renames_and_lists_keep_their_places(saved: Path) -> None:
    state = holdfast.load(saved, rename=lambda name: f"old/{name.replace('module.', '')}")
    assert [*state] == ["old"]
    assert [*state["old"]["model"]] == ["bias", "layer.weight"]
    assert isinstance(state["old"]["opt"], list)
    np.testing.assert_array_equal(state["old"]["opt"][1]["mu"], np.full(3, 3.0))
    assert state["old"]["empty"] == {}
    other = holdfast.load(saved, rename={"opt/1": "opt/5"})["opt"]
    assert {key: [*value] for key, value in other.items()} == {0: ["mu"], 5: ["mu"]}


def test_the_longest_beginning_is_replaced_once(saved: Path) -> None:
    state = holdfast.load(saved, rename={"model/": "a/", "model/module.b": "model/B", "opt": "m"})
    assert [*state["model"]] == ["Bias"]
    assert [*state["a"]] == ["module.layer.weight"]
    assert [*state] == ["a", "empty", "epoch", "m", "model"]


def test_what_already_has_the_new_names_is_read_as_it_is(saved: Path) -> None:
    assert holdfast.load(saved, rename={"mdl/": "model/"}).keys() == STATE.keys()


@pytest.mark.parametrize(
    ("rename", "error", "text"),
    [
        ({"modul/": "m/"}, StructureMismatchError, "begin with 'modul/' (rename=...), found none"),
        ({"modul/": ""}, StructureMismatchError, "found none in the checkpoint; it has"),
        ({"model/module.bias": "epoch"}, InvalidArgumentError, "found 'epoch' for both"),
        ({"model/module.bias": "epoch/b"}, InvalidArgumentError, "inside of 'epoch'"),
        ({"model/module.": "model//"}, InvalidArgumentError, "whose keys are not empty"),
        ({"opt": 1}, InvalidArgumentError, "expected a dict from beginnings"),
        ("opt", InvalidArgumentError, "expected a dict from beginnings"),
        (lambda name: None, InvalidArgumentError, "as a str, found None"),
        (lambda name: 1 // 0, InvalidArgumentError, "found ZeroDivisionError"),
    ],
)
def test_a_renaming_that_cannot_be_is_refused(
    saved: Path, rename: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        holdfast.load(saved, rename=rename)


def test_a_difference_by_a_name_says_how_to_rename(saved: Path) -> None:
    like = {**STATE, "model": {"layer.weight": np.zeros(6), "bias": np.ones(2)}}
    with pytest.raises(StructureMismatchError, match=r"rename=\.\.\."):
        holdfast.load(saved, like=like)


def test_numbers_that_are_strings_stay_strings(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "saved", {"blocks": {"1": np.ones(1)}})
    like = {"blocks": {"0": np.zeros(1)}}
    state = holdfast.load(tmp_path / "saved", like=like, rename={"blocks/1": "blocks/0"})
    assert state["blocks"]["0"] == 1


@pytest.mark.parametrize(
    "rename", [{"a": "b", "b": "a"}, {"a": "a_2"}, {"": "model/"}, lambda name: f"x/{name}"]
)
def test_a_renaming_that_the_next_start_would_repeat_is_refused_by_resume(
    one_host: Host, tmp_path: Path, rename: Any
) -> None:
    like: Any = {"a": np.zeros(1), "b": np.zeros(1)}
    with holdfast.CheckpointManager(tmp_path / "run", framework="numpy") as manager:
        manager.save(0, {"a": np.zeros(1), "b": np.ones(1)}, force=True)
        with pytest.raises(InvalidArgumentError, match="the next start renames again"):
            manager.resume(like, rename=rename)
        assert manager.restore(0, rename=rename)


class Reader:
    """A data iterator."""

    def __init__(self, place: int) -> None:
        self.place = place

    def get_state(self) -> int:
        return self.place

    def set_state(self, place: int) -> None:
        self.place = place


def test_a_run_continues_under_new_names(one_host: Host, tmp_path: Path) -> None:
    rename = {"old/": "new/", "data": "loader"}
    with holdfast.CheckpointManager(tmp_path / "run", framework="numpy") as manager:
        manager.save(0, {"old": {"w": np.arange(3.0)}, "data": Reader(5)}, force=True)
    for step in (1, 2):
        state: Any = {"new": {"w": np.zeros(3)}, "loader": Reader(0)}
        with holdfast.CheckpointManager(tmp_path / "run", framework="numpy") as manager:
            start, state = manager.resume(state, rename=rename)
            assert (start, state["loader"].place) == (step, 4 + step)
            np.testing.assert_array_equal(state["new"]["w"], np.arange(3.0))
            assert manager.last_restore is not None
            assert manager.last_restore.left_out == ()
            state["loader"].place += 1
            manager.save(step, state, force=True)
            assert [*manager.restore(0, rename={"old/": "older/"})] == ["data", "older"]
