"""Who saves what: every chunk one owner, among those that hold it, balanced by bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.plan import Owners, assign_owners
from holdfast.format.placement import Placement
from tests.engine.making import cells, grids, numpy_type


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
