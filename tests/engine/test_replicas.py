"""Replicas by data parallelism: which rank can keep which part, in another failure domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.planning.owners import assign_owners
from holdfast.engine.planning.replicas import Replica, replicas_of
from holdfast.format.grid import Placement
from holdfast.format.records import Owners
from tests.engine.test_owners import RANKS, large_job, placements
from tests.timing import in_time

EACH_ITS_OWN = tuple(range(4))


def placed(size: int, *holders: tuple[int, ...]) -> Placement:
    return Placement(
        shape=(size * len(holders),), dtype="int8", chunk_shape=(size,), holders=holders
    )


def copies_of(
    arrays: Sequence[Placement], domains: Sequence[int], copies: int = 2
) -> list[tuple[int, int]]:
    found = replicas_of(arrays, assign_owners(arrays), domains, copies)
    return [(copy.rank, copy.keeper) for copy in found]


def expanded(owners: Owners) -> list[int]:
    return [rank for rank, count in owners for _ in range(count)]


@st.composite
def jobs(draw: Callable) -> tuple[list[Placement], list[int], int]:
    return (
        draw(placements()),
        draw(st.lists(st.integers(0, 3), min_size=4, max_size=4)),
        draw(st.integers(1, 4)),
    )


@given(jobs())
def test_a_keeper_holds_all_that_anybody_else_holds_and_is_in_another_domain(
    job: tuple[list[Placement], list[int], int],
) -> None:
    arrays, domains, copies = job
    owners = assign_owners(arrays)
    found = replicas_of(arrays, owners, domains, copies)
    for copy in found:
        for placement, of_array in zip(arrays, owners, strict=True):
            for owner, holders in zip(expanded(of_array), placement.holders, strict=True):
                assert owner != copy.rank or len(holders) == 1 or copy.keeper in holders
    for rank in range(4):
        places = [domains[rank], *(domains[c.keeper] for c in found if c.rank == rank)]
        assert len(places) == len(set(places)) <= max(1, copies)


@given(jobs())
def test_where_a_rank_of_another_domain_holds_what_it_can_a_copy_is_found(
    job: tuple[list[Placement], list[int], int],
) -> None:
    arrays, domains, copies = job
    owners = assign_owners(arrays)
    found = replicas_of(arrays, owners, domains, copies)
    for rank in {rank for of_array in owners for rank, _ in of_array}:
        able, is_held_elsewhere = set(range(4)), False
        for placement, of_array in zip(arrays, owners, strict=True):
            for owner, holders in zip(expanded(of_array), placement.holders, strict=True):
                if owner == rank and len(holders) > 1:
                    able &= set(holders)
                    is_held_elsewhere = True
        able = able if is_held_elsewhere else set()
        elsewhere = {domains[keeper] for keeper in able} - {domains[rank]}
        kept = [copy for copy in found if copy.rank == rank]
        assert len(kept) == min(copies - 1, len(elsewhere))


def test_data_parallel_ranks_keep_each_others_parts() -> None:
    everyone = (0, 1, 2, 3)
    arrays = [placed(10, everyone) for _ in range(8)]
    found = copies_of(arrays, EACH_ITS_OWN)
    assert sorted(rank for rank, _ in found) == [0, 1, 2, 3]
    assert Counter(keeper for _, keeper in found) == Counter(range(4))


def test_slices_keep_each_others_shards() -> None:
    # Ranks 0 and 1 are one slice, 2 and 3 the other one.
    arrays = [placed(10, (0, 2), (1, 3)) for _ in range(4)]
    assert copies_of(arrays, (0, 0, 1, 1)) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    # In one failure domain all of them are lost together.
    assert copies_of(arrays, (0, 0, 0, 0)) == []


def test_what_is_fully_sharded_has_no_free_copy() -> None:
    assert copies_of([placed(10, (0,), (1,), (2,), (3,))], EACH_ITS_OWN) == []


def test_what_a_rank_holds_alone_does_not_keep_the_rest_from_being_copied() -> None:
    arrays = [placed(10, (0, 1)), placed(10, (0, 1)), placed(1, (0,))]
    assert copies_of(arrays, EACH_ITS_OWN) == [(0, 1), (1, 0)]


def test_three_copies_are_in_three_domains() -> None:
    arrays = [placed(10, (0, 1, 2, 3)) for _ in range(4)]
    found = replicas_of(arrays, assign_owners(arrays), (0, 0, 1, 2), 3)
    assert len(found) == 8
    assert Replica(0, 1) not in found


def test_one_copy_asks_for_nothing() -> None:
    assert copies_of([placed(10, (0, 1))], EACH_ITS_OWN, copies=1) == []


@pytest.mark.parametrize("seed", range(2))
def test_a_large_job_is_looked_through_in_time(seed: int) -> None:
    arrays = large_job(seed, 2000, RANKS, without="fully sharded")
    owners = assign_owners(arrays)
    # Two slices, each of which fails as a whole.
    domains = [rank * 2 // RANKS for rank in range(RANKS)]
    found = in_time(2, lambda: replicas_of(arrays, owners, domains, 2))
    print(f"seed {seed}: {len(found)} copies found")
    assert {copy.rank for copy in found} == {rank for o in owners for rank, _ in o}
