"""Simulate a training on a cluster that fails: what its checkpoints cost, and what they save.

Event-driven and seeded, so that two settings can be compared under the same failures. Time is
continuous; a step is short beside all durations. Failures of each kind are a Poisson process. A
checkpoint pauses the training for its cost, and counts once it has reached its tier.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import InvalidArgumentError

FAILURES_MAX = 1_000_000
"""A simulation with more failures would take hours."""
KINDS = ("process", "host")
"""Kinds that a tier may survive also where the cluster has no such failures."""
HALVINGS = 60
"""Of a search for the work done in a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKind:
    """A kind of failure of the whole job.

    Attributes:
        name: `process`, `host` or another name.
        per_hour: How many are expected in an hour, of all hosts together.
    """

    name: str
    per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSetting:
    """A tier, and how often it gets a checkpoint.

    Attributes:
        name: Its name.
        interval_secs: The training time from one checkpoint to the next.
        cost_secs: By how much a checkpoint lengthens the training.
        secs: How long it takes until it can be restored.
        restore_secs: How long a restore from it takes.
        survives: The kinds of failures that leave its checkpoints.
    """

    name: str
    interval_secs: float
    cost_secs: float
    secs: float = 0.0
    restore_secs: float = 0.0
    survives: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster: the kinds of its failures, and the time from one to the first step after it.

    Attributes:
        failures: The kinds of failures.
        restart_secs: The time without the restore.
    """

    failures: Sequence[FailureKind]
    restart_secs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where the time of a simulated training went, in seconds; the four parts add up to it.

    Attributes:
        wall_secs: The whole time.
        productive_secs: Steps that counted.
        redone_secs: Steps that were lost.
        saving_secs: The cost of checkpoints.
        restart_secs: Restarts and restores.
        failures: The number of failures.
    """

    wall_secs: float
    productive_secs: float
    redone_secs: float
    saving_secs: float
    restart_secs: float
    failures: int

    @property
    def goodput(self) -> float:
        """The productive share."""
        return self.productive_secs / self.wall_secs


def simulate(
    cluster: Cluster, tiers: Sequence[TierSetting], *, hours: float, seed: int = 0
) -> Outcome:
    """Simulate a training of that wall time.

    Args:
        cluster: The failures and the time of a restart.
        tiers: The tiers; equal restores are made from the first of them.
        hours: The wall time.
        seed: Determines the times of the failures, whatever the tiers.

    Raises:
        InvalidArgumentError: An argument is out of range.
    """
    _check(cluster, tiers, hours)
    training = _Training(cluster, tiers, hours * 3600)
    for time_secs, kind in _failures(cluster, hours * 3600, seed):
        training.run_until(time_secs)
        training.lose_work(kind)
    training.run_until(hours * 3600)
    return training.outcome()


def _check(cluster: Cluster, tiers: Sequence[TierSetting], hours: float) -> None:
    if isinstance(tiers, TierSetting):
        raise InvalidArgumentError("simulate: expected tiers to be a list, found one TierSetting")
    _check_number("hours", hours, is_above_zero=True)
    _check_number("restart_secs", cluster.restart_secs)
    for kind in cluster.failures:
        _check_number(f"per_hour of {kind.name}", kind.per_hour)
    kinds = {*KINDS, *(kind.name for kind in cluster.failures)}
    for tier in tiers:
        _check_number(f"interval_secs of {tier.name}", tier.interval_secs, is_above_zero=True)
        for name in ("cost_secs", "secs", "restore_secs"):
            _check_number(f"{name} of {tier.name}", getattr(tier, name))
        unknown = set(tier.survives) - kinds
        if unknown:
            raise InvalidArgumentError(
                f"simulate: expected survives of {tier.name} to be of {sorted(kinds)}, found "
                f"{sorted(unknown)}"
            )
    expected = hours * sum(kind.per_hour for kind in cluster.failures)
    if expected > FAILURES_MAX:
        raise InvalidArgumentError(
            f"simulate: expected at most {FAILURES_MAX:,} failures, found about {expected:.3g} in "
            "`hours` with these `per_hour`; simulate a shorter time"
        )


def _check_number(name: str, value: object, *, is_above_zero: bool = False) -> None:
    bound = math.ulp(0.0) if is_above_zero else 0.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and bound <= value < math.inf:  # type: ignore[operator]
        return
    least = "above 0" if is_above_zero else "of 0 or more"
    raise InvalidArgumentError(f"simulate: expected {name} {least}, found {value!r}")


def _failures(cluster: Cluster, secs: float, seed: int) -> list[tuple[float, str]]:
    failures: list[tuple[float, str]] = []
    for number, kind in enumerate(cluster.failures):
        # A generator of its own: the rate of one kind does not move the failures of another.
        chance, time_secs = random.Random(f"{seed} {number} {kind.name}"), 0.0
        while kind.per_hour:
            time_secs += chance.expovariate(kind.per_hour / 3600)
            if time_secs >= secs:
                break
            failures.append((time_secs, kind.name))
    return sorted(failures)


class _Training:
    """The state of a simulated training.

    Between two failures everything is periodic in the work, so that no checkpoint is visited.
    """

    def __init__(self, cluster: Cluster, tiers: Sequence[TierSetting], secs: float) -> None:
        self._cluster, self._tiers, self._end = cluster, tiers, secs
        self._now = self._done = self._redone = self._saving = self._restarting = 0.0
        self._failure_count = 0
        self._ready = 0.0
        """When the last restart ends; the training goes on from then."""
        self._base = 0.0
        """The work from which it goes on. The tiers' intervals are counted from there."""
        self._kept = [0.0] * len(tiers)
        """The work that the newest checkpoint of each tier has."""

    def run_until(self, time_secs: float) -> None:
        """Train until that time, at which something fails or everything ends."""
        begin = min(max(self._ready, self._now), time_secs)
        self._restarting += begin - self._now
        spent = time_secs - begin
        work = self._work_after(spent)
        self._done = self._base + work
        self._saving += spent - work
        for index, tier in enumerate(self._tiers):
            saved = self._work_after(spent - tier.secs) if spent > tier.secs else 0.0
            count = _count(saved, tier.interval_secs)
            if count:
                self._kept[index] = self._base + count * tier.interval_secs
        self._now = time_secs

    def _work_after(self, spent: float) -> float:
        """Return the work that is done in a time, in which checkpoints pause the training."""
        low, high = 0.0, spent
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._time_of(middle) <= spent else (low, middle)
        return low

    def _time_of(self, work: float) -> float:
        costs = (tier.cost_secs * _count(work, tier.interval_secs) for tier in self._tiers)
        return work + sum(costs)

    def lose_work(self, kind: str) -> None:
        """Lose the work that no checkpoint has, and restart."""
        for tier, setting in enumerate(self._tiers):
            if kind not in setting.survives:
                self._kept[tier] = 0.0
        best = max(range(len(self._kept)), key=self._kept.__getitem__, default=None)
        kept = 0.0 if best is None else self._kept[best]
        restore_secs = self._tiers[best].restore_secs if best is not None and kept else 0.0
        self._redone += self._done - kept
        self._done = self._base = kept
        self._ready = self._now + self._cluster.restart_secs + restore_secs
        self._failure_count += 1

    def outcome(self) -> Outcome:
        """Return where the time went."""
        return Outcome(
            wall_secs=self._now,
            productive_secs=self._done,
            redone_secs=self._redone,
            saving_secs=self._saving,
            restart_secs=self._restarting,
            failures=self._failure_count,
        )


def _count(work: float, interval_secs: float) -> int:
    """Return how many intervals end within some work."""
    return int(work / interval_secs + 1e-9)
