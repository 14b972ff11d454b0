"""Write one rank's part: images reused from the last part, an image of its own, and the record.

The way of a part: choose the unchanged chunks, secure their images, take a slot for the rest, copy
and digest that, seal. Its own image goes into a slot of the RAM tier, or directly to a store; what
writes it differs, the order does not. A part that is not completed is aborted.

Invariants:
- In RAM, reused images are linked into the new checkpoint's folder before anything else of it is
  written, so their bytes stay even if the older checkpoint is dropped meanwhile.
- The part record is written last; if it exists, the part's images are complete.
- A part that is not sealed leaves no name behind, not even that of a reused image: the name alone
  would hold memory that is never freed.
- Only a sealed part is reused: whole images whose record was written.

See docs/decisions/0046.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

from holdfast.adapt.contract import Snapshot
from holdfast.engine.saving.incremental import SealedPart, choose, remember
from holdfast.engine.saving.part import ChunkBytes, PartImages, PartPlan
from holdfast.engine.saving.slots import SlotFill
from holdfast.errors import StorageError
from holdfast.format.digests import Buffer, block_count, block_ranges, digest
from holdfast.format.layout import Chunk, ImageLayout, partial_layout
from holdfast.format.names import image_key, part_key, reused_image_key
from holdfast.format.records import PartRecord, members
from holdfast.format.sealed import seal
from holdfast.store.contract import Reader, Store

log = logging.getLogger(__name__)


class PartWriter:
    """One part on its way into one store: choose, open, copy, complete; `close` undoes the rest.

    Threads may use it one after another; `copy`, `complete` and `end` may be called by several at
    once. Nothing is held or written before `open`.

    Args:
        store: The store: the RAM tier if a slot takes the image.
        plan: What to write.
        snapshot: The state.
        last: The last sealed part, some of whose images this one may reuse.
    """

    def __init__(
        self, store: Store, plan: PartPlan, snapshot: Snapshot, last: SealedPart | None
    ) -> None:
        self._store = store
        self._plan = plan
        self._last = last
        self._snapshot = snapshot
        self._key = image_key(plan.id, plan.rank, plan.part_count)
        is_beside = last is not None and last.is_in_memory == store.is_in_memory
        self._before = last if is_beside else None
        # Arrays on a device are not compared by digest: that would need a copy to the host.
        chunk_bytes = None if snapshot.on_devices else snapshot.chunk_bytes
        self.images = choose(plan, self._before, snapshot.marks, chunk_bytes)
        self._fill: SlotFill | None = None
        self._open = contextlib.ExitStack()
        self._readers: list[Reader] = []
        self._is_sealed = False

    def open(self, fill: SlotFill | None = None) -> bool:
        """Secure the reused images; in RAM, hold them open, so that they stay readable in any case.

        Args:
            fill: The slot for the part's own image, if one is prepared; `close` releases it.

        Returns:
            False if one was removed, because its checkpoint was dropped meanwhile. Then
            `images` has all chunks in the part's own image, which may need another slot.
        """
        self._fill = fill
        try:
            if self._before is not None:
                secure_reused(self._store, self._plan, self.images, self._before.record)
            for image in self.images.reused if self._store.is_in_memory else ():
                key = reused_image_key(
                    self._plan.id, self._plan.rank, self._plan.part_count, image.origin
                )
                self._readers.append(self._open.enter_context(self._store.open(key)))
        except StorageError as error:
            step = self._plan.id.step
            log.debug("step %d reuses no images, they were removed: %s", step, error)
            self.discard()
            self.images = PartImages(own=self._plan.layout)
            return False
        return True

    def fill_into(self, fill: SlotFill) -> None:
        """Write the part's own image into a slot, which `close` releases."""
        self._fill = fill

    def copy(self) -> bool:
        """Fill the slot, or wait until another thread has; return whether it is whole.

        Raises:
            StorageError, DeviceError: This thread cannot fill it.
        """
        return self._fill is not None and self._fill.copy(self._snapshot)

    def complete(self, *, keep: bool = True) -> SealedPart:
        """Write the own image, or wait until another thread has; name it, and write the record.

        Args:
            keep: Do not release a state on devices as soon as it is in a slot.

        Raises:
            OutOfSpaceError, StorageError, DeviceError: The part is not sealed, and no part is
                visible; another thread may have ended the copying before the slot was whole.
        """
        fill = self._fill
        if fill is None:
            digests = put_image(self._store, self._plan, self.images, self._snapshot.chunk_bytes)
        elif fill.copy(self._snapshot, keep=keep):
            digests = fill.show(self._key)
        else:
            raise StorageError(f"save step {self._plan.id.step}: the slot was not filled whole")
        record = put_record(self._store, self._plan, self.images, digests)
        self._is_sealed = True
        return remember(
            record,
            self._plan,
            self.images,
            self._snapshot.marks,
            self._last,
            is_in_memory=self._store.is_in_memory,
            is_readable=not self._snapshot.on_devices,
        )

    @property
    def is_whole(self) -> bool:
        """Whether a slot holds the whole own image, so that `chunk_bytes` can be used."""
        return self._fill is not None and self._fill.is_whole

    def chunk_bytes(self) -> ChunkBytes:
        """Return a reader of all chunks of the part, to write it to another store.

        The mapped slot stays readable even if its file was removed.

        Raises:
            StorageError: The slot was changed by another process.
        """
        assert self._fill is not None
        own, images, plan = self._fill.slot.view(), self.images, self._plan
        places = {chunk.ordinal: (own, chunk.offset_bytes) for chunk in images.own.chunks}
        for reader, image in zip(self._readers, images.reused, strict=True):
            layout = partial_layout(plan.spec.arrays, plan.layout, members(image.laid))
            memory = reader.lasting_view()
            assert memory is not None
            used = set(members(image.used))
            places |= {
                c.ordinal: (memory, c.offset_bytes) for c in layout.chunks if c.ordinal in used
            }

        def bytes_of(chunk: Chunk) -> memoryview:
            view, offset_bytes = places[chunk.ordinal]
            return view[offset_bytes : offset_bytes + chunk.size_bytes]

        return bytes_of

    def end(self) -> None:
        """Let no thread begin to write the image any more; wait for one that is writing it."""
        if self._fill is not None:
            self._fill.end()

    def discard(self) -> None:
        """Remove all names of the part from the store, unless it was sealed; bytes stay."""
        if self._is_sealed:
            return
        # An image without a record is not a part: nothing else would free its slot.
        with contextlib.suppress(StorageError):
            self._store.delete(self._key)
        _release_reused(self._store, self._plan, self.images)

    def close(self) -> None:
        """Abort the part if it was not sealed, and release all memory. Idempotent."""
        self.end()
        self.discard()
        self._open.close()
        if self._fill is not None:
            self._fill.close()


