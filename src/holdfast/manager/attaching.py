"""What a manager tells the agent of itself when it joins."""

from __future__ import annotations

from holdfast.adapt.contract import Processes
from holdfast.agent.config import AgentConfig
from holdfast.agent.location import host_name
from holdfast.agent.protocol import Attach
from holdfast.manager.opening import OpenRun
from holdfast.manager.options import Options


def agent_config(run: OpenRun, options: Options) -> AgentConfig:
    """The agent that this process needs; its folder is chosen when it starts."""
    return AgentConfig(
        run=str(run.directory),
        run_id=run.run_id,
        host=host_name(),
        folder="",
        linger_secs=_linger_secs(options),
    )


def attach_request(run: OpenRun, options: Options, processes: Processes) -> Attach:
    """The asking for a seat, of a process that had none."""
    return Attach(
        group=run.group,
        rank=processes.rank,
        count=processes.count,
        attempt=None,
        takeover=options.takeover,
        durable=options.durable_policies,
        ram=options.ram_policies,
        ram_limit_bytes=options.ram.limit_bytes if options.ram is not None else None,
        linger_secs=_linger_secs(options),
    )


def _linger_secs(options: Options) -> float:
    """Without a RAM tier there is nothing to keep for the next attempt."""
    return options.ram.linger_secs if options.ram is not None else 0.0
