"""Define the metrics of an agent: their names, kinds and labels, and the messages that carry them.

Names and units follow the conventions of Prometheus. Each is about one host; the exporter adds the
labels `run` and `host`. Counters begin at 0 with the agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.observe.events.schema import WAIT_REASONS

Kind = Literal["counter", "gauge", "histogram"]

STEP_BOUNDS_SECS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SAVE_BOUNDS_SECS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
TIERS = ("ram", "peer", "durable", "remote")
CAUSES = ("lost", "host_lost", "preempted", "fenced", "went_back", "closed", "unknown")
ERRORS = ("save", "recovery", "removal", "listing", "upload")


class MetricSample(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a metric.

    Attributes:
        labels: its labels, without those of the run and the host.
        value: the value; the sum of a histogram.
        buckets: the cumulative counts of a histogram by upper bound; the last bound is infinite,
            and is sent as null.
    """

    labels: dict[str, str] = {}
    value: float
    buckets: tuple[tuple[float | None, int], ...] = ()


class MetricFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A metric with all of its values."""

    name: str
    kind: Kind
    text: str
    samples: tuple[MetricSample, ...]


class AgentMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """All metrics of one agent."""

    run: str
    host: str
    families: tuple[MetricFamily, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The definition of a metric.

    Attributes:
        kind: Its kind.
        text: What it measures.
        label: The name of its only label; empty: it has none.
        values: The label's values that are exported from the start.
        bounds: The upper bounds of a histogram's buckets.
    """

    kind: Kind
    text: str
    label: str = ""
    values: tuple[str, ...] = ()
    bounds: Sequence[float] = ()


METRICS = {
    "holdfast_steps_total": Metric(
        kind="counter", text="Steps that the lowest rank of this host has finished."
    ),
    "holdfast_step_seconds": Metric(
        kind="histogram",
        text="Duration of a step, without the waits that the training reported.",
        bounds=STEP_BOUNDS_SECS,
    ),
    "holdfast_save_blocked_seconds_total": Metric(
        kind="counter", text="Time for which saves have blocked the training thread."
    ),
    "holdfast_step_inflation_seconds_total": Metric(
        kind="counter",
        text=(
            "By how much steps beside checkpoints were longer than the median step without one, "
            "each at most by the time of the checkpoint within it."
        ),
        label="tier",
        values=("ram", "durable"),
    ),
    "holdfast_waiting_seconds_total": Metric(
        kind="counter",
        text="Time for which the training has waited, as it reported; with `compilation`, for "
        "which JAX or PyTorch compiled.",
        label="reason",
        values=WAIT_REASONS,
    ),
    "holdfast_checkpoint_age_seconds": Metric(
        kind="gauge",
        text="Time since a checkpoint has reached the tier, or since the attempt began.",
        label="tier",
    ),
    "holdfast_checkpoint_committed_total": Metric(
        kind="counter",
        text="Checkpoints that have reached the tier.",
        label="tier",
        values=TIERS,
    ),
    "holdfast_commit_duration_seconds": Metric(
        kind="histogram",
        text="Time that a checkpoint takes to reach the tier.",
        label="tier",
        values=("ram", "durable"),
        bounds=SAVE_BOUNDS_SECS,
    ),
    "holdfast_checkpoint_written_bytes_total": Metric(
        kind="counter",
        text="Bytes of checkpoints that were written to the tier.",
        label="tier",
        values=("ram", "durable", "remote"),
    ),
    "holdfast_checkpoint_reused_bytes_total": Metric(
        kind="counter", text="Bytes of unchanged images that were not written again."
    ),
    "holdfast_restore_seconds": Metric(
        kind="histogram",
        text="Duration of a restore, by the tier from which most bytes were read.",
        label="source",
        values=TIERS,
        bounds=SAVE_BOUNDS_SECS,
    ),
    "holdfast_failures_total": Metric(
        kind="counter",
        text="Ends of attempts that were no regular close, by cause.",
        label="cause",
        values=CAUSES[:4],
    ),
    "holdfast_restarts_total": Metric(
        kind="counter",
        text="Attempts that have begun after another one, by the end of that; at rank 0's host.",
        label="cause",
        values=CAUSES,
    ),
    "holdfast_lost_steps_total": Metric(
        kind="counter",
        text="Steps that are made again, by the cause; counted at rank 0's host.",
        label="cause",
        values=CAUSES,
    ),
    "holdfast_durable_errors_total": Metric(
        kind="counter",
        text="Failures of the durable tier, by what failed.",
        label="kind",
        values=ERRORS,
    ),
    "holdfast_replica_differences_total": Metric(
        kind="counter",
        text=(
            "Comparisons in which a rank of this host held something else than another rank has "
            "saved."
        ),
    ),
    "holdfast_step": Metric(kind="gauge", text="The last step passed to save."),
    "holdfast_quiet_step_seconds": Metric(
        kind="gauge",
        text="Median duration of the newest steps without a checkpoint beside them, of 8 or more.",
    ),
    "holdfast_attempt": Metric(kind="gauge", text="The number of the run's present attempt."),
    "holdfast_trainers": Metric(kind="gauge", text="Processes of the training on this host."),
    "holdfast_pending_checkpoints": Metric(
        kind="gauge", text="Checkpoints that are to become durable and are not yet."
    ),
    "holdfast_ram_slots_bytes": Metric(
        kind="gauge", text="Memory that the RAM tier has on this host."
    ),
    "holdfast_ram_free_bytes": Metric(
        kind="gauge", text="Memory that the RAM tier may have beyond that."
    ),
    "holdfast_hosts": Metric(
        kind="gauge", text="Hosts of the attempt; exported by the leading host alone."
    ),
    "holdfast_silent_hosts": Metric(
        kind="gauge",
        text="Hosts of the attempt that do not answer; exported by the leading host alone.",
    ),
    "holdfast_survivable_domain_losses": Metric(
        kind="gauge",
        text="Failure domains that may be lost now without the newest whole checkpoint; all of "
        "them if it is durable; exported by the leading host alone.",
    ),
}


def flat(metrics: AgentMetrics) -> dict[str, float]:
    """Return the values by name, as loggers of experiments take them.

    A name is `holdfast/` and the metric's without its prefix; the value of a label follows after a
    slash. Of a histogram, `NAME/count` and `NAME/mean` are given.
    """
    values: dict[str, float] = {}
    for family in metrics.families:
        base = "holdfast/" + family.name.removeprefix("holdfast_")
        for sample in family.samples:
            name = "/".join([base, *sample.labels.values()])
            if family.kind != "histogram":
                values[name] = float(sample.value)
                continue
            count = sample.buckets[-1][1] if sample.buckets else 0
            values[f"{name}/count"] = float(count)
            if count:
                values[f"{name}/mean"] = sample.value / count
    return values
