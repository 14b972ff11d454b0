"""Time and randomness, injected: nothing else in Holdfast asks the operating system for either."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What Holdfast needs of time and chance."""

    def now(self) -> datetime:
        """The wall time, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes backwards."""
        ...

    def sleep(self, secs: float) -> None:
        """Blocks the calling thread for `secs` seconds."""
        ...

    def token(self) -> str:
        """32 hexadecimal digits that nobody can guess."""
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
