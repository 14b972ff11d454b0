"""Who saves what: each chunk gets one owner among the ranks that hold it, balanced by bytes.

Every rank computes the same plan from the same global view of the state, so nothing is exchanged.

Arrays that are cut and placed alike are planned together: what is done for each array is done for
all of its chunks at once. The number of different ways in which such arrays are shared out is
bounded, because each way is written down once in every manifest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from holdfast.format.grid import grid_shape
from holdfast.format.layout import item_size_bytes
from holdfast.format.placement import Placement
from holdfast.format.records import Owners

WAYS_MAX = 16
SHORT_WAY = 64
"""Ways of at most so many runs are not counted: they take no room."""


def assign_owners(placements: Sequence[Placement]) -> list[Owners]:
    """The owners of each array's chunks.

    Chunks with the fewest holders are placed first, then larger before smaller; each goes to its
    holder with the fewest bytes so far, the lowest rank among equals.
    """
    groups = _Groups()
    of_array = [groups.of(placement.holders) for placement in placements]
    sizes = [_chunk_sizes_bytes(placement) for placement in placements]
    rank_count = max((group.rank_max for group in of_array), default=-1) + 1
    loads = np.zeros(rank_count, np.int64)
    order = sorted(
        range(len(placements)), key=lambda i: (of_array[i].replica_count, -int(sizes[i].max()), i)
    )
    owners: list[Owners] = [()] * len(placements)
    for i in order:
        owners[i] = of_array[i].share_out(sizes[i], loads)
    return owners


def shared(owners: Sequence[Owners]) -> list[Owners | int]:
    """`owners` as specs have them: written out once, and referred to by their index after that."""
    first: dict[Owners | int, int] = {}
    found: list[Owners | int] = []
    for index, of_array in enumerate(owners):
        # Long ones are the same object where they are the same way; comparing them takes longer.
        at = first.setdefault(of_array if len(of_array) <= SHORT_WAY else id(of_array), index)
        found.append(of_array if at == index or len(of_array) == 1 else at)
    return found


def _chunk_sizes_bytes(placement: Placement) -> np.ndarray:
    """The bytes of each chunk in C order, as int64."""
    shape, chunk_shape = placement.shape, placement.chunk_shape
    sizes = np.full(1, item_size_bytes(placement.dtype), np.int64)
    if math.prod(shape) == 0:
        return sizes * 0
    for extent, chunk, count in zip(
        shape, chunk_shape, grid_shape(shape, chunk_shape), strict=True
    ):
        of_axis = np.full(count, chunk, np.int64)
        of_axis[-1] = extent - (count - 1) * chunk
        sizes = np.multiply.outer(sizes, of_axis).reshape(-1)
    return sizes


class _Groups:
    """The groups of arrays that are placed alike."""

    def __init__(self) -> None:
        # Placements share their holders where they can; the same object needs no comparison.
        self._by_id: dict[int, _Group] = {}
        self._by_holders: dict[tuple[tuple[int, ...], ...], _Group] = {}

    def of(self, holders: tuple[tuple[int, ...], ...]) -> _Group:
        """The group of arrays that have those holders."""
        known = self._by_id.get(id(holders))
        if known is None:
            known = self._by_holders.get(holders)
            if known is None:
                known = self._by_holders[holders] = _Group(holders)
            self._by_id[id(holders)] = known
        return known


class _Group:
    """Arrays that are placed alike, and the ways in which they were shared out so far."""

    def __init__(self, holders: tuple[tuple[int, ...], ...]) -> None:
        self.replica_count = min(map(len, holders))
        self.rank_max = max(map(max, holders))
        self._rounds = _disjoint_rounds(holders)
        self._count = len(holders)
        self._ways: dict[bytes, tuple[np.ndarray, Owners]] = {}

    def share_out(self, sizes: np.ndarray, loads: np.ndarray) -> Owners:
        """The owners of one array's chunks, of `sizes` bytes; adds them to what each rank has."""
        owner_of = np.empty(self._count, np.int64)
        taken = loads.copy()
        for chunks, holders in self._rounds:
            # No rank is twice in a round, so all of it is decided at once.
            found = holders[np.arange(len(chunks)), np.argmin(taken[holders], axis=1)]
            owner_of[chunks] = found
            taken[found] += sizes[chunks]
        way, owners = self._way(owner_of, sizes, loads)
        np.add.at(loads, way, sizes)
        return owners

    def _way(
        self, owner_of: np.ndarray, sizes: np.ndarray, loads: np.ndarray
    ) -> tuple[np.ndarray, Owners]:
        known = self._ways.get(owner_of.tobytes())
        if known is not None:
            return known
        owners = tuple((int(rank), len(list(run))) for rank, run in groupby(owner_of.tolist()))
        if len(owners) <= SHORT_WAY:
            return owner_of, owners
        if len(self._ways) >= WAYS_MAX:
            return min(self._ways.values(), key=lambda way: _highest(way[0], sizes, loads))
        made = self._ways[owner_of.tobytes()] = owner_of, owners
        return made


def _highest(owner_of: np.ndarray, sizes: np.ndarray, loads: np.ndarray) -> int:
    """The most bytes that one rank would have."""
    after = loads.copy()
    np.add.at(after, owner_of, sizes)
    return int(after.max())


def _disjoint_rounds(
    holders: tuple[tuple[int, ...], ...],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The chunks in rounds within which no rank is twice: (chunks, their holders, one row each).

    Rows are as long as the longest; a shorter one is filled up with its last holder.
    """
    rounds: list[tuple[list[int], list[tuple[int, ...]]]] = []
    rounds_of_rank: dict[int, int] = {}
    for chunk, ranks in enumerate(holders):
        number = max(rounds_of_rank.get(rank, 0) for rank in ranks)
        for rank in ranks:
            rounds_of_rank[rank] = number + 1
        if number == len(rounds):
            rounds.append(([], []))
        chunks, rows = rounds[number]
        chunks.append(chunk)
        rows.append(ranks)
    made = []
    for chunks, rows in rounds:
        width = max(map(len, rows))
        filled = [row + row[-1:] * (width - len(row)) for row in rows]
        made.append((np.array(chunks), np.array(filled, np.int64)))
    return made
