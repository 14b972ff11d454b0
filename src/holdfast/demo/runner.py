"""Drives one run from its first start to its last step, and deals it its failures on the way.

The trainer is a process of its own, in a session of its own, so that Ctrl-C reaches the demo alone.
Whatever ends `drive`, no trainer that it started outlives it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from holdfast.clock import Clock
from holdfast.demo import journal
from holdfast.demo.failures import Failure, Kind, strike
from holdfast.demo.progress import Display
from holdfast.errors import HoldfastError, WaitTimeoutError

_POLL_SECS = 0.005
_SILENCE_SECS_MAX = 120.0
_LEAVE_SECS_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run shall do, and what shall happen to it."""

    name: str
    folder: Path
    steps: int
    seed: int
    interval_secs: float
    failures: tuple[Failure, ...] = ()

    @property
    def run(self) -> Path:
        """The run's durable directory."""
        return self.folder / self.name

    @property
    def journal(self) -> Path:
        """What the trainers write for the demo."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def output(self) -> Path:
        """What the trainers print."""
        return self.folder / f"{self.name}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A failure that was dealt; `start` is the index of the start that it hit."""

    failure: Failure
    time: float
    pid: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One life of the trainer: when it was started, and all that it wrote."""

    spawned: float
    records: tuple[journal.Record, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """All that a run did."""

    starts: tuple[Start, ...]
    strikes: tuple[Strike, ...]


def drive(plan: Plan, display: Display, clock: Clock) -> RunLog:
    """Starts the trainer until the last step is done.

    Raises:
        HoldfastError: a trainer ended although nothing had been done to it, went silent, or did not
            leave when it was told to. No trainer lives on.
    """
    display.begin(plan.name, plan.steps)
    tail = journal.Tail(plan.journal)
    due = deque(plan.failures)
    starts: list[Start] = []
    strikes: list[Strike] = []
    while True:
        life = _Life(plan, display, clock, tail)
        strikes += [
            Strike(failure=failure, time=time, pid=pid, start=len(starts))
            for failure, time, pid in life.watch(due)
        ]
        starts.append(Start(spawned=life.spawned, records=tuple(life.records)))
        if isinstance(life.records[-1], journal.Finished):
            return RunLog(starts=tuple(starts), strikes=tuple(strikes))


class _Life:
    """One life of the trainer. Owned by the thread that drives the run."""

    def __init__(self, plan: Plan, display: Display, clock: Clock, tail: journal.Tail) -> None:
        self.records: list[journal.Record] = []
        self._plan = plan
        self._display = display
        self._clock = clock
        self._tail = tail
        self._step = -1
        self._step_secs = 0.0
        self._heard = clock.monotonic()
        self.spawned = clock.now().timestamp()
        self._process = _spawn(plan)

    def watch(self, due: deque[Failure]) -> list[tuple[Failure, float, int]]:
        """Follows the trainer to its end; returns the failures dealt, their times and targets.

        What is dealt is taken from `due`. The trainer has ended by the last one, or has finished.
        """
        dealt: list[tuple[Failure, float, int]] = []
        ended_by: Kind | None = None
        try:
            while ended_by is None and self._is_going_on():
                if not due or self._step < due[0].step:
                    self._clock.sleep(_POLL_SECS)
                    continue
                failure = due.popleft()
                dealt.append((failure, *self._deal(failure)))
                if failure.kind is not Kind.KILL_AGENT:
                    ended_by = failure.kind
            if ended_by is not None:
                self._await_end()
        finally:
            self._end()
        self._take_records()
        self._check_end(ended_by)
        return dealt

    def _is_going_on(self) -> bool:
        now = self._clock.monotonic()
        if self._take_records():
            self._heard = now
        elif now - self._heard > _SILENCE_SECS_MAX:
            raise WaitTimeoutError(
                f"{self._plan.name}: the trainer has written nothing for {_SILENCE_SECS_MAX:.0f} s"
            )
        return self._process.poll() is None

    def _take_records(self) -> bool:
        records = self._tail.read()
        self.records += records
        for record in records:
            if isinstance(record, journal.Started):
                self._tell_start(record)
            elif isinstance(record, journal.Step):
                self._step, self._step_secs = record.step, record.secs
                self._display.step(record.step, record.loss_value)
        return bool(records)

    def _deal(self, failure: Failure) -> tuple[float, int]:
        self._clock.sleep(failure.phase * min(self._step_secs, 1.0))
        pid = strike(failure.kind, self._process.pid, self._plan.run)
        time = self._clock.now().timestamp()
        self._take_records()
        self._display.tell(f"  after step {self._step}: {failure.kind.value} (pid {pid})")
        return time, pid

    def _await_end(self) -> None:
        try:
            self._process.wait(_LEAVE_SECS_MAX)
        except subprocess.TimeoutExpired as error:
            raise WaitTimeoutError(
                f"{self._plan.name}: the trainer still runs "
                f"{_LEAVE_SECS_MAX:.0f} s after its signal"
            ) from error

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _check_end(self, ended_by: Kind | None) -> None:
        last = self.records[-1] if self.records else None
        code = self._process.returncode
        match ended_by:
            case Kind.KILL:
                as_planned = code == -signal.SIGKILL
            case Kind.TERMINATE:
                as_planned = code == 0 and isinstance(last, journal.Preempted)
            case _:
                as_planned = code == 0 and isinstance(last, journal.Finished)
        if not as_planned:
            expected = "to finish" if ended_by is None else f"to end as by {ended_by.value}"
            raise HoldfastError(
                f"{self._plan.name}: expected the trainer {expected}, found exit code {code} after "
                f"step {self._step}"
            )

    def _tell_start(self, started: journal.Started) -> None:
        restored = started.restored
        if restored is None:
            self._display.tell(f"  starts at step {started.first_step} (pid {started.pid})")
            return
        sources = ", ".join(sorted(restored.sources)) or "no tier"
        self._display.tell(
            f"  resumes at step {started.first_step} (pid {started.pid}) from the checkpoint of "
            f"step {restored.step}, source: {sources}"
        )


def _spawn(plan: Plan) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "holdfast.demo.train"]
    command += ["--run", str(plan.run), "--log", str(plan.journal), "--steps", str(plan.steps)]
    command += ["--seed", str(plan.seed), "--interval-secs", str(plan.interval_secs)]
    # The proof compares bits, and on an accelerator equal bits take special settings.
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    with plan.output.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
