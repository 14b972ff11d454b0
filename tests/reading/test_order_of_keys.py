"""Dicts come back in the order in which they were saved, or in that of `like`."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast.adapt.contract import EVERYTHING
from holdfast.adapt.nested import tree_of
from holdfast.errors import CheckpointDamagedError
from holdfast.format.check import check_spec
from holdfast.format.records import CheckpointSpec, Container
from tests.hosts import Host


def _state() -> dict[str, Any]:
    return {
        "z": np.arange(3.0),
        "epoch": 4,
        "a": {"y": np.ones(2), "lr": 0.1, "x": np.zeros(2), "n": {}},
        "m": {20: 1, 3: 2},
        "o": OrderedDict([("k", 1), ("j", np.ones(1))]),
        "sorted": {"b": 1, "c": np.ones(1), "d": {}},
    }


def _orders(state: Any) -> list[list[object]]:
    return [[*state], *([*state[name]] for name in ("a", "m", "o", "sorted"))]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_restore_keeps_the_order_of_keys(one_host: Host, tmp_path: Path, framework: str) -> None:
    if framework == "torch":
        pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)
    state, place = _state(), tmp_path / "run"
    reversed_state = {name: state[name] for name in reversed(state)}
    with holdfast.CheckpointManager(place, framework=framework) as manager:
        assert manager.save(0, state, force=True)
        assert _orders(manager.restore()) == _orders(state)
        assert [*manager.restore(like=reversed_state)] == [*reversed_state]
        # The next save has the same leaves in another order.
        assert manager.save(1, reversed_state, force=True)
        assert [*manager.restore()] == [*reversed_state]
    with holdfast.open_run(place) as run:
        assert _orders(run.restore(0)) == _orders(state)
        assert [*run.restore(0, only=["o", "epoch", "a"])] == ["epoch", "a", "o"]


def test_groups_of_an_optimizer_keep_their_order(one_host: Host, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    names = [*optimizer.state_dict()["param_groups"][0]]
    assert names != sorted(names)
    with holdfast.CheckpointManager(tmp_path / "run", framework="torch") as manager:
        assert manager.save(0, {"optimizer": optimizer, "model": model}, force=True)
        restored = manager.restore()
        assert [*restored["optimizer"]["param_groups"][0]] == names
        assert [*restored["model"]] == [*model.state_dict()] == ["weight", "bias"]
        manager.restore(like={"optimizer": optimizer, "model": model})
    assert [*optimizer.state_dict()["param_groups"][0]] == names


def _spec(**changes: Any) -> CheckpointSpec:
    nodes = ((), "dict"), (("b",), "dict"), (("a",), "list")
    return CheckpointSpec(
        time=holdfast.clock.SystemClock().now(),
        metrics=None,
        arrays=(),
        containers=tuple(
            Container(path=path, kind=kind, **(changes if not path else {}))  # type: ignore[arg-type]
            for path, kind in nodes
        ),
        values=(),
        process_values=(),
    )


def test_keys_without_a_recorded_order_ascend() -> None:
    """Records that were written before the order was recorded have none."""
    spec = _spec()
    assert b"keys" not in msgspec.json.encode(spec)
    assert [*tree_of(spec, EVERYTHING, {}, {})] == ["a", "b"]
    ordered = _spec(keys=("b", "a"))
    assert [*tree_of(ordered, EVERYTHING, {}, {})] == ["b", "a"]


@pytest.mark.parametrize("keys", [("a",), ("a", "b", "c"), ("a", "a"), (), ("a", "b", "b")])
def test_a_recorded_order_of_other_keys_is_damage(keys: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointDamagedError, match="keys"):
        check_spec(_spec(keys=keys), 1, "the manifest")
