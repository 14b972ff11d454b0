"""Slots that are prepared before they are needed, and filled with an image once.

On the CPU the training thread copies the state into a prepared slot at once. That is cheaper than
holding the state for a background thread: a step that donates held arrays has to allocate fresh
pages, which cost ten times as much as the copy. Each piece is digested while it is still in the
processor's cache: reading it from memory once more would cost more than computing the digest. From
devices the bytes are copied into the slot directly, and digested as they arrive.

Invariants:
- One thread fills a slot, whichever asks first; it either fills it whole, or leaves a borrowed
  state secured.
- A slot, and the memory that it is filled from, is released only when the devices have finished
  with both. Each wait for them is bounded by `STALL_SECS`.

See docs/decisions/0006.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from holdfast.adapt.contract import Hold, Pinning, Snapshot, Transfer
from holdfast.clock import Clock
from holdfast.conditions import Condition
from holdfast.engine.saving.part import ChunkBytes
from holdfast.errors import DeviceError, StorageError
from holdfast.format.digests import RunningDigest, block_ranges, digest
from holdfast.format.layout import Chunk, ImageLayout
from holdfast.store.ram import RamStore, SlotWriter

CACHED_SIZE_BYTES = 1024 * 1024
"""Small enough to be in a core's cache after its copy, large enough to hide Python's overhead."""
PARALLEL_SIZE_BYTES = 32 * 1024 * 1024
PARALLEL_PIECE_BYTES = 256 * 1024
"""Below this size, Python's overhead per piece, under the GIL, outweighs parallel copying."""
THREAD_COUNT_MAX = 4
POLL_SECS = 0.0002
STALL_SECS = 60.0
"""How long a transfer from devices may make no progress."""

log = logging.getLogger(__name__)


