"""What stands in a second failure domain for nothing: data parallelism has made the copy.

A rank of another domain that holds the same chunks as a part's rank can put them into its own
host's RAM, byte for byte, where they stand in that part's image. The part record crosses the
network, and the chunks that no other rank holds; all of a part is pulled from its host where
nobody makes a copy (`holdfast.coordination.replica_placement`).

Every rank computes the same from the same view of the state, as it does with the owners.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.format.dtypes import item_size_bytes
from holdfast.format.grid import chunk_region, region_shape
from holdfast.format.placement import Placement
from holdfast.format.records import Owners

LOOKED_AT_MAX = 64
"""Of the ranks that could keep a copy so many are compared; of thousands any will do."""


@dataclass(frozen=True, slots=True)
class Replica:
    """`keeper`, in another domain, holds all of the part of `rank` that `rank` alone does not."""

    rank: int
    keeper: int


def free_copies(
    placements: Sequence[Placement],
    owners: Sequence[Owners],
    domains: Sequence[Hashable],
    copies: int,
) -> tuple[Replica, ...]:
    """Return the copies of parts that ranks can make of what they hold, by rank.

    Args:
        placements: the arrays, and who holds their chunks.
        owners: who saves each chunk, as `engine.planning.owners.assign_owners` gives it.
        domains: the failure domain of each rank.
        copies: in how many domains each part is to stand, its own among them.

    Returns:
        For each part at most `copies` - 1 keepers, no two of them in one domain. Of those that
        could be, the ones with the fewest bytes to keep are taken, larger parts first.
    """
    if copies < 2:
        return ()
    holding = _holders_of_parts(placements, owners)
    sizes = _part_sizes_bytes(placements, owners)
    kept_bytes = [0] * len(domains)
    found = []
    for rank in sorted(holding, key=lambda rank: (-sizes.get(rank, 0), rank)):
        taken = {domains[rank]}
        for _ in range(copies - 1):
            keepers = _candidates(sorted(holding[rank]), rank, domains, taken)
            keeper = min(keepers, key=kept_bytes.__getitem__, default=None)
            if keeper is None:
                break
            taken.add(domains[keeper])
            kept_bytes[keeper] += sizes.get(rank, 0)
            found.append(Replica(rank, keeper))
    return tuple(sorted(found, key=lambda copy: (copy.rank, copy.keeper)))


def _candidates(
    holders: Sequence[int], rank: int, domains: Sequence[Hashable], taken: set[Hashable]
) -> list[int]:
    """Return the first holders after `rank`, in a ring, that are in none of the domains `taken`."""
    start = bisect_right(holders, rank)
    found: list[int] = []
    for holder in (*holders[start:], *holders[:start]):
        if domains[holder] not in taken:
            found.append(holder)
            if len(found) == LOOKED_AT_MAX:
                break
    return found


def _holders_of_parts(
    placements: Sequence[Placement], owners: Sequence[Owners]
) -> dict[int, frozenset[int]]:
    """For each rank, the ranks that hold all chunks of its part which it does not hold alone."""
    found: dict[int, frozenset[int]] = {}
    rows: dict[int, frozenset[int]] = {}
    seen: set[tuple[int, int]] = set()
    known: dict[tuple[tuple[int, ...], ...], int] = {}
    for placement, of_array in zip(placements, owners, strict=True):
        # Arrays that are placed and shared out alike say the same.
        way = known.setdefault(placement.holders, len(known)), id(of_array)
        if way in seen:
            continue
        seen.add(way)
        for rank, chunk in _owned(of_array):
            row = placement.holders[chunk]
            if len(row) == 1:
                continue
            if id(row) not in rows:
                rows[id(row)] = frozenset(row)
            before, now = found.get(rank), rows[id(row)]
            if before is None:
                found[rank] = now
            elif before is not now:
                found[rank] = before & now
    return found


def _owned(owners: Owners) -> Iterator[tuple[int, int]]:
    """Yield (rank, chunk) of each chunk."""
    chunk = 0
    for rank, count in owners:
        for _ in range(count):
            yield rank, chunk
            chunk += 1


def _part_sizes_bytes(placements: Sequence[Placement], owners: Sequence[Owners]) -> dict[int, int]:
    """About how large each rank's part is: chunks at an array's edge count as whole ones."""
    sizes: dict[int, int] = {}
    for placement, of_array in zip(placements, owners, strict=True):
        first = chunk_region(placement.shape, placement.chunk_shape, 0)
        size = item_size_bytes(placement.dtype) * math.prod(region_shape(first))
        for rank, count in of_array:
            sizes[rank] = sizes.get(rank, 0) + size * count
    return sizes
