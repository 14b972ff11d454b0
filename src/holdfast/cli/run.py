"""Implement `holdfast run`: run a command, restart it, and wait until its saves are durable."""

from __future__ import annotations

import signal

import click

from holdfast.cli import output
from holdfast.clock import Clock, SystemClock
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import ensure_agent
from holdfast.local_agent.place import host_name
from holdfast.supervise.command import CommandNotRunError, Signals
from holdfast.supervise.drain import AgentOfRun, Agents
from holdfast.supervise.ends import EndCause
from holdfast.supervise.supervisor import Supervisor
from holdfast.trainer.opening.run_access import open_or_create


@click.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] --")
@click.argument("command", metavar="CMD…", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--max-restarts",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How many times to restart the command if it fails.",
)
@click.option(
    "--preempted-code",
    metavar="CODE",
    type=click.IntRange(min=1, max=255),
    help="The exit code if the command ended because it was preempted; default: its own.",
)
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(),
    help="Start the agent of this run before the command; create the run if it is missing.",
)
@click.option(
    "--drain-secs",
    metavar="SECS",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="How long to wait for saves to become durable after the command has ended.",
)
def run(
    command: tuple[str, ...],
    max_restarts: int,
    preempted_code: int | None,
    directory: str | None,
    drain_secs: float,
) -> int:
    """Run CMD and exit with its exit code, once all its saves are durable.

    Signals are forwarded to the command. If it fails, it is restarted up to N times, with the count
    in HOLDFAST_RESTART_COUNT, unless a forwarded signal ended it. The exit code is 0 only if the
    command's is 0 and all its saves became durable; if a signal ended the command, it is 128 plus
    the signal's number. A preempted training often ends with 0, as a finished one does: with
    --preempted-code a scheduler can tell them apart, and also starts it again if its last step is
    not durable, which is reported as an error. `holdfast run` can be the first process of a
    container.
    """
    clock = SystemClock()
    agents = Agents(clock, output.note)
    signals = Signals()
    with signals.handled():
        if directory is not None:
            agents.add_agent(_start_agent(directory, clock))
        if signals.is_ending:
            if signal.SIGTERM in signals.received and preempted_code is not None:
                return preempted_code
            return 128 + signals.received[-1]
        supervisor = Supervisor(command, signals, agents, clock, output.note)
        try:
            ended = supervisor.run(max_restarts)
        except CommandNotRunError as error:
            output.print_error(str(error))
            return error.code
        signals.received.clear()
        problems = agents.drain(drain_secs, ended.started, lambda: signals.is_ending)
    for problem in problems:
        output.print_error(problem)
    if ended.cause is EndCause.PREEMPTED and preempted_code is not None:
        return preempted_code
    return ended.code or (1 if problems else 0)


def _start_agent(directory: str, clock: Clock) -> AgentOfRun:
    opened = open_or_create(directory)
    config = AgentConfig(
        run=str(opened.location), run_id=opened.run_id, host=host_name(), folder=""
    )
    folder, reason = ensure_agent(config, clock)
    if reason is not None:
        output.warn(f"the agent and RAM checkpoints are in {folder}: {reason}")
    return AgentOfRun(run=config.run, run_id=config.run_id, host=config.host)
