"""Decide whether to defer a save to a later step because a slot will soon be ready."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from holdfast.clock import Clock

PREPARE_SECS = 30.0
"""How long to defer a save while a slot is prepared; the first one is mapped, locked and pinned."""
FREE_SECS = 2.0
"""How long to defer a save while waiting for a free slot, which the end of an earlier save frees.

One step is always waited.
"""


class SlotPatience:
    """The time limits of deferring. The saver's thread prepares slots, the training thread asks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._preparing_at: float | None = None
        self._put_off_at: float | None = None

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Mark the time of the block, in which a slot is prepared."""
        self._preparing_at = self._clock.monotonic()
        try:
            yield
        finally:
            self._preparing_at = None

    def note_taken(self) -> None:
        """Record an accepted save: the time limit starts again for the next one."""
        self._put_off_at = None

    def for_preparing(self) -> bool:
        """Return whether a slot has been in preparation for less than `PREPARE_SECS`."""
        begun_at = self._preparing_at
        return begun_at is not None and self._clock.monotonic() - begun_at < PREPARE_SECS

    def for_earlier_saves(self) -> bool:
        """Return whether to wait for saves in progress, each of which holds a slot."""
        now = self._clock.monotonic()
        if self._put_off_at is None:
            self._put_off_at = now
        return now - self._put_off_at < FREE_SECS
