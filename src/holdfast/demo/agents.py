"""Find and end the agents of a demo's run on this machine, and run commands as a user does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError, HoldfastError, NotARunError
from holdfast.host.wire.agent_processes import agent_processes
from holdfast.host.wire.agents_here import agent_folders_here, status_of
from holdfast.host.wire.protocol import AgentStatus
from holdfast.local_agent.client import AgentGoneError
from holdfast.local_agent.place import is_locked
from holdfast.trainer.opening.run_access import read_only

_STOP_SECS_MAX = 15.0
_KILL_SECS_MAX = 10.0
_START_SECS_MAX = 10.0
_POLL_SECS = 0.01
_COMMAND_SECS_MAX = 60.0


def agent_of(run: str, host: str, clock: Clock) -> AgentStatus:
    """Return the status of the agent of a run on `host`, waiting for one that is starting.

    Raises:
        AgentUnavailableError: None answers.
    """
    run_id, deadline = read_only(run).agents_id, clock.monotonic() + _START_SECS_MAX
    while clock.monotonic() < deadline:
        for agent in _answering(run_id):
            if agent.host == host:
                return agent
        clock.sleep(_POLL_SECS)
    raise AgentUnavailableError(
        f"find the agent of {run} on host {host}: none answered within {_START_SECS_MAX:.0f} s"
    )


def kill_agent(agent: AgentStatus, clock: Clock) -> None:
    """Send SIGKILL to an agent and wait until it has ended; its memory stays.

    Raises:
        AgentUnavailableError: It has not ended in time.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent.pid, signal.SIGKILL)
    deadline = clock.monotonic() + _KILL_SECS_MAX
    # It holds the lock for its whole life.
    while is_locked(Path(agent.folder)):
        if clock.monotonic() >= deadline:
            raise AgentUnavailableError(
                f"kill the agent of {agent.folder}: process {agent.pid} has not ended after "
                f"{_KILL_SECS_MAX:.0f} s"
            )
        clock.sleep(_POLL_SECS)


def stop_agents(run: str, clock: Clock) -> None:
    """Stop the agents of a run after they have made durable what they hold; kill the others.

    The trainers have ended. Afterwards neither the agents nor their memory exist, even after an
    error: checkpoints that could not be made durable are removed too.

    Raises:
        HoldfastError: The agents did not stop by themselves.
    """
    try:
        run_id = read_only(run).agents_id
    except NotARunError:
        # No trainer came as far as that.
        return
    deadline = clock.monotonic() + _START_SECS_MAX
    # An agent that a trainer has just started has its folder and does not answer yet.
    while len(_answering(run_id)) < len(list(agent_folders_here(run_id))):
        if clock.monotonic() >= deadline:
            break
        clock.sleep(_POLL_SECS)
    try:
        if _answering(run_id):
            run_command("stop", run, "--timeout", str(_STOP_SECS_MAX))
    finally:
        # Also one that does not answer yet on a busy machine.
        for agent, config in agent_processes():
            if config.run_id == run_id:
                agent.kill()
                agent.wait(_KILL_SECS_MAX)
        for folder in list(agent_folders_here(run_id)):
            shutil.rmtree(folder, ignore_errors=True)


def _answering(run_id: str) -> list[AgentStatus]:
    agents = []
    for folder in list(agent_folders_here(run_id)):
        with contextlib.suppress(AgentGoneError):
            agents.append(status_of(folder))
    return agents


def run_command(*arguments: str) -> str:
    """Run `holdfast` with these arguments and return what it printed.

    Raises:
        HoldfastError: It failed, or has not ended after a minute.
    """
    command = [sys.executable, "-m", "holdfast", *arguments]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECS_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HoldfastError(
            f"`holdfast {' '.join(arguments)}`: has not ended after {_COMMAND_SECS_MAX:.0f} s"
        ) from error
    if ended.returncode != 0:
        raise HoldfastError(
            f"`holdfast {' '.join(arguments)}`: exit code {ended.returncode}, "
            f"output: {(ended.stderr or ended.stdout).strip()[-500:]}"
        )
    return ended.stdout
