"""Call this host's file agent from a trainer, and start it where none answers."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError, translated
from holdfast.interop.mindio.file_agent.protocol import LOG, FileAgentConfig
from holdfast.interop.mindio.file_agent.ram_files import RECORDS
from holdfast.local_agent.client import AgentGoneError, AgentSilentError, LocalAgentClient
from holdfast.local_agent.launch import ENDED_COUNT_MAX, AgentStart, await_agent, spawn
from holdfast.local_agent.place import (
    host_name,
    make_private,
    make_root,
    roots,
    safe_name,
)

FILES = "files"
CALL_SECS = 10.0
SILENT_SECS = 30.0
"""How long an agent that did not answer is not asked again."""

Answer = TypeVar("Answer", bound=msgspec.Struct)


def file_agent_folder() -> Path:
    """Return the folder of this user's file agent on this host."""
    return roots()[0] / FILES / safe_name(host_name())


class FileAgent:
    """The connection of one process to the file agent, which stays as long as it is open.

    Thread-safe: one call at a time, each of which ends within moments.
    """

    def __init__(self, clock: Clock) -> None:
        self.folder = file_agent_folder()
        self._clock = clock
        self._lock = threading.Lock()
        self._client = LocalAgentClient(self.folder, CALL_SECS)
        self._silent: tuple[float, str] = (0.0, "")

    def call_agent(self, name: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Make one call; it is repeated if an agent ends under it.

        Raises:
            AgentUnavailableError: the agent does not start, or does not answer.
            HoldfastError: the agent's own error.
        """
        with self._lock:
            until, reason = self._silent
            if self._clock.monotonic() < until:
                raise AgentUnavailableError(f"{name}: {reason}")
            for _ in range(ENDED_COUNT_MAX):
                try:
                    return self._client.call(name, message, kind)
                except AgentSilentError as error:
                    self._silent = (self._clock.monotonic() + SILENT_SECS, str(error))
                    raise AgentUnavailableError(f"{name}: {error}") from error
                except AgentGoneError:
                    start = AgentStart(self.folder, None, None)
                    log = self.folder / LOG
                    await_agent("the file agent", start, self._start, log, self._clock)
                except msgspec.DecodeError as error:
                    raise AgentUnavailableError(
                        f"{name}: the file agent in {self.folder} has another version of Holdfast: "
                        f"{error}"
                    ) from error
        raise AgentUnavailableError(f"{name}: {ENDED_COUNT_MAX} file agents ended under the call")

    def holds_something(self) -> bool:
        """Return whether RAM may hold files, those of an agent that was killed too."""
        with contextlib.suppress(OSError):
            return any((self.folder / RECORDS).iterdir())
        return False

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        with self._lock:
            self._client.close()

    def _start(self) -> AgentStart:
        config = msgspec.json.encode(FileAgentConfig(folder=str(self.folder))).decode()
        with translated("start the file agent in", self.folder):
            make_root(self.folder.parent.parent)
            make_private(self.folder.parent)
            make_private(self.folder)
            try:
                process = spawn(self.folder, "holdfast.interop.mindio.file_agent", config)
            except FileNotFoundError:
                # An agent that leaves has removed the folder.
                process = None
        return AgentStart(self.folder, None, process)
