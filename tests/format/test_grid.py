"""The chunk grid, against plain NumPy indexing."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format import grid
from tests.engine.making import cells, grids, regions, shapes


def _slices(region: grid.Region) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(*region, strict=True))


@given(grids())
def test_chunks_are_the_cells_of_the_grid_in_c_order(of: tuple) -> None:
    shape, chunk_shape = of
    expected = list(cells(shape, chunk_shape))
    assert grid.chunk_count(shape, chunk_shape) == len(expected) >= 1
    found = [grid.chunk_region(shape, chunk_shape, i) for i in range(len(expected))]
    assert [_slices(region) for region in found] == expected


@given(grids())
def test_every_element_is_in_exactly_one_chunk(of: tuple) -> None:
    shape, chunk_shape = of
    times = np.zeros(shape, int)
    for index in range(grid.chunk_count(shape, chunk_shape)):
        region = grid.chunk_region(shape, chunk_shape, index)
        assert times[_slices(region)].shape == grid.region_shape(region)
        times[_slices(region)] += 1
    assert np.all(times == 1)


@given(grids(), st.data())
def test_the_chunks_that_overlap_a_region_are_those_that_hold_its_elements(
    of: tuple, data: st.DataObject
) -> None:
    shape, chunk_shape = of
    painted = np.zeros(shape, int)
    for index, cell in enumerate(cells(shape, chunk_shape)):
        painted[cell] = index
    region = data.draw(regions(shape))
    expected = sorted({*painted[_slices(region)].reshape(-1).tolist()})
    assert list(grid.chunks_overlapping(shape, chunk_shape, region)) == expected


@given(grids(), st.data())
def test_the_chunk_around_an_element_is_the_one_that_holds_it(
    of: tuple, data: st.DataObject
) -> None:
    shape, chunk_shape = of
    found = [grid.chunk_region(shape, chunk_shape, i) for i in range(len(list(cells(*of))))]
    one = data.draw(st.sampled_from(found))
    start = tuple(data.draw(st.integers(a, max(a, b - 1))) for a, b in zip(*one, strict=True))
    assert grid.enclosing_chunk(shape, chunk_shape, start) == one


@given(grids())
def test_a_grid_is_found_by_its_cells_with_lists_only_where_they_are_needed(of: tuple) -> None:
    shape, chunk_shape = of
    regions = [grid.chunk_region(shape, chunk_shape, i) for i in range(grid.chunk_count(*of))]
    found = grid.chunk_shape_of(shape, [*reversed(regions), *regions])
    assert found is not None
    assert [grid.chunk_region(shape, found, i) for i in range(len(regions))] == regions
    if math.prod(shape) and grid.is_regular(chunk_shape):
        assert found == chunk_shape
    if math.prod(shape):
        assert grid.chunk_shape_of(shape, regions[1:]) != found


def test_regions_that_are_no_grid_have_no_chunk_shape() -> None:
    split = [((0, 0), (2, 2)), ((2, 0), (4, 2)), ((0, 2), (3, 4)), ((3, 2), (4, 4))]
    assert grid.chunk_shape_of((4, 4), split) is None
    assert grid.chunk_shape_of((4, 4), []) is None
    rows = [((a,), (b,)) for a, b in ((0, 3), (5, 8), (3, 5), (8, 10), (10, 10))]
    assert grid.chunk_shape_of((10,), rows) == ((3, 2, 3, 2),)


@given(shapes(), st.data())
def test_a_region_starts_where_its_elements_stand_together_or_has_gaps(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    region = data.draw(regions(shape))
    places = np.arange(math.prod(shape)).reshape(shape)[_slices(region)].reshape(-1)
    # An outer region that does not start at 0 gives the same result.
    shift = data.draw(st.integers(0, 3))
    moved, outer = (
        tuple(tuple(x + shift for x in bound) for bound in bounds)
        for bounds in (region, ((0,) * len(shape), shape))
    )
    start = grid.contiguous_start(moved, outer)
    if start is not None and places.size:
        assert places.tolist() == list(range(start, start + places.size))
    if start is None:
        assert places.size == 0 or places[-1] - places[0] >= places.size


@given(shapes(), st.data())
def test_an_intersection_is_what_both_regions_hold(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    one, other = data.draw(regions(shape)), data.draw(regions(shape))
    marks = np.zeros(shape, int)
    marks[_slices(one)] += 1
    marks[_slices(other)] += 1
    shared = grid.intersection(one, other)
    if shared is None:
        assert not np.any(marks == 2)
    else:
        assert np.all(marks[_slices(shared)] == 2)
        assert np.count_nonzero(marks == 2) == math.prod(grid.region_shape(shared)) > 0


@given(shapes(), st.data())
def test_slices_within_a_region_find_the_same_elements(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    outer = data.draw(regions(shape))
    start, stop = data.draw(regions(grid.region_shape(outer)))
    inner = tuple(
        tuple(x + o for x, o in zip(bound, outer[0], strict=True)) for bound in (start, stop)
    )
    found = numbers[_slices(outer)][grid.slices_within((inner[0], inner[1]), outer)]
    assert np.array_equal(found, numbers[_slices((inner[0], inner[1]))])


@given(shapes(axes_max=5, extent_max=5), st.data())
def test_rectangles_are_the_flat_range_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    numbers = np.arange(size).reshape(shape)
    found = [numbers[_slices(r)].reshape(-1) for r in grid.rectangles(shape, start, stop)]
    assert [*np.concatenate([np.zeros(0, int), *found])] == list(range(start, stop))
    assert all(len(rectangle) for rectangle in found)
    # A range takes at most a ragged piece at each end of each axis, and one whole piece.
    assert len(found) <= max(2 * len(shape) - 1, 1)
