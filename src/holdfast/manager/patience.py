"""Whether a save that may wait for a later step had better, because a slot will soon be ready."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from holdfast.clock import Clock

PREPARE_SECS = 30.0
"""No slot takes longer to be made ready; the first one is mapped, locked and pinned."""
FREE_SECS = 2.0
"""How long an earlier save, whose end frees a slot, is waited for, or one step."""


class SlotPatience:
    """The saver's thread prepares slots; the training thread asks whether to wait for them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._preparing_at: float | None = None
        self._put_off_at: float | None = None

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """A slot is being made ready."""
        self._preparing_at = self._clock.monotonic()
        try:
            yield
        finally:
            self._preparing_at = None

    def note_taken(self) -> None:
        """A save was taken: the next one may wait anew."""
        self._put_off_at = None

    def for_preparing(self) -> bool:
        """Whether a slot is being made ready, and not for too long."""
        begun_at = self._preparing_at
        return begun_at is not None and self._clock.monotonic() - begun_at < PREPARE_SECS

    def for_earlier_saves(self) -> bool:
        """Whether to wait for saves that are on their way, and have a slot each."""
        now = self._clock.monotonic()
        if self._put_off_at is None:
            self._put_off_at = now
        return now - self._put_off_at < FREE_SECS
