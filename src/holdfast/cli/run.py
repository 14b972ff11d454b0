"""Implement `holdfast run`: run a command, restart it, and wait until its saves are durable."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from holdfast.cli import output
from holdfast.cli.amounts import Amount
from holdfast.clock import Clock, SystemClock
from holdfast.errors import InvalidArgumentError
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import ensure_agent, opening_secs
from holdfast.local_agent.place import host_name
from holdfast.supervise.agents import AgentOfRun, Agents
from holdfast.supervise.command import ColdStarts, CommandNotRunError, Signals, Starts
from holdfast.supervise.compile_caches import cache_variables, compile_folder, program_folder
from holdfast.supervise.drain import drain
from holdfast.supervise.ends import EndCause
from holdfast.supervise.hang_watch import HangWatch
from holdfast.supervise.python_program import parse_command
from holdfast.supervise.ranks.host_list import Address, own_place, parse_hosts
from holdfast.supervise.ranks.launcher_config import LauncherConfig
from holdfast.supervise.ranks.membership import Settings
from holdfast.supervise.restarts import Budgets
from holdfast.supervise.standby import Standby
from holdfast.supervise.supervisor import Supervisor
from holdfast.trainer.opening.run_access import open_or_create


class _BudgetsType(click.ParamType[Budgets]):
    name = "budgets"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Budgets:
        try:
            return value if isinstance(value, Budgets) else Budgets.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


AUTO = 0.0
"""The value of `--hang-timeout auto`."""


class _HangTimeoutType(click.ParamType[float]):
    name = "secs"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        text = str(value)
        if text == "auto":
            return AUTO
        try:
            secs = float(text)
        except ValueError:
            secs = math.nan
        if not 0 < secs < math.inf:
            self.fail(f"expected auto or a number of seconds above 0, found {text!r}", param, ctx)
        return secs


@click.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] --")
@click.argument("command", metavar="CMD…", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--max-restarts",
    metavar="N|CLASS=N,…",
    type=_BudgetsType(),
    default="0",
    show_default=True,
    help="How many times to restart the command if it fails, in all or by the class of the end.",
)
@click.option(
    "--hang-timeout",
    metavar="auto|SECS",
    type=_HangTimeoutType(),
    help="End and restart a training that makes no step for so long; default: wait forever.",
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
    type=Amount(min=0),
    default=600.0,
    show_default=True,
    help="How long to wait for saves to become durable after the command has ended; at most 15 s "
    "for one that storage has refused, which its agent goes on trying.",
)
@click.option(
    "--nproc",
    metavar="N",
    type=click.IntRange(min=1),
    help="Start N ranks of CMD, a program that calls `holdfast.torch.surviving`, on each host.",
)
@click.option(
    "--spares",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --nproc: keep N more processes on each host, for the places of lost ranks.",
)
@click.option(
    "--hosts",
    metavar="HOST[:PORT],…|auto",
    help="With --nproc: the hosts of the job, of which each runs this command; auto: those of "
    "Slurm's step.",
)
@click.option(
    "--spare-hosts",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --hosts: so many of them wait for the ranks of lost hosts.",
)
@click.option(
    "--min-ranks",
    metavar="N",
    type=click.IntRange(min=1),
    help="With --nproc: go on with fewer ranks, at least N in all, if no process can replace a "
    "lost one.",
)
@click.option(
    "--leave-secs",
    metavar="SECS",
    type=Amount(min=0.1),
    default=30.0,
    show_default=True,
    help="With --nproc: kill a rank that does not leave its collective so long after a loss.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="Restart from a process that has already imported what CMD, a Python program, imports.",
)
@click.option(
    "--preload",
    metavar="MODULE",
    multiple=True,
    help="With --standby: import this module too; may be repeated.",
)
@click.option(
    "--no-compile-cache",
    is_flag=True,
    help="With --standby: set no folder for the compile caches of JAX and PyTorch.",
)
def run(
    command: tuple[str, ...],
    max_restarts: Budgets,
    hang_timeout: float | None,
    preempted_code: int | None,
    directory: str | None,
    drain_secs: float,
    **others: Any,
) -> int:
    """Run CMD and exit with its exit code, once all its saves are durable.

    Signals are forwarded to the command. If it fails, it is restarted up to N times, with the count
    in HOLDFAST_RESTART_COUNT, unless a forwarded signal ended it. `--max-restarts lost=inf,error=3`
    counts each class of ends by itself: preempted, lost, killed, memory, nan, disk, hang, error. A
    training that fails twice alike, or twice without a new checkpoint, is not restarted.

    The exit code is 0 only if the command's is 0 and all its saves became durable; if a signal
    ended the command, it is 128 plus the signal's number. A preempted training often ends with 0,
    as a finished one does: with --preempted-code a scheduler can tell them apart, and also starts
    it again if its last step is not durable, which is reported as an error. `holdfast run` can be
    the first process of a container.

    With --standby, a process is kept that has imported what the program had imported at its second
    step, and a restart takes the time of the program alone (docs/restarts.md).
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
        hangs = None
        if hang_timeout is not None:
            hangs = HangWatch(hang_timeout or None, agents, clock, output.note)
        try:
            with _starts(command, directory, clock, **others) as starts:
                supervisor = Supervisor(starts, signals, agents, clock, output.note, hangs)
                ended = supervisor.run(max_restarts)
        except CommandNotRunError as error:
            output.print_error(str(error))
            return error.code
        signals.received.clear()
        problems = drain(
            agents.served(),
            drain_secs,
            ended.started,
            lambda: signals.is_ending,
            left_open=agents.left_open if ended.code == 0 else (),
            clock=clock,
            note=output.note,
        )
    for problem in problems:
        output.print_error(problem)
    if ended.cause is EndCause.PREEMPTED and preempted_code is not None:
        output.note(
            f"holdfast run: preempted: exit code {preempted_code} (the command's: {ended.code})"
        )
        return preempted_code
    return ended.code or (1 if problems else 0)


