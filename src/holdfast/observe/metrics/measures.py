"""Count what happens on one host since its agent started, from its events and its trainers' steps.

The counts are what `metric_families` defines, and the newest steps are kept for the live page.
Nothing is done per step of a training: the step meter reports what it saw at a tick.

Owned by the agent's event loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from holdfast.clock import Clock
from holdfast.observe.attempt_ends import AttemptEnds
from holdfast.observe.events.schema import (
    AttemptBranched,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointProtected,
    CheckpointSealed,
    CheckpointUploaded,
    DurableUnreadable,
    Event,
    FirstStep,
    PartSaved,
    PreservationFailed,
    RankPosition,
    RecoveryFailed,
    ReplicasDiffer,
    StateRestored,
    TrainerLeft,
    TrainerLost,
    UploadFailed,
)
from holdfast.observe.metrics.metric_families import METRICS, MetricFamily, MetricSample

SPANS_MAX = 600
SPAN_SECS = 0.5
"""Steps are kept for the live page in spans of this length: five minutes of them."""
INFLATION = "holdfast_step_inflation_seconds_total"
PHASES = ("quiet", "writing", "sealing")
ERROR_KINDS: dict[type[Event], str] = {
    CheckpointFailed: "save",
    RecoveryFailed: "recovery",
    PreservationFailed: "removal",
    DurableUnreadable: "listing",
    UploadFailed: "upload",
}


class StepSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Some steps in a row.

    Attributes:
        ago_secs: how long ago the last of them was finished.
        step: the last of them.
        steps: how many.
        secs: their duration together.
        phase: what was under way: `quiet`, `sealing` or `writing`.
    """

    ago_secs: float
    step: int
    steps: int
    secs: float
    phase: str


class RecentSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The newest steps of the lowest rank of a host, in their order."""

    spans: tuple[StepSpan, ...]


class _Histogram:
    """Counts of values by bucket; the last one has no upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        index = next((i for i, b in enumerate(self._bounds) if value <= b), len(self._bounds))
        self._counts[index] += count
        self._sum += value * count

    def sample(self, labels: dict[str, str]) -> MetricSample:
        bounds = (*self._bounds, None)
        buckets = tuple(zip(bounds, accumulate(self._counts), strict=True))
        return MetricSample(labels=labels, value=self._sum, buckets=buckets)


