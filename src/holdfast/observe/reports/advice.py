"""Advise on the intervals of checkpoints, from what a run has measured. Pure functions.

The costs of a checkpoint and of a failure are balanced as by Young (1974) and Daly (2006), for each
tier with the failures for which it is the nearest one that survives (Benoit et al., 2017). The cost
is the inflation of steps, and not the time of a call.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.observe.reports.model import Intervals, RunReport, TierReport
from holdfast.observe.reports.simulate import Cluster, FailureKind, TierSetting
from holdfast.observe.reports.words import duration_text
from holdfast.policy.best_interval import FACTOR_MIN, best_interval_secs, waste
from holdfast.policy.failure_rates import (
    BELIEF,
    PRIOR_COUNT,
    PRIOR_HOURS,
    FailureRate,
    failure_rate,
)
from holdfast.policy.interval_tuner import resolution_secs
from holdfast.quantities import counted

SURVIVED = {
    "ram": frozenset({"process"}),
    "peer": frozenset({"process", "host"}),
    "durable": frozenset({"process", "host"}),
}
"""The failures that leave a tier's checkpoints; the nearest tier first."""
KINDS = {"lost": "process", "host_lost": "host"}
"""The kinds of failures, by the end of an attempt. A preempted job has saved its last step."""
KIND_WORDS = {"process": "processes", "host": "hosts"}
TIER_PLACES = {"ram": "RAM", "peer": "other hosts' RAM", "durable": "the durable tier"}
RESTART_SECS = 60.0
"""Assumed where no restart was measured."""
GAIN_MIN = 0.001
"""A change that saves a smaller share of the time is not worth a word: it is within the noise."""
STEP_SECS = 0.001
"""Assumed where the duration of a step was not measured: no interval is shorter than a step."""


class IntervalAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The advice for one tier.

    Attributes:
        tier: Its name.
        interval_secs: The interval of its checkpoints today: half of the time passed in such or
            longer ones.
        best_secs: The interval with the least waste.
        low_secs: The best interval for the highest failure rate that is believed.
        high_secs: The best interval for the lowest one.
        waste: The share of the time that its checkpoints and the steps lost cost today.
        best_waste: The same with the best interval.
        is_needed: Whether today's waste is beyond 1.5 times the best one, and by more than noise.
    """

    tier: str
    interval_secs: float
    best_secs: float
    low_secs: float
    high_secs: float
    waste: float
    best_waste: float
    is_needed: bool


class RunAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The advice for a run.

    Attributes:
        run: The run.
        hours: The time in which failures were counted.
        failures: Failures an hour by kind, with their interval of belief.
        restart_secs: The time of a restart without the steps made again.
        goodput: The expected goodput with today's intervals.
        best_goodput: The same with the best ones.
        tiers: The advice for each tier whose cost was measured, the nearest first.
        gains: By how much the goodput would rise at most, by what would be changed.
        observed: What the run has shown, in words.
        assumed: What is taken for it where the run has not shown enough.
        notes: What is not known, and why.
    """

    run: str
    hours: float
    failures: dict[str, FailureRate]
    restart_secs: float
    goodput: float
    best_goodput: float
    tiers: list[IntervalAdvice]
    gains: dict[str, float]
    observed: list[str]
    assumed: list[str]
    notes: list[str]


def advise_run(report: RunReport, mtbf_hours: float | None = None) -> RunAdvice:
    """Return the advice for a run, from its report.

    Args:
        report: The report.
        mtbf_hours: Another mean time between failures than the measured one, for certain.
    """
    notes: list[str] = []
    hours = report.wall_secs / 3600
    counts = dict.fromkeys(KINDS.values(), 0)
    for failure in report.failures:
        if failure.cause in KINDS:
            counts[KINDS[failure.cause]] += 1
    rates = {kind: failure_rate(count, hours) for kind, count in counts.items()}
    if mtbf_hours is not None:
        rates = _scaled(rates, mtbf_hours)
    restarts_secs = [
        f.secs_to_next_step for f in report.failures if f.secs_to_next_step is not None
    ]
    restart_secs = statistics.median(restarts_secs) if restarts_secs else RESTART_SECS
    measured = {name: report.tiers[name] for name in SURVIVED if _is_known(report, name, notes)}
    if "durable" in measured and "ram" not in report.tiers:
        notes.append("the run has no RAM tier: each failure is paid by the durable tier's interval")
    steps = [attempt.quiet_step_secs for attempt in report.attempts if attempt.quiet_step_secs]
    step_secs = statistics.median(steps) if steps else STEP_SECS
    tiers = [_interval_advice(name, measured, rates, step_secs) for name in measured]
    restarts = sum(rate.per_hour for rate in rates.values()) / 3600 * restart_secs
    goodput = _goodput([tier.waste for tier in tiers], restarts)
    best = _goodput([tier.best_waste for tier in tiers], restarts)
    return RunAdvice(
        run=report.run,
        hours=hours,
        failures=rates,
        restart_secs=restart_secs,
        goodput=goodput,
        best_goodput=best,
        tiers=tiers,
        gains=_gains(measured, rates, best, tiers, restarts),
        observed=_observed(report, counts, restarts_secs, step_secs if steps else None, measured),
        assumed=_assumed(
            rates, mtbf_hours, has_restarts=bool(restarts_secs), has_steps=bool(steps)
        ),
        notes=notes,
    )


