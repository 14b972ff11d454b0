"""Restoring any region of any grid, against plain NumPy slices of what was saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.clock import SystemClock
from holdfast.engine.reading.restore import (
    BATCH_COUNT_MAX,
    BATCH_SIZE_BYTES,
    _batches,
    fill_targets,
)
from holdfast.engine.reading.sources import CheckpointSources
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import copy_part
from holdfast.format.grid import RestoreTarget
from holdfast.format.layout import Chunk
from holdfast.store.disk import DiskStore
from tests.engine.making import (
    Made,
    cells,
    checkpoints,
    disk,
    memory_folder,
    random_array,
    regions,
    same_bits,
    sources_of,
)
from tests.engine.stores import WatchingStore, ram

BLOCK = 8 * 1024 * 1024


def poisoned(shape: tuple[int, ...], dtype: np.dtype, order: str = "C") -> np.ndarray:
    """Return a buffer filled with a marker for unwritten bytes; `strided`: not contiguous."""
    strided = order == "strided"
    whole = tuple(2 * d for d in shape) if strided else shape
    size = math.prod(whole) * dtype.itemsize
    # 0x01 and 0x00 are the bytes that a bool may have.
    byte = b"\x01" if dtype.kind == "b" else b"\xab"
    flat = np.frombuffer(bytearray(byte * size), dtype)
    made = flat.reshape(whole, order="F" if order == "F" else "C")
    return made[(*(slice(None, None, 2) for _ in shape), ...)] if strided else made


def target(made: Made, index: int, region: tuple, order: str = "C") -> RestoreTarget:
    shape = tuple(b - a for a, b in zip(*region, strict=True))
    dtype = made.arrays[made.specs[index].path].dtype
    return RestoreTarget(array_index=index, region=region, buffer=poisoned(shape, dtype, order))


def expected(made: Made, one: RestoreTarget) -> np.ndarray:
    cut = tuple(slice(a, b) for a, b in zip(*one.region, strict=True))
    return made.arrays[made.specs[one.array_index].path][(*cut, ...)]


def assert_filled(made: Made, targets: list[RestoreTarget]) -> None:
    for one in targets:
        assert same_bits(one.buffer, expected(made, one))


def whole_targets(made: Made) -> list[RestoreTarget]:
    return [
        target(made, index, ((0,) * len(spec.shape), spec.shape))
        for index, spec in enumerate(made.specs)
    ]


@st.composite
def targets_of(draw: Callable, made: Made) -> list[RestoreTarget]:
    found = []
    for index, spec in enumerate(made.specs):
        for _ in range(draw(st.integers(0, 3))):
            order = draw(st.sampled_from(["C", "C", "F", "strided"]))
            found.append(target(made, index, draw(regions(spec.shape)), order))
    return found


@given(checkpoints(), st.data())
def test_any_region_reads_as_the_slice_of_what_was_saved(made: Made, data: st.DataObject) -> None:
    targets = data.draw(targets_of(made))
    with memory_folder() as folder:
        store = disk(Path(folder))
        made.save(store)
        fill_targets(sources_of(made.id, store), targets)
    assert_filled(made, targets)


@given(checkpoints(), st.data())
def test_a_checkpoint_in_ram_alone_reads_as_one_that_is_durable(
    made: Made, data: st.DataObject
) -> None:
    targets = data.draw(targets_of(made))
    with memory_folder() as folder:
        memory, durable = ram(Path(folder) / "ram"), disk(Path(folder) / "run")
        for part in made.write(memory):
            copy_part(memory, durable, part, PartLayouts(made.spec.arrays))
        tally = fill_targets(sources_of(made.id, memory, durable), targets)
        memory.close()
    assert_filled(made, targets)
    assert {*tally.bytes_by_tier} <= {"ram"}
    assert tally.passed_over == []


@given(checkpoints(), st.data())
def test_only_chunks_that_hold_a_wanted_element_are_read_and_each_once(
    made: Made, data: st.DataObject
) -> None:
    targets = data.draw(targets_of(made))
    wanted = 0
    for index, spec in enumerate(made.specs):
        asked = np.zeros(spec.shape, bool)
        for one in targets:
            if one.array_index == index:
                asked[tuple(slice(a, b) for a, b in zip(*one.region, strict=True))] = True
        item = made.arrays[spec.path].itemsize
        for cell in cells(spec.shape, spec.chunk_shape):
            wanted += asked[cell].size * item if asked[cell].any() else 0
    with memory_folder() as folder:
        store = WatchingStore(disk(Path(folder)))
        made.save(store)
        tally = fill_targets(sources_of(made.id, store), targets)
    assert sum(stop - start for _, start, stop in store.reads) == wanted
    assert len({*store.reads}) == len(store.reads)
    assert sum(tally.bytes_by_tier.values()) == wanted


class Big:
    """A checkpoint with chunks of several blocks, saved once for all tests here."""

    def __init__(self, store: DiskStore) -> None:
        self.made = Made(part_count=2)
        # Blocks begin in the midst of rows: 6800 bytes do not divide 8 MiB.
        self.made.add(("a",), random_array((3, 1100, 1700), "float32", 1), owners=((1, 1),))
        flat = random_array((2, 5_000_011), "int16", 2)
        self.made.add(("b",), flat, (1, 4_500_000), ((0, 2), (1, 2)))
        self.made.add(("c",), random_array((BLOCK + 1,), "uint8", 3))
        self.made.save(store)
        self.store = WatchingStore(store)
        self.sources: CheckpointSources = sources_of(self.made.id, self.store)


@pytest.fixture(scope="module", params=[False, True], ids=["cached", "direct"])
def big(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Big]:
    if request.param:
        root = tmp_path_factory.mktemp("big")
        yield Big(DiskStore(root, SystemClock(), reads_directly=True))
        return
    with memory_folder() as folder:
        yield Big(disk(Path(folder)))


@settings(max_examples=40)
@given(st.data())
def test_regions_across_blocks_read_as_the_slice_of_what_was_saved(
    big: Big, data: st.DataObject
) -> None:
    targets = []
    for index in data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=2)):
        region = data.draw(regions(big.made.specs[index].shape))
        targets.append(
            target(big.made, index, region, data.draw(st.sampled_from(["C", "strided"])))
        )
    big.store.reads.clear()
    fill_targets(big.sources, targets)
    assert_filled(big.made, targets)
    assert len({*big.store.reads}) == len(big.store.reads)


@pytest.mark.parametrize(
    ("region", "blocks"),
    [
        (((0, 0, 0), (1, 1, 1)), {0}),
        (((2, 1099, 1699), (3, 1100, 1700)), {2}),
        (((1, 133, 1051), (2, 134, 1052)), {0}),
        (((1, 133, 1052), (2, 134, 1053)), {1}),
        (((1, 133, 1051), (2, 134, 1053)), {0, 1}),
        (((0, 0, 0), (3, 1100, 1700)), {0, 1, 2}),
        (((0, 0, 0), (3, 1, 1)), {0, 1}),
        (((0, 1099, 0), (3, 1100, 1)), {0, 1, 2}),
        (((0, 0, 0), (3, 0, 1)), set()),
    ],
    ids=str,
)
def test_only_blocks_that_hold_a_wanted_element_are_read(
    big: Big, region: tuple, blocks: set[int]
) -> None:
    # Block 1 begins with element 2 097 152 of the array: [1, 133, 1052] of rows of 1700.
    one = target(big.made, 0, region)
    numbers = np.arange(3 * 1100 * 1700).reshape(3, 1100, 1700)
    cut = tuple(slice(a, b) for a, b in zip(*region, strict=True))
    truth = {*(numbers[cut].reshape(-1) // (BLOCK // 4)).tolist()}
    big.store.reads.clear()
    fill_targets(big.sources, [one])
    start = len(big.sources.parts[1][0].layout.images[0].header)
    assert {(first - start) // BLOCK for _, first, _ in big.store.reads} == truth
    assert len(big.store.reads) == len(truth)
    assert_filled(big.made, [one])
    assert blocks == truth


def test_a_whole_chunk_is_read_in_place_and_serves_other_targets_too(big: Big) -> None:
    whole = ((0, 0, 0), (3, 1100, 1700))
    targets = [
        target(big.made, 0, ((0, 5, 7), (3, 1000, 1600)), "strided"),
        target(big.made, 0, whole, "strided"),
        target(big.made, 0, whole),
        target(big.made, 0, whole),
        target(big.made, 0, ((1, 0, 0), (1, 5, 5))),
    ]
    big.store.reads.clear()
    fill_targets(big.sources, targets)
    assert_filled(big.made, targets)
    assert len(big.store.reads) == 3


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_chunk_that_is_a_slab_of_a_target_is_read_straight_into_it(
    big: Big, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    targets = [
        # Its two rows are a chunk each.
        target(big.made, 1, ((0, 0), (2, 4_500_000))),
        # This one has part of a chunk.
        target(big.made, 1, ((1, 5), (2, 4_500_000))),
    ]
    elsewhere: list[int] = []

    def note(memory: memoryview) -> None:
        found = np.frombuffer(memory, np.uint8)
        if not np.shares_memory(found, targets[0].buffer):
            elsewhere.append(found.size)

    monkeypatch.setattr(big.store, "on_memory", note)
    monkeypatch.setattr(big.store, "is_remote", is_remote)
    fill_targets(big.sources, targets)
    assert_filled(big.made, targets)
    assert elsewhere == []


def test_nothing_is_opened_for_nothing(big: Big) -> None:
    big.store.opened.clear()
    empty = [target(big.made, 0, ((1, 5, 5), (1, 9, 9))), target(big.made, 2, ((3,), (3,)))]
    tally = fill_targets(big.sources, [])
    assert (tally.bytes_by_tier, big.store.opened) == ({}, [])
    fill_targets(big.sources, empty)
    assert big.store.opened == []


def test_small_chunks_are_read_together_and_large_ones_alone() -> None:
    def chunk(size_bytes: int) -> tuple[int, Chunk, list[RestoreTarget]]:
        placed = Chunk(
            name="a",
            array_index=0,
            chunk_index=0,
            start=(0,),
            stop=(1,),
            ordinal=0,
            offset_bytes=0,
            size_bytes=size_bytes,
            first_block=0,
        )
        return 0, placed, []

    small, large = chunk(4), chunk(BATCH_SIZE_BYTES)
    found = [*_batches([small] * (BATCH_COUNT_MAX + 1) + [large, large, small])]
    assert [len(batch) for batch in found] == [BATCH_COUNT_MAX, 2, 1, 1]
    assert [one for batch in found for one in batch] == [small] * (BATCH_COUNT_MAX + 1) + [
        large,
        large,
        small,
    ]
    assert [*_batches([])] == []
