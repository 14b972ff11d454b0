"""Run the agent's process: one per run and host, at low priority, until there is nothing to keep.

The process holds a lock on its folder for its whole life, so that there is never a second agent; a
second one exits at once with `ALREADY_RUNNING`. An agent that exits removes its folder. If the
folder, or a file in it that trainers need to find the agent, was removed by another process, the
agent exits. Without its lock it touches no folder there, since it may be the next agent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.run import read_run_record
from holdfast.errors import (
    AgentUnavailableError,
    CheckpointDamagedError,
    NewerFormatError,
    StorageError,
)
from holdfast.format.json_codec import decode
from holdfast.host.agent import Agent
from holdfast.host.driver.agent_run import open_run
from holdfast.host.log_file import logging_into
from holdfast.host.metering.meters import Metering
from holdfast.host.service import Service, call_server
from holdfast.host.wire.agent_directory import WORDS
from holdfast.host.wire.config import AgentConfig
from holdfast.local_agent.detached_process import ALREADY_RUNNING
from holdfast.local_agent.place import SOCKET, locked_place
from holdfast.observe.events.schema import AgentLeft, AgentStarted
from holdfast.store.files.file_system import LOCAL, FileSystem
from holdfast.store.location import RunLocation, open_durable
from holdfast.store.run_directory import RunDirectory

NICENESS = 10
FILES_MAX = 1 << 20
OOM_SCORE_ADJ = -800
SHUTDOWN_SECS = 0.2
OBJECTS_PER_COLLECTION = 100_000
"""A record of 20,000 arrays is as many objects; Python's default threshold is 700 or 2,000."""

log = logging.getLogger(__name__)


def main(argument: str, on_placed: Callable[[int], None], files: FileSystem = LOCAL) -> int:
    """Run the agent that `argument`, a JSON `AgentConfig`, describes.

    Args:
        argument: the configuration.
        on_placed: called with 0 once the agent has its place, or with `ALREADY_RUNNING` if another
            agent has it.
        files: the file system of all its stores.

    Returns:
        The exit code.
    """
    config = decode(argument, AgentConfig)
    folder = Path(config.folder)
    with locked_place(folder) as has_place:
        is_mine = has_place()
        on_placed(0 if is_mine else ALREADY_RUNNING)
        if not is_mine:
            return ALREADY_RUNNING
        location = RunLocation(config.run)
        _check_place(location, config.run_id)
        with logging_into(location.folder, config.host):
            _lower_priority()
            _raise_limits()
            gc.set_threshold(OBJECTS_PER_COLLECTION)
            log.info(
                "agent of %s on %s: process %d in %s", config.run, config.host, os.getpid(), folder
            )
            _remove_left_behind(folder)
            is_needless = asyncio.run(_serve(config, files, has_place))
            # Otherwise the folder is gone, or is the next agent's.
            if has_place():
                _leave(folder, is_needless)
            log.info("agent of %s leaves", config.run)
    return 0


def _check_place(location: RunLocation, run_id: str) -> None:
    """Refuse to start without the run's directory, which no agent creates, or in another run's.

    For the agent of a run that was moved, what RAM has of it would be foreign there, and dropped.
    """
    location.make_folder()
    if location.is_url:
        return
    if RunDirectory(location.folder).identity is None:
        raise StorageError(
            f"start the agent of {location}: there is no such directory; it was deleted, moved or "
            "unmounted"
        )
    # Openings deal with a record that is damaged or missing.
    with contextlib.suppress(StorageError, CheckpointDamagedError, NewerFormatError):
        found = read_run_record(open_durable(location.text, SystemClock()), location.text).run_id
        if found != run_id:
            raise AgentUnavailableError(
                f"start the agent of {location}: expected run {run_id}, found {found}; the "
                "directory was replaced, and what RAM has of the former stays there"
            )


def _leave(folder: Path, is_needless: bool) -> None:
    if not is_needless:
        log.warning("checkpoints stay in %s for the run's next agent", folder)
        (folder / SOCKET).unlink(missing_ok=True)
        return
    # Renamed first and removed only then, so that the next agent finds all of the folder or
    # nothing.
    leaving = folder.with_name(f".{folder.name}.{os.getpid()}")
    folder.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def _remove_left_behind(folder: Path) -> None:
    """Remove the folders of earlier agents that were killed while they removed them."""
    for folder_left in folder.parent.glob(f".{folder.name}.*"):
        pid = folder_left.suffix[1:]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder_left, ignore_errors=True)


def _lower_priority() -> None:
    """Give training priority on the processor and on the disk.

    Where the kernel divides the processor by session (autogroup), the agent's share is its
    session's, whatever its niceness; see docs/performance.md.
    """
    import psutil

    os.nice(NICENESS)
    psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)


def _raise_limits() -> None:
    """Allow as many open files as possible, and make the trainers the OOM killer's first choice.

    The pages of the slots that the agent reads count for it, but its death would free none of
    them: they are files. Only a privileged process may lower its score.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        files_max = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))


async def _serve(config: AgentConfig, files: FileSystem, has_place: Callable[[], bool]) -> bool:
    """Serve until it is time to exit; return whether nobody needs the RAM tier after that."""
    clock = SystemClock()
    metering = Metering(clock)
    folder = Path(config.folder)
    agent = Agent(
        open_run(config, clock, files, metering.note_event),
        metering,
        has_place=lambda: has_place() and _can_be_joined(folder),
    )
    service = Service(agent)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.leave_soon)
    agent.run.events.write(AgentStarted(pid=os.getpid()))
    server = call_server(service)
    try:
        await agent.adopt()
        agent.serve_peers(service.own_status)
        await server.listen_in(agent.run.folder)
        await agent.act()
        # Trainers that are still attached seal checkpoints for the agent after this one.
        is_awaited = agent.trainers.group is not None and not _can_be_joined(folder)
    finally:
        await service.close()
        await agent.network.close()
        await asyncio.wait_for(server.close(SHUTDOWN_SECS), SHUTDOWN_SECS * 50)
        agent.run.events.write(AgentLeft(pid=os.getpid()))
        agent.close()
    return agent.is_all_durable and not is_awaited


def _can_be_joined(folder: Path) -> bool:
    """Return whether the files that a trainer opens to join the agent are there."""
    return all((folder / name).exists() for name in (SOCKET, WORDS))
