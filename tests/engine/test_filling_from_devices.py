"""A slot that devices fill: digested as it arrives, let go when the devices are done with it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
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
from holdfast.engine.saving import slots
from holdfast.engine.saving.part import PartPlan
from holdfast.engine.saving.part_writer import PartWriter
from holdfast.engine.saving.slots import SlotFill
from holdfast.errors import DeviceError, StorageError
from holdfast.format.digests import BLOCK_SIZE_BYTES, digest
from holdfast.format.names import image_key
from holdfast.store.ram import RamStore
from holdfast.store.slots import SLOTS, SlotPool
from holdfast.trainer.planning import Planner, Taking
from tests.adapt.stand_in_device import StandInDevice
from tests.attempts import checkpoint_id
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
        return self.root / image_key(checkpoint_id(1), 0, 1)


@pytest.fixture
def rig() -> Iterator[Rig]:
    state = {"w": jnp.arange(float(SIZE)), "host": np.arange(10.0)}
    with memory_folder() as folder, StandInDevice().serving() as device:
        root = Path(folder)
        pool = SlotPool(root, None, SystemClock())
        store = RamStore(root, pool.reserve, SystemClock())
        snapshot = JaxFramework().snapshot(state)
        taking = Taking(id=checkpoint_id(1), time=datetime(2026, 8, 1, tzinfo=UTC), metrics=None)
        plan = Planner(RUN_ID, 0, 1).plan(snapshot, taking)
        yield Rig(device, store, pool, root, snapshot, plan, state, FastClock())
        store.close()


def filling_of(rig: Rig, clock: StepClock | SystemClock) -> SlotFill:
    return SlotFill(rig.store.begin(rig.plan.layout.size_bytes), rig.plan.layout, clock)


def part_of(rig: Rig, fill: SlotFill) -> PartWriter:
    part = PartWriter(rig.store, rig.plan, rig.snapshot, None)
    assert part.open(fill)
    return part


class SteppingClock(SystemClock):
    """The device copies one more piece whenever somebody waits for it."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device

    def sleep(self, secs: float) -> None:
        self._device.let_run(1)
        super().sleep(secs)


def test_a_block_is_digested_while_later_ones_are_on_their_way(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_at: list[int] = []
    digests, lock = slots._digests, threading.Lock()

    def noted(view: memoryview, ranges: Any) -> list[str]:
        with lock:
            begun_at.append(rig.device.copy_count)
        return digests(view, ranges)

    monkeypatch.setattr(slots, "_digests", noted)
    with (
        rig.device.held(),
        contextlib.closing(part_of(rig, filling_of(rig, SteppingClock(rig.device)))) as part,
    ):
        record = part.complete().record
    assert min(begun_at) < 3 == rig.device.copy_count
    assert len(record.blocks) == rig.plan.layout.block_count
    content = rig.image.read_bytes()
    for chunk in rig.plan.layout.chunks:
        data = content[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes]
        assert data == np.asarray(rig.state[chunk.name]).tobytes()
    for number, expected in enumerate(record.blocks[:12]):
        at = rig.plan.layout.chunks[0].offset_bytes + number * BLOCK_SIZE_BYTES
        assert digest(content[at : at + BLOCK_SIZE_BYTES]) == expected


@pytest.mark.parametrize("keep", [False, True])
def test_the_devices_memory_is_let_go_as_soon_as_all_has_arrived(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    kept: list[int] = []
    digests = slots.digests_of

    def noted(slot: Any, layout: Any, wait_for: Any) -> list[str]:
        wait_until(lambda: not rig.device.is_queued())
        wait_for(layout.chunks[0].offset_bytes + 1)
        kept.append(len(rig.snapshot._on_devices.keys()))
        return digests(slot, layout, wait_for)

    monkeypatch.setattr(slots, "digests_of", noted)
    fill = filling_of(rig, SystemClock())
    with contextlib.closing(part_of(rig, fill)) as part:
        assert fill.copy(rig.snapshot, keep=keep)
        assert kept == [1 if keep else 0]
        # What goes elsewhere after all comes from the slot.
        chunk = rig.plan.layout.chunks[-1]
        assert part.is_whole
        found = part.chunk_bytes()(chunk).tobytes()
    assert found == np.asarray(rig.state[chunk.name]).tobytes()


def test_a_device_that_hangs_fails_the_save_in_time_and_its_slot_stays_locked(rig: Rig) -> None:
    began = rig.clock.monotonic()
    fill = filling_of(rig, rig.clock)
    with rig.device.held():
        with (
            pytest.raises(DeviceError, match="no progress; the device hangs"),
            contextlib.closing(fill),
        ):
            fill.copy(rig.snapshot)
        assert 60 < rig.clock.monotonic() - began < 4 * slots.STALL_SECS
        assert [*rig.pool.free_slots()] == []
        assert len(list((rig.root / SLOTS).iterdir())) == 1
    wait_until(lambda: not rig.device.is_queued())
    fill.close()
    assert len(rig.pool.free_slots()) == 1


def test_a_slot_is_let_go_only_when_the_devices_are_done_with_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slots, "digests_of", interrupted)
    fill = filling_of(rig, SystemClock())
    with pytest.raises(KeyboardInterrupt), contextlib.closing(fill):
        fill.copy(rig.snapshot)
    assert not rig.device.is_queued()
    assert len(rig.pool.free_slots()) == 1


def test_a_slot_that_was_removed_is_not_filled(rig: Rig) -> None:
    fill = filling_of(rig, SystemClock())
    (slot,) = (rig.root / SLOTS).iterdir()
    slot.unlink()
    with contextlib.closing(fill), pytest.raises(StorageError, match="the RAM tier was removed"):
        fill.copy(rig.snapshot)
    assert not rig.device.copied_bytes
    # The state is still there, to go elsewhere.
    chunk = rig.plan.layout.chunks[0]
    assert not fill.is_whole
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
    fill = filling_of(rig, LettingClock(rig.device))
    with (
        rig.device.held(),
        contextlib.closing(fill),
        pytest.raises(StorageError, match="the host fails"),
    ):
        fill.copy(FailingHost(rig.snapshot))
    assert rig.device.copy_count == 3
    assert len(rig.pool.free_slots()) == 1


def test_a_slot_that_lost_its_memory_while_a_device_filled_it_becomes_no_image(rig: Rig) -> None:
    with contextlib.closing(part_of(rig, filling_of(rig, SystemClock()))) as part:
        assert part.copy()
        (slot,) = (rig.root / SLOTS).iterdir()
        os.truncate(slot, 0)
        os.truncate(slot, rig.plan.layout.size_bytes)
        with pytest.raises(StorageError, match="another process changes the RAM tier"):
            part.complete()
    assert not rig.image.exists()
