"""Implement `holdfast advise`: say how often to save, from what a run has measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import click
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.output import Column
from holdfast.cli.report import report_of
from holdfast.errors import InvalidArgumentError
from holdfast.observe.reports.advice import (
    GAIN_MIN,
    SURVIVED,
    IntervalAdvice,
    RunAdvice,
    advise_run,
    cluster_of,
    settings_of,
)
from holdfast.observe.reports.model import RunReport
from holdfast.observe.reports.simulate import TierSetting, simulate
from holdfast.observe.reports.words import TIER_WORDS, duration_text, share_text

MTBF_HOURS = (0.5, 1.0, 3.0, 12.0, 48.0)
SEEDS = 3
FAILURES = 200
"""How many failures a simulation has, about."""

Settings = Sequence[tuple[str, Sequence[TierSetting]]]


MTBF_HOURS_LIMITS = (0.001, 1e6)


def _checked_mtbf(
    ctx: click.Context, parameter: click.Parameter, hours: tuple[float, ...]
) -> tuple[float, ...]:
    low, high = MTBF_HOURS_LIMITS
    for value in hours:
        # Written so that it is false of nan.
        if not low <= value <= high:
            raise click.BadParameter(f"expected hours from {low:g} to {high:,.0f}, found {value}")
    return hours


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--what-if", is_flag=True, help="Simulate other failure rates.")
@click.option(
    "--mtbf",
    "mtbf_hours",
    metavar="HOURS",
    multiple=True,
    type=float,
    callback=_checked_mtbf,
    help="A mean time between failures for --what-if; may be repeated.",
)
@click.option(
    "--every",
    "every_steps",
    metavar="N",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="For --what-if: compare with a durable checkpoint every N steps.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def advise(
    directory: str, what_if: bool, mtbf_hours: tuple[float, ...], every_steps: int, as_json: bool
) -> None:
    """Say how often the run in DIR should save, and what that would change.

    It weighs the measured cost of a checkpoint in each tier, as inflation of steps, against the
    measured failures. The method is in docs/goodput.md. It advises a change only where today's
    interval wastes more than 1.5 times as much as the best one.
    """
    if mtbf_hours and not what_if:
        raise click.UsageError("--mtbf is for --what-if; give both", click.get_current_context())
    run_report = report_of(directory)
    advice = advise_run(run_report)
    if not advice.tiers:
        reasons = "; ".join([*run_report.notes, *advice.notes]) or "its events have no checkpoint"
        raise InvalidArgumentError(
            f"advise {directory}: expected a training with measured checkpoints, found none "
            f"({reasons}); make the events readable if they are not, or train for some minutes, "
            "with steps between the checkpoints"
        )
    table = _what_if(advice, run_report, mtbf_hours or MTBF_HOURS, every_steps) if what_if else []
    if as_json:
        output.print_json({"advice": advice, "what_if": table})
        return
    _print(advice)
    if table:
        _print_what_if(table)
    for line in [*run_report.notes, *advice.notes]:
        output.warn(line)


def _print(advice: RunAdvice) -> None:
    output.print_line(advice.run)
    for title, lines in (("observed", advice.observed), ("assumed", advice.assumed)):
        output.print_table(
            [Column(""), Column("", folds=True)],
            [("" if number else title, line) for number, line in enumerate(lines)],
        )
    output.print_line("")
    columns = [
        Column("tier"),
        *(Column(title, "right") for title in ("interval", "best", "from", "to", "waste", "best")),
    ]
    output.print_table(columns, [_cells(tier) for tier in advice.tiers])
    output.print_line("")
    for tier in advice.tiers:
        output.print_line(_sentence(tier))
    for what, gain in advice.gains.items():
        if gain > GAIN_MIN:
            output.print_line(f"{what} would add at most {share_text(gain)} of goodput")
    output.print_line(
        f"expected goodput: {share_text(advice.goodput)} today, {share_text(advice.best_goodput)} "
        "with the best intervals"
    )


def _cells(tier: IntervalAdvice) -> list[str | Text]:
    spans = (tier.interval_secs, tier.best_secs, tier.low_secs, tier.high_secs)
    return [
        TIER_WORDS.get(tier.tier, tier.tier),
        *(_interval_text(secs) for secs in spans),
        share_text(tier.waste),
        share_text(tier.best_waste),
    ]


def _interval_text(secs: float) -> str:
    return "never" if math.isinf(secs) else duration_text(secs)


def _sentence(tier: IntervalAdvice) -> str:
    name = TIER_WORDS.get(tier.tier, tier.tier)
    if not tier.is_needed:
        return (
            f"{name}: keep the interval; it wastes at most 1.5 times as much as the best one, or "
            f"less than {share_text(GAIN_MIN)} of the time more"
        )
    way = "more often" if tier.best_secs < tier.interval_secs else "less often"
    return (
        f"{name}: save {way}, every {_interval_text(tier.best_secs)} in place of "
        f"{_interval_text(tier.interval_secs)}: {share_text(tier.waste)} of the time is wasted, "
        f"{share_text(tier.best_waste)} would be"
    )


def _what_if(
    advice: RunAdvice, run_report: RunReport, mtbf_hours: Sequence[float], every_steps: int
) -> list[dict[str, object]]:
    """Return the goodput of today's and other intervals for each mean time between failures."""
    today = settings_of(advice, run_report, is_best=False)
    fixed = _fixed(advice, run_report, every_steps)
    rows: list[dict[str, object]] = []
    for hours in mtbf_hours:
        cluster = cluster_of(advice, hours)
        best = settings_of(advise_run(run_report, mtbf_hours=hours), run_report, is_best=True)
        settings: Settings = [("today", today), ("best", best), (f"every {every_steps}", fixed)]
        row: dict[str, object] = {"mtbf_hours": hours}
        for name, tiers in settings:
            if not tiers:
                continue
            outcomes = [
                simulate(cluster, tiers, hours=FAILURES * hours, seed=seed) for seed in range(SEEDS)
            ]
            lost = sum(outcome.redone_secs for outcome in outcomes)
            row[name] = {
                "goodput": statistics.mean(outcome.goodput for outcome in outcomes),
                "lost_secs_per_failure": lost
                / max(1, sum(outcome.failures for outcome in outcomes)),
            }
        rows.append(row)
    return rows


