"""Write replicas of other ranks' parts into local RAM, from bytes that this rank holds as well.

Data parallelism has already replicated those bytes. Only the part record and the chunks that the
other rank alone holds cross the network: the agent fetches them, and checks every block of a
replica against the record before the replica counts (`holdfast.engine.transfer.fetch`).

Invariants:
- A replica neither delays nor affects the rank's own part: a failure is only logged, and the agent
  fetches that part from its host.
- The agent is always notified when no more replicas of a checkpoint follow.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.adapt.contract import Pinning, Snapshot
from holdfast.clock import Clock
from holdfast.engine.saving.slots import RamSlots, SlotFill
from holdfast.errors import DeviceError, HoldfastError, StorageError
from holdfast.store.ram import SlotWriter
from holdfast.trainer.planning import PartCopy

log = logging.getLogger(__name__)

SlotFor = Callable[[PartCopy], str | None]
"""Request a slot for a replica from the agent, and return its name; None if there is none."""


@dataclass(frozen=True, slots=True)
class LocalReplica:
    """A replica of another rank's part, and the slot that it is copied into."""

    part: PartCopy
    fill: SlotFill

    def copy(self, snapshot: Snapshot) -> bool:
        """Copy the chunks, or wait until another thread has; return whether the slot has all."""
        try:
            return self.fill.copy(snapshot)
        except (StorageError, DeviceError) as error:
            log.debug("no replica of rank %d's part is made: %s", self.part.rank, error)
            return False

    def finish(self, snapshot: Snapshot) -> bool:
        """Copy as `copy` does, and release the slot."""
        with contextlib.closing(self.fill):
            return self.copy(snapshot) and self.fill.slot.is_current


class ReplicaWriter:
    """Write replicas of other ranks' parts.

    Owned by the saver's thread; the training thread calls `begin` only.
    """

    def __init__(self, ram_folder: Callable[[], Path | None], clock: Clock) -> None:
        self._ram_folder = ram_folder
        self._clock = clock
        self._slots: dict[int, RamSlots] = {}

    def begin(
        self, copies: Sequence[PartCopy], held: contextlib.ExitStack
    ) -> tuple[LocalReplica, ...]:
        """Return the replicas for which slots are prepared, to be filled at once.

        `held` closes their slots.
        """
        found = []
        for copy in copies:
            slot = self._slots_of(copy).acquire(copy.layout.size_bytes, held)
            if slot is not None:
                found.append(LocalReplica(copy, self._fill(copy, slot)))
        return tuple(found)

    def make(self, copy: PartCopy, snapshot: Snapshot, slot_for: SlotFor) -> bool:
        """Write a replica from a snapshot that is not released yet.

        Returns:
            Whether the replica is whole; False if the agent has no slot for it.

        Raises:
            HoldfastError: The agent refuses a slot, or the slot no longer exists.
        """
        slots, size_bytes = self._slots_of(copy), copy.layout.size_bytes
        slot = slots.acquire(size_bytes)
        if slot is None:
            slots.release_ready()
            name = slot_for(copy)
            if name is None:
                return False
            slot = slots.begin(name, size_bytes)
        return LocalReplica(copy, self._fill(copy, slot)).finish(snapshot)

    def _fill(self, copy: PartCopy, slot: SlotWriter) -> SlotFill:
        # Not digested here: the agent digests the replica and compares it with the record of the
        # rank that owns the part.
        return SlotFill(slot, copy.layout, self._clock, digesting=False)

    def prepare(self, copies: Sequence[PartCopy], slot_for: SlotFor, pin: Pinning) -> None:
        """Prepare slots for the next checkpoint's replicas, as far as the agent has free ones."""
        for copy in copies:
            slots, size_bytes = self._slots_of(copy), copy.layout.size_bytes
            if slots.is_ready(size_bytes):
                continue
            try:
                name = slot_for(copy)
                if name is not None:
                    slots.make_ready(name, size_bytes, pin)
            except HoldfastError as error:
                log.debug("no slot is ready for a replica of rank %d's part: %s", copy.rank, error)
        for rank in self._slots.keys() - {copy.rank for copy in copies}:
            self._slots.pop(rank).close()

    def close(self) -> None:
        """Release all memory."""
        for slots in self._slots.values():
            slots.close()

    def _slots_of(self, copy: PartCopy) -> RamSlots:
        if copy.rank not in self._slots:
            self._slots[copy.rank] = RamSlots(self._ram_folder, self._clock)
        return self._slots[copy.rank]
