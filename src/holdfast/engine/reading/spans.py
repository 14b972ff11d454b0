"""Spans: adjacent blocks of an image that are read with one request, and the ranks that want them.

The blocks of a part are numbered in the order of its images' bytes, which every reader computes
alike from the part's record. Ranges of blocks are half-open. All functions are pure.

Blocks between wanted ones are read too if they are small (`GAP_MAX_BYTES`): a request costs more
time and money than their bytes. A range never crosses the end of an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.format.digests import BLOCK_SIZE_BYTES, block_ranges
from holdfast.format.part_layout import PartLayout

SPAN_SIZE_MAX_BYTES = 4 * BLOCK_SIZE_BYTES
GAP_MAX_BYTES = 64 * 1024

BlockRange = tuple[int, int]
"""Adjacent blocks of a part, [first, stop)."""

Wants = Mapping[int, Sequence[BlockRange]]
"""The ranges that a rank wants of each part, by the part's rank, ascending."""


class Block(NamedTuple):
    """One block: its image and its bytes there; its chunk, and its number in the chunk."""

    image: int
    start_bytes: int
    stop_bytes: int
    ordinal: int
    number: int


class SharedRange(NamedTuple):
    """Blocks [first, stop) of a part that several ranks want, ascending."""

    first: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Blocks [first, stop) of one image of a part, which are bytes [start, stop) of it."""

    part: int
    image: int
    first: int
    stop: int
    start_bytes: int
    stop_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def file_name(self) -> str:
        """A name that no other span of the checkpoint has."""
        return f"{self.part}-{self.first}-{self.stop}"


class PartBlocks:
    """All blocks of a part, in the order of its images' bytes."""

    def __init__(self, part: int, layout: PartLayout) -> None:
        self._part = part
        self._first: dict[int, int] = {}
        self.blocks: list[Block] = []
        for image, chunks in enumerate(layout.used):
            for chunk in chunks:
                self._first[chunk.ordinal] = len(self.blocks)
                at = chunk.offset_bytes
                for number, (start, stop) in enumerate(block_ranges(chunk.size_bytes)):
                    self.blocks.append(Block(image, at + start, at + stop, chunk.ordinal, number))

    def index(self, ordinal: int, number: int) -> int:
        """Return the position of a chunk's block."""
        return self._first[ordinal] + number

    def ranges(self, wanted: Iterable[int]) -> list[BlockRange]:
        """Return the ranges to read for the blocks at these positions, in any order."""
        ranges: list[BlockRange] = []
        for index in sorted(wanted):
            if ranges:
                first, stop = ranges[-1]
                last, block = self.blocks[stop - 1], self.blocks[index]
                gap_bytes = block.start_bytes - last.stop_bytes
                if block.image == last.image and gap_bytes <= GAP_MAX_BYTES:
                    ranges[-1] = (first, index + 1)
                    continue
            ranges.append((index, index + 1))
        return ranges

    def spans(self, found: BlockRange) -> Iterator[Span]:
        """Divide a range into spans of at most `SPAN_SIZE_MAX_BYTES`, as long as they can be."""
        first = found[0]
        for index in range(*found):
            start_bytes = self.blocks[first].start_bytes
            if self.blocks[index].stop_bytes - start_bytes > SPAN_SIZE_MAX_BYTES:
                yield self._span(first, index)
                first = index
        yield self._span(first, found[1])

    def _span(self, first: int, stop: int) -> Span:
        return Span(
            part=self._part,
            image=self.blocks[first].image,
            first=first,
            stop=stop,
            start_bytes=self.blocks[first].start_bytes,
            stop_bytes=self.blocks[stop - 1].stop_bytes,
        )


def shared_ranges(wants: Sequence[Wants]) -> dict[int, list[SharedRange]]:
    """Return what more than one rank wants of each part; `wants[r]` are those of rank r.

    Two ranges of a part never overlap, and each is wanted as a whole by its ranks.
    """
    edges: dict[int, list[tuple[int, int, int]]] = {}
    for rank, parts in enumerate(wants):
        for part, ranges in parts.items():
            for first, stop in ranges:
                edges.setdefault(part, []).extend(((first, 1, rank), (stop, -1, rank)))
    overlaps: dict[int, list[SharedRange]] = {}
    for part, ends in sorted(edges.items()):
        wanting: set[int] = set()
        at = 0
        for index, change, rank in sorted(ends):
            if len(wanting) > 1 and index > at:
                overlaps.setdefault(part, []).append(SharedRange(at, index, tuple(sorted(wanting))))
            at = index
            (wanting.add if change > 0 else wanting.discard)(rank)
    return overlaps


def without(ranges: Iterable[BlockRange], shared: Iterable[SharedRange]) -> list[BlockRange]:
    """Return the parts of a rank's `ranges` that are not shared; both ascend.

    Each range of `shared` is within one of `ranges`.
    """
    rest = []
    others = iter(shared)
    other = next(others, None)
    for first, stop in ranges:
        at = first
        while other is not None and other.first < stop:
            if other.first > at:
                rest.append((at, other.first))
            at = other.stop
            other = next(others, None)
        if at < stop:
            rest.append((at, stop))
    return rest
