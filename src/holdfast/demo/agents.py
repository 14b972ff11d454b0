"""Find and end the agents of a demo's run on this machine.

Agents are found by their command lines, so one that is still starting and does not answer yet is
found too.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from holdfast.clock import Clock
from holdfast.demo.commands import run_command
from holdfast.errors import AgentUnavailableError
from holdfast.format.json_codec import decode
from holdfast.host.wire.config import AgentConfig

_MODULE = "holdfast.host"
_STOP_SECS_MAX = 15.0
_KILL_SECS_MAX = 10.0
_START_SECS_MAX = 10.0
_POLL_SECS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProcess:
    """One agent: its process, its host, and its folder there, which holds the host's RAM tier."""

    pid: int
    host: str
    folder: Path

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended; a process that has ended is no error.

        Raises:
            AgentUnavailableError: It has not ended in time.
        """
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not select.select([pidfd], [], [], _KILL_SECS_MAX)[0]:
                raise AgentUnavailableError(
                    f"kill the agent of {self.folder}: process {self.pid} has not ended after "
                    f"{_KILL_SECS_MAX:.0f} s"
                )
        finally:
            os.close(pidfd)

    def remove_memory(self) -> None:
        """Remove everything its host held in RAM. The agent must have ended."""
        shutil.rmtree(self.folder, ignore_errors=True)


def agents_of(run: str) -> list[AgentProcess]:
    """Return the agent processes of a run, ordered by host.

    An agent that is starting may be two processes for a moment.
    """
    agents = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if _MODULE not in command[:-1]:
            continue
        with contextlib.suppress(msgspec.DecodeError):
            config = decode(command[-1], AgentConfig)
            if config.run == run:
                agents.append(
                    AgentProcess(pid=process.pid, host=config.host, folder=Path(config.folder))
                )
    return sorted(agents, key=lambda agent: (agent.host, agent.pid))


def agent_of(run: str, host: str, clock: Clock) -> AgentProcess:
    """Return the agent of a run on `host`, waiting for one that is starting.

    Raises:
        AgentUnavailableError: There is no agent, or more than one.
    """
    deadline = clock.monotonic() + _START_SECS_MAX
    while True:
        agents = [agent for agent in agents_of(run) if agent.host == host]
        if len(agents) == 1:
            return agents[0]
        if clock.monotonic() >= deadline:
            raise AgentUnavailableError(
                f"find the agent of {run} on host {host}: expected one process, found "
                f"{[agent.pid for agent in agents]}"
            )
        clock.sleep(_POLL_SECS)


def stop_agents(run: str) -> None:
    """Stop the agents of a run after they have made durable what they hold; kill the others.

    Afterwards neither the agents nor their memory exist, even after an error: checkpoints that
    could not be made durable are removed too.

    Raises:
        HoldfastError: The agents did not stop by themselves.
    """
    agents = agents_of(run)
    try:
        if agents:
            run_command("stop", run, "--timeout", str(_STOP_SECS_MAX))
    finally:
        # Only agents found now are killed: another process may have the id of one that has ended.
        left = agents_of(run)
        for agent in left:
            agent.kill()
        for agent in agents + left:
            agent.remove_memory()
