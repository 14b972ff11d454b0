"""The trainer's memory in the RAM tier: its slots, and one that is ready before it is needed.

A slot that is ready lets the training thread copy a state into it at once. On the CPU that is
cheaper than holding the state for a background thread: a step that donates what is held has to
take fresh pages, which cost ten times as much as the copy.
"""

from __future__ import annotations

import contextlib
import threading

from holdfast.adapt.contract import Pinning
from holdfast.clock import Clock
from holdfast.manager.agent_session import AgentSession
from holdfast.store.ram import RamStore, SlotWriter


class RamSlots:
    """Owned by the saver's thread; `take`, `has_ready` and `tier` are the training thread's too."""

    def __init__(self, session: AgentSession, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._store: RamStore | None = None
        self._slot = ""
        self._lock = threading.Lock()
        self._ready: SlotWriter | None = None

    def acquire(
        self, size_bytes: int, held: contextlib.ExitStack | None = None
    ) -> SlotWriter | None:
        """Return the slot that is ready, if there is one of that size; the caller closes it.

        `held` closes it too, so that an exception that comes before the caller has it loses no
        slot.
        """
        with self._lock:
            ready = self._ready
            if ready is None or ready.size_bytes != size_bytes or not ready.is_current:
                return None
            if held is not None:
                held.callback(ready.close)
            self._ready = None
            return ready

    @property
    def has_ready(self) -> bool:
        """Whether any slot is ready; a look, without the lock."""
        return self._ready is not None

    def tier(self) -> RamStore:
        """The RAM tier of the slot that was just taken, for all but filling slots of its own."""
        assert self._store is not None
        return self._store

    def store(self, slot: str = "") -> RamStore:
        """The RAM tier as this trainer writes it; an image goes into `slot`."""
        folder = self._session.place.ram_folder
        assert folder is not None
        if self._store is None or self._store.root != folder:
            self.close()
            self._store = RamStore(folder, lambda size: self._slot, self._clock)
        self._slot = slot
        return self._store

    def is_ready(self, size_bytes: int) -> bool:
        """Whether a slot of that size is ready; one of another size is given up."""
        with self._lock:
            ready = self._ready
            if ready is not None and ready.size_bytes == size_bytes and ready.is_current:
                return True
        self.give_up_ready()
        return False

    def make_ready(self, name: str, size_bytes: int, pin: Pinning) -> None:
        """Maps and locks a slot that the agent had to spare, and pins it where that is of use.

        Raises:
            StorageError: it is gone, or somebody else's by now.
        """
        filling = self.store(name).begin(size_bytes)
        # Page-locking takes its time for the first image that a slot holds, and none afterwards.
        filling.pinned(pin)
        with self._lock:
            self._ready = filling

    def close(self) -> None:
        """Lets go of all memory."""
        self.give_up_ready()
        if self._store is not None:
            self._store.close()

    def give_up_ready(self) -> None:
        """Lets go of the slot that is ready, so that the agent may give its room to another one."""
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()
