"""One rank's part of a checkpoint, written to a store as an image and its part record.

Invariant: the part record is written last; if it exists, the part's images are complete. Reused
images of earlier checkpoints are linked before (`holdfast.engine.saving.incremental`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from holdfast.errors import CheckpointDamagedError
from holdfast.format.buffers import Buffer
from holdfast.format.digests import block_count, block_ranges, digest
from holdfast.format.layout import Chunk, ImageLayout
from holdfast.format.names import CheckpointId, image_key, part_key
from holdfast.format.part_layout import PartLayout, image_sizes_bytes
from holdfast.format.records import CheckpointSpec, PartRecord, ReusedImage, SavedValue
from holdfast.format.sealed import seal
from holdfast.store.contract import Store

ChunkBytes = Callable[[Chunk], memoryview]
"""The bytes of one chunk, contiguous, in C order, little-endian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """The description of a part, without its bytes. `layout` is that of all of its chunks."""

    run_id: str
    id: CheckpointId
    rank: int
    part_count: int
    layout: ImageLayout
    spec: CheckpointSpec
    process_values: tuple[SavedValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartImages:
    """The images that a part will consist of: its own, and reused ones of earlier checkpoints.

    `reused_blocks` are the digests of each chunk in a reused image, by the chunk's ordinal.
    """

    own: ImageLayout
    reused: tuple[ReusedImage, ...] = ()
    reused_blocks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def without_reuse(plan: PartPlan) -> PartImages:
    """Return one image with all chunks: nothing is reused."""
    return PartImages(own=plan.layout)


def write_part(
    store: Store, plan: PartPlan, chunk_bytes: ChunkBytes, images: PartImages | None = None
) -> PartRecord:
    """Write the image, digesting each block on the way, then the record that seals it.

    Without `images` all chunks are written.

    Returns:
        The part record as written.

    Raises:
        OutOfSpaceError, StorageError: no part is visible.
    """
    images = images or without_reuse(plan)
    image = ImageSource(images.own, chunk_bytes)
    store.put(image_key(plan.id, plan.rank, plan.part_count), image)
    return put_record(store, plan, images, image.digests)


def put_record(
    store: Store, plan: PartPlan, images: PartImages, own_blocks: Sequence[str]
) -> PartRecord:
    """Write the record that seals the images, which are visible already; return it.

    `own_blocks` are the digests of the own image's blocks.

    Raises:
        OutOfSpaceError, StorageError: no part is visible.
    """
    record = PartRecord(
        run_id=plan.run_id,
        step=plan.id.step,
        attempt=plan.id.attempt,
        rank=plan.rank,
        part_count=plan.part_count,
        image_size_bytes=images.own.size_bytes,
        header_digest=digest(images.own.header),
        blocks=_all_blocks(plan.layout, images, own_blocks),
        reused=images.reused,
        values=plan.process_values,
        checkpoint=plan.spec if plan.rank == 0 else None,
    )
    # Last, so that the record proves that the images are complete.
    store.put(part_key(plan.id, plan.rank, plan.part_count), seal(record))
    return record


def _all_blocks(
    whole: ImageLayout, images: PartImages, own_blocks: Sequence[str]
) -> tuple[str, ...]:
    """Return the digests of all of the rank's chunks, in the order of their common layout."""
    if not images.reused:
        return tuple(own_blocks)
    rest = iter(own_blocks)
    found: list[str] = []
    for chunk in whole.chunks:
        reused = images.reused_blocks.get(chunk.ordinal)
        found += islice(rest, block_count(chunk.size_bytes)) if reused is None else reused
    return tuple(found)


class ImageSource:
    """The bytes of an image, from its chunks, which are digested on the way.

    `digests` holds the digests of the image's blocks once all bytes were requested.
    """

    is_lasting = True

    def __init__(self, layout: ImageLayout, chunk_bytes: ChunkBytes) -> None:
        self._layout = layout
        self._chunk_bytes = chunk_bytes
        self._stops = [chunk.offset_bytes + chunk.size_bytes for chunk in layout.chunks]
        counts = [block_count(chunk.size_bytes) for chunk in layout.chunks]
        self._first_blocks = [*accumulate(counts, initial=0)]
        # Ranges of one chunk follow each other, and its bytes may be a copy made for the call.
        self._last: tuple[Chunk | None, memoryview] = (None, memoryview(b""))
        self.digests = [""] * layout.block_count

    @property
    def size_bytes(self) -> int:
        return self._layout.size_bytes

    def blocks(self, start_bytes: int, stop_bytes: int) -> Iterator[Buffer]:
        if start_bytes < len(self._layout.header):
            yield self._layout.header[start_bytes:stop_bytes]
        for index in range(bisect_right(self._stops, start_bytes), len(self._stops)):
            chunk = self._layout.chunks[index]
            if chunk.offset_bytes >= stop_bytes:
                return
            if chunk.size_bytes:
                start = max(0, start_bytes - chunk.offset_bytes)
                yield from self._blocks_of(index, start, stop_bytes - chunk.offset_bytes)

    def _blocks_of(self, index: int, start: int, stop: int) -> Iterator[Buffer]:
        """Yield the bytes [start, stop) of a chunk, as far as it has them."""
        chunk, (known, data) = self._layout.chunks[index], self._last
        if known is not chunk:
            data = self._chunk_bytes(chunk)
            self._last = chunk, data
        ranges = block_ranges(chunk.size_bytes)
        for number, (first, last) in enumerate(ranges, self._first_blocks[index]):
            if first < stop and last > start:
                yield data[max(first, start) : min(last, stop)]
                if last <= stop:
                    # The store has just read the block, so it is in the processor's cache.
                    self.digests[number] = digest(data[first:last])


def check_layout(part: PartRecord, layout: PartLayout) -> None:
    """Check that a part's sizes and number of digests match its layout.

    Raises:
        CheckpointDamagedError: they do not.
    """
    found = (*image_sizes_bytes(part), len(part.blocks))
    expected = (*(image.size_bytes for image in layout.images), layout.block_count)
    if found != expected:
        raise CheckpointDamagedError(
            f"read part {part.rank} of {part.id}: its record says {_sizes_text(found)}, the arrays "
            f"make {_sizes_text(expected)}"
        )


def _sizes_text(sizes: Sequence[int]) -> str:
    *images, blocks = sizes
    return f"{' and '.join(map(str, images))} bytes and {blocks} blocks"


def check_block(data: Buffer, expected: str, where: str, offset_bytes: int) -> None:
    """Check one block against its digest.

    Raises:
        CheckpointDamagedError: names the file, the byte range, and both digests.
    """
    stop_bytes = offset_bytes + len(data)
    check_digest(digest(data), (offset_bytes, stop_bytes, expected), where)


def check_digest(found: str, expected: tuple[int, int, str], where: str) -> None:
    """Check the digest of a range; `expected` is (start, stop, digest).

    Raises:
        CheckpointDamagedError: as `check_block`.
    """
    start, stop, right = expected
    if found != right:
        raise CheckpointDamagedError(
            f"read {where}: bytes [{start}, {stop}) have digest {found}, expected {right}; the "
            "bytes were changed after they were written"
        )
