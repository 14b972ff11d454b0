"""A slot that is filled with an image, and digested on the way.

The training thread waits for the copy. Each piece is digested while it is still in the processor's
cache: to read it all once more from memory costs more than to wait for its digest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.conditions import Condition
from holdfast.engine.saving.part import ChunkBytes, PartImages, PartPlan, put_record
from holdfast.format.digests import RunningDigest, block_ranges, digest
from holdfast.format.layout import Chunk, ImageLayout
from holdfast.format.names import image_key
from holdfast.format.records import PartRecord
from holdfast.store.contract import Store
from holdfast.store.ram import SlotWriter

CACHED_SIZE_BYTES = 1024 * 1024
"""What is still in a core's cache when it was copied, and large enough for Python not to count."""
PARALLEL_SIZE_BYTES = 32 * 1024 * 1024
PARALLEL_PIECE_BYTES = 256 * 1024
"""Of smaller ones each costs more in Python than in memory, and Python runs one thread."""
THREAD_COUNT_MAX = 4


class FillProgress:
    """Whether a slot is filled, and the digests of its blocks where they were taken on the way."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._has_ended = False
        self._is_whole = False
        self.digests: Sequence[str] | None = None

    def finish(self, digests: Sequence[str] | None = None) -> None:
        """Return the whole image stands in the slot, and stays as it is."""
        self.digests = digests
        self._is_whole = True
        self.end()

    def end(self) -> None:
        """No more of it comes; of an image that is whole nothing was missing anyway."""
        self._has_ended = True
        with self._changed:
            self._changed.notify_all()

    def wait(self) -> bool:
        """Waits until all of it stands there; False: it never will.

        Whoever fills does nothing else meanwhile, and says how it ended in any case.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended)
        return self._is_whole


def fill_slot(
    filling: SlotWriter, layout: ImageLayout, chunk_bytes: ChunkBytes, *, digesting: bool = True
) -> list[str]:
    """Copies an image into a slot, and does nothing else: a training thread may wait for it.

    Returns:
        With `digesting`, the digests of its blocks; else nothing.

    Raises:
        StorageError: somebody changed the slot.
    """
    filling.write(0, memoryview(layout.header))
    return fill_chunks(filling, layout.chunks, chunk_bytes, digesting=digesting)


def fill_chunks(
    filling: SlotWriter, chunks: Sequence[Chunk], chunk_bytes: ChunkBytes, *, digesting: bool
) -> list[str]:
    """Copies chunks of an image into a slot.

    Large ones are copied by several threads, because one does not move what the memory could.

    Returns:
        With `digesting`, the digests of their blocks; else nothing.

    Raises:
        StorageError: somebody changed the slot.
    """
    with filling.view() as slot:
        blocks = _Blocks(chunks, chunk_bytes, filling, slot if digesting else None)
        helper_count = _helper_count(chunks)
        if helper_count:
            _copy_together(blocks, helper_count)
        else:
            blocks.copy()
        return blocks.digests()


def _copy_together(blocks: _Blocks, helper_count: int) -> None:
    """Copies blocks with the help of so many threads."""
    with ThreadPoolExecutor(helper_count, "holdfast-fill") as pool:
        try:
            helping = [pool.submit(blocks.copy) for _ in range(helper_count)]
            blocks.copy()
            for help_ in helping:
                help_.result()
        finally:
            # Also after a Ctrl-C: when this is left, nobody writes to the slot any more.
            blocks.stop()


def _helper_count(chunks: Sequence[Chunk]) -> int:
    """Return how many threads are worth starting besides the one that waits."""
    total_bytes = sum(chunk.size_bytes for chunk in chunks)
    if total_bytes < PARALLEL_SIZE_BYTES or total_bytes < len(chunks) * PARALLEL_PIECE_BYTES:
        return 0
    return _thread_count() - 1


def _thread_count() -> int:
    return min(len(os.sched_getaffinity(0)), THREAD_COUNT_MAX)


