"""Provide time and randomness by injection.

Invariant: no other module of Holdfast reads the operating system's clock or random numbers, so
tests and the simulator replay from a seed.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
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

    def new_token(self) -> str:
        """Return 32 hexadecimal digits that cannot be guessed."""
        ...


def process_age_secs() -> float:
    """Return how long this process has run, also before Python was started."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    started_secs = int(ticks) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_secs)


class SystemClock:
    """The operating system's clock and random numbers."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    # The function itself: a training loop calls it at every step.
    monotonic = staticmethod(time.monotonic)

    def sleep(self, secs: float) -> None:
        time.sleep(secs)

    def new_token(self) -> str:
        return secrets.token_hex(16)
