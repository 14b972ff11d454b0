"""Ranges of ordinals against plain sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.format import records

SETS = st.sets(st.integers(0, 12))


@given(SETS)
def test_a_set_has_one_form_and_it_holds_the_sets_numbers(numbers: set[int]) -> None:
    made = records.ranges_of(sorted(numbers))
    assert list(records.members(made)) == sorted(numbers)
    assert records.are_ranges(made)
    assert len(made) == len({n for n in numbers if n - 1 not in numbers})


@given(st.lists(st.tuples(st.integers(-2, 6), st.integers(-2, 6)), max_size=4))
def test_whatever_is_taken_for_ranges_is_the_one_form_of_its_set(pairs: list) -> None:
    numbers = sorted({n for a, b in pairs for n in range(a, b)})
    is_form = records.ranges_of(numbers) == tuple(pairs) and (not numbers or numbers[0] >= 0)
    assert records.are_ranges(tuple(pairs)) == is_form


@given(SETS, SETS)
def test_a_subset_is_one_of_the_sets(one: set[int], other: set[int]) -> None:
    made = [records.ranges_of(sorted(numbers)) for numbers in (one, other, one | other)]
    assert records.is_subset(made[0], made[1]) == (one <= other)
    assert records.is_subset(made[0], made[2])


@given(st.lists(SETS, max_size=4))
def test_sets_are_disjoint_where_no_number_is_in_two(sets: list[set[int]]) -> None:
    made = [records.ranges_of(sorted(numbers)) for numbers in sets]
    assert records.are_disjoint(made) == (sum(map(len, sets)) == len(set().union(*sets)))
