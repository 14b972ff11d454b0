"""Saving: one rank's share of a checkpoint, written to a store as an image and its part record.

The part record is written last: where it exists, the image is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import CheckpointDamagedError
from holdfast.format.buffers import Buffer
from holdfast.format.digests import block_ranges, digest
from holdfast.format.layout import Chunk, ImageLayout
from holdfast.format.names import CheckpointId, image_key, part_key
from holdfast.format.records import CheckpointSpec, PartRecord, SavedValue
from holdfast.format.sealed import seal
from holdfast.store.contract import Store
from holdfast.store.ram import Filling

ChunkBytes = Callable[[Chunk], memoryview]
"""The bytes of one chunk, contiguous, in C order, little-endian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """What a part is before its bytes are known."""

    run_id: str
    id: CheckpointId
    rank: int
    part_count: int
    layout: ImageLayout
    spec: CheckpointSpec
    process_values: tuple[SavedValue, ...]


def write_part(store: Store, plan: PartPlan, chunk_bytes: ChunkBytes) -> PartRecord:
    """Writes the image, digesting each block as it passes, then the record that seals it.

    Raises:
        OutOfSpaceError, StorageError: nothing of it is visible as a part.
    """
    blocks: list[str] = []
    key = image_key(plan.id, plan.rank, plan.part_count)
    store.put(key, plan.layout.size_bytes, _image_blocks(plan.layout, chunk_bytes, blocks))
    return _put_record(store, plan, blocks)


def fill_slot(filling: Filling, layout: ImageLayout, chunk_bytes: ChunkBytes) -> None:
    """Copies an image into a slot, and does nothing else: a training thread may wait for it.

    Raises:
        StorageError: somebody changed the slot.
    """
    filling.write(0, memoryview(layout.header))
    fill_chunks(filling, layout.chunks, chunk_bytes)


def fill_chunks(filling: Filling, chunks: Iterable[Chunk], chunk_bytes: ChunkBytes) -> None:
    """Copies some chunks of an image into a slot.

    Raises:
        StorageError: somebody changed the slot.
    """
    for chunk in chunks:
        if chunk.size_bytes:
            data = chunk_bytes(chunk)
            for start, stop in block_ranges(chunk.size_bytes):
                filling.write(chunk.offset_bytes + start, data[start:stop])


def seal_slot(
    store: Store,
    filling: Filling,
    plan: PartPlan,
    wait_until_filled: Callable[[int], None] | None = None,
) -> PartRecord:
    """Digests a slot that is filled, shows it as the image, and writes the record.

    Args:
        store: the RAM tier.
        filling: the slot.
        plan: what the part is.
        wait_until_filled: where the slot is still being filled: waits until all bytes below an
            offset are there. So a block is digested while later ones are on their way.

    Raises:
        OutOfSpaceError, StorageError: nothing of it is visible as a part.
    """
    blocks = []
    with filling.view() as view:
        for chunk in plan.layout.chunks:
            for start, stop in block_ranges(chunk.size_bytes):
                if wait_until_filled is not None:
                    wait_until_filled(chunk.offset_bytes + stop)
                blocks.append(digest(view[chunk.offset_bytes + start : chunk.offset_bytes + stop]))
    filling.check_whole()
    filling.show(image_key(plan.id, plan.rank, plan.part_count))
    return _put_record(store, plan, blocks)


def bytes_in_slot(filling: Filling) -> ChunkBytes:
    """The chunks of an image that `fill_slot` filled, where they are to go elsewhere after all.

    Raises:
        StorageError: somebody changed the slot.
    """
    view = filling.view()
    return lambda chunk: view[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes]


def _put_record(store: Store, plan: PartPlan, blocks: Sequence[str]) -> PartRecord:
    record = PartRecord(
        run_id=plan.run_id,
        step=plan.id.step,
        attempt=plan.id.attempt,
        rank=plan.rank,
        part_count=plan.part_count,
        image_size_bytes=plan.layout.size_bytes,
        header_digest=digest(plan.layout.header),
        blocks=tuple(blocks),
        values=plan.process_values,
        checkpoint=plan.spec if plan.rank == 0 else None,
    )
    data = seal(record)
    store.put(part_key(plan.id, plan.rank, plan.part_count), len(data), [data])
    return record


def _image_blocks(
    layout: ImageLayout, chunk_bytes: ChunkBytes, digests: list[str]
) -> Iterator[Buffer]:
    yield layout.header
    for chunk in layout.chunks:
        if chunk.size_bytes:
            data = chunk_bytes(chunk)
            for start, stop in block_ranges(chunk.size_bytes):
                block = data[start:stop]
                yield block
                # The store has just read it: it is in the cache.
                digests.append(digest(block))


def check_layout(part: PartRecord, layout: ImageLayout) -> None:
    """Checks that a part is of the size, and has the digests, that the arrays call for.

    Raises:
        CheckpointDamagedError: it is not.
    """
    found = (part.image_size_bytes, len(part.blocks))
    if found != (layout.size_bytes, layout.block_count):
        raise CheckpointDamagedError(
            f"read part {part.rank} of {part.id}: its record says {found[0]} bytes and {found[1]} "
            f"blocks, the arrays make {layout.size_bytes} and {layout.block_count}"
        )


def check_block(data: Buffer, expected: str, where: str, offset_bytes: int) -> None:
    """Checks one block against its digest.

    Raises:
        CheckpointDamagedError: says the file, the byte range, and both digests.
    """
    stop_bytes = offset_bytes + len(data)
    check_digest(digest(data), (offset_bytes, stop_bytes, expected), where)


def check_digest(found: str, expected: tuple[int, int, str], where: str) -> None:
    """Checks the digest of a range; `expected` is (start, stop, digest).

    Raises:
        CheckpointDamagedError: as `check_block`.
    """
    start, stop, right = expected
    if found != right:
        raise CheckpointDamagedError(
            f"read {where}: bytes [{start}, {stop}) have digest {found}, expected {right}; the "
            "bytes were changed after they were written"
        )
