"""Cut large arrays finer than their shards, so that the ranks that hold them share the writing.

A chunk has one owner. A large array that many ranks hold would be written by one of them while the
others wait, so its chunks are made smaller than its shards: a tenth of what a rank writes anyway,
and not much below `PIECE_SIZE_MIN_BYTES`. Smaller arrays stay whole: a restore returns such a chunk
without copying it, and other safetensors readers see it as one tensor.

Invariants:
- A pure function that uses integers only: every rank computes the same plan on any machine.
- Only regular grids are cut. They stay regular, and each piece lies within one shard, where it is
  contiguous: pieces are cut along the leading axes.
- There are ten to twenty pieces per rank in all, which bounds the size of the manifest.

See docs/decisions/0011.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.format.digests import BLOCK_SIZE_BYTES
from holdfast.format.dtypes import item_size_bytes
from holdfast.format.grid import Placement, Shape, grid_shape, is_regular, largest_chunk_shape
from holdfast.format.layout import CHUNK_ALIGNMENT_BYTES

PIECE_SIZE_MIN_BYTES = BLOCK_SIZE_BYTES
"""Smaller pieces cost more in bookkeeping than they gain in balance."""

PIECES_OF_A_SHARE = 10
"""A rank's share of all bytes is about this many pieces, which bounds the imbalance."""

DIVISOR_SHARE_MIN = 0.25
"""Pieces below this share of the allowed size are not used."""

Holders = tuple[tuple[int, ...], ...]


def split_large(placements: Sequence[Placement]) -> list[Placement]:
    """Return `placements`, with large ones that several ranks hold cut into smaller chunks."""
    if not any(map(_may_be_split, placements)):
        return list(placements)
    shares = _Shares(placements)
    cut = _Cutter()
    return [
        cut(placement, max(PIECE_SIZE_MIN_BYTES, shares.least(placement) // PIECES_OF_A_SHARE))
        if _may_be_split(placement)
        else placement
        for placement in placements
    ]


def _may_be_split(placement: Placement) -> bool:
    return (
        _size_bytes(placement) >= 2 * PIECE_SIZE_MIN_BYTES
        and is_regular(placement.chunk_shape)
        and any(len(ranks) > 1 for ranks in placement.holders)
    )


def _size_bytes(placement: Placement) -> int:
    """Return a number of bytes that no chunk exceeds."""
    return item_size_bytes(placement.dtype) * math.prod(largest_chunk_shape(placement.chunk_shape))


class _Shares:
    """The bytes that each rank would write if replicated chunks could be divided freely."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        sizes_of: dict[int, list[int]] = {}
        # Placements share the object of their holders if they can; identity avoids a comparison.
        self._by_id: dict[int, Holders] = {}
        distinct_holders: dict[Holders, Holders] = {}
        for placement in placements:
            holders = self._by_id.get(id(placement.holders))
            if holders is None:
                holders = distinct_holders.setdefault(placement.holders, placement.holders)
                self._by_id[id(placement.holders)] = holders
            # Chunks at an array's edge count as full chunks.
            sizes_of.setdefault(id(holders), []).append(_size_bytes(placement))
        self._bytes: dict[int, int] = {}
        for holders in distinct_holders:
            total_bytes = sum(sizes_of[id(holders)])
            for ranks in holders:
                for rank in ranks:
                    share_bytes = total_bytes // len(ranks)
                    self._bytes[rank] = self._bytes.get(rank, 0) + share_bytes
        self._least: dict[int, int] = {}

    def least(self, placement: Placement) -> int:
        """Return the smallest share among the ranks that hold replicated chunks."""
        holders = self._by_id[id(placement.holders)]
        share = self._least.get(id(holders))
        if share is None:
            share = min(self._bytes[rank] for ranks in holders if len(ranks) > 1 for rank in ranks)
            self._least[id(holders)] = share
        return share


class _Cutter:
    """Cuts placements finer; equal holders and cuts share one holders object."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], Holders] = {}

    def __call__(self, placement: Placement, limit_bytes: int) -> Placement:
        """Return `placement` in pieces of at most about `limit_bytes`."""
        chunk_shape = largest_chunk_shape(placement.chunk_shape)
        shape = _piece_shape(placement, chunk_shape, limit_bytes)
        if shape == chunk_shape:
            return placement
        chunk_of = _chunk_of_pieces(placement, chunk_shape, shape)
        key = id(placement.holders), chunk_of.tobytes()
        if key not in self._known:
            self._known[key] = tuple(placement.holders[chunk] for chunk in chunk_of.tolist())
        return replace(placement, chunk_shape=shape, holders=self._known[key])


def _chunk_of_pieces(placement: Placement, chunk_shape: Shape, piece_shape: Shape) -> np.ndarray:
    """Return, for each piece in C order, the index of the chunk that it is cut from."""
    chunks = np.zeros(1, np.int64)
    counts = grid_shape(placement.shape, chunk_shape)
    pieces = grid_shape(placement.shape, piece_shape)
    for axis, piece in enumerate(piece_shape):
        position = np.arange(pieces[axis]) * piece // chunk_shape[axis]
        chunks = np.add.outer(chunks * counts[axis], position).reshape(-1)
    return chunks


def _piece_shape(placement: Placement, chunk_shape: Shape, limit_bytes: int) -> Shape:
    """Return the largest piece of at most about `limit_bytes`, cut along the leading axes."""
    size_bytes = _size_bytes(placement)
    piece = list(chunk_shape)
    for axis, extent in enumerate(chunk_shape):
        if size_bytes <= limit_bytes:
            break
        row_bytes = size_bytes // extent
        if row_bytes > limit_bytes:
            # One row is still too large: cut to single rows, and go on with the next axis.
            piece[axis], size_bytes = 1, row_bytes
            continue
        cut = _Cut(extent=extent, row_bytes=row_bytes, rows_max=limit_bytes // row_bytes)
        is_sharded = extent < placement.shape[axis]
        replica_count = max(map(len, placement.holders))
        piece[axis] = cut.dividing() if is_sharded else cut.even(replica_count)
        break
    return tuple(piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """One axis of a chunk, of `extent` rows, to be cut into pieces of at most `rows_max`."""

    extent: int
    row_bytes: int
    rows_max: int

    def even(self, replica_count: int) -> int:
        """Return the rows per piece: about equal pieces that start aligned.

        If there are more pieces than replicas, each replica's rank gets equally many.
        """
        count = -(-self.extent // self.rows_max)
        if count > replica_count:
            count = -(-count // replica_count) * replica_count
        rows = -(-self.extent // count)
        unit = CHUNK_ALIGNMENT_BYTES // math.gcd(self.row_bytes, CHUNK_ALIGNMENT_BYTES)
        # A multiple of `unit` rows keeps the start of each piece aligned.
        return rows // unit * unit or rows

    def dividing(self) -> int:
        """Return the rows per piece: exactly equal, since the next shard continues the grid.

        A shard without a suitable divisor is cut into larger pieces, or stays whole.
        """
        below = max(rows for rows in self._divisors() if rows <= self.rows_max)
        if below >= self.rows_max * DIVISOR_SHARE_MIN:
            return below
        return min(rows for rows in self._divisors() if rows > self.rows_max)

    def _divisors(self) -> Iterator[int]:
        for low in range(1, math.isqrt(self.extent) + 1):
            if self.extent % low == 0:
                yield low
                yield self.extent // low
