"""Implement `holdfast status`: print this user's agents here, and the hosts of their runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from holdfast.cli import output
from holdfast.cli.file_agents import files_in_ram, print_files
from holdfast.cli.jobs import jobs_of, print_job
from holdfast.cli.output import Column, counted, secs_text, size_text
from holdfast.engine.reading.run import ReadableRun
from holdfast.errors import HoldfastError
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import ram_folder
from holdfast.host.wire.agents_here import (
    agent_folders_here,
    leaving,
    living,
    no_agent_text,
    run_of,
)
from holdfast.local_agent.place import is_locked
from holdfast.observe.events.reader import read_events
from holdfast.observe.events.schema import CommandEnded, ReplicasDiffer
from holdfast.observe.replica_differences import ReplicaDifference, last_difference
from holdfast.observe.reports.goodput import command_end
from holdfast.observe.reports.model import CommandEnd
from holdfast.observe.reports.words import END_WORDS, decision_text
from holdfast.observe.state_words import step_text
from holdfast.trainer.opening.run_access import read_only


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A folder with a run's RAM tier but no agent: the next start of the run takes it over."""

    folder: Path
    run_id: str
    ram_bytes: int


@click.command()
@click.argument("directory", metavar="[DIR]", type=click.Path(), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(directory: str | None, as_json: bool) -> None:
    """Show the agents on this host, or those of the run in DIR.

    For each agent it prints the run and the process, the attached trainers, the checkpoints it
    holds, and when it ends. With DIR it also prints how the command of `holdfast run` ended last,
    and which replicas differed last.
    For a run on several hosts it also prints the hosts and their agents,
    what each of them holds, and how many lost hosts the run would survive now. Without DIR it also
    shows the agent that holds whole files in RAM.
    """
    run = read_only(directory) if directory is not None else None
    run_id = run.agents_id if run is not None else None
    problems: list[str] = []
    files = [*files_in_ram(problems)] if directory is None else []
    agents = [status for status in living(problems) if run_id in (None, status.run_id)]
    jobs = jobs_of(agents, problems)
    if run is not None:
        problems += _put_back(run, agents)
    for problem in problems:
        output.warn(problem)
    answering = {Path(status.folder) for status in agents}
    silent = leaving(run_id, answering)
    for folder in silent:
        output.warn(
            f"{folder}: its agent's process is alive but does not answer; it is starting or "
            "ending, or was stopped by a signal"
        )
    left = _left_behind(run_id, answering)
    last_end = _last_end(run) if run is not None else None
    difference = _difference(run) if run is not None else None
    if as_json:
        output.print_json(
            {
                "last_end": last_end,
                "replicas_differ": difference.document if difference is not None else None,
                "agents": [msgspec.to_builtins(agent) for agent in agents],
                "runs": [
                    {"run": entry.run, "run_id": entry.run_id, **msgspec.to_builtins(entry.job)}
                    for entry in jobs
                ],
                "left_behind": [_document(tier) for tier in left],
                "silent": [str(folder) for folder in silent],
                "file_agents": [of_files.document for of_files in files],
            }
        )
        return
    if not agents and not left and not silent and not files:
        output.print_line(no_agent_text(directory))
    for of_run in (of_run for of_run in jobs if len(of_run.job.hosts) > 1):
        print_job(of_run)
        output.print_line("")
    for number, agent in enumerate(agents):
        if number:
            output.print_line("")
        _print(agent)
    if last_end is not None:
        output.print_line(_end_text(last_end))
    if difference is not None:
        output.print_line(f"replicas differ: {difference.text}")
    for tier in left:
        output.print_line(
            f"{tier.folder}: {size_text(tier.ram_bytes)} of RAM and no agent; the next start of "
            f"run {tier.run_id} takes it over"
        )
    for number, of_files in enumerate(files):
        if number or agents:
            output.print_line("")
        print_files(of_files)


def _last_end(run: ReadableRun) -> CommandEnd | None:
    """Return how the command of a `holdfast run` ended last; None: it did not, or had finished."""
    ends = read_events(run.location.folder, CommandEnded)
    return command_end(ends[-1]) if ends else None


def _difference(run: ReadableRun) -> ReplicaDifference | None:
    return last_difference(read_events(run.location.folder, ReplicasDiffer))


def _end_text(end: CommandEnd) -> str:
    cause = END_WORDS.get(end.cause, end.cause)
    decision = decision_text(end.restart_in_secs, end.stopped_because)
    when = output.time_text(end.time)
    place = f"attempt {end.attempt}, on host {end.host}"
    return f"last interruption: {when}, {place}: {cause} ({end.reason}); {decision}"


def _put_back(run: ReadableRun, agents: Sequence[protocol.AgentStatus]) -> Iterator[str]:
    """Return a text for each agent without trainers whose newest checkpoint no start would use."""
    for agent in agents:
        held = max((h for h in agent.held if h.complete), key=lambda h: h.id, default=None)
        if held is None or agent.trainers:
            continue
        try:
            put_back = run.find_put_back(held.step, held.attempt, is_durable=held.committed)
        except HoldfastError as error:
            yield f"whether {run.location} has step {held.step} is not known: {error}"
            continue
        if put_back is not None:
            yield put_back.text


def _document(left: Left) -> dict[str, object]:
    return {"folder": str(left.folder), "run_id": left.run_id, "ram_bytes": left.ram_bytes}


def _left_behind(run_id: str | None, answering: set[Path]) -> list[Left]:
    left = []
    for folder in agent_folders_here(run_id):
        if folder in answering or is_locked(folder):
            continue
        files = [path.stat() for path in ram_folder(folder).rglob("*") if path.is_file()]
        # An image is a second name of its slot, so each inode is counted once.
        size_bytes = sum({state.st_ino: state.st_size for state in files}.values())
        if size_bytes:
            left.append(Left(folder=folder, run_id=run_of(folder) or "", ram_bytes=size_bytes))
    return left


def _print(agent: protocol.AgentStatus) -> None:
    inputs = [
        ("run", f"{agent.run}, attempt {agent.attempt}"),
        ("agent", f"process {agent.pid} on host {agent.host}, {_leaving(agent)}"),
        ("memory", f"{size_text(agent.ram_bytes)} in {agent.folder}"),
        *([("prometheus", agent.prometheus_url)] if agent.prometheus_url is not None else []),
        *([("starting", f"waits: {agent.waits_for}")] if agent.waits_for else []),
        *_named("trainers", [_trainer(trainer) for trainer in agent.trainers]),
        *_named("holds", [_held(held) for held in agent.held]),
    ]
    if agent.remote is not None:
        inputs.append(("remote", _remote(agent.remote)))
    if agent.pending:
        inputs.append(("pending", f"{counted(agent.pending, 'checkpoint')} to be made durable"))
    output.print_table([Column(""), Column("", folds=True)], inputs)


def _named(name: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [("" if number else name, line) for number, line in enumerate(lines or ["none"])]


def _leaving(agent: protocol.AgentStatus) -> str:
    if agent.leaves_in_secs is not None:
        return f"ends in {secs_text(agent.leaves_in_secs)}"
    if agent.trainers or agent.waits_for:
        return "runs while trainers are attached"
    is_copying = agent.remote is not None and not agent.pending
    return f"runs until all is {'in the remote tier' if is_copying else 'durable'}"


def _remote(remote: protocol.RemoteStatus) -> str:
    text = remote.place
    if remote.newest_step is not None:
        text += f": {step_text(remote.newest_step)}"
    if remote.uploading_step is not None:
        done = f"{remote.parts_done} of {remote.part_count} parts" if remote.part_count else "begun"
        text += f"; {step_text(remote.uploading_step)} is being copied ({done})"
    elif remote.is_behind:
        text += "; a newer one is in the run's directory"
    return f"{text}; the last try failed: {remote.problem}" if remote.problem else text


def _trainer(trainer: protocol.TrainerStatus) -> str:
    step = "at no step yet" if trainer.step is None else f"at {step_text(trainer.step)}"
    return f"rank {trainer.rank}: process {trainer.pid}, {step}"


def _held(held: protocol.HeldStatus) -> str:
    ram = f"{held.parts_in_ram} of {held.part_count} parts in RAM"
    if held.parts_in_ram == held.part_count:
        ram = "in RAM"
    if held.committed:
        fate = "durable"
    elif held.failed is not None:
        fate = f"not durable: {held.failed}"
    else:
        fate = "to be made durable" if held.durable_due else "in RAM alone"
    return f"{step_text(held.step)}, attempt {held.attempt}: " + (
        fate if fate == "in RAM alone" else f"{ram}, {fate}"
    )
