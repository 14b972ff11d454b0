"""Slots: the file system alone determines which are free."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.clock import SystemClock
from holdfast.errors import InvalidArgumentError, ObjectNotFoundError, OutOfSpaceError, StorageError
from holdfast.store.ram import RamStore
from holdfast.store.slots import SLOTS, SlotPool
from holdfast.testing.block_source import BlockSource
from holdfast.testing.store_processes import kill_midway_through_put
from tests.store.places import open_ram, slots

MIB = 1 << 20
SIZE = 3 * MIB + 17
IMAGE = "checkpoints/000000001.1-00000001/image-00000-of-00001.safetensors"
OTHER = "checkpoints/000000002.1-00000001/image-00000-of-00001.safetensors"


def pool_in(root: Path, limit_bytes: int | None = None) -> SlotPool:
    return SlotPool(root, limit_bytes, SystemClock())


@pytest.fixture
def pool(in_memory: Path) -> SlotPool:
    return pool_in(in_memory)


@pytest.fixture
def store(in_memory: Path, pool: SlotPool) -> Iterator[RamStore]:
    made = RamStore(in_memory, pool.reserve, SystemClock())
    yield made
    made.close()


def fill(store: RamStore, key: str = IMAGE, byte: bytes = b"x", size: int = SIZE) -> None:
    store.put(key, byte * size)


@contextlib.contextmanager
def locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def test_a_new_slot_has_its_size_and_its_memory_at_once(pool: SlotPool, in_memory: Path) -> None:
    name = pool.reserve(SIZE)
    state = (in_memory / SLOTS / name).stat()
    assert state.st_size == SIZE
    assert state.st_blocks * 512 >= SIZE
    assert state.st_mode & 0o777 == 0o600
    assert pool.size_bytes() == SIZE
    assert [*pool.free_slots()] == [name]


def test_a_slot_is_used_again_once_its_image_is_deleted(
    store: RamStore, pool: SlotPool, in_memory: Path
) -> None:
    fill(store)
    (name,) = slots(in_memory)
    assert [*pool.free_slots()] == []
    assert os.stat(in_memory / IMAGE).st_ino == os.stat(in_memory / SLOTS / name).st_ino
    store.delete(IMAGE)
    assert [*pool.free_slots()] == [name]
    fill(store, OTHER, b"y")
    assert slots(in_memory) == [name]
    assert store.get(OTHER) == b"y" * SIZE


def test_two_images_have_two_slots(store: RamStore, in_memory: Path) -> None:
    fill(store)
    fill(store, OTHER, b"y")
    assert len(slots(in_memory)) == 2
    assert store.get(IMAGE) == b"x" * SIZE
    assert store.get(OTHER) == b"y" * SIZE


def test_an_image_that_is_put_again_frees_the_slot_of_the_old_one(
    store: RamStore, pool: SlotPool, in_memory: Path
) -> None:
    for byte in (b"1", b"2", b"3"):
        fill(store, IMAGE, byte)
        assert store.get(IMAGE) == byte * SIZE
    assert len(slots(in_memory)) == 2
    assert len(pool.free_slots()) == 1


def test_a_locked_slot_is_not_free(pool: SlotPool, in_memory: Path) -> None:
    name = pool.reserve(SIZE)
    for how in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        with locked(in_memory / SLOTS / name, how):
            assert [*pool.free_slots()] == []
            assert [*pool_in(in_memory).free_slots()] == []
        assert [*pool.free_slots()] == [name]
    with locked(in_memory / SLOTS / name):
        assert pool.reserve(SIZE) != name


def test_a_slot_that_is_handed_out_and_not_yet_locked_is_not_handed_out_again(
    pool: SlotPool,
) -> None:
    first = pool.reserve(SIZE)
    second = pool.reserve(SIZE, {first})
    third = pool.reserve(SIZE, {first, second})
    assert len({first, second, third}) == 3
    assert pool.reserve(SIZE, {second, third}) == first


def test_a_deleted_image_keeps_its_slot_while_somebody_reads_it(
    store: RamStore, pool: SlotPool
) -> None:
    fill(store)
    with store.open(IMAGE) as reader:
        store.delete(IMAGE)
        assert [*pool.free_slots()] == []
        fill(store, OTHER, b"y")
        target = bytearray(SIZE)
        reader.read_into(0, memoryview(target))
        assert target == b"x" * SIZE
    assert len(pool.free_slots()) == 1


def test_free_slots_of_another_size_make_room_and_used_ones_stay(
    store: RamStore, pool: SlotPool, in_memory: Path
) -> None:
    fill(store)
    fill(store, OTHER)
    store.delete(OTHER)
    handed_out = pool.reserve(100, [*pool.free_slots()])
    (in_memory / SLOTS / handed_out).stat()
    (free,) = [name for name in pool.free_slots() if name != handed_out]
    new = pool.reserve(SIZE + 1, {handed_out})
    assert free not in slots(in_memory)
    assert {handed_out, new} <= {*slots(in_memory)}
    assert len(slots(in_memory)) == 3
    assert store.get(IMAGE) == b"x" * SIZE


def test_free_slots_of_a_size_that_is_still_in_use_stay(pool: SlotPool, in_memory: Path) -> None:
    of_rank_1 = pool.reserve(100)
    of_rank_0 = pool.reserve(200, {of_rank_1}, {100})
    assert pool.reserve(300, (), {100, 300}) in slots(in_memory)
    assert of_rank_1 in slots(in_memory)
    assert of_rank_0 not in slots(in_memory)
    assert pool.reserve(100, (), {300}) == of_rank_1


def test_a_new_pool_knows_what_the_old_one_knew(
    store: RamStore, pool: SlotPool, in_memory: Path
) -> None:
    fill(store)
    fill(store, OTHER)
    store.delete(OTHER)
    (free,) = pool.free_slots()
    adopted = pool_in(in_memory)
    assert [*adopted.free_slots()] == [free]
    assert adopted.size_bytes() == 2 * SIZE
    assert adopted.reserve(SIZE) == free
    assert adopted.reserve(SIZE, {free}) not in (free, "")


def test_a_pool_of_nothing_is_empty(in_memory: Path) -> None:
    pool = pool_in(in_memory / "never")
    assert [*pool.free_slots()] == []
    assert pool.size_bytes() == 0
    assert not (in_memory / "never").exists()


def test_the_limit_counts_all_slots_and_leaves_them_as_they_are(in_memory: Path) -> None:
    pool = pool_in(in_memory, 2 * SIZE + 5)
    names = [pool.reserve(SIZE)]
    names.append(pool.reserve(SIZE, names))
    with pytest.raises(OutOfSpaceError, match=rf"{2 * SIZE} of the limit of {2 * SIZE + 5} bytes"):
        pool.reserve(SIZE, names)
    with pytest.raises(OutOfSpaceError, match=r"raise RamTier\(limit_bytes=\.\.\.\)"):
        pool.reserve(6, names)
    assert slots(in_memory) == sorted(names)
    assert pool.reserve(5, names) not in names
    assert pool.reserve(SIZE, names[:1]) == names[1]


def test_a_failed_fill_leaves_the_slot_free_and_no_name(
    store: RamStore, pool: SlotPool, in_memory: Path
) -> None:
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(InvalidArgumentError):
            store.put(IMAGE, BlockSource([bytes(size)], size_bytes=SIZE))
    assert [*pool.free_slots()] == slots(in_memory)
    assert len(slots(in_memory)) == 1
    assert [p for p in in_memory.rglob("*") if not p.is_dir()] == [
        in_memory / SLOTS / slots(in_memory)[0]
    ]


def test_a_slot_that_somebody_else_fills_is_refused(in_memory: Path, pool: SlotPool) -> None:
    name = pool.reserve(SIZE)
    store = RamStore(in_memory, lambda size: name, SystemClock())
    with locked(in_memory / SLOTS / name), pytest.raises(StorageError, match="another process"):
        fill(store)
    fill(store)
    store.close()


def test_a_slot_of_another_size_is_refused_and_not_written_past_its_end(
    in_memory: Path, pool: SlotPool
) -> None:
    name = pool.reserve(4096)
    store = RamStore(in_memory, lambda size: name, SystemClock())
    with pytest.raises(StorageError, match="expected 3145745 bytes, found 4096"):
        fill(store)
    store.close()


def test_a_slot_made_anew_under_the_old_name_is_mapped_anew(in_memory: Path) -> None:
    pool = pool_in(in_memory)
    store = RamStore(in_memory, lambda size: "one", SystemClock())
    for byte in (b"1", b"2"):
        (in_memory / SLOTS / pool.reserve(SIZE)).rename(in_memory / SLOTS / "one")
        fill(store, IMAGE, byte)
        assert store.get(IMAGE) == byte * SIZE
        store.delete(IMAGE)
        (in_memory / SLOTS / "one").unlink()
    store.close()


def test_looking_for_free_slots_never_disturbs_who_fills_one(
    store: RamStore, pool: SlotPool, in_memory: Path
) -> None:
    owner, is_done = pool_in(in_memory), threading.Event()

    def look() -> None:
        while not is_done.is_set():
            owner.free_slots()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(3000):
            fill(store, size=1)
            store.delete(IMAGE)
    finally:
        is_done.set()
        looking.join()


def test_the_slot_of_a_killed_process_is_free_again(in_memory: Path, pool: SlotPool) -> None:
    opener = functools.partial(open_ram, in_memory)
    kill_midway_through_put(opener, IMAGE, b"x" * SIZE)
    assert [*pool.free_slots()] == slots(in_memory)
    (name,) = slots(in_memory)
    store = open_ram(in_memory)
    assert list(store.list("checkpoints")) == []
    fill(store, OTHER, b"y")
    assert slots(in_memory) == [name]
    assert store.get(OTHER) == b"y" * SIZE
    store.close()


def test_a_name_that_a_killed_process_left_halfway_keeps_its_slot_until_it_is_discarded(
    store: RamStore, pool: SlotPool, in_memory: Path
) -> None:
    # Between the link and the rename: two names, none of which is an object's.
    fill(store)
    (in_memory / IMAGE).rename((in_memory / IMAGE).with_name(".image.0123.unfinished"))
    assert [*pool.free_slots()] == []
    store.discard_unfinished("checkpoints")
    assert [*pool.free_slots()] == slots(in_memory)


# A slot to spare, filled by hand.


def test_a_spare_slot_is_a_free_one_or_a_new_one_while_there_are_few(
    in_memory: Path, pool: SlotPool, store: RamStore
) -> None:
    two = 2 * SIZE
    first = pool.spare(SIZE, two)
    assert first is not None
    assert pool.spare(SIZE, two) == first
    second = pool.spare(SIZE, two, {first})
    assert second not in (None, first)
    assert pool.spare(SIZE, two, {first, second}) is None
    with locked(in_memory / SLOTS / first):
        assert pool.spare(SIZE, two, {second}) is None
    assert pool.spare(SIZE + 1, two, in_use_bytes={SIZE}) is None
    assert pool.spare(SIZE + 1, two + SIZE + 1) not in (None, first, second)
    assert {first, second} < {*pool.free_slots()}


def test_a_small_slot_to_spare_takes_the_place_of_a_free_one_of_another_size(
    pool: SlotPool, store: RamStore
) -> None:
    store.put(IMAGE, b"x" * SIZE)
    unused = pool.spare(SIZE, 2 * SIZE)
    small = pool.spare(100, 2 * SIZE)
    assert small not in (None, unused)
    assert [*pool.free_slots()] == [small]
    assert pool.spare(100, 2 * SIZE, {small}) not in (None, small)
    assert pool.size_bytes() == SIZE + 200


def test_the_slot_of_an_image_with_two_names_is_free_without_either(
    in_memory: Path, pool: SlotPool, store: RamStore
) -> None:
    store.put(IMAGE, b"x" * SIZE)
    other = IMAGE.replace("000000001", "000000002")
    assert other != IMAGE
    store.link(IMAGE, other)
    store.delete(IMAGE)
    assert [*pool.free_slots()] == []
    assert store.get(other) == b"x" * SIZE
    store.put(IMAGE, b"y" * SIZE)
    assert store.get(other) == b"x" * SIZE
    store.delete(other)
    assert len(pool.free_slots()) == 1


def test_a_filling_is_shown_whole_or_free_again(in_memory: Path, store: RamStore) -> None:
    with contextlib.closing(store.begin(SIZE)) as filling:
        filling.write(0, memoryview(b"x" * (SIZE - 1)))
        assert [*pool_in(in_memory).free_slots()] == []
        with pytest.raises(ObjectNotFoundError):
            store.get(IMAGE)
    assert len(pool_in(in_memory).free_slots()) == 1
    with contextlib.closing(store.begin(SIZE)) as filling:
        filling.write(0, memoryview(b"y" * SIZE))
        assert filling.view() == b"y" * SIZE
        filling.show(IMAGE)
    assert store.get(IMAGE) == b"y" * SIZE
    assert [*pool_in(in_memory).free_slots()] == []


def test_a_filling_takes_no_byte_beyond_its_end(store: RamStore) -> None:
    with (
        contextlib.closing(store.begin(SIZE)) as filling,
        pytest.raises(InvalidArgumentError, match="more than"),
    ):
        filling.write(SIZE - 1, memoryview(b"xx"))


def test_a_mapping_outlives_its_store_while_it_is_filled(store: RamStore) -> None:
    with contextlib.closing(store.begin(SIZE)) as filling:
        store.close()
        filling.write(0, memoryview(b"z" * SIZE))
        filling.show(IMAGE)
    assert store.get(IMAGE) == b"z" * SIZE


def test_lent_memory_stays_as_it_is_while_anything_views_it(
    in_memory: Path, store: RamStore
) -> None:
    fill(store)
    with store.open(IMAGE) as reader:
        view = reader.lasting_view()
    assert view is not None
    assert view.readonly
    part = np.frombuffer(view[5:], np.uint8)
    del view, reader
    store.delete(IMAGE)
    fill(store, OTHER, b"o")
    assert len(slots(in_memory)) == 2
    assert (part == ord("x")).all()
    del part
    gc.collect()
    assert len(pool_in(in_memory).free_slots()) == 1


def test_a_slot_that_was_removed_since_it_was_reserved_is_told(in_memory: Path) -> None:
    store = RamStore(in_memory, lambda size: "gone", SystemClock())
    with pytest.raises(StorageError, match=r"fill .*/slots/gone"):
        store.begin(SIZE)


def test_other_threads_run_while_a_large_slot_is_mapped_and_its_pages_are_there(
    store: RamStore, pool: SlotPool
) -> None:
    size, turns, is_over = 256 * MIB, [0], threading.Event()

    def count_turns() -> None:
        while not is_over.wait(0.001):
            turns[0] += 1

    pool.reserve(size)
    counting = threading.Thread(target=count_turns)
    counting.start()
    try:
        before = turns[0]
        filling = store.begin(size)
        found = turns[0] - before
    finally:
        is_over.set()
        counting.join()
    with contextlib.closing(filling), filling.target(0, size) as memory:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.frombuffer(memory, np.uint8)[::4096] = 1
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert found >= 5
    assert faults < size // 4096 // 16
