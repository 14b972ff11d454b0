"""Drive one run from its first start to its last step, and carry out its failures.

This module acts as the job's scheduler: it starts a trainer on each host. If one is lost, it ends
the others, which would wait for that one, and starts all of them again.

Each trainer is in a session of its own, so that only the demo receives Ctrl-C.

Invariant: when `drive` ends, even by an exception, all trainers that it started have ended.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

import msgspec
from rich.console import Console

from holdfast.clock import Clock
from holdfast.demo import journal
from holdfast.demo.failures import DemoFailureKind, Failure, strike
from holdfast.demo.plan import DemoPlan
from holdfast.errors import HoldfastError, WaitTimeoutError
from holdfast.peers.config import LOOPBACK

_POLL_SECS = 0.005
_SILENCE_SECS_MAX = 120.0
"""How long all trainers together may write no record."""
_LEAVE_SECS_MAX = 60.0
_LAST_LINE_CHARS_MAX = 300


def drive(plan: DemoPlan, display: Display, clock: Clock) -> list[list[journal.Record]]:
    """Start the trainers, again after each failure, until the last step is finished.

    Returns:
        The records of each host's trainers, over all starts.

    Raises:
        HoldfastError: A trainer ended without a planned failure, wrote no record for too long, or
            did not end after SIGTERM. All trainers have been ended.
    """
    display.begin(plan.name, plan.options.step_count)
    tails = [journal.Tail(plan.journal(host)) for host in range(plan.hosts)]
    due = deque(plan.failures)
    by_host: list[list[journal.Record]] = [[] for _ in tails]
    while True:
        life = _Life(plan, display, clock)
        life.run_until_exit(due, tails)
        for records, trainer in zip(by_host, life.trainers, strict=True):
            records += trainer.records
        if life.is_finished:
            return by_host


class _Life:
    """One start of the job until its end. Owned by the thread that drives the run."""

    def __init__(self, plan: DemoPlan, display: Display, clock: Clock) -> None:
        self.trainers: list[Trainer] = []
        self._plan = plan
        self._display = display
        self._clock = clock
        self._last_record_at = clock.monotonic()

    @property
    def is_finished(self) -> bool:
        """Whether the last step is finished."""
        return all(isinstance(trainer.last, journal.Finished) for trainer in self.trainers)

    def run_until_exit(self, due: deque[Failure], tails: Sequence[journal.Tail]) -> None:
        """Start the trainers, carry out due failures, and wait until the trainers have ended.

        Args:
            due: The failures that remain; those carried out are removed.
            tails: The journal of each host.
        """
        ended_by: Failure | None = None
        try:
            coordinator = _free_address() if self._plan.hosts > 1 else ""
            for host, tail in enumerate(tails):
                self.trainers.append(Trainer(self._plan, host, coordinator, tail))
            while ended_by is None and self._is_running():
                if not due or self._step() < due[0].step:
                    self._clock.sleep(_POLL_SECS)
                    continue
                failure = due.popleft()
                self._strike(failure)
                if failure.kind is not DemoFailureKind.KILL_AGENT:
                    ended_by = failure
            self._await_end(ended_by)
        finally:
            for trainer in self.trainers:
                trainer.end()
        self._take_records()
        self._check_end(ended_by)

    def _is_running(self) -> bool:
        now = self._clock.monotonic()
        if self._take_records():
            self._last_record_at = now
        elif now - self._last_record_at > _SILENCE_SECS_MAX:
            raise WaitTimeoutError(
                f"wait for the trainers: no journal record for {_SILENCE_SECS_MAX:.0f} s: "
                + "; ".join(map(str, self.trainers))
            )
        return all(trainer.code is None for trainer in self.trainers)

    def _step(self) -> int:
        """Return the last step that all hosts have finished."""
        return min(trainer.step for trainer in self.trainers)

    def _take_records(self) -> bool:
        has_any = False
        for trainer in self.trainers:
            records = trainer.take_records()
            has_any |= bool(records)
            for record in records:
                if isinstance(record, journal.Started):
                    self._display.show_line(f"  {self._of(trainer.host)}{record}")
                elif isinstance(record, journal.Step) and trainer.host == 0:
                    self._display.show_step(record.step, record.loss_value)
        return has_any

    def _strike(self, failure: Failure) -> None:
        plan, trainer = self._plan, self.trainers[failure.host]
        self._clock.sleep(failure.phase * min(trainer.step_secs, 1.0))
        strike(failure.kind, trainer.pid, plan.run, plan.host(failure.host), self._clock)
        self._take_records()
        where = self._of(failure.host)
        self._display.show_line(f"  after step {trainer.step}: {where}{failure.kind.value}")

    def _of(self, host: int) -> str:
        """Return the beginning of a line about a host: its name, if there are several."""
        return f"{self._plan.host(host)}: " if self._plan.hosts > 1 else ""

    def _await_end(self, ended_by: Failure | None) -> None:
        """Wait for the trainers that end by themselves; after a lost host they do not."""
        if ended_by is None:
            failed = [trainer for trainer in self.trainers if trainer.code]
            self._take_records()
            self._check(failed, "to finish")
        if ended_by is None or ended_by.kind is not DemoFailureKind.LOSE_HOST:
            for trainer in self.trainers:
                trainer.await_end()

    def _check_end(self, ended_by: Failure | None) -> None:
        expected = "to finish" if ended_by is None else f"to end as by {ended_by.kind.value}"
        odd = [each for each in self.trainers if not self._is_as_planned(each, ended_by)]
        self._check(odd, expected)

    def _check(self, odd: Sequence[Trainer], expected: str) -> None:
        if odd:
            raise HoldfastError(
                f"expected each trainer {expected}, found {'; '.join(map(str, odd))}"
            )

    def _is_as_planned(self, trainer: Trainer, ended_by: Failure | None) -> bool:
        if ended_by is None:
            return trainer.code == 0 and isinstance(trainer.last, journal.Finished)
        if ended_by.kind is DemoFailureKind.TERMINATE:
            return trainer.code == 0 and isinstance(trainer.last, journal.Preempted)
        # The other hosts' trainers were ended by `watch`, so how they ended does not matter.
        return trainer.host != ended_by.host or trainer.code == -signal.SIGKILL


def _free_address() -> str:
    """Return an unused address on loopback, for the service of `jax.distributed`."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return f"{LOOPBACK}:{probe.getsockname()[1]}"


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


class Display:
    """A line for every eighth of a run, and what happens between. Owned by the driving thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name, self._steps = "", 0

    def begin(self, name: str, steps: int) -> None:
        """Start a run; the previous one has ended."""
        self._name, self._steps = name, steps

    def show_step(self, step: int, loss: float) -> None:
        """Show that a step is finished. After a failure, steps are repeated."""
        done = step + 1
        if done == self._steps or done % max(1, self._steps // 8) == 0:
            self.show_line(f"{self._name}: step {done} of {self._steps}, loss {loss:.3f}")

    def show_line(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
