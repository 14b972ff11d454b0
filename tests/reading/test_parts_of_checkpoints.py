"""Reading a part of a checkpoint, into a state that differs from it, and in other dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import holdfast
from holdfast import errors, save_decision_policy
from tests.hosts import Host

STATE: dict[str, Any] = {
    "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)},
    "params_ema": {"w": np.zeros(3)},
    "opt": [{"mu": np.full(1000, 2.0)}, {"mu": np.full(4, 3.0), "count": np.int32(5)}],
    "step": 7,
    "name": "first",
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    holdfast.save(tmp_path / "saved", STATE)
    return tmp_path / "saved"


def as_jax(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, tree
    )


def test_only_what_is_below_the_prefixes_is_read(saved: Path) -> None:
    with holdfast.open_run(saved) as run:
        params = run.restore(only="params")
        assert params.keys() == {"params"}
        np.testing.assert_array_equal(params["params"]["w"], STATE["params"]["w"])
        assert run.last_restore is not None
        assert sum(run.last_restore.sources.values()) == 9 * 4
        assert run.restore(only=["step", "opt/1/count"]) == {"step": 7, "opt": {1: {"count": 5}}}
        assert sum(run.last_restore.sources.values()) == 4
        assert [*run.restore(only="opt")["opt"][1]] == ["count", "mu"]
        assert run.restore(only=".").keys() == STATE.keys()


def test_a_prefix_of_nothing_is_refused(saved: Path) -> None:
    with pytest.raises(errors.StructureMismatchError, match=r"at param, opt/2 .*name, opt, params"):
        holdfast.load(saved, only=["param", "opt/2", "params"])


def test_leaves_of_like_outside_of_only_come_back_as_they_are(saved: Path) -> None:
    other = {"params": {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}, "x": [1]}
    found = holdfast.load(saved, like=other, only="params")
    np.testing.assert_array_equal(found["params"]["w"], STATE["params"]["w"])
    assert found["x"] == [1]
    with pytest.raises(errors.StructureMismatchError, match=r"(?s)below params in 1 .*params/b"):
        holdfast.load(saved, like={"params": {"w": other["params"]["w"]}}, only="params")


@pytest.mark.parametrize("convert", [lambda tree: tree, as_jax], ids=["numpy", "jax"])
def test_what_the_checkpoint_lacks_is_kept_where_that_is_allowed(saved: Path, convert: Any) -> None:
    head = np.full((4, 4), 9.0, np.float32)
    like = {
        **STATE,
        "params": {"w": STATE["params"]["w"] * 0, "b": head, "lora": head[0]},
        "opt": {"new": np.ones(2, np.float32)},
    }
    like = convert({name: leaf for name, leaf in like.items() if name != "params_ema"})
    with holdfast.open_run(saved) as run:
        allowed = ["params/b", "params/lora", "opt", "params_ema"]
        found = run.restore(like=like, partial=allowed, cast=True)
        np.testing.assert_array_equal(found["params"]["w"], STATE["params"]["w"])
        np.testing.assert_array_equal(found["params"]["b"], head)
        np.testing.assert_array_equal(found["opt"]["new"], 1)
        assert type(found["params"]["b"]) is type(like["params"]["b"])
        assert found["step"] == 7
        assert run.last_restore is not None
        assert sorted(run.last_restore.kept) == ["opt/new", "params/b", "params/lora"]
        assert sum(run.last_restore.sources.values()) == 6 * 4
        with pytest.raises(errors.StructureMismatchError) as caught:
            run.restore(like=like, partial=allowed[1:2], cast=True)
    text = str(caught.value)
    for name in ("params/b: expected array float32[4, 4], found array float32[3]", "opt/new"):
        assert name in text
    for name in ("opt/0/mu: expected nothing", "params_ema/w"):
        assert name in text
    assert "params/lora" not in text


def test_a_leaf_without_elements_cannot_be_kept(saved: Path) -> None:
    abstract = jax.eval_shape(lambda: jnp.zeros((5, 5)))
    like = {**STATE, "params": {**STATE["params"], "head": abstract}}
    with pytest.raises(errors.StructureMismatchError, match=r"params/head: .*cannot be kept"):
        holdfast.load(saved, like=like, partial="params")


@pytest.mark.parametrize("convert", [lambda tree: tree, as_jax], ids=["numpy", "jax"])
def test_another_dtype_is_refused_by_path_or_cast(saved: Path, convert: Any) -> None:
    like = {
        **STATE,
        "params": convert({k: v.astype(ml_dtypes.bfloat16) for k, v in STATE["params"].items()}),
    }
    with pytest.raises(errors.StructureMismatchError, match=r"params/w: .*bfloat16.*cast=True"):
        holdfast.load(saved, like=like)
    # A dtype is no reason to keep the leaf instead: that would restore nothing, and say so nowhere.
    with pytest.raises(errors.StructureMismatchError, match=r"params/w: .*cast=True"):
        holdfast.load(saved, like=like, partial=".")
    found = holdfast.load(saved, like=like, cast=True)["params"]["w"]
    assert type(found) is type(like["params"]["w"])
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), STATE["params"]["w"])


def test_a_cast_to_another_kind_or_of_a_key_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "a", {"c": np.ones(2, np.complex64), "key": jax.random.key(0)})
    like = {"c": np.ones(2, np.float32), "key": jnp.zeros((), jnp.uint32)}
    with pytest.raises(errors.StructureMismatchError) as caught:
        holdfast.load(tmp_path / "a", like=like, cast=True)
    assert "c: expected array float32[2], found array complex64[2]" in str(caught.value)
    assert "key: expected array uint32[], found array key<" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"only": []},
        {"only": 3},
        {"only": [""]},
        {"only": ["a", 1]},
        {"partial": "a"},
        {"cast": True},
        {"cast": 1, "like": {}},
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_refused(saved: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        holdfast.load(saved, **wrong)


def test_a_run_goes_on_with_a_part_of_its_state(one_host: Host, tmp_path: Path) -> None:
    every_step = save_decision_policy.FixedIntervalPolicy(1)
    run = tmp_path / "run"
    first = {"params": jnp.ones(4), "opt": {"mu": jnp.full(4, 2.0)}}
    with holdfast.CheckpointManager(run, save_decision_policy=every_step) as training:
        training.save(0, first)
        other = {"params": jnp.zeros(4), "opt": {"nu": jnp.full(4, 3.0)}}
        with pytest.raises(errors.StructureMismatchError, match="opt/nu"):
            training.restore(like=other)
        found = training.restore(like=other, partial="opt")
        assert found["params"].tolist() == [1.0] * 4
        assert training.restore(only="opt")["opt"]["mu"].tolist() == [2.0] * 4
    with holdfast.CheckpointManager(run, save_decision_policy=every_step) as training:
        with pytest.raises(errors.InvalidArgumentError, match="only"):
            training.resume(other, only=[])
        half = {**other, "params": jnp.zeros(4, jnp.bfloat16)}
        start, resumed = training.resume(half, partial="opt", cast=True)
        assert start == 1
        assert resumed["params"].dtype == jnp.bfloat16
        assert resumed["params"].tolist() == [1.0] * 4
        assert resumed["opt"]["nu"].tolist() == [3.0] * 4
        assert training.last_restore is not None
        assert training.last_restore.kept == ("opt/nu",)
        assert training.save(1, resumed)
        start, resumed = training.resume(other, only="params", cast=True)
        assert (start, resumed["opt"]["nu"].tolist()) == (2, [3.0] * 4)
