"""The owner of each chunk, and the size of each rank's part, without computing layouts.

Owners that several arrays share are examined once. The totals of all ranks cost about as much as
those of one, so that a reader of a few parts of thousands can check the sizes of all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from holdfast.format.digests import BLOCK_SIZE_BYTES
from holdfast.format.dtypes import item_size_bytes
from holdfast.format.grid import chunk_sizes
from holdfast.format.records import ArraySpec, Owners, owners_of


@dataclass(frozen=True)
class _Runs:
    """The owners of one array's chunks in runs: chunks [start, stop) belong to a rank."""

    ranks: list[int]
    starts: list[int]
    stops: list[int]

    @cached_property
    def of_rank(self) -> dict[int, list[range]]:
        """The runs of each rank, ascending."""
        of_rank: dict[int, list[range]] = {}
        for rank, start, stop in zip(self.ranks, self.starts, self.stops, strict=True):
            of_rank.setdefault(rank, []).append(range(start, stop))
        return of_rank


class PartSizes(NamedTuple):
    """The totals of each rank's chunks; a rank that owns none is missing."""

    data_bytes: dict[int, int]
    block_counts: dict[int, int]


class Ownership:
    """The owners of the chunks of `arrays`, which must have passed `holdfast.format.check`."""

    def __init__(self, arrays: Sequence[ArraySpec]) -> None:
        self._arrays = arrays
        self._all_runs: dict[int, _Runs] = {}
        self._written_at = _written_at(arrays)

    def runs(self, index: int, rank: int) -> list[range]:
        """Return the indices of the rank's chunks of array `index`, as ascending runs."""
        return self._runs(index).of_rank.get(rank, [])

    def owner(self, index: int, chunk: int) -> int:
        """Return the rank that owns a chunk of array `index`."""
        runs = self._runs(index)
        return runs.ranks[bisect_right(runs.stops, chunk)]

    def chunk_count(self, rank: int) -> int:
        """Return the number of chunks that the rank owns."""
        return self._chunk_counts.get(rank, 0)

    def block_count_min(self, rank: int) -> int:
        """Return a lower bound of the rank's blocks: one per chunk that has bytes."""
        return self._chunk_counts_with_bytes.get(rank, 0)

    @cached_property
    def sizes(self) -> PartSizes:
        """The totals of all chunks. Visits every chunk: check `block_count_min` before."""
        sizes = PartSizes({}, {})
        divided: dict[int, list[ArraySpec]] = {}
        for index, spec in enumerate(self._arrays):
            if spec.chunk_shape != spec.shape:
                divided.setdefault(self._written_at[index], []).append(spec)
                continue
            size = math.prod(spec.shape) * item_size_bytes(spec.dtype)
            _add(sizes, self._runs(index).ranks[0], size, -(-size // BLOCK_SIZE_BYTES))
        for at, specs in divided.items():
            runs = self._runs(at)
            for rank, *totals in zip(runs.ranks, *_totals(specs, runs.starts), strict=True):
                _add(sizes, rank, *totals)
        return sizes

    @cached_property
    def _chunk_counts(self) -> dict[int, int]:
        return self._counted(range(len(self._arrays)))

    @cached_property
    def _chunk_counts_with_bytes(self) -> dict[int, int]:
        return self._counted([i for i, spec in enumerate(self._arrays) if math.prod(spec.shape)])

    def _counted(self, indices: Iterable[int]) -> dict[int, int]:
        counts: dict[int, int] = {}
        for at, times in Counter(self._written_at[index] for index in indices).items():
            for rank, runs in self._runs(at).of_rank.items():
                counts[rank] = counts.get(rank, 0) + sum(map(len, runs)) * times
        return counts

    def _runs(self, index: int) -> _Runs:
        at = self._written_at[index]
        if at not in self._all_runs:
            owners = owners_of(self._arrays, index)
            cuts = [0, *accumulate(count for _, count in owners)]
            self._all_runs[at] = _Runs([rank for rank, _ in owners], cuts[:-1], cuts[1:])
        return self._all_runs[at]


def _add(sizes: PartSizes, rank: int, data_bytes: int, block_count: int) -> None:
    sizes.data_bytes[rank] = sizes.data_bytes.get(rank, 0) + data_bytes
    sizes.block_counts[rank] = sizes.block_counts.get(rank, 0) + block_count


def _totals(arrays: Iterable[ArraySpec], starts: list[int]) -> tuple[list[int], list[int]]:
    """Return the bytes and the blocks of all `arrays` in each run of chunks."""
    # Imported here: an agent whose arrays are all whole needs 12 MB less.
    import numpy as np

    begins = np.array(starts, np.int64)
    data_bytes, block_counts = np.zeros((2, len(starts)), np.int64)
    for spec in arrays:
        sizes = chunk_sizes(spec.shape, spec.chunk_shape) * item_size_bytes(spec.dtype)
        data_bytes += np.add.reduceat(sizes, begins)
        block_counts += np.add.reduceat(-(-sizes // BLOCK_SIZE_BYTES), begins)
    return data_bytes.tolist(), block_counts.tolist()


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
