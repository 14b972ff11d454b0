"""The owner of each chunk, and the size of each rank's part, without computing layouts.

Owners that several arrays share are examined once. The totals of all ranks cost about as much as
those of one, so that a reader of a few parts of thousands can check the sizes of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from holdfast.format.digests import BLOCK_SIZE_BYTES
from holdfast.format.dtypes import item_size_bytes
from holdfast.format.grid import chunk_sizes
from holdfast.format.records import ArraySpec, Owners, owners_of

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class _Runs:
    """The owners of one array's chunks in runs: chunks [start, stop) belong to a rank.

    `only` is the rank that owns all of them; None if several do.
    """

    ranks: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    only: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """The totals of each rank's chunks: `data_bytes[rank]` and `block_counts[rank]`."""

    data_bytes: np.ndarray
    block_counts: np.ndarray


class Ownership:
    """The owners of the chunks of `arrays`, which must have passed `holdfast.format.check`."""

    def __init__(self, arrays: Sequence[ArraySpec]) -> None:
        self._arrays = arrays
        self._all_runs: dict[int, _Runs] = {}
        self._written_at = _written_at(arrays)
        self._runs_of_rank: dict[tuple[int, int], list[range]] = {}

    def runs(self, index: int, rank: int) -> list[range]:
        """Return the indices of the rank's chunks of array `index`, as ascending runs."""
        key = self._written_at[index], rank
        runs = self._runs_of_rank.get(key)
        if runs is None:
            table = self._runs(index)
            (at,) = (table.ranks == rank).nonzero()
            pairs = zip(table.starts[at].tolist(), table.stops[at].tolist(), strict=True)
            runs = self._runs_of_rank[key] = [range(start, stop) for start, stop in pairs]
        return runs

    def owner(self, index: int, chunk: int) -> int:
        """Return the rank that owns a chunk of array `index`."""
        import numpy as np

        runs = self._runs(index)
        if runs.only is not None:
            return runs.only
        return int(runs.ranks[np.searchsorted(runs.stops, chunk, side="right")])

    def chunk_count(self, rank: int) -> int:
        """Return the number of chunks that the rank owns."""
        return _at(self._chunk_counts, rank)

    def block_count_min(self, rank: int) -> int:
        """Return a lower bound of the rank's blocks: one per chunk that has bytes."""
        return _at(self._chunk_counts_with_bytes, rank)

    @cached_property
    def sizes(self) -> PartSizes:
        """The totals of all chunks. Visits every chunk: check `block_count_min` before."""
        import numpy as np

        data_bytes, block_counts = np.zeros((2, self._rank_count), np.int64)
        for index, spec in enumerate(self._arrays):
            runs = self._runs(index)
            if runs.only is not None and spec.chunk_shape == spec.shape:
                # Most arrays are whole, and of one rank: a state may have 100,000 of them.
                size = math.prod(spec.shape) * item_size_bytes(spec.dtype)
                data_bytes[runs.only] += size
                block_counts[runs.only] += -(-size // BLOCK_SIZE_BYTES)
                continue
            sizes = chunk_sizes(spec.shape, spec.chunk_shape) * item_size_bytes(spec.dtype)
            np.add.at(data_bytes, runs.ranks, np.add.reduceat(sizes, runs.starts))
            blocks = -(-sizes // BLOCK_SIZE_BYTES)
            np.add.at(block_counts, runs.ranks, np.add.reduceat(blocks, runs.starts))
        return PartSizes(data_bytes=data_bytes, block_counts=block_counts)

    @cached_property
    def _chunk_counts(self) -> np.ndarray:
        return self._counted(range(len(self._arrays)))

    @cached_property
    def _chunk_counts_with_bytes(self) -> np.ndarray:
        return self._counted([i for i, spec in enumerate(self._arrays) if math.prod(spec.shape)])

    def _counted(self, indices: Sequence[int]) -> np.ndarray:
        import numpy as np

        counts = np.zeros(self._rank_count, np.int64)
        times: dict[int, int] = {}
        for index in indices:
            at = self._written_at[index]
            times[at] = times.get(at, 0) + 1
        for at, count in times.items():
            runs = self._runs(at)
            np.add.at(counts, runs.ranks, (runs.stops - runs.starts) * count)
        return counts

    @cached_property
    def _rank_count(self) -> int:
        every = (self._runs(index) for index in set(self._written_at))
        return 1 + max((int(runs.ranks.max()) for runs in every), default=-1)

    def _runs(self, index: int) -> _Runs:
        at = self._written_at[index]
        if at not in self._all_runs:
            import numpy as np

            ranks, counts = np.array(owners_of(self._arrays, index), np.int64).T
            stops = np.cumsum(counts)
            only = int(ranks[0]) if len(ranks) == 1 else None
            self._all_runs[at] = _Runs(ranks, stops - counts, stops, only)
        return self._all_runs[at]


def _written_at(arrays: Sequence[ArraySpec]) -> list[int]:
    """Return, for each array, the index of the first array with the same owners.

    Long owners are not compared: the format writes those out once.
    """
    first: dict[Owners, int] = {}
    cells = []
    for index, spec in enumerate(arrays):
        owners = spec.owners
        if isinstance(owners, int):
            cells.append(owners)
        else:
            cells.append(first.setdefault(owners, index) if len(owners) == 1 else index)
    return cells


def _at(counts: np.ndarray, rank: int) -> int:
    """Return the count of a rank; 0 for a rank above all owners."""
    return int(counts[rank]) if rank < len(counts) else 0
