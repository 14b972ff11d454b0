"""Save, load and wait for whole files: the functions of MindIO ACP.

`save` serialises with `torch.save` into the RAM of this host's file agent and returns. The agent
(`file_agent`), which outlives the trainer, writes the bytes to the path: an ordinary file of
`torch.save`, synced and renamed, so that any reader opens it and none sees half of it. `load` takes
a file from RAM while it is there.

The functions have MindIO's arguments and return codes. They log their errors, and raise none but
`load`, which raises those of `torch.load`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from holdfast.clock import Clock, SystemClock
from holdfast.errors import (
    AgentUnavailableError,
    CheckpointDamagedError,
    HoldfastError,
    InvalidArgumentError,
    StorageError,
    translated,
)
from holdfast.interop.mindio.file_agent import protocol
from holdfast.interop.mindio.file_agent.client import FileAgent
from holdfast.interop.mindio.file_agent.file_at_path import (
    check_place,
    copy_bytes,
    finished_files,
    make_marker,
    new_file,
)
from holdfast.interop.mindio.file_agent.ram_files import data_path

FAILED: Final = -1
SAVED_IN_RAM: Final = 1
SAVED_TO_FILE: Final = 2
CHECK_FAILED: Final = 1
MEBI, GIBI = 1024**2, 1024**3
FIRST_SIZE_BYTES = MEBI
POLL_SECS = 0.02
CHECK_SECS_MAX = 1.0
TIMEOUT_MAX_SECS = 3600
STALLED_SECS = 600.0
"""How long `flush`, `load` and `preload` wait for an agent that makes no progress."""

AnyPath = str | os.PathLike[str]
Callback = Callable[[int, Any], Any]

_RANGES = {
    "memfs.data_block_pool_capacity_in_gb": (1, 1024),
    "memfs.data_block_size_in_mb": (1, 1024),
    "memfs.write.parallel.thread_num": (2, 96),
    "memfs.write.parallel.slice_in_mb": (1, 1024),
    "background.backup.thread_num": (1, 256),
    "background.linger_in_sec": (0, 86_400),
}
_SWITCH = "memfs.write.parallel.enabled"

log = logging.getLogger("holdfast.interop.mindio")


class _Session:
    """What one process has: its connection to the agent, and what it has warned of."""

    def __init__(self, clock: Clock) -> None:
        self.pid = os.getpid()
        self.clock = clock
        self.agent = FileAgent(clock)
        self.block_size_bytes = 128 * MEBI
        self.warned: set[str] = set()
        self.lost: set[str] = set()

    def warn_once(self, error: HoldfastError) -> None:
        """Log why files are written directly; each kind of error once."""
        if type(error).__name__ not in self.warned:
            self.warned.add(type(error).__name__)
            log.warning("files are written directly, which the training waits for: %s", error)


_lock = threading.Lock()
_sessions: dict[str, _Session] = {}


def _session() -> _Session:
    """Return this process's session: that of a parent, or of another agent, is not used."""
    with _lock:
        session = _sessions.get("current")
        if session is None or session.pid != os.getpid():
            session = _sessions["current"] = _Session(SystemClock())
        return session


def initialize(server_info: Mapping[str, str | int] | None = None) -> int:
    """Start the file agent where none runs, and set what `server_info` has of its settings.

    Returns:
        0; -1 if a setting is unknown or out of its range, or the agent does not start.
    """
    try:
        settings = _settings(server_info or {})
        session = _session()
        size = settings.get("memfs.data_block_size_in_mb")
        if size is not None:
            session.block_size_bytes = size * MEBI
        capacity = settings.get("memfs.data_block_pool_capacity_in_gb")
        message = protocol.Configure(
            capacity_bytes=None if capacity is None else capacity * GIBI,
            thread_count=settings.get("background.backup.thread_num"),
            linger_secs=settings.get("background.linger_in_sec"),
        )
        session.agent.call_agent("configure", message, protocol.Done)
    except HoldfastError as error:
        log.error("initialize: %s", error)
        return FAILED
    return 0


