"""Ownership: every chunk has one owner among its holders, balanced by bytes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.planning.owners import assign_owners, shared
from holdfast.format.check import check_manifest
from holdfast.format.grid import Placement
from holdfast.format.layout import image_layout
from holdfast.format.records import Manifest, Owners, PartReference
from holdfast.format.sealed import seal, unseal
from tests.attempts import attempt_id
from tests.engine.making import cells, grids, numpy_type, planned_spec
from tests.timing import in_time


def _expanded(owners: Owners) -> list[int]:
    return [rank for rank, count in owners for _ in range(count)]


def _chunk_sizes(placement: Placement) -> list[int]:
    item = numpy_type(placement.dtype).itemsize
    return [
        item * math.prod(s.stop - s.start for s in cell)
        for cell in cells(placement.shape, placement.chunk_shape)
    ]


@st.composite
def placements(draw: Callable, rank_count: int = 4, replicated: bool = False) -> list[Placement]:
    found = []
    for _ in range(draw(st.integers(0, 4))):
        shape, chunk_shape = draw(grids(3, 5))
        ranks = st.sets(st.integers(0, rank_count - 1), min_size=1).map(sorted).map(tuple)
        everyone = st.just(tuple(range(rank_count)))
        count = len(list(cells(shape, chunk_shape)))
        one = everyone if replicated else ranks
        found.append(
            Placement(
                shape=shape,
                dtype=draw(st.sampled_from(["int8", "float32", "complex128", "int4"])),
                chunk_shape=chunk_shape,
                holders=tuple(draw(one) for _ in range(count)),
            )
        )
    return found


def _loads(arrays: list[Placement], owners: list[Owners], rank_count: int) -> list[int]:
    loads = [0] * rank_count
    for placement, of_array in zip(arrays, owners, strict=True):
        for owner, size in zip(_expanded(of_array), _chunk_sizes(placement), strict=True):
            loads[owner] += size
    return loads


@given(placements())
def test_every_chunk_has_one_owner_that_holds_it(arrays: list[Placement]) -> None:
    owners = assign_owners(arrays)
    assert len(owners) == len(arrays)
    for placement, of_array in zip(arrays, owners, strict=True):
        expanded = _expanded(of_array)
        assert len(expanded) == len(placement.holders)
        for owner, holders in zip(expanded, placement.holders, strict=True):
            assert owner in holders


@given(placements())
def test_runs_are_as_long_as_they_can_be(arrays: list[Placement]) -> None:
    for of_array in assign_owners(arrays):
        assert all(count > 0 for _, count in of_array)
        ranks = [rank for rank, _ in of_array]
        assert all(a != b for a, b in itertools.pairwise(ranks))


@given(placements(replicated=True))
def test_what_everyone_holds_is_balanced_to_within_one_chunk(arrays: list[Placement]) -> None:
    loads = _loads(arrays, assign_owners(arrays), 4)
    largest = max((size for p in arrays for size in _chunk_sizes(p)), default=0)
    assert max(loads) - min(loads) <= largest


@given(placements(), st.randoms())
def test_the_plan_of_an_array_does_not_hang_on_chance(arrays: list[Placement], random) -> None:
    assert assign_owners(arrays) == assign_owners(list(arrays))


def test_what_only_one_holds_is_placed_first_so_that_the_rest_evens_it_out() -> None:
    def placed(size: int, *holders: int) -> Placement:
        return Placement(shape=(size,), dtype="int8", chunk_shape=(size,), holders=(holders,))

    arrays = [placed(60, 0, 1), placed(50, 0)]
    assert assign_owners(arrays) == [((1, 1),), ((0, 1),)]


def test_large_chunks_are_placed_before_small_ones() -> None:
    arrays = [
        Placement(shape=(n,), dtype="int8", chunk_shape=(n,), holders=((0, 1),))
        for n in (1, 1, 1, 3)
    ]
    owners = [_expanded(o)[0] for o in assign_owners(arrays)]
    assert sum(n for n, owner in zip((1, 1, 1, 3), owners, strict=True) if owner == 0) == 3


def test_replicas_of_data_parallel_ranks_share_the_work() -> None:
    arrays = [
        Placement(shape=(64, 8), dtype="float32", chunk_shape=(8, 8), holders=((0, 1, 2, 3),) * 8)
        for _ in range(5)
    ]
    assert len(set(_loads(arrays, assign_owners(arrays), 4))) == 1


@given(placements())
def test_shared_owners_are_those_that_were_assigned(arrays: list[Placement]) -> None:
    owners = assign_owners(arrays)
    found = shared(owners)
    for of_array, here in zip(owners, found, strict=True):
        assert (found[here] if isinstance(here, int) else here) == of_array


RANKS = 4096


def _mesh(count: int) -> dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Grids and holders on a mesh of 2 replicas, `count / 16` shards and 8 columns, row by row."""
    shards, columns, half = count // 16, 8, count // 2
    ranks = np.arange(count).reshape(2, shards, columns)

    def holders(of_cells: np.ndarray) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(sorted(cell)) for cell in of_cells.reshape(-1, of_cells.shape[-1]).tolist()
        )

    return {
        "fully sharded": ((count,), tuple((rank,) for rank in range(count))),
        "over slices": ((half,), tuple((rank, rank + half) for rank in range(half))),
        "two axes": ((shards, columns), holders(ranks.transpose(1, 2, 0))),
        "columns first": ((columns, shards), holders(ranks.transpose(2, 1, 0))),
        "shards": ((shards,), holders(ranks.transpose(1, 0, 2).reshape(shards, -1))),
        "columns": ((columns,), holders(ranks.transpose(2, 0, 1).reshape(columns, -1))),
        "everywhere": ((1,), (tuple(range(count)),)),
    }


