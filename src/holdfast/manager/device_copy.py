"""Copy a state from devices directly into slots, while the host digests the bytes that arrived.

Invariants:
- A slot, and the memory that it is filled from, is released only when the devices have finished
  with both.
- Each wait is bounded: a transfer that makes no progress for `STALL_SECS` has failed.
"""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType

from holdfast.adapt.contract import Hold, Snapshot, Transfer
from holdfast.clock import Clock
from holdfast.engine.saving.slots import fill_chunks, fill_slot
from holdfast.errors import DeviceError, StorageError
from holdfast.format.layout import ImageLayout
from holdfast.store.ram import SlotWriter

POLL_SECS = 0.0002
STALL_SECS = 60.0
"""How long a transfer may make no progress."""

log = logging.getLogger(__name__)


class DeviceCopy:
    """A slot that devices fill from a snapshot inside a `with` statement.

    If the slot's memory is not pinned, the host copies the whole state before the statement's body
    runs. Leaving the statement waits until the devices have finished, for `STALL_SECS` at most.

    Args:
        filling: The slot to fill.
        layout: The layout of the image.
        snapshot: The state.
        clock: The clock for waits.
        keep: Do not release the snapshot when everything has arrived, because more is read from it.

    Raises:
        DeviceError: The devices do not have the state.
        StorageError: The slot was changed by another process.
    """

    def __init__(
        self,
        filling: SlotWriter,
        layout: ImageLayout,
        snapshot: Snapshot,
        clock: Clock,
        *,
        keep: bool = False,
    ) -> None:
        self._filling = filling
        self._layout = layout
        self._snapshot = snapshot
        self._clock = clock
        self._transfer: Transfer | None = None
        self._keep = keep
        self._is_whole = False
        self._began_secs = 0.0
        self._size_bytes = 0

    def __enter__(self) -> DeviceCopy:
        filling, layout, snapshot = self._filling, self._layout, self._snapshot
        if not filling.is_current:
            raise StorageError("the RAM tier was removed before the state was copied into it")
        filling.write(0, memoryview(layout.header))
        memory = filling.pinned(snapshot.pin)
        ranges = snapshot.device_ranges(layout.chunks) if memory is not None else {}
        if memory is not None:
            self._began_secs = self._clock.monotonic()
            self._size_bytes = sum(found.size_bytes for found in ranges.values())
            self._transfer = memory.start(list(ranges.values()))
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._end)
            others = [chunk for chunk in layout.chunks if chunk not in ranges]
            fill_chunks(filling, others, snapshot.chunk_bytes, digesting=False)
            on_error.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def is_whole(self) -> bool:
        """Whether the devices have copied everything; the snapshot is then released unless kept."""
        return self._is_whole

    def wait(self, stop_bytes: int) -> None:
        """Wait until all bytes below the offset `stop_bytes` have arrived.

        `stop_bytes` must not decrease from call to call. The snapshot is released as soon as
        nothing is read from it, unless it is kept.

        Raises:
            DeviceError: The transfer failed, or made no progress for `STALL_SECS`.
        """
        transfer = self._transfer
        if transfer is None:
            return
        if not transfer.has_arrived(stop_bytes):
            deadline = self._clock.monotonic() + STALL_SECS
            while not transfer.has_arrived(stop_bytes):
                if self._clock.monotonic() > deadline:
                    transfer.fail(_stalled(stop_bytes))
                self._clock.sleep(POLL_SECS)
        if not self._is_whole and transfer.is_over() and transfer.has_arrived(stop_bytes):
            self._is_whole = True
            if not self._keep:
                self._snapshot.release()
            secs = self._clock.monotonic() - self._began_secs
            log.debug("devices copied %d bytes in %.6f s", self._size_bytes, secs)

    def _end(self) -> None:
        """Wait until the devices have finished or failed; the slot of a hung one stays locked."""
        if self._transfer is not None:
            deadline = self._clock.monotonic() + STALL_SECS
            while not self._transfer.is_over() and self._clock.monotonic() < deadline:
                self._clock.sleep(POLL_SECS)


def fill_from(
    filling: SlotWriter,
    layout: ImageLayout,
    snapshot: Snapshot,
    clock: Clock,
    *,
    digesting: bool,
) -> list[str] | None:
    """Copy a state from the host or from devices into a slot, without releasing the snapshot.

    Args:
        filling: The slot to fill.
        layout: The layout of the image.
        snapshot: The state.
        clock: The clock for waits.
        digesting: Digest each block while it is copied.

    Returns:
        The digests of the blocks if `digesting`. None if devices copied them: the training thread
        waits for this copy and must not wait for digests as well.

    Raises:
        StorageError, DeviceError: The slot does not hold the whole state.
    """
    if not snapshot.on_devices or snapshot.hold is Hold.HOST:
        return fill_slot(filling, layout, snapshot.chunk_bytes, digesting=digesting)
    with DeviceCopy(filling, layout, snapshot, clock, keep=True) as arriving:
        arriving.wait(layout.size_bytes)
    return None


def _stalled(stop_bytes: int) -> DeviceError:
    return DeviceError(
        f"copy from a device: expected the bytes below {stop_bytes} within {STALL_SECS:.0f} s, "
        "found no progress; the device hangs"
    )