def save(obj: object, path: AnyPath, open_way: str = "memfs") -> int:
    """Save an object as `torch.save` does; it is fixed when this returns.

    Args:
        obj: what `torch.save` takes.
        path: a file in a folder that exists.
        open_way: "memfs": into RAM, and written in the background. "fopen": written when this
            returns.

    Returns:
        1: it is in RAM, and will be at the path even if this process ends. 2: it is at the path;
        with "memfs" because RAM has no room, or no agent. -1: it is not saved.
    """
    return _saved(obj, [path], open_way)


def multi_save(obj: object, path_list: Sequence[AnyPath]) -> int | None:
    """Save an object to several paths, serialised once.

    Returns:
        As `save`, but None if it is not saved to all of the paths.
    """
    is_one = isinstance(path_list, str | os.PathLike)
    code = _saved(obj, [] if is_one else list(path_list), "memfs")
    return None if code == FAILED else code


def load(
    path: AnyPath,
    open_way: str = "memfs",
    map_location: Any = None,
    weights_only: bool = True,
) -> Any:
    """Load what `save` has saved, or any other file of `torch.save`.

    Args:
        path: the file.
        open_way: "memfs": from RAM if the newest save to the path is there, else from the file.
            "fopen": from the file, once what is in RAM has been written to it.
        map_location: as for `torch.load`.
        weights_only: as for `torch.load`.

    Raises:
        InvalidArgumentError: `open_way` is another one.
        CheckpointDamagedError: the bytes in RAM were changed, and the file is not written.
        Exception: as `torch.load`.
    """
    if open_way not in ("memfs", "fopen"):
        raise InvalidArgumentError(f"load {path}: open_way is memfs or fopen, found {open_way!r}")
    place = os.path.realpath(path)
    with _held_in_ram(place) as held:
        if held is not None and open_way == "memfs":
            return torch.load(held, map_location=map_location, weights_only=weights_only)
    if held is not None:
        _await_write(place)
    return torch.load(place, map_location=map_location, weights_only=weights_only)


def preload(*path: AnyPath | Iterable[AnyPath]) -> int:
    """Read files into RAM, from which `load` then takes them.

    Args:
        path: files, or collections of files.

    Returns:
        0: all are in RAM. 1: at least one is not.
    """
    places = []
    for each in path:
        group = [each] if isinstance(each, str | os.PathLike) else each
        places += [os.path.realpath(member) for member in group]
    try:
        session = _session()
        failed: dict[str, str] = {}
        pending = list(dict.fromkeys(places))
        deadline = session.clock.monotonic() + STALLED_SECS
        while pending and session.clock.monotonic() < deadline:
            message = protocol.FilesAt(paths=pending)
            state = session.agent.call_agent("preload", message, protocol.PreloadState)
            failed |= state.failed
            if len(state.pending) < len(pending):
                deadline = session.clock.monotonic() + STALLED_SECS
            pending = state.pending
            if pending:
                session.clock.sleep(POLL_SECS)
    except HoldfastError as error:
        log.error("preload: %s", error)
        return 1
    failed |= dict.fromkeys(pending, f"not read within {STALLED_SECS:.0f} s")
    for name, reason in failed.items():
        log.error("preload %s: %s", name, reason)
    return 1 if failed else 0


def flush() -> int:
    """Wait until every file that this host's agent has is at its paths.

    Returns:
        0; 1 if a file is not: it is written again later, or is lost, as the log says.
    """
    try:
        return _flushed(_session(), None)
    except HoldfastError as error:
        log.error("flush: %s", error)
        return 1


def convert(src: AnyPath, dst: AnyPath) -> int:
    """Copy a file, or all files of a folder, as files of `torch.save`, which `save` writes anyway.

    Args:
        src: a file that was saved or is being saved, or a folder.
        dst: a path; its folder exists. A file there is replaced.

    Returns:
        0; -1 if one of them is no file of `torch.save`, or is a symbolic link.
    """
    source, to = Path(os.path.abspath(src)), Path(os.path.abspath(dst))
    try:
        for path in (source, to):
            if path.is_symlink():
                raise InvalidArgumentError(f"convert {path}: it is a symbolic link")
        if not source.is_dir():
            _convert_file(source, to)
            return 0
        if not to.parent.is_dir():
            raise InvalidArgumentError(f"convert {source}: expected the folder {to.parent}")
        for folder, _, names in os.walk(source):
            below = to / Path(folder).relative_to(source)
            below.mkdir(exist_ok=True)
            for name in names:
                _convert_file(Path(folder) / name, below / name)
    except (HoldfastError, OSError) as error:
        log.error("convert %s: %s", source, error)
        return FAILED
    return 0


