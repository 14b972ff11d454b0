"""Restore: fill buffers with regions of a checkpoint's arrays, from the nearest intact copies.

Every block is checked before its bytes are used. After a damaged block the reader continues with
the part's next copy; without one, the restore fails with the file, the byte range and both digests.
Only the blocks with a wanted element are read, each once, however many buffers it fills.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import numpy as np

from holdfast.engine.reading.sources import CheckpointSources, PartSource
from holdfast.engine.saving.part import check_block
from holdfast.errors import CheckpointDamagedError, StorageError
from holdfast.format.digests import BLOCK_SIZE_BYTES, block_ranges
from holdfast.format.dtypes import item_size_bytes
from holdfast.format.grid import (
    Region,
    chunks_overlapping,
    intersection,
    rectangles,
    region_shape,
    slices_within,
)
from holdfast.format.layout import Chunk
from holdfast.format.placement import RestoreTarget
from holdfast.store.contract import Reader

BATCH_SIZE_BYTES = 1024 * 1024
BATCH_COUNT_MAX = 256
THREAD_COUNT = 4
REASONS_MAX = 100


@dataclass(slots=True)
class RestoreTally:
    """The bytes read per tier, and the reasons why copies were skipped. Thread-safe."""

    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_over(self, reason: str) -> None:
        """Record why a copy or a block was skipped; each reason once, up to a limit."""
        with self.lock:
            if reason not in self.passed_over and len(self.passed_over) < REASONS_MAX:
                self.passed_over.append(reason)

    def count_bytes(self, tier: str, size_bytes: int) -> None:
        """Count bytes that were read and verified."""
        with self.lock:
            self.bytes_by_tier[tier] = self.bytes_by_tier.get(tier, 0) + size_bytes


def fill_targets(sources: CheckpointSources, targets: Sequence[RestoreTarget]) -> RestoreTally:
    """Fill all `targets`; return what was read and skipped.

    Raises:
        CheckpointDamagedError: a needed block has no intact copy; the buffers are undefined.
        StorageError: likewise, if the last copy could not be read.
    """
    tally = RestoreTally(passed_over=list(sources.passed_over))
    wanted = _chunks_wanted(sources, targets)
    # The exit order ends the threads before it closes the images, also after an error.
    with ExitStack() as images, ThreadPoolExecutor(THREAD_COUNT, "holdfast-restore") as pool:
        ranks = {rank for rank, _, _ in wanted}
        readers = {rank: _PartReader(sources.parts[rank], tally, images) for rank in ranks}

        def fill(batch: Sequence[tuple[int, Chunk, list[RestoreTarget]]]) -> None:
            for rank, chunk, of_chunk in batch:
                dtype = sources.spec.arrays[chunk.array_index].dtype
                readers[rank].fill(chunk, dtype, of_chunk)

        jobs = [pool.submit(fill, batch) for batch in _batches(wanted)]
        try:
            for job in jobs:
                job.result()
        except (CheckpointDamagedError, StorageError) as error:
            raise _with_skipped(error, tally.passed_over) from error
        finally:
            for job in jobs:
                job.cancel()
    return tally


def _batches(
    wanted: Iterable[tuple[int, Chunk, list[RestoreTarget]]],
) -> Iterator[list[tuple[int, Chunk, list[RestoreTarget]]]]:
    """Yield small chunks together: passing each of them to a thread costs more than reading it."""
    batch: list[tuple[int, Chunk, list[RestoreTarget]]] = []
    size_bytes = 0
    for one in wanted:
        batch.append(one)
        size_bytes += one[1].size_bytes
        if size_bytes >= BATCH_SIZE_BYTES or len(batch) == BATCH_COUNT_MAX:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _with_skipped(
    error: CheckpointDamagedError | StorageError, passed_over: Sequence[str]
) -> CheckpointDamagedError | StorageError:
    """Return the last copy's error, extended with the reasons why earlier copies were skipped."""
    skipped = [reason for reason in passed_over if reason not in str(error)]
    if not skipped:
        return error
    return CheckpointDamagedError(f"{error}; passed over before: {'; '.join(skipped)}")


