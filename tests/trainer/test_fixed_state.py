"""What is saved is the state at the moment of `save`, whatever the caller does right afterwards."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import holdfast
from holdfast import save_decision_policy
from tests.hosts import Host

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
