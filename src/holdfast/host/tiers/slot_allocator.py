"""Track which slots of the pool are reserved and not filled yet. Thread-safe."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from holdfast.format.names import CheckpointId
from holdfast.store.slots import SlotPool

SLOTS_PER_PART = 2
"""One slot for the newest checkpoint and one for the next, where each is one image."""


@dataclass(frozen=True, slots=True)
class ReplicaOf:
    """The replica that this host keeps of another rank's part."""

    rank: int


User = int | ReplicaOf
"""A rank of this host, or a replica that it keeps."""


class SlotAllocator:
    """The pool's only user.

    Free slots of sizes that no user needs are freed when room is needed.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._held: dict[Hashable, str] = {}
        self._sizes_bytes: dict[Hashable, int] = {}
        self._whole_sizes_bytes: dict[int, int] = {}
        self._replica_sizes_bytes: dict[ReplicaOf, int] = {}
        self._surplus: set[str] = set()

    def reserve(self, user: User, size_bytes: int, holder: Hashable = None) -> str:
        """Return a slot of that size, held by `holder` until it is released.

        `user` is expected to need the size again.

        Raises:
            OutOfSpaceError, StorageError: as `SlotPool.reserve`.
        """
        holder = user if holder is None else holder
        with self._lock:
            self._sizes_bytes[user] = size_bytes
            if isinstance(user, ReplicaOf):
                self._replica_sizes_bytes[user] = size_bytes
            name = self._pool.reserve(
                size_bytes, set(self._held.values()), set(self._sizes_bytes.values())
            )
            self._held[holder] = name
            return name

    def spare(self, user: User, size_bytes: int, whole_bytes: int, count: int) -> str | None:
        """Return a slot for a next image; None if all slots would exceed two images of each part.

        `whole_bytes` is the size of an image of everything that the rank saves, of `count` ranks.
        Ranks that have not reported theirs count with this one's.
        """
        with self._lock:
            self._sizes_bytes[user] = size_bytes
            if isinstance(user, ReplicaOf):
                self._replica_sizes_bytes[user] = size_bytes
            else:
                self._whole_sizes_bytes[user] = whole_bytes
            unknown = max(count - len(self._whole_sizes_bytes), 0) * whole_bytes
            total = sum(self._whole_sizes_bytes.values()) + sum(self._replica_sizes_bytes.values())
            name = self._pool.spare(
                size_bytes,
                SLOTS_PER_PART * (total + unknown),
                set(self._held.values()),
                set(self._sizes_bytes.values()),
            )
            if name is not None:
                self._held[user] = name
            return name

    @contextlib.contextmanager
    def replica_slot(
        self, checkpoint: CheckpointId, rank: int, filled: str | None
    ) -> Iterator[Callable[[int], str]]:
        """Yield a function that reserves the slot of a replica; the slot is released at the end.

        `filled` is a slot that holds some of the replica already; it is reused if it has the
        requested size.
        """
        holder = checkpoint, rank
        unused = [filled] if filled is not None else []

        def reserve(size_bytes: int) -> str:
            if unused and self._pool.slot_size_bytes(unused[0]) == size_bytes:
                return unused.pop()
            return self.reserve(ReplicaOf(rank), size_bytes, holder)

        try:
            yield reserve
        finally:
            self.release(holder)

    def assign_replica(self, checkpoint: CheckpointId, rank: int) -> str | None:
        """Return the slot that a trainer has filled with a replica, now held for that replica.

        None if a previous agent reserved it.
        """
        with self._lock:
            name = self._held.pop(ReplicaOf(rank), None)
            if name is not None:
                self._held[checkpoint, rank] = name
            return name

    def release(self, holder: Hashable) -> None:
        """End a holder's reservation: it has filled its slot, or will not."""
        with self._lock:
            self._held.pop(holder, None)

    def free_surplus(self) -> None:
        """Free the slots that are not needed and were not at the last call either.

        After the durable tier was behind, there are more slots than the next saves need. Needed is
        a free slot for the next image of each user that has none reserved. While no user is known,
        so many bytes are left for the next trainers as images are held.

        Raises:
            StorageError: as `SlotPool.evict`.
        """
        with self._lock:
            taken = set(self._held.values())
            self._pool.evict_beyond_limit(taken)
            free = self._pool.free_slots(taken)
            needed_sizes = [
                size for user, size in self._sizes_bytes.items() if user not in self._held
            ]
            left_bytes = self._pool.size_bytes() - sum(free.values())
            surplus = set()
            for name, size in free.items():
                if size in needed_sizes:
                    needed_sizes.remove(size)
                elif not self._sizes_bytes and 0 < size <= left_bytes:
                    left_bytes -= size
                else:
                    surplus.add(name)
            before, self._surplus = self._surplus, surplus
            if before & surplus:
                self._pool.evict(before & surplus)

    def clear(self) -> None:
        """End all reservations; called when other trainers take the present ones' place."""
        with self._lock:
            self._held.clear()

    def forget_sizes(self) -> None:
        """Forget the sizes in use; called when no trainer is left that needs them."""
        with self._lock:
            self._sizes_bytes.clear()
            self._whole_sizes_bytes.clear()
            self._replica_sizes_bytes.clear()
