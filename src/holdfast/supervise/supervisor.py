"""Start the command, and start it again when it fails."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from holdfast.clock import Clock
from holdfast.environment import RESTART_VARIABLE, SUPERVISED_VARIABLE
from holdfast.supervise.command import ENDING, Child, Signals, Starts
from holdfast.supervise.drain import Agents
from holdfast.supervise.ends import EndCause, cause_of
from holdfast.trainer.process.end_report import reported_ends

NOTICE_SECS = 0.25
"""How often to look for the agents of the command's processes."""
BACKOFF_SECS_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of the command's last process.

    Attributes:
        code: Its exit code; 128 + N if signal N ended it.
        cause: Why it has ended.
        started: When it was started.
    """

    code: int
    cause: EndCause
    started: datetime


class Supervisor:
    """Start the command, and restart it when it fails.

    Args:
        starts: Starts the command.
        signals: The received signals, which are forwarded to the command.
        agents: The agents of the command's processes.
        clock: The clock.
        note: Shows one line to the user.
    """

    def __init__(
        self,
        starts: Starts,
        signals: Signals,
        agents: Agents,
        clock: Clock,
        note: Callable[[str], None],
    ) -> None:
        self._starts = starts
        self._signals = signals
        self._agents = agents
        self._clock = clock
        self._note = note

    def run(self, max_restarts: int) -> Ended:
        """Run the command until it ends by itself or by a signal, or its restarts are used up."""
        stalled_count = 0
        for restart_count in range(max_restarts + 1):
            child, ended = self._run_once(restart_count)
            if restart_count == max_restarts or self._is_over(ended):
                break
            stalled_count = 0 if self._starts.has_trained else stalled_count + 1
            secs = min(BACKOFF_SECS_MAX, 0.5 * 2 ** (stalled_count - 1)) if stalled_count else 0.0
            self._note(
                f"holdfast run: exit code {ended.code}; restart {restart_count + 1} of "
                f"{max_restarts} in {secs:g} s"
            )
            child.end_rest(self._clock)
            if not self._rested(secs):
                cause = cause_of(ended.code, (), self._signals.received)
                return dataclasses.replace(ended, cause=cause)
        return ended

    def _run_once(self, restart_count: int) -> tuple[Child, Ended]:
        started = self._clock.now()
        with tempfile.TemporaryDirectory(prefix="holdfast-run-") as folder:
            own = {RESTART_VARIABLE: str(restart_count), SUPERVISED_VARIABLE: folder}
            environment = os.environ | own
            with self._signals.passed_on(lambda: self._starts.start(environment)) as child:
                code = None
                while code is None:
                    self._agents.note_agent(child.pid)
                    code = child.wait(NOTICE_SECS)
                    self._starts.attend(child)
            reports = [*reported_ends(Path(folder))]
        cause = cause_of(code, reports, self._signals.received)
        return child, Ended(code=code, cause=cause, started=started)

    def _is_over(self, ended: Ended) -> bool:
        """Return whether the command is not to be started again here."""
        is_stopped = not ENDING.isdisjoint(self._signals.received)
        return ended.code == 0 or is_stopped or ended.code - 128 in self._signals.received

    def _rested(self, secs: float) -> bool:
        """Wait before a restart; return False if a signal interrupts that."""
        deadline = self._clock.monotonic() + secs
        while self._clock.monotonic() < deadline:
            if self._signals.is_ending:
                return False
            self._clock.sleep(0.05)
        return True
