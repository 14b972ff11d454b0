"""Sets of ranks as runs: `((0, 8), (16, 4))` are the ranks 0 to 7 and 16 to 19.

However many ranks a host has, they are a few runs, so messages stay small. Runs ascend, are not
empty and do not touch each other, so equal sets have equal runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

Runs = tuple[tuple[int, int], ...]
"""(first rank, number of ranks), ascending."""

RUNS_NAMED_MAX = 10


def runs_of(ranks: Iterable[int]) -> Runs:
    """Return the runs that make up `ranks`, which may be in any order."""
    ordered = sorted(ranks)
    if not ordered:
        return ()
    if ordered[-1] - ordered[0] + 1 == len(ordered):
        return ((ordered[0], len(ordered)),)
    runs: list[tuple[int, int]] = []
    first = last = ordered[0]
    for rank in ordered[1:]:
        if rank != last + 1:
            runs.append((first, last - first + 1))
            first = rank
        last = rank
    runs.append((first, last - first + 1))
    return tuple(runs)


def ranks_in(runs: Runs) -> list[int]:
    """Return the ranks of `runs`, ascending."""
    return [rank for first, count in runs for rank in range(first, first + count)]


def count_in(runs: Runs) -> int:
    """Return the number of ranks in `runs`."""
    return sum(count for _, count in runs)


def ranks_text(ranks: Collection[int]) -> str:
    """Return ranks as text for users: `ranks 2, 5-7`; the first `RUNS_NAMED_MAX` runs only."""
    runs = runs_of(ranks)
    named = [
        str(first) if count == 1 else f"{first}-{first + count - 1}"
        for first, count in runs[:RUNS_NAMED_MAX]
    ]
    more = sum(count for _, count in runs[RUNS_NAMED_MAX:])
    text = ", ".join(named) + (f" and {more} more" if more else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
