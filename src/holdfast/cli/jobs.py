"""Print the hosts of a run for `holdfast status`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli import output
from holdfast.cli.output import Column, size_text
from holdfast.errors import HoldfastError
from holdfast.host.wire import protocol
from holdfast.host.wire.agents_here import ask
from holdfast.local_agent.client import AgentGoneError
from holdfast.observe.run_status import JobHostStatus, JobStatus
from holdfast.observe.state_words import (
    holds_text,
    leader_text,
    ranks_text,
    silence_text,
    standing_text,
    survives,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """A run and its hosts, as an agent on this host reports them."""

    run: str
    run_id: str
    job: JobStatus


def jobs_of(agents: Sequence[protocol.AgentStatus], problems: list[str]) -> list[RunJob]:
    """Return the hosts of the runs of these agents, and append the agents' errors to `problems`."""
    jobs: dict[str, RunJob] = {}
    for agent in agents:
        if agent.run_id in jobs:
            continue
        try:
            job = ask(Path(agent.folder), "job", protocol.Empty(), JobStatus)
            jobs[agent.run_id] = RunJob(run=agent.run, run_id=agent.run_id, job=job)
        except AgentGoneError:
            problems.append(f"the agent of {agent.run} ended while it listed its hosts")
        except HoldfastError as error:
            problems.append(str(error))
    return list(jobs.values())


def print_job(of_run: RunJob) -> None:
    """Print the state of a run on all its hosts."""
    job = of_run.job
    living = sum(len(host.ranks) for host in job.hosts if not host.problem)
    rows = [("run", f"{of_run.run}, attempt {job.attempt}"), ("leader", leader_text(job))]
    if job.rank_count is not None:
        rows.append(("trainers", f"{living} of {job.rank_count} live"))
    if job.leader_answers:
        rows += _standings(job)
    output.print_table([Column(""), Column("", folds=True)], rows)
    output.print_line("")
    columns = [Column("host"), Column("domain"), Column("agent"), Column("version")]
    columns += [Column("trainers"), Column("RAM"), Column("holds", folds=True)]
    output.print_table(columns, [_row(host) for host in job.hosts])
    for host in job.hosts:
        if host.problem:
            output.print_line(silence_text(host))


def _standings(job: JobStatus) -> list[tuple[str, str]]:
    newest, in_ram, durable = job.newest, job.newest_in_ram, job.newest_durable
    rows = [("newest", standing_text(newest))]
    if newest is None:
        return rows
    if in_ram is not None and in_ram != newest:
        rows.append(("in RAM", standing_text(in_ram)))
    if durable != newest:
        rows.append(("durable", "none" if durable is None else standing_text(durable)))
    rows.append(("survives", "; ".join(survives(job))))
    return rows


def _row(host: JobHostStatus) -> list[str]:
    named = [host.host, host.domain, host.address or "–"]
    if host.problem:
        return [*named, "–", ranks_text(host.ranks), "–", "no answer"]
    memory = f"{size_text(host.ram_bytes or 0)}, {size_text(host.ram_free_bytes or 0)} free"
    return [*named, host.version or "–", ranks_text(host.ranks), memory, holds_text(host)]
