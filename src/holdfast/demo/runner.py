"""Drive one run from its first start to its last step, and carry out its failures.

This module acts as the job's scheduler: it starts a trainer on each host. If one is lost, it ends
the others, which would wait for that one, and starts all of them again.

Invariant: when `drive` ends, even by an exception, all trainers that it started have ended.
"""

from __future__ import annotations

import signal
import socket
from collections import deque
from collections.abc import Sequence

from holdfast.clock import Clock
from holdfast.demo import journal
from holdfast.demo.failures import DemoFailureKind, Failure, strike
from holdfast.demo.plan import DemoPlan
from holdfast.demo.progress import Display
from holdfast.demo.trainers import Trainer
from holdfast.errors import HoldfastError, WaitTimeoutError
from holdfast.peers.config import LOOPBACK

_POLL_SECS = 0.005
_SILENCE_SECS_MAX = 120.0
"""How long all trainers together may write no record."""


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
