"""Print the hosts of a run for `holdfast status`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli import output
from holdfast.cli.agents import ask
from holdfast.cli.output import Column, counted, secs_text, size_text
from holdfast.coordination.survivability import Standing
from holdfast.errors import HoldfastError
from holdfast.host.wire import protocol
from holdfast.host.wire.client import AgentGoneError
from holdfast.observe.run_status import JobHostStatus, JobStatus

HOLDS_SHOWN_MAX = 4
"""How many checkpoints of each host are printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """A run and its hosts, as an agent on this host reports them."""

    run: str
    run_id: str
    job: JobStatus


def jobs_of(agents: Sequence[protocol.AgentStatus], problems: list[str]) -> list[RunJob]:
    """Return the hosts of the runs of these agents, and append the agents' errors to `problems`."""
    found: dict[str, RunJob] = {}
    for agent in agents:
        if agent.run_id in found:
            continue
        try:
            job = ask(Path(agent.folder), "job", protocol.Empty(), JobStatus)
            found[agent.run_id] = RunJob(run=agent.run, run_id=agent.run_id, job=job)
        except AgentGoneError:
            problems.append(f"the agent of {agent.run} ended while it listed its hosts")
        except HoldfastError as error:
            problems.append(str(error))
    return list(found.values())


def print_job(found: RunJob) -> None:
    """Print the state of a run on all its hosts."""
    job = found.job
    living = sum(len(host.ranks) for host in job.hosts if not host.problem)
    inputs = [("run", f"{found.run}, attempt {job.attempt}"), ("leader", _leader(job))]
    if job.rank_count is not None:
        inputs.append(("trainers", f"{living} of {job.rank_count} live"))
    if job.leader_answers:
        inputs += _standings(job)
    output.print_table([Column(""), Column("", folds=True)], inputs)
    output.print_line("")
    columns = [Column("host"), Column("domain"), Column("agent"), Column("version")]
    columns += [Column("ranks"), Column("memory"), Column("holds", folds=True)]
    output.print_table(columns, [_row(host) for host in job.hosts])
    for host in job.hosts:
        if host.problem:
            since = "" if host.silent_secs is None else f" for {secs_text(host.silent_secs)}"
            output.print_line(f"{host.host}: not answering{since}: {host.problem}")


def _leader(job: JobStatus) -> str:
    if job.leader_answers:
        return job.leader or ""
    named = "none is known" if job.leader is None else f"{job.leader}, which does not answer"
    return f"{named}; the state of the checkpoints is unknown until another host leads"


def _standings(job: JobStatus) -> list[tuple[str, str]]:
    newest, in_ram, durable = job.newest, job.newest_in_ram, job.newest_durable
    if newest is None:
        return [("newest", "no checkpoint is complete yet")]
    lines = [("newest", _standing(newest))]
    if in_ram is not None and in_ram != newest:
        lines.append(("in memory", _standing(in_ram)))
    if durable != newest:
        shown = "none" if durable is None else f"step {durable.step}, attempt {durable.attempt}"
        lines.append(("durable", shown))
    lines.append(("survives", _survives(job)))
    return lines


def _standing(one: Standing) -> str:
    places = []
    if one.in_ram:
        places.append(f"in the memory of {counted(one.domains, 'failure domain')}")
    if one.durable:
        places.append("durable")
    where = " and ".join(places) or "in memory and durable storage together"
    return f"step {one.step}, attempt {one.attempt}: {where}"


def _survives(job: JobStatus) -> str:
    """Return which losses the run survives and from which step, the smallest loss first."""
    is_by_host = all(host.domain == host.host for host in job.hosts)
    what = "host" if is_by_host else "failure domain"
    shown = []
    for one in job.goes_on_from:
        if one.lost_domains_max is None:
            shown.append(f"any loss, from step {one.step}")
        elif one.lost_domains_max:
            lost = counted(one.lost_domains_max, f"more lost {what}")
            shown.append(f"{lost}, from step {one.step}")
    return "; ".join(shown) or f"no lost {what}"


def _row(host: JobHostStatus) -> list[str]:
    named = [host.host, host.domain, host.address or "–"]
    if host.problem:
        return [*named, "–", _ranks(host.ranks), "–", "no answer"]
    memory = f"{size_text(host.ram_bytes or 0)}, {size_text(host.ram_free_bytes or 0)} free"
    return [*named, host.version or "–", _ranks(host.ranks), memory, _holds(host)]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] + 1 == len(ranks):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks)) or "–"


def _holds(host: JobHostStatus) -> str:
    shown = []
    for held in host.holds[:HOLDS_SHOWN_MAX]:
        parts = []
        if held.own:
            parts.append(counted(len(held.own), "part"))
        if held.copies:
            parts.append(counted(len(held.copies), "copy", "copies"))
        shown.append(f"step {held.step}: {' + '.join(parts) or 'nothing yet'}")
    more = len(host.holds) - len(shown)
    return "; ".join(shown + ([f"{more} more"] if more else [])) or "nothing"
