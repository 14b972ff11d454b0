"""Implement `holdfast run`: run a command, restart it, and wait until its saves are durable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import click

from holdfast.cli import output
from holdfast.cli.child import Child, CommandNotRunError, Signals
from holdfast.cli.drain import AgentOfRun, Agents
from holdfast.clock import Clock, SystemClock
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import ensure_agent
from holdfast.local_agent.place import host_name
from holdfast.trainer.opening.run_access import open_or_create

RESTART_VARIABLE = "HOLDFAST_RESTART_COUNT"
NOTICE_SECS = 0.25
"""How often to look for the agents of the command's processes."""
BACKOFF_SECS_MAX = 10.0


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
    command: tuple[str, ...], max_restarts: int, directory: str | None, drain_secs: float
) -> int:
    """Run CMD and exit with its exit code, once all its saves are durable.

    Signals are forwarded to the command. If it fails, it is restarted up to N times, with the count
    in HOLDFAST_RESTART_COUNT, unless a forwarded signal ended it. The exit code is 0 only if the
    command's is 0 and all its saves became durable; if a signal ended the command, it is 128 plus
    the signal's number. `holdfast run` can be the first process of a container.
    """
    clock = SystemClock()
    agents = Agents(clock)
    signals = Signals()
    with signals.handled():
        if directory is not None:
            agents.add_agent(_start_agent(directory, clock))
        if signals.is_ending:
            return 128 + signals.received[-1]
        supervisor = _Supervisor(command, signals, agents, clock)
        try:
            ended = supervisor.run(max_restarts)
        except CommandNotRunError as error:
            output.print_error(str(error))
            return error.code
        signals.received.clear()
        problems = agents.drain(drain_secs, ended.started, lambda: signals.is_ending)
    for problem in problems:
        output.print_error(problem)
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


@dataclass(frozen=True, slots=True)
class _Ended:
    """The last process of the command: its exit code and the time of its start."""

    code: int
    started: datetime


class _Supervisor:
    """Start the command, and restart it when it fails."""

    def __init__(
        self, command: Sequence[str], signals: Signals, agents: Agents, clock: Clock
    ) -> None:
        self._command = command
        self._signals = signals
        self._agents = agents
        self._clock = clock

    def run(self, max_restarts: int) -> _Ended:
        """Run the command until it succeeds, a signal ends it, or its restarts are used up."""
        for restart_count in range(max_restarts + 1):
            child, ended = self._run_once(restart_count)
            if ended.code == 0 or restart_count == max_restarts or self._is_over(ended.code):
                break
            secs = min(BACKOFF_SECS_MAX, 0.5 * 2**restart_count)
            output.note(
                f"holdfast run: exit code {ended.code}; restart {restart_count + 1} of "
                f"{max_restarts} in {secs:g} s"
            )
            child.end_rest(self._clock)
            if not self._rested(secs):
                break
        return ended

    def _run_once(self, restart_count: int) -> tuple[Child, _Ended]:
        started = self._clock.now()
        environment = os.environ | {RESTART_VARIABLE: str(restart_count)}
        with self._signals.passed_on(lambda: Child(self._command, environment)) as child:
            code = None
            while code is None:
                self._agents.note_agent(child.pid)
                code = child.wait(NOTICE_SECS)
        return child, _Ended(code, started)

    def _is_over(self, code: int) -> bool:
        """Return whether a forwarded signal requested the command's end, or ended it."""
        return self._signals.is_ending or code - 128 in self._signals.received

    def _rested(self, secs: float) -> bool:
        """Wait before a restart; return False if a signal interrupts that."""
        deadline = self._clock.monotonic() + secs
        while self._clock.monotonic() < deadline:
            if self._signals.is_ending:
                return False
            self._clock.sleep(0.05)
        return True
