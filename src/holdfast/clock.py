"""Provide time and randomness by injection.

Invariant: no other module of Holdfast reads the operating system's clock or random numbers, so
tests and the simulator replay from a seed.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """The source of time and randomness that Holdfast's modules are given."""

    def now(self) -> datetime:
        """Return the wall-clock time as a timezone-aware datetime in UTC."""
        ...

    def monotonic(self) -> float:
        """Return the seconds of a clock that never goes backwards; its zero is arbitrary."""
        ...

    def sleep(self, secs: float) -> None:
        """Block the calling thread for `secs` seconds."""
        ...

    def token(self) -> str:
        """Return 32 hexadecimal digits that cannot be guessed."""
        ...


class SystemClock:
    """The operating system's clock and random numbers."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, secs: float) -> None:
        time.sleep(secs)

    def token(self) -> str:
        return secrets.token_hex(16)