@contextlib.contextmanager
def _starts(
    command: tuple[str, ...],
    directory: str | None,
    clock: Clock,
    *,
    standby: bool,
    preload: tuple[str, ...],
    no_compile_cache: bool,
    **ranks: Any,
) -> Iterator[Starts]:
    """Choose how the command is started, for the block."""
    command = _with_launcher(command, standby=standby, **ranks)
    if not standby:
        if preload or no_compile_cache:
            raise click.UsageError("--preload and --no-compile-cache are options of --standby")
        yield ColdStarts(command)
        return
    try:
        program = parse_command(command)
    except InvalidArgumentError as error:
        program = None
        output.note(f"holdfast run: no standby process: {error}; restarts are cold starts")
    cache = program_folder(os.environ, command if program is None else program.identity())
    if not no_compile_cache:
        compiled = compile_folder(directory, cache, host_name())
        if variables := cache_variables(os.environ, compiled):
            output.note(f"holdfast run: JAX and PyTorch keep what they compile in {compiled}")
            os.environ.update(variables)
    if program is None:
        yield ColdStarts(command)
        return
    with Standby(command, program, preload, cache, clock, output.note) as starts:
        yield starts


def _with_launcher(
    command: tuple[str, ...],
    *,
    standby: bool,
    nproc: int | None,
    spares: int,
    hosts: str | None,
    spare_hosts: int,
    min_ranks: int | None,
    leave_secs: float,
) -> tuple[str, ...]:
    """Return the command that starts the ranks of a job of several processes."""
    if nproc is None:
        if spares or min_ranks is not None or hosts is not None or spare_hosts:
            raise click.UsageError(
                "--spares, --hosts, --spare-hosts and --min-ranks are options of --nproc"
            )
        return command
    if spare_hosts and hosts is None:
        raise click.UsageError("--spare-hosts is an option of --hosts")
    if standby:
        raise click.UsageError("--standby is for one process; with --nproc, --spares wait instead")
    addresses: tuple[Address, ...] = ()
    own = 0
    try:
        if hosts is not None:
            addresses = parse_hosts(hosts, os.environ)
            own = own_place(addresses, os.environ)
    except InvalidArgumentError as error:
        raise click.UsageError(str(error)) from error
    host_count = max(1, len(addresses))
    if spare_hosts >= host_count:
        raise click.UsageError(
            f"--spare-hosts: expected fewer than the hosts, {host_count}, found {spare_hosts}"
        )
    ranks = nproc * (host_count - spare_hosts)
    if min_ranks is not None and min_ranks > ranks:
        raise click.UsageError(f"--min-ranks: expected at most {ranks}, found {min_ranks}")
    settings = Settings(
        ranks=ranks,
        spares=spares,
        ranks_min=min_ranks or ranks,
        leave_secs=leave_secs,
        hosts=host_count,
        spare_hosts=spare_hosts,
    )
    config = LauncherConfig(settings=settings, addresses=addresses, own=own)
    text = msgspec.json.encode(config).decode()
    return (sys.executable, "-m", "holdfast.supervise.ranks", text, *command)


def _start_agent(directory: str, clock: Clock) -> AgentOfRun:
    opened = open_or_create(directory)
    config = AgentConfig(
        run=str(opened.location), run_id=opened.run_id, host=host_name(), folder=""
    )
    folder, reason = ensure_agent(config, clock, opening_secs(config))
    if reason is not None:
        output.warn(f"the agent and RAM checkpoints are in {folder}: {reason}")
    return AgentOfRun(run=config.run, run_id=config.run_id, host=config.host)
