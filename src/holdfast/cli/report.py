"""Implement `holdfast report`: show where the time of runs went."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.output import Column, counted, size_text
from holdfast.errors import HoldfastError
from holdfast.observe.reports.goodput import report_run
from holdfast.observe.reports.model import CATEGORIES, RunReport
from holdfast.observe.reports.page import write_page
from holdfast.observe.reports.words import (
    CATEGORY_WORDS,
    CAUSE_WORDS,
    END_WORDS,
    TIER_WORDS,
    decision_text,
    duration_text,
    goodput_text,
    share_text,
)
from holdfast.store.files.named_file import check_file_name
from holdfast.trainer.opening.run_access import events_of, read_only

BAR_CHARS = 40


@click.command()
@click.argument(
    "directories",
    metavar="DIR…",
    nargs=-1,
    required=True,
    type=click.Path(),
)
@click.option(
    "--html",
    "html_name",
    metavar="FILE",
    type=click.Path(path_type=str),
    help="Write a page with charts, which needs no network.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def report(directories: tuple[str, ...], html_name: str | None, as_json: bool) -> None:
    """Report where the time of the run in DIR went, also of several runs and of a live one.

    The categories add up to the time from the start of the first process to the last event. They
    are explained in docs/report.md.
    """
    if html_name is not None:
        check_file_name(html_name, "write the report")
    reports, failures = [], []
    for directory in directories:
        try:
            reports.append(report_of(directory))
        except HoldfastError as error:
            failures.append(error)
    if failures and (as_json or not reports):
        raise failures[0]
    if html_name is not None:
        write_page(reports, Path(html_name))
        output.note(f"wrote {html_name}")
    if as_json:
        output.print_json(reports[0] if len(reports) == 1 else {"runs": reports})
        return
    for index, run_report in enumerate(reports):
        if index:
            output.print_line("")
        _print(run_report)
    for failure in failures[:-1]:
        output.print_error(str(failure))
    if failures:
        raise failures[-1]


def report_of(directory: str) -> RunReport:
    """Return the report of the run in a directory or at a URL."""
    run = read_only(directory)
    return report_run(str(run.location), events_of(run).read())


def _print(run_report: RunReport) -> None:
    if run_report.goodput is None:
        output.print_line(f"{run_report.run}: no events of a training yet")
    else:
        attempts, failures = len(run_report.attempts), len(run_report.failures)
        output.print_line(
            f"{run_report.run}: goodput {goodput_text(run_report.goodput)} of "
            f"{duration_text(run_report.wall_secs)}; {counted(run_report.steps, 'step')}, "
            f"{counted(attempts, 'attempt')}, {counted(failures, 'failure')}"
        )
        output.print_line("")
        _print_categories(run_report)
        _print_failures(run_report)
        _print_ends(run_report)
        _print_tiers(run_report)
    for line in run_report.notes:
        output.warn(line)


def _print_categories(run_report: RunReport) -> None:
    rows: list[list[str | Text]] = []
    for name in CATEGORIES:
        secs = run_report.categories[name]
        if secs:
            share = secs / run_report.wall_secs
            bar = "█" * max(1, round(BAR_CHARS * share))
            rows.append([CATEGORY_WORDS[name], duration_text(secs), share_text(share), bar])
    columns = [Column("time"), Column("", "right"), Column("", "right"), Column("", is_extra=True)]
    output.print_table(columns, rows)


def _print_failures(run_report: RunReport) -> None:
    if not run_report.failures:
        return
    output.print_line("")
    rows: list[list[str | Text]] = [
        [
            output.time_text(failure.time),
            CAUSE_WORDS.get(failure.cause, failure.cause),
            failure.host,
            "" if failure.steps_lost is None else str(failure.steps_lost),
            "" if failure.secs_to_next_step is None else duration_text(failure.secs_to_next_step),
            TIER_WORDS.get(failure.source, failure.source) if failure.source else "",
        ]
        for failure in run_report.failures
    ]
    columns = [
        Column("failure"),
        Column("cause"),
        Column("host"),
        Column("steps lost", "right"),
        Column("to the next step", "right"),
        Column("restored from"),
    ]
    output.print_table(columns, rows)


def _print_ends(run_report: RunReport) -> None:
    if not run_report.ends:
        return
    output.print_line("")
    rows: list[list[str | Text]] = [
        [
            output.time_text(end.time),
            END_WORDS.get(end.cause, end.cause),
            end.host,
            end.reason,
            decision_text(end.restart_in_secs, end.stopped_because),
        ]
        for end in run_report.ends
    ]
    columns = [
        Column("holdfast run"),
        Column("cause"),
        Column("host"),
        Column("what is known", folds=True),
        Column("decision", folds=True),
    ]
    output.print_table(columns, rows)


def _cost_text(tier: str, cost_secs: float | None) -> str:
    if cost_secs is not None:
        return duration_text(cost_secs)
    return "not measured" if tier in ("ram", "durable") else ""


def _print_tiers(run_report: RunReport) -> None:
    if not run_report.tiers:
        return
    output.print_line("")
    rows: list[list[str | Text]] = []
    for name, tier in run_report.tiers.items():
        spans = (tier.intervals.p50_secs, tier.intervals.p95_secs, tier.intervals.max_secs)
        rows.append(
            [
                TIER_WORDS.get(name, name),
                str(tier.checkpoints),
                *("" if secs is None else duration_text(secs) for secs in spans),
                "" if tier.bytes is None else size_text(tier.bytes),
                "" if tier.requests is None else f"{tier.requests:,}",
                _cost_text(name, tier.cost_secs),
            ]
        )
    columns = [
        Column("tier"),
        Column("checkpoints", "right"),
        Column("interval P50", "right"),
        Column("P95", "right"),
        Column("largest", "right"),
        Column("written", "right"),
        Column("requests", "right"),
        Column("cost of one", "right"),
    ]
    output.print_table(columns, rows)
