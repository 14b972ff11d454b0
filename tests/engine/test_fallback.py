"""Damaged copies: the next one is read and the reason recorded; without one, the error has all."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.engine.reading.restore import fill_targets
from holdfast.engine.reading.sources import CheckpointSources
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import copy_part
from holdfast.errors import CheckpointDamagedError
from holdfast.format.digests import digest
from holdfast.format.names import image_key, part_key
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.engine.making import Made, flip_bit, random_array, sources_of
from tests.engine.stores import DiedError, DyingStore, WatchingStore
from tests.engine.test_restore import assert_filled, whole_targets

BLOCK = 8 * 1024 * 1024


def _made() -> Made:
    """Two ranks; rank 1's image has a chunk of three blocks and a small one."""
    made = Made(part_count=2)
    made.add(("small",), random_array((10,), "int8", 1), owners=((1, 1),))
    made.add(("big",), random_array((2 * BLOCK + 100,), "uint8", 2), owners=((1, 1),))
    made.add(("other",), random_array((64, 3), "float32", 3))
    return made


@pytest.fixture
def made(memory: RamStore, durable: DiskStore) -> Made:
    """A checkpoint that is in RAM and durable."""
    made = _made()
    for part in made.write(memory):
        copy_part(memory, durable, part, PartLayouts(made.spec.arrays))
    made.save(durable)
    return made


def image_path(store: Store, made: Made, rank: int) -> Path:
    return store.root / image_key(made.id, rank, made.part_count)


def chunk_offset(made: Made, rank: int, name: str) -> int:
    return next(c.offset_bytes for c in made.plan(rank).layout.chunks if c.name == name)


def _flip_a_block(store: Store, made: Made, block: int) -> tuple[int, int]:
    """Flips a bit in a block of the big chunk; the block's range in its image."""
    start = chunk_offset(made, 1, "big") + block * BLOCK
    flip_bit(image_path(store, made, 1), 8 * (start + 50) + 3)
    return start, start + (BLOCK if block < 2 else 100)


