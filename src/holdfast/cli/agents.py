"""The agents of this user on this host: found by their sockets, asked through them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.agent import protocol
from holdfast.agent.agent_directory import SOCKET, host_name, roots
from holdfast.agent.client import AgentClient, AgentGoneError
from holdfast.agent.launch import find_agent, is_locked
from holdfast.engine.reading.run import ReadableRun
from holdfast.errors import AgentUnavailableError, HoldfastError

ASK_SECS = 10.0

_AGENT_FOLDER = re.compile(r"([0-9a-f]{32})-.+")

Answer = TypeVar("Answer", bound=msgspec.Struct)


def agent_folders_here() -> Iterator[Path]:
    """Every folder of this user's on this host that may be an agent's, with or without one."""
    for root in dict.fromkeys(roots()):
        found: list[Path] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found = sorted(root.iterdir())
        yield from (folder for folder in found if _is_own_folder(folder))


def living(problems: list[str] | None = None) -> list[protocol.AgentStatus]:
    """What each agent that answers says of itself, ordered by run and host.

    An answer that is not understood goes to `problems`, and does not hide the other agents.
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


def agent_folder(run: ReadableRun, purpose: str) -> Path:
    """The folder of the agent that serves this host.

    Raises:
        AgentUnavailableError: none answers.
    """
    folder = find_agent(run.agents_id, host_name())
    if folder is None:
        raise AgentUnavailableError(
            f"{purpose} {run.directory}: no agent of it answers on host {host_name()}; is a "
            "trainer running here?"
        )
    return folder


def status_of(folder: Path) -> protocol.AgentStatus:
    """What the agent in `folder` says of itself.

    Raises:
        AgentGoneError: none answers.
    """
    if not (folder / SOCKET).exists():
        raise AgentGoneError(f"{folder} has no socket")
    return ask(folder, "status", protocol.Empty(), protocol.AgentStatus)


def ask(folder: Path, name: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
    """One call.

    Raises:
        AgentGoneError: no answer.
        AgentUnavailableError: an answer that this version does not understand.
        HoldfastError: the agent's own.
    """
    client = AgentClient(folder, timeout_secs=ASK_SECS)
    try:
        return client.call(name, message, kind)
    except msgspec.DecodeError as error:
        raise AgentUnavailableError(
            f"{name}: the agent in {folder} is of another version of Holdfast: {error}"
        ) from error
    finally:
        client.close()


def leaving(run_id: str | None = None) -> list[Path]:
    """The folders, of that run or of all, whose agent still lives and answers no more.

    It is on its way out, or just coming: it holds the lock from its first moment to its last.
    """
    answering = {Path(status.folder) for status in living()}
    return [
        folder
        for folder in agent_folders_here()
        if folder not in answering and is_locked(folder) and run_id in (None, run_of(folder))
    ]


def run_of(folder: Path) -> str | None:
    """The id of the run whose agent's folder this is, or None for another kind of folder."""
    named = _AGENT_FOLDER.fullmatch(folder.name)
    return named[1] if named is not None else None


def _is_own_folder(folder: Path) -> bool:
    try:
        state = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
