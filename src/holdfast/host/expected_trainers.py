"""The processes that will attach to the agent once they have met the other hosts of their job.

The other hosts have this agent's address from then on, so an agent that left now, and was replaced
by another one, would not be reached by them.
"""

from __future__ import annotations

import os
import select

from holdfast.clock import Clock

EXPECTED_SECS = 900.0
"""How long to wait for a process that lives and does not attach; meeting takes less."""


class ExpectedTrainers:
    """Owned by the event loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._processes: dict[int, tuple[int, float]] = {}
        """By process id: its pidfd, and the monotonic time until which it is awaited."""

    def add_process(self, pid: int) -> None:
        """Await that the process attaches."""
        self.remove_process(pid)
        # A process that has ended meanwhile is not awaited, nor one that this agent cannot see.
        if pid > 0:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            self._processes[pid] = fd, self._clock.monotonic() + EXPECTED_SECS

    def remove_process(self, pid: int) -> None:
        """Await the process no longer: it has attached, or ended."""
        found = self._processes.pop(pid, None)
        if found is not None:
            os.close(found[0])

    def has_any(self) -> bool:
        """Return whether a process is awaited that still runs."""
        for pid, (fd, until_secs) in list(self._processes.items()):
            ended, _, _ = select.select([fd], [], [], 0)
            if ended or self._clock.monotonic() >= until_secs:
                self.remove_process(pid)
        return bool(self._processes)

    def close(self) -> None:
        """Await nothing."""
        for pid in list(self._processes):
            self.remove_process(pid)