def test_a_good_ram_copy_serves_alone(made: Made, memory: RamStore, durable: DiskStore) -> None:
    targets = whole_targets(made)
    tally = fill_targets(sources_of(made.id, memory, durable), targets)
    assert_filled(made, targets)
    assert tally.bytes_by_tier == {"ram": sum(a.nbytes for a in made.arrays.values())}


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_bad_block_in_ram_is_read_from_the_durable_copy_and_told(
    made: Made, memory: RamStore, durable: DiskStore, block: int
) -> None:
    start, stop = _flip_a_block(memory, made, block)
    targets = whole_targets(made)
    tally = fill_targets(sources_of(made.id, memory, durable), targets)
    assert_filled(made, targets)
    assert tally.bytes_by_tier["durable"] >= stop - start
    (reason,) = {*tally.passed_over}
    key = image_key(made.id, 1, 2)
    image = image_path(durable, made, 1).read_bytes()
    assert f"ram: {key}: bytes [{start}, {stop}) have digest" in reason
    assert f"expected {digest(image[start:stop])}" in reason


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _other_bytes(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("spoil", [_cut, _other_bytes, Path.unlink], ids=["cut", "zeros", "gone"])
def test_a_spoilt_image_in_ram_is_passed_over_and_told(
    made: Made, memory: RamStore, durable: DiskStore, spoil: Callable[[Path], None]
) -> None:
    sources = sources_of(made.id, memory, durable)
    for rank in range(2):
        spoil(image_path(memory, made, rank))
    targets = whole_targets(made)
    tally = fill_targets(sources, targets)
    assert_filled(made, targets)
    assert {*tally.bytes_by_tier} == {"durable"}
    assert len(tally.passed_over) >= 2


@pytest.mark.parametrize("spoil", [_cut, _other_bytes, Path.unlink], ids=["cut", "zeros", "gone"])
def test_a_spoilt_record_in_ram_is_passed_over_and_told(
    made: Made, memory: RamStore, durable: DiskStore, spoil: Callable[[Path], None]
) -> None:
    spoil(memory.root / part_key(made.id, 1, 2))
    sources = sources_of(made.id, memory, durable)
    targets = whole_targets(made)
    tally = fill_targets(sources, targets)
    assert_filled(made, targets)
    assert {*tally.bytes_by_tier} == {"ram", "durable"}
    assert spoil is Path.unlink or "part-00001-of-00002.json" in tally.passed_over[0]


def test_a_part_in_ram_that_is_not_the_committed_one_is_passed_over(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    other = _made()
    other.arrays[("other",)] = random_array((64, 3), "float32", 99)
    other.write(memory)
    targets = whole_targets(made)
    tally = fill_targets(sources_of(made.id, memory, durable), targets)
    assert_filled(made, targets)
    assert {*tally.bytes_by_tier} == {"ram", "durable"}
    assert "this is not the committed record" in tally.passed_over[0]


def test_where_every_copy_is_bad_the_file_the_range_and_both_digests_are_told(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    image = image_path(durable, made, 1).read_bytes()
    start, stop = _flip_a_block(memory, made, 1)
    _flip_a_block(durable, made, 1)
    with pytest.raises(CheckpointDamagedError) as error:
        fill_targets(sources_of(made.id, memory, durable), whole_targets(made))
    reason = str(error.value)
    found = digest(image_path(durable, made, 1).read_bytes()[start:stop])
    for word in (
        image_key(made.id, 1, 2),
        f"[{start}, {stop})",
        f"digest {found}",
        f"expected {digest(image[start:stop])}",
    ):
        assert word in reason


def test_what_is_not_asked_for_may_be_bad(made: Made, durable: DiskStore) -> None:
    _flip_a_block(durable, made, 0)
    small = [t for t in whole_targets(made) if made.specs[t.array_index].name != "big"]
    fill_targets(sources_of(made.id, durable), small)
    assert_filled(made, small)


def test_each_block_may_come_from_another_copy(
    made: Made, memory: RamStore, durable: DiskStore
) -> None:
    # Every block has a good copy, though neither copy is good as a whole.
    _flip_a_block(memory, made, 0)
    _flip_a_block(durable, made, 2)
    targets = whole_targets(made)
    tally = fill_targets(sources_of(made.id, memory, durable), targets)
    assert_filled(made, targets)
    assert tally.bytes_by_tier["durable"] >= BLOCK


def test_a_flipped_bit_anywhere_in_the_data_is_never_restored(durable: DiskStore) -> None:
    made = Made()
    made.add(("a",), random_array((3, 5), "float32", 1), (2, 2), ((0, 6),))
    made.add(("b",), random_array((7,), "int8", 2))
    made.save(durable)
    path = image_path(durable, made, 0)
    data_start = len(made.plan(0).layout.header)
    for bit in range(8 * data_start, 8 * path.stat().st_size, 7):
        flip_bit(path, bit)
        with pytest.raises(CheckpointDamagedError):
            fill_targets(sources_of(made.id, durable), whole_targets(made))
        flip_bit(path, bit)
    targets = whole_targets(made)
    fill_targets(sources_of(made.id, durable), targets)
    assert_filled(made, targets)


def test_a_failed_restore_closes_no_image_that_is_still_being_read(
    made: Made, durable: DiskStore
) -> None:
    store = WatchingStore(durable)
    _flip_a_block(durable, made, 0)
    sources: CheckpointSources = sources_of(made.id, store)
    small, began = chunk_offset(made, 1, "small"), threading.Event()

    def hold(offset: int) -> None:
        """Keeps the small chunk's read going until its image is closed, or for half a second."""
        if offset == small:
            began.set()
            store.closing.wait(0.5)
        else:
            assert began.wait(240)

    store.before_read = hold
    with pytest.raises(CheckpointDamagedError):
        fill_targets(sources, whole_targets(made))
    assert store.closed_during_reads == 0


# Copying from tier to tier.


def test_a_bad_block_is_never_copied_to_another_tier(memory: RamStore, durable: DiskStore) -> None:
    made = _made()
    parts = made.write(memory)
    start, stop = _flip_a_block(memory, made, 1)
    with pytest.raises(CheckpointDamagedError, match=re.escape(f"[{start}, {stop})")):
        copy_part(memory, durable, parts[1], PartLayouts(made.spec.arrays))
    assert list(durable.list("checkpoints")) == []


def test_a_flipped_bit_in_a_header_is_never_copied(memory: RamStore, durable: DiskStore) -> None:
    made = _made()
    parts = made.write(memory)
    flip_bit(image_path(memory, made, 0), 8 * 100)
    with pytest.raises(CheckpointDamagedError, match=re.escape("[0, 4096)")):
        copy_part(memory, durable, parts[0], PartLayouts(made.spec.arrays))
    assert list(durable.list("checkpoints")) == []


def test_a_copy_is_the_same_bytes(memory: RamStore, durable: DiskStore) -> None:
    made = _made()
    for part in made.write(memory):
        copy_part(memory, durable, part, PartLayouts(made.spec.arrays))
    listed = list(durable.list("checkpoints"))
    assert listed == list(memory.list("checkpoints"))
    assert len(listed) == 4
    for stored in listed:
        assert durable.get(stored.key) == memory.get(stored.key)


def test_an_image_that_could_not_be_written_has_no_record(
    memory: RamStore, durable: DiskStore
) -> None:
    made = _made()
    parts = made.write(memory)
    for call in (
        lambda store: made.write(store),
        lambda store: copy_part(memory, store, parts[0], PartLayouts(made.spec.arrays)),
    ):
        with pytest.raises(DiedError):
            call(DyingStore(durable, 0, "midway"))
    assert list(durable.list("checkpoints")) == []


def test_a_record_with_other_blocks_than_the_arrays_make_is_damaged_and_not_copied(
    memory: RamStore, durable: DiskStore
) -> None:
    made = _made()
    part = made.write(memory)[1]
    for blocks in (part.blocks[:-1], (*part.blocks, "0" * 32)):
        wrong = msgspec.structs.replace(part, blocks=blocks)
        with pytest.raises(CheckpointDamagedError):
            copy_part(memory, durable, wrong, PartLayouts(made.spec.arrays))
    wrong = msgspec.structs.replace(part, image_size_bytes=part.image_size_bytes - 1)
    with pytest.raises(CheckpointDamagedError):
        copy_part(memory, durable, wrong, PartLayouts(made.spec.arrays))
