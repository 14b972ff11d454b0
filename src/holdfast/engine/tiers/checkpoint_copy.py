"""Copy of a committed checkpoint to another durable place, from whichever of its copies is good.

The order is that of a save: for each part its images, then its record; the manifest last. A part
whose record the target has is not copied again, so an interrupted copy continues.

Each block is read from the nearest copy that has it intact. A copy is opened for each block and not
for the whole upload: a slot in RAM stays locked while it is open, and a save that needs it must not
wait for a slow target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from holdfast.engine.lifecycle.catalog import Listing
from holdfast.engine.lifecycle.commit import commit, parse_part
from holdfast.engine.reading.sources import PartSource, part_source
from holdfast.engine.saving.part import check_digest
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import BlockRanges, is_stored
from holdfast.errors import CheckpointDamagedError, ObjectNotFoundError, StorageError
from holdfast.format.digests import Buffer, digest
from holdfast.format.names import CheckpointId, manifest_key, part_key
from holdfast.format.part_layout import expected_digests, image_keys
from holdfast.format.records import Manifest
from holdfast.format.sealed import record_digest
from holdfast.store.contract import ReadableStore, Store
from holdfast.store.durable import DurableStore


def part_copies(
    manifest: Manifest, rank: int, stores: Sequence[ReadableStore], layouts: PartLayouts
) -> list[PartSource]:
    """Return the copies of one part of a committed checkpoint, the nearest first.

    Raises:
        CheckpointDamagedError, StorageError: no store has the committed record.
    """
    count, copies = len(manifest.parts), list[PartSource]()
    key = part_key(manifest.id, rank, count)
    problem: CheckpointDamagedError | StorageError | None = None
    for store in stores:
        try:
            data = store.get(key)
            if record_digest(data) != manifest.parts[rank].record_digest:
                raise CheckpointDamagedError(f"read {key}: this is not the committed record")
            part = parse_part(data, key, manifest.id, rank, count)
            copies.append(part_source(store, part, manifest.checkpoint, layouts))
        except (CheckpointDamagedError, StorageError) as error:
            problem = error
    if not copies:
        assert problem is not None
        raise problem
    return copies


def copy_part_once(copies: Sequence[PartSource], target: Store, listed: Listing) -> int:
    """Copy a part to a durable place, unless that has the part already.

    Args:
        copies: the copies of one part, the nearest first.
        target: the durable place.
        listed: what the target has of the checkpoint.

    Returns:
        The bytes of the images that were written.

    Raises:
        CheckpointDamagedError: a block is damaged in all copies; the target has no part.
        ObjectNotFoundError: no copy has it any more; the target has no part.
        StorageError: the target has no part.
    """
    part = copies[0].part
    key = part_key(part.id, part.rank, part.part_count)
    record = _record(copies, key)
    if part.rank in listed.parts and target.get(key) == record:
        return 0
    layout = copies[0].layout
    written_bytes = 0
    # Reused images first, then the own image, then the record: the order of docs/format.md.
    target_keys = image_keys(part, is_in_memory=target.is_in_memory)
    for number, target_key in reversed([*enumerate(target_keys)]):
        if number == 0 or not is_stored(target, part, number, layout):
            size_bytes = layout.images[number].size_bytes
            images = [(copy.store, copy.image_keys[number]) for copy in copies]
            expected = expected_digests(part, layout, number)
            target.put(target_key, _AnyCopy(images, expected, size_bytes))
            written_bytes += size_bytes
    target.put(key, record)
    return written_bytes


def commit_copy(
    expected: bytes,
    target: DurableStore,
    checkpoint: CheckpointId,
    part_count: int,
    committing: Callable[[CheckpointId, Iterable[str]], AbstractContextManager[None]] | None = None,
) -> Manifest:
    """Commit a checkpoint in `target` whose parts are all there; its manifest is `expected`.

    The source may have deleted the checkpoint meanwhile: the copy is complete without it.

    Raises:
        ObjectNotFoundError, CheckpointDamagedError: a part is missing or damaged in the target; not
            committed.
        StorageError: it is unknown whether it was committed, and the call may be repeated; or the
            target has another checkpoint of this name.
    """
    manifest = commit(target, checkpoint, part_count, committing)
    if target.get(manifest_key(checkpoint)) != expected:
        raise StorageError(
            f"copy {checkpoint}: expected no checkpoint of that name in the target or the same "
            "one, found another one; choose a new place"
        )
    return manifest


def _record(copies: Sequence[PartSource], key: str) -> bytes:
    """Return the part's record; all copies have the committed one."""
    for copy in copies[:-1]:
        try:
            return copy.store.get(key)
        except StorageError:
            # Its RAM was released.
            continue
    return copies[-1].store.get(key)


class _AnyCopy:
    """The bytes of an image; each block is read from the first copy that has it intact."""

    is_lasting = False

    def __init__(
        self,
        images: Sequence[tuple[ReadableStore, str]],
        expected: Iterable[tuple[int, int, str]],
        size_bytes: int,
    ) -> None:
        self._images = images
        self._expected = BlockRanges(expected, size_bytes)
        self.size_bytes = size_bytes

    def blocks(self, start_bytes: int, stop_bytes: int) -> Iterator[Buffer]:
        for first, last, right in self._expected.overlapping(start_bytes, stop_bytes):
            start, stop = max(first, start_bytes), min(last, stop_bytes)
            if not right:
                first, last = start, stop
            yield self._block(first, last, right)[start - first : stop - first]

    def _block(self, start: int, stop: int, right: str) -> memoryview:
        problem: CheckpointDamagedError | StorageError | None = None
        for store, key in self._images:
            block = memoryview(bytearray(stop - start))
            try:
                with store.open(key) as image:
                    if image.size_bytes < self.size_bytes:
                        raise CheckpointDamagedError(
                            f"read {key}: expected {self.size_bytes} bytes, found "
                            f"{image.size_bytes}"
                        )
                    image.read_into(start, block)
                if right:
                    check_digest(digest(block), (start, stop, right), key)
                return block
            except (CheckpointDamagedError, StorageError) as error:
                # A copy in RAM that was released says nothing about the others.
                if problem is None or isinstance(problem, ObjectNotFoundError):
                    problem = error
        assert problem is not None
        raise problem