def register_checker(
    callback: Callback, check_dict: Mapping[str, int], user_context: Any, timeout_sec: float
) -> int | None:
    """Call back once all files of folders are whole and durable, whichever hosts write them.

    A file that is about to be replaced does not count. The callback runs on a thread of this
    process, which ends no earlier than the callback.

    Args:
        callback: called with a result, 0 or, after the timeout, another one, and `user_context`.
        check_dict: for each folder the number of files in it and below it.
        user_context: what the callback gets.
        timeout_sec: 1 to 3600.

    Returns:
        1; None if an argument is none of these, and then nothing is called back.
    """
    is_dict = isinstance(check_dict, Mapping) and all(
        isinstance(folder, str | os.PathLike) and isinstance(count, int)
        for folder, count in check_dict.items()
    )
    if not (callable(callback) and is_dict and 1 <= timeout_sec <= TIMEOUT_MAX_SECS):
        log.error(
            "register_checker: expected a function, a dict of folders with their numbers of files, "
            "and a timeout of 1 to %d s; nothing is checked",
            TIMEOUT_MAX_SECS,
        )
        return None
    expected = {os.path.abspath(folder): count for folder, count in check_dict.items()}
    threading.Thread(
        target=_check,
        args=(callback, expected, user_context, timeout_sec, SystemClock()),
        name="holdfast-checker",
    ).start()
    return 1


def _settings(given: Mapping[str, str | int]) -> dict[str, int]:
    settings = {}
    for key, value in given.items():
        if key == _SWITCH:
            if str(value).lower() not in ("true", "false"):
                raise InvalidArgumentError(f"{key}: expected 'true' or 'false', found {value!r}")
            continue
        if key not in _RANGES:
            keys = ", ".join([*_RANGES, _SWITCH])
            raise InvalidArgumentError(f"expected keys of {keys}; found {key!r}")
        low, high = _RANGES[key]
        text = str(value)
        if not text.isdecimal() or not low <= int(text) <= high:
            raise InvalidArgumentError(f"{key}: expected {low} to {high}, found {value!r}")
        settings[key] = int(text)
    return settings


def _saved(obj: object, paths: Sequence[AnyPath], open_way: str) -> int:
    try:
        if open_way not in ("memfs", "fopen"):
            raise InvalidArgumentError(f"open_way is memfs or fopen, found {open_way!r}")
        if not paths:
            raise InvalidArgumentError("expected a list of paths, found none")
        places = list(dict.fromkeys(Path(os.path.realpath(path)) for path in paths))
        for place in places:
            check_place(place)
        session = _session()
        if open_way == "memfs":
            try:
                _save_in_ram(session, obj, places)
            except (AgentUnavailableError, StorageError) as error:
                session.warn_once(error)
            else:
                return SAVED_IN_RAM
        _save_to_files(session, obj, places)
    except Exception as error:
        # MindIO's callers look at the code; an object that cannot be pickled raises anything.
        trace = None if isinstance(error, HoldfastError | OSError) else error
        log.error("save %s: %s", ", ".join(map(str, paths)), error, exc_info=trace)
        return FAILED
    return SAVED_TO_FILE


def _save_in_ram(session: _Session, obj: object, places: Sequence[Path]) -> None:
    """Seal a file in RAM.

    Raises:
        StorageError: RAM has no room.
        AgentUnavailableError: there is no agent.
        Exception: as `torch.save`, or no file can be made in a folder.
    """
    with _RamWriter(session) as writer, contextlib.ExitStack() as markers:
        _serialise(obj, writer.append)
        name, size_bytes, digest = writer.finish()
        targets = []
        for place in places:
            targets.append(make_marker(place, session.clock))
            markers.callback(Path(targets[-1].marker).unlink, missing_ok=True)
        message = protocol.Seal(name=name, size_bytes=size_bytes, digest=digest, targets=targets)
        session.agent.call_agent("seal", message, protocol.Done)
        markers.pop_all()
        writer.is_sealed = True


