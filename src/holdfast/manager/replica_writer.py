"""Copies of other ranks' parts, made into RAM here of bytes that this rank holds as well.

Data parallelism has brought them here: the part record crosses the network, and the chunks that
the other rank holds alone. The agent fetches those, and checks every block of a copy against the
record before it counts (`holdfast.engine.transfer.fetch`).

Invariants:
- A copy never holds up, or harms, the rank's own part: what fails is told to nobody, and the agent
  pulls that part from its host.
- The agent is told in any case when no copy of a checkpoint comes any more.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.adapt.contract import Pinning, Snapshot
from holdfast.clock import Clock
from holdfast.engine.saving.slots import FillProgress
from holdfast.errors import DeviceError, HoldfastError, StorageError
from holdfast.manager.agent_session import AgentSession
from holdfast.manager.device_copy import fill_from
from holdfast.manager.planning import PartCopy
from holdfast.manager.ram_slots import RamSlots
from holdfast.store.ram import SlotWriter

log = logging.getLogger(__name__)

SlotFor = Callable[[PartCopy], str | None]
"""Asks the agent for a slot for a copy; None where there is none."""


@dataclass(slots=True)
class ReplicaDraft:
    """A copy that goes into a slot. One thread fills it, another one waits and shows it."""

    copy: PartCopy
    filling: SlotWriter
    progress: FillProgress

    def fill(self, snapshot: Snapshot, clock: Clock) -> None:
        """Copies; what fails is seen by whoever waits."""
        try:
            # The agent digests it, and compares with what the rank says whose part it is.
            fill_from(self.filling, self.copy.layout, snapshot, clock, digesting=False)
            self.progress.finish()
        except (StorageError, DeviceError) as error:
            log.debug("the part of rank %d is not copied: %s", self.copy.rank, error)
        finally:
            self.end()

    def end(self) -> None:
        """No more is copied."""
        self.progress.end()

    def finish(self) -> bool:
        """Waits until no more is copied, and lets go of the slot; whether the copy is whole."""
        with contextlib.closing(self.filling):
            return self.progress.wait() and self.filling.is_current


class ReplicaWriter:
    """Owned by the saver's thread; `begin` is the training thread's."""

    def __init__(self, session: AgentSession, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._slots: dict[int, RamSlots] = {}

    def begin(
        self, copies: Sequence[PartCopy], held: contextlib.ExitStack
    ) -> tuple[ReplicaDraft, ...]:
        """Return the copies for which slots are ready, to be filled at once; `held` closes them."""
        found = []
        for copy in copies:
            filling = self._slots_of(copy).acquire(copy.layout.size_bytes, held)
            if filling is not None:
                found.append(ReplicaDraft(copy, filling, FillProgress()))
        return tuple(found)

    def make(self, copy: PartCopy, snapshot: Snapshot, slot_for: SlotFor) -> bool:
        """Makes a copy of a state that is still at hand; whether it is whole.

        Raises:
            HoldfastError: the agent gives no slot, or the slot is gone.
        """
        slots, size_bytes = self._slots_of(copy), copy.layout.size_bytes
        filling = slots.acquire(size_bytes)
        if filling is None:
            slots.give_up_ready()
            name = slot_for(copy)
            if name is None:
                return False
            filling = slots.store(name).begin(size_bytes)
        filled = ReplicaDraft(copy, filling, FillProgress())
        filled.fill(snapshot, self._clock)
        return filled.finish()

    def prepare(self, copies: Sequence[PartCopy], slot_for: SlotFor, pin: Pinning) -> None:
        """Gets slots ready for the next checkpoint's copies, as far as the agent has them."""
        for copy in copies:
            slots, size_bytes = self._slots_of(copy), copy.layout.size_bytes
            if slots.is_ready(size_bytes):
                continue
            try:
                name = slot_for(copy)
                if name is not None:
                    slots.make_ready(name, size_bytes, pin)
            except HoldfastError as error:
                log.debug("no slot is ready for a copy of rank %d's part: %s", copy.rank, error)
        for rank in self._slots.keys() - {copy.rank for copy in copies}:
            self._slots.pop(rank).close()

    def close(self) -> None:
        """Lets go of all memory."""
        for slots in self._slots.values():
            slots.close()

    def _slots_of(self, copy: PartCopy) -> RamSlots:
        if copy.rank not in self._slots:
            self._slots[copy.rank] = RamSlots(self._session, self._clock)
        return self._slots[copy.rank]
