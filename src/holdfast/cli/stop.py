"""Implement `holdfast stop`: end agents after they have made durable what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from holdfast.cli import output
from holdfast.cli.amounts import Amount
from holdfast.cli.output import counted
from holdfast.clock import Clock, SystemClock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.errors import (
    AgentUnavailableError,
    HoldfastError,
    SaveFailedError,
    WaitTimeoutError,
)
from holdfast.format.names import NO_AGE, Age, AttemptId, CheckpointId
from holdfast.format.timeline import last_steps
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import user_name
from holdfast.host.wire.agents_here import ask, leaving, living
from holdfast.host.wire.group_record import process_start
from holdfast.local_agent.client import AgentGoneError, AgentSilentError, answers
from holdfast.store.location import RunLocation, open_durable
from holdfast.trainer.opening.run_access import read_only

POLL_SECS = 0.05
ENDING_SECS = 10.0
"""How long a process that has closed its socket may take to end."""


@click.command()
@click.argument("directory", metavar="[DIR]", type=click.Path(), required=False)
@click.option("--all", "is_all", is_flag=True, help="Stop every agent on this host.")
@click.option(
    "--timeout",
    "timeout_secs",
    metavar="SECS",
    type=Amount(min=0),
    default=60.0,
    show_default=True,
    help="How long to wait until they have ended.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def stop(directory: str | None, is_all: bool, timeout_secs: float, as_json: bool) -> int:
    """Stop the agents of the run in DIR on this host, or all of them.

    A stopping agent first makes durable what it holds, and then clears its memory. It refuses to
    stop while trainers are attached to it. Without DIR and --all there must be exactly one agent.
    """
    if directory is not None and is_all:
        raise click.UsageError("DIR and --all exclude each other.", click.get_current_context())
    every = living()
    run_id = _run_id(directory, every) if directory is not None else None
    agents = [agent for agent in every if run_id in (None, agent.run_id)]
    if len(agents) > 1 and directory is None and not is_all:
        runs = ", ".join(agent.run for agent in agents)
        raise click.UsageError(
            f"There are {len(agents)} agents on this host, of {runs}: name a DIR, or --all.",
            click.get_current_context(),
        )
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_secs
    stopped, problems = [], []
    for agent in agents:
        try:
            with output.stderr().status(f"waiting for the agent of {agent.run} to end"):
                stop_agent(agent, deadline, clock)
            stopped.append(agent)
        except HoldfastError as error:
            if len(agents) == 1 and not as_json:
                raise
            problems.append((agent, str(error)))
    _await_leaving(run_id, deadline, clock)
    _report(stopped, problems, as_json)
    return 1 if problems else 0


def _run_id(directory: str, agents: Iterable[protocol.AgentStatus]) -> str | None:
    """Return the id of the run in DIR; of a URL with an agent here without a request to it.

    The service may refuse requests just then.
    """
    location = RunLocation(directory)
    ids = {agent.run_id for agent in agents if location.is_url and agent.run == location.text}
    return ids.pop() if len(ids) == 1 else read_only(directory).agents_id


def _await_leaving(run_id: str | None, deadline: float, clock: Clock) -> None:
    """Wait for agents that were already ending before this command.

    Raises:
        AgentUnavailableError: One of them is suspended or hangs.
        WaitTimeoutError: One of them has not ended in time.
    """
    while folders := leaving(run_id):
        if clock.monotonic() >= deadline:
            try:
                answers(folders[0])
            except AgentSilentError as error:
                raise AgentUnavailableError(f"stop the agent: {error}") from error
            raise WaitTimeoutError(
                f"stop the agent in {folders[0]}: it is ending, but has not ended in time"
            )
        clock.sleep(POLL_SECS)


def stop_agent(agent: protocol.AgentStatus, deadline: float, clock: Clock) -> None:
    """Request one agent to stop, and wait until its process has ended.

    Raises:
        RunBusyError: Trainers are attached to it.
        AgentUnavailableError: It is alive but does not answer.
        SaveFailedError: It has ended, but its newest checkpoint is not durable.
        WaitTimeoutError: It has not ended in time.
    """
    started = process_start(agent.pid)
    try:
        ask(Path(agent.folder), "stop", protocol.Stop(), protocol.Empty)
    except AgentGoneError as error:
        # It was already ending, or was killed. Only a process that lives on is an error.
        limit_secs = min(deadline, clock.monotonic() + ENDING_SECS)
        while started is not None and process_start(agent.pid) == started:
            if isinstance(error, AgentSilentError) or clock.monotonic() >= limit_secs:
                raise AgentUnavailableError(
                    f"stop the agent of {agent.run}: process {agent.pid} does not answer: {error}"
                ) from error
            clock.sleep(POLL_SECS)
    while started is not None and process_start(agent.pid) == started:
        if clock.monotonic() >= deadline:
            raise WaitTimeoutError(
                f"stop the agent of {agent.run}: process {agent.pid} has not ended in time; "
                f"{counted(agent.pending, 'checkpoint')} had to be made durable"
            )
        clock.sleep(POLL_SECS)
    _check_nothing_lost(agent, clock)


def _newest_age(checkpoints: Iterable[CheckpointId], limits: Mapping[AttemptId, int]) -> Age:
    """Return the age of the newest of the checkpoints that the timeline has; else `NO_AGE`."""
    counting = (c for c in checkpoints if c.step <= limits.get(c.attempt, -1))
    return max((c.age for c in counting), default=NO_AGE)


def _check_nothing_lost(agent: protocol.AgentStatus, clock: Clock) -> None:
    """Check that the newest checkpoint that the agent held is durable, if it had to be.

    It does not have to be if the run's directory is gone, if the run's timeline continues without
    it, or if a newer one is durable.
    """
    store = open_durable(agent.run, clock)
    if all(held.committed for held in agent.held if held.complete) or store.home.unusable_reason():
        return
    limits = last_steps(read_attempts(store))
    committed = [c for c, listing in list_checkpoints(store).items() if listing.is_committed]
    attempt, step = _newest_age((held.id for held in agent.held if held.complete), limits)
    if _newest_age(committed, limits) < (attempt, step):
        raise SaveFailedError(
            step,
            f"stop the agent of {agent.run}: it has ended, but step {step} (attempt {attempt}) "
            f"was not made durable; see its log in {agent.run}/events",
        )


def _report(
    stopped: list[protocol.AgentStatus],
    problems: list[tuple[protocol.AgentStatus, str]],
    as_json: bool,
) -> None:
    for _, reason in problems:
        output.print_error(reason)
    if as_json:
        output.print_json(
            {
                "stopped": [
                    {"run": agent.run, "pid": agent.pid, "folder": agent.folder}
                    for agent in stopped
                ],
                "problems": [
                    {"run": agent.run, "pid": agent.pid, "problem": reason}
                    for agent, reason in problems
                ],
            }
        )
        return
    for agent in stopped:
        output.print_line(f"{agent.run}: its agent (process {agent.pid}) has ended")
    if not stopped and not problems:
        output.print_line(f"no agent to stop that user {user_name()} has started")