def large_job(
    seed: int, array_count: int, rank_count: int, *, without: str = ""
) -> list[Placement]:
    """Arrays of many sizes, cut and placed in all ways but `without`."""
    chance, mesh, found = random.Random(seed), _mesh(rank_count), []
    mesh.pop(without, None)
    for _ in range(array_count):
        grid, holders = mesh[chance.choice(sorted(mesh))]
        # Distinct objects: a framework may create them once per shape.
        holders = tuple(row for row in holders)
        chunk = tuple(chance.randint(1, 64) for _ in grid)
        shape = tuple(g * c for g, c in zip(grid, chunk, strict=True))
        found.append(Placement(shape=shape, dtype="float32", chunk_shape=chunk, holders=holders))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_large_job_is_planned_in_time_evenly_and_written_down_in_little_room(seed: int) -> None:
    """4,096 processes and 2,000 arrays: the plan under 2 s, the manifest under 4 MB."""
    arrays = large_job(seed, 2000, RANKS)

    def planned() -> tuple[Any, Any]:
        owners = assign_owners(arrays)
        return owners, shared(owners)

    owners, layout_of = in_time(2, planned)
    loads = _loads_of_many(arrays, owners)
    largest = max(4 * math.prod(p.chunk_shape) for p in arrays)
    assert max(loads) <= np.mean(loads) + 2 * largest
    spec = planned_spec(arrays, layout_of)
    reference = PartReference(record_digest="0" * 32, image_size_bytes=10**10)
    manifest = Manifest(
        run_id="r" * 32,
        step=10**6,
        attempt=attempt_id(3),
        parts=(reference,) * RANKS,
        checkpoint=spec,
    )
    data = seal(manifest)
    print(f"seed {seed}: a manifest of {len(data)} bytes")
    assert len(data) < 4_000_000
    check_manifest(unseal(data, Manifest, "manifest"), "manifest")
    layout = image_layout(spec.arrays, 77)
    assert layout.size_bytes > loads[77] > 0
    assert sum(chunk.size_bytes for chunk in layout.chunks) == loads[77]


@pytest.mark.parametrize(
    ("ranks", "shards", "pieces"),
    [(32_768, 512, 1), (16_384, 8, 44), (8_192, 1, 100)],
    ids=["many shards", "many replicas", "replicas alone"],
)
def test_each_of_many_ranks_writes_its_share(ranks: int, shards: int, pieces: int) -> None:
    """A part takes as long as the largest: with 16 assignments most ranks would have none."""
    rows = [tuple(range(shard, ranks, shards)) for shard in range(shards)]
    holders = tuple(row for row in rows for _ in range(pieces))
    count = len(holders)
    arrays = [
        Placement(shape=(count * 64,), dtype="float32", chunk_shape=(64,), holders=holders)
        for _ in range(10 * ranks // count)
    ]
    owners = assign_owners(arrays)
    for placement, of_array in zip(arrays[::50], owners[::50], strict=True):
        for owner, row in zip(_expanded(of_array), placement.holders, strict=True):
            assert owner % shards == row[0]
    loads = np.array(_loads_of_many(arrays, owners, ranks))
    assert loads.min() > 0
    assert loads.max() <= 1.2 * loads.mean()
    # They take as much room as two entries for each rank.
    written = sum(len(entry) for entry in shared(owners) if not isinstance(entry, int))
    assert written <= 2.1 * max(ranks, 16 * count)


def _loads_of_many(arrays: list[Placement], owners: list[Owners], ranks: int = RANKS) -> list[int]:
    loads = np.zeros(ranks, np.int64)
    for placement, of_array in zip(arrays, owners, strict=True):
        size = 4 * math.prod(placement.chunk_shape)
        for rank, count in of_array:
            loads[rank] += size * count
    return loads.tolist()
