"""The trainer process of one host: started, followed by its journal, ended.

It is in a session of its own, so that Ctrl-C reaches the demo alone.
"""

from __future__ import annotations

import subprocess
import sys

from holdfast.demo import journal
from holdfast.demo.plan import DemoPlan
from holdfast.errors import WaitTimeoutError

_LEAVE_SECS_MAX = 60.0
_LAST_LINE_CHARS_MAX = 300


class Trainer:
    """One life of one host's trainer. Owned by the thread that drives the run.

    Attributes:
        host: the index of its host.
        records: all that it has written.
        step: the last step that it has finished; -1 before the first.
    """

    def __init__(self, plan: DemoPlan, host: int, coordinator: str, tail: journal.Tail) -> None:
        self.host = host
        self.records: list[journal.Record] = []
        self.step = -1
        self.step_secs = 0.0
        self._name = plan.name if plan.hosts == 1 else f"{plan.name}, {plan.host(host)}"
        self._output = plan.output(host)
        self._tail = tail
        self._process = _spawn(plan, host, coordinator)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def last(self) -> journal.Record | None:
        """The last thing that it has written."""
        return self.records[-1] if self.records else None

    def take_records(self) -> list[journal.Record]:
        """What it has written since the last call."""
        records = self._tail.read()
        self.records += records
        for record in records:
            if isinstance(record, journal.Step):
                self.step, self.step_secs = record.step, record.secs
        return records

    def await_end(self) -> None:
        """Waits until it has ended.

        Raises:
            WaitTimeoutError: it still runs.
        """
        try:
            self._process.wait(_LEAVE_SECS_MAX)
        except subprocess.TimeoutExpired as error:
            raise WaitTimeoutError(
                f"{self._name}: the trainer still runs {_LEAVE_SECS_MAX:.0f} s after it was to end"
            ) from error

    def end(self) -> None:
        """Ends it, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def __str__(self) -> str:
        """How it stands, for messages."""
        state = "running" if self.code is None else f"exit code {self.code}"
        return f"{self._name}: {state} after step {self.step}{self._last_line()}"

    def _last_line(self) -> str:
        if not self.code or self.code < 0:
            return ""
        lines = self._output.read_text(errors="replace").strip().splitlines()
        return f"; its last words: {lines[-1][-_LAST_LINE_CHARS_MAX:]}" if lines else ""


def _spawn(plan: DemoPlan, host: int, coordinator: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "holdfast.demo.train"]
    command += ["--run", str(plan.run), "--log", str(plan.journal(host))]
    command += ["--steps", str(plan.steps), "--seed", str(plan.seed)]
    command += ["--interval-secs", str(plan.interval_secs)]
    if plan.hosts > 1:
        command += ["--hosts", str(plan.hosts), "--host", str(host), "--coordinator", coordinator]
    with plan.output(host).open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=plan.environment(host),
            start_new_session=True,
        )
