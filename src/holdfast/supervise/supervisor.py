"""Start the command, and start it again when it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from holdfast.clock import Clock
from holdfast.supervise.command import Child, Signals
from holdfast.supervise.drain import Agents

RESTART_VARIABLE = "HOLDFAST_RESTART_COUNT"
NOTICE_SECS = 0.25
"""How often to look for the agents of the command's processes."""
BACKOFF_SECS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The last process of the command: its exit code and the time of its start."""

    code: int
    started: datetime


class Supervisor:
    """Start the command, and restart it when it fails.

    Args:
        command: The program and its arguments.
        signals: The received signals, which are forwarded to the command.
        agents: The agents of the command's processes.
        clock: The clock.
        note: Shows one line to the user.
    """

    def __init__(
        self,
        command: Sequence[str],
        signals: Signals,
        agents: Agents,
        clock: Clock,
        note: Callable[[str], None],
    ) -> None:
        self._command = command
        self._signals = signals
        self._agents = agents
        self._clock = clock
        self._note = note

    def run(self, max_restarts: int) -> Ended:
        """Run the command until it succeeds, a signal ends it, or its restarts are used up."""
        for restart_count in range(max_restarts + 1):
            child, ended = self._run_once(restart_count)
            if ended.code == 0 or restart_count == max_restarts or self._is_over(ended.code):
                break
            secs = min(BACKOFF_SECS_MAX, 0.5 * 2**restart_count)
            self._note(
                f"holdfast run: exit code {ended.code}; restart {restart_count + 1} of "
                f"{max_restarts} in {secs:g} s"
            )
            child.end_rest(self._clock)
            if not self._rested(secs):
                break
        return ended

    def _run_once(self, restart_count: int) -> tuple[Child, Ended]:
        started = self._clock.now()
        environment = os.environ | {RESTART_VARIABLE: str(restart_count)}
        with self._signals.passed_on(lambda: Child(self._command, environment)) as child:
            code = None
            while code is None:
                self._agents.note_agent(child.pid)
                code = child.wait(NOTICE_SECS)
        return child, Ended(code, started)

    def _is_over(self, code: int) -> bool:
        """Return whether a forwarded signal requested the command's end, or ended it."""
        return self._signals.is_ending or code - 128 in self._signals.received

    def _rested(self, secs: float) -> bool:
        """Wait before a restart; return False if a signal interrupts that."""
        deadline = self._clock.monotonic() + secs
        while self._clock.monotonic() < deadline:
            if self._signals.is_ending:
                return False
            self._clock.sleep(0.05)
        return True