class Measures:
    """The counts of one agent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._histograms: dict[tuple[str, str], _Histogram] = {}
        for name, metric in METRICS.items():
            for value in metric.values or ("",):
                if metric.kind == "counter":
                    self._counts[name][value] = 0
                elif metric.kind == "histogram":
                    self._histograms[name, value] = _Histogram(metric.bounds)
        self._reached_secs: dict[str, float] = {}
        """When the newest checkpoint of each tier has reached it."""
        self._quiet_secs: float | None = None
        self._over_secs = dict.fromkeys(PHASES, 0.0)
        """By how much the steps of a phase were longer than quiet ones; also less than 0."""
        self._spans: deque[tuple[float, StepSpan]] = deque(maxlen=SPANS_MAX)
        self._positions: dict[int, RankPosition] = {}
        self._high = -1
        """The highest step that is known of the attempts here."""
        self._ends = AttemptEnds()
        self._restart_cause = ""
        """Why the attempt before has ended, until its successor's first step here."""

    # What has happened.

    def note_event(self, event: Event) -> None:
        """Count an event of this host, with its time and attempt."""
        match event:
            case CheckpointSealed(tier="ram"):
                self._reached("ram")
            case CheckpointProtected():
                self._reached("peer")
            case CheckpointCommitted(by="save"):
                self._reached("durable")
                self._add("holdfast_checkpoint_written_bytes_total", "durable", event.bytes or 0)
                if event.secs is not None:
                    self._observe("holdfast_commit_duration_seconds", "durable", event.secs)
            case CheckpointUploaded():
                self._reached("remote")
                self._add("holdfast_checkpoint_written_bytes_total", "remote", event.bytes)
                self._observe("holdfast_commit_duration_seconds", "remote", event.secs)
            case PartSaved():
                self._part_saved(event)
            case StateRestored():
                source = max(event.sources, key=event.sources.__getitem__, default="")
                if ("holdfast_restore_seconds", source) in self._histograms:
                    self._observe("holdfast_restore_seconds", source, event.secs)
            case ReplicasDiffer():
                self._add("holdfast_replica_differences_total", "", 1)
            case _:
                self._note_life(event)
        kind = ERROR_KINDS.get(type(event))
        if kind is not None:
            self._add("holdfast_durable_errors_total", kind, 1)

    def note_steps(self, phase: str, step: int, steps: int, secs: float) -> None:
        """Count steps of the lowest rank that ended since the last call.

        Args:
            phase: what was under way.
            step: the last of them.
            steps: how many.
            secs: their duration together, without the waits that the training reported.
        """
        each = secs / steps
        self._add("holdfast_steps_total", "", steps)
        self._observe("holdfast_step_seconds", "", each, steps)
        self._high = max(self._high, step)
        now_secs = self._clock.monotonic()
        span = StepSpan(ago_secs=0.0, step=step, steps=steps, secs=secs, phase=phase)
        last = self._spans[-1] if self._spans else None
        if last is not None and last[1].phase == phase and last[1].secs + secs <= SPAN_SECS:
            self._spans.pop()
            span = msgspec.structs.replace(
                span, steps=steps + last[1].steps, secs=secs + last[1].secs
            )
        self._spans.append((now_secs, span))

    def note_inflation(self, costs_secs: Mapping[str, float], quiet_secs: float) -> None:
        """Add what steps took beyond the median of quiet ones, by phase; also less than 0."""
        for phase, cost_secs in costs_secs.items():
            self._over_secs[phase] += cost_secs
        self._quiet_secs = quiet_secs

    def note_position(self, rank: int, position: RankPosition) -> None:
        """Take the position of a rank of this host; times count for the lowest rank."""
        before = self._positions.get(rank)
        self._positions[rank] = position
        if rank > min(self._positions):
            return
        self._add(
            "holdfast_save_blocked_seconds_total",
            "",
            _grown(position.blocked_secs, before.blocked_secs if before else 0.0),
        )
        waits_before = _waits(before) if before is not None else Counter[str]()
        for reason, secs in _waits(position).items():
            self._add("holdfast_waiting_seconds_total", reason, _grown(secs, waits_before[reason]))

    def forget_rank(self, rank: int) -> None:
        """Forget the position of a rank that has ended."""
        self._positions.pop(rank, None)

    def _part_saved(self, event: PartSaved) -> None:
        if event.tier == "ram":
            self._add("holdfast_checkpoint_written_bytes_total", "ram", event.bytes)
        self._observe("holdfast_commit_duration_seconds", event.tier, event.secs)
        self._add("holdfast_checkpoint_reused_bytes_total", "", event.reused_bytes)

    def _note_life(self, event: Event) -> None:
        """Count the ends and the begins of attempts."""
        match event:
            case TrainerLost() | TrainerLeft():
                self._high = max(self._high, -1 if event.last_step is None else event.last_step)
            case AttemptStarted(run_attempt=number) if number > 1:
                self._restarted(self._ends.cause or "unknown")
            case AttemptBranched() if 0 in self._positions:
                self._restarted("went_back")
            case FirstStep() if self._restart_cause and event.rank == min(
                self._positions, default=event.rank
            ):
                lost = max(0, self._high - event.step + 1)
                self._add("holdfast_lost_steps_total", self._restart_cause, lost)
                self._restart_cause, self._high = "", event.step
        attempt = self._ends.attempt
        cause = self._ends.note_event(event)
        if cause:
            self._add("holdfast_failures_total", cause, 1)
        if self._ends.attempt != attempt:
            self._reached_secs = {"durable": self._clock.monotonic()}

    def _restarted(self, cause: str) -> None:
        self._restart_cause = cause
        self._add("holdfast_restarts_total", cause, 1)

    def _reached(self, tier: str) -> None:
        self._reached_secs[tier] = self._clock.monotonic()
        self._add("holdfast_checkpoint_committed_total", tier, 1)

    def _add(self, name: str, value: str, amount: float) -> None:
        self._counts[name][value] += amount  # type: ignore[assignment]

    def _observe(self, name: str, label: str, value: float, count: int = 1) -> None:
        # One without a value has no quantiles, so a tier that few runs have begins with its first.
        if (name, label) not in self._histograms:
            self._histograms[name, label] = _Histogram(METRICS[name].bounds)
        self._histograms[name, label].observe(value, count)

    # What is exported.

    def recent_steps(self) -> RecentSteps:
        """Return the newest steps."""
        now_secs = self._clock.monotonic()
        return RecentSteps(
            spans=tuple(
                msgspec.structs.replace(span, ago_secs=round(now_secs - at_secs, 3))
                for at_secs, span in self._spans
            )
        )

    def families(self, gauges: dict[str, float]) -> tuple[MetricFamily, ...]:
        """Return all metrics that have values.

        Args:
            gauges: values that others know, by name; they have no labels.
        """
        self._settle_inflation()
        now_secs = self._clock.monotonic()
        families = []
        for name, metric in METRICS.items():
            values: dict[str, float] = {}
            if metric.kind == "histogram":
                samples = [
                    histogram.sample(_labels(metric.label, value))
                    for (of, value), histogram in self._histograms.items()
                    if of == name
                ]
            elif name == "holdfast_checkpoint_age_seconds":
                values = {tier: now_secs - at for tier, at in self._reached_secs.items()}
            elif name == "holdfast_quiet_step_seconds" and self._quiet_secs is not None:
                values = {"": self._quiet_secs}
            elif metric.kind == "counter":
                values = dict(self._counts[name])
            elif name in gauges:
                values = {"": gauges[name]}
            if metric.kind != "histogram":
                samples = [
                    MetricSample(labels=_labels(metric.label, value), value=float(amount))
                    for value, amount in values.items()
                ]
            if samples:
                families.append(
                    MetricFamily(
                        name=name, kind=metric.kind, text=metric.text, samples=tuple(samples)
                    )
                )
        return tuple(families)

    def _settle_inflation(self) -> None:
        """Take over the inflation so far; a counter never falls."""
        counts = self._counts[INFLATION]
        blocked_secs = self._counts["holdfast_save_blocked_seconds_total"][""]
        # The blocked time is a part of the steps during which a checkpoint was taken.
        taken = self._over_secs["sealing"] - blocked_secs
        written = self._over_secs["writing"]
        if not self._counts["holdfast_checkpoint_committed_total"]["ram"]:
            taken, written = 0.0, written + taken
        for tier, secs in (("ram", taken), ("durable", written)):
            counts[tier] = max(counts[tier], secs)  # type: ignore[assignment]


def _labels(name: str, value: str) -> dict[str, str]:
    return {name: value} if name else {}


def _grown(now: float, before: float) -> float:
    """Return the growth of a sum; one that has fallen began again at 0."""
    return now - before if now >= before else now


def _waits(position: RankPosition) -> Counter[str]:
    """Return the waits of a rank by reason, also those after its newest step."""
    waits_secs: Counter[str] = Counter()
    for waits in (position.waiting_secs, position.waiting_after_secs):
        for reason, secs in waits.items():
            waits_secs[reason] += secs  # type: ignore[assignment]
    return waits_secs
