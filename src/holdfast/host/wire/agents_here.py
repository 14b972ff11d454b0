"""Find the agents of this user on this host, and call them through their sockets."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.engine.reading.run import ReadableRun
from holdfast.errors import AgentUnavailableError, HoldfastError
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import user_name
from holdfast.host.wire.client import AgentClient
from holdfast.host.wire.launch import find_live_agent
from holdfast.local_agent.client import AgentGoneError, AgentSilentError
from holdfast.local_agent.place import SOCKET, host_name, is_locked, roots

ASK_SECS = 10.0
"""How long to wait for an agent's answer."""

_AGENT_FOLDER = re.compile(r"([0-9a-f]{32})-.+")

Answer = TypeVar("Answer", bound=msgspec.Struct)


def folders_here(room: str = "") -> Iterator[Path]:
    """Yield each folder of this user that agents may use: in a room of the roots, or in them."""
    for root in dict.fromkeys(roots()):
        folders: list[Path] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            folders = sorted((root / room).iterdir())
        yield from (folder for folder in folders if _is_own_folder(folder))


def agent_folders_here(run_id: str | None = None) -> Iterator[Path]:
    """Yield the folders of agents of one run or of all; an agent need not be running in it."""
    for folder in folders_here():
        if run_of(folder) is not None and run_id in (None, run_of(folder)):
            yield folder


def living(problems: list[str] | None = None) -> list[protocol.AgentStatus]:
    """Return the status of each agent that answers, ordered by run and host.

    Args:
        problems: Receives the error of each agent whose answer cannot be read. Such an agent does
            not affect the others.
    """
    statuses = []
    for folder in agent_folders_here():
        try:
            statuses.append(status_of(folder))
        except AgentGoneError:
            continue
        except HoldfastError as error:
            if problems is not None:
                problems.append(str(error))
    return sorted(statuses, key=lambda status: (status.run, status.host))


def no_agent_text(directory: str | None) -> str:
    """Return the words for a listing without agents, of one run or of all."""
    what = "agents" if directory is None else f"agent of {directory}"
    return f"no {what} on this host that user {user_name()} has started"


def agent_folder(run: ReadableRun, purpose: str) -> Path:
    """Return the folder of the run's agent on this host.

    Args:
        run: The run.
        purpose: The operation, for the message.

    Raises:
        AgentUnavailableError: There is no agent, or it does not answer.
    """
    try:
        folder = find_live_agent(run.agents_id, host_name())
    except AgentSilentError as error:
        raise AgentUnavailableError(f"{purpose} {run.location}: {error}") from error
    if folder is None:
        raise AgentUnavailableError(
            f"{purpose} {run.location}: no agent of the run is on host {host_name()}; call "
            "this on a host where a trainer is running"
        )
    return folder


def status_of(folder: Path) -> protocol.AgentStatus:
    """Return the status of the agent in `folder`.

    Raises:
        AgentGoneError: No agent answers.
        HoldfastError: As `ask`.
    """
    if not (folder / SOCKET).exists():
        raise AgentGoneError(f"{folder} has no socket")
    return ask(folder, "status", protocol.Empty(), protocol.AgentStatus)


def ask(
    folder: Path,
    name: str,
    message: msgspec.Struct,
    kind: type[Answer],
    timeout_secs: float = ASK_SECS,
) -> Answer:
    """Call the agent in `folder` once.

    Returns:
        The answer, decoded as `kind`.

    Raises:
        AgentGoneError: The agent does not answer.
        AgentUnavailableError: This version cannot decode the answer.
        HoldfastError: The agent answered with this error.
    """
    client = AgentClient(folder, timeout_secs=timeout_secs)
    try:
        return client.call(name, message, kind)
    except msgspec.DecodeError as error:
        raise AgentUnavailableError(
            f"{name}: the agent in {folder} has another version of Holdfast: {error}"
        ) from error
    finally:
        client.close()


def asker(run: ReadableRun) -> Callable[[str, type[Answer]], Answer | None]:
    """Return a function that calls an agent of the run on this host, without arguments.

    It tries the agent that answered last, then all; it returns None if none answers.
    """
    answered: list[Path] = []

    def ask_one(name: str, kind: type[Answer]) -> Answer | None:
        for folder in [*answered, *agent_folders_here(run.agents_id)]:
            if not (folder / SOCKET).exists():
                continue
            try:
                answer = ask(folder, name, protocol.Empty(), kind)
            except AgentGoneError:
                answered.clear()
                continue
            answered[:] = [folder]
            return answer
        return None

    return ask_one


def leaving(run_id: str | None = None, answering: Collection[Path] | None = None) -> list[Path]:
    """Return the folders whose agent is alive but does not answer, of one run or of all.

    Such an agent is starting or ending: it holds its lock during its whole life, and answers only
    in between.

    Args:
        run_id: The run; None: all.
        answering: The folders whose agents have answered; None: they are asked.
    """
    if answering is None:
        answering = {Path(status.folder) for status in living()}
    return [
        folder
        for folder in agent_folders_here(run_id)
        if folder not in answering and is_locked(folder)
    ]


def run_of(folder: Path) -> str | None:
    """Return the id of the run whose agent uses the folder; None if it is not an agent's."""
    named = _AGENT_FOLDER.fullmatch(folder.name)
    return named[1] if named is not None else None


def _is_own_folder(folder: Path) -> bool:
    try:
        state = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
