"""Call this host's file agent from a trainer, and start it where none answers."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError, translated
from holdfast.host.wire.agent_directory import host_name, make_private, make_root, roots, safe_name
from holdfast.host.wire.client import AgentClient, AgentGoneError, AgentSilentError
from holdfast.host.wire.config import ALREADY_RUNNING
from holdfast.host.wire.launch import is_locked, last_line, reap, spawn
from holdfast.interop.mindio.file_agent.protocol import FileAgentConfig, FileAgentStatus, FilesAsked
from holdfast.interop.mindio.file_agent.ram_files import RECORDS

FILES = "files"
START_SECS = 60.0
STARTS_MAX = 5
"""How many agents in a row may end before they answer."""
CALL_SECS = 10.0
SILENT_SECS = 30.0
"""How long an agent that did not answer is not asked again."""
POLL_SECS = 0.01

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
        self._client = AgentClient(self.folder, CALL_SECS)
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
            for _ in range(STARTS_MAX):
                try:
                    return self._client.call(name, message, kind)
                except AgentSilentError as error:
                    self._silent = (self._clock.monotonic() + SILENT_SECS, str(error))
                    raise AgentUnavailableError(f"{name}: {error}") from error
                except AgentGoneError:
                    self._ensure()
                except msgspec.DecodeError as error:
                    raise AgentUnavailableError(
                        f"{name}: the file agent in {self.folder} has another version of Holdfast: "
                        f"{error}"
                    ) from error
        raise AgentUnavailableError(f"{name}: {STARTS_MAX} file agents ended under the call")

    def holds_something(self) -> bool:
        """Return whether RAM may hold files, those of an agent that was killed too."""
        with contextlib.suppress(OSError):
            return any((self.folder / RECORDS).iterdir())
        return False

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        with self._lock:
            self._client.close()

    def _ensure(self) -> None:
        """Start the agent, and wait until it answers."""
        deadline = self._clock.monotonic() + START_SECS
        process: subprocess.Popen[bytes] | None = None
        ended_count = 0
        while ended_count < STARTS_MAX and self._clock.monotonic() < deadline:
            try:
                self._client.call("status", FilesAsked(), FileAgentStatus)
            except AgentSilentError as error:
                reap(process)
                raise AgentUnavailableError(f"use the file agent: {error}") from error
            except AgentGoneError:
                self._clock.sleep(POLL_SECS)
            else:
                reap(process)
                return
            code = process.poll() if process is not None else ALREADY_RUNNING
            if code is None or (code != ALREADY_RUNNING and is_locked(self.folder)):
                # It is starting.
                continue
            ended_count += code != ALREADY_RUNNING
            process = self._start()
        reap(process)
        raise AgentUnavailableError(
            f"start the file agent in {self.folder}: it does not answer: {last_line(self.folder)}"
        )

    def _start(self) -> subprocess.Popen[bytes] | None:
        config = msgspec.json.encode(FileAgentConfig(folder=str(self.folder))).decode()
        with translated("start the file agent in", self.folder):
            make_root(self.folder.parent.parent)
            make_private(self.folder.parent)
            make_private(self.folder)
            try:
                return spawn(self.folder, "holdfast.interop.mindio.file_agent", config)
            except FileNotFoundError:
                # An agent that leaves has removed the folder.
                return None
