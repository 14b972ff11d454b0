"""Find the file agents of this user on this host, and end them.

They hold whole files in RAM, for `holdfast.interop.mindio`, and write them to their paths.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.cli import output
from holdfast.cli.output import Column, counted, secs_text, size_text
from holdfast.clock import Clock
from holdfast.errors import (
    AgentUnavailableError,
    HoldfastError,
    RunBusyError,
    StorageError,
    WaitTimeoutError,
)
from holdfast.format.json_codec import decode
from holdfast.host.wire.agents_here import ASK_SECS, folders_here
from holdfast.host.wire.group_record import process_start
from holdfast.interop.mindio.file_agent.client import FILES
from holdfast.interop.mindio.file_agent.protocol import (
    LOG,
    FileAgentStatus,
    FilesAsked,
    RamFileRecord,
)
from holdfast.interop.mindio.file_agent.ram_files import DATA, RECORDS, is_in_use
from holdfast.local_agent.client import AgentGoneError, LocalAgentClient
from holdfast.local_agent.place import is_locked

POLL_SECS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesInRam:
    """A file agent's folder with what is in it; `agent` is None where it has no process."""

    folder: Path
    size_bytes: int
    file_count: int
    pending_count: int
    agent: FileAgentStatus | None

    @property
    def is_used(self) -> bool:
        """Whether a process uses the agent, or a file where the agent was killed."""
        if self.agent is not None:
            return self.agent.user_count > 0
        return any(map(is_in_use, _files(self.folder / DATA)))

    @property
    def document(self) -> dict[str, object]:
        """What `--json` prints."""
        return {
            "folder": str(self.folder),
            "size_bytes": self.size_bytes,
            "files": self.file_count,
            "to_be_written": self.pending_count,
            "pid": self.agent.pid if self.agent is not None else None,
            "users": self.agent.user_count if self.agent is not None else 0,
        }


def files_in_ram(problems: list[str] | None = None) -> Iterator[FilesInRam]:
    """Yield the folder of each file agent of this user, with an agent or without.

    Args:
        problems: Receives why an agent that is alive does not say what it has.
    """
    for folder in folders_here(FILES):
        try:
            yield _found(folder)
        except msgspec.DecodeError as error:
            _note(problems, f"the file agent in {folder}: another version of Holdfast: {error}")
        except (HoldfastError, OSError) as error:
            _note(problems, f"the file agent in {folder}: {error}")


def _note(problems: list[str] | None, problem: str) -> None:
    if problems is not None:
        problems.append(problem)


def _found(folder: Path) -> FilesInRam:
    agent = None
    if is_locked(folder):
        client = LocalAgentClient(folder, timeout_secs=ASK_SECS)
        try:
            agent = client.call("status", FilesAsked(), FileAgentStatus)
        except AgentGoneError as error:
            raise AgentUnavailableError(
                f"its process is alive but does not answer: {error}"
            ) from error
        finally:
            client.close()
    pending_count = file_count = 0
    for path in _files(folder / RECORDS):
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            pending_count += bool(decode(path.read_bytes(), RamFileRecord).pending)
            file_count += 1
    return FilesInRam(
        folder=folder,
        size_bytes=sum(path.stat().st_blocks * 512 for path in _files(folder / DATA)),
        file_count=file_count,
        pending_count=pending_count,
        agent=agent,
    )


def _files(folder: Path) -> Sequence[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except FileNotFoundError:
        return []


def print_files(found: FilesInRam) -> None:
    """Print what `holdfast status` shows of a file agent."""
    written = f"{counted(found.pending_count, 'file')} to be written"
    files = f"{counted(found.file_count, 'file')} in RAM, {written}"
    agent = found.agent
    if agent is None:
        output.print_line(
            f"{found.folder}: {size_text(found.size_bytes)} of memory and no file agent, {files}; "
            "the next call of holdfast.interop.mindio takes them over"
        )
        return
    users = f"used by {counted(agent.user_count, 'process', 'processes')}"
    if not agent.user_count:
        users = f"unused, ends {secs_text(agent.linger_secs)} after its last use"
    size = f"{size_text(found.size_bytes)} of {size_text(agent.capacity_bytes)} in {found.folder}"
    rows = [("file agent", f"process {agent.pid}, {users}"), ("memory", size), ("files", files)]
    output.print_table([Column(""), Column("", folds=True)], rows)


def stop_file_agent(found: FilesInRam, deadline: float, clock: Clock) -> None:
    """End a file agent that no process uses; it writes its files before.

    Raises:
        RunBusyError: A process uses it.
        StorageError: It has ended, but files are not at their paths.
        WaitTimeoutError: It has not ended in time.
    """
    agent = found.agent
    assert agent is not None
    if agent.user_count:
        raise RunBusyError(
            f"stop the file agent {agent.pid}: {agent.user_count} processes use it; end them before"
        )
    started = process_start(agent.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent.pid, signal.SIGTERM)
    while started is not None and process_start(agent.pid) == started:
        if clock.monotonic() >= deadline:
            raise WaitTimeoutError(
                f"stop the file agent {agent.pid}: it has not ended in time; "
                f"{counted(found.pending_count, 'file')} had to be written"
            )
        clock.sleep(POLL_SECS)
    left = _found(found.folder).pending_count if found.folder.exists() else 0
    if left:
        raise StorageError(
            f"stop the file agent {agent.pid}: it has ended, but {counted(left, 'file')} could not "
            f"be written; see {found.folder / LOG}. They stay in RAM for the next one"
        )
