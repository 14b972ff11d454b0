"""Large arrays that several ranks hold are cut, so that the ranks write about as much each."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.planning.chunking import PIECE_SIZE_MIN_BYTES, split_large
from holdfast.engine.planning.owners import assign_owners, shared
from holdfast.format.check import check_spec
from holdfast.format.grid import Placement, contiguous_start, enclosing_chunk
from holdfast.format.layout import image_layout
from holdfast.format.sealed import seal
from tests.engine.making import cells, numpy_type, planned_spec
from tests.timing import in_time

MIB = 1024 * 1024


def placed(
    shape: tuple[int, ...],
    grid: tuple[int, ...],
    holders: np.ndarray,
    dtype: str = "float32",
) -> Placement:
    """An array in a grid of equal shards; `holders` has a row for each of them."""
    return Placement(
        shape=shape,
        dtype=dtype,
        chunk_shape=tuple(d // g for d, g in zip(shape, grid, strict=True)),
        holders=tuple(tuple(sorted(row)) for row in holders.reshape(math.prod(grid), -1).tolist()),
    )


def model(rank_count: int, way: str, seed: int = 0) -> list[Placement]:
    """The arrays of a large model, one of them much larger than the others, placed in one way."""
    ranks, chance = np.arange(rank_count), random.Random(seed)
    slices = ranks.reshape(2, -1) if rank_count > 1 else ranks.reshape(1, 1)
    found = []
    for index in range(40):
        rows = 4096 * chance.randint(1, 8) * (40 if index == 7 else 1)
        shape = (rows, 4 * chance.randint(64, 1024))
        here = way if way != "mixed" else chance.choice(["replicated", "sharded", "columns"])
        if here == "replicated":
            found.append(placed(shape, (1, 1), ranks))
        elif here == "sharded":
            found.append(placed(shape, (rank_count, 1), ranks))
        elif here == "columns":
            found.append(placed(shape, (1, 4), ranks.reshape(-1, 4).T))
        elif here == "over slices":
            found.append(placed(shape, (slices.shape[1], 1), slices.T))
        else:
            found.append(placed(shape, (1, 1), slices[0]))
    return found


def loads_of(arrays: list[Placement]) -> dict[int, int]:
    """Return the bytes that each rank writes; check that every byte has one owner that holds it."""
    loads: dict[int, int] = {}
    for placement, owners in zip(arrays, assign_owners(arrays), strict=True):
        ranks = [rank for rank, count in owners for _ in range(count)]
        chunks = list(cells(placement.shape, placement.chunk_shape))
        assert len(ranks) == len(chunks) == len(placement.holders)
        item, of_array = numpy_type(placement.dtype).itemsize, 0
        for rank, cell, holders in zip(ranks, chunks, placement.holders, strict=True):
            assert rank in holders
            size = item * math.prod(s.stop - s.start for s in cell)
            loads[rank] = loads.get(rank, 0) + size
            of_array += size
        assert of_array == item * math.prod(placement.shape)
    return loads


@pytest.mark.parametrize("rank_count", [8, 16, 64])
@pytest.mark.parametrize(
    "way", ["replicated", "sharded", "mixed", "columns", "over slices", "one slice"]
)
def test_ranks_that_hold_the_same_write_about_as_much(way: str, rank_count: int) -> None:
    arrays = model(rank_count, way)
    whole = loads_of(arrays)
    found = split_large(arrays)
    loads = loads_of(found)
    writers = rank_count // 2 if way == "one slice" else rank_count
    mean = sum(loads.values()) / writers
    most, before = max(loads.values()) / mean, max(whole.values()) / mean
    print(f"{way}, {rank_count}: at most {most:.3f} of the mean, not cut {before:.3f}")
    assert sum(loads.values()) == sum(whole.values())
    assert set(loads) == set(range(writers))
    assert max(loads.values()) <= 1.1 * mean + PIECE_SIZE_MIN_BYTES
    assert min(loads.values()) >= 0.9 * mean - PIECE_SIZE_MIN_BYTES
    if way in ("replicated", "one slice"):
        # Without being cut it is as uneven as its largest array makes it.
        assert max(whole.values()) > 1.15 * mean


def test_one_process_cuts_nothing() -> None:
    arrays = model(1, "replicated")
    assert split_large(arrays) == arrays
    assert set(loads_of(arrays)) == {0}


def test_what_only_one_rank_holds_is_never_cut() -> None:
    arrays = model(16, "sharded")
    assert split_large(arrays) == arrays


def test_what_is_small_or_a_small_share_stays_whole() -> None:
    small = [placed((15, 1024, 256), (1, 1, 1), np.arange(4)) for _ in range(3)]
    assert split_large(small) == small
    # 40 MiB each, of 1 GiB that each rank writes.
    many = [placed((40, 1024, 256), (1, 1, 1), np.arange(2)) for _ in range(51)]
    assert split_large(many) == many


def test_each_rank_gets_pieces_that_are_neighbours() -> None:
    arrays = split_large([placed((4000, 1024, 256), (1, 1, 1), np.arange(16))])
    (owners,) = assign_owners(arrays)
    assert sum(count for _, count in owners) >= 100
    # One run each, and one more for the last piece, which may be of another size.
    assert len(owners) <= 17


def test_a_rank_that_has_much_of_its_own_writes_less_of_the_rest() -> None:
    own = placed((200, 1024, 256), (1, 1, 1), np.array([0]))
    everyones = placed((600, 1024, 256), (1, 1, 1), np.arange(4))
    loads = loads_of(split_large([own, everyones]))
    assert max(loads.values()) <= 1.1 * 200 * MIB
    assert min(loads.values()) >= 0.9 * 200 * MIB


@st.composite
def large_placements(draw) -> list[Placement]:
    """Arrays of some hundred MiB in grids of up to three axes, shards cut off at the edges too."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        rank_count = draw(st.integers(1, 6))
        shape = tuple(draw(st.sampled_from([1, 2, 7, 60, 97, 256, 1000, 2310])) for _ in range(3))
        dtype = draw(st.sampled_from(["int8", "bfloat16", "float32", "complex128"]))
        chunk_shape = tuple(-(-d // draw(st.sampled_from([1, 1, 2, 3]))) for d in shape)
        ranks = st.sets(st.integers(0, rank_count - 1), min_size=1).map(sorted).map(tuple)
        count = len(list(cells(shape, chunk_shape)))
        found.append(
            Placement(
                shape=shape,
                dtype=dtype,
                chunk_shape=chunk_shape,
                holders=tuple(draw(ranks) for _ in range(count)),
            )
        )
    return found


@given(large_placements())
def test_each_piece_lies_in_one_shard_without_gaps_and_is_held_by_its_holders(
    arrays: list[Placement],
) -> None:
    for before, after in zip(arrays, split_large(arrays), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        shards = list(cells(before.shape, before.chunk_shape))
        holders = dict(zip(map(str, shards), before.holders, strict=True))
        pieces = list(cells(after.shape, after.chunk_shape))
        assert len(pieces) == len(after.holders)
        for cell, ranks in zip(pieces, after.holders, strict=True):
            region = tuple(s.start for s in cell), tuple(s.stop for s in cell)
            shard = enclosing_chunk(before.shape, before.chunk_shape, region[0])
            assert all(b <= d for b, d in zip(region[1], shard[1], strict=True))
            assert contiguous_start(region, shard) is not None
            assert ranks == holders[str([*map(slice, *shard)]).replace("[", "(").replace("]", ")")]


@pytest.mark.parametrize("shape", [(20_000, 5003), (2, 20_000_003), (3, 70_001, 301)])
def test_pieces_of_what_is_not_sharded_start_aligned(shape: tuple[int, ...]) -> None:
    (found,) = split_large([placed(shape, (1,) * len(shape), np.arange(4), "int8")])
    pieces = [math.prod(s.stop - s.start for s in c) for c in cells(shape, found.chunk_shape)]
    # The last of each row of the axis before may be of any size.
    aligned = [size for size in pieces if size == max(pieces)]
    assert len(aligned) >= len(pieces) / 2
    assert aligned[0] % 64 == 0


@pytest.mark.parametrize(
    ("shape", "grid", "expected"),
    [
        # A row of the first axis is too much, so the second is cut.
        ((3, 4096, 2048), (1, 1, 1), (1, 1024, 2048)),
        ((3, 64, 64, 2048), (1, 1, 1, 1), (1, 16, 64, 2048)),
        # Where one shard ends the next one begins: 40 rows are not cut by 16.
        ((80, 256, 512), (2, 1, 1), (10, 256, 512)),
        # 37 rows cannot be divided, and one alone would be too little.
        ((74, 256, 512), (2, 1, 1), (37, 256, 512)),
    ],
)
def test_pieces_are_cut_along_the_leading_axes(
    shape: tuple[int, ...], grid: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    holders = np.tile(np.arange(4), (math.prod(grid), 1))
    (found,) = split_large([placed(shape, grid, holders)])
    assert found.chunk_shape == expected


@given(large_placements())
def test_the_same_arrays_are_always_cut_alike(arrays: list[Placement]) -> None:
    # Equal but distinct objects: the result does not depend on which arrays share an object.
    again = [
        Placement(
            shape=p.shape,
            dtype=p.dtype,
            chunk_shape=p.chunk_shape,
            holders=tuple((*row,) for row in p.holders),
        )
        for p in arrays
    ]
    assert split_large(arrays) == split_large(again)
    assert assign_owners(split_large(arrays)) == assign_owners(split_large(again))


RANKS = 4096


def large_job(seed: int, array_count: int) -> list[Placement]:
    """Arrays of a job on 2 slices; of those that are not sharded, tens of GiB are replicated."""
    chance, ranks = random.Random(seed), np.arange(RANKS).reshape(2, RANKS // 16, 8)
    everyone, by_column = ranks.reshape(1, -1), ranks.transpose(2, 0, 1).reshape(8, -1)
    by_slice = ranks.reshape(2, -1).T
    found = []
    for _ in range(array_count):
        width = 1024 * chance.randint(1, 16)
        which = chance.random()
        if which < 0.1:
            shape = (chance.randint(1000, 20_000), width)
            found.append(placed(shape, (1, 1), everyone))
        elif which < 0.2:
            shape = (chance.randint(1000, 40_000), 8 * width)
            found.append(placed(shape, (1, 8), by_column))
        else:
            found.append(placed((RANKS // 2 * chance.randint(1, 64), width), (2048, 1), by_slice))
    return found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_large_arrays_of_a_large_job_are_planned_in_time_and_written_down_in_little_room(
    seed: int,
) -> None:
    """4,096 processes and 2,000 arrays: the plan under 2 s, what it adds to the manifest small."""
    arrays = large_job(seed, 2000)

    def planned() -> tuple[Any, Any, Any]:
        found = split_large(arrays)
        owners = assign_owners(found)
        return found, owners, shared(owners)

    found, owners, layout_of = in_time(2, planned)
    spec = planned_spec(found, layout_of)
    check_spec(spec, RANKS, "manifest")
    size = len(seal(spec))
    loads = np.zeros(RANKS, np.int64)
    for placement, of_array in zip(found, owners, strict=True):
        chunk = 0
        item, whole = 4 * math.prod(placement.chunk_shape), len(placement.holders)
        edge = 4 * math.prod(placement.shape) - item * (whole - 1)
        is_cut_off = placement.shape[1] == placement.chunk_shape[1]
        for rank, count in of_array:
            chunk += count
            loads[rank] += item * count
            if is_cut_off and chunk == whole:
                loads[rank] += edge - item
    print(f"seed {seed}: {size} bytes, {loads.max() / loads.mean():.3f}")
    assert sum(p != q for p, q in zip(arrays, found, strict=True)) > 10
    assert size < 3_000_000
    assert loads.max() <= 1.1 * loads.mean() + PIECE_SIZE_MIN_BYTES
    layout = image_layout(spec.arrays, 77)
    assert sum(chunk.size_bytes for chunk in layout.chunks) <= 1.1 * loads.mean() + 8 * MIB
