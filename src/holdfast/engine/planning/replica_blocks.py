"""Which blocks of other ranks' parts a rank compares with its own copy, in turn.

Every rank computes the same sequence of all blocks that several ranks hold. A window of it, a share
of its bytes, is compared at each save, and the windows of 1/share saves in a row have all of it.

See docs/decisions/0063.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from holdfast.format.digests import block_ranges
from holdfast.format.grid import Placement, chunk_count
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.ownership import Ownership
from holdfast.format.records import ArraySpec


@dataclass(frozen=True, slots=True)
class ReplicaBlock:
    """One block of a chunk that several ranks hold.

    Attributes:
        owner: The rank whose part has the chunk.
        holders: The ranks that hold it, the owner among them; None: all.
        chunk: The chunk, as the owner's layout has it.
        number: The number of the block within the chunk.
        start: Where the block begins within the chunk, in bytes.
        stop: Where it ends.
    """

    owner: int
    holders: tuple[int, ...] | None
    chunk: Chunk
    number: int
    start: int
    stop: int

    def is_held_by(self, rank: int) -> bool:
        """Return whether a rank holds the block, without owning it."""
        return rank != self.owner and (self.holders is None or rank in self.holders)


@dataclass(frozen=True, slots=True)
class ReplicaWindow:
    """What one rank compares at one save.

    Attributes:
        number: The number of the window in its turn.
        numbers: Those of all windows of a turn in which this rank compares anything.
        blocks: The blocks; none if the rank holds no other rank's there.
    """

    number: int
    numbers: tuple[int, ...]
    blocks: tuple[ReplicaBlock, ...]


class ReplicaWindows:
    """The blocks that one rank compares, by the number of the save.

    Args:
        blocks: All replicated blocks, as every rank computes them.
        share: The share of their bytes that is compared at each save.
        rank: The rank that compares.
    """

    def __init__(self, blocks: Sequence[ReplicaBlock], share: float, rank: int) -> None:
        stops = [*accumulate(block.stop - block.start for block in blocks)]
        total, count = stops[-1] if stops else 0, math.ceil(1 / share)
        # A block belongs to the window in which it ends, so that each has one.
        bounds = [bisect_right(stops, total * turn // count) for turn in range(count + 1)]
        self._windows = [
            tuple(block for block in blocks[first:stop] if block.is_held_by(rank))
            for first, stop in pairwise(bounds)
        ]
        self._numbers = tuple(n for n, window in enumerate(self._windows) if window)

    def window(self, number: int) -> ReplicaWindow:
        """Return what to compare at the save of that number, counted from 0."""
        turn = number % len(self._windows)
        return ReplicaWindow(turn, self._numbers, self._windows[turn])


def replica_blocks(
    arrays: Sequence[ArraySpec],
    placements: Sequence[Placement],
    is_compared: Sequence[bool],
    is_everywhere: Sequence[bool],
    count: int,
) -> list[ReplicaBlock]:
    """Return the blocks that several ranks hold, by ascending array, chunk and number.

    Args:
        arrays: The arrays of the state, with their owners.
        placements: Their placements, in the same order.
        is_compared: For each array, whether its replicas have to be equal.
        is_everywhere: For each array, whether every rank has one of its own, whatever its placement
            says.
        count: The number of ranks.
    """
    owned, of_place = Ownership(arrays), dict[tuple[int, int], tuple[int, Chunk]]()
    for rank in range(count):
        for chunk in image_layout(arrays, rank, owned).chunks:
            of_place[chunk.array_index, chunk.chunk_index] = rank, chunk
    blocks = []
    for index, placement in enumerate(placements):
        if not is_compared[index]:
            continue
        for number in range(chunk_count(placement.shape, placement.chunk_shape)):
            holders = None if is_everywhere[index] else placement.holders[number]
            if holders is not None and len(holders) < 2:
                continue
            owner, chunk = of_place[index, number]
            blocks += [
                ReplicaBlock(owner, holders, chunk, at, start, stop)
                for at, (start, stop) in enumerate(block_ranges(chunk.size_bytes))
            ]
    return blocks
