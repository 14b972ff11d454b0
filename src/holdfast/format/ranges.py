"""Ascending whole numbers as half-open ranges: `[[0, 3], [7, 8]]` is 0, 1, 2, 7.

Each set has exactly one such form: no range is empty, and no two overlap or touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from holdfast.format.records import Ranges


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return the ranges of `numbers`, which must ascend."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return tuple(runs)


def members(ranges: Ranges) -> Iterator[int]:
    """Yield the numbers in `ranges`, ascending."""
    for start, stop in ranges:
        yield from range(start, stop)


def are_ranges(ranges: Ranges) -> bool:
    """Return whether `ranges` are in canonical form, with no negative numbers."""
    last = -1
    for start, stop in ranges:
        if not last < start < stop:
            return False
        last = stop
    return True


def is_subset(ranges: Ranges, outer: Ranges) -> bool:
    """Return whether every number in `ranges` is in `outer`; both in canonical form."""
    position = 0
    for start, stop in ranges:
        while position < len(outer) and outer[position][1] < stop:
            position += 1
        if position == len(outer) or start < outer[position][0]:
            return False
    return True


def are_disjoint(sets: Sequence[Ranges]) -> bool:
    """Return whether no number is in two of the sets."""
    last = 0
    for start, stop in sorted(pair for ranges in sets for pair in ranges):
        if start < last:
            return False
        last = stop
    return True
