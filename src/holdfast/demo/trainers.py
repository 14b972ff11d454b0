"""Start the trainer process of one host, follow it by its journal, and end it.

The process is in a session of its own, so that only the demo receives Ctrl-C.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from holdfast.demo import journal
from holdfast.demo.plan import DemoPlan
from holdfast.errors import WaitTimeoutError

_LEAVE_SECS_MAX = 60.0
_LAST_LINE_CHARS_MAX = 300


class Trainer:
    """One process of one host's trainer. Owned by the thread that drives the run.

    Attributes:
        host: The index of its host.
        records: All records that it has written.
        step: The last step that it has finished; -1 before the first.
        step_secs: The duration of that step.
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
        """The id of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    @property
    def last(self) -> journal.Record | None:
        """The last record that it has written."""
        return self.records[-1] if self.records else None

    def take_records(self) -> list[journal.Record]:
        """Return the records that it has written since the last call."""
        records = self._tail.read()
        self.records += records
        for record in records:
            if isinstance(record, journal.Step):
                self.step, self.step_secs = record.step, record.secs
        return records

    def await_end(self) -> None:
        """Wait until the process has ended.

        Raises:
            WaitTimeoutError: It still runs after `_LEAVE_SECS_MAX`.
        """
        try:
            self._process.wait(_LEAVE_SECS_MAX)
        except subprocess.TimeoutExpired as error:
            raise WaitTimeoutError(
                f"wait for {self._name}: expected the trainer to end, found it running after "
                f"{_LEAVE_SECS_MAX:.0f} s"
            ) from error

    def end(self) -> None:
        """Kill the process if it still runs, and reap it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def __str__(self) -> str:
        """Return its state, for messages."""
        state = "running" if self.code is None else f"exit code {self.code}"
        return f"{self._name}: {state} after step {self.step}{self._last_line()}"

    def _last_line(self) -> str:
        if not self.code or self.code < 0:
            return ""
        lines = self._output.read_text(errors="replace").strip().splitlines()
        return f"; its last line: {lines[-1][-_LAST_LINE_CHARS_MAX:]}" if lines else ""


def _spawn(plan: DemoPlan, host: int, coordinator: str) -> subprocess.Popen[bytes]:
    options = msgspec.json.encode(plan.trainer(host, coordinator)).decode()
    with plan.output(host).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.demo.train", options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=plan.environment(host),
            start_new_session=True,
        )
