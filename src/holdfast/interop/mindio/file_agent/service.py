"""The file agent's calls, and the writing of files in the background.

Files are written in the order in which they were sealed, several at a time, and one after another
for each path: the newest one for it, and an earlier one only if that cannot be written. A write
that failed is repeated after a while, for as long as the agent lives. See docs/decisions/0028.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import msgspec

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, InvalidArgumentError, OutOfSpaceError, translated
from holdfast.interop.mindio.file_agent import protocol
from holdfast.interop.mindio.file_agent.file_at_path import (
    FileLostError,
    FileReplacedError,
    copy_bytes,
    is_replaced,
    write_file,
    written_file,
)
from holdfast.interop.mindio.file_agent.ram_files import RamFile, RamFiles, data_path, is_current
from holdfast.local_agent.calls import Handler
from holdfast.local_agent.messages import decode
from holdfast.local_agent.place import replace_file

SETTINGS = "settings"
GIBI = 1024**3
CAPACITY_MAX_BYTES = 128 * GIBI
MEMORY_SHARE = 4
THREAD_COUNT = 4
THREAD_COUNT_MAX = 256
LINGER_SECS = 1800.0
RETRY_SECS = (1.0, 2.0, 5.0, 10.0, 30.0)
LOST_COUNT_MAX = 100

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def default_capacity_bytes() -> int:
    """Return a quarter of the host's memory, at most 128 GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(CAPACITY_MAX_BYTES, memory // MEMORY_SHARE)


