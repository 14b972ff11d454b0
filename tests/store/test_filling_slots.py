"""Slots that a device writes into, or that another process changes, while they are filled."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.clock import SystemClock
from holdfast.errors import StorageError
from holdfast.store.slots import SLOTS, SlotPool
from tests.store.places import open_ram, slots

MIB = 1 << 20
SIZE = 3 * MIB + 17
IMAGE = "checkpoints/000000001.1-00000001/image-00000-of-00001.safetensors"


class Pinned:
    """A device's registration of a slot's memory."""

    def __init__(self, memory: memoryview) -> None:
        self.view: np.ndarray | None = np.frombuffer(memory, np.uint8)
        self.is_busy = False

    def close(self) -> None:
        self.view = None


def test_a_pin_is_made_once_for_a_slot_and_closed_before_it_is_unmapped(in_memory: Path) -> None:
    made: list[Pinned] = []

    def pin(memory: memoryview) -> Pinned:
        made.append(Pinned(memory))
        return made[-1]

    store = open_ram(in_memory)
    for _ in range(3):
        with contextlib.closing(store.begin(SIZE)) as filling:
            pinned = filling.pinned(pin)
            assert pinned is made[0]
            assert len(pinned.view) == SIZE
    # It would raise if anything still viewed the memory.
    store.close()
    assert len(made) == 1
    assert made[0].view is None


def test_other_threads_run_while_the_pages_of_a_slot_are_populated(in_memory: Path) -> None:
    size_bytes = 512 * MIB
    with contextlib.closing(open_ram(in_memory)) as first:
        first.begin(size_bytes).close()
    store = open_ram(in_memory)
    mapping = threading.Thread(target=lambda: store.begin(size_bytes).close())
    turns = 0
    mapping.start()
    while mapping.is_alive():
        # It gives up the GIL, as each operation of a framework does.
        time.sleep(0)
        turns += 1
    mapping.join()
    store.close()
    assert len(slots(in_memory)) == 1
    # A thread that keeps the GIL gives it up once for each of the 64 pieces at most.
    assert turns > 200, f"expected turns beside 0.1 s of populating, found {turns}"


def test_a_slot_that_cannot_be_pinned_is_filled_all_the_same(in_memory: Path) -> None:
    store = open_ram(in_memory)
    with contextlib.closing(store.begin(SIZE)) as filling:
        assert filling.pinned(lambda memory: None) is None
        filling.write(0, memoryview(b"x" * SIZE))
        filling.show(IMAGE)
    assert store.get(IMAGE) == b"x" * SIZE
    store.close()


def test_a_slot_that_a_device_may_still_write_into_is_nobody_elses(in_memory: Path) -> None:
    store = open_ram(in_memory)
    pool = SlotPool(in_memory, None, SystemClock())
    filling = store.begin(SIZE)
    pinned = filling.pinned(Pinned)
    pinned.is_busy = True
    filling.close()
    assert [*pool.free_slots()] == []
    store.close()
    assert len(pinned.view) == SIZE
    pinned.is_busy = False
    filling.close()
    assert len(pool.free_slots()) == 1
    store.close()
    assert pinned.view is None


def test_what_a_device_wrote_into_a_slot_that_was_cut_off_is_noticed(in_memory: Path) -> None:
    store = open_ram(in_memory)
    with contextlib.closing(store.begin(SIZE)) as filling:
        filling.pinned(Pinned).view[:] = 1
        filling.check_whole()
        (name,) = slots(in_memory)
        os.truncate(in_memory / SLOTS / name, SIZE // 2)
        with pytest.raises(StorageError, match="another process changes the RAM tier"):
            filling.check_whole()
        os.truncate(in_memory / SLOTS / name, SIZE)
    store.close()


def test_a_slot_that_is_cut_off_between_small_blocks_is_noticed_within_a_mib(
    in_memory: Path,
) -> None:
    block, size = memoryview(bytes(4096)), 4 * MIB
    store = open_ram(in_memory)
    with contextlib.closing(store.begin(size)) as filling:
        filling.write(0, block)
        (name,) = slots(in_memory)
        # Its first half keeps its memory: what is written there meanwhile does no harm.
        os.truncate(in_memory / SLOTS / name, size // 2)
        starts = iter(range(0, size // 2, len(block)))

        def write_on() -> None:
            for start in starts:
                filling.write(start, block)

        with pytest.raises(StorageError, match="another process changes the RAM tier"):
            write_on()
        assert next(starts) <= MIB
    store.close()
