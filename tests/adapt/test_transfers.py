"""Transfers report their state correctly, whatever the device does."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from holdfast.adapt.contract import DeviceRange
from holdfast.adapt.devices import transfers
from holdfast.adapt.devices.transfers import RegisteredMemory, Streams
from holdfast.errors import DeviceError
from tests.adapt.stand_in_device import StandInDevice
from tests.hosts import wait_until

PIECE = transfers.PIECE_SIZE_BYTES
SIZE = 2 * PIECE + 1000


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    pages = mmap.mmap(-1, SIZE)
    yield pages
    pages.close()


@pytest.fixture
def streams(device: StandInDevice) -> Streams:
    return Streams(device)


def source_of(size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def ranges_of(source: np.ndarray, *cuts: int, devices: int = 1) -> list[DeviceRange]:
    bounds = [0, *cuts, len(source)]
    return [
        DeviceRange(
            device=i % devices,
            address=source.ctypes.data + start,
            size_bytes=stop - start,
            offset_bytes=start,
        )
        for i, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("cuts", [(), (1, 2, 1000), (PIECE, PIECE + 1), (PIECE - 1, SIZE - 1)])
def test_all_bytes_arrive_where_they_belong(
    device: StandInDevice, streams: Streams, memory: mmap.mmap, cuts: tuple, devices: int
) -> None:
    source = source_of(SIZE)
    pinned = RegisteredMemory(streams, memoryview(memory), 0)
    transfer = pinned.queue_copies(ranges_of(source, *cuts, devices=devices))
    wait_until(lambda: transfer.has_arrived(SIZE))
    assert memory[:] == source.tobytes()
    wait_until(transfer.is_over)
    assert not pinned.is_busy
    pinned.close()
    assert not device.registered


def test_what_has_arrived_is_told_piece_by_piece(
    device: StandInDevice, streams: Streams, memory: mmap.mmap
) -> None:
    source = source_of(SIZE)
    pinned = RegisteredMemory(streams, memoryview(memory), 0)
    with device.held():
        transfer = pinned.queue_copies(ranges_of(source))
        assert not transfer.has_arrived(1)
        for count, stop in enumerate((PIECE, 2 * PIECE, SIZE), 1):
            assert not transfer.has_arrived(stop)
            device.let_run(1)
            wait_until(lambda stop=stop: transfer.has_arrived(stop))
            assert memory[:stop] == source[:stop].tobytes()
            assert pinned.is_busy == (count < 3)
    pinned.close()


def test_a_slow_device_is_waited_for_where_its_bytes_are_asked_for_and_no_sooner(
    device: StandInDevice, streams: Streams, memory: mmap.mmap
) -> None:
    source = source_of(3000)
    pinned = RegisteredMemory(streams, memoryview(memory), 0)
    with device.held():
        transfer = pinned.queue_copies(ranges_of(source, 1000, 2000, devices=2))
        assert not transfer.has_arrived(1)
    wait_until(lambda: transfer.has_arrived(3000))
    assert memory[:3000] == source.tobytes()
    wait_until(transfer.is_over)
    pinned.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_copy_that_fails_is_told_however_late_it_is_asked_for(
    device: StandInDevice, streams: Streams, memory: mmap.mmap, number: int
) -> None:
    source = source_of(SIZE)
    pinned = RegisteredMemory(streams, memoryview(memory), 0)
    device.fails_at_copy = number
    transfer = pinned.queue_copies(ranges_of(source))
    wait_until(transfer.is_over)
    with pytest.raises(DeviceError, match="error 719"):
        transfer.has_arrived(SIZE)
    assert streams.failure is not None
    assert not pinned.is_busy
    pinned.close()


def test_memory_is_busy_after_a_refused_copy_until_the_ones_before_it_have_run(
    device: StandInDevice, streams: Streams, memory: mmap.mmap
) -> None:
    source = source_of(SIZE)
    pinned = RegisteredMemory(streams, memoryview(memory), 0)
    device.refuses_copy = 2
    with device.held():
        transfer = pinned.queue_copies(ranges_of(source))
        with pytest.raises(DeviceError, match="error 1 "):
            transfer.has_arrived(1)
        assert pinned.is_busy
    wait_until(lambda: not pinned.is_busy)
    assert memory[: 2 * PIECE] == source[: 2 * PIECE].tobytes()
    pinned.close()


def test_a_source_that_changes_before_its_copy_ran_tears_the_image(
    device: StandInDevice, streams: Streams, memory: mmap.mmap
) -> None:
    """That is what a device does, and why copies are fixed first: the stand-in must show it."""
    source = source_of(1000)
    before = source.tobytes()
    pinned = RegisteredMemory(streams, memoryview(memory), 0)
    with device.held():
        transfer = pinned.queue_copies(ranges_of(source))
        source += 1
    wait_until(lambda: transfer.has_arrived(1000))
    assert memory[:1000] == source.tobytes() != before
    wait_until(transfer.is_over)
    pinned.close()


def test_memory_that_cannot_be_registered_is_left_as_it_was(
    device: StandInDevice, streams: Streams
) -> None:
    device.refuses_to_register = True
    pages = mmap.mmap(-1, 4096)
    with pytest.raises(DeviceError, match="cudaHostRegister"):
        RegisteredMemory(streams, memoryview(pages), 0)
    pages.close()  # nothing views it
