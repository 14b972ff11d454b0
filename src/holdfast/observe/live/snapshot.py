"""Define what is shown of a run that goes on, and make it from the hosts' state and the report.

Pure functions. Everything in a snapshot is a number or text; a page shows text as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from holdfast.observe.metrics.measures import RecentSteps, StepSpan
from holdfast.observe.reports.model import CATEGORIES, RunFailure, RunReport
from holdfast.observe.reports.words import (
    CATEGORY_WORDS,
    CAUSE_WORDS,
    TIER_WORDS,
    duration_text,
    share_text,
)
from holdfast.observe.run_status import JobHostStatus, JobStatus
from holdfast.observe.state_words import (
    HOLDS_SHOWN_MAX,
    headline,
    held_text,
    holds_text,
    ranks_text,
    silence,
    standing_text,
    step_text,
    survives,
)
from holdfast.quantities import counted, size_text

DURABLE_SHOWN_MAX = 8


class ShownHost(msgspec.Struct, frozen=True, kw_only=True):
    """One host.

    Attributes:
        name: its name.
        domain: its failure domain; empty if that is the host.
        is_leading: whether its agent leads the run.
        problem: why it does not answer; empty if it does.
        ranks: the ranks there, in words.
        memory: what its RAM tier has, in words.
        holds: the checkpoints in its RAM, the newest first.
        holds_text: the same in words.
    """

    name: str
    domain: str
    is_leading: bool
    problem: str
    ranks: str
    memory: str
    holds: tuple[HoldView, ...]
    holds_text: str


class HoldView(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in the RAM of a host, and what the host has of it, in words."""

    step: int
    attempt: int
    text: str


class CategoryView(msgspec.Struct, frozen=True, kw_only=True):
    """A share of the run's time."""

    name: str
    text: str
    share: float
    time: str


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a run.

    Attributes:
        run: the run's path or URL.
        time: when this was found, in UTC.
        is_live: whether an agent on this host answers.
        headline: the state of the run in a few words.
        attempt: the present attempt.
        step: the last step that a host here has passed to `save`.
        hosts: all hosts that are known.
        durable: the newest durable steps, the newest first.
        durable_text: the newest of them in words, or that there is none, or that it is not known.
        newest: where the newest whole checkpoint is, in words.
        newest_step: its step; null: there is none.
        survives: which losses the run survives now, in words, the smallest loss first.
        steps: the newest steps.
        goodput: the productive share of the time so far; null: none is known yet.
        goodput_text: the same in words.
        wall: the time so far, in words.
        categories: the shares of the time, without zeros.
        failures: the number of failures so far.
        last_failure: the last one, or the hosts that do not answer now, explained; empty: none.
        problems: what cannot be shown, and why.
    """

    run: str
    time: str
    is_live: bool
    headline: str
    attempt: int
    step: int | None
    hosts: tuple[ShownHost, ...]
    durable: tuple[int, ...]
    durable_text: str
    newest: str
    newest_step: int | None
    survives: tuple[str, ...]
    steps: tuple[StepSpan, ...]
    goodput: float | None
    goodput_text: str
    wall: str
    categories: tuple[CategoryView, ...]
    failures: int
    last_failure: tuple[str, ...]
    problems: tuple[str, ...]


def view_of_run(
    run: str,
    report: RunReport,
    job: JobStatus | None,
    *,
    steps: RecentSteps | None,
    durable: Sequence[int] | None,
    problems: Sequence[str],
) -> LiveView:
    """Return what is shown of a run.

    Args:
        run: Its path or URL.
        report: The report of its events.
        job: The state of its hosts; None: no agent on this host answers.
        steps: The newest steps; None: not known.
        durable: Its newest durable steps, ascending; None: they are not known.
        problems: What could not be found out, and why.
    """
    spans = steps.spans if steps is not None else ()
    no_step_text = "not known" if durable is None else "none"
    attempts = [attempt.attempt for attempt in report.attempts]
    last = report.failures[-1] if report.failures else None
    silent = silence(job) if job is not None else ()
    # Before the durations of the first steps are reported, no time is known to be productive.
    goodput = report.goodput or None
    return LiveView(
        run=run,
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        is_live=job is not None,
        headline=headline(job) if job is not None else _absence(report),
        attempt=job.attempt if job is not None else max(attempts, default=0),
        step=spans[-1].step if spans else _last_step(report),
        hosts=tuple(_host(host, job) for host in job.hosts) if job is not None else (),
        durable=tuple(reversed((durable or ())[-DURABLE_SHOWN_MAX:])),
        durable_text=step_text(durable[-1]) if durable else no_step_text,
        newest=standing_text(job.newest) if job is not None else "",
        newest_step=job.newest.step if job is not None and job.newest is not None else None,
        survives=survives(job) if job is not None else (),
        steps=spans,
        goodput=goodput,
        goodput_text="" if goodput is None else share_text(goodput),
        wall=duration_text(report.wall_secs) if report.wall_secs else "",
        categories=tuple(
            CategoryView(
                name=name,
                text=CATEGORY_WORDS[name],
                share=report.categories[name] / report.wall_secs,
                time=duration_text(report.categories[name]),
            )
            for name in CATEGORIES
            if report.wall_secs and report.categories[name]
        ),
        failures=len(report.failures),
        last_failure=silent or (explained(last) if last is not None else ()),
        problems=tuple(problems),
    )


def explained(failure: RunFailure) -> tuple[str, ...]:
    """Return what happened, what it cost and how the run continued, a sentence each."""
    what = CAUSE_WORDS.get(failure.cause, failure.cause)
    when = failure.time.strftime("%Y-%m-%d %H:%M:%S UTC")
    after = "" if failure.last_step is None else f", after {step_text(failure.last_step)}"
    sentences = [f"{when}: {what} on {failure.host}, in attempt {failure.attempt}{after}."]
    if failure.steps_lost is None:
        return (*sentences, "The run has not continued yet.")
    if failure.steps_lost:
        sentences.append(f"{counted(failure.steps_lost, 'step')} had to be made again.")
    else:
        sentences.append("No step was lost.")
    if failure.secs_to_next_step is not None:
        source = ""
        if failure.source is not None:
            source = f", from {TIER_WORDS.get(failure.source, failure.source)}"
        spent = duration_text(failure.secs_to_next_step)
        sentences.append(f"The next step was finished {spent} later{source}.")
    return tuple(sentences)


def _absence(report: RunReport) -> str:
    return "no agent of this run answers on this host" if report.attempts else "no events yet"


def _last_step(report: RunReport) -> int | None:
    steps = [attempt.last_step for attempt in report.attempts if attempt.last_step is not None]
    return steps[-1] if steps else None


def _host(host: JobHostStatus, job: JobStatus) -> ShownHost:
    memory = "" if host.ram_bytes is None else size_text(host.ram_bytes)
    return ShownHost(
        name=host.host,
        domain="" if host.domain == host.host else host.domain,
        is_leading=host.host == job.leader,
        problem=host.problem,
        ranks=ranks_text(host.ranks),
        memory=memory,
        holds=tuple(
            HoldView(step=held.step, attempt=held.attempt, text=held_text(held))
            for held in host.holds[:HOLDS_SHOWN_MAX]
        ),
        holds_text=holds_text(host),
    )