def _save_to_files(session: _Session, obj: object, places: Sequence[Path]) -> None:
    for place in places:
        with (
            new_file(place, session.clock) as fd,
            open(fd, "wb", closefd=False) as file,
        ):
            _serialise(obj, file.write)


def _serialise(obj: object, append: Callable[[memoryview], object]) -> None:
    """Pass the bytes of `torch.save` to `append`, and raise the error of that as it is."""
    sink = _Sink(append)
    torch.save(obj, sink)
    if sink.error is not None:
        raise sink.error


class _Sink:
    """What `torch.save` writes to. It would make another error of one that `write` raises."""

    def __init__(self, append: Callable[[memoryview], object]) -> None:
        self.error: BaseException | None = None
        self._append = append

    def write(self, data: Any) -> int:
        """Append bytes; after an error they are dropped."""
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._append(view)
            except BaseException as error:
                # A Ctrl-C too.
                self.error = error
        return len(view)

    def flush(self) -> None:
        """Do nothing: nothing is buffered here."""


class _RamWriter:
    """A file in RAM that is reserved in blocks, and digested while it is written."""

    def __init__(self, session: _Session) -> None:
        self.is_sealed = False
        self._session = session
        self._running = xxhash.xxh3_128()
        self._size_bytes = 0
        self._reserved = self._reserve(FIRST_SIZE_BYTES, None)
        self._path = data_path(session.agent.folder, self._reserved.name)
        with translated("fill", self._path):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            # Shows the agent that somebody fills the file.
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __enter__(self) -> _RamWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.is_sealed:
            message = protocol.Abandon(name=self._reserved.name)
            with contextlib.suppress(HoldfastError):
                self._session.agent.call_agent("abandon", message, protocol.Done)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

    def finish(self) -> tuple[str, int, str]:
        """Return the name, the size and the digest of the file."""
        with translated("fill", self._path):
            os.ftruncate(self._fd, self._size_bytes)
            # A forked child may have the descriptor for long: the agent has to read the file.
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        return self._reserved.name, self._size_bytes, self._running.hexdigest()

    def append(self, view: memoryview) -> None:
        """Write bytes at the end.

        Raises:
            StorageError: RAM has no room.
            AgentUnavailableError: there is no agent.
        """
        end = self._size_bytes + len(view)
        if end > self._reserved.size_bytes:
            # Doubled at first, so that a small file does not take a whole block.
            step = min(self._reserved.size_bytes, self._session.block_size_bytes)
            room_bytes = max(end, self._reserved.size_bytes + step)
            self._reserved = self._reserve(room_bytes, self._reserved.name)
        with translated("fill", self._path):
            while self._size_bytes < end:
                rest = view[len(view) - (end - self._size_bytes) :]
                self._size_bytes += os.write(self._fd, rest)
        self._running.update(view)

    def _reserve(self, size_bytes: int, name: str | None) -> protocol.Reserved:
        message = protocol.Reserve(size_bytes=size_bytes, name=name)
        return self._session.agent.call_agent("reserve", message, protocol.Reserved)


@contextlib.contextmanager
def _held_in_ram(place: str) -> Iterator[str | None]:
    """Yield the path of a file's verified bytes in RAM, which are not recycled meanwhile.

    Yields:
        None where RAM does not have the newest save to `place`, or they are damaged.

    Raises:
        CheckpointDamagedError: they are damaged, and the file is not written yet.
    """
    session = _session()
    answer = _find(session, place)
    data = data_path(session.agent.folder, answer.name or "none")
    fd = -1
    if answer.name is not None:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield str(data) if fd >= 0 and _is_good(session, fd, data, answer, place) else None
    finally:
        if fd >= 0:
            os.close(fd)


def _find(session: _Session, place: str) -> protocol.FoundFile:
    if session.agent.holds_something():
        try:
            message = protocol.FilesAt(paths=[place])
            return session.agent.call_agent("find", message, protocol.FoundFile)
        except HoldfastError as error:
            log.warning("load %s: RAM is not looked at: %s", place, error)
    return protocol.FoundFile()


