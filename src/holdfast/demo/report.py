"""Compute the report of the demo, only from the journals and events of its two runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from holdfast.demo import journal
from holdfast.demo.failures import DemoFailureKind
from holdfast.demo.runner import RunLog, Strike
from holdfast.observe.events.reader import read_events
from holdfast.observe.events.schema import CheckpointCommitted, RamUnavailable
from holdfast.store.location import RunLocation

_LAST_STEPS = 16

ByHost: TypeAlias = Sequence[Sequence[journal.Record]]
"""The records of each host's trainers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """One failure and its cost.

    Attributes:
        kind: What the failure did.
        host: The name of the host that it hit.
        pid: The process that was signalled; the first one if a host was lost.
        last_step: The last step finished before the failure.
        next_step: The step finished next after it.
        steps_lost: The finished steps that had to be repeated.
        recovery_secs: The time until the next step was finished, from the restart of the trainers;
            from the failure if the trainers survived it.
        restore_secs: The part of it spent reading the state, on the slowest host; None if no state
            was read.
        restored_step: The step of the restored checkpoint; None if no state was read.
        sources: The bytes of the state by tier, of all hosts together; None if no state was read.
        skipped: The checkpoints and copies that were skipped, with the reasons.
    """

    kind: DemoFailureKind
    host: str
    pid: int
    last_step: int
    next_step: int
    steps_lost: int
    recovery_secs: float
    restore_secs: float | None
    restored_step: int | None
    sources: dict[str, int] | None
    skipped: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which results of the two runs are equal in every bit, on each of their hosts."""

    params: bool
    opt_state: bool
    rng: bool
    batches: bool
    equal_losses: int
    steps: int

    @property
    def holds(self) -> bool:
        """Whether the interrupted run equals the uninterrupted one in every bit."""
        return (
            self.params
            and self.opt_state
            and self.rng
            and self.batches
            and self.equal_losses == self.steps
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The results of the demo. The times are those of the interrupted run.

    `save_calls_secs` and `training_secs` are those of the host whose calls of `save` took longest.
    """

    seed: int
    hosts: int
    steps: int
    failures: list[FailureReport]
    checkpoints: int
    interval_secs_p50: float | None
    interval_secs_p95: float | None
    save_calls_secs: float
    training_secs: float
    first_loss: float
    last_loss: float
    """The mean over the last 16 steps, because that of a single step depends on its batch."""
    identity: Identity


def make_report(
    seed: int, interrupted: RunLog, uninterrupted: RunLog, commits: Sequence[tuple[int, float]]
) -> DemoReport:
    """Return the report; `commits` are those of the interrupted run, see `read_commits`."""
    by_host = _records(interrupted)
    save_secs, training_secs = max(map(_times_secs, by_host))
    steps = _steps(by_host[0])
    gaps = intervals_secs(commits)
    return DemoReport(
        seed=seed,
        hosts=len(by_host),
        steps=1 + max(step.step for step in steps),
        failures=[_failure_report(interrupted, strike) for strike in interrupted.strikes],
        checkpoints=len(commits),
        interval_secs_p50=percentile(gaps, 50),
        interval_secs_p95=percentile(gaps, 95),
        save_calls_secs=save_secs,
        training_secs=training_secs,
        first_loss=steps[0].loss_value,
        last_loss=float(np.mean([step.loss_value for step in steps[-_LAST_STEPS:]])),
        identity=compare(by_host, _records(uninterrupted)),
    )


def compare(one: ByHost, other: ByHost) -> Identity:
    """Compare the records of two runs, host by host.

    A step that was done twice counts with both results. Hosts of one run that differ in a
    replicated result count as a difference too.
    """
    losses, other_losses = _by_step(one, "loss"), _by_step(other, "loss")
    steps = losses.keys() | other_losses.keys()
    ends = [_finished(records) for records in (*one, *other)]
    own_ends = [[_finished(records) for records in run] for run in (one, other)]
    return Identity(
        params=len({end.params for end in ends}) == 1,
        opt_state=len({end.opt_state for end in ends}) == 1,
        # A host may have generators of its own.
        rng=[end.rng for end in own_ends[0]] == [end.rng for end in own_ends[1]],
        batches=_data(own_ends[0]) == _data(own_ends[1])
        and _by_step(one, "batch") == _by_step(other, "batch"),
        equal_losses=sum(_is_equal(losses.get(step), other_losses.get(step)) for step in steps),
        steps=len(steps),
    )


def read_commits(run: str) -> list[tuple[int, float]]:
    """Return (attempt, time) of each checkpoint that a run committed, ordered by time.

    Commits by a later recovery are left out: their times do not reflect the interval of saving.
    """
    commits = [
        (event.attempt, event.time.timestamp())
        for event in read_events(RunLocation(run).folder, CheckpointCommitted)
        if event.by != "recovery"
    ]
    return sorted(commits, key=lambda commit: commit[1])


def read_ram_troubles(run: str) -> list[str]:
    """Return why the hosts could not store checkpoints in RAM, each reason once."""
    return sorted({event.reason for event in read_events(RunLocation(run).folder, RamUnavailable)})


def intervals_secs(commits: Iterable[tuple[int, float]]) -> list[float]:
    """Return the seconds from each commit to the next one of the same attempt.

    Intervals between attempts are left out, because no trainer ran during a part of them.
    """
    last: dict[int, float] = {}
    gaps = []
    for attempt, time in commits:
        if attempt in last:
            gaps.append(time - last[attempt])
        last[attempt] = time
    return gaps


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the interpolated percentile; None if there are no values."""
    return float(np.percentile(values, percent)) if values else None


def _failure_report(run: RunLog, strike: Strike) -> FailureReport:
    trainer_survives = strike.failure.kind is DemoFailureKind.KILL_AGENT
    before = run.starts[strike.start].by_host
    # The hosts may be at different points of a step when one is lost, so all of them count.
    hit = before[strike.failure.host] if trainer_survives else _all(before)
    last_step = max(s.step for s in _steps(hit) if not trainer_survives or s.time <= strike.time)
    if trainer_survives:
        following, since = hit, strike.time
        restored: list[journal.Restored] = []
    else:
        start = run.starts[strike.start + 1]
        following, since = _all(start.by_host), start.spawned
        started = [r for r in following if isinstance(r, journal.Started)]
        restored = [one.restored for one in started if one.restored is not None]
    # All hosts finish a step together, so the first record of it gives its time.
    next_step = min((s for s in _steps(following) if s.time > since), key=lambda s: s.time)
    return FailureReport(
        kind=strike.failure.kind,
        host=strike.host,
        pid=strike.pid,
        last_step=last_step,
        next_step=next_step.step,
        steps_lost=last_step + 1 - next_step.step if not trainer_survives else 0,
        recovery_secs=next_step.time - since,
        restore_secs=max((one.secs for one in restored), default=None),
        restored_step=restored[0].step if restored else None,
        sources=_summed([one.sources for one in restored]) if restored else None,
        skipped=sorted({reason for one in restored for reason in one.skipped}),
    )


def _records(run: RunLog) -> ByHost:
    """Return the records of each host's trainers, over all starts."""
    hosts = range(len(run.starts[0].by_host))
    return [[r for start in run.starts for r in start.by_host[host]] for host in hosts]


def _all(by_host: ByHost) -> list[journal.Record]:
    return [record for records in by_host for record in records]


def _steps(records: Iterable[journal.Record]) -> list[journal.Step]:
    return [record for record in records if isinstance(record, journal.Step)]


def _times_secs(records: Sequence[journal.Record]) -> tuple[float, float]:
    """Return the seconds in calls of `save`, and those of the whole training."""
    save_secs = sum(record.secs for record in records if isinstance(record, journal.Saved))
    return save_secs, save_secs + sum(step.secs for step in _steps(records))


def _summed(sources: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in sources:
        total.update(one)
    return dict(total)


def _by_step(by_host: ByHost, field: str) -> dict[int, list[set[str]]]:
    """Return for each step the results on each host."""
    outcomes: dict[int, list[set[str]]] = {}
    for host, records in enumerate(by_host):
        for step in _steps(records):
            on_hosts = outcomes.setdefault(step.step, [set() for _ in by_host])
            on_hosts[host].add(getattr(step, field))
    return outcomes


def _is_equal(one: list[set[str]] | None, other: list[set[str]] | None) -> bool:
    """Return whether all hosts of both runs have the same single result, in every repetition."""
    found = [*(one or [set()]), *(other or [set()])]
    return all(len(outcomes) == 1 for outcomes in found) and len(set.union(*found)) == 1


def _data(ends: Iterable[journal.Finished]) -> list[tuple[str, int]]:
    return [(end.batches, end.tokens_seen) for end in ends]


def _finished(records: Iterable[journal.Record]) -> journal.Finished:
    return next(record for record in records if isinstance(record, journal.Finished))
