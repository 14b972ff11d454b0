"""Files in RAM: memory on a tmpfs that is reserved, filled by trainers, sealed, and recycled.

Below one folder, `data/NAME` has the bytes and `records/NAME` says what they are. The file system
is the state, so that the next agent adopts what a killed one has left:

- data without a record, locked: a trainer fills it;
- data without a record, not locked: its trainer died, or has not locked it yet;
- data with a record that has pending paths: to be written, and never recycled, unless a later save
  to each of them is in RAM and room is needed;
- data with a record without pending paths: it may be recycled, unless a reader has it locked.

Memory is recycled by renaming, because pages that exist are filled faster than fresh ones. Owned by
the agent's event loop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.clock import Clock
from holdfast.errors import InvalidArgumentError, ObjectNotFoundError, OutOfSpaceError
from holdfast.interop.mindio.file_agent.file_at_path import file_at
from holdfast.interop.mindio.file_agent.protocol import (
    FileTarget,
    FoundFile,
    RamFileRecord,
    Reserved,
    Seal,
    WrittenFile,
)
from holdfast.local_agent.messages import decode
from holdfast.local_agent.place import is_file_locked, memory_left_bytes, replace_file

DATA = "data"
RECORDS = "records"
LOCK_SECS = 60.0
"""After this time, a reserved file that no process has locked belongs to none."""


def data_path(folder: Path, name: str) -> Path:
    """Return the path of a file's bytes in an agent's folder."""
    return folder / DATA / name


@dataclass(kw_only=True)
class RamFile:
    """A sealed file. `pending` are the paths that it does not have yet."""

    number: int
    name: str
    size_bytes: int
    digest: str
    pending: dict[str, FileTarget] = field(default_factory=dict)
    written: dict[str, WrittenFile] = field(default_factory=dict)
    attempts: int = 0
    error: str = ""
    used: float = 0.0

    def as_record(self) -> RamFileRecord:
        """Return what the next agent needs."""
        return RamFileRecord(
            number=self.number,
            name=self.name,
            size_bytes=self.size_bytes,
            digest=self.digest,
            pending=[*self.pending.values()],
            written=[*self.written.values()],
        )


class RamFiles:
    """The files below `folder`, at most `capacity_bytes` of them together."""

    def __init__(self, folder: Path, capacity_bytes: int, clock: Clock) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._sizes: dict[str, int] = {}
        self._unsealed: dict[str, float] = {}
        self._sealed: dict[str, RamFile] = {}
        self._newest: dict[str, RamFile] = {}
        for name in (DATA, RECORDS):
            (folder / name).mkdir(mode=0o700, exist_ok=True)

    @property
    def used_bytes(self) -> int:
        """The bytes of all files, whatever they hold."""
        return sum(self._sizes.values())

    def sealed_files(self) -> list[RamFile]:
        """Return the sealed files, the oldest first."""
        return sorted(self._sealed.values(), key=lambda file: file.number)

    def pending_files(self) -> list[RamFile]:
        """Return the files that are not at all of their paths, the oldest first."""
        return [file for file in self.sealed_files() if file.pending]

    def is_newest(self, file: RamFile, path: str) -> bool:
        """Return whether no later file is for `path`."""
        return self._newest.get(path) is file

    def adopt_files(self) -> None:
        """Take over what an earlier agent had."""
        for path in (self.folder / DATA).iterdir():
            self._sizes[path.name] = path.stat().st_size
        for path in (self.folder / RECORDS).iterdir():
            try:
                record = decode(path.read_bytes(), RamFileRecord)
            except (msgspec.DecodeError, UnicodeDecodeError):
                record = None
            # A process that was killed while it replaced a record left one with another name.
            if (
                record is None
                or record.name != path.name
                or self._sizes.get(record.name, -1) < record.size_bytes
            ):
                path.unlink()
                continue
            self._sealed[record.name] = RamFile(
                number=record.number,
                name=record.name,
                size_bytes=record.size_bytes,
                digest=record.digest,
                pending={target.path: target for target in record.pending},
                written={copy.path: copy for copy in record.written},
            )
        for file in self.sealed_files():
            self._newest |= dict.fromkeys(file.written, file)
        for awaited in {path for file in self._sealed.values() for path in file.pending}:
            self._find_newest(awaited)
        now = self._clock.monotonic()
        self._unsealed = {name: now for name in self._sizes if name not in self._sealed}

    def reserve_file(self, size_bytes: int) -> Reserved:
        """Return a file of at least `size_bytes` that is not sealed; its pages may not exist yet.

        Raises:
            OutOfSpaceError: what is in RAM is not written yet, and there is no room for more.
        """
        name = self._clock.new_token()
        superseded = next(self._recyclable(superseded_only=True), None)
        recycled = superseded or (None if self._has_room(size_bytes) else self._oldest())
        if recycled is not None:
            self._forget(recycled)
            os.rename(self._data(recycled), self._data(name))
            self._sizes[name] = self._sizes.pop(recycled)
        else:
            self._make_room(size_bytes)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(self._data(name), flags, 0o600))
            self._sizes[name] = 0
        self._unsealed[name] = self._clock.monotonic()
        try:
            return self.extend(name, size_bytes)
        except OutOfSpaceError:
            self.remove_file(name)
            raise

    def extend(self, name: str, size_bytes: int) -> Reserved:
        """Count a file that is not sealed as one of at least `size_bytes`.

        Raises:
            OutOfSpaceError: as `reserve`.
            ObjectNotFoundError: there is no such file: the agent took it for one of a dead trainer.
        """
        if name not in self._unsealed:
            raise ObjectNotFoundError(f"fill file {name} in RAM: it was given up; save again")
        if size_bytes > self._sizes[name]:
            self._make_room(size_bytes - self._sizes[name])
            self._sizes[name] = size_bytes
        return Reserved(name=name, size_bytes=self._sizes[name])

    def allocate_file(self, name: str) -> None:
        """Make a file's pages exist. Called on any thread.

        Raises:
            OSError: the tmpfs is full.
        """
        fd = os.open(self._data(name), os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, max(1, self._sizes[name]))
        finally:
            os.close(fd)

    def seal_file(self, message: Seal) -> RamFile:
        """Take a file that a trainer has filled.

        Of several that are to be written to a path the one with the latest marker is the newest.
        The earlier ones stay until it is at the path, or cannot be written.

        Raises:
            ObjectNotFoundError: there is no such file.
            InvalidArgumentError: it has another size.
        """
        sealed = self._sealed.get(message.name)
        if sealed is not None:
            return sealed
        if message.name not in self._unsealed:
            raise ObjectNotFoundError(f"seal file {message.name} in RAM: there is none; save again")
        size_bytes = self._data(message.name).stat().st_size
        if size_bytes != message.size_bytes:
            raise InvalidArgumentError(
                f"seal file {message.name} in RAM: expected {message.size_bytes} bytes, found "
                f"{size_bytes}"
            )
        file = RamFile(
            number=1 + max((other.number for other in self._sealed.values()), default=0),
            name=message.name,
            size_bytes=message.size_bytes,
            digest=message.digest,
            pending={target.path: target for target in message.targets},
            used=self._clock.monotonic(),
        )
        self._put_record(file)
        del self._unsealed[file.name]
        self._sizes[file.name] = size_bytes
        self._sealed[file.name] = file
        for path in file.pending:
            older = self._newest.get(path)
            if older is not None and older.written.pop(path, None) is not None:
                self._put_record(older)
            self._find_newest(path)
        return file

    def add_read(self, name: str, size_bytes: int, digest: str, written: WrittenFile) -> None:
        """Take a file that was read from its path."""
        target = FileTarget(path=written.path, marker="")
        file = self.seal_file(
            Seal(name=name, size_bytes=size_bytes, digest=digest, targets=[target])
        )
        self.mark_written(file, written)

    def mark_written(self, file: RamFile, written: WrittenFile) -> None:
        """Note that a file is at one of its paths, instead of earlier ones."""
        target = file.pending.pop(written.path, None)
        if self.is_newest(file, written.path):
            file.written[written.path] = written
        file.error = ""
        self._put_record(file)
        if target is not None:
            self._cancel_earlier(target)

    def mark_replaced(self, file: RamFile, path: str) -> None:
        """Note that a later file than this one is at one of its paths."""
        target = file.pending[path]
        self._cancel(file, path)
        self._cancel_earlier(target)
        self._find_newest(path)

    def drop_target(self, file: RamFile, path: str) -> None:
        """Give up writing a file to one of its paths; an earlier one is written there instead."""
        self._cancel(file, path)
        self._find_newest(path)

    def waiting_for(self, path: str) -> list[RamFile]:
        """Return the files that are to be written to a path."""
        return [file for file in self._sealed.values() if path in file.pending]

    def forget_outdated(
        self, path: str, outdated: WrittenFile | FileTarget, *, is_replaced: bool
    ) -> None:
        """Forget a file that `is_current` found to be none, unless a save has come meanwhile."""
        if self.held_at(path) != outdated:
            return
        file = self._newest[path]
        if is_replaced and path in file.pending:
            self.mark_replaced(file, path)
        else:
            self.drop_target(file, path)

    def held_at(self, path: str) -> WrittenFile | FileTarget | None:
        """Return by which RAM has a file for a path: `is_current` checks whether it still has."""
        file = self._newest.get(path)
        return None if file is None else file.pending.get(path) or file.written[path]

    def find_file(self, path: str) -> FoundFile:
        """Return what RAM has of a path."""
        file = self._newest.get(path)
        if file is None:
            return FoundFile()
        file.used = self._clock.monotonic()
        target = file.pending.get(path)
        return FoundFile(
            name=file.name,
            size_bytes=file.size_bytes,
            digest=file.digest,
            is_pending=target is not None,
        )

    def remove_file(self, name: str) -> None:
        """Free a file's memory; one that is the newest for a path that it does not have stays."""
        file = self._sealed.get(name)
        if name in self._sizes and not (file is not None and self._is_needed(file)):
            self._forget(name)
            self._data(name).unlink(missing_ok=True)
            del self._sizes[name]

    def _is_needed(self, file: RamFile) -> bool:
        return any(self.is_newest(file, path) for path in file.pending)

    def _find_newest(self, path: str) -> None:
        """Note which file is the newest one for a path: of the pending ones the latest."""
        waiting = self.waiting_for(path)
        if waiting:
            self._newest[path] = max(waiting, key=lambda file: file.pending[path].marker)
        elif path in self._newest and path not in self._newest[path].written:
            del self._newest[path]

    def _cancel_earlier(self, target: FileTarget) -> None:
        for file in self.waiting_for(target.path):
            if file.pending[target.path].marker < target.marker:
                self._cancel(file, target.path)

    def _cancel(self, file: RamFile, path: str) -> None:
        """Forget one of a file's paths, and remove the marker there."""
        _remove_marker(file.pending.pop(path, None))
        file.written.pop(path, None)
        self._put_record(file)

    def _forget(self, name: str) -> None:
        self._record(name).unlink(missing_ok=True)
        self._unsealed.pop(name, None)
        file = self._sealed.pop(name, None)
        if file is not None:
            self._newest = {path: of for path, of in self._newest.items() if of is not file}
            for target in file.pending.values():
                _remove_marker(target)
            file.pending.clear()

    def _has_room(self, size_bytes: int) -> bool:
        return size_bytes <= self._room()[0]

    def _room(self) -> tuple[int, str]:
        """Return how many more bytes fit, and what bounds them."""
        tmpfs = os.statvfs(self.folder)
        free = tmpfs.f_bavail * tmpfs.f_frsize
        bounds = [
            (
                self.capacity_bytes - self.used_bytes,
                f"{self.used_bytes} of {self.capacity_bytes} bytes are in use; raise "
                "memfs.data_block_pool_capacity_in_gb, or save less often",
            ),
            (free, f"its file system has {free} left; enlarge it, or set HOLDFAST_RAM to another"),
        ]
        memory = memory_left_bytes()
        if memory is not None:
            bounds.append((memory, f"the cgroup's memory limit leaves {memory}; raise it"))
        return min(bounds)

    def _make_room(self, size_bytes: int) -> None:
        while not self._has_room(size_bytes):
            oldest = self._oldest()
            if oldest is None:
                waiting = sum(file.size_bytes for file in self.pending_files())
                raise OutOfSpaceError(
                    f"reserve {size_bytes} bytes of RAM in {self.folder}, where {waiting} are not "
                    f"written yet: {self._room()[1]}"
                )
            self.remove_file(oldest)

    def _oldest(self) -> str | None:
        return next(self._recyclable(), None)

    def _recyclable(self, *, superseded_only: bool = False) -> Iterator[str]:
        """Yield the files that may be removed, those without a path first, then the least used."""
        now = self._clock.monotonic()
        free = [file for file in self._sealed.values() if not file.pending]
        names = [file.name for file in free if not file.written]
        if not superseded_only:
            names += [n for n, since in self._unsealed.items() if now - since > LOCK_SECS]
            kept = sorted((file for file in free if file.written), key=lambda file: file.used)
            names += [file.name for file in kept]
            waiting = (file for file in self.pending_files() if not self._is_needed(file))
            names += [file.name for file in waiting]
        yield from (name for name in names if not is_in_use(self._data(name)))

    def _put_record(self, file: RamFile) -> None:
        """Store a record; a file that was removed meanwhile has none."""
        if file.name in self._sealed or file.name in self._unsealed:
            replace_file(self._record(file.name), msgspec.json.encode(file.as_record()))

    def _data(self, name: str) -> Path:
        return data_path(self.folder, name)

    def _record(self, name: str) -> Path:
        return self.folder / RECORDS / name


def _remove_marker(target: FileTarget | None) -> None:
    if target is not None:
        with contextlib.suppress(OSError):
            os.unlink(target.marker)


def is_in_use(data: Path) -> bool:
    """Return whether a process fills the file in RAM, or reads it."""
    return is_file_locked(data, is_shared=False)


def is_current(held: WrittenFile | FileTarget) -> bool:
    """Return whether no other program, and no save without the agent, has replaced a file.

    It looks at the file's storage, and takes as long as that does.
    """
    if isinstance(held, FileTarget):
        return os.path.lexists(held.marker)
    with contextlib.suppress(OSError):
        return file_at(Path(held.path)) == held
    return False
