"""Read mappings of slots: they follow the names, and hold neither locks nor memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import StorageError
from holdfast.store.ram import RamStore
from holdfast.store.slots import SLOTS, SlotPool

SIZE = 3 << 20
FIRST = "checkpoints/000000001.1-00000001/image-00000-of-00001.safetensors"
SECOND = "checkpoints/000000002.1-00000001/image-00000-of-00001.safetensors"


@pytest.fixture
def pool(in_memory: Path) -> SlotPool:
    return SlotPool(in_memory, None, SystemClock())


@pytest.fixture
def store(in_memory: Path, pool: SlotPool) -> Iterator[RamStore]:
    made = RamStore(in_memory, pool.reserve, SystemClock())
    pool.on_evicted = made.release_deleted
    yield made
    made.close()


def read(store: RamStore, key: str) -> bytes:
    with store.open(key) as reader:
        view = reader.view()
        assert view is not None
        assert view.readonly
        return bytes(view)


def mapped_count(root: Path) -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"{root}/" in line and " r--s " in line for line in maps)


def test_a_slot_that_is_filled_again_is_read_as_it_is_now_and_mapped_once(
    in_memory: Path, store: RamStore
) -> None:
    for byte in (b"a", b"b", b"c"):
        store.put(FIRST, byte * SIZE)
        assert read(store, FIRST) == byte * SIZE
        store.delete(FIRST)
    assert mapped_count(in_memory) == 1
    assert len(os.listdir(in_memory / SLOTS)) == 1


def test_a_mapping_keeps_no_lock(store: RamStore, pool: SlotPool) -> None:
    store.put(FIRST, b"a" * SIZE)
    read(store, FIRST)
    store.delete(FIRST)
    assert len(pool.free_slots()) == 1


def test_the_memory_of_a_slot_that_was_given_up_is_free(
    in_memory: Path, store: RamStore, pool: SlotPool
) -> None:
    store.put(FIRST, b"a" * SIZE)
    read(store, FIRST)
    store.delete(FIRST)
    # An image of another size: the slot of the first one is evicted for it.
    store.put(SECOND, b"b" * 2 * SIZE)
    assert mapped_count(in_memory) == 0
    assert read(store, SECOND) == b"b" * 2 * SIZE


def test_a_slot_that_is_given_up_while_it_is_read_goes_when_it_was_read(
    in_memory: Path, store: RamStore
) -> None:
    store.put(FIRST, b"a" * SIZE)
    with store.open(FIRST) as reader:
        view = reader.view()
        assert view is not None
        for path in (in_memory / SLOTS).iterdir():
            path.unlink()
        store.delete(FIRST)
        store.release_deleted()
        assert bytes(view) == b"a" * SIZE
        view.release()
    store.release_deleted()
    assert mapped_count(in_memory) == 0


def test_a_slot_that_was_cut_off_is_an_error_and_no_signal(
    in_memory: Path, store: RamStore
) -> None:
    store.put(FIRST, b"a" * SIZE)
    read(store, FIRST)
    os.truncate(in_memory / FIRST, 4096)
    with store.open(FIRST) as reader:
        os.truncate(in_memory / FIRST, 1024)
        with pytest.raises(StorageError, match="expected 4096 bytes of memory, found"):
            reader.view()


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_store_that_nobody_has_any_more_leaves_no_descriptor(
    in_memory: Path, is_closed: bool
) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    # Descriptors of earlier tests' stores, which the collector has not come to yet.
    gc.collect()
    before = count()
    for number in range(5):
        root = in_memory / str(number)
        made = RamStore(root, SlotPool(root, None, SystemClock()).reserve, SystemClock())
        made.put(FIRST, b"a" * SIZE)
        read(made, FIRST)
        if is_closed:
            made.close()
        else:
            # Mappings for filling are closed by their owner.
            made._unmap(lambda slot: True)
        del made
    gc.collect()
    assert count() == before


def test_an_image_that_was_read_keeps_one_descriptor(store: RamStore) -> None:
    keys = [
        f"checkpoints/{step:09d}.1-00000001/image-00000-of-00001.safetensors" for step in range(8)
    ]
    for key in keys:
        store.put(key, bytes(4096))
    store._unmap(lambda slot: True)
    before = len(os.listdir("/proc/self/fd"))
    for key in keys:
        read(store, key)
    assert len(os.listdir("/proc/self/fd")) == before + len(keys)


def test_a_mapping_that_is_not_read_again_is_released(in_memory: Path, store: RamStore) -> None:
    store.put(FIRST, b"a" * SIZE)
    read(store, FIRST)
    store.release_idle()
    assert mapped_count(in_memory) == 1
    store.release_idle()
    assert mapped_count(in_memory) == 0
    assert read(store, FIRST) == b"a" * SIZE


def test_an_object_without_bytes_shows_none(store: RamStore) -> None:
    store.put("records/empty", b"")
    with store.open("records/empty") as reader:
        assert reader.view() is None
