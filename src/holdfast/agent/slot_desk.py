"""Who was given which slot of the pool and has not filled it yet. Any thread may ask."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator

from holdfast.format.names import CheckpointId
from holdfast.store.slots import SlotPool

SLOTS_PER_RANK = 2
"""What holds the newest checkpoint, and what the next one goes into, where each is one image."""


class SlotDesk:
    """The pool's only user.

    A holder is a rank of this host, or a copy of another host's part. Free slots of sizes that no
    holder uses are given up where room is wanted.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._handed_out: dict[Hashable, str] = {}
        self._sizes_bytes: dict[Hashable, int] = {}
        self._whole_sizes_bytes: dict[int, int] = {}

    def reserve(self, holder: Hashable, size_bytes: int, user: Hashable = None) -> str:
        """A slot of that size; `user` will want that size again. Errors as `SlotPool.reserve`."""
        with self._lock:
            self._sizes_bytes[holder if user is None else user] = size_bytes
            name = self._pool.reserve(
                size_bytes, set(self._handed_out.values()), set(self._sizes_bytes.values())
            )
            self._handed_out[holder] = name
            return name

    def spare(self, rank: int, size_bytes: int, whole_bytes: int, count: int) -> str | None:
        """A slot for a rank's next image; None where all would be more than two images a rank.

        `whole_bytes` is the size of an image of all that the rank saves, of `count` ranks. Those
        that did not tell yet are taken to save what this one does.
        """
        with self._lock:
            self._sizes_bytes[rank] = size_bytes
            self._whole_sizes_bytes[rank] = whole_bytes
            unknown = max(count - len(self._whole_sizes_bytes), 0)
            total = sum(self._whole_sizes_bytes.values()) + unknown * whole_bytes
            name = self._pool.spare(
                size_bytes,
                SLOTS_PER_RANK * total,
                set(self._handed_out.values()),
                set(self._sizes_bytes.values()),
            )
            if name is not None:
                self._handed_out[rank] = name
            return name

    @contextlib.contextmanager
    def copying(self, checkpoint: CheckpointId, rank: int) -> Iterator[Callable[[int], str]]:
        """For a copy of a part: what reserves its slot, which is filled or free at the end."""
        holder = checkpoint, rank
        try:
            yield lambda size_bytes: self.reserve(holder, size_bytes, ("copy", rank))
        finally:
            self.returned(holder)

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
