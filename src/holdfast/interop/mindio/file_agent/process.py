"""Run the file agent's process: one per user and host, until nobody needs what it holds."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from holdfast.clock import SystemClock
from holdfast.interop.mindio.file_agent.protocol import LOG, FileAgentConfig
from holdfast.interop.mindio.file_agent.service import FileService
from holdfast.local_agent.calls import serve_calls
from holdfast.local_agent.detached_process import ALREADY_RUNNING
from holdfast.local_agent.messages import decode
from holdfast.local_agent.place import SOCKET, locked_place

NICENESS = 10
LOG_SIZE_BYTES = 1024 * 1024
TICK_SECS = 0.5
LAST_WRITES_SECS = 60.0
GRACE_SECS = 0.2

log = logging.getLogger(__name__)


def main(argument: str, on_placed: Callable[[int], None]) -> int:
    """Run the agent that `argument`, a JSON `FileAgentConfig`, describes; return its exit code."""
    folder = Path(decode(argument, FileAgentConfig).folder)
    with locked_place(folder) as has_place:
        is_mine = has_place()
        on_placed(0 if is_mine else ALREADY_RUNNING)
        if not is_mine:
            return ALREADY_RUNNING
        handler = logging.handlers.RotatingFileHandler(
            folder / LOG, maxBytes=LOG_SIZE_BYTES, backupCount=1
        )
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        os.nice(NICENESS)
        log.info("file agent: process %d in %s", os.getpid(), folder)
        is_all_written = asyncio.run(_serve(folder, has_place))
        log.info("file agent leaves%s", "" if is_all_written else "; the next one has to write")
        if has_place():
            (folder / SOCKET).unlink(missing_ok=True)
            if is_all_written:
                leaving = folder.with_name(f".{folder.name}.{os.getpid()}")
                folder.rename(leaving)
                shutil.rmtree(leaving, ignore_errors=True)
    # A write that hangs holds a thread, for which Python would wait.
    logging.shutdown()
    os._exit(0)


async def _serve(folder: Path, has_place: Callable[[], bool]) -> bool:
    """Serve until it is time to exit; return whether all files are at their paths."""
    clock = SystemClock()
    service = FileService(folder, clock)
    service.adopt_files()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = serve_calls(service.calls())
    service.connection_count = lambda: server.connection_count
    await server.listen_in(folder)
    idle_since = clock.monotonic()
    while not stopped.is_set() and has_place() and (folder / SOCKET).exists():
        if server.connection_count or not service.is_idle:
            idle_since = clock.monotonic()
        # A failed write keeps no agent for longer than its trainers: the next one repeats it.
        if clock.monotonic() - max(idle_since, service.used) > service.linger_secs:
            break
        try:
            await asyncio.wait_for(stopped.wait(), TICK_SECS)
        except TimeoutError:
            continue
    await server.close(GRACE_SECS)
    await service.settle_writes(LAST_WRITES_SECS)
    service.close()
    return not service.files.pending_files()
