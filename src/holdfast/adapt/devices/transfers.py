"""Transfers: copies from devices into registered host memory, in ascending order of offset.

Invariants:
- The memory is busy until its streams are idle, also after a failure: otherwise an old copy could
  overwrite part of the next image in the same slot.
- Each device has its own streams, so several devices copy concurrently; within one stream, copies
  are in order.
- The streams of a device take turns. A GPU's copy engine serves one stream for as long as it has
  work, so with a single stream a training that reads its loss would wait for the last byte: on an
  H100, 4 bytes waited 170 ms for 8 GiB. Between two turns the read is served, after 0.6 ms.

Assumes that the source's bytes are computed already and do not change: these streams do not wait
for work that a framework has queued on its own streams. See docs/decisions/0008.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from holdfast.adapt.contract import DeviceRange
from holdfast.adapt.devices.runtime import DeviceRuntime, DeviceStream, Mark
from holdfast.errors import DeviceError

PIECE_SIZE_BYTES = 32 * 1024 * 1024
"""The minimum size of a turn, which ends with a mark: large enough for the full rate, yet short."""

log = logging.getLogger(__name__)


class Streams:
    """Two streams for each device of a kind, opened on first use."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self._streams: dict[int, tuple[DeviceStream, DeviceStream]] = {}
        self.failure: DeviceError | None = None
        """The first failure of any transfer; later states do not use these streams."""

    def for_device(self, device: int) -> tuple[DeviceStream, DeviceStream]:
        """Return the device's streams.

        Raises:
            DeviceError: a stream could not be created.
        """
        if device not in self._streams:
            opened = self.runtime.open_stream(device), self.runtime.open_stream(device)
            self._streams[device] = opened
        return self._streams[device]


class RegisteredMemory:
    """Registered host memory; see `holdfast.adapt.contract.PinnedMemory`."""

    def __init__(self, streams: Streams, memory: memoryview, device: int) -> None:
        """Register `memory`.

        Raises:
            DeviceError: the memory could not be registered.
        """
        self._streams = streams
        self._bytes: np.ndarray | None = np.frombuffer(memory, np.uint8)
        self._address = self._bytes.ctypes.data
        self._transfer: QueuedTransfer | None = None
        try:
            streams.runtime.page_lock(self._address, len(memory), device)
        except DeviceError:
            self._bytes = None
            raise

    @property
    def is_busy(self) -> bool:
        return self._transfer is not None and not self._transfer.is_over()

    def queue_copies(self, ranges: Sequence[DeviceRange]) -> QueuedTransfer:
        self._transfer = QueuedTransfer(self._streams, self._address, ranges)
        return self._transfer

    def close(self) -> None:
        if self._bytes is None:
            return
        try:
            self._streams.runtime.page_unlock(self._address)
        except DeviceError as error:
            log.warning("memory of the RAM tier stays locked until this process ends: %s", error)
        # The memory can be unmapped only without views of it.
        self._bytes = None


class _Piece:
    """A queued copy: its offset in the host's memory, and the mark after it."""

    __slots__ = ("mark", "start_bytes", "stream")

    def __init__(self, start_bytes: int, stream: DeviceStream) -> None:
        self.start_bytes = start_bytes
        self.stream = stream
        self.mark: Mark = None


class _Turns:
    """The copies of one device, queued on its two streams in turn."""

    def __init__(self, streams: tuple[DeviceStream, DeviceStream]) -> None:
        self._stream, self._other = streams
        self._unmarked: list[_Piece] = []
        self._unmarked_bytes = 0
        self.marks: list[tuple[DeviceStream, Mark]] = []

    def copy(self, target: int, source: int, size_bytes: int, start_bytes: int) -> _Piece:
        """Queue a copy."""
        if self.marks and not self._unmarked:
            # A turn begins when that of the other stream ends.
            self._stream.wait_for(self.marks[-1][1])
        self._stream.copy(target, source, size_bytes)
        piece = _Piece(start_bytes, self._stream)
        self._unmarked.append(piece)
        self._unmarked_bytes += size_bytes
        if self._unmarked_bytes >= PIECE_SIZE_BYTES:
            self.end_turn()
        return piece

    def end_turn(self) -> None:
        """Mark the end of the queued copies, and switch to the other stream."""
        if self._unmarked:
            mark = self._stream.record_mark()
            self.marks.append((self._stream, mark))
            for piece in self._unmarked:
                piece.mark = mark
            self._unmarked, self._unmarked_bytes = [], 0
            self._stream, self._other = self._other, self._stream


class QueuedTransfer:
    """Copies queued on streams; see `holdfast.adapt.contract.Transfer`."""

    def __init__(self, streams: Streams, address: int, ranges: Sequence[DeviceRange]) -> None:
        self._pieces: list[_Piece] = []
        self._passed = 0
        self._turns: dict[int, _Turns] = {}
        self._failure: DeviceError | None = None
        self._is_over = False
        self._streams = streams
        try:
            self._queue(address, ranges)
        except DeviceError as error:
            # Copies that were queued before still run.
            self.fail(error)

    def fail(self, error: DeviceError) -> None:
        self._failure = self._failure or error
        self._streams.failure = self._streams.failure or error

    def _queue(self, address: int, ranges: Sequence[DeviceRange]) -> None:
        for device_range in ranges:
            if device_range.device not in self._turns:
                self._turns[device_range.device] = _Turns(
                    self._streams.for_device(device_range.device)
                )
            turns = self._turns[device_range.device]
            for done in range(0, device_range.size_bytes, PIECE_SIZE_BYTES):
                size = min(PIECE_SIZE_BYTES, device_range.size_bytes - done)
                place = device_range.offset_bytes + done
                piece = turns.copy(address + place, device_range.address + done, size, place)
                self._pieces.append(piece)
        for turns in self._turns.values():
            turns.end_turn()

    def has_arrived(self, stop_bytes: int) -> bool:
        if self._failure is not None:
            raise self._failure
        while self._passed < len(self._pieces):
            piece = self._pieces[self._passed]
            if piece.start_bytes >= stop_bytes:
                return True
            try:
                if not piece.stream.has_passed(piece.mark):
                    return False
            except DeviceError as error:
                self.fail(error)
                raise
            self._passed += 1
        return True

    def is_over(self) -> bool:
        used = [stream for device in self._turns for stream in self._streams.for_device(device)]
        if not self._is_over and all(map(self._is_quiet, used)):
            self._is_over = True
            # All copies that did not fail have arrived.
            self._passed = len(self._pieces)
            for turns in self._turns.values():
                for stream, mark in turns.marks:
                    stream.recycle_mark(mark)
            self._turns = {}
        return self._is_over

    def _is_quiet(self, stream: DeviceStream) -> bool:
        try:
            return stream.is_idle()
        except DeviceError as error:
            # A failed device runs no more copies, so it counts as idle; the failure is recorded.
            self.fail(error)
            return True