def _is_good(session: _Session, fd: int, data: Path, found: protocol.FoundFile, place: str) -> bool:
    """Lock a file in RAM, and return whether it is still the one that was found, undamaged."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(data.stat(), os.fstat(fd)):
            return False
    except (BlockingIOError, FileNotFoundError):
        # Its memory was recycled meanwhile.
        return False
    size_bytes = os.fstat(fd).st_size
    running = xxhash.xxh3_128()
    if size_bytes:
        with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as pages, memoryview(pages) as view:
            # This call releases the GIL, which `xxh3_128_hexdigest` does not.
            running.update(view)
    actual = running.hexdigest()
    if actual == found.digest:
        return True
    text = f"load {place}: expected digest {found.digest} in RAM, found {actual}"
    if found.is_pending:
        raise CheckpointDamagedError(f"{text}; the file is not written: load an older one")
    log.error("%s; the file is read", text)
    with contextlib.suppress(HoldfastError):
        message = protocol.Abandon(name=data.name)
        session.agent.call_agent("abandon", message, protocol.Done)
    return False


def _await_write(place: str) -> None:
    """Wait until what RAM has for a path is written there."""
    if _flushed(_session(), place):
        raise StorageError(f"load {place}: its newest save is in RAM and cannot be written there")


def _flushed(session: _Session, place: str | None) -> int:
    """Wait for files, those of `place` or all, until each is written or an attempt failed."""
    if not session.agent.holds_something():
        return 0
    first: dict[str, int] | None = None
    errors: dict[str, str] = {}
    last_bytes, deadline = -1, 0.0
    while True:
        state = session.agent.call_agent("writes", protocol.FilesAsked(), protocol.WriteState)
        now = session.clock.monotonic()
        if state.written_bytes != last_bytes:
            last_bytes, deadline = state.written_bytes, now + STALLED_SECS
        waiting = [file for file in state.pending if place is None or place in file.paths]
        if first is None:
            first = {file.name: file.attempts for file in waiting}
        ours = [file for file in waiting if file.name in first]
        errors |= {file.name: file.error for file in ours if file.attempts > first[file.name]}
        for file in state.lost:
            if file.name not in session.lost and (place is None or place in file.paths):
                errors[file.name] = file.error
        session.lost |= {file.name for file in state.lost}
        is_settled = all(file.name in errors for file in ours)
        if not is_settled and now > deadline:
            errors[""] = f"nothing was written for {STALLED_SECS:.0f} s"
            is_settled = True
        if is_settled:
            for error in errors.values():
                log.error("flush: %s", error)
            return 1 if errors else 0
        session.clock.sleep(POLL_SECS)


def _convert_file(source: Path, to: Path) -> None:
    check_place(to)
    with _held_in_ram(str(source)) as held:
        data = Path(held) if held is not None else source
        if source.is_symlink() or not zipfile.is_zipfile(data):
            raise InvalidArgumentError(
                f"{source}: expected a file of torch.save, found another; one in MindIO's own "
                "format is converted by mindio_acp.convert"
            )
        with data.open("rb") as file, new_file(to, SystemClock()) as fd:
            copy_bytes(file.fileno(), fd)


def _check(
    callback: Callback,
    expected: Mapping[str, int],
    user_context: Any,
    timeout_secs: float,
    clock: Clock,
) -> None:
    deadline = clock.monotonic() + timeout_secs
    secs = POLL_SECS
    while True:
        counts = {folder: finished_files(Path(folder)) for folder in expected}
        is_last = clock.monotonic() >= deadline
        if counts == dict(expected) or is_last:
            break
        clock.sleep(min(secs, max(0.0, deadline - clock.monotonic())))
        secs = min(2 * secs, CHECK_SECS_MAX)
    result = 0
    if counts != dict(expected):
        result = CHECK_FAILED
        log.error(
            "checker: after %g s expected whole files %s, found %s", timeout_secs, expected, counts
        )
    try:
        callback(result, user_context)
    except BaseException:
        log.exception("checker: the callback failed")
