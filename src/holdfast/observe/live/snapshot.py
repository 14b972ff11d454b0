"""Define what is shown of a run that goes on, and make it from the hosts' state and the report.

Pure functions. Everything in a snapshot is a number or text; a page shows text as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from holdfast.coordination.survivability import Standing
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
from holdfast.quantities import size_text

HOLDS_SHOWN_MAX = 4
"""How many checkpoints of each host are shown, the newest."""
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
    """

    name: str
    domain: str
    is_leading: bool
    problem: str
    ranks: str
    memory: str
    holds: tuple[HoldView, ...]


class HoldView(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in the RAM of a host: its own ranks' parts, and replicas of others' parts."""

    step: int
    attempt: int
    own: int
    replicas: int


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
        goodput: the productive share of the time so far; null: unknown.
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
    durable: Sequence[int],
    problems: Sequence[str],
    is_complete: bool = True,
) -> LiveView:
    """Return what is shown of a run.

    Args:
        run: Its path or URL.
        report: The report of its events.
        job: The state of its hosts; None: no agent on this host answers.
        steps: The newest steps; None: not known.
        durable: Its newest durable steps, ascending.
        problems: What could not be found out, and why.
        is_complete: Whether all events could be read; others may be those of commits.
    """
    spans = steps.spans if steps is not None else ()
    no_step_text = "none" if is_complete else "not known"
    attempts = [one.attempt for one in report.attempts]
    last = report.failures[-1] if report.failures else None
    return LiveView(
        run=run,
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        is_live=job is not None,
        headline=_headline(job, report),
        attempt=job.attempt if job is not None else max(attempts, default=0),
        step=spans[-1].step if spans else _last_step(report),
        hosts=tuple(_host(host, job) for host in job.hosts) if job is not None else (),
        durable=tuple(reversed(durable[-DURABLE_SHOWN_MAX:])),
        durable_text=f"step {durable[-1]:,}" if durable else no_step_text,
        newest=_standing(job.newest) if job is not None else "",
        newest_step=job.newest.step if job is not None and job.newest is not None else None,
        survives=survives(job) if job is not None else (),
        steps=spans,
        goodput=report.goodput,
        goodput_text="" if report.goodput is None else share_text(report.goodput),
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
        last_failure=silence(job) or (explained(last) if last is not None else ()),
        problems=tuple(problems),
    )


def explained(failure: RunFailure) -> tuple[str, ...]:
    """Return what happened, what it cost and how the run continued, a sentence each."""
    what = CAUSE_WORDS.get(failure.cause, failure.cause)
    when = failure.time.strftime("%Y-%m-%d %H:%M:%S UTC")
    after = "" if failure.last_step is None else f", after step {failure.last_step:,}"
    sentences = [f"{when}: {what} on {failure.host}, in attempt {failure.attempt}{after}."]
    if failure.steps_lost is None:
        return (*sentences, "The run has not continued yet.")
    if failure.steps_lost:
        count = failure.steps_lost
        sentences.append(f"{count:,} {'step' if count == 1 else 'steps'} had to be made again.")
    else:
        sentences.append("No step was lost.")
    if failure.secs_to_next_step is not None:
        source = ""
        if failure.source is not None:
            source = f", from {TIER_WORDS.get(failure.source, failure.source)}"
        spent = duration_text(failure.secs_to_next_step)
        sentences.append(f"The next step was finished {spent} later{source}.")
    return tuple(sentences)


def silence(job: JobStatus | None) -> tuple[str, ...]:
    """Return which hosts do not answer now and what follows, a sentence each; empty: all answer."""
    silent = [host for host in job.hosts if host.problem] if job is not None else []
    if job is None or not silent:
        return ()
    sentences = [f"Now: {one.host} does not answer ({one.problem})." for one in silent]
    if not job.leader_answers:
        return (*sentences, "The host that leads is among them, or is not known.")
    if job.newest is None:
        return (*sentences, "No checkpoint is complete on the hosts that answer.")
    advice = f"the next start continues from step {job.newest.step:,} as things are"
    return (
        *sentences,
        f"If that is no interruption of the network, start the job again: {advice}.",
    )


def survives(job: JobStatus) -> tuple[str, ...]:
    """Return which losses a run survives now, and from which step, the smallest loss first."""
    if not job.leader_answers:
        return ("unknown: the host that leads does not answer",)
    if job.newest is None:
        return ("no checkpoint is complete yet",)
    is_by_host = all(host.domain == host.host for host in job.hosts)
    what = "host" if is_by_host else "failure domain"
    shown = []
    for one in job.goes_on_from:
        if one.lost_domains_max is None:
            shown.append(f"any loss, from step {one.step:,}")
        elif one.lost_domains_max:
            count = one.lost_domains_max
            noun = what if count == 1 else f"{what}s"
            shown.append(f"{count} more lost {noun}, from step {one.step:,}")
        else:
            shown.append(f"no lost {what} but lost processes, from step {one.step:,}")
    return tuple(shown) or (f"no lost {what}",)


def _headline(job: JobStatus | None, report: RunReport) -> str:
    if job is None:
        return "no agent of this run answers on this host" if report.attempts else "no events yet"
    silent = [host.host for host in job.hosts if host.problem]
    if silent:
        what = "host does" if len(silent) == 1 else "hosts do"
        return f"{len(silent)} {what} not answer: {', '.join(silent)}"
    count = sum(len(host.ranks) for host in job.hosts)
    if not count:
        return "no training now; the agents hold its checkpoints"
    return f"training, {count} {'process' if count == 1 else 'processes'}"


def _last_step(report: RunReport) -> int | None:
    found = [one.last_step for one in report.attempts if one.last_step is not None]
    return found[-1] if found else None


def _host(host: JobHostStatus, job: JobStatus) -> ShownHost:
    memory = "" if host.ram_bytes is None else size_text(host.ram_bytes)
    return ShownHost(
        name=host.host,
        domain="" if host.domain == host.host else host.domain,
        is_leading=host.host == job.leader,
        problem=host.problem,
        ranks=_ranks(host.ranks),
        memory=memory,
        holds=tuple(
            HoldView(
                step=held.step, attempt=held.attempt, own=len(held.own), replicas=len(held.copies)
            )
            for held in host.holds[:HOLDS_SHOWN_MAX]
        ),
    )


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    if len(ranks) > 2 and ranks[-1] - ranks[0] + 1 == len(ranks):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _standing(one: Standing | None) -> str:
    if one is None:
        return "no whole checkpoint yet"
    places = []
    if one.in_ram:
        domains = f"{one.domains} failure domains" if one.domains > 1 else "one failure domain"
        places.append(f"in the RAM of {domains}")
    if one.durable:
        places.append("durable")
    where = " and ".join(places) or "in RAM and durable storage together"
    return f"step {one.step:,}, {where}"