def _chunks_wanted(
    sources: CheckpointSources, targets: Iterable[RestoreTarget]
) -> list[tuple[int, Chunk, list[RestoreTarget]]]:
    """Return (owner, chunk, targets) for each chunk that overlaps a target.

    Only the parts of these owners are laid out.
    """
    by_chunk: dict[tuple[int, int], list[RestoreTarget]] = {}
    for target in targets:
        spec = sources.spec.arrays[target.array_index]
        for index in chunks_overlapping(spec.shape, spec.chunk_shape, target.region):
            by_chunk.setdefault((target.array_index, index), []).append(target)
    return [
        (rank, chunk, by_chunk[chunk.array_index, chunk.chunk_index])
        for rank in sorted({sources.owner(*chunk) for chunk in by_chunk})
        for chunk in sources.chunks(rank)
        if (chunk.array_index, chunk.chunk_index) in by_chunk
    ]


class _PartReader:
    """Reads chunks of one part, with fallback to its next copy.

    Thread-safe. Each block is read from the first copy that has it intact. An image of a copy that
    cannot be read at all is not tried again. Copies and their images are numbered from 0.
    """

    def __init__(self, copies: Sequence[PartSource], tally: RestoreTally, stack: ExitStack) -> None:
        self._copies = copies
        self._layouts = [copy.layout for copy in copies]
        self._tally = tally
        self._stack = stack
        self._open: dict[tuple[int, int], Reader] = {}
        self._unreadable: set[tuple[int, int]] = set()

    def fill(self, chunk: Chunk, dtype: str, targets: Sequence[RestoreTarget]) -> None:
        """Fill the targets of a chunk."""
        if not self._pass_in_place(chunk, targets):
            self._fill(chunk, dtype, targets)

    def _pass_in_place(self, chunk: Chunk, targets: Sequence[RestoreTarget]) -> bool:
        """Pass the nearest copy's own memory to a single target, if the chunk is intact there."""
        if len(targets) != 1 or not chunk.size_bytes:
            return False
        (target,) = targets
        if target.take is None or target.region != (chunk.start, chunk.stop):
            return False
        image, placed = self._layouts[0].places[chunk.ordinal]
        try:
            with self._tally.lock:
                view = (
                    None
                    if (0, image) in self._unreadable
                    else self._reader(0, image).lasting_view()
                )
            if view is None:
                return False
            data = view[placed.offset_bytes : placed.offset_bytes + placed.size_bytes]
            self._check_in_place(image, placed, data)
        except (CheckpointDamagedError, StorageError) as error:
            # The copying path finds the damaged block again, and reads another copy of it.
            self._tally.pass_over(str(error))
            return False
        flat = np.frombuffer(data, target.buffer.dtype)
        target.take(flat.reshape(target.buffer.shape))
        return True

    def _check_in_place(self, image: int, placed: Chunk, data: memoryview) -> None:
        copy = self._copies[0]
        where = f"{copy.store.name}: {copy.image_keys[image]}"
        for number, (start, stop) in enumerate(block_ranges(placed.size_bytes)):
            offset = placed.offset_bytes + start
            right = copy.part.blocks[placed.first_block + number]
            check_block(data[start:stop], right, where, offset)
        self._tally.count_bytes(copy.store.tier, placed.size_bytes)

    def _fill(self, chunk: Chunk, dtype: str, targets: Sequence[RestoreTarget]) -> None:
        region = (chunk.start, chunk.stop)
        item = item_size_bytes(dtype)
        whole = _whole_buffer(region, targets)
        scratch = None if whole is not None else memoryview(bytearray(_scratch_size_bytes(chunk)))
        for number, (start, stop) in enumerate(block_ranges(chunk.size_bytes)):
            if whole is not None:
                self._read_block(chunk, number, start, whole[start:stop])
                continue
            assert scratch is not None
            pieces = list(_pieces(region, start // item, stop // item, targets))
            if pieces:
                block = scratch[: stop - start]
                self._read_block(chunk, number, start, block)
                elements = np.frombuffer(block, np.uint8).reshape(-1, item)
                for flat, shape, destination in pieces:
                    part = elements[flat : flat + math.prod(shape)]
                    destination[...] = part.view(destination.dtype).reshape(shape)
        if whole is not None:
            first = next(t for t in targets if t.region == region and t.buffer.flags.c_contiguous)
            for target in targets:
                shared = intersection(target.region, region)
                if target is not first and shared is not None:
                    target.buffer[slices_within(shared, target.region)] = first.buffer[
                        slices_within(shared, region)
                    ]

    def _read_block(self, chunk: Chunk, number: int, start: int, block: memoryview) -> None:
        for index, copy in enumerate(self._copies):
            image, placed = self._layouts[index].places[chunk.ordinal]
            if (index, image) in self._unreadable:
                continue
            offset = placed.offset_bytes + start
            where = f"{copy.store.name}: {copy.image_keys[image]}"
            try:
                with self._tally.lock:
                    reader = self._reader(index, image)
                reader.read_into(offset, block)
                check_block(block, copy.part.blocks[chunk.first_block + number], where, offset)
            except (CheckpointDamagedError, StorageError) as error:
                self._tally.pass_over(str(error))
                # Of a damaged image other blocks may be intact; an unreadable image is skipped.
                if isinstance(error, StorageError):
                    self._unreadable.add((index, image))
                if index + 1 >= len(self._copies):
                    raise
            else:
                self._tally.count_bytes(copy.store.tier, len(block))
                return
        raise CheckpointDamagedError(
            f"read {self._copies[0].image_keys[0]}: no intact copy is left: "
            f"{self._tally.passed_over[-1]}"
        )

    def _reader(self, index: int, image: int) -> Reader:
        """Return the open image. The caller holds the lock."""
        if (index, image) not in self._open:
            copy = self._copies[index]
            opened: AbstractContextManager[Reader] = copy.store.open(copy.image_keys[image])
            self._open[index, image] = self._stack.enter_context(opened)
        return self._open[index, image]


def _scratch_size_bytes(chunk: Chunk) -> int:
    return min(chunk.size_bytes, BLOCK_SIZE_BYTES)


def _whole_buffer(region: Region, targets: Sequence[RestoreTarget]) -> memoryview | None:
    """Return the bytes of a target that equals this chunk, for reading in place; else None."""
    for target in targets:
        if target.region == region and target.buffer.flags.c_contiguous:
            return target.buffer.reshape(-1).view(np.uint8).data
    return None


def _pieces(
    chunk: Region, start: int, stop: int, targets: Sequence[RestoreTarget]
) -> Iterable[tuple[int, tuple[int, ...], np.ndarray]]:
    """Yield the runs of elements [start, stop) of a chunk that the targets need.

    A run is contiguous in the chunk: (index of its first element, counted from `start`; its shape;
    the destination view). Where a target takes part of a row of the last axis, the runs are parts
    of rows, so that each copy is a plain reshape.
    """
    for target in targets:
        shared = intersection(chunk, target.region)
        if shared is None:
            continue
        within = tuple(
            tuple(x - o for x, o in zip(bound, chunk[0], strict=True)) for bound in shared
        )
        shape = region_shape(chunk)
        for rectangle in rectangles(shape, start, stop):
            hit = intersection(rectangle, (within[0], within[1])) if shape else rectangle
            if hit is None:
                continue
            yield from _runs(shape, hit, start, chunk, target)


def _runs(
    shape: tuple[int, ...], hit: Region, start: int, chunk: Region, target: RestoreTarget
) -> Iterable[tuple[int, tuple[int, ...], np.ndarray]]:
    extent = region_shape(hit)
    # All axes from `cut` on are taken whole, so each index above them is one contiguous run.
    cut = len(shape)
    while cut > 0 and extent[cut - 1] == shape[cut - 1]:
        cut -= 1
    lead = max(cut - 1, 0)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for index in np.ndindex(*extent[:lead]):
        lower = tuple(a + i for a, i in zip(hit[0], index, strict=False)) + hit[0][lead:]
        upper = tuple(a + 1 for a in lower[:lead]) + hit[1][lead:]
        flat = sum(a * s for a, s in zip(lower, strides, strict=True)) - start
        absolute = (
            tuple(a + o for a, o in zip(lower, chunk[0], strict=True)),
            tuple(b + o for b, o in zip(upper, chunk[0], strict=True)),
        )
        view = target.buffer[slices_within(absolute, target.region)]
        yield flat, region_shape((lower, upper)), view
