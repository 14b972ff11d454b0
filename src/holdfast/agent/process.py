"""The agent's process: one a run and host, at low priority, until there is nothing to keep.

It holds a lock on its folder for as long as it lives, so that there is never a second one; a second
one that starts leaves at once with `ALREADY_RUNNING`. On its way out it removes the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
from aiohttp import web

from holdfast.agent.config import ALREADY_RUNNING, AgentConfig
from holdfast.agent.location import LOCK, SOCKET, check_private, socket_address
from holdfast.agent.server import application
from holdfast.agent.service import Service
from holdfast.agent.state import open_state
from holdfast.clock import SystemClock
from holdfast.format.names import EVENTS
from holdfast.store.file_system import LOCAL, FileSystem

NICENESS = 10
SHUTDOWN_SECS = 0.2

log = logging.getLogger(__name__)


def main(argument: str, placed: Callable[[int], None], files: FileSystem = LOCAL) -> int:
    """Runs the agent that `argument`, a JSON `AgentConfig`, describes; returns the exit code.

    `placed` is told 0 once the agent has its place, or `ALREADY_RUNNING` where another one has it.
    All that its stores do passes through `files`.
    """
    config = msgspec.json.decode(argument, type=AgentConfig)
    folder = Path(config.folder)
    with _locked(folder) as is_mine:
        placed(0 if is_mine else ALREADY_RUNNING)
        if not is_mine:
            return ALREADY_RUNNING
        _log_into(Path(config.run), config.host)
        _lower_priority()
        log.info(
            "agent of %s on %s: process %d in %s", config.run, config.host, os.getpid(), folder
        )
        if not asyncio.run(_serve(config, files)):
            log.warning("what is not durable stays in %s, for the next agent of the run", folder)
            (folder / SOCKET).unlink(missing_ok=True)
            return 0
        # Moved away whole and only then removed, so that the next agent finds all or nothing.
        leaving = folder.with_name(f".{folder.name}.{os.getpid()}")
        folder.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)
        log.info("agent of %s leaves", config.run)
    return 0


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    try:
        check_private(folder)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        # Whoever started this agent made the folder; another agent took it along since.
        yield False
        return
    try:
        yield _try_lock(fd, folder / LOCK)
    finally:
        os.close(fd)


def _try_lock(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # An agent on its way out removes its folder: a lock on a file that is gone is no lock.
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except (BlockingIOError, FileNotFoundError):
        return False


def _log_into(run: Path, host: str) -> None:
    (run / EVENTS).mkdir(exist_ok=True)
    logging.basicConfig(
        filename=run / EVENTS / f"agent-{host}.log",
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        level=logging.INFO,
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def _lower_priority() -> None:
    """Training goes first, on the processor and on the disk."""
    os.nice(NICENESS)
    psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)


async def _serve(config: AgentConfig, files: FileSystem) -> bool:
    """Serves until it is time to leave; returns whether RAM holds nothing that is not durable."""
    state = open_state(config, SystemClock(), files)
    service = Service(state)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.leave_soon)
    state.events.write("agent_started", pid=os.getpid())
    runner = web.AppRunner(application(service), handle_signals=False, access_log=None)
    await runner.setup()
    try:
        await service.adopt()
        await _listen(runner, state.folder)
        await service.run()
    finally:
        await asyncio.wait_for(runner.cleanup(), SHUTDOWN_SECS * 50)
        state.events.write("agent_left", pid=os.getpid())
        service.close()
        state.events.close()
        state.words.close()
    return service.is_all_durable


async def _listen(runner: web.AppRunner, folder: Path) -> None:
    (folder / SOCKET).unlink(missing_ok=True)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(socket_address(folder_fd))
    finally:
        os.close(folder_fd)
    (folder / SOCKET).chmod(0o600)
    await web.SockSite(runner, listener, shutdown_timeout=SHUTDOWN_SECS).start()
