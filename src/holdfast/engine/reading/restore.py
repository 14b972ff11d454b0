"""Restore: fill buffers with regions of a checkpoint's arrays, from the nearest intact copies.

Every block is checked before its bytes are used. After a damaged block the reader continues with
the part's next copy; without one, the restore fails with the file, the byte range and both digests.
Only the blocks with a wanted element are read, each once, however many buffers it fills.

At a service, adjacent blocks of an image are read together, of whichever arrays they are: a request
costs a round trip and money. Blocks of one chunk are read straight into a buffer in which they are
contiguous. What several ranks of a job want is read by one of them, which passes it on
(`exchange`).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from holdfast import waits
from holdfast.engine.reading.exchange import Exchange, Role
from holdfast.engine.reading.sources import CheckpointSources, PartSource
from holdfast.engine.reading.spans import BlockRange, PartBlocks, Span, Wants, without
from holdfast.engine.saving.part import check_block
from holdfast.errors import CheckpointDamagedError, StorageError
from holdfast.format.digests import BLOCK_SIZE_BYTES, block_ranges, digest
from holdfast.format.dtypes import item_size_bytes
from holdfast.format.grid import (
    Region,
    RestoreTarget,
    chunks_overlapping,
    intersection,
    rectangles,
    region_shape,
    slices_within,
)
from holdfast.format.layout import Chunk
from holdfast.garbage import nothing_collected
from holdfast.store.contract import Reader

BATCH_SIZE_BYTES = 1024 * 1024
BATCH_COUNT_MAX = 256
THREAD_COUNT = max(4, min(16, len(os.sched_getaffinity(0))))
"""They compute digests. On 16 cores, 16 threads check 62 GB/s of new mappings, and 8 threads 38."""
REMOTE_THREAD_COUNT = 12
"""The same, where the nearest copy of a part is at a service: its requests wait for the network."""
REASONS_MAX = 100


@dataclass(slots=True)
class RestoreTally:
    """The bytes read per tier, and the reasons why copies were skipped. Thread-safe.

    `wanted_bytes` is the size of all chunks that are needed, of which parts may be left out.
    `shared_bytes` are those of the bytes read that another rank had read from the bucket.
    """

    wanted_bytes: int = 0
    shared_bytes: int = 0
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_over(self, reason: str) -> None:
        """Record why a copy or a block was skipped; each reason once, up to a limit."""
        with self.lock:
            if reason not in self.passed_over and len(self.passed_over) < REASONS_MAX:
                self.passed_over.append(reason)

    def count_bytes(self, tier: str, size_bytes: int, *, is_shared: bool = False) -> None:
        """Count bytes that were read and verified."""
        with self.lock:
            self.bytes_by_tier[tier] = self.bytes_by_tier.get(tier, 0) + size_bytes
            if is_shared:
                self.shared_bytes += size_bytes


def fill_targets(
    sources: CheckpointSources,
    targets: Sequence[RestoreTarget],
    on_begun: Callable[[RestoreTally], None] = lambda _: None,
) -> RestoreTally:
    """Fill all `targets`; return what was read and skipped.

    `on_begun` receives the tally before the first byte is read; it is counted from then on.

    Raises:
        CheckpointDamagedError: a needed block has no intact copy; the buffers are undefined.
        StorageError: likewise, if the last copy could not be read.
    """
    return Filling(sources, targets).run(on_begun)


class Filling:
    """The filling of buffers from one checkpoint: planned when it is made, and run once."""

    def __init__(self, sources: CheckpointSources, targets: Sequence[RestoreTarget]) -> None:
        """Plan what is read, without reading it.

        Raises:
            CheckpointDamagedError: a part's record does not match the arrays.
        """
        self._sources = sources
        with nothing_collected():
            self._wanted = _chunks_wanted(sources, targets)
        ranks = {rank for rank, _, _ in self._wanted}
        self._ranks = ranks
        remote: dict[int, list[_WantedChunk]] = {
            rank: [] for rank in sorted(ranks) if sources.parts[rank][0].store.is_remote
        }
        for rank, chunk, of_chunk in self._wanted:
            if rank in remote:
                dtype = sources.spec.arrays[chunk.array_index].dtype
                remote[rank].append(_wanted_chunk(chunk, dtype, of_chunk))
        self._remote = {
            rank: _RemotePart(PartBlocks(rank, sources.parts[rank][0].layout), chunks)
            for rank, chunks in remote.items()
        }

    @property
    def wants(self) -> Wants:
        """What is read at a service, in ranges of blocks; other ranks may want the same."""
        return {rank: part.ranges for rank, part in self._remote.items()}

    def run(
        self,
        on_begun: Callable[[RestoreTally], None] = lambda _: None,
        exchange: Exchange | None = None,
    ) -> RestoreTally:
        """Fill the buffers, as `fill_targets` does; with `exchange` together with other ranks."""
        tally = RestoreTally(passed_over=list(self._sources.passed_over))
        tally.wanted_bytes = sum(chunk.size_bytes for _, chunk, _ in self._wanted)
        on_begun(tally)
        near = [entry for entry in self._wanted if entry[0] not in self._remote]
        thread_count = REMOTE_THREAD_COUNT if self._remote else THREAD_COUNT
        # The exit order ends the threads before it closes the images, also after an error.
        with ExitStack() as images, waits.thread_pool(thread_count, "holdfast-restore") as pool:
            if exchange is not None:
                # The others do not wait for this rank any more.
                images.callback(exchange.end)
            readers = {
                rank: _PartReader(self._sources.parts[rank], tally, images) for rank in self._ranks
            }

            def fill(batch: Sequence[tuple[int, Chunk, list[RestoreTarget]]]) -> None:
                for rank, chunk, of_chunk in batch:
                    dtype = self._sources.spec.arrays[chunk.array_index].dtype
                    readers[rank].fill(chunk, dtype, of_chunk)

            spans = _SpanFilling(self._remote, readers, exchange)
            jobs = [pool.submit(fill, batch) for batch in _batches(near)]
            try:
                spans.run(pool, thread_count)
                for job in jobs:
                    waits.result(job)
            except (CheckpointDamagedError, StorageError) as error:
                raise _with_skipped(error, tally.passed_over) from error
            finally:
                for job in jobs:
                    job.cancel()
        if exchange is not None:
            for problem in exchange.problems:
                tally.pass_over(problem)
        return tally


def _batches(
    wanted: Iterable[tuple[int, Chunk, list[RestoreTarget]]],
) -> Iterator[list[tuple[int, Chunk, list[RestoreTarget]]]]:
    """Yield small chunks together: passing each of them to a thread costs more than reading it."""
    batch: list[tuple[int, Chunk, list[RestoreTarget]]] = []
    size_bytes = 0
    for entry in wanted:
        batch.append(entry)
        size_bytes += entry[1].size_bytes
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
        place = _place_of(region, targets)
        whole = place.memory if place is not None else None
        scratch = None if whole is not None else memoryview(bytearray(_scratch_size_bytes(chunk)))
        for number, (start, stop) in enumerate(block_ranges(chunk.size_bytes)):
            if whole is not None:
                self.read_block(chunk, number, start, whole[start:stop])
            elif is_wanted(chunk, start, stop, dtype, targets):
                assert scratch is not None
                block = scratch[: stop - start]
                self.read_block(chunk, number, start, block)
                copy_pieces(chunk, start, block, dtype, targets)
        if place is not None:
            for target in targets:
                shared = intersection(target.region, region)
                if target is not place.target and shared is not None:
                    target.buffer[slices_within(shared, target.region)] = place.array[
                        slices_within(shared, region)
                    ]

    def read_range(self, span: Span, memory: memoryview) -> bool:
        """Read a span from the nearest copy; return False if it cannot be read.

        The digests are not checked. An error is found again, and reported, by `read_block`.
        """
        if (0, span.image) in self._unreadable:
            return False
        with contextlib.suppress(StorageError):
            with self._tally.lock:
                reader = self._reader(0, span.image)
            reader.read_into(span.start_bytes, memory)
            return True
        return False

    def is_right(
        self, chunk: Chunk, number: int, block: memoryview, *, is_shared: bool = False
    ) -> bool:
        """Return whether these are a block's bytes; if so, count them."""
        copy = self._copies[0]
        if digest(block) != copy.part.blocks[chunk.first_block + number]:
            return False
        self._tally.count_bytes(copy.store.tier, len(block), is_shared=is_shared)
        return True

    def read_block(self, chunk: Chunk, number: int, start: int, block: memoryview) -> None:
        """Fill `block` with a block of a chunk, from the first copy that has it intact.

        `start` counts the bytes from the chunk's beginning.

        Raises:
            CheckpointDamagedError, StorageError: no copy is left.
        """
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


