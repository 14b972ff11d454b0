"""Verifying: reads every block of a checkpoint in one store and says which are bad."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.engine.sources import CheckpointSources, PartSource
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.digests import BLOCK_SIZE_BYTES, block_ranges, digest
from holdfast.format.layout import ImageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCheck:
    """One range that was read: bytes [start, stop) of `key`, and what is wrong with it, if so."""

    tier: str
    key: str
    start_bytes: int
    stop_bytes: int
    expected: str
    found: str | None
    problem: str | None


def size_to_verify_bytes(sources: CheckpointSources) -> int:
    """How many bytes `verify` will read."""
    return sum(copy.part.image_size_bytes for copies in sources.parts for copy in copies)


def verify(sources: CheckpointSources) -> Iterator[BlockCheck]:
    """Checks every block of every copy; yields one result a block, good ones too."""
    for rank, copies in enumerate(sources.parts):
        layout = sources.layout(rank)
        for copy in copies:
            yield from _verify_image(copy, layout)


def _verify_image(copy: PartSource, layout: ImageLayout) -> Iterator[BlockCheck]:
    scratch = memoryview(bytearray(max(BLOCK_SIZE_BYTES, len(layout.header))))
    ranges = [(0, len(layout.header), copy.part.header_digest)]
    for chunk in layout.chunks:
        for number, (start, stop) in enumerate(block_ranges(chunk.size_bytes)):
            expected = copy.part.blocks[chunk.first_block + number]
            ranges.append((chunk.offset_bytes + start, chunk.offset_bytes + stop, expected))
    try:
        with copy.store.open(copy.image_key) as image:
            if image.size_bytes != layout.size_bytes:
                length = f"expected {layout.size_bytes} bytes, found {image.size_bytes}"
                end = max(image.size_bytes, layout.size_bytes)
                yield _check(copy, min(image.size_bytes, layout.size_bytes), end, "", None, length)
            for start, stop, expected in ranges:
                block = scratch[: stop - start]
                try:
                    image.read_into(start, block)
                except StorageError as error:
                    yield _check(copy, start, stop, expected, None, str(error))
                    continue
                found = digest(block)
                problem = None if found == expected else "wrong digest"
                yield _check(copy, start, stop, expected, found, problem)
    except HoldfastError as error:
        yield _check(copy, 0, layout.size_bytes, "", None, str(error))


def _check(
    copy: PartSource, start: int, stop: int, expected: str, found: str | None, problem: str | None
) -> BlockCheck:
    return BlockCheck(
        tier=copy.store.tier,
        key=copy.image_key,
        start_bytes=start,
        stop_bytes=stop,
        expected=expected,
        found=found,
        problem=problem,
    )
