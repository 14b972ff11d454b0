"""Parts that data parallelism already replicates in a second failure domain.

A rank of another domain that holds the same chunks as a part's rank can write them into its own
host's RAM, byte for byte, at their offsets in that part's image. Only the part record and the
chunks that no other rank holds cross the network. Where no rank can write such a replica, the whole
part is fetched from its host (`holdfast.coordination.leader.replica_placement`).

Every rank computes the same plan from the same view of the state, as with the owners.

See docs/decisions/0016.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.format.dtypes import item_size_bytes
from holdfast.format.grid import Placement, largest_chunk_shape
from holdfast.format.records import Owners

LOOKED_AT_MAX = 64
"""At most this many candidate keepers are compared; among thousands the choice hardly matters."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica of `rank`'s part by `keeper`, which holds all of its replicated chunks."""

    rank: int
    keeper: int


def replicas_of(
    placements: Sequence[Placement],
    owners: Sequence[Owners],
    domains: Sequence[Hashable],
    copies: int,
) -> tuple[Replica, ...]:
    """Return the replicas of parts that ranks can write from chunks that they hold, by rank.

    Args:
        placements: the arrays, and the ranks that hold their chunks.
        owners: the owner of each chunk, as `engine.planning.owners.assign_owners` returns it.
        domains: the failure domain of each rank.
        copies: the number of domains for each part, including its own.

    Returns:
        For each part at most `copies` - 1 keepers, each in a domain of its own. Larger parts are
        placed first, on the candidates with the fewest bytes so far.
    """
    if copies < 2:
        return ()
    holding = _holders_of_parts(placements, owners)
    sizes = _part_sizes_bytes(placements, owners)
    kept_bytes = [0] * len(domains)
    replicas = []
    distinct = {id(ranks): ranks for ranks in holding.values()}
    in_order = {number: sorted(ranks) for number, ranks in distinct.items()}
    for rank in sorted(holding, key=lambda rank: (-sizes.get(rank, 0), rank)):
        taken = {domains[rank]}
        for _ in range(copies - 1):
            keepers = _candidates(in_order[id(holding[rank])], rank, domains, taken)
            keeper = min(keepers, key=kept_bytes.__getitem__, default=None)
            if keeper is None:
                break
            taken.add(domains[keeper])
            kept_bytes[keeper] += sizes.get(rank, 0)
            replicas.append(Replica(rank, keeper))
    return tuple(sorted(replicas, key=lambda copy: (copy.rank, copy.keeper)))


def _candidates(
    holders: Sequence[int], rank: int, domains: Sequence[Hashable], taken: set[Hashable]
) -> list[int]:
    """Return the first holders after `rank`, in a ring, that are in none of the domains `taken`."""
    start = bisect_right(holders, rank)
    candidates: list[int] = []
    for at in range(start, start + len(holders)):
        holder = holders[at % len(holders)]
        if domains[holder] not in taken:
            candidates.append(holder)
            if len(candidates) == LOOKED_AT_MAX:
                break
    return candidates


def _holders_of_parts(
    placements: Sequence[Placement], owners: Sequence[Owners]
) -> dict[int, frozenset[int]]:
    """Return, for each rank, the ranks that hold all replicated chunks of its part."""
    holders: dict[int, frozenset[int]] = {}
    rows: dict[int, frozenset[int]] = {}
    # Ranks whose parts are held alike share one object, since there may be 100,000 of each.
    both: dict[tuple[int, int], frozenset[int]] = {}
    seen: set[tuple[int, int]] = set()
    numbers: dict[tuple[tuple[int, ...], ...], int] = {}
    number_of: dict[int, int] = {}
    for placement, of_array in zip(placements, owners, strict=True):
        # Arrays with equal holders and owners constrain the result in the same way.
        if id(placement.holders) not in number_of:
            number = numbers.setdefault(placement.holders, len(numbers))
            number_of[id(placement.holders)] = number
        arrangement = number_of[id(placement.holders)], id(of_array)
        if arrangement in seen:
            continue
        seen.add(arrangement)
        for rank, chunk in _owned(of_array):
            row = placement.holders[chunk]
            if len(row) == 1:
                continue
            if id(row) not in rows:
                rows[id(row)] = frozenset(row)
            before, now = holders.get(rank), rows[id(row)]
            if before is None:
                holders[rank] = now
            elif before is not now:
                pair = id(before), id(now)
                if pair not in both:
                    both[pair] = before if before <= now else before & now
                holders[rank] = both[pair]
    return holders


def _owned(owners: Owners) -> Iterator[tuple[int, int]]:
    """Yield (rank, chunk) of each chunk."""
    chunk = 0
    for rank, count in owners:
        for _ in range(count):
            yield rank, chunk
            chunk += 1


def _part_sizes_bytes(placements: Sequence[Placement], owners: Sequence[Owners]) -> dict[int, int]:
    """Return the approximate size of each rank's part; each chunk counts as the largest."""
    by_owners: dict[int, tuple[Owners, int]] = {}
    for placement, of_array in zip(placements, owners, strict=True):
        largest = largest_chunk_shape(placement.chunk_shape)
        size = item_size_bytes(placement.dtype) * math.prod(largest)
        _, before = by_owners.get(id(of_array), (of_array, 0))
        by_owners[id(of_array)] = of_array, before + size
    sizes: dict[int, int] = {}
    for of_array, size in by_owners.values():
        for rank, count in of_array:
            sizes[rank] = sizes.get(rank, 0) + size * count
    return sizes
