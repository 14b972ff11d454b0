"""Write replicas of other ranks' parts into local RAM, from bytes that this rank holds as well.

Data parallelism has already replicated those bytes. Only the part record and the chunks that the
other rank alone holds cross the network: the agent fetches them, and checks every block of a
replica against the record before the replica counts (`holdfast.engine.transfer.fetch`).

Invariants:
- A replica neither delays nor affects the rank's own part: a failure is only logged, and the agent
  fetches that part from its host.
- The agent is always notified when no more replicas of a checkpoint follow.

See docs/decisions/0016.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.adapt.contract import Pinning, Snapshot
from holdfast.clock import Clock
from holdfast.engine.saving.slots import RamSlots, SlotFill
from holdfast.errors import DeviceError, HoldfastError, StorageError
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
        fills = [(copy, self._slots_of(copy).acquire(copy.layout, held)) for copy in copies]
        return tuple(LocalReplica(copy, fill) for copy, fill in fills if fill is not None)

    def make(
        self, copies: Sequence[PartCopy], snapshot: Snapshot, slot_for: SlotFor
    ) -> Iterator[int]:
        """Write replicas from a snapshot that is not released yet; yield the ranks of whole ones.

        A replica for which the agent has no slot is left to it.
        """
        for copy in copies:
            slots = self._slots_of(copy)
            try:
                fill = slots.acquire(copy.layout)
                if fill is None:
                    slots.release_ready()
                    name = slot_for(copy)
                    if name is None:
                        continue
                    fill = slots.begin(name, copy.layout)
                if LocalReplica(copy, fill).finish(snapshot):
                    yield copy.rank
            except HoldfastError as error:
                log.debug("no replica of rank %d's part is made: %s", copy.rank, error)

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
            # Not digested here: the agent digests the replica and compares it with the record of
            # the rank that owns the part.
            self._slots[copy.rank] = RamSlots(self._ram_folder, self._clock, digesting=False)
        return self._slots[copy.rank]