def settings_of(advice: RunAdvice, report: RunReport, *, is_best: bool) -> list[TierSetting]:
    """Return the tiers of a run for `simulate`, with today's or with the best intervals."""
    settings = []
    for tier_advice in advice.tiers:
        tier = report.tiers[tier_advice.tier]
        secs = tier_advice.best_secs if is_best else tier_advice.interval_secs
        if math.isfinite(secs):
            settings.append(
                TierSetting(
                    name=tier_advice.tier,
                    interval_secs=max(secs, STEP_SECS),
                    cost_secs=tier.cost_secs or 0.0,
                    secs=tier.secs or 0.0,
                    survives=SURVIVED[tier_advice.tier],
                )
            )
    return settings


def cluster_of(advice: RunAdvice, mtbf_hours: float | None = None) -> Cluster:
    """Return the cluster of a run for `simulate`.

    Args:
        advice: The advice for the run.
        mtbf_hours: Another mean time between failures, with the same shares of kinds.
    """
    rates = advice.failures if mtbf_hours is None else _scaled(advice.failures, mtbf_hours)
    kinds = [FailureKind(name=name, per_hour=rate.per_hour) for name, rate in rates.items()]
    return Cluster(failures=kinds, restart_secs=advice.restart_secs)


def _scaled(rates: Mapping[str, FailureRate], mtbf_hours: float) -> dict[str, FailureRate]:
    whole = sum(rate.per_hour for rate in rates.values())
    scaled = {}
    for kind, rate in rates.items():
        per_hour = rate.per_hour / whole / mtbf_hours
        scaled[kind] = FailureRate(per_hour=per_hour, low_per_hour=per_hour, high_per_hour=per_hour)
    return scaled


def _goodput(wastes: Sequence[float], restarts: float) -> float:
    return 1 / (1 + sum(wastes) + restarts)


def _is_known(report: RunReport, name: str, notes: list[str]) -> bool:
    tier = report.tiers.get(name)
    if tier is None:
        return False
    if tier.intervals.p50_secs is None:
        notes.append(f"{name}: too few checkpoints for an interval")
    elif tier.cost_secs is None:
        notes.append(f"{name}: the cost of a checkpoint was not measured; no advice for it")
    else:
        return True
    return False


def _observed(
    report: RunReport,
    counts: Mapping[str, int],
    restarts_secs: Sequence[float],
    step_secs: float | None,
    measured: Mapping[str, TierReport],
) -> list[str]:
    """Return what the run has shown, a line each."""
    failures = [f"{counted(count, 'failure')} of {KIND_WORDS[k]}" for k, count in counts.items()]
    lines = [f"{duration_text(report.wall_secs)} of training, {', '.join(failures)}"]
    if report.categories["compiling"]:
        lines.append(
            f"programs were compiled for {duration_text(report.categories['compiling'])} in all"
        )
    if restarts_secs:
        text = duration_text(statistics.median(restarts_secs))
        lines.append(f"a restart took {text}, the median of {len(restarts_secs)}")
    if step_secs is not None:
        lines.append(f"a step without a checkpoint took {duration_text(step_secs)}")
    for name, tier in measured.items():
        took = "" if tier.secs is None else f" and reached it in {duration_text(tier.secs)}"
        cost = duration_text(tier.cost_secs or 0.0)
        lines.append(f"a checkpoint in {TIER_PLACES[name]} cost {cost} of the training{took}")
    return lines