def _fixed(advice: RunAdvice, run_report: RunReport, every_steps: int) -> list[TierSetting]:
    """Return the durable tier alone with a checkpoint every N steps; none where not measured."""
    steps = [a.quiet_step_secs for a in run_report.attempts if a.quiet_step_secs is not None]
    durable = run_report.tiers.get("durable")
    if not steps or durable is None or "durable" not in {tier.tier for tier in advice.tiers}:
        return []
    secs = durable.secs or 0.0
    return [
        TierSetting(
            name="durable",
            interval_secs=max(every_steps * statistics.median(steps), secs, 1e-3),
            cost_secs=durable.cost_secs or 0.0,
            secs=secs,
            survives=SURVIVED["durable"],
        )
    ]


def _print_what_if(table: Sequence[dict[str, object]]) -> None:
    names = [name for name in table[0] if name != "mtbf_hours"]
    columns = [Column("a failure in", "right")]
    for name in names:
        columns += [Column(f"goodput {name}", "right"), Column("lost by one", "right")]
    rows: list[list[str | Text]] = []
    for row in table:
        cells: list[str | Text] = [duration_text(float(str(row["mtbf_hours"])) * 3600)]
        for name in names:
            of_setting = row[name]
            assert isinstance(of_setting, dict)
            cells.append(share_text(of_setting["goodput"]))
            cells.append(duration_text(of_setting["lost_secs_per_failure"]))
        rows.append(cells)
    output.print_line("")
    output.print_table(columns, rows)
