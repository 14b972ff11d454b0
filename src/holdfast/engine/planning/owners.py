"""Ownership: each chunk gets one owner among the ranks that hold it, balanced by bytes.

Every rank computes the same plan from the same global view of the state, without communication.

Arrays with equal grids and holders form a group. All chunks of an array are assigned at once. The
number of distinct assignments within a group is bounded, because every manifest contains each of
them once: there are enough for each rank of the group to be in two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from holdfast.format.dtypes import item_size_bytes
from holdfast.format.grid import Placement, chunk_sizes
from holdfast.format.records import Owners

ASSIGNMENTS_MAX = 16
"""Of a group with fewer ranks than eight times its chunks; see `_Group`."""
SHORT_ASSIGNMENT = 64
"""Assignments of at most this many runs are not counted: they take no space."""
MANY_HOLDERS = 1024
"""A row of so many holders is not looked through for each of its chunks."""


def assign_owners(placements: Sequence[Placement]) -> list[Owners]:
    """Return the owners of each array's chunks.

    Chunks with the fewest holders are placed first, then larger before smaller; each goes to its
    holder with the fewest bytes so far, the lowest rank among equals.
    """
    groups = _Groups()
    of_array = [groups.for_holders(placement.holders) for placement in placements]
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
    """Return `owners` as in specs: each list once, and the index of its first array after that."""
    first: dict[Owners | int, int] = {}
    entries: list[Owners | int] = []
    for index, of_array in enumerate(owners):
        # Equal long lists are the same object; comparing their contents would take longer.
        at = first.setdefault(
            of_array if len(of_array) <= SHORT_ASSIGNMENT else id(of_array), index
        )
        entries.append(of_array if at == index or len(of_array) == 1 else at)
    return entries


def _chunk_sizes_bytes(placement: Placement) -> np.ndarray:
    """Return the bytes of each chunk in C order, as int64."""
    return chunk_sizes(placement.shape, placement.chunk_shape) * item_size_bytes(placement.dtype)


class _Groups:
    """The groups of arrays with equal holders."""

    def __init__(self) -> None:
        # Placements share the object of their holders if they can; identity avoids a comparison.
        self._by_id: dict[int, _Group] = {}
        self._by_holders: dict[tuple[tuple[int, ...], ...], _Group] = {}

    def for_holders(self, holders: tuple[tuple[int, ...], ...]) -> _Group:
        """Return the group of arrays that have those holders."""
        group = self._by_id.get(id(holders))
        if group is None:
            group = self._by_holders.get(holders)
            if group is None:
                group = self._by_holders[holders] = _Group(holders)
            self._by_id[id(holders)] = group
        return group


class _Group:
    """Arrays with equal holders, and the assignments used for them so far."""

    def __init__(self, holders: tuple[tuple[int, ...], ...]) -> None:
        rows = _Rows(holders)
        self.replica_count = min(map(len, rows.distinct))
        self.rank_max = max(map(max, rows.distinct))
        self._rounds = rows.disjoint_rounds()
        self._wide = rows.wide()
        self._row_of = rows.row_of
        self._is_each_its_own = len(rows.distinct) == len(holders)
        rank_count = len(set().union(*rows.distinct))
        self._assignments_max = max(ASSIGNMENTS_MAX, 2 * rank_count // len(holders))
        self._assignments: dict[bytes, Owners] = {}
        self._owners_of = np.empty((0, len(holders)), np.int64)
        """The owner of each chunk by each of the assignments, in their order."""
        self._only = holders[0][0] if len(holders) == len(holders[0]) == 1 else None
        """The rank that holds the only chunk; None if there are several."""

    def share_out(self, sizes: np.ndarray, loads: np.ndarray) -> Owners:
        """Return the owners of one array's chunks of `sizes` bytes; add the bytes to `loads`."""
        if self._only is not None:
            # So are most arrays of a job of one process, which may be thousands of small ones.
            loads[self._only] += sizes[0]
            return ((self._only, 1),)
        if len(self._assignments) < self._assignments_max:
            owner_of = self._in_runs(self._chosen(sizes, loads), sizes)
            owners = self._known(owner_of)
        else:
            # The one whose owners have the least so far.
            best = int(np.argmin(loads[self._owners_of].max(axis=1)))
            owner_of = self._owners_of[best]
            owners = [*self._assignments.values()][best]
        np.add.at(loads, owner_of, sizes)
        return owners

    def _chosen(self, sizes: np.ndarray, loads: np.ndarray) -> np.ndarray:
        """Return an owner of each chunk: a holder with the fewest bytes so far."""
        owner_of = np.empty(len(self._row_of), np.int64)
        taken = loads.copy()
        for chunks, holders in self._rounds:
            # No rank is in a round twice, so all chunks of the round are assigned at once.
            writers = holders[np.arange(len(chunks)), np.argmin(taken[holders], axis=1)]
            owner_of[chunks] = writers
            taken[writers] += sizes[chunks]
        for chunks, holders in self._wide:
            for first in range(0, len(chunks), len(holders)):
                some = chunks[first : first + len(holders)]
                writers = _least(holders, taken, len(some))
                owner_of[some] = writers
                taken[writers] += sizes[some]
        return owner_of

    def _in_runs(self, owner_of: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the owners, exchanged among equal chunks so that each rank's are adjacent."""
        if self._is_each_its_own:
            return owner_of
        index = np.arange(len(owner_of))
        into = np.lexsort((index, sizes, self._row_of))
        out_of = np.lexsort((owner_of, sizes, self._row_of))
        owners = np.empty_like(owner_of)
        owners[into] = owner_of[out_of]
        return owners

    def _known(self, owner_of: np.ndarray) -> Owners:
        """Return the owners as runs; equal long ones are one object."""
        key = owner_of.tobytes()
        if key in self._assignments:
            return self._assignments[key]
        owners = tuple((int(rank), len(list(run))) for rank, run in groupby(owner_of.tolist()))
        if len(owners) > SHORT_ASSIGNMENT:
            self._assignments[key] = owners
            self._owners_of = np.append(self._owners_of, owner_of[None], axis=0)
        return owners


def _least(ranks: np.ndarray, loads: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` ranks with the smallest loads, the lowest ranks among equals, in order."""
    # Keys differ, so that each machine finds the same ones.
    keys = loads[ranks] * len(loads) + ranks
    if count < len(ranks):
        keys = np.partition(keys, count - 1)[:count]
    return np.sort(keys) % len(loads)


class _Rows:
    """The distinct holders of chunks: `distinct[row_of[chunk]]` are the holders of a chunk."""

    def __init__(self, holders: tuple[tuple[int, ...], ...]) -> None:
        self.distinct: list[tuple[int, ...]] = []
        by_id: dict[int, int] = {}
        by_ranks: dict[tuple[int, ...], int] = {}
        row_of = []
        for ranks in holders:
            # Pieces of one shard share the object of their holders; identity avoids a comparison.
            row = by_id.get(id(ranks))
            if row is None:
                row = by_id[id(ranks)] = by_ranks.setdefault(ranks, len(self.distinct))
                if row == len(self.distinct):
                    self.distinct.append(ranks)
            row_of.append(row)
        self.row_of = np.array(row_of)

    def disjoint_rounds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the chunks in rounds in which no rank occurs twice, without those of wide rows.

        Returns:
            For each round (chunks, holders): int arrays of shapes (n,) and (n, holders of the
            longest row); a shorter row repeats its last holder.
        """
        chunks_of: list[list[int]] = [[] for _ in self.distinct]
        for chunk, row in enumerate(self.row_of.tolist()):
            chunks_of[row].append(chunk)
        rounds: list[list[tuple[int, int]]] = []
        rounds_of_rank: dict[int, int] = {}
        for row, ranks in enumerate(self.distinct):
            if len(ranks) >= MANY_HOLDERS:
                continue
            first = max(rounds_of_rank.get(rank, 0) for rank in ranks)
            last = first + len(chunks_of[row])
            rounds_of_rank.update(dict.fromkeys(ranks, last))
            rounds += [[] for _ in range(len(rounds), last)]
            for number, chunk in zip(range(first, last), chunks_of[row], strict=True):
                rounds[number].append((chunk, row))
        filled: dict[tuple[int, ...], np.ndarray] = {}
        return [
            (np.array([chunk for chunk, _ in pairs]), self._filled([r for _, r in pairs], filled))
            for pairs in rounds
        ]

    def wide(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the chunks and the holders of each row of `MANY_HOLDERS` and more."""
        return [
            (np.flatnonzero(self.row_of == row), np.array(ranks))
            for row, ranks in enumerate(self.distinct)
            if len(ranks) >= MANY_HOLDERS
        ]

    def _filled(self, rows: list[int], known: dict[tuple[int, ...], np.ndarray]) -> np.ndarray:
        key = tuple(rows)
        if key not in known:
            width = max(len(self.distinct[row]) for row in rows)
            rank_rows = (self.distinct[row] for row in rows)
            known[key] = np.array([r + r[-1:] * (width - len(r)) for r in rank_rows], np.int64)
        return known[key]
