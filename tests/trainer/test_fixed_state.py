"""What is saved is the state at the moment of `save`, of any kind, whatever happens to it next.

`tests/reading/test_states.py` has each kind of state by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import holdfast
from holdfast import save_decision_policy
from holdfast.errors import UnsupportedLeafError
from tests.hosts import Host
from tests.manifests import folders
from tests.reading.test_states import JAX_DTYPES
from tests.trainer.states import same

SIZE = 4_000_000


def test_buffers_donated_right_after_save_are_saved_as_they_were(
    one_host: Host, tmp_path: Path
) -> None:
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = {"w": jnp.zeros(SIZE), "b": [jnp.zeros(1000, jnp.bfloat16) for _ in range(50)]}
    every_step = save_decision_policy.FixedIntervalPolicy(1)
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=every_step) as manager:
        for number in range(12):
            assert manager.save(number, state)
            for _ in range(3):
                state = step(state)
            if number % 4 == 3:
                manager.wait_until_finished()
                saved = manager.restore(number)
                for leaf in jax.tree.leaves(saved):
                    np.testing.assert_array_equal(np.asarray(leaf, np.float32), 3.0 * number)


def test_numpy_arrays_changed_right_after_save_are_saved_as_they_were(
    one_host: Host, tmp_path: Path
) -> None:
    state = {"array": np.zeros(SIZE), "view": np.zeros((100, 100))[::2].T, "list": [np.zeros(3)]}
    every_step = save_decision_policy.FixedIntervalPolicy(1)
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=every_step) as manager:
        for number in range(8):
            assert manager.save(number, state)
            for leaf in jax.tree.leaves(state):
                leaf += 1
            if number % 4 == 3:
                manager.wait_until_finished()
                for leaf in jax.tree.leaves(manager.restore(number)):
                    assert (leaf == number).all()


class Counter:
    def __init__(self) -> None:
        self.items: list[int] = []

    def get_state(self) -> dict[str, list[int]]:
        return {"items": self.items}

    def set_state(self, state: dict[str, list[int]]) -> None:
        self.items = state["items"]


def test_the_state_of_an_object_is_taken_when_save_is_called(
    one_host: Host, tmp_path: Path
) -> None:
    counter = Counter()
    every_step = save_decision_policy.FixedIntervalPolicy(1)
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=every_step) as manager:
        for number in range(3):
            counter.items.append(number)
            assert manager.save(number, {"w": jnp.zeros(SIZE), "counter": counter})
        counter.items.append(99)
        fresh = Counter()
        manager.wait_until_finished()
        manager.restore(1, like={"w": jnp.zeros(SIZE), "counter": fresh})
        assert fresh.items == [0, 1]


def test_a_state_of_many_kinds_comes_back_from_ram_and_from_disk_as_it_was(
    one_host: Host, tmp_path: Path
) -> None:
    params = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.zeros(4, jnp.bfloat16)}
    optimizer = optax.adamw(1e-3)
    _, optimizer_state = optimizer.update(params, optimizer.init(params), params)
    state: dict[str, Any] = {
        "optimizer": optimizer_state,
        "dtypes": {name: jnp.arange(7).astype(name) for name in JAX_DTYPES},
        "empty": [jnp.zeros((0,)), jnp.zeros((4, 0, 2)), {}, (), None],
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), (3, 2)),
        "numpy": OrderedDict(a=np.arange(20)[::3], b=np.arange(3).astype(ml_dtypes.bfloat16)),
        "values": [2**80, 0.1, -float("inf"), True, "grüße", b"bytes", None],
        "ints": {3: jnp.ones(2), 1: {2: 5}},
    }
    like = jax.tree.map(lambda x: jnp.zeros_like(x) if isinstance(x, jax.Array) else x, state)
    like["keys"] = jax.ShapeDtypeStruct((3, 2), state["keys"].dtype)
    every_step = save_decision_policy.FixedIntervalPolicy(1)
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, save_decision_policy=every_step) as saving:
        # One that is refused with its path changes nothing.
        with pytest.raises(UnsupportedLeafError, match="layers/1/activation"):
            saving.save(0, {"layers": [{"w": jnp.ones(3)}, {"activation": object()}]})
        assert saving.all_steps() == []
        assert saving.save(1, state)
        saving.wait_until_finished()
        assert same(saving.restore(like=like), state)
        assert saving.last_restore is not None
        assert set(saving.last_restore.sources) == {"ram"}
    assert folders(run) == {"000000001.1"}
    with holdfast.CheckpointManager(run, ram=None) as reading:
        assert same(reading.restore(like=like), state)
        assert reading.last_restore is not None
        assert set(reading.last_restore.sources) == {"durable"}


def test_a_restored_state_needs_no_new_compilation(one_host: Host, tmp_path: Path) -> None:
    compilations = []
    step = jax.jit(lambda s: compilations.append(1) or jax.tree.map(lambda x: x + 1, s))
    state = step({"w": jnp.zeros(5), "n": jnp.int32(0)})
    with holdfast.CheckpointManager(tmp_path / "run") as saving:
        saving.save(0, state, force=True)
        _, restored = saving.resume(state)
    step(restored)
    assert len(compilations) == 1
