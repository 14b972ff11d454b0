"""A slot that devices fill: digested as it arrives, let go when the devices are done with it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.adapt.contract import Snapshot
from holdfast.adapt.devices.transfers import PIECE_SIZE_BYTES
from holdfast.adapt.jax.state import JaxFramework
from holdfast.clock import SystemClock
from holdfast.engine.saving.part import PartPlan, without_reuse
from holdfast.engine.saving.slots import digests_of, seal_slot
from holdfast.errors import DeviceError, StorageError
from holdfast.format.digests import BLOCK_SIZE_BYTES, digest
from holdfast.format.names import CheckpointId
from holdfast.manager import device_copy
from holdfast.manager.device_copy import DeviceCopy
from holdfast.manager.planning import Planner, Taking
from holdfast.store.ram import RamStore
from holdfast.store.slots import SLOTS, SlotPool
from holdfast.testing.stand_in_device import StandInDevice
from tests.engine.making import memory_folder
from tests.hosts import wait_until
from tests.trust.in_process import RUN_ID, StepClock

SIZE = 3 * PIECE_SIZE_BYTES // 4


class FastClock(StepClock):
    """A second passes whenever somebody sleeps."""

    def sleep(self, secs: float) -> None:
        super().sleep(max(secs, 1.0))


@dataclasses.dataclass
class Rig:
    """One state, fixed, and a slot for it."""

    device: StandInDevice
    store: RamStore
    pool: SlotPool
    root: Path
    snapshot: Snapshot
    plan: PartPlan
    state: dict[str, Any]
    clock: StepClock

    @property
    def image(self) -> Path:
        return self.root / "checkpoints/000000001.1/image-00000-of-00001.safetensors"


@pytest.fixture
def rig() -> Iterator[Rig]:
    state = {"w": jnp.arange(float(SIZE)), "host": np.arange(10.0)}
    with memory_folder() as folder, StandInDevice().serving() as device:
        root = Path(folder)
        pool = SlotPool(root, None, SystemClock())
        store = RamStore(root, pool.reserve, SystemClock())
        snapshot = JaxFramework().snapshot(state)
        taking = Taking(id=CheckpointId(1, 1), time=datetime(2026, 8, 1, tzinfo=UTC), metrics=None)
        plan = Planner(RUN_ID, 0, 1).plan(snapshot, taking)
        yield Rig(device, store, pool, root, snapshot, plan, state, FastClock())
        store.close()


def filling_of(rig: Rig, clock: StepClock | SystemClock) -> tuple[DeviceCopy, object]:
    filling = rig.store.begin(rig.plan.layout.size_bytes)
    return DeviceCopy(filling, rig.plan.layout, rig.snapshot, clock), filling


def test_a_block_is_digested_while_later_ones_are_on_their_way(rig: Rig) -> None:
    arriving, filling = filling_of(rig, SystemClock())
    stops: list[int] = []

    def wait(stop_bytes: int) -> None:
        # The device copies the next piece only when the first of its blocks is asked for.
        start = rig.plan.layout.chunks[0].offset_bytes
        if rig.device.copy_count < min(3, -(-(stop_bytes - start) // PIECE_SIZE_BYTES)):
            rig.device.let_run(1)
        stops.append(stop_bytes)
        arriving.wait(stop_bytes)

    with rig.device.held(), contextlib.closing(filling), arriving:
        digests = digests_of(filling, rig.plan.layout, wait)
        record = seal_slot(rig.store, filling, rig.plan, without_reuse(rig.plan), digests)
    assert (
        len(record.blocks)
        == len(set(stops)) - (rig.plan.layout.size_bytes not in stops[:-1])
        == rig.plan.layout.block_count
    )
    content = rig.image.read_bytes()
    for chunk in rig.plan.layout.chunks:
        data = content[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes]
        assert data == np.asarray(rig.state[chunk.name]).tobytes()
    for number, expected in enumerate(record.blocks[:12]):
        at = rig.plan.layout.chunks[0].offset_bytes + number * BLOCK_SIZE_BYTES
        assert digest(content[at : at + BLOCK_SIZE_BYTES]) == expected


def test_the_devices_memory_is_let_go_before_all_is_digested(rig: Rig) -> None:
    arriving, filling = filling_of(rig, SystemClock())
    with contextlib.closing(filling), arriving:
        wait_until(lambda: not rig.device.is_queued())
        arriving.wait(rig.plan.layout.chunks[0].offset_bytes + 1)
        assert rig.snapshot._on_devices.keys() == []
        # What goes elsewhere after all comes from the slot.
        chunk = rig.plan.layout.chunks[-1]
        assert arriving.is_whole
        found = filling.view()[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes].tobytes()
    assert found == np.asarray(rig.state[chunk.name]).tobytes()


def test_a_device_that_hangs_fails_the_save_in_time_and_its_slot_stays_locked(rig: Rig) -> None:
    began = rig.clock.monotonic()
    arriving, filling = filling_of(rig, rig.clock)
    with rig.device.held():
        with (
            pytest.raises(DeviceError, match="no progress; the device hangs"),
            contextlib.closing(filling),
            arriving,
        ):
            arriving.wait(rig.plan.layout.size_bytes)
        assert 60 < rig.clock.monotonic() - began < 4 * device_copy.STALL_SECS
        assert [*rig.pool.free_slots()] == []
        assert len(list((rig.root / SLOTS).iterdir())) == 1
    wait_until(lambda: not rig.device.is_queued())
    filling.close()
    assert len(rig.pool.free_slots()) == 1


def test_a_slot_is_let_go_only_when_the_devices_are_done_with_it(rig: Rig) -> None:
    arriving, filling = filling_of(rig, SystemClock())
    with pytest.raises(ValueError, match="ends early"), contextlib.closing(filling), arriving:
        raise ValueError("the save ends early")
    assert not rig.device.is_queued()
    assert len(rig.pool.free_slots()) == 1


def test_a_slot_that_was_removed_is_not_filled(rig: Rig) -> None:
    arriving, filling = filling_of(rig, SystemClock())
    (slot,) = (rig.root / SLOTS).iterdir()
    slot.unlink()
    with (
        contextlib.closing(filling),
        pytest.raises(StorageError, match="the RAM tier was removed"),
        arriving,
    ):
        pass
    assert not rig.device.copied_bytes
    # The state is still there, to go elsewhere.
    chunk = rig.plan.layout.chunks[0]
    assert not arriving.is_whole
    data = bytes(rig.snapshot.chunk_bytes(chunk))
    assert data == np.asarray(rig.state[chunk.name]).tobytes()


class LettingClock(FastClock):
    """The device goes on when somebody waits for it, and not before."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self._device = device

    def sleep(self, secs: float) -> None:
        self._device.let_run(None)
        wait_until(lambda: not self._device.is_queued())


