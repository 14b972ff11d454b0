"""A slot that one thread fills with an image while another one digests it, close behind.

The training thread waits for the copy and for nothing else. The digests read what has just been
written, and are done a moment after the last byte stands there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from holdfast.engine.save import ChunkBytes, PartImages, PartPlan, put_record
from holdfast.format.digests import block_ranges, digest
from holdfast.format.layout import Chunk, ImageLayout
from holdfast.format.names import image_key
from holdfast.format.records import PartRecord
from holdfast.store.contract import Store
from holdfast.store.ram import Filling

TELL_SIZE_BYTES = 8 * 1024 * 1024


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
    chunks: Iterable[Chunk],
    chunk_bytes: ChunkBytes,
    tell: Callable[[int], None] = lambda upto_bytes: None,
) -> None:
    """Copies chunks of an image into a slot; tells now and then how far it is.

    Raises:
        StorageError: somebody changed the slot.
    """
    told_bytes = 0
    for chunk in chunks:
        if not chunk.size_bytes:
            continue
        data = chunk_bytes(chunk)
        for start, stop in block_ranges(chunk.size_bytes):
            filling.write(chunk.offset_bytes + start, data[start:stop])
            if chunk.offset_bytes + stop - told_bytes >= TELL_SIZE_BYTES:
                told_bytes = chunk.offset_bytes + stop
                tell(told_bytes)


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
