"""Who was given which slot of the pool and has not filled it yet. Any thread may ask."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from holdfast.format.names import CheckpointId
from holdfast.store.slots import SlotPool

SLOTS_PER_PART = 2
"""What holds the newest checkpoint, and what the next one goes into, where each is one image."""


@dataclass(frozen=True, slots=True)
class CopyOf:
    """The copy that this host keeps of another rank's part."""

    rank: int


User = int | CopyOf
"""A rank of this host, or a copy that it keeps."""


class SlotAllocator:
    """The pool's only user.

    Free slots of sizes that no user has are given up where room is wanted.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._handed_out: dict[Hashable, str] = {}
        self._sizes_bytes: dict[Hashable, int] = {}
        self._whole_sizes_bytes: dict[int, int] = {}
        self._copy_sizes_bytes: dict[CopyOf, int] = {}

    def reserve(self, user: User, size_bytes: int, holder: Hashable = None) -> str:
        """A slot of that size, which `user` will want again; it is the holder's until returned.

        Raises:
            OutOfSpaceError, StorageError: as `SlotPool.reserve`.
        """
        holder = user if holder is None else holder
        with self._lock:
            self._sizes_bytes[user] = size_bytes
            if isinstance(user, CopyOf):
                self._copy_sizes_bytes[user] = size_bytes
            name = self._pool.reserve(
                size_bytes, set(self._handed_out.values()), set(self._sizes_bytes.values())
            )
            self._handed_out[holder] = name
            return name

    def spare(self, user: User, size_bytes: int, whole_bytes: int, count: int) -> str | None:
        """A slot for a next image; None where all would be more than two images of each part.

        `whole_bytes` is the size of an image of all that the rank saves, of `count` ranks. Those
        that did not tell yet are taken to save what this one does.
        """
        with self._lock:
            self._sizes_bytes[user] = size_bytes
            if isinstance(user, CopyOf):
                self._copy_sizes_bytes[user] = size_bytes
            else:
                self._whole_sizes_bytes[user] = whole_bytes
            unknown = max(count - len(self._whole_sizes_bytes), 0) * whole_bytes
            total = sum(self._whole_sizes_bytes.values()) + sum(self._copy_sizes_bytes.values())
            name = self._pool.spare(
                size_bytes,
                SLOTS_PER_PART * (total + unknown),
                set(self._handed_out.values()),
                set(self._sizes_bytes.values()),
            )
            if name is not None:
                self._handed_out[user] = name
            return name

    @contextlib.contextmanager
    def copying(
        self, checkpoint: CheckpointId, rank: int, filled: str | None
    ) -> Iterator[Callable[[int], str]]:
        """For a copy of a part: what reserves its slot, which is an image's or free at the end.

        `filled` is the slot that has some of it already, if it is of the size that is asked for.
        """
        holder = checkpoint, rank
        left = [filled] if filled is not None else []

        def reserve(size_bytes: int) -> str:
            if left and self._pool.slot_size_bytes(left[0]) == size_bytes:
                return left.pop()
            return self.reserve(CopyOf(rank), size_bytes, holder)

        try:
            yield reserve
        finally:
            self.returned(holder)

    def lend(self, checkpoint: CheckpointId, rank: int) -> str | None:
        """A trainer has put the copy of a part into the slot that it was given: that slot's name.

        Nobody else gets it. None where an agent that is gone has given it.
        """
        with self._lock:
            name = self._handed_out.pop(CopyOf(rank), None)
            if name is not None:
                self._handed_out[checkpoint, rank] = name
            return name

    def returned(self, holder: Hashable) -> None:
        """It has filled its slot, or will not."""
        with self._lock:
            self._handed_out.pop(holder, None)

    def clear(self) -> None:
        """Other trainers come: whatever was handed out is theirs no more."""
        with self._lock:
            self._handed_out.clear()

    def forget_sizes(self) -> None:
        """Nobody is there who would want slots of the sizes that were used."""
        with self._lock:
            self._sizes_bytes.clear()
            self._whole_sizes_bytes.clear()
            self._copy_sizes_bytes.clear()
