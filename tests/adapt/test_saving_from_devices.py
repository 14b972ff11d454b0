"""States on devices, saved by a whole manager: a stand-in device copies into the slots."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.experimental.layout as layouts
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import holdfast
from holdfast import save_decision_policy
from holdfast.errors import SaveFailedError
from tests.adapt.stand_in_device import StandInDevice
from tests.engine.making import DTYPES, numpy_type, random_array
from tests.hosts import Host, await_events
from tests.trainer.slots import wait_for_a_slot
from tests.trainer.states import same

EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)
SIZE = 1_000_000

add_one = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)


@pytest.fixture
def manager(
    one_host: Host, tmp_path: Path, device: StandInDevice
) -> Iterator[holdfast.CheckpointManager]:
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=EVERY_STEP) as made:
        yield made


def saved(manager: holdfast.CheckpointManager, step: int, state: object) -> object:
    """The state of that step as it is restored, after it was saved and all is durable."""
    assert manager.save(step, state)
    manager.wait_until_finished()
    return manager.restore(step, like=state)


def test_the_slot_that_resume_prepares_is_page_locked_before_the_first_save(
    manager: holdfast.CheckpointManager, device: StandInDevice
) -> None:
    state = {"w": jnp.ones(SIZE)}
    manager.resume(state)
    wait_for_a_slot(manager)
    count = device.registered_count
    assert count
    assert same(saved(manager, 0, state), state)
    assert device.copied_bytes
    assert device.registered_count >= count


def sharded(array: np.ndarray, *spec: str | None, shape: tuple[int, ...] = (4, 2)) -> jax.Array:
    mesh = jax.make_mesh(shape, ("x", "y")[: len(shape)], devices=jax.devices()[: np.prod(shape)])
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def of_every_kind() -> dict[str, object]:
    rng = np.random.default_rng(7)
    # XLA has no type for some of them, and of 8 bytes only if enabled.
    dtypes = [
        name
        for name in DTYPES
        if (numpy_type(name).itemsize < 8 or name == "complex64")
        and "float6" not in name
        and name not in ("complex32", "float4_e2m1fn_x2")
    ]
    return {
        "plain": {name: jnp.asarray(random_array((3, 5), name, 7)) for name in dtypes},
        "scalar": jnp.float32(3.5),
        "empty": jnp.zeros((0, 4)),
        "large": jnp.asarray(rng.random(9_000_000, np.float32)),
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6), 3),
        "numpy": rng.random((11, 3)),
        "value": 12,
    }


def over_devices() -> dict[str, object]:
    rng = np.random.default_rng(8)
    array = rng.random((16, 8), np.float32)
    return {
        "rows": sharded(array, "x", None),
        "both": sharded(array, "x", "y"),
        "replicated": sharded(array, None, None),
        "columns": sharded(array, None, "y"),
        "one of eight": jax.device_put(array, jax.devices()[5]),
        "first": jnp.asarray(array),
    }


@pytest.mark.parametrize("make", [of_every_kind, over_devices])
def test_every_array_comes_back_bit_for_bit(
    manager: holdfast.CheckpointManager, device: StandInDevice, make
) -> None:
    state = make()
    assert same(saved(manager, 0, state), state)
    assert same(saved(manager, 1, state), state)
    assert device.copied_bytes, "no device copied anything"


def test_what_a_device_can_copy_is_copied_by_it(
    manager: holdfast.CheckpointManager, device: StandInDevice
) -> None:
    state = over_devices()
    saved(manager, 0, state)
    # Each of six arrays once, however many devices have it, and more than one device at work.
    assert sum(device.copied_bytes.values()) == 6 * 16 * 8 * 4
    assert len(device.copied_bytes) >= 4


def test_replicas_are_copied_by_devices_in_turn(
    manager: holdfast.CheckpointManager, device: StandInDevice
) -> None:
    state = {str(i): sharded(np.full((64, 8), i, np.float32), None, None) for i in range(8)}
    assert same(saved(manager, 0, state), state)
    assert list(device.copied_bytes.values()) == [64 * 8 * 4] * 8


def test_an_array_of_another_layout_is_saved_as_its_elements_are(
    manager: holdfast.CheckpointManager, device: StandInDevice
) -> None:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if hasattr(layouts, "Format"):
        turned = layouts.Format(layouts.Layout((1, 0)), one)
    else:  # Before JAX 0.7.
        turned = layouts.Layout(layouts.DeviceLocalLayout((1, 0)), one)
    array = jnp.arange(6.0).reshape(2, 3)
    device.is_out_of_memory = True  # a copy on the device would have the usual layout
    for step in range(2):
        state = {"turned": jax.device_put(array, turned), "plain": array}
        assert same(saved(manager, step, state), {"turned": array, "plain": array})


def test_what_is_donated_right_after_save_is_saved_as_it_was(
    manager: holdfast.CheckpointManager, device: StandInDevice
) -> None:
    state = {"w": jnp.zeros(SIZE), "b": [jnp.zeros(100) for _ in range(20)]}
    for step in range(6):
        with device.held():
            assert manager.save(step, state)
            # No copy has run yet, and the training goes on.
            for _ in range(3):
                state = jax.block_until_ready(add_one(state))
        manager.wait_until_finished()
        for leaf in jax.tree.leaves(manager.restore(step)):
            np.testing.assert_array_equal(leaf, 3.0 * step)


def test_a_failed_transfer_fails_its_save_and_the_next_one_works(
    manager: holdfast.CheckpointManager, device: StandInDevice, caplog: pytest.LogCaptureFixture
) -> None:
    state = {f"w{i}": jnp.full(SIZE, float(i)) for i in range(4)}
    assert same(saved(manager, 0, state), state)
    device.fails_at_copy = device.copy_count + 2
    # Other arrays than before, so that no image is reused.
    state = {name: array + 1 for name, array in state.items()}
    assert manager.save(1, state)
    with pytest.raises(SaveFailedError, match="error 719") as failed:
        manager.wait_until_finished()
    assert failed.value.step == 1
    for step in (2, 3):
        state = {name: array + 1 for name, array in state.items()}
        assert same(saved(manager, step, state), state)
    assert manager.all_steps() == [0, 2, 3]
    assert caplog.text.count("copied from their devices through NumPy") == 1


def test_a_copy_that_runs_out_of_memory_after_save_fails_it_and_the_next_one_borrows(
    manager: holdfast.CheckpointManager, device: StandInDevice, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": jnp.ones(SIZE)}
    device.runs_out_later = True
    assert manager.save(0, state)
    with pytest.raises(SaveFailedError, match="RESOURCE_EXHAUSTED"):
        manager.wait_until_finished()
    device.runs_out_later = False
    assert same(saved(manager, 1, state), state)
    assert caplog.text.count("no room for a copy of the state") == 1


def test_a_copy_that_is_refused_fails_its_save_and_the_next_one_works(
    manager: holdfast.CheckpointManager, device: StandInDevice
) -> None:
    state = {f"w{i}": jnp.full(SIZE, float(i)) for i in range(4)}
    device.refuses_copy = 2
    assert manager.save(0, state)
    with pytest.raises(SaveFailedError, match="step 0"):
        manager.wait_until_finished()
    assert not device.is_queued()
    assert same(saved(manager, 1, state), state)


def test_where_memory_cannot_be_registered_states_go_through_numpy_and_that_is_told_once(
    manager: holdfast.CheckpointManager, device: StandInDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.refuses_to_register = True
    state = {"w": jnp.arange(float(SIZE))}
    for step in range(3):
        assert same(saved(manager, step, state), state)
    assert not device.copied_bytes
    assert caplog.text.count("copied from their devices through NumPy") == 1
    sealed = await_events(manager._parts.run.location.folder, "sealed", count=3)
    assert [e["tier"] for e in sealed] == ["ram"] * 3


def test_slots_are_registered_once_and_unregistered_before_they_are_unmapped(
    one_host: Host, tmp_path: Path, device: StandInDevice
) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=EVERY_STEP) as manager:
        for step in range(8):
            assert manager.save(step, {"w": jnp.full(SIZE, float(step))})
            manager.wait_until_finished()
        assert 1 <= device.registered_count <= 2
        # Another size takes other slots: those of the first size are unmapped.
        for step in range(8, 12):
            assert manager.save(step, {"w": jnp.full(2 * SIZE, float(step))})
            manager.wait_until_finished()
        assert device.registered_count <= 4
    assert not device.registered


def test_the_slot_for_the_next_state_is_registered_ahead(
    manager: holdfast.CheckpointManager, device: StandInDevice
) -> None:
    state = {"w": jnp.zeros(SIZE)}
    saved(manager, 0, state)
    wait_for_a_slot(manager)
    assert device.registered_count == 2
    saved(manager, 1, {"w": jnp.ones(SIZE)})
    assert device.registered_count == 2


@pytest.mark.parametrize("is_told", [True, False])
def test_without_room_for_a_copy_the_state_is_copied_before_save_returns(
    one_host: Host,
    tmp_path: Path,
    device: StandInDevice,
    caplog: pytest.LogCaptureFixture,
    is_told: bool,
) -> None:
    if is_told:
        device.limit_bytes, device.in_use_bytes = 10 * SIZE, 7 * SIZE
    else:
        device.is_out_of_memory = True
    state = {"w": jnp.zeros(SIZE), "b": jnp.zeros(10)}
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=EVERY_STEP) as manager:
        for step in range(6):
            assert manager.save(step, state)
            for _ in range(3):
                state = jax.block_until_ready(add_one(state))
            manager.wait_until_finished()
            for leaf in jax.tree.leaves(manager.restore(step)):
                np.testing.assert_array_equal(leaf, 3.0 * step)
            wait_for_a_slot(manager)
    assert device.copied_bytes, "the later states were to be copied by the device"
    assert caplog.text.count("no room for a copy of the state") == 1


def test_a_device_that_fails_while_the_training_waits_fails_no_save(
    one_host: Host, tmp_path: Path, device: StandInDevice
) -> None:
    device.is_out_of_memory = True
    state = {"w": jnp.arange(float(SIZE))}
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=EVERY_STEP) as manager:
        assert manager.save(0, state)
        manager.wait_until_finished()
        wait_for_a_slot(manager)
        device.fails_at_copy = device.copy_count
        for step in (1, 2):
            state = {"w": state["w"] + 1}
            assert same(saved(manager, step, state), state)
    assert device.copy_count == 1


def test_with_room_the_device_is_said_to_copy(
    manager: holdfast.CheckpointManager, device: StandInDevice, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    device.limit_bytes, device.in_use_bytes = 20 * SIZE, 7 * SIZE
    for step in range(2):
        saved(manager, step, {"w": jnp.zeros(SIZE)})
    assert caplog.text.count("states are copied on") == 1
    assert "no room" not in caplog.text