def secure_reused(store: Store, plan: PartPlan, images: PartImages, last: PartRecord) -> None:
    """Check that the images reused of the part `last` exist; in RAM, link each.

    RAM is recycled at any time; a linked image stays. In the durable tier the last commit of the
    attempt names the images, so they are removed only if that checkpoint is deleted on request.

    Raises:
        StorageError: an image was removed meanwhile, or the store failed; no image has a name in
            the new folder.
    """
    rank, count = plan.rank, plan.part_count
    try:
        for image in images.reused:
            if store.link is None:
                with store.open(image_key(image.origin, rank, count)):
                    continue
            source = reused_image_key(last.id, rank, count, image.origin)
            if image.origin == last.id:
                source = image_key(last.id, rank, count)
            store.link(source, reused_image_key(plan.id, rank, count, image.origin))
    except StorageError:
        _release_reused(store, plan, images)
        raise


def _release_reused(store: Store, plan: PartPlan, images: PartImages) -> None:
    """Remove the links, after a failed save; names that cannot be removed are left."""
    if store.link is not None:
        for image in images.reused:
            with contextlib.suppress(StorageError):
                store.delete(reused_image_key(plan.id, plan.rank, plan.part_count, image.origin))


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
    images = images or PartImages(own=plan.layout)
    return put_record(store, plan, images, put_image(store, plan, images, chunk_bytes))


def put_image(
    store: Store, plan: PartPlan, images: PartImages, chunk_bytes: ChunkBytes
) -> Sequence[str]:
    """Write the own image of a part; return the digests of its blocks for `put_record`.

    Raises:
        OutOfSpaceError, StorageError: no image is visible.
    """
    image = ImageSource(images.own, chunk_bytes)
    store.put(image_key(plan.id, plan.rank, plan.part_count), image)
    return image.digests


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
    blocks: list[str] = []
    for chunk in whole.chunks:
        reused = images.reused_blocks.get(chunk.ordinal)
        blocks += islice(rest, block_count(chunk.size_bytes)) if reused is None else reused
    return tuple(blocks)


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
        chunk, (last, data) = self._layout.chunks[index], self._last
        if last is not chunk:
            data = self._chunk_bytes(chunk)
            self._last = chunk, data
        ranges = block_ranges(chunk.size_bytes)
        for number, (first, end) in enumerate(ranges, self._first_blocks[index]):
            if first < stop and end > start:
                yield data[max(first, start) : min(end, stop)]
                if end <= stop:
                    # The store has just read the block, so it is in the processor's cache.
                    self.digests[number] = digest(data[first:end])
