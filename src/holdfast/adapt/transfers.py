"""Transfers: what devices copy into registered memory of the host, in the order of its places.

Invariants:
- The memory is busy until its streams are idle, also after a failure: whoever fills it anew before
  that would have an old copy land in the new image.
- Each device has one stream, so several devices copy at once; within one, copies keep their order.

Assumes that the source's bytes are there already and stay as they are: a stream of our own does not
wait for what a framework has queued on its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from holdfast.adapt.contract import DeviceRange
from holdfast.adapt.device_runtime import DeviceRuntime, DeviceStream, Mark
from holdfast.errors import DeviceError

PIECE_SIZE_BYTES = 32 * 1024 * 1024
"""How much at least is between two marks: enough for the full rate, and soon enough digested."""

log = logging.getLogger(__name__)


class Streams:
    """One stream for each device of a kind, opened when it is first needed."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self._streams: dict[int, DeviceStream] = {}
        self.failure: DeviceError | None = None
        """The first failure of any transfer; what comes after it had better take another way."""

    def of(self, device: int) -> DeviceStream:
        """The device's stream.

        Raises:
            DeviceError: the device gives none.
        """
        if device not in self._streams:
            self._streams[device] = self.runtime.open_stream(device)
        return self._streams[device]


class RegisteredMemory:
    """Memory of the host, registered; see `holdfast.adapt.contract.PinnedMemory`."""

    def __init__(self, streams: Streams, memory: memoryview, device: int) -> None:
        """Registers `memory`.

        Raises:
            DeviceError: it cannot be.
        """
        self._streams = streams
        self._bytes: np.ndarray | None = np.frombuffer(memory, np.uint8)
        self._address = self._bytes.ctypes.data
        self._transfer: QueuedTransfer | None = None
        try:
            streams.runtime.register(self._address, len(memory), device)
        except DeviceError:
            self._bytes = None
            raise

    @property
    def is_busy(self) -> bool:
        return self._transfer is not None and not self._transfer.is_over()

    def start(self, ranges: Sequence[DeviceRange]) -> QueuedTransfer:
        self._transfer = QueuedTransfer(self._streams, self._address, ranges)
        return self._transfer

    def close(self) -> None:
        if self._bytes is None:
            return
        try:
            self._streams.runtime.unregister(self._address)
        except DeviceError as error:
            log.warning("memory of the RAM tier stays locked until this process ends: %s", error)
        # Unmapping needs that nothing views the memory any more.
        self._bytes = None


class _Piece:
    """A queued copy: where it starts in the host's memory, and the mark behind it."""

    __slots__ = ("mark", "start_bytes", "stream")

    def __init__(self, start_bytes: int, stream: DeviceStream) -> None:
        self.start_bytes = start_bytes
        self.stream = stream
        self.mark: Mark = None


class QueuedTransfer:
    """Copies in their streams; see `holdfast.adapt.contract.Transfer`."""

    def __init__(self, streams: Streams, address: int, ranges: Sequence[DeviceRange]) -> None:
        self._pieces: list[_Piece] = []
        self._passed = 0
        self._used: list[DeviceStream] = []
        self._marks: list[tuple[DeviceStream, Mark]] = []
        self._failure: DeviceError | None = None
        self._is_over = False
        self._streams = streams
        try:
            self._queue(address, ranges)
        except DeviceError as error:
            # What was queued before still runs.
            self.fail(error)

    def fail(self, error: DeviceError) -> None:
        self._failure = self._failure or error
        self._streams.failure = self._streams.failure or error

    def _queue(self, address: int, ranges: Sequence[DeviceRange]) -> None:
        unmarked: dict[int, list[_Piece]] = {}
        unmarked_bytes: dict[int, int] = {}
        for found in ranges:
            stream = self._streams.of(found.device)
            if stream not in self._used:
                self._used.append(stream)
            for done in range(0, found.size_bytes, PIECE_SIZE_BYTES):
                size = min(PIECE_SIZE_BYTES, found.size_bytes - done)
                place = found.offset_bytes + done
                stream.copy(address + place, found.address + done, size)
                piece = _Piece(place, stream)
                self._pieces.append(piece)
                unmarked.setdefault(found.device, []).append(piece)
                unmarked_bytes[found.device] = unmarked_bytes.get(found.device, 0) + size
                if unmarked_bytes[found.device] >= PIECE_SIZE_BYTES:
                    self._mark(unmarked.pop(found.device))
                    unmarked_bytes[found.device] = 0
        for pieces in unmarked.values():
            self._mark(pieces)

    def _mark(self, pieces: list[_Piece]) -> None:
        stream = pieces[0].stream
        mark = stream.mark()
        self._marks.append((stream, mark))
        for piece in pieces:
            piece.mark = mark

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
        if not self._is_over and all(map(self._is_quiet, self._used)):
            self._is_over = True
            # Whatever did not fail has arrived.
            self._passed = len(self._pieces)
            for stream, mark in self._marks:
                stream.reuse(mark)
            self._marks = []
        return self._is_over

    def _is_quiet(self, stream: DeviceStream) -> bool:
        try:
            return stream.is_idle()
        except DeviceError as error:
            # A device that failed runs nothing any more; and what it did not do is not forgotten.
            self.fail(error)
            return True
