"""Who saves what: each chunk gets one owner among the ranks that hold it, balanced by bytes.

Every rank computes the same plan from the same global view of the state, so nothing is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from holdfast.format.grid import chunk_region, region_shape
from holdfast.format.layout import item_size_bytes
from holdfast.format.placement import Placement

Owners = tuple[tuple[int, int], ...]


def assign_owners(placements: Sequence[Placement]) -> list[Owners]:
    """The owners of each array's chunks, run-length encoded: (rank, how many chunks).

    Chunks with the fewest holders are placed first, then larger before smaller; each goes to its
    holder with the fewest bytes so far, the lowest rank among equals.
    """
    loads: dict[int, int] = {}
    owners = [[0] * len(placement.holders) for placement in placements]
    order = sorted(
        (
            (len(holders), -_chunk_size_bytes(placement, chunk), array, chunk)
            for array, placement in enumerate(placements)
            for chunk, holders in enumerate(placement.holders)
        ),
    )
    for _, negative_size, array, chunk in order:
        holders = placements[array].holders[chunk]
        owner = min(holders, key=lambda rank: (loads.get(rank, 0), rank))
        loads[owner] = loads.get(owner, 0) - negative_size
        owners[array][chunk] = owner
    return [tuple((rank, len(list(run))) for rank, run in groupby(of_array)) for of_array in owners]


def _chunk_size_bytes(placement: Placement, chunk: int) -> int:
    region = chunk_region(placement.shape, placement.chunk_shape, chunk)
    return item_size_bytes(placement.dtype) * math.prod(region_shape(region))