class RamSlots:
    """The slots of one kind of image, one of which may be prepared.

    Owned by the saver's thread; the training thread calls `acquire`, `prepared_in` and `has_ready`
    too.

    Args:
        folder: Returns the present root of the RAM tier, or None if there is none.
        clock: The clock for waits.
        digesting: Digest the images on the way into the slots.
    """

    def __init__(
        self, folder: Callable[[], Path | None], clock: Clock, *, digesting: bool = True
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._digesting = digesting
        self._store: RamStore | None = None
        self._slot = ""
        self._lock = threading.Lock()
        self._ready: SlotWriter | None = None

    def acquire(
        self, layout: ImageLayout, held: contextlib.ExitStack | None = None
    ) -> SlotFill | None:
        """Return the prepared slot if it has the image's size, else None. The caller closes it.

        Args:
            layout: The layout of the image.
            held: Closes the slot too, so that an exception raised before the caller has the slot
                does not leak it.
        """
        with self._lock:
            ready = self._ready
            if ready is None or ready.size_bytes != layout.size_bytes or not ready.is_current:
                return None
            if held is not None:
                held.callback(ready.close)
            self._ready = None
        return self._filling(ready, layout)

    @property
    def has_ready(self) -> bool:
        """Whether a slot is prepared; read without the lock, so it may be outdated at once."""
        return self._ready is not None

    def prepared_in(self) -> RamStore | None:
        """Return the RAM tier of the prepared slot, for all but its image; None without a slot."""
        return self._store if self.has_ready else None

    def store(self) -> RamStore:
        """Return the RAM tier at its present root."""
        folder = self._folder()
        assert folder is not None
        if self._store is None or self._store.root != folder:
            self.close()
            self._store = RamStore(folder, lambda size: self._slot, self._clock)
        return self._store

    def begin(self, name: str, layout: ImageLayout) -> SlotFill:
        """Map and lock a slot that the agent has assigned for an image; the caller closes it.

        Raises:
            StorageError: The slot no longer exists, or belongs to another process by now.
        """
        return self._filling(self._map(name, layout.size_bytes), layout)

    def _filling(self, slot: SlotWriter, layout: ImageLayout) -> SlotFill:
        return SlotFill(slot, layout, self._clock, digesting=self._digesting)

    def _map(self, name: str, size_bytes: int) -> SlotWriter:
        self._slot = name
        return self.store().begin(size_bytes)

    def is_ready(self, size_bytes: int) -> bool:
        """Return whether a slot of that size is prepared; release one of another size."""
        with self._lock:
            ready = self._ready
            if ready is not None and ready.size_bytes == size_bytes and ready.is_current:
                return True
        self.release_ready()
        return False

    def make_ready(self, name: str, size_bytes: int, pin: Pinning) -> None:
        """Map and lock a slot that the agent has assigned, and pin it if devices copy into it.

        Raises:
            StorageError: The slot no longer exists, or belongs to another process by now.
        """
        slot = self._map(name, size_bytes)
        # Pinning is slow for a slot's first image only, so it is done here, before a save needs it.
        slot.pinned(pin)
        with self._lock:
            self._ready = slot

    def close(self) -> None:
        """Release all memory."""
        self.release_ready()
        if self._store is not None:
            self._store.close()

    def release_ready(self) -> None:
        """Release the prepared slot, so that the agent can assign its memory to another one."""
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()


class SlotFill:
    """A slot that is filled with an image; its lock is held until `close`.

    Any thread may call `copy`: the first one copies, the others wait for it.

    Args:
        slot: The slot.
        layout: The layout of the image.
        clock: The clock for waits.
        digesting: Digest the blocks on the way.
    """

    def __init__(
        self, slot: SlotWriter, layout: ImageLayout, clock: Clock, *, digesting: bool = True
    ) -> None:
        self.slot = slot
        self.layout = layout
        self._clock = clock
        self._digesting = digesting
        self._changed = Condition()
        self._copier: threading.Thread | None = None
        self._has_ended = False
        self.is_whole = False
        """Whether the slot has the whole image, which will not change."""
        self._digests: Sequence[str] | None = None

    def copy(self, snapshot: Snapshot, *, keep: bool = True) -> bool:
        """Fill the slot, or wait until another thread has; return whether it is whole.

        The wait is unbounded: the copying thread does nothing else, and ends in any case.

        Args:
            snapshot: The state. If it is borrowed and cannot be copied, it is secured.
            keep: Do not release a state on devices as soon as it has arrived.

        Raises:
            StorageError, DeviceError: This thread cannot fill it.
        """
        with self._changed:
            is_first = self._copier is None and not self._has_ended
            if is_first:
                self._copier = threading.current_thread()
        if is_first:
            try:
                self._copy(snapshot, keep)
            except (StorageError, DeviceError):
                if snapshot.hold is Hold.BORROWED:
                    snapshot.copy_borrowed()
                raise
            finally:
                self.end()
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended)
        return self.is_whole

    def end(self) -> None:
        """Let no thread begin to copy any more; wait for another thread that is copying."""
        if self._copier not in (None, threading.current_thread()):
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended)
        self._has_ended = True
        with self._changed:
            self._changed.notify_all()

    def digests(self) -> Sequence[str]:
        """Return the digests of the blocks of an image that is whole."""
        if self._digests is None:
            # The training thread waited for the copy, and not for the digests as well.
            self._digests = digests_of(self.slot, self.layout, lambda stop_bytes: None)
        return self._digests

    def show(self, key: str) -> Sequence[str]:
        """Give an image that is whole its name, and return the digests of its blocks.

        Raises:
            StorageError: The RAM tier was removed, or another process has changed the slot.
        """
        if not self.slot.is_current:
            raise StorageError("the RAM tier was removed while the state was copied into it")
        digests = self.digests()
        # Right before the name becomes visible: another process may have truncated the slot.
        self.slot.check_whole()
        self.slot.show(key)
        return digests

    def close(self) -> None:
        """End the copying and release the slot; without a name it is free again. Idempotent."""
        self.end()
        self.slot.close()

    def _copy(self, snapshot: Snapshot, keep: bool) -> None:
        slot, layout = self.slot, self.layout
        if not slot.is_current:
            raise StorageError("the RAM tier was removed before the state was copied into it")
        slot.write(0, memoryview(layout.header))
        ranges, memory = {}, None
        if snapshot.on_devices and snapshot.hold is not Hold.HOST:
            memory = slot.pinned(snapshot.pin)
        if memory is not None:
            ranges = snapshot.device_ranges(layout.chunks)
        if memory is None or not ranges:
            digests = fill_chunks(
                slot, layout.chunks, snapshot.chunk_bytes, digesting=self._digesting
            )
            self._digests = digests if self._digesting else None
            self.is_whole = True
            return
        began_secs = self._clock.monotonic()
        with _Arrival(memory.queue_copies(list(ranges.values())), self._clock) as arrival:
            others = [chunk for chunk in layout.chunks if chunk not in ranges]
            fill_chunks(slot, others, snapshot.chunk_bytes, digesting=False)

            def wait_for(stop_bytes: int) -> None:
                arrival.wait(stop_bytes)
                if not self.is_whole and arrival.is_over(stop_bytes):
                    snapshot.check_unchanged()
                    self.is_whole = True
                    if not keep:
                        snapshot.release()
                    size_bytes = sum(range_.size_bytes for range_ in ranges.values())
                    secs = self._clock.monotonic() - began_secs
                    log.debug("devices copied %d bytes in %.6f s", size_bytes, secs)

            if self._digesting and snapshot.hold is not Hold.BORROWED:
                self._digests = digests_of(slot, layout, wait_for)
            wait_for(layout.size_bytes)
            if not self.is_whole:
                snapshot.check_unchanged()
            self.is_whole = True