class _Blocks:
    """The blocks of an image in their order, for several threads; `slot` is digested, if given."""

    def __init__(
        self,
        chunks: Iterable[Chunk],
        chunk_bytes: ChunkBytes,
        filling: SlotWriter,
        slot: memoryview | None,
    ) -> None:
        self._left = enumerate(_blocks(chunks, chunk_bytes))
        self._filling = filling
        self._slot = slot
        self._lock = threading.Lock()
        self._digests: dict[int, str] = {}
        self._is_stopped = False

    def copy(self) -> None:
        """Copies blocks until none is left."""
        try:
            while (found := self._take()) is not None:
                number, (offset_bytes, data) = found
                if self._slot is None:
                    self._filling.write(offset_bytes, data)
                else:
                    self._digests[number] = self._copy_and_digest(self._slot, offset_bytes, data)
        finally:
            # Where one thread fails, the others need not go on.
            self.stop()

    def stop(self) -> None:
        """No more blocks are given out."""
        self._is_stopped = True

    def digests(self) -> list[str]:
        """Return those of all blocks, in their order; after the last one was copied."""
        return [self._digests[number] for number in range(len(self._digests))]

    def _take(self) -> tuple[int, tuple[int, memoryview]] | None:
        with self._lock:
            return None if self._is_stopped else next(self._left, None)

    def _copy_and_digest(self, slot: memoryview, offset_bytes: int, data: memoryview) -> str:
        if len(data) <= CACHED_SIZE_BYTES:
            self._filling.write(offset_bytes, data)
            return digest(slot[offset_bytes : offset_bytes + len(data)])
        running = RunningDigest()
        for start in range(0, len(data), CACHED_SIZE_BYTES):
            piece = data[start : start + CACHED_SIZE_BYTES]
            at_bytes = offset_bytes + start
            self._filling.write(at_bytes, piece)
            running.update(slot[at_bytes : at_bytes + len(piece)])
        return running.hexdigest()


def _blocks(chunks: Iterable[Chunk], chunk_bytes: ChunkBytes) -> Iterator[tuple[int, memoryview]]:
    for chunk in chunks:
        if chunk.size_bytes:
            data = chunk_bytes(chunk)
            for start, stop in block_ranges(chunk.size_bytes):
                yield chunk.offset_bytes + start, data[start:stop]


def digests_of(
    filling: SlotWriter, layout: ImageLayout, wait_for: Callable[[int], None]
) -> list[str]:
    """Return the digests of an image's blocks in order, while others fill the slot.

    Several threads digest what has arrived: a device brings more than one of them reads. `wait_for`
    waits until all bytes below an offset stand in the slot; what it raises, this raises.
    """
    with filling.view() as view, ThreadPoolExecutor(_thread_count(), "holdfast-digest") as pool:
        try:
            digesting = []
            for ranges in _together(layout.chunks):
                wait_for(ranges[-1][1])
                digesting.append(pool.submit(_digests, view, ranges))
            wait_for(layout.size_bytes)
            return [found for digests in digesting for found in digests.result()]
        finally:
            pool.shutdown(cancel_futures=True)


def _together(chunks: Iterable[Chunk]) -> Iterator[list[tuple[int, int]]]:
    """Where an image's blocks stand, in order; as many together as are worth a task."""
    ranges: list[tuple[int, int]] = []
    size_bytes = 0
    for chunk in chunks:
        for start, stop in block_ranges(chunk.size_bytes):
            ranges.append((chunk.offset_bytes + start, chunk.offset_bytes + stop))
            size_bytes += stop - start
            if size_bytes >= CACHED_SIZE_BYTES:
                yield ranges
                ranges, size_bytes = [], 0
    if ranges:
        yield ranges


def _digests(view: memoryview, ranges: Iterable[tuple[int, int]]) -> list[str]:
    return [digest(view[start:stop]) for start, stop in ranges]


def seal_slot(
    store: Store, filling: SlotWriter, plan: PartPlan, images: PartImages, digests: Sequence[str]
) -> PartRecord:
    """Shows a slot that is filled as the own image, and writes the record.

    Args:
        store: the RAM tier.
        filling: the slot.
        plan: what the part is.
        images: what it consists of.
        digests: those of the own image's blocks.

    Raises:
        OutOfSpaceError, StorageError: nothing of it is visible as a part.
    """
    filling.check_whole()
    filling.show(image_key(plan.id, plan.rank, plan.part_count))
    return put_record(store, plan, images, digests)