class FileService:
    """Owned by the event loop; only `_write` and `_read` run on other threads."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.files = RamFiles(folder, default_capacity_bytes(), clock)
        self.linger_secs = LINGER_SECS
        self.used = clock.monotonic()
        self.connection_count: Callable[[], int] = int
        """Returns the number of open connections."""
        self._clock = clock
        self._settings = folder / SETTINGS
        self._thread_count = THREAD_COUNT
        self._threads = ThreadPoolExecutor(THREAD_COUNT_MAX, "holdfast-file")
        self._writing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry_at: dict[str, float] = {}
        self._reading: set[str] = set()
        self._unread: dict[str, str] = {}
        self._lost: collections.deque[protocol.PendingFile] = collections.deque(
            maxlen=LOST_COUNT_MAX
        )
        self._written_bytes = 0

    def calls(self) -> dict[str, tuple[type[msgspec.Struct], Handler]]:
        """Return the calls by their names."""
        return {
            "configure": (protocol.Configure, self.configure),
            "reserve": (protocol.Reserve, self.reserve_file),
            "abandon": (protocol.Abandon, self.abandon),
            "seal": (protocol.Seal, self.seal_file),
            "find": (protocol.FilesAt, self.find_file),
            "preload": (protocol.FilesAt, self.preload),
            "writes": (protocol.FilesAsked, self.writes),
            "status": (protocol.FilesAsked, self.report_status),
        }

    def adopt_files(self) -> None:
        """Take over what an earlier agent had, and continue to write it."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            self._apply(decode(self._settings.read_bytes(), protocol.Configure))
        self.files.adopt_files()
        for file in self.files.pending_files():
            log.info("adopted file %s for %s", file.name, ", ".join(file.pending))
        self._start_writes()

    async def configure(self, message: protocol.Configure, pid: int) -> protocol.Done:
        """Change the settings that are given, also for the agent after this one."""
        self._note_use()
        self._apply(message)
        in_effect = protocol.Configure(
            capacity_bytes=self.files.capacity_bytes,
            thread_count=self._thread_count,
            linger_secs=self.linger_secs,
        )
        with translated("configure", self._settings):
            replace_file(self._settings, msgspec.json.encode(in_effect))
        self._start_writes()
        return protocol.Done()

    def _apply(self, message: protocol.Configure) -> None:
        if message.capacity_bytes is not None:
            self.files.capacity_bytes = message.capacity_bytes
        if message.thread_count is not None:
            self._thread_count = min(message.thread_count, THREAD_COUNT_MAX)
        if message.linger_secs is not None:
            self.linger_secs = message.linger_secs

    async def reserve_file(self, message: protocol.Reserve, pid: int) -> protocol.Reserved:
        """Reserve memory of a new file, or more for one that is being filled."""
        self._note_use()
        with translated("reserve RAM in", self.files.folder):
            if message.name is None:
                reserved = self.files.reserve_file(message.size_bytes)
            else:
                reserved = self.files.extend(message.name, message.size_bytes)
            try:
                await self._in_thread(self.files.allocate_file, reserved.name)
            except OSError:
                self.files.remove_file(reserved.name)
                raise
        return reserved

    async def abandon(self, message: protocol.Abandon, pid: int) -> protocol.Done:
        """Free the memory of a file that is not pending."""
        self.files.remove_file(message.name)
        return protocol.Done()

    async def seal_file(self, message: protocol.Seal, pid: int) -> protocol.Done:
        """Take a file, and begin to write it; it survives its trainer from here on."""
        self._note_use()
        if not message.targets or not all(os.path.isabs(file.path) for file in message.targets):
            raise InvalidArgumentError(f"seal file {message.name}: expected absolute paths")
        with translated("seal in RAM in", self.files.folder):
            self.files.seal_file(message)
        self._start_writes()
        return protocol.Done()

    async def find_file(self, message: protocol.FilesAt, pid: int) -> protocol.FoundFile:
        """Return what RAM has of one path."""
        self._note_use()
        (path,) = message.paths
        await self._refresh(path)
        return self.files.find_file(path)

    async def preload(self, message: protocol.FilesAt, pid: int) -> protocol.PreloadState:
        """Begin to read the files that are not in RAM; the caller asks until none is pending."""
        self._note_use()
        pending, failed = [], {}
        for path in message.paths:
            if path in self._unread:
                failed[path] = self._unread.pop(path)
            elif path in self._reading:
                pending.append(path)
            else:
                await self._refresh(path)
                if self.files.find_file(path).name is None and path not in self._reading:
                    self._reading.add(path)
                    self._begin(self._read(path))
                if path in self._reading:
                    pending.append(path)
        return protocol.PreloadState(pending=pending, failed=failed)

    async def writes(self, message: protocol.FilesAsked, pid: int) -> protocol.WriteState:
        """Return what is not written yet."""
        return protocol.WriteState(
            pending=[
                protocol.PendingFile(
                    name=file.name, paths=[*file.pending], attempts=file.attempts, error=file.error
                )
                for file in self.files.pending_files()
            ],
            lost=[*self._lost],
            written_bytes=self._written_bytes,
        )

    async def report_status(
        self, message: protocol.FilesAsked, pid: int
    ) -> protocol.FileAgentStatus:
        """Return the agent's process and memory."""
        return protocol.FileAgentStatus(
            pid=os.getpid(),
            capacity_bytes=self.files.capacity_bytes,
            used_bytes=self.files.used_bytes,
            file_count=len(self.files.sealed_files()),
            pending_count=len(self.files.pending_files()),
            user_count=max(0, self.connection_count() - 1),
            linger_secs=self.linger_secs,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read or written."""
        return not self._tasks

    async def settle_writes(self, timeout_secs: float) -> None:
        """Attempt each write that is pending once more, at once."""
        self._retry_at.clear()
        self._start_writes()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_secs):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Wait for no thread: what they write is not at its path yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note_use(self) -> None:
        self.used = self._clock.monotonic()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refresh(self, path: str) -> None:
        """Forget what RAM has of a path where another file is by now."""
        # On a thread: storage that hangs delays the caller, and no other call.
        while (held := self.files.held_at(path)) is not None:
            if await self._in_thread(is_current, held):
                return
            is_later = isinstance(held, protocol.FileTarget) and await self._in_thread(
                is_replaced, held
            )
            self.files.forget_outdated(path, held, is_replaced=is_later)

    async def _in_thread(self, call: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    def _start_writes(self) -> None:
        now = self._clock.monotonic()
        for file in self.files.pending_files():
            for path, target in file.pending.items():
                if len(self._writing) >= self._thread_count:
                    return
                is_due = self._retry_at.get(path, now) <= now
                if is_due and path not in self._writing and self.files.is_newest(file, path):
                    self._writing.add(path)
                    self._begin(self._write(file, target))

    async def _write(self, file: RamFile, target: protocol.FileTarget) -> None:
        data = data_path(self.files.folder, file.name)
        try:
            written = await self._in_thread(
                write_file, data, file.digest, target, self._count, self._clock
            )
        except (OSError, HoldfastError) as error:
            self._failed(file, target, error)
        else:
            self._retry_at.pop(target.path, None)
            if target.path in file.pending:
                self.files.mark_written(file, written)
        finally:
            self._writing.discard(target.path)
            self._start_writes()

    def _failed(self, file: RamFile, target: protocol.FileTarget, error: Exception) -> None:
        path = target.path
        if path not in file.pending:
            # A later save for the path has cancelled this one.
            return
        if isinstance(error, FileReplacedError):
            self.files.mark_replaced(file, path)
            return
        if isinstance(error, FileLostError):
            log.error("%s", error)
            lost = protocol.PendingFile(
                name=file.name, paths=[path], attempts=file.attempts + 1, error=str(error)
            )
            self._lost.append(lost)
            self.files.drop_target(file, path)
            return
        # Earlier ones wait for the newest one.
        for each in self.files.waiting_for(path):
            each.attempts, each.error = each.attempts + 1, f"{path}: {error}"
        secs = RETRY_SECS[min(file.attempts, len(RETRY_SECS)) - 1]
        log.warning("write %s: %s; it stays in RAM, next attempt in %g s", path, error, secs)
        self._retry_at[path] = self._clock.monotonic() + secs
        asyncio.get_running_loop().call_later(secs, self._start_writes)

    def _count(self, size_bytes: int) -> None:
        self._written_bytes += size_bytes

    async def _read(self, path: str) -> None:
        name = None
        try:
            size_bytes = os.stat(path).st_size
            name = self.files.reserve_file(size_bytes).name
            await self._in_thread(self.files.allocate_file, name)
            digest, written = await self._in_thread(self._fill, path, name)
            if self.files.find_file(path).name is None:
                self.files.add_read(name, written.size_bytes, digest, written)
            else:
                self.files.remove_file(name)
        except (OSError, OutOfSpaceError) as error:
            self._unread[path] = str(error)
            if name is not None:
                self.files.remove_file(name)
        finally:
            self._reading.discard(path)

    def _fill(self, path: str, name: str) -> tuple[str, protocol.WrittenFile]:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            to = os.open(data_path(self.files.folder, name), os.O_WRONLY | os.O_CLOEXEC)
            try:
                before = os.fstat(source)
                digest = copy_bytes(source, to)
                state = os.fstat(source)
                if (before.st_size, before.st_mtime_ns) != (state.st_size, state.st_mtime_ns):
                    raise OSError(f"{path} was changed while it was read; preload it again")
                os.ftruncate(to, state.st_size)
            finally:
                os.close(to)
        finally:
            os.close(source)
        return digest, written_file(Path(path), state)
