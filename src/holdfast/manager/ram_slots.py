"""Hold the trainer's slots in the RAM tier, and one slot that is prepared before it is needed.

The training thread can copy a state into a prepared slot at once. On the CPU that is cheaper than
holding the state for a background thread: a step that donates held arrays has to allocate fresh
pages, which cost ten times as much as the copy.
"""

from __future__ import annotations

import contextlib
import threading

from holdfast.adapt.contract import Pinning
from holdfast.clock import Clock
from holdfast.manager.agent_session import AgentSession
from holdfast.store.ram import RamStore, SlotWriter


class RamSlots:
    """The slots of one kind of image, one of which may be prepared.

    Owned by the saver's thread; the training thread calls `acquire`, `has_ready` and `tier` too.
    """

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
        """Return the prepared slot if it has that size, else None. The caller closes the slot.

        Args:
            size_bytes: The size of the image.
            held: Closes the slot too, so that an exception raised before the caller has the slot
                does not leak it.
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
        """Whether a slot is prepared; read without the lock, so it may be outdated at once."""
        return self._ready is not None

    def tier(self) -> RamStore:
        """Return the RAM tier of the slot acquired last, for everything except writing an image."""
        assert self._store is not None
        return self._store

    def store(self, slot: str = "") -> RamStore:
        """Return the RAM tier for writing; the next image is written to `slot`."""
        folder = self._session.place.ram_folder
        assert folder is not None
        if self._store is None or self._store.root != folder:
            self.close()
            self._store = RamStore(folder, lambda size: self._slot, self._clock)
        self._slot = slot
        return self._store

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
        filling = self.store(name).begin(size_bytes)
        # Pinning is slow for a slot's first image only, so it is done here, before a save needs it.
        filling.pinned(pin)
        with self._lock:
            self._ready = filling

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
