"""Filling a slot with an image, with digests computed on the way.

The training thread waits for the copy. Each piece is digested while it is still in the processor's
cache: reading it from memory once more would cost more than computing the digest.
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
"""Small enough to be in a core's cache after its copy, large enough to hide Python's overhead."""
PARALLEL_SIZE_BYTES = 32 * 1024 * 1024
PARALLEL_PIECE_BYTES = 256 * 1024
"""Below this size, Python's overhead per piece, under the GIL, outweighs parallel copying."""
THREAD_COUNT_MAX = 4


class FillProgress:
    """The state of filling a slot, and the digests of its blocks if computed on the way."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._has_ended = False
        self._is_whole = False
        self.digests: Sequence[str] | None = None

    def finish(self, digests: Sequence[str] | None = None) -> None:
        """Report that the whole image is in the slot and will not change."""
        self.digests = digests
        self._is_whole = True
        self.end()

    def end(self) -> None:
        """Report that filling ended. It failed, unless `finish` was called before."""
        self._has_ended = True
        with self._changed:
            self._changed.notify_all()

    def wait(self) -> bool:
        """Wait until filling ended; return whether the image is complete.

        Unbounded: the filling thread does nothing else and calls `finish` or `end` in any case.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended)
        return self._is_whole


def fill_slot(
    filling: SlotWriter, layout: ImageLayout, chunk_bytes: ChunkBytes, *, digesting: bool = True
) -> list[str]:
    """Copy an image into a slot. Does nothing else, since a training thread may wait for it.

    Returns:
        With `digesting`, the digests of its blocks; else an empty list.

    Raises:
        StorageError: another process changed the slot.
    """
    filling.write(0, memoryview(layout.header))
    return fill_chunks(filling, layout.chunks, chunk_bytes, digesting=digesting)


def fill_chunks(
    filling: SlotWriter, chunks: Sequence[Chunk], chunk_bytes: ChunkBytes, *, digesting: bool
) -> list[str]:
    """Copy chunks of an image into a slot.

    Large chunks are copied by several threads: one thread does not saturate the memory bandwidth.

    Returns:
        With `digesting`, the digests of their blocks; else an empty list.

    Raises:
        StorageError: another process changed the slot.
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
    """Copy blocks on this thread and `helper_count` others."""
    with ThreadPoolExecutor(helper_count, "holdfast-fill") as pool:
        try:
            helping = [pool.submit(blocks.copy) for _ in range(helper_count)]
            blocks.copy()
            for help_ in helping:
                help_.result()
        finally:
            # Also after a Ctrl-C: on exit, no thread writes to the slot any more.
            blocks.stop()


def _helper_count(chunks: Sequence[Chunk]) -> int:
    """Return how many threads to start besides the calling one."""
    total_bytes = sum(chunk.size_bytes for chunk in chunks)
    if total_bytes < PARALLEL_SIZE_BYTES or total_bytes < len(chunks) * PARALLEL_PIECE_BYTES:
        return 0
    return _thread_count() - 1


def _thread_count() -> int:
    return min(len(os.sched_getaffinity(0)), THREAD_COUNT_MAX)


class _Blocks:
    """A thread-safe queue of an image's blocks, in order; digests are of `slot`, if given."""

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
        """Copy blocks until the queue is empty or stopped."""
        try:
            while (found := self._take()) is not None:
                number, (offset_bytes, data) = found
                if self._slot is None:
                    self._filling.write(offset_bytes, data)
                else:
                    self._digests[number] = self._copy_and_digest(self._slot, offset_bytes, data)
        finally:
            # After one thread failed, the others' work is useless.
            self.stop()

    def stop(self) -> None:
        """Stop the queue: `copy` returns after its current block."""
        self._is_stopped = True

    def digests(self) -> list[str]:
        """Return the digests of all blocks in order; valid after the last block was copied."""
        return [self._digests[number] for number in range(len(self._digests))]

    def _take(self) -> tuple[int, tuple[int, memoryview]] | None:
        with self._lock:
            return None if self._is_stopped else next(self._left, None)

    def _copy_and_digest(self, slot: memoryview, offset_bytes: int, data: memoryview) -> str:
        if len(data) <= CACHED_SIZE_BYTES:
            self._filling.write(offset_bytes, data)
            return digest(slot[offset_bytes : offset_bytes + len(data)])
        # The digest is taken of the slot, not of the source: it covers the bytes that readers see.
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
    """Return the digests of an image's blocks in order, while a device fills the slot.

    Several threads digest the blocks that have arrived: a device writes faster than one thread
    reads. `wait_for` waits until all bytes below an offset are in the slot; its errors propagate.
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
            # Waits for running tasks, which read the view that is released next.
            pool.shutdown(cancel_futures=True)


def _together(chunks: Iterable[Chunk]) -> Iterator[list[tuple[int, int]]]:
    """Yield the byte ranges of an image's blocks in order, in groups large enough for a task."""
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
    """Give a filled slot the name of the part's own image, and write the record; return it.

    Args:
        store: the RAM tier.
        filling: the slot.
        plan: the description of the part.
        images: the images that the part consists of.
        digests: the digests of the own image's blocks.

    Raises:
        OutOfSpaceError, StorageError: no part is visible.
    """
    # Right before the name becomes visible: another process may have truncated the slot.
    filling.check_whole()
    filling.show(image_key(plan.id, plan.rank, plan.part_count))
    return put_record(store, plan, images, digests)
