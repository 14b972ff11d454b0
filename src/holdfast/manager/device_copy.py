"""Slots that devices fill by themselves, while the host digests what has arrived.

Nothing lets go of a slot, or of the memory that it is filled from, before the devices are done with
both. Each wait ends: a transfer that does not move for `STALL_SECS` counts as failed.
"""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType

from holdfast.adapt.contract import Snapshot, Transfer
from holdfast.clock import Clock
from holdfast.engine.saving.slots import fill_chunks, fill_slot
from holdfast.errors import DeviceError, StorageError
from holdfast.format.layout import ImageLayout
from holdfast.store.ram import SlotWriter

POLL_SECS = 0.0002
STALL_SECS = 60.0

log = logging.getLogger(__name__)


class DeviceCopy:
    """A slot that is being filled from a snapshot, within a `with` statement.

    Where the memory is not pinned the host copies it all, before the statement's body. With `keep`
    the snapshot is not let go of: more is to be read from it.

    Raises:
        DeviceError: the devices do not have the state.
        StorageError: somebody changed the slot.
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
        """Whether all has arrived by itself; the snapshot was let go of then."""
        return self._is_whole

    def wait(self, stop_bytes: int) -> None:
        """Waits until all below `stop_bytes` has arrived; `stop_bytes` only grows.

        Unless it is to be kept, the snapshot is let go of as soon as nothing is read from it.

        Raises:
            DeviceError: it never will.
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
        """Waits until the devices are done, well or not; a slot of one that hangs stays locked."""
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
    """Copies a state into a slot, whoever has it; the snapshot is not let go of.

    Returns:
        With `digesting`, the digests of its blocks; None where devices copied them: whoever waits
        for that does not wait for digests too.

    Raises:
        StorageError, DeviceError: it is not whole.
    """
    if not snapshot.is_borrowed:
        return fill_slot(filling, layout, snapshot.chunk_bytes, digesting=digesting)
    with DeviceCopy(filling, layout, snapshot, clock, keep=True) as arriving:
        arriving.wait(layout.size_bytes)
    return None


def _stalled(stop_bytes: int) -> DeviceError:
    return DeviceError(
        f"copy from a device: expected the bytes below {stop_bytes} within {STALL_SECS:.0f} s, "
        "found no progress; the device hangs"
    )
