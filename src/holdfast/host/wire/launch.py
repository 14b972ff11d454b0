"""Find the agent of a run on this host, or start it in a folder that has room for it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError
from holdfast.host.wire.agent_directory import agent_folders
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.control_block import SEAT_COUNT
from holdfast.local_agent.client import AgentSilentError, answers
from holdfast.local_agent.launch import START_SECS, AgentStart, await_agent, spawn
from holdfast.local_agent.place import make_private, make_root
from holdfast.store.location import RunLocation

MODULE = "holdfast.host"
"""What an agent's process runs, with its configuration as the only argument."""
BUCKET_START_SECS = 960.0
"""An agent reads its run before it answers, and repeats requests to a bucket for 15 minutes."""
OWN_FILES_SIZE_BYTES = 64 * 1024 + 16 * SEAT_COUNT


def find_agent(run_id: str, host: str) -> Path | None:
    """Return the folder of the agent that serves the run on `host`; None if none answers."""
    try:
        return find_live_agent(run_id, host)
    except AgentSilentError:
        return None


def find_live_agent(run_id: str, host: str) -> Path | None:
    """Return the folder of the agent that serves the run on `host`; None if there is no agent.

    Raises:
        AgentSilentError: there is one that does not answer.
    """
    return next((f for f in agent_folders(run_id, host) if answers(f)), None)


def opening_secs(config: AgentConfig) -> float:
    """Return how long an opening waits for an agent that starts."""
    return BUCKET_START_SECS if RunLocation(config.run).is_url else START_SECS


def ensure_agent(
    config: AgentConfig, clock: Clock, patience_secs: float = START_SECS
) -> tuple[Path, str | None]:
    """Return the folder of the run's agent, which is started where none answers.

    Args:
        config: the agent that is wanted.
        clock: the time.
        patience_secs: how long one that has its place may take until it answers.

    Returns:
        The folder, and the reason why it is not on the RAM tier's root, or None if it is.

    Raises:
        AgentUnavailableError: the agent does not start, and the message names its log; or one that
            runs does not answer.
    """
    log_path = RunLocation(config.run).agent_log(config.host)
    try:
        folder = find_live_agent(config.run_id, config.host)
    except AgentSilentError as error:
        # It may only be slow: it is asked again.
        folder = error.folder
    start = AgentStart(folder, None, None) if folder is not None else _start(config)
    name = f"the agent of {config.run}"
    answering = await_agent(name, start, lambda: _start(config), log_path, clock, patience_secs)
    return answering.folder, answering.reason


def _choose_folder(config: AgentConfig) -> tuple[Path, str | None]:
    """Return the first folder with room for a few pages, and the errors of those before it."""
    reasons: list[str] = []
    for folder in agent_folders(config.run_id, config.host):
        try:
            make_root(folder.parent)
            _try_folder(folder)
        except OSError as error:
            reasons.append(f"{folder.parent}: {error.strerror}")
        else:
            return folder, "; ".join(reasons) or None
    raise AgentUnavailableError(
        f"start the agent of {config.run}: no folder has room for its files "
        f"({'; '.join(reasons)}); set HOLDFAST_RAM to one that has"
    )


def _try_folder(folder: Path) -> None:
    """Create an agent's folder in its root, and check that it has room for the agent's files."""
    for is_last in (False, False, True):
        try:
            make_private(folder)
            probe = folder / f"probe-{os.getpid()}"
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, OWN_FILES_SIZE_BYTES)
            finally:
                os.close(fd)
                probe.unlink()
        except FileNotFoundError:
            # An exiting agent removed the folder meanwhile.
            if is_last:
                raise
        else:
            return


def _start(config: AgentConfig) -> AgentStart:
    folder, reason = _choose_folder(config)
    try:
        placed = msgspec.structs.replace(config, folder=str(folder))
        process = spawn(folder, MODULE, msgspec.json.encode(placed).decode())
    except FileNotFoundError:
        process = None
    return AgentStart(folder, reason, process)
