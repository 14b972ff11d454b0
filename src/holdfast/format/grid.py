"""The grid of an array's chunks, in C order (the last axis runs fastest).

Each axis is cut into cells of one extent, of which the last may be shorter, or into cells of listed
extents, which add up to the axis: FSDP2 with tensor parallelism cuts 10 rows into 3, 2, 3 and 2. An
array with no elements, and one with no axes, has exactly one chunk. Index ranges are half-open.

`Placement` names the ranks that hold an array's chunks at a save, and `RestoreTarget` a buffer to
fill at a restore.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import sub
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeGuard

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]
ChunkShape = tuple[int | tuple[int, ...], ...]
"""The extent of the cells along each axis, or the extents of all of them."""
Region: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The elements with indices in [start, stop) along each axis: (start, stop)."""


@lru_cache(maxsize=1024)
def _cuts(extents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the starts of the cells of an axis, and its end."""
    return 0, *accumulate(extents)


def _cell_count(extent: int, cell: int | tuple[int, ...]) -> int:
    return len(cell) if isinstance(cell, tuple) else -(-extent // cell)


def _cell_bounds(extent: int, cell: int | tuple[int, ...], position: int) -> tuple[int, int]:
    if isinstance(cell, tuple):
        cuts = _cuts(cell)
        return cuts[position], cuts[position + 1]
    return position * cell, min(position * cell + cell, extent)


def is_regular(chunk_shape: ChunkShape) -> TypeGuard[Shape]:
    """Return whether the cells have one extent along each axis."""
    return not any(isinstance(cell, tuple) for cell in chunk_shape)


def largest_chunk_shape(chunk_shape: ChunkShape) -> Shape:
    """Return the extents that no chunk exceeds."""
    return tuple(max(cell) if isinstance(cell, tuple) else cell for cell in chunk_shape)


def chunk_shape_of(shape: Shape, regions: Iterable[Region]) -> ChunkShape | None:
    """Return the chunk shape of the grid whose cells are exactly `regions`.

    Returns:
        None if the regions without elements and duplicates are no such grid. Of several forms it
        is the one with the fewest lists. An array without elements has its shape.
    """
    if math.prod(shape) == 0:
        return shape
    cells = {region for region in regions if math.prod(region_shape(region))}
    axes: list[int | tuple[int, ...]] = []
    for axis, extent in enumerate(shape):
        starts = sorted({start[axis] for start, _ in cells})
        extents = tuple(b - a for a, b in pairwise([*starts, extent]))
        is_even = len(set(extents[:-1])) <= 1 and (extents or (0,))[-1] <= (extents or (0,))[0]
        axes.append(extents[0] if extents and is_even else extents)
    chunk_shape = tuple(axes)
    if (
        not cells
        or any(cell == () for cell in chunk_shape)
        or chunk_count(shape, chunk_shape) != len(cells)
    ):
        return None
    if any(chunk_region(shape, chunk_shape, i) not in cells for i in range(len(cells))):
        return None
    return chunk_shape


def grid_shape(shape: Shape, chunk_shape: ChunkShape) -> Shape:
    """Return the number of chunks along each axis."""
    if math.prod(shape) == 0:
        return (1,) * len(shape)
    return tuple(_cell_count(d, c) for d, c in zip(shape, chunk_shape, strict=True))


def chunk_count(shape: Shape, chunk_shape: ChunkShape) -> int:
    """Return the number of chunks of the array; at least 1."""
    return math.prod(grid_shape(shape, chunk_shape))


def chunk_region(shape: Shape, chunk_shape: ChunkShape, index: int) -> Region:
    """Return the region of the chunk with that index in C order."""
    if chunk_shape == shape or math.prod(shape) == 0:
        return (0,) * len(shape), shape
    bounds = []
    for d, c in zip(reversed(shape), reversed(chunk_shape), strict=True):
        index, position = divmod(index, _cell_count(d, c))
        bounds.append(_cell_bounds(d, c, position))
    bounds.reverse()
    return tuple(a for a, _ in bounds), tuple(b for _, b in bounds)


def chunk_sizes(shape: Shape, chunk_shape: ChunkShape) -> np.ndarray:
    """Return the number of elements of each chunk, in C order, as an int64 array."""
    import numpy as np

    sizes = np.ones(1, np.int64)
    if math.prod(shape) == 0:
        return sizes * 0
    if chunk_shape == shape:
        return sizes * math.prod(shape)
    for extent, chunk, count in zip(
        shape, chunk_shape, grid_shape(shape, chunk_shape), strict=True
    ):
        if isinstance(chunk, tuple):
            of_axis = np.array(chunk, np.int64)
        else:
            of_axis = np.full(count, chunk, np.int64)
            of_axis[-1] = extent - (count - 1) * chunk
        sizes = np.multiply.outer(sizes, of_axis).reshape(-1)
    return sizes


def chunks_overlapping(shape: Shape, chunk_shape: ChunkShape, region: Region) -> Iterator[int]:
    """Yield the indices of the chunks that share an element with `region`, ascending."""
    start, stop = region
    if any(a >= b for a, b in zip(start, stop, strict=True)):
        return
    if chunk_shape == shape:
        yield 0
        return
    counts = grid_shape(shape, chunk_shape)
    spans = [
        range(bisect_right(_cuts(c), a) - 1, bisect_left(_cuts(c), b))
        if isinstance(c, tuple)
        else range(a // c, -(-b // c))
        for a, b, c in zip(start, stop, chunk_shape, strict=True)
    ]

    def walk(axis: int, index: int) -> Iterator[int]:
        if axis == len(spans):
            yield index
            return
        for position in spans[axis]:
            yield from walk(axis + 1, index * counts[axis] + position)

    yield from walk(0, 0)


def enclosing_chunk(shape: Shape, chunk_shape: ChunkShape, start: Shape) -> Region:
    """Return the region of the chunk that holds the element at `start`, or starts there."""
    if math.prod(shape) == 0:
        return (0,) * len(shape), shape
    bounds = [
        _cell_bounds(d, c, bisect_right(_cuts(c), a) - 1 if isinstance(c, tuple) else a // c)
        for a, c, d in zip(start, chunk_shape, shape, strict=True)
    ]
    return tuple(a for a, _ in bounds), tuple(b for _, b in bounds)


def contiguous_start(region: Region, outer: Region) -> int | None:
    """Return the offset of `region` in `outer`, in elements in C order.

    Returns:
        The number of elements before `region`; None where `region` is not contiguous in `outer`.
    """
    inner_shape, outer_shape = region_shape(region), region_shape(outer)
    start = 0
    is_one_row = True
    for a, o, extent, whole in zip(region[0], outer[0], inner_shape, outer_shape, strict=True):
        # Below the first axis with more than one row, every axis must be whole.
        if not is_one_row and extent != whole:
            return None
        is_one_row = is_one_row and extent == 1
        start = start * whole + (a - o)
    return start


def region_shape(region: Region) -> Shape:
    """Return the extent of a region along each axis."""
    return tuple(map(sub, region[1], region[0]))


def intersection(one: Region, other: Region) -> Region | None:
    """Return the common region of two regions, or None where they share no element."""
    start = tuple(map(max, one[0], other[0]))
    stop = tuple(map(min, one[1], other[1]))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def slices_within(region: Region, outer: Region) -> tuple[slice, ...]:
    """Return `region` as slices into an array that holds exactly `outer`."""
    return tuple(
        slice(a - o, b - o) for a, b, o in zip(region[0], region[1], outer[0], strict=True)
    )


def rectangles(shape: Shape, start: int, stop: int) -> Iterator[Region]:
    """Yield the elements [start, stop) of an array in C order, as disjoint regions."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # The range lies within one row.
        yield from _within_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _within_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last, *shape[1:])
    if last * row < stop:
        yield from _within_row(shape, last, 0, stop - last * row)


def _within_row(shape: Shape, index: int, start: int, stop: int) -> Iterator[Region]:
    for lower, upper in rectangles(shape[1:], start, stop):
        yield (index, *lower), (index + 1, *upper)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One array's chunks: for each chunk in C order, the ranks that hold a replica, ascending."""

    shape: tuple[int, ...]
    dtype: str
    chunk_shape: ChunkShape
    holders: tuple[tuple[int, ...], ...]


class RestoreTarget(NamedTuple):
    """A buffer to fill: `buffer` has the dtype of the array as stored and the shape of `region`.

    Where `take` is set, it may be called instead of filling the buffer, with an array of the same
    dtype and shape in other memory. That array is read-only and valid as long as it is referenced.
    """

    array_index: int
    region: Region
    buffer: np.ndarray
    take: Callable[[np.ndarray], None] | None = None