def _assumed(
    rates: Mapping[str, FailureRate],
    mtbf_hours: float | None,
    *,
    has_restarts: bool,
    has_steps: bool,
) -> list[str]:
    """Return what is taken for what the run has not shown, a line each."""
    if mtbf_hours is None:
        prior = f"{PRIOR_COUNT:g} failures in {PRIOR_HOURS:g} h were added to those observed"
        lines = [
            f"failures of {KIND_WORDS[kind]}: {_rate_text(rate)}; {prior}"
            for kind, rate in rates.items()
        ]
    else:
        lines = [f"a failure in {duration_text(mtbf_hours * 3600)}, of the kinds as observed"]
    if not has_restarts:
        lines.append(f"a restart takes {RESTART_SECS:.0f} s: none was observed")
    if not has_steps:
        lines.append("an interval may be shorter than a step: too few quiet steps were observed")
    return lines


def _rate_text(rate: FailureRate) -> str:
    mean, low, high = (
        duration_text(3600 / per_hour)
        for per_hour in (rate.per_hour, rate.high_per_hour, max(rate.low_per_hour, 1e-9))
    )
    return f"one in {mean} (between {low} and {high} with {BELIEF:.0%} belief)".replace("%", " %")


def _interval_advice(
    name: str,
    measured: Mapping[str, TierReport],
    rates: Mapping[str, FailureRate],
    step_secs: float,
) -> IntervalAdvice:
    tier = measured[name]
    # A cost below this is noise, by which no interval is the best one.
    cost = max(tier.cost_secs or 0.0, resolution_secs(step_secs))
    secs, interval = tier.secs or 0.0, _interval_today(tier.intervals)
    kinds = [rates[kind] for kind in rates if _nearest(kind, measured) == name]
    mean, low, high = (
        sum(getattr(rate, bound) for rate in kinds) / 3600
        for bound in ("per_hour", "low_per_hour", "high_per_hour")
    )
    # A checkpoint is of another step than the one before, which has to have reached the tier.
    least_secs = max(secs, step_secs)
    best = max(best_interval_secs(cost, mean), least_secs)
    now = waste(max(interval, step_secs), cost, secs, mean)
    least = waste(best, cost, secs, mean)
    return IntervalAdvice(
        tier=name,
        interval_secs=interval,
        best_secs=best,
        low_secs=max(best_interval_secs(cost, high), least_secs),
        high_secs=max(best_interval_secs(cost, low), least_secs),
        waste=now,
        best_waste=least,
        is_needed=now > FACTOR_MIN * least and now - least > GAIN_MIN,
    )


def _interval_today(intervals: Intervals) -> float:
    """Return the interval in which most of the time passed: half of it was in longer ones.

    A burst of checkpoints, which takes little of the time, does not count for more than that.
    """
    values = sorted(intervals.values_secs)
    if not values:
        return intervals.p50_secs or 0.0
    half, passed = sum(values) / 2, 0.0
    for value in values:
        passed += value
        if passed >= half:
            break
    return value


def _nearest(kind: str, measured: Mapping[str, TierReport]) -> str | None:
    return next((n for n, kinds in SURVIVED.items() if n in measured and kind in kinds), None)


def _gains(
    measured: Mapping[str, TierReport],
    rates: Mapping[str, FailureRate],
    best: float,
    tiers: Sequence[IntervalAdvice],
    restarts: float,
) -> dict[str, float]:
    """Return upper bounds: what a change would bring if its checkpoints cost nothing."""
    by_tier = {tier_advice.tier: tier_advice.best_waste for tier_advice in tiers}
    if "durable" not in by_tier:
        return {}
    durable = measured["durable"]
    gains = {}
    changes = {
        "a RAM tier": ("ram", "process"),
        "copies in other hosts' RAM": ("peer", "host"),
    }
    for text, (name, kind) in changes.items():
        if name not in measured and _nearest(kind, measured) == "durable":
            left = [r for k, r in rates.items() if k != kind and _nearest(k, measured) == "durable"]
            per_sec = sum(rate.per_hour for rate in left) / 3600
            cost, secs = durable.cost_secs or 0.0, durable.secs or 0.0
            interval = max(best_interval_secs(cost, per_sec), secs, STEP_SECS)
            wastes = {**by_tier, "durable": waste(interval, cost, secs, per_sec)}
            gains[text] = _goodput([*wastes.values()], restarts) - best
    gains["a faster durable tier"] = (
        _goodput([w for name, w in by_tier.items() if name != "durable"], restarts) - best
    )
    return gains
