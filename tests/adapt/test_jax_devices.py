"""What is known of devices: their room, and where the bytes of their arrays are."""

from __future__ import annotations

import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.adapt.jax_devices import DeviceArrays, JaxDevices
from holdfast.testing.stand_in_device import StandInDevice

MB = 1_000_000


def state(size_bytes: int = 10 * MB) -> dict[int, jax.Array]:
    return {0: jnp.zeros(size_bytes // 4)}


def hold(devices: JaxDevices, arrays: dict[int, jax.Array]) -> DeviceArrays:
    held = devices.hold(arrays)
    held.wait()
    return held


def test_the_peak_that_earlier_copies_made_is_not_taken_for_the_trainings(
    device: StandInDevice,
) -> None:
    devices = JaxDevices()
    # Steps take 70 at their peak; with a copy of 10 it is 80 from then on.
    device.limit_bytes, device.peak_bytes, device.in_use_bytes = 95 * MB, 70 * MB, 60 * MB
    first = hold(devices, state())
    assert not first.is_borrowed
    first.release()
    device.peak_bytes = 80 * MB
    for _ in range(3):
        again = hold(devices, state())
        assert not again.is_borrowed
        again.release()


def test_copies_that_are_still_there_count(device: StandInDevice) -> None:
    devices = JaxDevices()
    device.limit_bytes, device.peak_bytes, device.in_use_bytes = 95 * MB, 70 * MB, 60 * MB
    first = hold(devices, state())
    device.peak_bytes, device.in_use_bytes = 80 * MB, 70 * MB
    second = hold(devices, state())
    third = hold(devices, state())
    assert [held.is_borrowed for held in (first, second, third)] == [False, False, True]
    first.release()
    assert not hold(devices, state()).is_borrowed


def test_the_peak_of_the_steps_counts_and_not_what_is_in_use_just_now(
    device: StandInDevice,
) -> None:
    device.limit_bytes, device.peak_bytes, device.in_use_bytes = 95 * MB, 90 * MB, 20 * MB
    assert hold(JaxDevices(), state()).is_borrowed


def test_a_device_that_says_nothing_of_its_memory_is_tried(device: StandInDevice) -> None:
    assert not hold(JaxDevices(), state()).is_borrowed


def test_what_the_training_lets_go_is_kept_alive_by_no_copy(device: StandInDevice) -> None:
    array = jnp.zeros(1000)
    gone = weakref.ref(array)
    held = hold(JaxDevices(), {0: array})
    del array
    gc.collect()
    assert gone() is None
    assert not held.is_borrowed


def test_a_released_copy_keeps_nothing(device: StandInDevice) -> None:
    held = hold(JaxDevices(), state())
    (piece,) = held._pieces.all()
    gone = weakref.ref(piece)
    del piece
    held.release()
    held.release()
    gc.collect()
    assert gone() is None


def test_the_range_of_an_array_is_its_bytes(device: StandInDevice) -> None:
    import ctypes

    array = jnp.arange(24, dtype=jnp.int16).reshape(4, 6)
    held = hold(JaxDevices(), {3: array})
    found = held.range(3, ((0, 0), (4, 6)), 4096)
    assert found is not None
    assert (found.size_bytes, found.offset_bytes, found.device) == (48, 4096, 0)
    assert ctypes.string_at(found.address, 48) == np.asarray(array).tobytes()


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_elements_of_less_than_a_byte_are_no_range(device: StandInDevice, name: str) -> None:
    array = jnp.zeros((4,), name)
    held = hold(JaxDevices(), {0: array})
    assert held.range(0, ((0,), (4,)), 0) is None
    assert held.views(0)[(0,), (4,)].dtype.name == name


def test_without_a_device_nothing_is_copied_and_nothing_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "holdfast")
    devices = JaxDevices()
    held = devices.hold(state())
    assert held.keys() == []
    assert not held.is_borrowed
    assert devices.pin(memoryview(bytearray(10))) is None
    assert not [record for record in caplog.records if record.name.startswith("holdfast")]


def test_each_chunk_is_one_view_whatever_the_sharding(device: StandInDevice) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    array = np.arange(64.0).reshape(8, 8)
    for spec in (("x", "y"), (("x", "y"), None), (None, "x"), (None, None)):
        sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        held = hold(JaxDevices(), {0: sharded})
        for (start, stop), view in held.views(0).items():
            index = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            np.testing.assert_array_equal(view, array[index])
