"""A slot that one thread fills with an image while another one digests it, close behind.

The training thread waits for the copy and for nothing else. The digests read what has just been
written, and are done a moment after the last byte stands there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.engine.save import ChunkBytes, PartImages, PartPlan, put_record
from holdfast.format.digests import block_ranges, digest
from holdfast.format.layout import Chunk, ImageLayout
from holdfast.format.names import image_key
from holdfast.format.records import PartRecord
from holdfast.store.contract import Store
from holdfast.store.ram import Filling

TELL_SIZE_BYTES = 8 * 1024 * 1024
PARALLEL_SIZE_BYTES = 32 * 1024 * 1024
PARALLEL_PIECE_BYTES = 256 * 1024
"""Of smaller ones each costs more in Python than in memory, and Python runs one thread."""
THREAD_COUNT_MAX = 4


class FillProgress:
    """How far a slot is filled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._upto_bytes = 0
        self._has_ended = False

    def reach(self, upto_bytes: int) -> None:
        """The first `upto_bytes` of the image stand in the slot, and stay as they are."""
        with self._changed:
            self._upto_bytes = upto_bytes
            self._changed.notify_all()

    def end(self) -> None:
        """No more of it comes; of an image that is whole nothing was missing anyway."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait_for(self, upto_bytes: int) -> bool:
        """Waits until as much stands there; False: it never will.

        Whoever fills does nothing else meanwhile, and says how it ended in any case.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._upto_bytes >= upto_bytes or self._has_ended)
            return self._upto_bytes >= upto_bytes


def fill_slot(
    filling: Filling, layout: ImageLayout, chunk_bytes: ChunkBytes, progress: FillProgress
) -> None:
    """Copies an image into a slot, and does nothing else: a training thread may wait for it.

    Raises:
        StorageError: somebody changed the slot.
    """
    filling.write(0, memoryview(layout.header))
    fill_chunks(filling, layout.chunks, chunk_bytes, progress.reach)
    progress.reach(layout.size_bytes)


def fill_chunks(
    filling: Filling,
    chunks: Sequence[Chunk],
    chunk_bytes: ChunkBytes,
    tell: Callable[[int], None] = lambda upto_bytes: None,
) -> None:
    """Copies chunks of an image into a slot; tells now and then how far it is.

    Large ones are copied by several threads, because one does not move what the memory could.

    Raises:
        StorageError: somebody changed the slot.
    """
    pieces = _Pieces(chunks, chunk_bytes, tell)
    helper_count = _helper_count(chunks)
    if not helper_count:
        pieces.copy_into(filling)
        return
    with ThreadPoolExecutor(helper_count, "holdfast-fill") as pool:
        try:
            helping = [pool.submit(pieces.copy_into, filling) for _ in range(helper_count)]
            pieces.copy_into(filling)
            for help_ in helping:
                help_.result()
        finally:
            # Also after a Ctrl-C: when this is left, nobody writes to the slot any more.
            pieces.stop()


def _helper_count(chunks: Sequence[Chunk]) -> int:
    """How many threads are worth starting besides the one that waits."""
    total_bytes = sum(chunk.size_bytes for chunk in chunks)
    if total_bytes < PARALLEL_SIZE_BYTES or total_bytes < len(chunks) * PARALLEL_PIECE_BYTES:
        return 0
    return min(len(os.sched_getaffinity(0)), THREAD_COUNT_MAX) - 1


class _Pieces:
    """The pieces of an image in their order, for several threads."""

    def __init__(
        self, chunks: Iterable[Chunk], chunk_bytes: ChunkBytes, tell: Callable[[int], None]
    ) -> None:
        self._left = _pieces(chunks, chunk_bytes)
        self._tell = tell
        self._lock = threading.Lock()
        self._taken_count = 0
        self._copied: dict[int, int] = {}
        self._first_open = 0
        self._upto_bytes = self._told_bytes = 0
        self._is_stopped = False

    def copy_into(self, filling: Filling) -> None:
        """Copies pieces until none is left."""
        try:
            while (piece := self._take()) is not None:
                number, offset_bytes, data = piece
                filling.write(offset_bytes, data)
                self._note(number, offset_bytes + len(data))
        finally:
            # Where one thread fails, the others need not go on.
            self.stop()

    def stop(self) -> None:
        """No more pieces are given out."""
        self._is_stopped = True

    def _take(self) -> tuple[int, int, memoryview] | None:
        with self._lock:
            found = None if self._is_stopped else next(self._left, None)
            if found is None:
                return None
            number, self._taken_count = self._taken_count, self._taken_count + 1
            return number, *found

    def _note(self, number: int, upto_bytes: int) -> None:
        """A piece stands in the slot: tells how far all that comes before stands there too."""
        with self._lock:
            self._copied[number] = upto_bytes
            while self._first_open in self._copied:
                self._upto_bytes = self._copied.pop(self._first_open)
                self._first_open += 1
            if self._upto_bytes - self._told_bytes >= TELL_SIZE_BYTES:
                self._told_bytes = self._upto_bytes
                self._tell(self._told_bytes)


def _pieces(chunks: Iterable[Chunk], chunk_bytes: ChunkBytes) -> Iterator[tuple[int, memoryview]]:
    for chunk in chunks:
        if chunk.size_bytes:
            data = chunk_bytes(chunk)
            for start, stop in block_ranges(chunk.size_bytes):
                yield chunk.offset_bytes + start, data[start:stop]


def seal_slot(
    store: Store,
    filling: Filling,
    plan: PartPlan,
    images: PartImages,
    wait_for: Callable[[int], bool],
) -> PartRecord | None:
    """Digests a slot while it is filled, shows it as the own image, and writes the record.

    Args:
        store: the RAM tier.
        filling: the slot.
        plan: what the part is.
        images: what it consists of.
        wait_for: waits until all bytes below an offset stand in the slot; False: they never will.

    Returns:
        The record; None where the slot was not filled: the state is to be brought elsewhere.

    Raises:
        OutOfSpaceError, StorageError: nothing of it is visible as a part. And what `wait_for`
            raises; likewise.
    """
    blocks = list(_digests(filling, images.own, wait_for))
    if not wait_for(images.own.size_bytes):
        return None
    filling.check_whole()
    filling.show(image_key(plan.id, plan.rank, plan.part_count))
    return put_record(store, plan, images, blocks)


def _digests(
    filling: Filling, layout: ImageLayout, wait_for: Callable[[int], bool]
) -> Iterator[str]:
    """The digests of an image's blocks in order, as far as it is filled."""
    with filling.view() as view:
        for chunk in layout.chunks:
            for start, stop in block_ranges(chunk.size_bytes):
                if not wait_for(chunk.offset_bytes + stop):
                    return
                yield digest(view[chunk.offset_bytes + start : chunk.offset_bytes + stop])