class FailingHost:
    """A snapshot whose bytes in the host's memory cannot be had."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __getattr__(self, name: str) -> object:
        return getattr(self._snapshot, name)

    def chunk_bytes(self, chunk: object) -> memoryview:
        raise StorageError("the host fails")


def test_what_fails_on_the_host_waits_for_the_devices_all_the_same(rig: Rig) -> None:
    filling = rig.store.begin(rig.plan.layout.size_bytes)
    failing = FailingHost(rig.snapshot)
    clock = LettingClock(rig.device)
    arriving = DeviceCopy(filling, rig.plan.layout, failing, clock)
    with (
        rig.device.held(),
        contextlib.closing(filling),
        pytest.raises(StorageError, match="the host fails"),
        arriving,
    ):
        pass
    assert rig.device.copy_count == 3
    assert len(rig.pool.free_slots()) == 1


def test_a_slot_that_lost_its_memory_while_a_device_filled_it_becomes_no_image(rig: Rig) -> None:
    arriving, filling = filling_of(rig, SystemClock())
    (slot,) = (rig.root / SLOTS).iterdir()
    with contextlib.closing(filling), arriving:
        digests = digests_of(filling, rig.plan.layout, arriving.wait)
        os.truncate(slot, 0)
        os.truncate(slot, rig.plan.layout.size_bytes)
        with pytest.raises(StorageError, match="another process changes the RAM tier"):
            seal_slot(rig.store, filling, rig.plan, without_reuse(rig.plan), digests)
    assert not rig.image.exists()
