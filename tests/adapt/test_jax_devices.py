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

from holdfast.adapt.jax.devices import DeviceArrays, JaxDevices
from holdfast.adapt.jax.state import JaxFramework
from holdfast.format.layout import Chunk
from tests.adapt.stand_in_device import StandInDevice

MB = 1_000_000


def state(size_bytes: int = 10 * MB) -> dict[int, jax.Array]:
    return {0: jnp.zeros(size_bytes // 4)}


def hold(devices: JaxDevices, arrays: dict[int, jax.Array]) -> DeviceArrays:
    held = devices.fix_arrays(arrays)
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
    found = held.range(3, ((0, 0), (4, 6)), ((0, 0), (4, 6)), 4096)
    assert found is not None
    assert (found.size_bytes, found.offset_bytes, found.device) == (48, 4096, 0)
    assert ctypes.string_at(found.address, 48) == np.asarray(array).tobytes()


def test_the_range_of_a_part_of_an_array_is_its_bytes(device: StandInDevice) -> None:
    import ctypes

    array = jnp.arange(240, dtype=jnp.int16).reshape(4, 6, 10)
    whole = ((0, 0, 0), (4, 6, 10))
    held = hold(JaxDevices(), {3: array})
    for region in (((1, 0, 0), (3, 6, 10)), ((2, 3, 0), (3, 5, 10)), ((3, 5, 4), (4, 6, 9))):
        found = held.range(3, whole, region, 4096)
        assert found is not None
        cut = np.asarray(array)[tuple(slice(a, b) for a, b in zip(*region, strict=True))]
        assert (found.size_bytes, found.offset_bytes) == (cut.nbytes, 4096)
        assert ctypes.string_at(found.address, cut.nbytes) == cut.tobytes()
    assert held.range(3, whole, ((0, 1, 0), (2, 3, 10)), 4096) is None


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_elements_of_less_than_a_byte_are_no_range(device: StandInDevice, name: str) -> None:
    array = jnp.zeros((4,), name)
    held = hold(JaxDevices(), {0: array})
    assert held.range(0, ((0,), (4,)), ((0,), (4,)), 0) is None
    assert held.views(0)[(0,), (4,)].dtype.name == name


@pytest.mark.parametrize("is_full", [False, True])
def test_a_part_of_an_array_comes_to_the_host_alone_unless_the_device_is_full(
    device: StandInDevice, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    array = jnp.arange(24, dtype=jnp.int16).reshape(4, 6)
    held = hold(JaxDevices(), {0: array})
    if is_full:

        def no_room(*_: object) -> object:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        monkeypatch.setattr(jax.lax, "dynamic_slice", no_room)
    found = held.view_within(0, ((0, 0), (4, 6)), ((1, 0), (3, 6)))
    np.testing.assert_array_equal(found, np.asarray(array)[1:3])
    if not is_full:
        base = found if found.base is None else found.base
        assert getattr(base, "nbytes", found.nbytes) == found.nbytes


def test_without_a_device_nothing_is_copied_and_nothing_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "holdfast")
    devices = JaxDevices()
    held = devices.fix_arrays(state())
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


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("spec", [(None, None), ("x", None), ("x", "y"), (None, "y")])
def test_a_chunk_that_is_a_part_of_a_shard_has_the_bytes_of_that_part(
    spec: tuple[str | None, ...], is_on_device: bool, request: pytest.FixtureRequest
) -> None:
    if is_on_device:
        request.getfixturevalue("device")
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    array = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    state = {"w": jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))}
    snapshot = JaxFramework().snapshot(state)
    (outline,) = snapshot.outline.arrays
    width = outline.placement.chunk_shape[1]
    for row, column in ((0, 0), (3, 8 - width), (7, 0)):
        chunk = Chunk(
            ordinal=0,
            array_index=0,
            chunk_index=0,
            name="w",
            start=(row, column),
            stop=(row + 1, column + width),
            offset_bytes=0,
            size_bytes=4 * width,
            first_block=0,
        )
        found = np.frombuffer(snapshot.chunk_bytes(chunk), np.float32)
        np.testing.assert_array_equal(found, array[row, column : column + width])