def is_wanted(
    chunk: Chunk, start: int, stop: int, dtype: str, targets: Sequence[RestoreTarget]
) -> bool:
    """Return whether any target needs bytes [start, stop) of a chunk."""
    item = item_size_bytes(dtype)
    pieces = _pieces((chunk.start, chunk.stop), start // item, stop // item, targets)
    return next(iter(pieces), None) is not None


def copy_pieces(
    chunk: Chunk, start: int, block: memoryview, dtype: str, targets: Sequence[RestoreTarget]
) -> None:
    """Copy a block of a chunk, which begins at byte `start` of it, to the targets."""
    item = item_size_bytes(dtype)
    elements = np.frombuffer(block, np.uint8).reshape(-1, item)
    stop = start + len(block)
    pieces = _pieces((chunk.start, chunk.stop), start // item, stop // item, targets)
    for flat, shape, destination in pieces:
        part = elements[flat : flat + math.prod(shape)]
        destination[...] = part.view(destination.dtype).reshape(shape)


def _scratch_size_bytes(chunk: Chunk) -> int:
    return min(chunk.size_bytes, BLOCK_SIZE_BYTES)


class _Place(NamedTuple):
    """Where all of a chunk is in a target: its elements there, and their contiguous bytes."""

    target: RestoreTarget
    array: np.ndarray
    memory: memoryview


def _place_of(region: Region, targets: Sequence[RestoreTarget]) -> _Place | None:
    """Return where this chunk can be read in place: it equals a target, or is a slab of one."""
    for target in targets:
        # A region without elements has no intersection.
        if intersection(region, target.region) != region and target.region != region:
            continue
        # With an ellipsis an array without axes gives a view too, and not a scalar.
        within: Any = (*slices_within(region, target.region), ...)
        array = target.buffer[within]
        if array.flags.c_contiguous:
            return _Place(target, array, array.reshape(-1).view(np.uint8).data)
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
        # With an ellipsis an array without axes gives a view too, and not a scalar.
        place: Any = (*slices_within(absolute, target.region), ...)
        view = target.buffer[place]
        yield flat, region_shape((lower, upper)), view


class _WantedChunk(NamedTuple):
    """A chunk with its targets; `whole` are its bytes in one of them, which is not in `others`."""

    chunk: Chunk
    dtype: str
    whole: memoryview | None
    others: Sequence[RestoreTarget]


def _wanted_chunk(chunk: Chunk, dtype: str, targets: Sequence[RestoreTarget]) -> _WantedChunk:
    region = (chunk.start, chunk.stop)
    place = _place_of(region, targets)
    others = [target for target in targets if place is None or target is not place.target]
    return _WantedChunk(chunk, dtype, place.memory if place is not None else None, others)


class _RemotePart:
    """What is wanted of a part whose nearest copy is at a service."""

    def __init__(self, blocks: PartBlocks, wanted: Sequence[_WantedChunk]) -> None:
        self.blocks = blocks
        self.chunks = {want.chunk.ordinal: want for want in wanted}
        self._wanted = {
            blocks.index(want.chunk.ordinal, number)
            for want in wanted
            for number in _blocks_wanted(want)
        }
        self.ranges: list[BlockRange] = blocks.ranges(self._wanted)

    def wanted(self, span: Span) -> Iterator[tuple[_WantedChunk, int, int, slice]]:
        """Yield the wanted blocks of a span.

        Yields:
            The chunk, the block's number and its first byte in the chunk; its place in the span.
        """
        for index in range(span.first, span.stop):
            if index in self._wanted:
                block = self.blocks.blocks[index]
                place = slice(
                    block.start_bytes - span.start_bytes, block.stop_bytes - span.start_bytes
                )
                start = block.number * BLOCK_SIZE_BYTES
                yield self.chunks[block.ordinal], block.number, start, place

    def memory(self, span: Span) -> tuple[memoryview, bool]:
        """Return memory for a span, and whether it is a target's own."""
        first, last = (self.blocks.blocks[index] for index in (span.first, span.stop - 1))
        want = self.chunks.get(first.ordinal)
        if first.ordinal == last.ordinal and want is not None and want.whole is not None:
            start = first.number * BLOCK_SIZE_BYTES
            return want.whole[start : start + span.size_bytes], True
        return np.empty(span.size_bytes, np.uint8).data, False


def _blocks_wanted(want: _WantedChunk) -> Iterator[int]:
    ranges = block_ranges(want.chunk.size_bytes)
    for number, (start, stop) in enumerate(ranges):
        if (
            len(ranges) == 1
            or want.whole is not None
            or is_wanted(want.chunk, start, stop, want.dtype, want.others)
        ):
            yield number


class _SpanJob(NamedTuple):
    span: Span
    role: Role


@dataclass(slots=True)
class _SpanQueue:
    """Spans that several threads process, begun in their order."""

    jobs: Iterator[_SpanJob]
    is_relayed: bool
    lock: threading.Lock = field(default_factory=threading.Lock)


class _SpanFilling:
    """Fills the targets of the parts at a service, span by span."""

    def __init__(
        self,
        parts: Mapping[int, _RemotePart],
        readers: Mapping[int, _PartReader],
        exchange: Exchange | None,
    ) -> None:
        self._parts = parts
        self._readers = readers
        self._exchange = exchange
        self._is_stopping = threading.Event()

    def run(self, pool: ThreadPoolExecutor, thread_count: int) -> None:
        """Fill all targets, with so many threads of the pool, and a few to take from others.

        Raises:
            CheckpointDamagedError, StorageError: the targets are undefined. No thread uses them.
        """
        # What others wait for comes first.
        shared, alone = [*self._shared()], [*self._alone()]
        read = [*(job for job in shared if job.role.source is None), *alone]
        taken = [job for job in shared if job.role.source is not None]
        queues = _SpanQueue(iter(read), False), _SpanQueue(iter(taken), True)
        with waits.thread_pool(THREAD_COUNT, "holdfast-take") as takers:
            streams = [
                threads.submit(self._stream, queue)
                for queue, threads, count in (
                    (queues[0], pool, min(thread_count, len(read))),
                    (queues[1], takers, min(THREAD_COUNT, len(taken))),
                )
                for _ in range(count)
            ]
            try:
                for stream in streams:
                    waits.result(stream)
            finally:
                # After an interruption no thread begins another span.
                self._stop()
                for queue in queues:
                    self._hand_back(queue)

    def _hand_back(self, queue: _SpanQueue) -> None:
        """Let the other ranks read what this one has not begun, after an error."""
        with queue.lock:
            for span, (_, takers) in queue.jobs:
                if self._exchange is not None and takers:
                    self._exchange.give(span, None, takers, is_relayed=queue.is_relayed)

    def _stop(self) -> None:
        """Let the threads end after their present spans, and wait for no other rank."""
        self._is_stopping.set()
        if self._exchange is not None:
            self._exchange.end_waits()

    def _alone(self) -> Iterator[_SpanJob]:
        for rank, part in self._parts.items():
            shared = (
                [piece for _, piece in self._exchange.ranges_of(rank)] if self._exchange else ()
            )
            for block_range in without(part.ranges, shared):
                for span in part.blocks.spans(block_range):
                    yield _SpanJob(span, Role(None, ()))

    def _shared(self) -> Iterator[_SpanJob]:
        if self._exchange is None:
            return
        for rank, part in self._parts.items():
            for number, piece in self._exchange.ranges_of(rank):
                for turn, span in enumerate(part.blocks.spans((piece.first, piece.stop)), number):
                    yield _SpanJob(span, self._exchange.role(turn, piece.ranks))

    def _stream(self, queue: _SpanQueue) -> None:
        while True:
            # Room is awaited in the order of the spans: see the invariants of `exchange`.
            with queue.lock:
                job = next(queue.jobs, None)
                if job is None or self._is_stopping.is_set():
                    return
                has_room = (
                    self._exchange is not None
                    and bool(job.role.takers)
                    and self._exchange.await_room(job.span, is_relayed=queue.is_relayed)
                )
            is_done = False
            try:
                self._process(job, has_room=has_room, is_relayed=queue.is_relayed)
                is_done = True
            finally:
                if not is_done:
                    self._stop()

    def _process(self, job: _SpanJob, *, has_room: bool, is_relayed: bool) -> None:
        """Read or take a span, give it to those that wait for it, and fill the targets."""
        span, (source, takers) = job
        part, reader = self._parts[span.part], self._readers[span.part]
        memory, is_in_place = part.memory(span)
        data: memoryview | None = None
        try:
            is_shared = (
                self._exchange is not None
                and source is not None
                and self._exchange.take_span(span, source, memory)
            )
            is_read = is_shared or reader.read_range(span, memory)
            for want, number, start, place in part.wanted(span):
                block = memory[place]
                if not is_read or not reader.is_right(
                    want.chunk, number, block, is_shared=is_shared
                ):
                    reader.read_block(want.chunk, number, start, block)
            if is_read and has_room:
                data = memory
        finally:
            if self._exchange is not None and takers:
                self._exchange.give(span, data, takers, is_relayed=is_relayed)
        for want, _, start, place in part.wanted(span):
            block = memory[place]
            if want.whole is not None and not is_in_place:
                want.whole[start : start + len(block)] = block
            if want.others:
                copy_pieces(want.chunk, start, block, want.dtype, want.others)