class _Arrival:
    """A transfer from devices into a slot; leaving the context waits until the devices finished.

    If a device hangs, that wait ends after `STALL_SECS`, and the slot stays locked.
    """

    def __init__(self, transfer: Transfer, clock: Clock) -> None:
        self._transfer = transfer
        self._clock = clock

    def __enter__(self) -> _Arrival:
        return self

    def __exit__(self, *error: object) -> None:
        deadline = self._clock.monotonic() + STALL_SECS
        while not self._transfer.is_over() and self._clock.monotonic() < deadline:
            self._clock.sleep(POLL_SECS)

    def is_over(self, stop_bytes: int) -> bool:
        """Return whether no device writes any more and all bytes below `stop_bytes` arrived."""
        return self._transfer.is_over() and self._transfer.has_arrived(stop_bytes)

    def wait(self, stop_bytes: int) -> None:
        """Wait until all bytes below the offset `stop_bytes` have arrived.

        `stop_bytes` must not decrease from call to call.

        Raises:
            DeviceError: The transfer failed, or made no progress for `STALL_SECS`.
        """
        if self._transfer.has_arrived(stop_bytes):
            return
        deadline = self._clock.monotonic() + STALL_SECS
        while not self._transfer.has_arrived(stop_bytes):
            if self._clock.monotonic() > deadline:
                self._transfer.fail(
                    DeviceError(
                        f"copy from a device: expected the bytes below {stop_bytes} within "
                        f"{STALL_SECS:.0f} s, found no progress; the device hangs"
                    )
                )
            self._clock.sleep(POLL_SECS)


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
        helping: list[Future[None]] = []
        try:
            # When the interpreter exits, and at a limit of threads, none can be started.
            with contextlib.suppress(RuntimeError):
                for _ in range(helper_count):
                    helping.append(pool.submit(blocks.copy))
            blocks.copy()
            for help_ in helping:
                help_.result()
        finally:
            # Also after a Ctrl-C: on exit, no thread writes to the slot any more.
            blocks.stop_queue()


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
            while (block := self._take()) is not None:
                number, (offset_bytes, data) = block
                if self._slot is None:
                    self._filling.write(offset_bytes, data)
                else:
                    self._digests[number] = self._copy_and_digest(self._slot, offset_bytes, data)
        finally:
            # After one thread failed, the others' work is useless.
            self.stop_queue()

    def stop_queue(self) -> None:
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
            return [block for digests in digesting for block in digests.result()]
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
