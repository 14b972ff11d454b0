"""How much RAM the slots of a host use, and when it is given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import OutOfSpaceError
from holdfast.host.tiers.slot_allocator import SlotAllocator
from holdfast.host.wire.protocol import PENDING_COUNT_MAX, PENDING_SIZE_BYTES, pending_limit
from holdfast.store.ram import RamStore
from holdfast.store.slots import SlotPool
from tests.engine.making import memory_folder
from tests.trust.in_process import in_process_host

SIZE = 1 << 20


def image(step: int) -> str:
    return f"checkpoints/{step:09d}.1-00000001/image-00000-of-00001.safetensors"


def test_slots_that_a_slow_disk_required_are_freed_once_two_passes_find_them_idle() -> None:
    with memory_folder() as root:
        pool = SlotPool(Path(root), None, SystemClock())
        slots = SlotAllocator(pool)
        store = RamStore(Path(root), lambda size: slots.reserve(0, size), SystemClock())
        for step in range(6):
            store.put(image(step), bytes(SIZE))
            slots.release(0)
        store.delete(*map(image, range(5)))
        slots.free_surplus()
        assert pool.size_bytes() == 6 * SIZE
        slots.free_surplus()
        # The newest image, and a slot for the next one.
        assert pool.size_bytes() == 2 * SIZE
        assert len(pool.free_slots()) == 1
        store.close()


def test_no_slot_is_freed_that_the_next_save_needs() -> None:
    with memory_folder() as root:
        pool = SlotPool(Path(root), None, SystemClock())
        slots = SlotAllocator(pool)
        slots.reserve(0, SIZE)
        slots.reserve(1, 2 * SIZE)
        slots.release(1)
        for _ in range(3):
            slots.free_surplus()
        assert sorted(pool.free_slots().values()) == [SIZE, 2 * SIZE]
        slots.release(0)
        for _ in range(3):
            slots.free_surplus()
        assert sorted(pool.free_slots().values()) == [SIZE, 2 * SIZE]


def test_without_trainers_as_much_stays_free_as_is_held() -> None:
    with memory_folder() as root:
        pool = SlotPool(Path(root), None, SystemClock())
        slots = SlotAllocator(pool)
        store = RamStore(Path(root), lambda size: slots.reserve(0, size), SystemClock())
        for step in range(4):
            store.put(image(step), bytes(SIZE))
            slots.release(0)
        store.delete(*map(image, range(3)))
        slots.forget_sizes()
        for _ in range(2):
            slots.free_surplus()
        assert pool.size_bytes() == 2 * SIZE
        store.delete(image(3))
        for _ in range(2):
            slots.free_surplus()
        assert pool.size_bytes() == 0
        store.close()


def test_a_smaller_limit_at_a_restart_frees_slots() -> None:
    with memory_folder() as root:
        pool = SlotPool(Path(root), None, SystemClock())
        slots = SlotAllocator(pool)
        for rank in range(4):
            slots.reserve(rank, SIZE)
        slots.clear()
        pool.limit_bytes = 2 * SIZE
        first = slots.reserve(0, SIZE)
        assert pool.size_bytes() == 2 * SIZE
        assert slots.reserve(1, SIZE) != first
        with pytest.raises(OutOfSpaceError, match="of the limit"):
            slots.reserve(2, SIZE)


def test_the_images_of_all_ranks_that_wait_for_the_disk_are_bounded_together(
    tmp_path: Path,
) -> None:
    assert pending_limit(1) == PENDING_COUNT_MAX
    assert pending_limit(PENDING_SIZE_BYTES // 4) == 4
    with in_process_host(tmp_path) as host:
        host.start_agent()
        host.attach(count=16)
        assert host.service is not None
        tracker = host.agent.save_tracker
        assert tracker._rank_count == 16
        # 16 ranks with 5 MB each: 80 MB a checkpoint, not 32 checkpoints of 80 MB.
        assert pending_limit(5_000_000 * tracker._rank_count) == 3
