"""What the demo found: computed from the journals and events of its two runs, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from holdfast.demo import journal
from holdfast.demo.failures import Kind
from holdfast.demo.runner import RunLog, Strike

_LAST_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """One failure and what it cost.

    Attributes:
        kind: what was done, to whom.
        pid: the process that the signal went to.
        last_step: the last step finished before.
        next_step: the step that was finished next.
        steps_lost: finished steps that had to be done again.
        recovery_secs: until the next step was finished, counted from the new start of the trainer;
            where the trainer ran on, from the failure.
        restore_secs: the part of it that reading the state took; None where it was not read.
        sources: bytes of the state by the tier they came from; None where it was not read.
        skipped: checkpoints and copies that were passed over, and why.
    """

    kind: Kind
    pid: int
    last_step: int
    next_step: int
    steps_lost: int
    recovery_secs: float
    restore_secs: float | None
    sources: dict[str, int] | None
    skipped: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the two runs have in common, bit for bit."""

    params: bool
    opt_state: bool
    rng: bool
    batches: bool
    equal_losses: int
    steps: int

    @property
    def holds(self) -> bool:
        """Whether the interrupted run is the uninterrupted one in every bit."""
        return (
            self.params
            and self.opt_state
            and self.rng
            and self.batches
            and self.equal_losses == self.steps
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the demo found; the times are those of the interrupted run."""

    seed: int
    steps: int
    failures: list[FailureReport]
    checkpoints: int
    interval_secs_p50: float | None
    interval_secs_p95: float | None
    save_calls_secs: float
    training_secs: float
    first_loss: float
    last_loss: float
    """The mean over the last 16 steps: a single step's depends on its batch."""
    identity: Identity


def make_report(
    seed: int, interrupted: RunLog, uninterrupted: RunLog, commits: Sequence[tuple[int, float]]
) -> Report:
    """Puts the report together; `commits` are those of the interrupted run, see `read_commits`."""
    records = [record for start in interrupted.starts for record in start.records]
    save_secs = sum(record.secs for record in records if isinstance(record, journal.Saved))
    steps = _steps(records)
    gaps = intervals_secs(commits)
    return Report(
        seed=seed,
        steps=1 + max(step.step for step in steps),
        failures=[_failure_report(interrupted, strike) for strike in interrupted.strikes],
        checkpoints=len(commits),
        interval_secs_p50=percentile(gaps, 50),
        interval_secs_p95=percentile(gaps, 95),
        save_calls_secs=save_secs,
        training_secs=save_secs + sum(step.secs for step in steps),
        first_loss=steps[0].loss_value,
        last_loss=float(np.mean([step.loss_value for step in steps[-_LAST_STEPS:]])),
        identity=compare(records, [r for start in uninterrupted.starts for r in start.records]),
    )


def compare(one: Sequence[journal.Record], other: Sequence[journal.Record]) -> Identity:
    """Compares all that two runs wrote. A step done twice counts with both outcomes."""
    losses, other_losses = _by_step(one, "loss"), _by_step(other, "loss")
    steps = losses.keys() | other_losses.keys()
    end, other_end = _finished(one), _finished(other)
    return Identity(
        params=end.params == other_end.params,
        opt_state=end.opt_state == other_end.opt_state,
        rng=end.rng == other_end.rng,
        batches=end.batches == other_end.batches
        and end.tokens_seen == other_end.tokens_seen
        and _by_step(one, "batch") == _by_step(other, "batch"),
        equal_losses=sum(losses.get(step) == other_losses.get(step) for step in steps),
        steps=len(steps),
    )


def read_commits(run: Path) -> list[tuple[int, float]]:
    """The attempts and times of the checkpoints that a run committed, by time.

    Those are left out that a later recovery committed: their time tells nothing of their interval.
    """
    commits = []
    for path in sorted((run / "events").glob("*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            # A process killed while it wrote leaves a line without an end.
            event = json.loads(line) if line.endswith(b"\n") else {}
            if event.get("event") == "committed" and event.get("by") != "recovery":
                time = datetime.fromisoformat(event["time"]).timestamp()
                commits.append((int(event["attempt"]), time))
    return sorted(commits, key=lambda commit: commit[1])


def intervals_secs(commits: Iterable[tuple[int, float]]) -> list[float]:
    """Seconds from each commit to the next of the same attempt: time without a trainer is out."""
    last: dict[int, float] = {}
    gaps = []
    for attempt, time in commits:
        if attempt in last:
            gaps.append(time - last[attempt])
        last[attempt] = time
    return gaps


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile, interpolated; None where there are no values."""
    return float(np.percentile(values, percent)) if values else None


def _failure_report(run: RunLog, strike: Strike) -> FailureReport:
    steps = _steps(run.starts[strike.start].records)
    if strike.failure.kind is Kind.KILL_AGENT:
        last_step = max(s.step for s in steps if s.time <= strike.time)
        next_step = min((s for s in steps if s.time > strike.time), key=lambda s: s.time)
        return FailureReport(
            kind=strike.failure.kind,
            pid=strike.pid,
            last_step=last_step,
            next_step=next_step.step,
            steps_lost=0,
            recovery_secs=next_step.time - strike.time,
            restore_secs=None,
            sources=None,
            skipped=[],
        )
    following = run.starts[strike.start + 1]
    started = next(r for r in following.records if isinstance(r, journal.Started))
    restored = started.restored
    next_step = _steps(following.records)[0]
    return FailureReport(
        kind=strike.failure.kind,
        pid=strike.pid,
        last_step=steps[-1].step,
        next_step=next_step.step,
        steps_lost=steps[-1].step + 1 - started.first_step,
        recovery_secs=next_step.time - following.spawned,
        restore_secs=restored.secs if restored else None,
        sources=dict(restored.sources) if restored else None,
        skipped=restored.skipped if restored else [],
    )


def _steps(records: Iterable[journal.Record]) -> list[journal.Step]:
    return [record for record in records if isinstance(record, journal.Step)]


def _by_step(records: Iterable[journal.Record], field: str) -> dict[int, set[str]]:
    outcomes: dict[int, set[str]] = {}
    for step in _steps(records):
        outcomes.setdefault(step.step, set()).add(getattr(step, field))
    return outcomes


def _finished(records: Iterable[journal.Record]) -> journal.Finished:
    return next(record for record in records if isinstance(record, journal.Finished))
